"""What can be chosen about a run; light, so that the command line can offer it without flax."""

from __future__ import annotations

import dataclasses

from shardfly_jax.sharding.errors import PlanError

MAX_NUMBER = 9
"""The task's numbers are digits."""
MODES = {
    "sync": "draw, train, sync, in turn",
    "async": "draw the next batch while training on this one, so with weights one step old",
    "frozen": "never sync: what a broken weight sync looks like",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Of a run.

    Attributes:
      mode: A key of `MODES`.
      steps: Train steps.
      prompts, completions: Of a batch, and of each prompt.
      largest: The numbers to add are 0 to this, at most `MAX_NUMBER`.
      learning_rate: Adam's.
      seed: Of weights, prompts and draws.

    Raises:
      PlanError: An unknown mode, a number out of range, or a batch that two replicas cannot share.
    """

    mode: str = "sync"
    steps: int = 300
    prompts: int = 64
    completions: int = 16
    largest: int = 9
    learning_rate: float = 2e-3
    seed: int = 0

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise PlanError(f"rl: mode is {self.mode!r}, but one of {list(MODES)} is needed.")
        if not 1 <= self.largest <= MAX_NUMBER:
            raise PlanError(f"rl: largest is {self.largest}, but numbers are digits. Choose 1 to {MAX_NUMBER}.")
        if min(self.steps, self.prompts) < 1 or self.completions < 2:
            raise PlanError(
                "rl: steps or prompts are fewer than 1, or completions fewer than 2, so that none is better than its "
                "group. Choose more."
            )
        if self.prompts * self.completions % 2:
            raise PlanError(
                f"rl: a batch is {self.prompts} x {self.completions} answers, but two replicas share it. Choose "
                "an even number of prompts or completions."
            )
