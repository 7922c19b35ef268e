"""Op tables: followed record by record in NumPy, they do what the plan says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from numpy_records import tiles_of
from random_problems import Case, cases, expected_buffers, source_buffers

import shardfly_jax as sf
from shardfly_jax.sharding import optable, records as r
from shardfly_jax.sharding.formats import Conversion, conversion, itemsize, np_dtype
from shardfly_jax.sharding.language import Expr
from shardfly_jax.sharding.layouts import Layout
from shardfly_jax.sharding.moves import Key
from shardfly_jax.sharding.optable import Flag, Inbox, OpTable, OpTables, Phase

BITS2 = conversion("bfloat16", (), "bfloat16")


def strided(flat: np.ndarray, offset: int, extents: list[int], strides: list[int], nbytes: int) -> np.ndarray:
    return np.ndarray(extents, f"V{nbytes}", flat.view(np.uint8), offset, strides)


def check_tile(record: np.ndarray, rule: Conversion, at: list[int], strides: list[list[int]], count: list[int]) -> None:
    """The kernel's assumptions about the tiles of each kind."""
    kind = record[r.KIND]
    if kind in (r.ROWS, r.CAST):
        reads, writes = r.pieces(rule)
        assert strides[0][1] == 16 * reads
        assert strides[1][1] == 16 * writes
        assert all(x % 16 == 0 for x in (*at, strides[0][0], strides[1][0]))
        assert count[0] * count[1] * 16 * max(reads, writes) <= r.TILE_NBYTES
    if kind == r.TRANSPOSE:
        read, write = itemsize(rule.source), itemsize(rule.target)
        assert strides[0][0] == read
        assert strides[1][1] == write
        assert all(x % 16 == 0 for x in (*at, strides[0][1], strides[1][0], count[0] * read, count[1] * write))
        assert count[0] <= r.TRANSPOSE_ROWS
        assert count[1] * write <= r.TRANSPOSE_ROW_NBYTES


def move_tile(
    record: np.ndarray,
    rule: Conversion,
    at: list[int],
    strides: list[list[int]],
    count: list[int],
    source: np.ndarray | None,
    target: np.ndarray,
) -> None:
    read, write = itemsize(rule.source), itemsize(rule.target)
    if record[r.KIND] in (r.ROWS, r.CAST):  # groups of elements that lie one after the other
        group = 16 // min(read, write)
        count = [count[0], count[1] * group]
        strides = [[strides[0][0], read], [strides[1][0], write]]
    into = strided(target, at[1], count, strides[1], write)
    if source is None:
        value = rule.apply(np.empty(count, np_dtype(rule.source)))
    else:
        value = rule.apply(strided(source, at[0], count, strides[0], read).copy().view(np_dtype(rule.source)))
    into[...] = np.ascontiguousarray(value).view(f"V{write}")


def follow(tables: OpTables, memory: dict[Key, np.ndarray]) -> None:
    """Executes all tables, one tile at a time: sends first, then what may go on of the rest."""
    counters = [np.zeros(n, int) for n in tables.n_counters]
    queues = {key: list(table.words) for key, table in tables.tables.items()}
    for (device, phase), table in tables.tables.items():
        ends = table.words[:, r.END_TILE]
        assert np.all(np.diff(ends) > 0)
        assert ends[-1] == table.n_tiles
        assert np.array_equal(table.words[1:, r.FIRST_TILE], ends[:-1])
        if phase is Phase.SEND:
            check_what_it_waits_for(tables, device)
        assert all(tables.device_of[at] == device for at, _ in table.moves if at >= 0)
    while any(queues.values()):
        before = sum(map(len, queues.values()))
        for (device, phase), records in queues.items():
            table = tables.tables[device, phase]
            while records:
                record = records[0]
                if record[r.WAIT] >= 0 and counters[device][record[r.WAIT]] < record[r.WAIT_COUNT]:
                    break
                execute(records.pop(0), table, tables, memory, counters)
        assert sum(map(len, queues.values())) < before, "nothing can go on"


def check_followed(case: Case, plan: sf.Plan, tables: OpTables) -> None:
    """Tables of a random case do what its mapping means."""
    want = expected_buffers(case, plan)
    memory = {key: np.full(flat.nbytes, 0xA5, np.uint8) for key, flat in want.items()} | source_buffers(case, plan)
    follow(tables, memory)
    for key, flat in want.items():
        assert memory[key].tobytes() == flat.tobytes()


def check_what_it_waits_for(tables: OpTables, device: int) -> None:
    """*send* waits for nothing but what it has written before, on its own device."""
    sent = tables.tables[device, Phase.SEND]
    for record in sent.words[sent.words[:, r.WAIT] >= 0]:
        for (other, phase), table in tables.tables.items():
            if Inbox(device) not in table.buffers:
                continue
            raises = (table.words[:, r.SIGNAL] == record[r.WAIT]) & (
                table.words[:, r.SIGNAL_INBOX] == table.buffers.index(Inbox(device))
            )
            assert not raises.any() or (other, phase) == (device, Phase.SEND)
            assert np.all(table.words[raises, r.END_TILE] <= record[r.FIRST_TILE])


def execute(
    record: np.ndarray, table: OpTable, tables: OpTables, memory: dict[Key, np.ndarray], counters: list[np.ndarray]
) -> None:
    source, target = (table.buffers[record[k]] if record[k] >= 0 else None for k in (r.SOURCE, r.TARGET))
    rule = tables.conversions[record[r.CONVERT]]
    for at, strides, count in tiles_of(record):
        check_tile(record, rule, at, strides, count)
        move_tile(record, rule, at, strides, count, None if source is None else memory[source], memory[target])  # type: ignore[index]
        if record[r.SIGNAL] >= 0:
            state = table.buffers[record[r.SIGNAL_INBOX]]
            assert isinstance(state, Inbox)
            counters[state.device][record[r.SIGNAL]] += 1
            assert record[r.REMOTE] in (0, 1)


@pytest.mark.parametrize("devices", [1, 3])
@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(case=cases(max_depth=3))
def test_following_the_records_gives_what_the_mapping_means(case: Case, devices: int) -> None:
    plan = case.plan()
    tables = optable.make_tables(plan, {rank: rank % devices for rank in range(plan.ranks)}, lambda key: key)
    check_followed(case, plan, tables)


@pytest.mark.parametrize("devices", [1, 2, 5])
@settings(max_examples=30, suppress_health_check=list(HealthCheck))
@given(case=cases(max_depth=2))
def test_every_writer_has_a_flag_of_its_own_in_the_states_it_writes_to(case: Case, devices: int) -> None:
    plan = case.plan()
    tables = optable.make_tables(plan, {rank: rank % devices for rank in range(plan.ranks)}, lambda key: key)
    words = [tables.flag(kind, device) for kind in Flag for device in range(len(tables.devices))]
    assert len({*words, *(word + 1 for word in words)}) == 2 * len(words)
    assert max(words) + 2 == tables.counters
    for (device, phase), table in tables.tables.items():
        for target in tables.targets(device, phase):
            assert device in tables.writers(target, phase)
        remote = {bool(record[r.REMOTE]) for record in table.words}
        assert remote == {target != device for target in tables.targets(device, phase)}


REGIONS = {
    "a copy": (BITS2, r.Region((r.Dim(64, 2, 2),), 0, 0), {r.ROWS: 64}),
    "a copy that starts and ends inside a piece": (
        BITS2,
        r.Region((r.Dim(61, 2, 2),), 6, 22),
        {r.ROWS: 56, r.ELEMENTS: 5},
    ),
    "a copy whose sides never align together": (BITS2, r.Region((r.Dim(64, 2, 2),), 0, 2), {r.ELEMENTS: 64}),
    "rows of odd length": (BITS2, r.Region((r.Dim(4, 70, 70), r.Dim(16, 2, 2)), 0, 0), {r.ELEMENTS: 64}),
    "a cast": (conversion("float32", (), "bfloat16"), r.Region((r.Dim(24, 4, 2),), 0, 0), {r.CAST: 24}),
    "a ragged cast": (
        conversion("float32", (), "bfloat16"),
        r.Region((r.Dim(30, 4, 2),), 8, 4),
        {r.CAST: 24, r.ELEMENTS: 6},
    ),
    "a transpose": (BITS2, r.Region((r.Dim(32, 2, 128), r.Dim(64, 64, 2)), 0, 0), {r.TRANSPOSE: 2048}),
    "a ragged transpose": (
        BITS2,
        r.Region((r.Dim(29, 2, 128), r.Dim(60, 64, 2)), 6, 4),
        {r.TRANSPOSE: 24 * 48, r.ELEMENTS: 29 * 60 - 24 * 48},
    ),
    "a transpose of rows of odd length": (
        BITS2,
        r.Region((r.Dim(32, 2, 128), r.Dim(64, 66, 2)), 0, 0),
        {r.TRANSPOSE_ELEMENTS: 2048},
    ),
    "a transpose of rows of odd length, of few columns": (
        BITS2,
        r.Region((r.Dim(32, 2, 62), r.Dim(31, 66, 2)), 0, 0),
        {r.ELEMENTS: 992},
    ),
    "a transpose of rows of odd length, of 8 bytes": (
        conversion("int64", (), "int64"),
        r.Region((r.Dim(32, 8, 264), r.Dim(33, 264, 8)), 0, 0),
        {r.ELEMENTS: 1056},
    ),
}


@pytest.mark.parametrize("name", REGIONS)
def test_the_kind_of_a_record_follows_from_alignment(name: str) -> None:
    rule, region, want = REGIONS[name]
    have: dict[int, int] = {}
    for record in r.records_of(region, rule, fills=False):
        n = int(np.prod(record[r.EXTENT : r.EXTENT + 5]))
        if record[r.KIND] in (r.ROWS, r.CAST):
            n *= 16 // min(itemsize(rule.source), itemsize(rule.target))
        have[int(record[r.KIND])] = have.get(int(record[r.KIND]), 0) + n
    assert have == want


def whole(shape: tuple[int, ...], dtype: str) -> Layout:
    """All of a tensor on one rank."""
    return Layout(shape, dtype, {0: [(0, n) for n in shape]})


def copied(length: int, start: int) -> sf.Plan:
    """One tensor of bytes from rank 0 to rank 1, without its first elements."""
    source, target = {"w": whole((length + start,), "uint8")}, {"t": whole((length,), "uint8")}
    return sf.make_plan(source, target, sf.Mapping({"t": sf.src("w")[start:]}))


def test_dimensions_that_the_kernel_cannot_count_are_a_reason_against_it() -> None:
    """Single elements of such tensors, which no test has memory for; pieces of 16 bytes are fewer."""
    long_ = (1 << 32) + 64
    assert optable.why_unsupported(copied(long_, 3)) == (
        "a move to 't' of rank 1 has a dimension of 4,294,967,360 elements, but the kernel counts to 2,147,483,647"
    )
    assert optable.why_unsupported(copied(long_, 16)) is None
    assert optable.why_unsupported(copied((1 << 31) - 1, 3)) is None


def test_rows_that_records_join_to_what_the_kernel_cannot_count_are_a_reason_against_it() -> None:
    shape = (1 << 20, 1 << 12)
    targets = {"t": whole(shape, "float8_e4m3fn"), "s": whole((shape[0], 1), "float32")}
    mapping = sf.Mapping({"t": sf.src("w").quantize(sf.formats.Fp8Channel()), "s": sf.scale_of("t")})
    plan = sf.make_plan({"w": whole(shape, "bfloat16")}, targets, mapping)
    assert "has a dimension of 4,294,967,296 elements" in str(optable.why_unsupported(plan))


@pytest.mark.parametrize(
    ("shape", "dtype", "expr", "target", "kind"),
    [
        ((64, 4100), "bfloat16", sf.src("w").rearrange("a b -> b a"), (4100, 64), r.TRANSPOSE_ELEMENTS),
        ((64, 4104), "bfloat16", sf.src("w").rearrange("a b -> b a"), (4104, 64), r.TRANSPOSE),
        ((4100, 64), "float32", sf.src("w").rearrange("a b -> b a"), (64, 4100), r.TRANSPOSE_ELEMENTS),
        ((16, 4096), "bfloat16", sf.src("w")[3:, 5:], (13, 4091), r.ELEMENTS),
        ((4096, 1001), "bfloat16", sf.src("w"), (4096, 1001), r.ROWS),
    ],
)
def test_what_the_docs_say_takes_single_elements_does(
    shape: tuple[int, int], dtype: str, expr: Expr, target: tuple[int, int], kind: int
) -> None:
    """`docs/design/persistent-kernel.md`."""
    mapping = sf.Mapping({"t": expr})
    plan = sf.make_plan({"w": whole(shape, dtype)}, {"t": whole(target, "bfloat16")}, mapping, allow_cast=("*",))
    tables = optable.make_tables(plan, {0: 0, 1: 0}, lambda key: key).tables
    assert {int(found) for table in tables.values() for found in table.words[:, r.KIND]} == {kind}
