"""Times of our kernels by the GPUs' own clocks, from a profile."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.profiler import ProfileData

PROFILED_RUNS = 5


class Span(NamedTuple):
    """One kernel: its GPU, and when it ran."""

    gpu: int
    start_secs: float
    stop_secs: float


def spans(update: Callable[[], Any], runs: int) -> list[Span]:
    """The persistent kernels of several updates, in the order in which they started; the first one starts at 0."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(runs):
                update()
        (path,) = Path(folder).rglob("*.xplane.pb")
        found = sorted(
            (event.start_ns, event.duration_ns, int(plane.name.rpartition(":")[2]))
            for plane in ProfileData.from_file(str(path)).planes
            if plane.name.startswith("/device:GPU")
            for line in plane.lines
            if "Stream" in line.name
            for event in line.events
            if "mosaic" in event.name
        )
    first = found[0][0] if found else 0
    return [Span(gpu, (start - first) / 1e9, (start - first + nanosecs) / 1e9) for start, nanosecs, gpu in found]


def updates(update: Callable[[], Any], kernels: int | None = None) -> list[list[Span]]:
    """The kernels of each of several updates.

    Args:
      update: Launches the same number of kernels each time.
      kernels: That number, if it is known.
    """
    found = spans(update, PROFILED_RUNS)
    each, rest = divmod(len(found), PROFILED_RUNS)
    if rest or not found or each != (kernels or each):
        wanted = f"{PROFILED_RUNS} times {kernels or 'the same number'}"
        raise RuntimeError(f"{len(found)} kernels were profiled, but {wanted} were launched.")
    return [found[first : first + each] for first in range(0, len(found), each)]


def phase_secs(update: Callable[[], Any], phases: list[str]) -> list[dict[str, float]]:
    """Seconds of each phase's kernel in several updates on one GPU, and from the first one's start to the last's end.

    Args:
      update: Launches one kernel per phase.
      phases: Their names, in order.

    Returns:
      One dict per update: of each phase, and `whole`.
    """
    out = []
    for of in updates(update, len(phases)):
        secs = {phase: span.stop_secs - span.start_secs for phase, span in zip(phases, of, strict=True)}
        out.append(secs | {"whole": of[-1].stop_secs - of[0].start_secs})
    return out
