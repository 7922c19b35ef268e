"""Times of kernels by the GPU's own clock, from a profile."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.profiler import ProfileData

PROFILED_RUNS = 5


def phase_secs(update: Callable[[], Any], phases: list[str]) -> list[dict[str, float]]:
    """Seconds of each phase's kernel in several updates on one GPU, and from the first one's start to the last's end.

    Args:
      update: Launches one kernel per phase.
      phases: Their names, in order.

    Returns:
      One dict per update: of each phase, and `whole`.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(PROFILED_RUNS):
                update()
        (path,) = Path(folder).rglob("*.xplane.pb")
        spans = sorted(
            (event.start_ns, event.start_ns + event.duration_ns)
            for plane in ProfileData.from_file(str(path)).planes
            if plane.name.startswith("/device:GPU")
            for line in plane.lines
            if "Stream" in line.name
            for event in line.events
            if "mosaic" in event.name
        )
    if len(spans) != PROFILED_RUNS * len(phases):
        raise RuntimeError(f"{len(spans)} kernels were profiled, but {PROFILED_RUNS} times {phases} were launched.")
    out = []
    for first in range(0, len(spans), len(phases)):
        of = spans[first : first + len(phases)]
        secs = {phase: (stop - start) / 1e9 for phase, (start, stop) in zip(phases, of, strict=True)}
        out.append(secs | {"whole": (of[-1][1] - of[0][0]) / 1e9})
    return out
