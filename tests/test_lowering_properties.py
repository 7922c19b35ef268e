"""Random mappings, meshes and layouts against the meaning of the language."""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, given, settings, strategies as st
from random_problems import Case, cases, check
from random_quantized import quantized_cases

from shardfly_jax.sharding.moves import source_key
from shardfly_jax.sharding.plan import slot_key
from shardfly_jax.sharding.topology import preset

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


@settings(max_examples=400, suppress_health_check=SLOW)
@given(cases())
def test_every_target_element_is_written_once_with_the_bytes_of_its_meaning(case: Case) -> None:
    check(case, case.plan())


@settings(max_examples=100, suppress_health_check=SLOW)
@given(st.one_of(cases(max_depth=2), quantized_cases()))
def test_every_dependency_points_to_a_smaller_order_number(case: Case) -> None:
    plan = case.plan(preset("h100", hosts=4))
    rows, ks = plan.moves.expanded()
    arrived: dict[tuple[int, int, int, int], int] = {}
    slots = np.isin(plan.moves.target_family, plan.staging_families)[rows]
    full = {
        (plan.moves[row].target_family, plan.moves[row].target_tensor + k * plan.moves[row].target_tensor_step): number
        for number, (row, k) in enumerate(zip(rows.tolist(), ks.tolist(), strict=True))
        if slots[number]
    }
    for number, (row, k) in enumerate(zip(rows.tolist(), ks.tolist(), strict=True)):
        move = plan.moves[row]
        if move.block >= 0 and plan.blocks[move.block].family >= 0:
            assert full[slot_key(plan, move, k)[:2]] < number, "encoded before the slots were full"
        if move.source_family in plan.staging_families:
            assert full[source_key(move, k)[:2]] < number, "scales read before the slots were full"
    for row, k in zip(rows.tolist(), ks.tolist(), strict=True):
        move = plan.moves[row]
        key = move.band, move.target_tensor + k * move.target_tensor_step
        if move.hop:
            have = arrived[
                *key[:1], move.source_tensor + k * move.source_tensor_step, move.source_family, move.source_rank
            ]
            assert have == plan.bands[move.band], "forwarded before all of the band had arrived"
        if move.band >= 0:
            here = (*key, move.target_family, move.target_rank)
            arrived[here] = arrived.get(here, 0) + plan.move_nbytes(move)


@settings(max_examples=100, suppress_health_check=SLOW)
@given(st.one_of(cases(), quantized_cases()))
def test_trainers_send_each_distinct_byte_once(case: Case) -> None:
    plan = case.plan()
    distinct = {}
    for index in plan.target_families:
        family = plan.families[index]
        cut = family.layout.cuts(0)
        for (box, strides), _ in family.layout.holders:
            size = np.prod([hi - lo for lo, hi in box]) * family.layout.itemsize
            distinct[family.expr, family.first, family.count, cut, box, strides, family.layout.dtype] = (
                int(size) * family.count
            )
    to_slots = np.isin(plan.moves.target_family, plan.staging_families)
    fills = plan.row_nbytes[(plan.moves.source_rank < 0) & ~to_slots].sum()
    assert plan.egress_nbytes + fills <= sum(distinct.values())
