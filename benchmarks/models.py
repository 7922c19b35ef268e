"""Planning every known model at several scales, each plan in a process of its own.

From trainers of tunix, else of MaxText, else of Hugging Face's names, to as many rollouts of vLLM in replicas of TP 8,
with whole experts where there are some. No topology is given. For one host on each side also the tables that the
persistent kernel would follow.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from jax.sharding import AbstractMesh, PartitionSpec

import shardfly_jax as sf
from benchmarks import children
from benchmarks.planning import timed
from shardfly_jax.engines import Side, hf, maxtext, tunix, vllm
from shardfly_jax.engines.models import names
from shardfly_jax.sharding.optable import make_tables

SCALES = (8, 64, 512)
"""Ranks on each side."""
WITH_TABLES = 8
"""Ranks on each side up to which tables are made: those of one host."""
LIMIT_SECS = 300


def trainer(name: str, ranks: int) -> tuple[str, Side]:
    """The trainer side of a model: in words, and as the engine's adapter describes it."""
    model = sf.engines.model(name)
    if model.family in tunix.FAMILIES:
        mesh = AbstractMesh((ranks // 4, 4), ("fsdp", "tp"))
        return f"tunix fsdp {ranks // 4} x tp 4", tunix.trainer(model, mesh)
    if model.family in maxtext.FAMILIES:
        expert = min(ranks // 8, 8)
        data = ranks // 8 // expert
        mesh = AbstractMesh((data, 8, expert), ("data", "fsdp", "expert"))
        return f"maxtext data {data} x fsdp 8 x expert {expert}", maxtext.trainer(model, mesh)
    mesh = AbstractMesh((ranks // 8, 8), ("data", "fsdp"))
    return f"hf data {ranks // 8} x fsdp 8", hf.trainer(model, mesh, specs={"*": PartitionSpec("fsdp")})


def measure(name: str, ranks: int) -> dict[str, Any]:
    """Plans one model at one scale."""
    model = sf.engines.model(name)
    words, source = trainer(name, ranks)
    mesh = AbstractMesh((ranks // 8, 8), ("replica", "tp"))
    target = vllm.rollout(model, mesh, expert_parallel=model.experts is not None)
    mapping = sf.engines.route(source, target)
    plan, secs, sizes = timed(source.params, target.params, mapping)
    row = {"model": name, "ranks": ranks, "trainer": words, "secs": secs, **sizes, "payload_nbytes": plan.nbytes}
    if ranks <= WITH_TABLES:
        start = time.perf_counter()
        tables = list(make_tables(plan, {rank: rank for rank in range(plan.ranks)}, lambda key: key).tables.values())
        row |= {
            "tables_secs": time.perf_counter() - start,
            "tables_nbytes": sum(table.words.nbytes for table in tables),
            "records": max(len(table.words) for table in tables),
            "tiles": max(table.n_tiles for table in tables),
        }
    return row


def run(report: Callable[[str], None]) -> list[dict[str, Any]]:
    """All models at all scales."""
    rows = []
    for name in names():
        for ranks in SCALES:
            rows.append(children.measured("models", name, str(ranks), limit_secs=LIMIT_SECS))
            report(f"{name}, {ranks} -> {ranks} ranks: {min(rows[-1]['secs']):.2f} s")
    return rows


if __name__ == "__main__":
    children.emit(measure(sys.argv[1], int(sys.argv[2])))
