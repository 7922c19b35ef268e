"""One job on several GPUs: links, our cases, and other systems' ways, one after the other, each in programs of its own.

The programs are watched (`children`), so that a hang costs one case. The bound is the busiest link at the rate of
`cudaMemcpyPeer`, one way or both ways, measured in the same job (`links`): each GPU gets once what it needs and does
not hold. `on_gpus` measures our cases, `peers` others' ways on the same tensors.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

import shardfly_jax as sf
from benchmarks import children, links, peers
from benchmarks.on_gpus import CASES

BUDGET_SECS = 350
"""A run ends within this, with what has been measured until then."""
PEERS_SECS = 150
"""Of that, what is kept for the peers."""
SILENCE_SECS = 100


class Save(Protocol):
    """Writes the results of a part so far."""

    def __call__(self, part: str, rows: list[dict[str, Any]], failed: list[dict[str, Any]]) -> None:
        """Replaces what is there."""


def run(report: Callable[[str], None], save: Save, budget_secs: float = BUDGET_SECS) -> list[dict[str, Any]]:
    """All cases, then all peers; what has been measured is saved after each. Returns the rows of our cases."""
    deadline = time.monotonic() + budget_secs
    ours: list[dict[str, Any]] = []
    failed: list[dict[str, Any]] = []
    nbytes = peers.job_of(sf.engines.model("Qwen3-8B"), "bfloat16").nbytes
    found: dict[str, Any] = {}
    try:
        words = ["-m", "benchmarks.links", str(nbytes)]
        for row in children.rows(words, silence_secs=SILENCE_SECS, deadline=deadline):
            found |= row
    except children.Died as error:
        if "gpus" not in found:
            raise
        failed.append({"case": "cudaMemcpyPeer", "error": str(error)})
    rate = links.rates(found)
    report(", ".join(f"{name} {value / 1e9:.1f} GB/s" for name, value in rate.items()))
    for case in CASES:
        if case.gpus > found["gpus"]:
            failed.append({"case": case.name, "error": f"needs {case.gpus} GPUs, and there are {found['gpus']}"})
    save("on_gpus", ours, failed)

    def programs(names: Sequence[str]) -> Iterator[dict[str, Any]]:
        return children.rows(
            ["-m", "benchmarks.on_gpus", *names],
            silence_secs=SILENCE_SECS,
            deadline=deadline - PEERS_SECS,
            env={"JAX_PLATFORMS": "cuda,cpu", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9"},
        )

    for row in children.each([case.name for case in CASES if case.gpus <= found["gpus"]], programs):
        if "kernel_secs" in row:
            known = {"gpu": found["gpu"], "rates": rate, "rates_are_of_this_run": "within" in found}
            ours.append(row | known | against_bound(row, rate))
            report(summary(ours[-1]))
        else:
            failed.append(row)
            report(f"{row['case']}: {row.get('error') or row['refused']}")
        save("on_gpus", ours, failed)
    peers.run(report, save, ours, found, deadline)
    return ours


def against_bound(row: dict[str, Any], rate: dict[str, float]) -> dict[str, float]:
    """The figures of a row that are ratios."""
    bound = links.bound_secs(np.array(row["needed_nbytes"]), np.array(row["touched_nbytes"]), rate)
    launches, sync = statistics.median(row["kernel_secs"]), statistics.median(row["sync_secs"])
    best_today = min(statistics.median(row[key]) for key in ("today_secs", "jit_secs") if row.get(key))
    by_gpus = {"gpu_of_bound": bound / statistics.median(row["gpu_secs"])} if "gpu_secs" in row else {}
    return by_gpus | {
        "bound_secs": bound,
        "of_bound": bound / launches,
        "sync_of_bound": bound / sync,
        "faster_than_today": best_today / sync,
    }


def summary(row: dict[str, Any]) -> str:
    """A row in a line."""
    ways = {"kernels": ("gpu_secs", "gpu_of_bound"), "launches": ("kernel_secs", "of_bound")}
    ways["sync"] = "sync_secs", "sync_of_bound"
    shown = [
        f"{name} {statistics.median(row[secs]) * 1e3:.2f} ms ({row[ratio]:.3f} of the bound)"
        for name, (secs, ratio) in ways.items()
        if secs in row
    ]
    return f"{row['case']}: {', '.join(shown)}, {row['faster_than_today']:.2f}x today's way"
