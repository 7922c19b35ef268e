"""What planning of blocks must not cost: rows, slots and seconds where heads or bands do not end at blocks."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from checks import assert_same_bits, blocks_by_hand, cut, fresh, replayed
from hypothesis import HealthCheck, given, settings, strategies as st
from random_problems import layouts

import shardfly_jax as sf
from shardfly_jax import formats
from shardfly_jax.sharding import quantized_rows
from shardfly_jax.sharding.families import TargetTree
from shardfly_jax.sharding.layouts import Layout
from shardfly_jax.sharding.plan import Plan
from shardfly_jax.sharding.planner import build_plan
from shardfly_jax.sharding.problem import Problem

E4M3 = ml_dtypes.float8_e4m3fn
BLOCK = formats.Fp8Block(rows=4, columns=8)
HEADS = sf.src("x").rearrange("d n h -> (n h) d").quantize(BLOCK)
"""With heads of 6 rows: one and a half blocks, as DeepSeek's `q_b_proj` has (192 rows, blocks of 128)."""


def planned(expr: sf.Expr, source: Layout, target: Layout, scales: Layout) -> Plan:
    mapping = sf.Mapping({"w": expr, "s": sf.scale_of("w")})
    tree = TargetTree(name="r", tensors={"w": target, "s": scales}, mapping=mapping, ranks=len(target.ranks))
    return build_plan(Problem({"x": source}, len(source.ranks), [tree]))


def encoding_rows(plan: Plan) -> int:
    return sum(plan.conversions[number].encodes is not None for number in plan.moves.convert.tolist())


def test_heads_of_one_and_a_half_blocks_are_encoded_in_one_move_per_shard(rng: np.random.Generator) -> None:
    x = fresh(rng, 32, 12, 6)
    plan = planned(HEADS, cut(x.shape, "float32", 0, 4), cut((72, 32), E4M3), cut((18, 4), "float32"))
    assert encoding_rows(plan) == 4
    assert len(plan.moves) == 8
    assert plan.staging_nbytes == 0
    codes, scales = blocks_by_hand(np.ascontiguousarray(x.transpose(1, 2, 0).reshape(72, 32)), 4, 8)
    have = replayed(plan, {"x": x})
    assert_same_bits(have["w", 0], codes)
    assert_same_bits(have["s", 0], scales)


def test_heads_that_shards_cut_share_only_the_block_at_the_cut(rng: np.random.Generator) -> None:
    """Shards of 5, 3 and 4 heads end at rows 30 (inside a block) and 48 (between two)."""
    x = fresh(rng, 8, 12, 6)
    boxes = {rank: [(0, 8), heads, (0, 6)] for rank, heads in enumerate([(0, 5), (5, 8), (8, 12)])}
    plan = planned(HEADS, Layout(x.shape, "float32", boxes), cut((72, 8), E4M3), cut((18, 1), "float32"))
    assert plan.staging_nbytes == 4
    codes, scales = blocks_by_hand(np.ascontiguousarray(x.transpose(1, 2, 0).reshape(72, 8)), 4, 8)
    have = replayed(plan, {"x": x})
    assert_same_bits(have["w", 0], codes)
    assert_same_bits(have["s", 0], scales)


@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(layouts((16, 4, 6), "float32", 8), st.integers(0, 2**32 - 1))
def test_heads_are_encoded_alike_for_every_sharding(source: Layout, seed: int) -> None:
    x = fresh(np.random.default_rng(seed), 16, 4, 6)
    plan = planned(HEADS, source, cut((24, 16), E4M3), cut((6, 2), "float32"))
    codes, scales = blocks_by_hand(np.ascontiguousarray(x.transpose(1, 2, 0).reshape(24, 16)), 4, 8)
    have = replayed(plan, {"x": x})
    assert_same_bits(have["w", 0], codes)
    assert_same_bits(have["s", 0], scales)


@pytest.mark.parametrize("shards", [2, 3])  # of 512 and of 341 or 342 columns: blocks that none or two of them share
def test_bands_are_cut_out_of_what_was_lowered_once(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, shards: int
) -> None:
    x = fresh(rng, 2048, 1024)
    edges = [k * 1024 // shards for k in range(shards + 1)]
    source = Layout(x.shape, "float32", {k: [(0, 2048), tuple(edges[k : k + 2])] for k in range(shards)})
    whole = {rank: [(0, 2048), (0, 1024)] for rank in range(2)}
    sides = source, Layout(x.shape, E4M3, whole), Layout((16, 8), "float32", {r: [(0, 16), (0, 8)] for r in range(2)})
    expr = sf.src("x").quantize(formats.Fp8Block())
    plan = planned(expr, *sides)
    assert len(plan.bands) > 2
    assert (plan.staging_nbytes > 0) == (shards == 3)
    codes, scales = blocks_by_hand(x, 128, 128)
    have = replayed(plan, {"x": x})
    for rank in range(2):
        assert_same_bits(have["w", rank], codes)
        assert_same_bits(have["s", rank], scales)
    monkeypatch.setattr(quantized_rows, "cut_at_bands", lambda rows, edges: None)
    assert planned(expr, *sides).digest == plan.digest, "as lowered band by band"


def test_rows_of_blocks_are_cut_between_blocks_where_smaller_bands_suit(rng: np.random.Generator) -> None:
    """Two rows of blocks of 1 MB: such parts are not contiguous, so forwards walk their rows."""
    x, ranks = fresh(rng, 256, 8192), range(4)
    whole = Layout(x.shape, E4M3, {rank: [(0, 256), (0, 8192)] for rank in ranks})
    scales = Layout((2, 64), "float32", {rank: [(0, 2), (0, 64)] for rank in ranks})
    plan = planned(sf.src("x").quantize(formats.Fp8Block()), cut(x.shape, "float32"), whole, scales)
    forwards = plan.moves.hop > 0
    assert set(plan.bands.tolist()) == {128 * 512, 2 * 64 * 4}
    assert (plan.moves.extents[forwards, :2] == [128, 512]).all(1).sum() == 3 * 32
    assert plan.staging_nbytes == 0
    codes, wanted = blocks_by_hand(x, 128, 128)
    have = replayed(plan, {"x": x})
    for rank in ranks:
        assert_same_bits(have["w", rank], codes)
        assert_same_bits(have["s", rank], wanted)


@pytest.mark.parametrize(
    ("shape", "format", "strides"),
    [
        ((256, 8200), formats.Fp8Block(), None),  # rows are no multiple of 16 bytes
        ((256, 8192), formats.Fp8Block(rows=64, columns=64), None),  # nor are runs of one block long enough
        ((1024, 8192), formats.Fp8Channel(), (1, 1024)),  # a block is as long as its axis
    ],
)
def test_what_forwards_would_pass_on_in_single_elements_or_short_runs_stays_in_one_piece(
    shape: tuple[int, int], format: sf.formats.Format, strides: tuple[int, int] | None
) -> None:
    ranks = range(4)
    held = None if strides is None else dict.fromkeys(ranks, strides)
    whole = Layout(shape, E4M3, {rank: [(0, n) for n in shape] for rank in ranks}, held)
    grid = tuple(1 if block is None else -(-n // block) for n, block in zip(shape, format.block, strict=True))
    scales = Layout(grid, "float32", {rank: [(0, n) for n in grid] for rank in ranks})
    plan = planned(sf.src("x").quantize(format), cut(shape, "bfloat16"), whole, scales)
    forwards = plan.moves.hop > 0
    assert forwards.any()
    assert (plan.moves.extents[forwards, 1:] == 1).all()
