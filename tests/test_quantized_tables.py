"""Op tables of plans that quantize: followed record by record in NumPy, they do what the plan says, and never block."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from checks import cut, fresh
from hypothesis import HealthCheck, given, settings
from numpy_records import execute
from random_problems import Case, expected_buffers, source_buffers
from random_quantized import quantized_cases

import shardfly_jax as sf
from shardfly_jax.sharding import optable, quantized_records as q, records as r, slot_chunks
from shardfly_jax.sharding.families import TargetTree
from shardfly_jax.sharding.formats import Conversion, Encode
from shardfly_jax.sharding.layouts import Layout
from shardfly_jax.sharding.moves import Key
from shardfly_jax.sharding.ops import Inbox
from shardfly_jax.sharding.optable import OpTables, Phase
from shardfly_jax.sharding.presets import triton_mxfp4
from shardfly_jax.sharding.quantization import Fp8Block, Fp8Channel

Memory = dict[Key | Inbox, np.ndarray]


def follow(tables: OpTables, memory: Memory) -> None:
    """Executes all tables record by record, each device's in order, finishes after sends, and waits for counters."""
    counters = [np.zeros(n, int) for n in tables.n_counters]
    queues = {
        device: [
            (record, table)
            for phase in (Phase.SEND, Phase.FINISH)
            if (table := tables.tables.get((device, phase))) is not None
            for record in table.words
        ]
        for device in range(len(tables.devices))
    }
    while any(queues.values()):
        before = sum(map(len, queues.values()))
        for queue in queues.values():
            while queue:
                record, table = queue[0]
                if record[r.WAIT] >= 0:
                    inbox = table.buffers[record[r.WAIT_INBOX]]
                    assert isinstance(inbox, Inbox)
                    if counters[inbox.device][record[r.WAIT]] < record[r.WAIT_COUNT]:
                        break
                execute(record, tables.conversions[record[r.CONVERT]], lambda k, table=table: memory[table.buffers[k]])
                for word, at in optable.SIGNALS:
                    if record[word] >= 0:
                        inbox = table.buffers[record[at]]
                        assert isinstance(inbox, Inbox)
                        counters[inbox.device][record[word]] += r.n_tiles(record)
                queue.pop(0)
        assert sum(map(len, queues.values())) < before, "nothing can go on"


@pytest.mark.hypothesis
@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("chunk_nbytes", [8 << 20, 64])
def test_following_the_records_quantizes_as_the_mapping_means(
    devices: int, chunk_nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_chunks, "CHUNK_NBYTES", chunk_nbytes)

    @settings(max_examples=60, suppress_health_check=list(HealthCheck))
    @given(quantized_cases())
    def run(case: Case) -> None:
        check_following(case, devices)

    run()


def check_following(case: Case, devices: int) -> None:
    plan = case.plan()
    tables = optable.make_tables(plan, {rank: rank % devices for rank in range(plan.ranks)}, lambda key: key)
    want = expected_buffers(case, plan)
    memory: Memory = {key: np.full(flat.nbytes, 0xA5, np.uint8) for key, flat in want.items()}
    memory |= source_buffers(case, plan)
    memory |= {Inbox(d): np.zeros(tables.counters + n, np.uint32) for d, n in enumerate(tables.n_counters)}
    follow(tables, memory)
    for key, flat in want.items():
        assert memory[key].tobytes() == flat.tobytes()


def test_copies_of_one_row_do_not_pass_for_the_rows_of_their_scales(rng: np.random.Generator) -> None:
    """Two ranks that encode the same row count as many blocks as the two rows whose scales one rank holds."""
    mapping = sf.Mapping({
        "t": sf.src("w").rearrange("a c -> a 1 c").take([0, 0], axis=1).quantize(Fp8Channel()), "s": sf.scale_of("t"),
    })  # fmt: skip
    rows, copies = [(0, 1), (1, 4)], [(0, 1), (1, 2)]
    codes = Layout((4, 2, 2), "float8_e4m3fn", dict(enumerate((*at, (0, 2)) for at in itertools.product(rows, copies))))
    scales = Layout((4, 2, 1), "float32", {0: [(0, 2), (0, 2), (0, 1)], 1: [(2, 4), (0, 2), (0, 1)]})
    tree = TargetTree(name="rollout", tensors={"t": codes, "s": scales}, mapping=mapping, ranks=4)
    check_following(Case({"w": fresh(rng, 4, 2)}, {"w": cut((4, 2), "float32")}, 1, [tree]), 1)


def dim(extent: int, read: int, write: int, side: int = 0, block: int = 1) -> q.SideDim:
    return q.SideDim(extent, read, write, side, block)


BF16 = Conversion("bfloat16", (Encode(Fp8Block()),), "float8_e4m3fn")
CODES_AND_SCALES = q.WRITES_CODES | q.STORES_SCALES
RECORDS = {
    "blocks of 128 x 128, transposed": (
        [dim(96, 256, 524288, 128), dim(128, 2, 4096, 0, 128), dim(32, 3145728, 128, 4), dim(128, 24576, 1, 0, 128)],
        CODES_AND_SCALES,
        (r.BLOCK_TRANSPOSE, [1, 1, 1, 12288, 4096], [128, 128], [128, 128]),
    ),
    "the same, of experts": (
        [dim(8, 1 << 28, 1 << 27, 4096), dim(2, 256, 524288, 9), dim(128, 2, 4096, 0, 128), dim(128, 24576, 1, 0, 128)],
        CODES_AND_SCALES,
        (r.BLOCK_TRANSPOSE, [1, 1, 8, 256, 128], [128, 128], [128, 128]),
    ),
    "blocks of 1 x 32 that follow each other": (
        [dim(4096, 64, 32, 1), dim(32, 2, 1, 0, 32)],
        CODES_AND_SCALES,
        (r.BLOCK_ROWS, [1, 1, 1, 1024, 128], [128, 128], [1, 32]),
    ),
    "rows of 512 that follow each other: each is four rows of a tile": (
        [dim(64, 1024, 512, 4), dim(512, 2, 1, 0, 512)],
        CODES_AND_SCALES,
        (r.BLOCK_ROWS, [1, 1, 1, 256, 128], [128, 128], [4, 128]),
    ),
    "rows that no tile holds": ([dim(64, 2, 4096, 4), dim(4096, 128, 1, 0, 4096)], CODES_AND_SCALES, None),
    "the same by way of slots": (
        [dim(64, 2, 4096, 4), dim(4096, 128, 1, 0, 4096)],
        q.READS_AMAX | q.WRITES_CODES,
        (r.BLOCK_TRANSPOSE, [1, 1, 1, 64, 4096], [128, 128], [1, 4096]),
    ),
    "blocks of 24 x 48: as many as fit": (
        [dim(4, 48, 24 * 192, 16), dim(24, 2, 192, 0, 24), dim(4, 9216, 48, 4), dim(48, 192, 1, 0, 48)],
        CODES_AND_SCALES,
        (r.BLOCK_TRANSPOSE, [1, 1, 1, 96, 192], [120, 96], [24, 48]),
    ),
    "rows of codes of odd length": ([dim(64, 2, 132, 4), dim(128, 128, 1, 0, 128)], CODES_AND_SCALES, None),
    "blocks narrower than a strip": (
        [dim(64, 2, 64, 64), dim(8, 8 * 128, 8, 4), dim(8, 128, 1, 0, 8)], CODES_AND_SCALES, None
    ),
    "every other element": ([dim(64, 4, 128, 4), dim(128, 256, 1, 0, 128)], CODES_AND_SCALES, None),
}  # fmt: skip


@pytest.mark.parametrize("name", RECORDS)
def test_blocks_become_tiles_where_alignment_and_size_allow(name: str) -> None:
    dims, role, want = RECORDS[name]
    record = q.block_record(q.SideRegion(tuple(dims), 0, 0, 0), BF16, role)
    if want is None:
        assert record is None
        return
    assert record is not None
    found = (
        record[r.KIND],
        record[r.EXTENT : r.EXTENT + 5],
        record[[r.TILE_3, r.TILE_4]],
        record[[r.BLOCK_3, r.BLOCK_4]],
    )
    assert (int(found[0]), *(part.tolist() for part in found[1:])) == want


FP4 = Conversion("bfloat16", (Encode(triton_mxfp4()),), "uint8")
OF_BYTE, NBYTES, BLOCKS = dim(2, 2, 0, 0, 2), dim(16, 4, 1, 0, 16), dim(3, 64, 16, 1)
PACKED_RECORDS = {
    "rows": ([dim(600, 192, 48, 3), BLOCKS, NBYTES, OF_BYTE], 0, ([1, 1, 1, 600, 3], [170, 3])),
    "columns, which neighbouring threads read together": (
        [dim(600, 2, 48, 3), dim(3, 38400, 16, 1), dim(16, 2400, 1, 0, 16), dim(2, 1200, 0, 0, 2)], 32,
        ([1, 1, 1, 3, 600], [3, 128]),
    ),
    "experts": ([dim(8, 1 << 20, 1 << 18, 99), dim(9, 192, 48, 3), BLOCKS, NBYTES, OF_BYTE], 0,
                ([1, 1, 8, 9, 3], [9, 3])),
    "codes that begin inside a piece": ([BLOCKS, NBYTES, OF_BYTE], 8, None),
    "rows of codes that do": ([dim(9, 192, 40, 3), BLOCKS, NBYTES, OF_BYTE], 0, None),
    "an edge block": ([dim(9, 32, 8, 1), dim(8, 4, 1, 0, 8), OF_BYTE], 0, None),
    "bytes that are apart": ([BLOCKS, dim(16, 4, 3, 0, 16), OF_BYTE], 0, None),
    "blocks of two runs": ([BLOCKS, dim(4, 64, 4, 0, 4), dim(4, 4, 1, 0, 4), OF_BYTE], 0, None),
}  # fmt: skip


@pytest.mark.parametrize("name", PACKED_RECORDS)
def test_whole_blocks_of_packed_codes_become_elements_where_alignment_allows(name: str) -> None:
    dims, write, want = PACKED_RECORDS[name]
    region = q.SideRegion(tuple(dims), 6, write, 0)
    assert q.block_record(region, FP4, CODES_AND_SCALES) is None
    record = q.packed_record(region, FP4, CODES_AND_SCALES)
    if want is None:
        assert record is None
        return
    assert record is not None
    assert record[r.KIND] == r.PACKED_BLOCKS
    assert (record[r.EXTENT : r.EXTENT + 5].tolist(), record[[r.TILE_3, r.TILE_4]].tolist()) == want
    of_byte, nbytes = sorted(dims, key=lambda dim: dim.write)[:2]
    assert record[r.SOURCE_STRIDE : r.SOURCE_STRIDE + 4].tolist() == [of_byte.read, 0, nbytes.read, 0]
    assert q.packed_record(region, BF16, CODES_AND_SCALES) is None, "a code per byte"
