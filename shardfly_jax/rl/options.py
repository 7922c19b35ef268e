"""What can be chosen about a run; light, so that the command line can offer it without flax."""

from __future__ import annotations

import dataclasses

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
      largest: The numbers to add are 0 to this, at most 9.
      learning_rate: Adam's.
      seed: Of weights, prompts and draws.
    """

    mode: str = "sync"
    steps: int = 300
    prompts: int = 64
    completions: int = 16
    largest: int = 9
    learning_rate: float = 2e-3
    seed: int = 0
