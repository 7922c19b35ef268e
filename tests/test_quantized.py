"""Quantized targets by hand: scopes, scales as targets, staging, what travels, and what is refused."""

from __future__ import annotations

import ctypes
import dataclasses
import io
import itertools
import math
import re
from collections.abc import Mapping

import ml_dtypes
import numpy as np
import pytest
from checks import (
    assert_holds,
    assert_same_bits,
    blocks_by_hand,
    by_hand,
    cut,
    fresh,
    like,
    mesh,
    put,
    replayed,
    updated,
)

import shardfly_jax as sf
from shardfly_jax import formats
from shardfly_jax.sharding.evaluate import evaluate
from shardfly_jax.sharding.families import TargetTree
from shardfly_jax.sharding.formats import np_dtype
from shardfly_jax.sharding.grids import grid_shape
from shardfly_jax.sharding.plan import Plan, load
from shardfly_jax.sharding.planner import build_plan
from shardfly_jax.sharding.problem import Problem
from shardfly_jax.sharding.replay import replay

E4M3 = ml_dtypes.float8_e4m3fn
SMALL = formats.Fp8Block(rows=4, columns=8)


def planned(
    entries: Mapping[str, sf.Expr],
    sources: Mapping[str, sf.Layout],
    targets: Mapping[str, sf.Layout],
    ranks: int = 1,
    **options: tuple[str, ...],
) -> Plan:
    tree = TargetTree(name="rollout", tensors=targets, mapping=sf.Mapping(entries), ranks=ranks)
    source_ranks = 1 + max(rank for layout in sources.values() for rank in layout.ranks)
    return build_plan(Problem(sources, source_ranks, [tree], **options))


def simple(
    format: formats.Format,
    shape: tuple[int, int],
    scale_shape: tuple[int, int],
    source: tuple[int, int] | tuple[()] = (),
    target: tuple[int, int] | tuple[()] = (),
    layers: int = 1,
) -> Plan:
    """`h.{i}.w` and its scales; source and target are cut into (axis, parts)."""
    names = [f"h.{i}.w" for i in range(layers)]
    ranks = target[1] if target else 1
    return planned(
        {"h.{i}.w": sf.src("h.{i}.w").quantize(format), "h.{i}.s": sf.scale_of("h.{i}.w")},
        {name: cut(shape, "bfloat16", *source) for name in names},
        {name: cut(shape, format.codes, *target) for name in names}
        | {f"h.{i}.s": cut(scale_shape, format.scale_dtype) for i in range(layers)},
        ranks,
    )


# Codes and scales


def test_codes_and_scales_are_what_the_engine_computes(rng: np.random.Generator) -> None:
    x = fresh(rng, 300, 260, dtype="bfloat16")
    plan = simple(formats.vllm_fp8_block(), (300, 260), (3, 3))
    codes, scales = blocks_by_hand(x, 128, 128)
    have = replayed(plan, {"h.0.w": x})
    assert_same_bits(have["h.0.w", 0], codes)
    assert_same_bits(have["h.0.s", 0], scales)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_fused_parts_have_blocks_of_their_own_on_every_rank(rng: np.random.Generator, tp: int) -> None:
    """[q_r; k_r; v_r] of each rank, quantized by the rank, is what the plan writes."""
    parts = {"q": fresh(rng, 32, 16), "k": fresh(rng, 16, 16), "v": fresh(rng, 16, 16)}
    fused = sf.fuse(*(sf.src(name) for name in parts), axis=0).quantize(SMALL)
    plan = planned(
        {"qkv": fused, "scales": sf.scale_of("qkv")},
        {name: cut(x.shape, "float32", 1, 2) for name, x in parts.items()},
        {"qkv": cut((64, 16), E4M3, 0, tp), "scales": cut((16, 2), "float32", 0, tp)},
        tp,
    )
    have = replayed(plan, parts)
    for rank in range(tp):
        local = np.concatenate([np.split(x, tp)[rank] for x in parts.values()])
        codes, scales = blocks_by_hand(local, 4, 8)
        assert_same_bits(have["qkv", rank], codes)
        assert_same_bits(have["scales", rank], scales)
    assert plan.staging_nbytes == 0


def test_online_per_tensor_scales_are_those_of_what_a_rank_holds_and_change_with_tp(rng: np.random.Generator) -> None:
    gate, up = fresh(rng, 16, 8), fresh(rng, 16, 8)
    gate[-1, 0] = 1e6  # what rank 0 holds of it depends on tp
    seen = []
    for tp in (1, 2, 4):
        plan = planned(
            {
                "w": sf.fuse(sf.src("gate"), sf.src("up"), axis=0).quantize(formats.vllm_fp8_tensor()),
                "s": sf.scale_of("w").rearrange("r 1 -> r"),
            },
            {name: cut((16, 8), "float32", 1, 2) for name in ("gate", "up")},
            {"w": cut((32, 8), E4M3, 0, tp), "s": cut((tp,), "float32", 0, tp)},
            tp,
        )
        have = replayed(plan, {"gate": gate, "up": up})
        for rank in range(tp):
            codes, scale = by_hand(np.concatenate([np.split(x, tp)[rank] for x in (gate, up)]), 0)
            assert_same_bits(have["w", rank], codes)
            assert_same_bits(have["s", rank], np.array([scale]))
        seen.append(have["s", 0][0])
        assert plan.staging_nbytes == 4 * tp
    assert len(set(seen)) > 1


def test_per_part_scales_are_shared_by_all_ranks(rng: np.random.Generator) -> None:
    experts = {"gate": fresh(rng, 3, 8, 8), "up": fresh(rng, 3, 8, 8)}
    plan = planned(
        {
            "w13": sf.fuse(sf.src("gate"), sf.src("up"), axis=1).quantize(formats.Fp8Tensor(per="part")),
            "s": sf.scale_of("w13").rearrange("e p 1 -> e p"),
        },
        {name: cut((3, 8, 8), "float32", 0, 3) for name in experts},
        {"w13": cut((3, 16, 8), E4M3, 1, 2), "s": sf.Layout((3, 2), "float32", {r: [(0, 3), (0, 2)] for r in (0, 1)})},
        2,
    )
    have = replayed(plan, experts)
    for rank in range(2):
        for e in range(3):
            for p, x in enumerate(experts.values()):
                codes, scale = by_hand(x[e], 0)
                half = codes[rank * 4 : rank * 4 + 4]
                assert_same_bits(have["w13", rank][e, p * 4 : p * 4 + 4], half)
                assert have["s", rank][e, p] == scale
    assert plan.staging_nbytes == 3 * 2 * 4  # each rank writes one half of every block


def test_experts_have_a_grid_each_and_scales_follow_expert_placement(rng: np.random.Generator) -> None:
    x = fresh(rng, 4, 8, 16)
    order = [2, 0, 3, 1]
    plan = planned(
        {
            "w2": sf.src("w").take(order, axis=0).quantize(SMALL),
            "s": sf.scale_of("w2"),
            "by_column": sf.scale_of("w2").rearrange("e n k -> e k n").astype("bfloat16"),
        },
        {"w": cut(x.shape, "float32", 0, 4)},
        {
            "w2": cut(x.shape, E4M3, 0, 2), "s": cut((4, 2, 2), "float32", 0, 2),
            "by_column": cut((4, 2, 2), "bfloat16", 0, 2),
        },
        2,
    )  # fmt: skip
    have = replayed(plan, {"w": x})
    for rank in range(2):
        for k, e in enumerate(order[2 * rank : 2 * rank + 2]):
            codes, scales = blocks_by_hand(x[e], 4, 8)
            assert_same_bits(have["w2", rank][k], codes)
            assert_same_bits(have["s", rank][k], scales)
            assert_same_bits(have["by_column", rank][k], np.ascontiguousarray(scales.T).astype(ml_dtypes.bfloat16))


def test_a_row_that_both_sides_cut_has_one_scale(rng: np.random.Generator) -> None:
    x = fresh(rng, 6, 40)
    plan = planned(
        {"w": sf.src("w").quantize(formats.Fp8Channel()), "s": sf.scale_of("w")},
        {"w": cut((6, 40), "float32", 1, 3)},
        {"w": cut((6, 40), E4M3, 1, 2), "s": sf.Layout((6, 1), "float32", {r: [(0, 6), (0, 1)] for r in (0, 1)})},
        2,
    )
    have = replayed(plan, {"w": x})
    for row in range(6):
        codes, scale = by_hand(x[row : row + 1], 0)
        assert_same_bits(np.concatenate([have["w", 0][row], have["w", 1][row]]), codes[0])
        assert have["s", 0][row, 0] == have["s", 1][row, 0] == scale
    assert plan.staging_nbytes == 6 * 4
    assert len({plan.families[k].layout.ranks for k in plan.staging_families}) == 1, "one owner per block"


# Staging and traffic


def test_blocks_inside_source_shards_need_no_staging_and_only_codes_travel() -> None:
    plan = simple(SMALL, (32, 64), (8, 8), source=(0, 4), layers=3)
    assert plan.staging_nbytes == 0
    assert plan.staging_families == ()
    assert plan.nbytes == plan.egress_nbytes == 3 * (32 * 64 + 8 * 8 * 4)


@pytest.mark.parametrize("layers", [1, 3])
def test_staging_is_one_slot_for_each_block_that_shards_share(layers: int) -> None:
    """Rows 0-9, 10-20, 21-31 of blocks of 4 rows: the blocks of rows 8-11 and 20-23 are shared."""
    plan = simple(SMALL, (32, 64), (8, 8), source=(0, 3), layers=layers)
    assert plan.staging_nbytes == 4 * 2 * 8 * layers
    cut_rows = simple(formats.Fp8Channel(), (32, 64), (32, 1), source=(1, 2), layers=layers)
    assert cut_rows.staging_nbytes == 4 * 32 * layers
    # the owner reads its own maxima; the other shard sends its own and reads the common ones
    assert cut_rows.exchange_nbytes == 2 * 4 * 32 * layers
    assert cut_rows.egress_nbytes == layers * (32 * 64 + 32 * 4)
    assert cut_rows.target_nbytes == layers * (32 * 64 + 32 * 4)


def test_slots_that_nobody_reads_are_left_out(rng: np.random.Generator) -> None:
    """Layers of the payload differ in layout, so scales have slots of their own; only some of them are read."""
    arrays = {f"h.{i}.w": fresh(rng, 32, 8) for i in range(2)}
    plan = planned(
        {"h.{i}.w": sf.src("h.{i}.w").quantize(SMALL), "h.{i}.s": sf.scale_of("h.{i}.w")[:4]},
        {name: cut((32, 8), "float32", 0, 3) for name in arrays},
        {"h.0.w": cut((32, 8), E4M3), "h.1.w": cut((32, 8), E4M3, 0, 2)}
        | {f"h.{i}.s": cut((4, 1), "float32") for i in range(2)},
        2,
    )
    have = replayed(plan, arrays)
    for i in range(2):
        assert_same_bits(have[f"h.{i}.s", 0], blocks_by_hand(arrays[f"h.{i}.w"], 4, 8)[1][:4])
    assert plan.staging_nbytes == 4 * (2 * 2 + 2)


@pytest.mark.parametrize("replicas", [1, 2, 5])
def test_replicas_get_codes_by_forwarding(replicas: int) -> None:
    ranks = {rank: [(0, 32), (0, 64)] for rank in range(replicas)}
    plan = planned(
        {"w": sf.src("w").quantize(SMALL), "s": sf.scale_of("w")},
        {"w": cut((32, 64), "float32", 0, 3)},
        {
            "w": sf.Layout((32, 64), E4M3, ranks),
            "s": sf.Layout((8, 8), "float32", {r: [(0, 8), (0, 8)] for r in range(replicas)}),
        },
        replicas,
    )
    once = 32 * 64 + 8 * 8 * 4
    assert plan.egress_nbytes == once
    assert plan.nbytes - plan.exchange_nbytes == replicas * once
    assert plan.staging_nbytes == 2 * 8 * 4
    passed = plan.moves.source_rank >= plan.source_ranks
    assert all(plan.conversions[c].is_bits for c in plan.moves.convert[passed])


@pytest.mark.parametrize("prefix", ["", "h.{i}."])
def test_scales_are_passed_on_after_all_that_may_write_them_even_where_they_are_larger(prefix: str) -> None:
    """A block of one element: codes are a quarter of the scales' bytes."""
    w, s = prefix + "w", prefix + "s"
    boxes = {rank: [(0, 512), (0, 512)] for rank in range(3)}
    plan = planned(
        {w: sf.src(w).quantize(formats.Fp8Block(rows=1, columns=1)), s: sf.scale_of(w)},
        {w.format(i=0): cut((512, 512), "float32", 0, 2)},
        {
            w.format(i=0): sf.Layout((512, 512), E4M3, boxes),
            s.format(i=0): sf.Layout((512, 512), "float32", boxes),
        },
        3,
    )
    moves = plan.moves
    scales = np.array([family.pattern.endswith("s") for family in plan.families])[moves.target_family]
    assert moves.order[scales & (moves.hop > 0)].min() > moves.order[~scales & (moves.hop == 0)].max()


def test_bands_of_large_replicas_end_at_blocks() -> None:
    ranks = {rank: [(0, 2048), (0, 1024)] for rank in range(4)}
    plan = planned(
        {"w": sf.src("w").quantize(formats.Fp8Block())},
        {"w": cut((2048, 1024), "bfloat16")},
        {"w": sf.Layout((2048, 1024), E4M3, ranks)},
        4,
    )
    assert len(plan.bands) > 1
    assert plan.staging_nbytes == 0


def test_dependencies_on_slots_point_to_smaller_order_numbers() -> None:
    plan = simple(formats.Fp8Channel(), (8, 64), (8, 1), source=(1, 4), target=(1, 2), layers=5)
    filled: dict[tuple[int, int], int] = {}
    read = 0
    for number, (move, k) in enumerate(plan.moves.in_order()):
        layer = move.target_tensor + k * move.target_tensor_step
        if move.target_family in plan.staging_families:
            filled[move.target_family, layer] = number
        for family in (plan.blocks[move.block].family if move.block >= 0 else -1, move.source_family):
            if family in plan.staging_families:
                read += 1
                assert number > filled[family, layer]
                filled[family, layer] = min(filled[family, layer], 1 << 30)
    assert read == 5 * (4 + 1)
    assert len(filled) == 5
    order = [n for n, (m, _) in enumerate(plan.moves.in_order()) if m.target_family in plan.staging_families]
    assert len(order) == 5 * 4


def test_a_quantized_plan_survives_saving_and_plans_equal_ones() -> None:
    plan = simple(formats.Fp8Channel(floor=1e-3), (32, 64), (32, 1), source=(1, 2), layers=2)
    file = io.BytesIO()
    plan.save(file)
    file.seek(0)
    again = load(file)
    assert again == plan
    assert again.blocks == plan.blocks
    assert again.conversions == plan.conversions
    assert [f.expr for f in again.families] == [f.expr for f in plan.families]
    other = simple(formats.Fp8Channel(floor=2e-3), (32, 64), (32, 1), source=(1, 2), layers=2)
    assert other.digest != plan.digest


# Updates


def small_rollout(rng: np.random.Generator) -> tuple[dict, sf.Plan, dict[str, np.ndarray]]:
    """Two trainers cut rows between blocks, two replicas of two ranks."""
    over, rollout = mesh((2,), "fsdp"), mesh((2, 2), "replica tp", [4, 5, 6, 7])
    values = {f"h.{i}.w": fresh(rng, 36, 32, dtype="bfloat16") for i in range(3)}
    target = {f"h.{i}.w": like((32, 36), E4M3, rollout, "tp") for i in range(3)}
    target |= {f"h.{i}.s": like((8, 5), "float32", rollout, "tp") for i in range(3)}
    mapping = sf.Mapping({
        "h.{i}.w": sf.src("h.{i}.w").rearrange("k n -> n k").quantize(SMALL),
        "h.{i}.s": sf.scale_of("h.{i}.w"),
    })  # fmt: skip
    params = {name: put(x, over, "fsdp") for name, x in values.items()}
    return params, sf.register(sf.make_plan(params, target, mapping)), values


def test_an_update_writes_codes_and_scales_in_place(rng: np.random.Generator) -> None:
    params, plan, values = small_rollout(rng)
    assert plan.staging_nbytes == 3 * 8 * 4, "18 columns of a row are in the middle of a block"
    for shrink in (1, 64):  # maxima of an earlier update must not stay
        now = {name: x / ml_dtypes.bfloat16(shrink) for name, x in values.items()}
        params = {name: put(x, mesh((2,), "fsdp"), "fsdp") for name, x in now.items()}
        out = updated(params, plan)
        for i in range(3):
            codes, scales = blocks_by_hand(np.ascontiguousarray(now[f"h.{i}.w"].T), 4, 8)
            assert_holds(out[f"h.{i}.w"], codes, f"codes {i}")
            assert_holds(out[f"h.{i}.s"], scales, f"scales {i}")
        assert sf.verify(params, plan) == plan.target_nbytes == 4 * 3 * (16 * 36 + 4 * 5 * 4)
    seen: list[int] = []
    sf.sync(params, plan, progress=seen.append)
    assert sum(seen) == plan.target_nbytes


def test_verify_finds_a_wrong_code_and_a_wrong_scale(rng: np.random.Generator) -> None:
    params, plan, _ = small_rollout(rng)
    sf.sync(params, plan)
    for shard in list(plan.registered().buffers.values())[::7]:
        old = ctypes.string_at(shard.address + 5, 1)
        ctypes.memset(shard.address + 5, old[0] ^ 1, 1)
        with pytest.raises(sf.VerificationError, match="1 target shards"):
            sf.verify(params, plan)
        ctypes.memset(shard.address + 5, old[0], 1)
    assert sf.verify(params, plan) == plan.target_nbytes


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("row", [3, 17, 18])  # inside one shard's block, and on both sides of the shared one
def test_nan_and_infinity_poison_an_update_with_the_tensors_name(
    rng: np.random.Generator, bad: float, row: int
) -> None:
    params, plan, values = small_rollout(rng)
    sf.sync(params, plan)
    broken = values["h.1.w"].copy()
    broken[row, 5] = bad
    over = mesh((2,), "fsdp")
    with pytest.raises(
        sf.NotFinite, match=r"target 'h\.1\.[ws]': quantize: the values of 'h\.1\.w' hold NaN or infinity, but"
    ):
        sf.sync(params | {"h.1.w": put(broken, over, "fsdp")}, plan)
    with pytest.raises(sf.Poisoned, match=r"NotFinite.*weights\. A complete sf\.sync"):
        sf.params(plan)
    sf.sync(params, plan)
    assert sf.verify(params, plan) == plan.target_nbytes


def test_values_that_the_mapping_makes_infinite_are_blamed_on_it_too() -> None:
    names = [f"w{k}" for k in range(6)]
    value = sf.concat([sf.src(name) for name in names], axis=0).scale(1e38).quantize(SMALL)
    values = {name: np.full((4, 8), 10, np.float32) for name in names}
    with pytest.raises(sf.NotFinite) as caught:
        evaluate(value, lambda name, _: values[name], 0, ())
    made = "the values of 'w0', 'w1', 'w2', 'w3' and 2 more, which the mapping's scale or cast may have made so, hold"
    assert f"{made} NaN or infinity in 6 of 6 blocks" in str(caught.value)
    plan = planned({"w": value}, {n: cut((4, 8), "float32") for n in names}, {"w": cut((24, 8), E4M3)})
    with pytest.raises(sf.NotFinite) as caught:
        replay(plan, lambda family, tensor, rank: np.full(24 * 8, 10, np_dtype(plan.families[family].layout.dtype)))
    assert f"target 'w': quantize: {made} NaN or infinity, but" in str(caught.value)


def test_replicas_may_differ_in_format(rng: np.random.Generator) -> None:
    x = fresh(rng, 16, 32)
    params = {"w": put(x, mesh((2,), "a"), "a")}
    rollout = mesh((2,), "b", [4, 5])
    trees = {
        "plain": {"w": like((16, 32), "bfloat16", rollout, "b")},
        "fp8": {"w": like((16, 32), E4M3, rollout, "b"), "s": like((4, 4), "float32", rollout, "b")},
        "int8": {"w": like((16, 32), "int8", rollout, None, "b"), "s": like((16, 1), "float32", rollout)},
    }
    mappings = {
        "plain": sf.Mapping({"w": sf.src("w").astype("bfloat16")}),
        "fp8": sf.Mapping({"w": sf.src("w").quantize(SMALL), "s": sf.scale_of("w")}),
        "int8": sf.Mapping({"w": sf.src("w").quantize(formats.Int8Channel()), "s": sf.scale_of("w")}),
    }
    plan = sf.register(sf.make_plan(params, sf.replicas(trees), mappings))
    out = updated(params, plan)
    codes, scales = blocks_by_hand(x, 4, 8)
    assert_holds(out["fp8"]["w"], codes)
    assert_holds(out["fp8"]["s"], scales)
    steps = np.abs(x).max(1, keepdims=True) / np.float32(127)
    assert_holds(out["int8"]["s"], steps)
    assert_holds(out["int8"]["w"], np.rint(x / steps).astype(np.int8))
    assert sf.verify(params, plan) == plan.target_nbytes


def test_rank_local_trees_and_aliases_of_codes_and_scales(rng: np.random.Generator) -> None:
    x = fresh(rng, 16, 32)
    params = {"w": put(x, mesh((2,), "a"), "a")}
    codes_, scales_ = np.zeros((8, 32), E4M3), np.zeros((2, 4), np.float32)
    target = sf.local([{"w": codes_, "tied": codes_, "s": scales_, "tied_s": scales_}] * 2)
    mapping = sf.Mapping({
        "w": sf.src("w").quantize(SMALL), "tied": sf.alias("w"), "s": sf.scale_of("w"), "tied_s": sf.alias("s"),
    })  # fmt: skip
    plan = sf.register(sf.make_plan(params, target, mapping))
    out = updated(params, plan)
    codes, scales = blocks_by_hand(x, 4, 8)
    for rank, name in itertools.product(range(2), ("w", "tied")):
        assert_same_bits(out[rank][name], codes[rank * 8 : rank * 8 + 8])
    for rank, name in itertools.product(range(2), ("s", "tied_s")):
        assert_same_bits(out[rank][name], scales[rank * 2 : rank * 2 + 2])


def test_the_report_names_formats_scopes_and_staging() -> None:
    plan = sf.make_plan(
        {"w": cut((16, 8), "bfloat16", 1, 2), "v": cut((16, 8), "bfloat16", 1, 2)},
        {
            "w": cut((16, 8), E4M3, 0, 2), "s": cut((2, 1), "float32", 0, 2), "v": cut((16, 8), E4M3, 0, 2),
        },
        sf.Mapping({
            "w": sf.src("w").quantize(formats.vllm_fp8_tensor()), "s": sf.scale_of("w"),
            "v": sf.src("v").quantize(SMALL),
        }),
    )  # fmt: skip
    text = plan.explain()
    assert "Fp8Tensor per what each rank holds" in text
    assert "changes with the number of ranks" in text
    assert "Fp8Block per block" in text
    assert "staging" in text
    shares = [float(x) for x in re.findall(r"([0-9.]+)% +[0-9]+$", text.partition("Conversions")[2], re.MULTILINE)]
    assert len(shares) == len(plan.conversions)
    assert abs(sum(shares) - 100) < 0.5
    assert f"{plan.staging_nbytes} B beside sources and targets; {plan.exchange_nbytes} B of block maxima" in text


# Refusals


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"w": sf.src("w").quantize(SMALL).quantize(SMALL)}, "quantize: stands inside"),
        ({"w": sf.src("w").quantize(SMALL).rearrange("a b -> b a")}, "quantize: stands inside"),
        ({"w": sf.src("w").quantize(SMALL).astype("bfloat16")}, "quantize: astype follows"),
        ({"w": sf.concat([sf.src("w").quantize(SMALL), sf.src("w")])}, "quantize: stands inside"),
    ],
)
def test_a_quantize_inside_another_operation_is_refused(entries: dict[str, sf.Expr], message: str) -> None:
    with pytest.raises(sf.LanguageError, match=message):
        sf.Mapping(entries)


def test_arguments_that_are_no_format_or_name_are_refused() -> None:
    with pytest.raises(sf.LanguageError, match=r"'fp8' is not a format"):
        sf.src("w").quantize("fp8")
    with pytest.raises(sf.LanguageError, match="a string is needed"):
        sf.scale_of(sf.src("w"))


@pytest.mark.parametrize(
    ("dtype", "target", "entries", "message"),
    [
        ("float32", "bfloat16", {"w": sf.src("w").quantize(SMALL)}, "is bfloat16, but its mapping quantizes to float8"),
        ("int32", E4M3, {"w": sf.src("w").quantize(SMALL)}, "quantize: applied to int32"),
        ("float64", E4M3, {"w": sf.src("w").quantize(SMALL)}, "quantize: applied to float64"),
        ("float32", "float32", {"w": sf.scale_of("v")}, "quantized target 'v' is not in the mapping"),
        ("float32", "float32", {"w": sf.scale_of("w")}, "scale_of"),
    ],
)
def test_targets_that_cannot_be_quantized_are_listed(
    dtype: str, target: object, entries: dict[str, sf.Expr], message: str
) -> None:
    with pytest.raises(sf.PlanError, match=message):
        planned(entries, {"w": cut((16, 32), dtype)}, {"w": cut((16, 32), target)})


def test_scales_of_a_target_that_is_not_quantized_or_not_there_are_refused() -> None:
    for entries, targets, message in (
        ({"w": sf.src("w"), "s": sf.scale_of("w")}, ["w", "s"], r"'w' is mapped without \.quantize"),
        ({"w": sf.src("w").quantize(SMALL), "s": sf.scale_of("w")}, ["s"], "'w' is no target here"),
    ):
        with pytest.raises(sf.PlanError, match=message):
            planned(entries, {"w": cut((16, 32), "float32")}, {name: cut((16, 32), "float32") for name in targets})


def test_scales_that_belong_to_several_entries_are_refused_instead_of_taken_from_the_first() -> None:
    square = cut((8, 8), "bfloat16")
    names = ["h.0", "h.1"]
    entries = {
        "h.{i:0:1}.w": sf.src("a.{i}").quantize(SMALL),
        "h.{i:1:}.w": sf.src("b.{i}").quantize(SMALL),
        "h.{i}.s": sf.scale_of("h.{i}.w"),
    }
    sources = {f"{side}.{i}": square for side in "ab" for i in range(2)}
    targets = {f"{name}.w": cut((8, 8), SMALL.codes) for name in names}
    targets |= {f"{name}.s": cut((2, 1), "float32") for name in names}
    with pytest.raises(sf.PlanError, match=r"'h\.1\.w' has another entry than 'h\.0\.w'. Write one for each entry"):
        planned(entries, sources, targets, unused=("*",))


@pytest.mark.parametrize("dtype", ["float32", "float8_e8m0fnu"])
def test_bytes_of_exponents_are_not_cast_to_numbers(dtype: str) -> None:
    entries = {"w": sf.src("w").quantize(formats.ocp_mxfp8()), "s": sf.scale_of("w")}
    targets = {"w": cut((4, 64), "float8_e4m3fn"), "s": cut((4, 2), dtype)}
    with pytest.raises(sf.PlanError, match=f"holds E8M0 bytes, but its dtype is {dtype}. Register uint8"):
        planned(entries, {"w": cut((4, 64), "float32")}, targets, allow_cast=("*",))


def test_an_alias_that_is_cut_into_other_blocks_than_its_target_is_refused() -> None:
    entries = {"w": sf.src("w").quantize(formats.vllm_fp8_tensor()), "x": sf.alias("w"), "s": sf.scale_of("w")}
    targets = {"w": cut((8, 8), "float8_e4m3fn", 0, 2), "x": cut((8, 8), "float8_e4m3fn"), "s": cut((2, 1), "float32")}
    with pytest.raises(sf.PlanError, match="it is an alias of 'w', but cut otherwise"):
        planned(entries, {"w": cut((8, 8), "float32")}, targets, ranks=2)
    targets["x"] = targets["w"]
    planned(entries, {"w": cut((8, 8), "float32")}, targets, ranks=2)


def test_a_plan_is_not_run_with_another_class_of_its_formats_name() -> None:
    def plan_with(divisor_: float) -> Plan:
        @dataclasses.dataclass(frozen=True, kw_only=True)
        class Mine(formats.Fp8Block):
            divisor = divisor_

        entries = {"w": sf.src("w").quantize(Mine(rows=4, columns=8)), "s": sf.scale_of("w")}
        targets = {"w": cut((8, 8), "float8_e4m3fn"), "s": cut((2, 1), "float32")}
        return planned(entries, {"w": cut((8, 8), "float32")}, targets)

    first = plan_with(448.0)
    kept = io.BytesIO()
    first.save(kept)
    assert load(io.BytesIO(kept.getvalue())).digest == first.digest
    assert plan_with(240.0).digest != first.digest
    with pytest.raises(sf.PlanFileError, match="Make the plan again"):
        load(io.BytesIO(kept.getvalue()))


def test_scales_of_scales_are_refused() -> None:
    with pytest.raises(sf.LanguageError, match="scales of scales"):
        sf.scale_of("w").quantize(SMALL)


@pytest.mark.parametrize("shape", [(0, 128), (128, 0), (2, 0, 128), (0, 128, 128)])
@pytest.mark.parametrize(
    "format",
    [
        formats.Fp8Block(), formats.Fp8Channel(), formats.vllm_fp8_channel(), formats.Fp8Tensor(),
        formats.Fp8Tensor(per="part"), formats.vllm_fp8_tensor(), formats.ocp_mxfp4(),
    ],
)  # fmt: skip
def test_an_empty_tensor_is_refused_as_one_that_is_not_quantized(
    format: formats.Format, shape: tuple[int, ...]
) -> None:
    entries = {"w": sf.src("w").quantize(format), "s": sf.scale_of("w")}
    grid = grid_shape(format, shape, ((), ()))
    assert 0 in grid
    targets = {"w": cut(format.stored_shape(shape), format.stored), "s": cut(grid, format.scale_dtype)}
    with pytest.raises(sf.PlanError) as caught:
        planned(entries, {"w": cut(shape, "float32")}, targets)
    found = [re.match(r"zero-size: .*?'(\w)'", fault) for fault in caught.value.faults]
    assert [match and match[1] for match in found] == ["w", "s"], caught.value.faults


def test_a_vector_is_not_quantized() -> None:
    with pytest.raises(sf.PlanError, match="has no rows and columns"):
        planned({"w": sf.src("w").quantize(SMALL)}, {"w": cut((16,), "float32")}, {"w": cut((16,), E4M3)})


def test_ranks_that_cut_a_block_are_refused_with_what_would_do() -> None:
    with pytest.raises(sf.PlanError) as caught:
        simple(formats.Fp8Block(), (768, 256), (6, 2), target=(0, 4))
    (fault,) = [f for f in caught.value.faults if "'h.0.w' of" in f and f.startswith("indivisible")]
    assert "4 cuts give parts of 192 rows, but a block of 128 rows may not cross" in fault
    assert "1, 2, 3, 6 cuts of equal size" in fault
    assert "blocks of 32, 48, 64, 96 rows" in fault


def test_fused_parts_that_cut_a_block_are_refused_with_what_would_do() -> None:
    parts = {"gate": cut((192, 256), "float32"), "up": cut((192, 256), "float32")}
    fused = sf.fuse(sf.src("gate"), sf.src("up"), axis=0)
    with pytest.raises(sf.PlanError, match=r"1 cuts give parts of 192, 192 rows.*blocks of 32, 48, 64, 96 rows"):
        planned({"w": fused.quantize(formats.Fp8Block())}, parts, {"w": cut((384, 256), E4M3)})
    planned({"w": fused.quantize(formats.Fp8Block(rows=64))}, parts, {"w": cut((384, 256), E4M3)})


def test_only_the_last_part_of_an_uncut_fuse_may_be_ragged(rng: np.random.Generator) -> None:
    """DeepSeek's fused_qkv_a: 1536 + 576 rows."""
    parts = {"q": fresh(rng, 24, 16), "kv": fresh(rng, 9, 16)}
    sources = {name: cut(x.shape, "float32") for name, x in parts.items()}
    fused = sf.fuse(sf.src("q"), sf.src("kv"), axis=0).quantize(formats.Fp8Block(rows=8, columns=8))
    plan = planned({"w": fused}, sources, {"w": cut((33, 16), E4M3)})
    codes, _ = blocks_by_hand(np.concatenate(list(parts.values())), 8, 8)
    assert_same_bits(replayed(plan, parts)["w", 0], codes)
    turned = sf.fuse(sf.src("kv"), sf.src("q"), axis=0).quantize(formats.Fp8Block(rows=8, columns=8))
    with pytest.raises(sf.PlanError, match="parts of 9, 24 rows"):
        planned({"w": turned}, sources, {"w": cut((33, 16), E4M3)})


def test_rank_scopes_need_ranks_that_tile_the_tensor() -> None:
    boxes = sf.Layout((16, 8), E4M3, {0: [(0, 10), (0, 8)], 1: [(6, 16), (0, 8)]})
    with pytest.raises(sf.PlanError, match="does not tile"):
        planned({"w": sf.src("w").quantize(formats.vllm_fp8_tensor())}, {"w": cut((16, 8), "float32")}, {"w": boxes}, 2)


def test_the_number_of_rows_follows_boxes_not_blocks() -> None:
    small, large = (simple(formats.Fp8Block(), (n, n), (n // 128, n // 128), source=(0, 2)) for n in (256, 4096))
    assert len(small.moves) == len(large.moves) == 4
    assert math.prod(large.moves[0].extents) == 2048 * 4096
