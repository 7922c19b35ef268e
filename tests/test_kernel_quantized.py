"""The persistent kernel quantizes: its own code, run on a CPU, against the mapping's meaning, bit for bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import cut
from hypothesis import HealthCheck, given, settings, strategies as st
from kernel_interpreter import Fault
from kernel_jobs import Job, compile_transfer
from random_problems import Case, fill
from random_quantized import PACKED, Fp4Tensor, quantized_cases

import shardfly_jax as sf
from shardfly_jax import formats
from shardfly_jax.pallas_kernels import addresses as m, transfer
from shardfly_jax.sharding import optable, quantized_ops, quantized_records as q, records as r, slot_chunks
from shardfly_jax.sharding.families import TargetTree
from shardfly_jax.sharding.formats import Amax, Encode, ToScale, conversion, np_dtype
from shardfly_jax.sharding.grids import grid_shape
from shardfly_jax.sharding.optable import OpTables, Phase

RANDOM = settings(max_examples=8, suppress_health_check=list(HealthCheck))
SEEDS = st.integers(0, 2**32 - 1)
BLOCK_KINDS = {r.BLOCK_ROWS, r.BLOCK_TRANSPOSE}


@RANDOM
@given(quantized_cases(), st.integers(1, 3), st.booleans(), SEEDS)
def test_the_kernel_quantizes_as_the_mapping_means(case: Case, devices: int, in_step: bool, seed: int) -> None:
    job = Job(case, devices=devices)
    job.update(seed, in_step=in_step)
    job.check()


@RANDOM
@given(quantized_cases(among=PACKED), st.integers(1, 3), SEEDS)
def test_the_kernel_packs_codes_as_the_mapping_means(case: Case, devices: int, seed: int) -> None:
    job = Job(case, devices=devices)
    job.update(seed)
    job.check()


def matrix(
    format: formats.Format,
    shape: tuple[int, int],
    dtype: str = "bfloat16",
    *,
    turned: bool = True,
    sources: int = 1,
    axis: int = 0,
    replicas: int = 1,
    scales_turned: bool = False,
    values: np.ndarray | None = None,
    seed: int | None = None,
) -> Case:
    """One matrix, perhaps cut over source ranks and transposed on the way; each replica gets codes and scales."""
    array = fill(np.random.default_rng(seed), shape, dtype) if values is None else values
    value, to = (sf.src("w").rearrange("a b -> b a"), shape[::-1]) if turned else (sf.src("w"), shape)
    grid, scales = grid_shape(format, to, ((), ())), sf.scale_of("t")
    if scales_turned:
        grid, scales = grid[::-1], scales.rearrange("a b -> b a")
    held = {"w": cut(shape, dtype, axis, sources)}
    whole = {"t": (format.stored_shape(to), format.stored), "s": (grid, format.scale_dtype)}
    tensors = {
        name: sf.Layout(s, kind, {rank: [(0, n) for n in s] for rank in range(replicas)})
        for name, (s, kind) in whole.items()
    }
    tree = TargetTree(
        name="r", tensors=tensors, mapping=sf.Mapping({"t": value.quantize(format), "s": scales}), ranks=replicas
    )
    return Case({"w": array}, held, sources, [tree])


SIZED = [
    (formats.Fp8Block(), [128, 256, 40]), (formats.Fp8Block(rows=128, columns=32, scale="power_of_two"), [96, 160]),
    (formats.Fp8Block(rows=1, columns=128, scale="e8m0"), [128, 48, 256]), (formats.MxFp8(), [32, 64, 160]),
    (formats.Fp8Channel(), [64, 144, 272]), (formats.Int8Channel(), [64, 272]), (formats.Fp8Tensor(), [48, 272]),
    (formats.Fp8Block(rows=24, columns=48, formula="factor", floor=0.0), [48, 144]),
    (formats.triton_mxfp4(), [32, 48, 80]),
]  # fmt: skip


@st.composite
def matrices(draw: Callable) -> Case:
    """Matrices of one and several tiles in each direction, most of them aligned."""
    format, sizes = draw(st.sampled_from(SIZED))
    odd = draw(st.sampled_from([0, 0, 0, 4, 8]))
    rows, columns = draw(st.sampled_from(sizes)), draw(st.sampled_from(sizes)) + odd
    sources = draw(st.sampled_from([1, 1, 2]))
    return matrix(
        format, (rows, columns), draw(st.sampled_from(["bfloat16", "bfloat16", "float16", "float32"])),
        turned=draw(st.booleans()), sources=sources if rows % 2 == 0 else 1, replicas=draw(st.integers(1, 2)),
        scales_turned=draw(st.booleans()), seed=draw(SEEDS),
    )  # fmt: skip


@RANDOM
@given(matrices(), st.integers(1, 3), SEEDS)
def test_matrices_of_any_size_and_alignment_are_quantized(case: Case, devices: int, seed: int) -> None:
    job = Job(case, devices=devices)
    job.update(seed)
    job.check()


def records(job: Job) -> list[tuple[int, int]]:
    """Kind and role of all records."""
    return [(int(w[r.KIND]), int(w[r.ROLE])) for table in job.tables.tables.values() for w in table.words]


@pytest.mark.parametrize("turned", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_blocks_inside_one_shard_are_read_once_for_codes_and_scales(dtype: str, turned: bool) -> None:
    job = Job(matrix(formats.vllm_fp8_block(), (256, 384), dtype, turned=turned))
    kind = r.BLOCK_TRANSPOSE if turned else r.BLOCK_ROWS
    assert records(job) == [(kind, q.WRITES_CODES | q.STORES_SCALES)]
    job.update(1)
    job.check()


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_rows_that_two_shards_share_are_reduced_before_they_are_encoded(devices: int, rng: np.random.Generator) -> None:
    job = Job(matrix(formats.Fp8Channel(), (64, 144), sources=2), devices=devices)
    assert job.plan.staging_nbytes == 144 * 4
    kinds = records(job)
    assert kinds.count((r.BLOCK_TRANSPOSE, q.RAISES_AMAX)) == 2
    assert kinds.count((r.BLOCK_TRANSPOSE, q.READS_AMAX | q.WRITES_CODES)) == 2
    for _ in range(2):  # slots begin every update as zeros
        fresh = matrix(formats.Fp8Channel(), (64, 144), sources=2)
        again = Job(fresh)
        for key, buffer in again.sources.items():
            job.sources[key].fill(buffer.data)
        job.want = again.want
        job.update(int(rng.integers(2**32)))
        job.check()


@pytest.mark.parametrize("format", [formats.Fp8Tensor(), formats.Int8Channel(), formats.Fp8Block(rows=256)])
def test_blocks_that_no_tile_holds_are_reduced_into_slots_beside_their_source(format: formats.Format) -> None:
    job = Job(matrix(format, (160, 256)), devices=2)
    assert job.plan.staging_nbytes == 0
    assert {role for _, role in records(job)} >= {q.RAISES_AMAX, q.READS_AMAX | q.WRITES_CODES}
    job.update(2)
    job.check()


@pytest.mark.parametrize("turned", [True, False])
def test_codes_that_share_a_byte_are_written_byte_by_byte_after_tiles_have_found_maxima(turned: bool) -> None:
    job = Job(matrix(formats.triton_mxfp4(), (96, 96), turned=turned, sources=2, axis=0 if turned else 1))
    assert job.plan.staging_nbytes
    assert {kind for kind, _ in records(job)} >= {r.BLOCK_TRANSPOSE if turned else r.BLOCK_ROWS, r.ENCODE_ELEMENTS}
    job.update(4)
    job.check()


@pytest.mark.parametrize("turned", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_blocks_whose_codes_share_bytes_are_read_once_for_codes_and_scales(dtype: str, turned: bool) -> None:
    job = Job(matrix(formats.triton_mxfp4(), (320, 96), dtype, turned=turned), devices=2)
    assert records(job) == [(r.PACKED_BLOCKS, q.WRITES_CODES | q.STORES_SCALES)]
    job.update(4)
    job.check()


@pytest.mark.parametrize("sources", [1, 2])
def test_slots_are_read_in_chunks_soon_after_they_are_filled(sources: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_chunks, "CHUNK_NBYTES", 64 << 10)
    monkeypatch.setattr(quantized_ops, "READ_LAG", 1)
    job = Job(matrix(formats.Fp8Channel(), (160, 640), sources=sources), devices=sources)
    words = job.tables.tables[0, Phase.SEND].words
    chunked = words[np.isin(words[:, r.KIND], [r.BLOCK_ROWS, r.BLOCK_TRANSPOSE])]
    chunks = {1: [256, 256, 128], 2: [384, 256]}[sources]  # whole tiles of rows
    for role in (q.RAISES_AMAX, q.READS_AMAX | q.WRITES_CODES):
        assert chunked[chunked[:, r.ROLE] == role, r.EXTENT + 3].tolist() == chunks
    assert chunked[:3, r.ROLE].tolist() == [q.RAISES_AMAX, q.RAISES_AMAX, q.READS_AMAX | q.WRITES_CODES]
    job.update(3)
    job.check()


@pytest.mark.hypothesis
@pytest.mark.parametrize("nbytes", [1, 100, 1 << 10])
def test_slots_are_cut_into_chunks_of_any_size(nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_chunks, "CHUNK_NBYTES", nbytes)

    @settings(RANDOM, max_examples=4)
    @given(quantized_cases(), st.integers(1, 3), SEEDS)
    def run(case: Case, devices: int, seed: int) -> None:
        job = Job(case, devices=devices)
        job.update(seed)
        job.check()

    run()


def test_replicas_pass_codes_and_scales_on(rng: np.random.Generator) -> None:
    job = Job(matrix(formats.MxFp8(), (64, 256), replicas=3), devices=4)
    waits = [w for table in job.tables.tables.values() for w in table.words if w[r.WAIT] >= 0]
    assert len(waits) >= 2
    assert not any(w[r.ROLE] for w in waits)
    job.update(int(rng.integers(2**32)))
    job.check()


FORMATS = [
    formats.vllm_fp8_block(), formats.slime_fp8_block(), formats.nemo_fp8_block(), formats.deepgemm_ue8m0(),
    formats.Fp8Block(formula="divide", floor=0.0), formats.Fp8Block(scale="e8m0", floor=0.0),
    formats.sglang_fp8_tensor(), formats.ocp_mxfp8(), formats.vllm_mxfp8(), formats.vllm_mxfp8_round_up(),
    formats.Int8Channel(), formats.Fp8Channel(), formats.vllm_fp8_channel(), formats.triton_mxfp4(),
    formats.compressed_tensors_mxfp4(), Fp4Tensor(formula="divide"), Fp4Tensor(formula="factor"),
]  # fmt: skip


def awkward(dtype: str, rows: int, columns: int, rng: np.random.Generator) -> np.ndarray:
    """Rows of one magnitude, of all, of any finite bits; zeros, subnormals, ties, one huge value among small ones."""
    magnitude = np.exp2(rng.integers(-126, 120, (rows, 1)).astype(np.float32))
    x = rng.standard_normal((rows, columns)).astype(np.float32) * magnitude
    x[::3] *= np.exp2(-rng.integers(0, 30, x[::3].shape).astype(np.float32))
    x[3::8] = rng.integers(-1792, 1793, x[3::8].shape) * np.float32(0.25)  # halves between codes once 448 is in it
    x[3::8, 0] = 448
    with np.errstate(over="ignore"):
        x = x.astype(np_dtype(dtype))
    bits = rng.integers(0, 256, x[1::3].nbytes, np.uint8).view(x.dtype).reshape(x[1::3].shape)
    x[1::3] = bits
    x[~np.isfinite(x.astype(np.float32))] = 0
    x[:4] = 0
    x[2] = -x[2]
    x[3, ::7] = np_dtype(dtype).type(1e-39 if dtype != "float16" else 6e-8)
    if dtype != "float16":  # subnormals beside the smallest normal values
        x[6], x[6, ::3] = np_dtype(dtype).type(2e-38), np_dtype(dtype).type(5e-39)
        x[8], x[8, ::3] = np_dtype(dtype).type(2e-36), np_dtype(dtype).type(-1e-36)  # factors above the largest
    x[5], x[5, 7] = np_dtype(dtype).type(1e-3), np_dtype(dtype).type(6e4)
    return x


@pytest.mark.parametrize("source", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("format", FORMATS, ids=[f"{type(f).__name__}-{k}" for k, f in enumerate(FORMATS)])
def test_codes_and_scales_of_every_class_of_value_are_the_formats_own(
    format: formats.Format, source: str, rng: np.random.Generator
) -> None:
    if isinstance(format, formats.Fp8Block):  # blocks of one row keep the magnitudes apart
        format = dataclasses.replace(format, rows=1, columns=64)
    for turned in (False, True):
        x = awkward(source, 144, 64, rng)
        case = matrix(format, x.T.shape if turned else x.shape, source, turned=turned, values=x.T if turned else x)
        job = Job(case)
        packed = {r.ENCODE_ELEMENTS, r.PACKED_BLOCKS} if format.per_byte > 1 else set()
        assert {kind for kind, _ in records(job)} <= {*BLOCK_KINDS, r.ELEMENTS} | packed
        job.update(int(rng.integers(2**32)))
        job.check()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    ("format", "shape"),
    [
        (formats.Fp8Block(), (64, 272)),
        (formats.Fp8Channel(), (64, 272)),
        (formats.Fp8Block(rows=3, columns=5), (9, 20)),  # an element at a time
        (formats.triton_mxfp4(), (40, 64)),
    ],
)
def test_values_that_are_not_finite_are_reported_with_their_tensor(
    format: formats.Format, shape: tuple[int, int], bad: float, rng: np.random.Generator
) -> None:
    job = Job(matrix(format, shape, "float32", sources=1 + (format.scope == "row")), devices=2)
    last = job.sources[max(job.sources)]
    good = last.data.copy()
    bits = good.view(np.float32)
    bits[bits.size // 3] = bad
    last.fill(bits)
    names = {job.plan.families[key[0]].name(key[1]) for key in job.update(int(rng.integers(2**32)))}
    assert names
    assert names <= {"t", "s"}
    last.fill(np.zeros_like(good))
    assert not job.update(1)  # nothing stays behind


def test_a_device_that_finds_no_maxima_is_named_by_the_one_that_waits() -> None:
    def change(tables: OpTables) -> OpTables:
        kept = {key: table for key, table in tables.tables.items() if key != (1, Phase.SEND)}
        return dataclasses.replace(tables, tables=kept)

    job = Job(matrix(formats.Fp8Channel(), (64, 144), sources=2), devices=2, change=change)
    job.epoch = 1
    job.run(("ready",), 0)
    errors = job.run(("send",), 0)
    job.tables = optable.make_tables(job.plan, {rank: rank % 2 for rank in range(3)}, lambda key: key)
    work, _ = job.phases().send().values()
    assert "waited for the maxima of blocks from rank 0 and rank 1" in str(work.fault(*errors.values()))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wide(formats.Fp8Block):
    """Codes that the kernel has no code for."""

    codes: ClassVar[str] = "float8_e5m2"
    largest: ClassVar[float] = 57344.0
    divisor: ClassVar[float] = 57344.0


def test_codes_that_the_kernel_cannot_make_are_a_reason_against_it() -> None:
    assert optable.why_unsupported(matrix(Wide(), (64, 64)).plan()) == (
        "codes of dtype float8_e5m2 are not among float8_e4m3fn, int8, float4_e2m1fn"
    )
    for format in FORMATS:
        assert optable.why_unsupported(matrix(format, (64, 64), sources=2).plan()) is None


# Broken kernels and tables


def nothing(*args: object, **kwargs: object) -> None:
    pass


BROKEN: dict[str, tuple[str, Callable[..., object]]] = {
    "no barrier of the block": ("barrier", nothing),
    "a wait that acquires nothing": ("read_counter", m.read_word),
    "maxima of shared memory that are not atomic": ("max_shared", lambda at, word: m.store_shared(at, word)),
    "slots that are raised on this device only": (
        "raise_word",
        lambda at, word: m.ptx("red.relaxed.gpu.global.max.u32 [$0], $1;", "l,r", at, word),
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_quantizing_kernel_that_lacks_an_order_is_reported(
    name: str, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    helper, broken = BROKEN[name]
    monkeypatch.setattr(m, helper, broken)
    job = Job(matrix(formats.Fp8Channel(), (64, 144), sources=2), devices=2)
    with pytest.raises(Fault, match=r"race|never written|scope"):
        job.update(int(rng.integers(2**32)), compile_=compile_transfer)


def test_encoding_before_slots_are_full_is_a_race(rng: np.random.Generator) -> None:
    def change(tables: OpTables) -> OpTables:
        table = tables.tables[0, Phase.SEND]
        words = table.words.copy()
        words[words[:, r.ROLE] == q.READS_AMAX | q.WRITES_CODES, r.WAIT] = -1
        new = dataclasses.replace(table, words=words)
        return dataclasses.replace(tables, tables=tables.tables | {(0, Phase.SEND): new})

    with pytest.raises(Fault, match="race"):
        Job(matrix(formats.Fp8Channel(), (64, 144), sources=2), change=change).update(int(rng.integers(2**32)))


def test_slots_that_nobody_zeroes_keep_the_maxima_of_the_last_update() -> None:
    job = Job(matrix(formats.Fp8Tensor(), (160, 256), values=np.full((160, 256), 100, np_dtype("bfloat16"))))
    job.update(1)
    job.check()
    smaller = Job(matrix(formats.Fp8Tensor(), (160, 256), values=np.full((160, 256), 3, np_dtype("bfloat16"))))
    for key, buffer in smaller.sources.items():
        job.sources[key].fill(buffer.data)
    job.epoch += 1
    job.run(("send", "finish"), 1)  # without *ready*
    job.want = smaller.want
    with pytest.raises(AssertionError):
        job.check()
    job.update(1)
    job.check()


# For CUDA


CONVERSIONS = {
    f"{what} of {source}, {number}": conversion(source, steps, target)
    for number, format in enumerate(FORMATS)
    for source in (["bfloat16", "float32"] if number == 0 else ["float16", "bfloat16"][number % 2 : number % 2 + 1])
    for what, steps, target in (
        ("codes", (Encode(format),), format.stored), ("scales", (Amax(), ToScale(format)), format.scale_dtype),
    )
}  # fmt: skip
CONVERSIONS["maxima"] = conversion("bfloat16", (Amax(),), "uint32")
CONVERSIONS["scales from slots"] = conversion("uint32", (ToScale(formats.ocp_mxfp8()),), "uint8")


@pytest.mark.parametrize("name", CONVERSIONS)
def test_every_quantizing_variant_of_the_kernel_lowers_for_cuda(name: str) -> None:
    kernel = transfer.make_kernel((CONVERSIONS[name],), 132, 4, transfer.WORKERS)
    words = [jax.ShapeDtypeStruct((n,), jnp.int32) for n in (128, 37, 50)]
    text = jax.jit(kernel).trace(*words).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text
