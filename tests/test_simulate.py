"""The simulator: bounds by hand, and what a schedule may cost above them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from jax.sharding import AbstractMesh

import shardfly_jax as sf
from shardfly_jax.sharding.topology import Topology, preset

FAST = Topology(name="test", hosts=1, gpus_per_host=8, nvlink_rate=1e9, nic_rate=0.0, hop_secs=0.0)


def copies(source_ranks: int, target_ranks: int, layers: int = 64, size: int = 1 << 18) -> sf.Plan:
    """Whole tensors on trainer rank 0 (of several) to each of several rollout ranks."""
    cut = [(k * size // source_ranks, (k + 1) * size // source_ranks) for k in range(source_ranks)]
    source = sf.Layout((size,), "float32", {r: (c,) for r, c in enumerate(cut)})
    target = sf.Layout((size,), "float32", dict.fromkeys(range(target_ranks), ((0, size),)))
    names = [f"w.{i}" for i in range(layers)]
    return sf.make_plan(dict.fromkeys(names, source), dict.fromkeys(names, target))


def test_one_sender_and_one_receiver_take_bytes_over_rate() -> None:
    plan = copies(1, 1)
    predicted = plan.simulate(FAST)
    assert predicted.bound_secs == pytest.approx(plan.nbytes / 1e9)
    assert predicted.secs == pytest.approx(predicted.bound_secs)


def test_four_replicas_cost_one_broadcast_of_egress_and_little_more_time() -> None:
    one, four = copies(1, 1), copies(1, 4)
    assert four.egress_nbytes == one.egress_nbytes
    assert four.simulate(FAST).secs < 1.1 * one.simulate(FAST).secs


def test_bytes_between_hosts_go_over_the_nic() -> None:
    topology = dataclasses.replace(FAST, hosts=2, gpus_per_host=1, nic_rate=1e8)
    plan = copies(1, 1)
    assert plan.simulate(topology).bound_secs == pytest.approx(plan.nbytes / 1e8)
    assert plan.simulate(topology).busiest.startswith("NIC")


def test_a_topology_with_too_few_places_is_refused() -> None:
    with pytest.raises(sf.PlanError, match="has 8 places, but the plan has 9 ranks"):
        copies(1, 8).simulate(FAST)


@pytest.mark.parametrize(
    ("fsdp", "trainer_tp", "replicas", "tp"), [(2, 2, 2, 2), (4, 2, 1, 8), (4, 2, 4, 2), (8, 2, 4, 4), (8, 4, 16, 4)]
)
def test_qwen3_30b_stays_within_a_tenth_of_its_bound(fsdp: int, trainer_tp: int, replicas: int, tp: int) -> None:
    model = sf.engines.model("Qwen3-30B-A3B")
    trainer = sf.engines.tunix.trainer(model, AbstractMesh((fsdp, trainer_tp), ("fsdp", "tp")))
    rollout = sf.engines.vllm.rollout(model, AbstractMesh((replicas, tp), ("replica", "tp")))
    topology = preset("h200", hosts=-(-(fsdp * trainer_tp + replicas * tp) // 8))
    plan = sf.make_plan(trainer.params, rollout.params, sf.engines.route(trainer, rollout), topology=topology)
    predicted = plan.simulate(topology)
    assert 1 <= predicted.ratio <= 1.1
    first_hop = plan.first_hop_nbytes
    assert first_hop.max() <= 1.1 * first_hop.mean()
    assert plan.egress_nbytes * replicas == pytest.approx(plan.broadcast_nbytes, rel=1e-3)
    assert np.trace(plan.traffic()) == 0
