"""Predicted update times on the preset topologies, against the bound of each plan's busiest link."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import shardfly_jax as sf
from benchmarks.planning import qwen

GPU = "h200"
"""The presets of H20, H100 and H200 have one NVLink rate, so one of them speaks for all."""
CASES = [
    # model, trainer fsdp, trainer tp, replicas, rollout tp
    ("Qwen3-30B-A3B", 2, 2, 2, 2),
    ("Qwen3-30B-A3B", 4, 2, 1, 8),
    ("Qwen3-30B-A3B", 4, 2, 4, 2),
    ("Qwen3-30B-A3B", 8, 2, 4, 4),
    ("Qwen3-30B-A3B", 8, 4, 8, 4),
    ("Qwen3-235B-A22B", 16, 4, 4, 8),
]


def run(report: Callable[[str], None]) -> list[dict[str, Any]]:
    """Every case on as many hosts of 8 H200 as it needs, planned for that topology."""
    rows = []
    for model, fsdp, trainer_tp, replicas, tp in CASES:
        ranks = fsdp * trainer_tp + replicas * tp
        report(f"{model}: {fsdp * trainer_tp} -> {replicas} x TP {tp}")
        inputs = qwen(model, fsdp, trainer_tp, replicas, tp)
        topology = sf.preset(GPU, hosts=-(-ranks // 8))
        plan = sf.make_plan(*inputs, topology=topology)
        predicted = plan.simulate(topology)
        first_hop = plan.first_hop_nbytes
        rows.append(
            {
                "model": model,
                "trainer": f"fsdp {fsdp} x tp {trainer_tp}",
                "rollout": f"{replicas} x TP {tp}",
                "topology": topology.name,
                "secs": predicted.secs,
                "bound_secs": predicted.bound_secs,
                "ratio": predicted.ratio,
                "busiest": predicted.busiest,
                "egress_nbytes": plan.egress_nbytes,
                "broadcast_nbytes": plan.broadcast_nbytes,
                "first_hop_max_over_mean": float(first_hop.max() / first_hop.mean()),
            }
        )
    return rows
