"""How planning grows: with layers, tensors, trainer ranks and replicas, each alone and doubled from line to line.

As a program (`python -m benchmarks.growth SERIES N`) it plans one point, so that memory is each point's own.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh

import shardfly_jax as sf
from benchmarks import children
from benchmarks.planning import qwen, timed

LIMIT_SECS = 300
FITTED = 5
"""The exponent is fitted over so many of the largest points: small plans cost what Python costs."""

Inputs = tuple[Any, Any, sf.Mapping]


def layers(n: int) -> Inputs:
    """Qwen3-8B with n layers, 4 trainers to 2 replicas of TP 2."""
    model = dataclasses.replace(sf.engines.model("Qwen3-8B"), layers=n)
    trainer = sf.engines.tunix.trainer(model, AbstractMesh((2, 2), ("fsdp", "tp")))
    rollout = sf.engines.vllm.rollout(model, AbstractMesh((2, 2), ("replica", "tp")))
    return trainer.params, rollout.params, sf.engines.route(trainer, rollout)


def tensors(n: int) -> Inputs:
    """n matrices with names and an expression of their own each, 4 trainers to 4 rollouts, transposed."""
    shape = (1024, 512)
    rows = {rank: [(256 * rank, 256 * rank + 256), (0, 512)] for rank in range(4)}
    columns = {rank: [(0, 512), (256 * rank, 256 * rank + 256)] for rank in range(4)}
    names = [f"w{chr(97 + k % 26)}{np.base_repr(k, 26)}x" for k in range(n)]
    source = {name: sf.Layout(shape, "bfloat16", rows) for name in names}
    target = {name: sf.Layout(shape[::-1], "bfloat16", columns) for name in names}
    return source, target, sf.Mapping({name: sf.src(name).rearrange("a b -> b a") for name in names})


def trainers(n: int) -> Inputs:
    """Qwen3-8B, n trainers (tp 4, the rest fsdp) to a replica of TP 8."""
    return qwen("Qwen3-8B", n // 4, 4, 1, 8)


def replicas(n: int) -> Inputs:
    """Qwen3-8B, 8 trainers to n replicas of TP 1."""
    return qwen("Qwen3-8B", 4, 2, n, 1)


SERIES: dict[str, tuple[Callable[[int], Inputs], list[int]]] = {
    "layers": (layers, [2**k for k in range(2, 11)]),
    "tensors": (tensors, [2**k for k in range(2, 13)]),
    "trainers": (trainers, [2**k for k in range(2, 11)]),
    "replicas": (replicas, [2**k for k in range(12)]),
}
"""What is planned, and for which n."""


def measure(series: str, n: int) -> dict[str, Any]:
    """Plans one point."""
    _, secs, sizes = timed(*SERIES[series][0](n))
    return {"series": series, "n": n, "secs": secs, **sizes}


def exponent(rows: list[dict[str, Any]]) -> float:
    """By which power of n the median time grows, at the large end."""
    last = sorted(rows, key=lambda row: row["n"])[-FITTED:]
    n, secs = [row["n"] for row in last], [statistics.median(row["secs"]) for row in last]
    return float(np.polyfit(np.log2(n), np.log2(secs), 1)[0])


def run(report: Callable[[str], None]) -> list[dict[str, Any]]:
    """All points, one process each; a row has the exponent of its series."""
    rows = []
    for series, (_, counts) in SERIES.items():
        of = [children.measured("growth", series, str(n), limit_secs=LIMIT_SECS) for n in counts]
        found = exponent(of)
        report(f"{series}: exponent {found:.2f}")
        rows += [row | {"exponent": found} for row in of]
    return rows


if __name__ == "__main__":
    children.emit(measure(sys.argv[1], int(sys.argv[2])))
