"""`python -m benchmarks --check`: has anything become worse than the committed results?

Ratios are compared, not times: they hold on other machines of the kind. Each part says which fields name a row, which
of its figures count, whether more is better, and by how much a figure may be worse before that is a fault.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A figure that is guarded.

    Attributes:
      name: Key of a row.
      more_is_better: Its direction.
      margin: The part of the committed value by which a new one may be worse.
    """

    name: str
    more_is_better: bool
    margin: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """What is compared of one part.

    Attributes:
      keys: Fields that name a row.
      figures: What counts.
    """

    keys: tuple[str, ...]
    figures: tuple[Figure, ...]


# moves and bytes are exact; the margin leaves room for a change that pays elsewhere
SIZES = (
    Figure(name="moves", more_is_better=False, margin=0.05),
    Figure(name="saved_nbytes", more_is_better=False, margin=0.05),
)
# what Python and NumPy allocate, which is theirs to change
MEMORY = Figure(name="memory_nbytes", more_is_better=False, margin=0.25)
KERNELS = (
    Figure(name="of_bound", more_is_better=True, margin=0.05),
    Figure(name="faster_than_xla", more_is_better=True, margin=0.1),
)
GUARDS = {
    "planning": Guard(
        keys=("case",),
        # seconds count where they are more than wanted
        figures=(*SIZES, MEMORY, Figure(name="of_wanted", more_is_better=True, margin=0.1)),
    ),
    "models": Guard(
        keys=("model", "ranks"),
        figures=(*SIZES, MEMORY),
    ),
    "growth": Guard(
        keys=("series", "n"),
        figures=(*SIZES, MEMORY, Figure(name="exponent", more_is_better=False, margin=0.3)),
    ),
    # computed, so equal on every machine
    "simulated": Guard(
        keys=("model", "trainers", "rollouts", "ranks", "expert_parallel", "quantization"),
        figures=(
            Figure(name="ratio", more_is_better=False, margin=0.01),
            Figure(name="schedule_ratio", more_is_better=False, margin=0.01),
        ),
    ),
    # both sides of the ratio are disturbed by other work on the machine
    "updating": Guard(
        keys=("model", "trainer", "rollout"),
        figures=(Figure(name="speedup_of_bests", more_is_better=True, margin=0.3),),
    ),
    "processes": Guard(
        keys=("case",),
        figures=(Figure(name="of_wanted", more_is_better=True, margin=0.3),),
    ),
    "on_gpu": Guard(
        keys=("case", "model", "layers", "trainer_dtype"),
        figures=KERNELS,
    ),
    "quantizing": Guard(
        keys=("case", "trainer_dtype"),
        figures=KERNELS,
    ),
    "on_gpus": Guard(
        keys=("case",),
        figures=(
            Figure(name="of_bound", more_is_better=True, margin=0.05),
            Figure(name="faster_than_today", more_is_better=True, margin=0.1),
        ),
    ),
    "peers": Guard(
        keys=("what", "trainer_dtype"),
        figures=(Figure(name="over_ours", more_is_better=True, margin=0.2),),
    ),
}


def regressions(part: str, committed: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[str]:
    """What became worse by more than its margin, a line each; rows that are gone count, new ones do not."""
    guard = GUARDS[part]

    def name(row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row.get(key) for key in guard.keys)

    found = {name(row): row for row in new}
    faults = []
    for row in committed:
        what = f"{part}: {', '.join(str(value) for value in name(row))}"
        if name(row) not in found:
            faults.append(f"{what}: is gone")
            continue
        for figure in guard.figures:
            if figure.name not in row:
                continue
            was, now = row[figure.name], found[name(row)].get(figure.name, math.nan)
            worse = (was - now) / was if figure.more_is_better else (now - was) / was
            if not worse <= figure.margin:  # nor if there is no number
                faults.append(f"{what}: {figure.name} was {was:.4g}, is {now:.4g}; {figure.margin:.0%} is allowed")
    return faults
