"""Codes of half a byte: as the engines pack and round them, in moves, in updates, and what is refused."""

from __future__ import annotations

import io

import jax
import ml_dtypes
import numpy as np
import pytest
from checks import assert_holds, assert_same_bits, cut, fresh, like, mesh, put, replayed, sources_of, updated
from fp4_engines import compressed_tensors, triton
from hypothesis import HealthCheck, given, settings
from random_problems import Case, check, source_buffers
from random_quantized import PACKED, SmallFp4, quantized_cases

import shardfly_jax as sf
from shardfly_jax import formats, today
from shardfly_jax.executors import hostquantize
from shardfly_jax.executors.host import HostExecutor
from shardfly_jax.executors.memory import Shard
from shardfly_jax.sharding import routing
from shardfly_jax.sharding.families import TargetTree
from shardfly_jax.sharding.grids import quantize
from shardfly_jax.sharding.moves import packed_axis
from shardfly_jax.sharding.plan import Plan, load
from shardfly_jax.sharding.planner import build_plan
from shardfly_jax.sharding.problem import Problem

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


# What engines compute


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("engine", [triton, compressed_tensors])
def test_a_million_codes_and_their_scales_are_the_engines(engine, dtype: str, rng: np.random.Generator) -> None:
    """Of one magnitude per block, over many, and with ties: quarters and halves."""
    x = rng.standard_normal((1 << 10, 1 << 10), np.float32) * np.exp2(rng.integers(-100, 100, (1 << 10, 1)))
    x[::3] *= np.exp2(-rng.integers(0, 12, x[::3].shape))
    x[1::3] = rng.integers(-32, 33, x[1::3].shape) * 0.25
    x[2, :64] = 0
    x = x.astype(np.float32).astype(dtype)
    x += np.zeros((), x.dtype)  # no -0.0, of which one of the engines drops the sign
    format = formats.triton_mxfp4() if engine is triton else formats.compressed_tensors_mxfp4()
    codes, scales = quantize(format, x)
    want_codes, want_scales = engine(x)
    assert_same_bits(scales, want_scales)
    assert_same_bits(codes, want_codes)


def test_values_just_above_a_tie_round_up_and_the_tie_to_even() -> None:
    """A quarter of the scale is midway between the codes 0 and 1; the next float32 is where Triton's bits get lost."""
    quarter = np.float32(0.25)
    x = np.zeros((1, 32), np.float32)
    x[0, :4] = 4, quarter, np.nextafter(quarter, np.float32(1)), np.nextafter(quarter, np.float32(0))
    codes, scales = quantize(formats.triton_mxfp4(), x)
    assert scales.tolist() == [[127]]
    assert formats.MxFp4().unpack(codes)[0, :4].tolist() == [4, 0, 0.5, 0]
    assert_same_bits(codes, triton(x)[0])


def test_the_first_of_two_values_is_in_the_low_half_of_its_byte() -> None:
    row = [1.0, -6.0, 0.0, -0.0, 0.5, 4.0, 2.5, -5.0]  # codes 2 15, 0 8, 1 6, 4 14
    codes, scales = quantize(formats.triton_mxfp4(), np.float32([row * 4]))
    assert codes[0, :4].tolist() == [0xF2, 0x80, 0x61, 0xE4]
    assert scales.tolist() == [[127]]
    back = formats.MxFp4().unpack(codes)
    assert back.dtype == ml_dtypes.float4_e2m1fn
    assert formats.MxFp4().decode(back, scales)[0, :8].tolist() == [1.0, -6.0, 0.0, -0.0, 0.5, 4.0, 2.0, -4.0]


def test_presets_differ_where_amax_is_large_for_its_power_of_two() -> None:
    """The largest value becomes 3.5 to 6, 4 to 8 and 3.5 to 7 times the scale."""
    for amax, ocp, triton_, compressed in ((4.0, 127, 127, 127), (6.5, 127, 128, 127), (7.0, 127, 128, 128)):
        x = np.zeros((1, 32), np.float32)
        x[0, 5] = amax
        made = [quantize(f, x)[1].item() for f in (formats.ocp_mxfp4(), formats.triton_mxfp4())]
        assert (*made, quantize(formats.compressed_tensors_mxfp4(), x)[1].item()) == (ocp, triton_, compressed)


# Moves


def run_on_hosts(plan: Plan, case: Case) -> dict[str, np.ndarray]:
    """What the portable executor for hosts writes for one rank."""
    device = jax.local_devices()[0]
    sources = {key: jax.device_put(x, device) for key, x in source_buffers(case, plan).items()}
    out, shards = {}, {}
    for index in plan.target_families:
        family = plan.families[index]
        (rank,) = family.layout.ranks
        poisoned = np.full(family.layout.shape, 0xA5, np.uint8)
        shards[index, 0, rank] = Shard.of(put(poisoned, mesh((1,), "x")).addressable_shards[0].data)
        out[family.pattern] = shards[index, 0, rank]
    HostExecutor(plan, shards).start(sources_of(sources))
    return {name: np.asarray(shard.array) for name, shard in out.items()}


def planned(
    value: sf.Expr,
    format: formats.Format,
    shape: tuple[int, ...],
    source: sf.Layout,
    target: tuple[int, int] | tuple[()] = (),
    replicas: int = 1,
) -> Plan:
    """`t` and `s` made of `w`; `shape` is that of the values, its stored codes are cut into (axis, parts)."""
    stored, ranks = format.stored_shape(shape), (target[1] if target else 1) * replicas
    codes = cut(stored, format.stored, *target)
    boxes = {rank: codes.box(rank % len(codes.ranks)) for rank in range(ranks)}
    grid = (*shape[:-1], -(-shape[-1] // (format.block[1] or shape[-1])))
    tensors = {
        "t": sf.Layout(stored, format.stored, boxes),
        "s": sf.Layout(grid, format.scale_dtype, {rank: [(0, n) for n in grid] for rank in range(ranks)}),
    }
    parts = {f"r{k}": tuple(range(k * ranks // replicas, (k + 1) * ranks // replicas)) for k in range(replicas)}
    tree = TargetTree(
        name="t", tensors=tensors, mapping=sf.Mapping({"t": value.quantize(format), "s": sf.scale_of("t")}),
        ranks=ranks, replicas=parts,
    )  # fmt: skip
    return build_plan(Problem({"w": source}, len(source.ranks), [tree]))


@settings(max_examples=300, suppress_health_check=SLOW)
@given(quantized_cases(among=PACKED))
def test_bytes_are_those_of_the_whole_tensor_for_every_sharding(case: Case) -> None:
    check(case, case.plan())


@pytest.mark.parametrize("source", [(), (0, 2), (1, 2), (1, 3), (1, 4), (2, 5)])
@pytest.mark.parametrize("target", [(), (0, 3), (1, 2), (2, 2)])
def test_experts_that_are_turned_are_packed_along_their_inputs(
    source: tuple[int, int], target: tuple[int, int], rng: np.random.Generator
) -> None:
    """[experts, in, out] -> [experts, out, in / 2]: neighbours of a byte are `out` apart, and shards cut blocks."""
    x = fresh(rng, 3, 96, 10, dtype="bfloat16")
    value = sf.src("w").rearrange("e i o -> e o i")
    shape = (3, 10, 96 + 32)
    value = value.pad([(0, 0), (0, 0), (0, 32)])
    plan = planned(value, formats.triton_mxfp4(), shape, cut(x.shape, "bfloat16", *source), target, replicas=2)
    whole = np.pad(x.transpose(0, 2, 1), [(0, 0), (0, 0), (0, 32)])
    codes, scales = triton(whole.reshape(30, 128))
    for (name, rank), have in replayed(plan, {"w": x}).items():
        if name == "s":
            assert_same_bits(have, scales.reshape(3, 10, 4))
        else:
            family = next(f for f in plan.families if f.pattern == "t")
            box = tuple(slice(lo, hi) for lo, hi in family.layout.box(rank + plan.source_ranks))
            assert_same_bits(have, codes.reshape(3, 10, 64)[box])
    blocks_cut = source in ((1, 2), (1, 4))  # 96 / 2 and 96 / 4 columns are no whole blocks, 96 / 3 are
    assert bool(plan.staging_nbytes) == blocks_cut
    encoding = [move for move in plan.moves if plan.conversions[move.convert].encodes]
    assert all(move.extents[packed_axis(move)] == 2 for move in encoding)


def test_more_dimensions_than_a_move_has_are_split_without_splitting_bytes(rng: np.random.Generator) -> None:
    x = fresh(rng, 2, 3, 4, 2, 3, 4)
    value = sf.src("w").rearrange("a b c d e f -> (e b) (f d c a)")
    plan = planned(value, SmallFp4(), (9, 64), cut(x.shape, "float32"))
    turned = np.ascontiguousarray(x.transpose(4, 1, 5, 3, 2, 0)).reshape(9, 64)
    codes, scales = quantize(SmallFp4(), turned)
    have = replayed(plan, {"w": x})
    assert_same_bits(have["t", 0], codes)
    assert_same_bits(have["s", 0], scales)


def test_more_dimensions_with_blocks_that_shards_share_are_split_without_splitting_bytes(
    rng: np.random.Generator,
) -> None:
    """The two values of a byte are the shortest dimension."""
    x = fresh(rng, 2, 3, 4, 3, 3, 3, 3)
    value = sf.src("w").rearrange("a b c d e f g -> (e b g) (f d c a)")
    plan = planned(value, SmallFp4(), (27, 72), cut(x.shape, "float32", 2, 4))
    codes, scales = quantize(SmallFp4(), np.ascontiguousarray(x.transpose(4, 1, 6, 5, 3, 2, 0)).reshape(27, 72))
    have = replayed(plan, {"w": x})
    assert_same_bits(have["t", 0], codes)
    assert_same_bits(have["s", 0], scales)
    assert plan.staging_nbytes == 4 * scales.size


def test_axes_of_odd_length_that_go_on_in_memory_are_packed_across_their_ends(rng: np.random.Generator) -> None:
    """The third column of a head and the first one of the next share a byte."""
    x = fresh(rng, 5, 4, 3)
    plan = planned(sf.src("w").rearrange("n h d -> n (h d)"), formats.MxFp4(), (5, 12), cut(x.shape, "float32", 0, 2))
    have = replayed(plan, {"w": x})
    assert_same_bits(have["t", 0], quantize(formats.MxFp4(), x.reshape(5, 12))[0])


@pytest.mark.parametrize("parts", [9, 2])
def test_large_moves_are_encoded_in_parts_that_keep_bytes_whole(
    parts: int, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    """The two values of a byte are two rows of the source, of one shard or with blocks that two share."""
    x = fresh(rng, 36, 6)
    case = Case({"w": x}, {"w": cut(x.shape, "float32", 0, parts)}, parts, [])
    plan = planned(sf.src("w").rearrange("i o -> o i"), SmallFp4(), (6, 36), case.sources["w"])
    codes, scales = quantize(SmallFp4(), np.ascontiguousarray(x.T))
    assert bool(plan.staging_nbytes) == (parts == 2)
    for size in (1, 3, 8):
        monkeypatch.setattr(hostquantize, "PART_SIZE", size)
        have = run_on_hosts(plan, case)
        assert_same_bits(have["t"], codes)
        assert_same_bits(have["s"], scales)


def test_bands_of_replicas_end_at_blocks_of_packed_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "SMALLEST_BAND_NBYTES", 32)
    boxes = {rank: [(0, 2), (0, 96)] for rank in range(6)}
    target = sf.Layout((2, 96), "uint8", boxes, dict.fromkeys(boxes, (1, 2)))  # held transposed
    tree = TargetTree(
        name="t", tensors={"t": target}, mapping=sf.Mapping({"t": sf.src("w").quantize(formats.MxFp4())}), ranks=6,
        replicas={f"r{rank}": (rank,) for rank in boxes},
    )  # fmt: skip
    plan = build_plan(Problem({"w": cut((2, 192), "float32")}, 1, [tree]))
    assert plan.bands.tolist() == [32] * 6, "six blocks of 16 bytes in two rows"


def test_only_packed_codes_and_scales_travel() -> None:
    plan = planned(sf.src("w"), formats.triton_mxfp4(), (8, 128), cut((8, 128), "bfloat16", 0, 2), replicas=3)
    assert plan.nbytes == plan.target_nbytes == 3 * (8 * 64 + 8 * 4)
    assert plan.traffic()[:2].sum() == 8 * 64 + 8 * 4, "replicas pass them on"
    assert plan.staging_nbytes == 0


def test_a_saved_plan_packs_as_before(rng: np.random.Generator) -> None:
    x = fresh(rng, 6, 64)
    plan = planned(sf.src("w"), formats.compressed_tensors_mxfp4(), (6, 64), cut(x.shape, "float32", 1, 4))
    file = io.BytesIO()
    plan.save(file)
    file.seek(0)
    again = load(file)
    assert again.digest == plan.digest
    want = replayed(plan, {"w": x})
    for key, have in replayed(again, {"w": x}).items():
        assert_same_bits(have, want[key])


# Updates


@pytest.mark.parametrize("spec", [("fsdp", None), (None, "fsdp")])
def test_an_update_writes_packed_codes_in_place(rng: np.random.Generator, spec: tuple[str | None, str | None]) -> None:
    trainer, rollout = mesh((4,), "fsdp"), mesh((2, 2), "replica tp", [4, 5, 6, 7])
    names = [f"h.{i}.w" for i in range(3)]
    target = {name: like((16, 48), "uint8", rollout, "tp") for name in names}
    target |= {f"{name}_scale": like((16, 3), "uint8", rollout, "tp") for name in names}
    mapping = sf.Mapping({
        "h.{i}.w": sf.src("h.{i}.w").rearrange("k n -> n k").quantize(formats.triton_mxfp4()),
        "h.{i}.w_scale": sf.scale_of("h.{i}.w"),
    })  # fmt: skip
    source = {name: like((96, 16), "bfloat16", trainer, *spec) for name in names}
    plan = sf.register(sf.make_plan(source, target, mapping))
    assert bool(plan.staging_nbytes) == (spec[0] is not None), "96 / 4 inputs are no whole block"
    for _ in range(2):
        values = {name: fresh(rng, 96, 16, dtype="bfloat16") for name in names}
        params = {name: put(x, trainer, *spec) for name, x in values.items()}
        out = updated(params, plan)
        for name, x in values.items():
            codes, scales = triton(np.ascontiguousarray(x.T))
            assert_holds(out[name], codes)
            assert_holds(out[f"{name}_scale"], scales)
        assert sf.verify(params, plan) == plan.target_nbytes
    broken = values["h.1.w"].copy()
    broken[30, 5] = np.nan
    with pytest.raises(sf.NotFinite, match=r"target 'h\.1\.w(_scale)?'.*NaN or infinity"):
        sf.sync(params | {"h.1.w": put(broken, trainer, *spec)}, plan)


def test_todays_way_writes_the_same_bytes(rng: np.random.Generator) -> None:
    trainer, rollout = mesh((2,), "a"), mesh((2,), "b", [4, 5])
    params = {"w": put(fresh(rng, 8, 96), trainer, "a")}
    target = {"w": like((8, 48), "uint8", rollout, "b"), "s": like((8, 3), "uint8", rollout, "b")}
    mapping = sf.Mapping({"w": sf.src("w").quantize(formats.compressed_tensors_mxfp4()), "s": sf.scale_of("w")})
    plan = sf.make_plan(params, target, mapping)
    out = today.make_update(plan)(params)
    codes, scales = quantize(formats.compressed_tensors_mxfp4(), np.asarray(params["w"]))
    have = {name.rpartition(":")[2]: x for name, x in out.items()}
    assert_holds(have["w"], codes)
    assert_holds(have["s"], scales)


def test_a_pool_grows_by_a_replica_that_gets_packed_codes(rng: np.random.Generator) -> None:
    trainer = mesh((2,), "a")
    value = fresh(rng, 8, 64)
    params = {"w": put(value, trainer, "a")}
    mapping = sf.Mapping({"w": sf.src("w").quantize(formats.MxFp4())})

    def target(replicas: int) -> dict[str, jax.ShapeDtypeStruct]:
        return {"w": like((8, 32), "uint8", mesh((replicas, 2), "replica tp", range(2, 2 + 2 * replicas)), "tp")}

    plan = sf.register(sf.make_plan(params, target(1), mapping))
    sf.sync(params, plan)
    plan = sf.rescale(plan, target(3))
    assert_holds(updated(params, plan)["w"], quantize(formats.MxFp4(), value)[0])


def test_a_report_names_the_format() -> None:
    trainer, rollout = mesh((2,), "a"), mesh((2,), "b", [4, 5])
    plan = sf.make_plan(
        {"w": like((8, 64), "bfloat16", trainer, "a")}, {"w": like((8, 32), "uint8", rollout, "b")},
        sf.Mapping({"w": sf.src("w").quantize(formats.MxFp4())}),
    )  # fmt: skip
    assert "MxFp4" in str(plan.explain())


# What is refused


def refused(value: sf.Expr, shape: tuple[int, int], source: sf.Layout, format: formats.Format | None = None) -> str:
    with pytest.raises(sf.PlanError) as caught:
        planned(value, SmallFp4() if format is None else format, shape, source)
    return str(caught.value)


@pytest.mark.parametrize(
    ("value", "source"),
    [
        (sf.src("w"), sf.Layout((4, 16), "float32", {0: [(0, 4), (0, 5)], 1: [(0, 4), (5, 16)]})),
        (sf.concat([sf.src("w")[:, :5], sf.src("w")[:, 5:]], axis=1), cut((4, 16), "float32")),
        (sf.stack([sf.src("w")[:, ::2], sf.src("w")[:, 1::2]], axis=2).rearrange("a b c -> a (b c)"),
         cut((4, 16), "float32")),
    ],
    ids=["shards", "parts", "alternating parts"],
)  # fmt: skip
def test_sources_that_come_apart_inside_a_byte_are_refused_by_name(value: sf.Expr, source: sf.Layout) -> None:
    text = refused(value, (4, 16), source)
    assert "target 't'" in text
    assert "SmallFp4 puts 2 codes into each byte. Cut sources, and join parts, at even columns" in text


def test_shards_that_end_inside_a_byte_of_other_blocks_are_refused_too() -> None:
    """Every third of 96 columns ends at a byte; every 32nd does not."""
    assert planned(sf.src("w"), formats.MxFp4(), (2, 96), cut((2, 96), "float32", 1, 16)).staging_nbytes
    assert "at even columns" in refused(sf.src("w"), (2, 96), cut((2, 96), "float32", 1, 32), formats.MxFp4())


def test_an_odd_number_of_columns_is_refused_with_the_remedy() -> None:
    with pytest.raises(sf.PlanError, match=r"target 't'.* 33 columns, but MxFp4 puts 2 codes.*Pad it"):
        sf.make_plan(
            {"w": like((4, 33), "float32", mesh((1,), "a"))}, {"t": like((4, 17), "uint8", mesh((1,), "b", [1]))},
            sf.Mapping({"t": sf.src("w").quantize(formats.MxFp4())}),
        )  # fmt: skip


def test_a_target_of_unpacked_codes_is_refused_with_shape_and_dtype() -> None:
    one, other = mesh((1,), "a"), mesh((1,), "b", [1])
    entries = sf.Mapping({"t": sf.src("w").quantize(formats.MxFp4())})
    source = {"w": like((4, 64), "float32", one)}
    with pytest.raises(sf.PlanError, match=r"'t' .*shape \(4, 64\), but its mapping gives \(4, 32\)"):
        sf.make_plan(source, {"t": like((4, 64), "uint8", other)}, entries)
    with pytest.raises(sf.PlanError, match=r"'t' .*is int8, but its mapping quantizes to uint8"):
        sf.make_plan(source, {"t": like((4, 32), "int8", other)}, entries)


def test_ranks_that_cut_a_block_of_packed_codes_are_refused_with_what_would_do() -> None:
    rollout = mesh((4,), "tp", [4, 5, 6, 7])
    with pytest.raises(sf.PlanError, match=r"'t'.*4 cuts give parts of 24 columns, but a block of 32.*1, 3 cuts"):
        sf.make_plan(
            {"w": like((4, 96), "float32", mesh((2,), "a"))}, {"t": like((4, 48), "uint8", rollout, None, "tp")},
            sf.Mapping({"t": sf.src("w").quantize(formats.MxFp4())}),
        )  # fmt: skip


def test_parts_fused_along_packed_columns_are_refused() -> None:
    source = {"w": like((4, 64), "float32", mesh((2,), "a"))}
    with pytest.raises(sf.PlanError, match=r"'t'.*fused along the columns, but MxFp4 .*Fuse rows, or use concat"):
        sf.make_plan(
            source, {"t": like((4, 64), "uint8", mesh((2,), "tp", [4, 5]), None, "tp")},
            sf.Mapping({"t": sf.fuse(sf.src("w"), sf.src("w"), axis=1).quantize(formats.MxFp4())}),
        )  # fmt: skip


def test_a_swap_of_the_halves_of_a_byte_is_found(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    params = {"w": put(fresh(rng, 4, 64), mesh((2,), "a"), "a")}
    target = {"w": jax.ShapeDtypeStruct((4, 32), "uint8", sharding=params["w"].sharding)}
    plan = sf.register(sf.make_plan(params, target, sf.Mapping({"w": sf.src("w").quantize(formats.MxFp4())})))
    sf.sync(params, plan)
    sf.verify(params, plan)
    right = formats.MxFp4.pack
    swapped = lambda self, codes, axis=-1: right(self, codes, axis) >> 4 | right(self, codes, axis) << 4  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setattr(formats.MxFp4, "pack", swapped)
        sf.sync(params, plan)
    with pytest.raises(sf.VerificationError):
        sf.verify(params, plan)
