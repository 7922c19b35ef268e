"""Quantization in moves, for random shardings: equal to quantizing the whole tensor, bit for bit."""

from __future__ import annotations

import io
import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from random_problems import Case, check, layouts
from random_quantized import payload_layouts, quantized_cases

from shardfly_jax import formats
from shardfly_jax.sharding import blocking, routing
from shardfly_jax.sharding.families import TargetTree
from shardfly_jax.sharding.language import scale_of, src
from shardfly_jax.sharding.layouts import Layout
from shardfly_jax.sharding.mapping import Mapping
from shardfly_jax.sharding.moves import Key, target_key, target_view
from shardfly_jax.sharding.plan import Plan, load
from shardfly_jax.sharding.planner import build_plan
from shardfly_jax.sharding.problem import Problem
from shardfly_jax.sharding.quantization import Format
from shardfly_jax.sharding.simulate import simulate
from shardfly_jax.sharding.topology import preset

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


@settings(max_examples=300, suppress_health_check=SLOW)
@given(quantized_cases())
def test_codes_and_scales_are_those_of_the_whole_tensor_for_every_sharding(case: Case) -> None:
    check(case, case.plan())


@pytest.mark.hypothesis
def test_grids_too_large_to_mark_keep_boxes_of_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocking, "MASK_SIZE", 0)

    @settings(max_examples=60, suppress_health_check=SLOW)
    @given(quantized_cases())
    def run(case: Case) -> None:
        check(case, case.plan())

    run()


@pytest.mark.hypothesis
@pytest.mark.parametrize("nbytes", [4, 16, 64])
def test_bands_that_are_smaller_than_blocks_write_every_code_once(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    monkeypatch.setattr(routing, "BAND_NBYTES", 4 * nbytes)
    monkeypatch.setattr(routing, "SMALLEST_BAND_NBYTES", nbytes)

    @settings(max_examples=100, suppress_health_check=SLOW)
    @given(quantized_cases())
    def run(case: Case) -> None:
        check(case, case.plan())

    run()


def test_a_replicated_matrix_of_few_rows_of_blocks_is_cut_between_rows_of_blocks() -> None:
    """It once was cut inside blocks, into bands that are not contiguous; forwards copied them as if they were."""
    box, rows, columns = [(0, 384), (0, 8192)], 384, 8192
    format = formats.Fp8Block(rows=64, columns=64)
    target = TargetTree(
        name="t",
        tensors={
            "w": Layout((rows, columns), format.codes, dict.fromkeys(range(16), box)),
            "s": Layout((6, 128), format.scale_dtype, {rank: [(0, 6), (0, 128)] for rank in range(16)}),
        },
        mapping=Mapping({"w": src("w").quantize(format), "s": scale_of("w")}),
        ranks=16,
        replicas={f"r{k}": (k,) for k in range(16)},
    )
    plan = build_plan(Problem({"w": Layout((rows, columns), "float32", {0: box})}, 1, [target]), None)
    written: dict[Key, np.ndarray] = {}
    for move, k in plan.moves.in_order():
        key = target_key(move, k)
        if key[0] in plan.target_families:
            shape = plan.families[key[0]].layout.buffer_shape(key[2])
            flat = written.setdefault(key, np.zeros(math.prod(shape), np.int64))
            target_view(move).of(flat)[...] += 1
    assert len(written) == 32
    assert all((count == 1).all() for count in written.values())


@settings(max_examples=60, suppress_health_check=SLOW)
@given(quantized_cases(max_depth=1))
def test_quantized_plans_are_deterministic_saved_whole_and_simulated(case: Case) -> None:
    plan = case.plan()
    assert case.plan().digest == plan.digest
    file = io.BytesIO()
    plan.save(file)
    file.seek(0)
    again = load(file)
    assert again.digest == plan.digest
    check(case, again)
    assert simulate(plan, preset("h100", hosts=8)).ratio > 0.999  # rounding of sums


@st.composite
def identities(draw: Callable) -> tuple[Format, Layout, Layout]:
    """A format, and layouts of a source and of a target of one shape."""
    shape = (draw(st.sampled_from([1, 5, 8, 12])), draw(st.sampled_from([2, 6, 12, 16])))
    format = draw(st.sampled_from([formats.Fp8Block(rows=2, columns=3), formats.Fp8Channel(), formats.Fp8Tensor()]))
    return format, draw(layouts(shape, "float32", 8)), draw(payload_layouts(shape, format, 8, None))


@settings(max_examples=200, suppress_health_check=SLOW)
@given(identities(), st.integers(1, 3))
def test_staging_is_one_slot_for_each_block_that_boxes_share(case: tuple[Format, Layout, Layout], layers: int) -> None:
    format, source, target = case
    names = [f"h.{i}" for i in range(layers)]
    tree = TargetTree(
        name="r", tensors=dict.fromkeys(names, target), mapping=Mapping({"h.{i}": src("h.{i}").quantize(format)}),
        ranks=len(target.ranks),
    )  # fmt: skip
    plan: Plan = build_plan(Problem(dict.fromkeys(names, source), len(source.ranks), [tree]))
    rows, columns = (n if b is None else b for n, b in zip(source.shape, format.block, strict=True))
    shared = 0
    for top in range(0, source.shape[0], rows):
        for left in range(0, source.shape[1], columns):
            block = (top, min(top + rows, source.shape[0])), (left, min(left + columns, source.shape[1]))
            shared += any(
                len({box for (box, _), _ in layout.holders if _meet(box, block)}) > 1 for layout in (source, target)
            )
    assert plan.staging_nbytes == 4 * layers * shared


def _meet(box: tuple[tuple[int, int], ...], other: tuple[tuple[int, int], ...]) -> bool:
    return all(lo < hi2 and lo2 < hi for (lo, hi), (lo2, hi2) in zip(box, other, strict=True))
