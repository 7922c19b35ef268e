"""Faults of an update across processes: whoever dies, stops or is not heard, nobody hangs or serves a mixture."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

pytest.importorskip("zmq", reason="needs pyzmq (the zmq extra)")

from fault_pool import ROLLOUTS, TRAINERS, Pool, Scenario, Shared, run_scenario


@pytest.fixture(scope="module")
def shared() -> Iterator[Shared]:
    with Shared.serving() as made:
        yield made


def scenarios() -> list[Scenario]:
    """A table of kinds of faults; who is hit, and at which of many chunks, is drawn from a fixed seed."""
    rng = random.Random(20261129)
    trainer_points = [("say enter", 1), ("hear begin", 1), ("hear go", 1), ("send", 12), ("hear complete", 1)]
    rollout_points = [
        ("say enter", 1),
        ("hear begin", 1),
        ("say ready", 1),
        ("take", 12),
        ("send", 5),
        ("say arrived", 1),
    ]
    out = []
    for action, repeats in (("kill", 1), ("stop", 1)):
        for _ in range(repeats):
            out += [Scenario(rng.choice(TRAINERS), at, rng.randint(1, n), action) for at, n in trainer_points]
            out += [Scenario(rng.choice(ROLLOUTS), at, rng.randint(1, n), action) for at, n in rollout_points]
    for action in ("drop", "double"):
        out += [Scenario(rng.choice(TRAINERS), "send", rng.randint(1, 12), action)]
        out += [Scenario(rng.choice(ROLLOUTS), "send", rng.randint(1, 5), action)]
        out += [
            Scenario(rng.choice([*TRAINERS, *ROLLOUTS]), f"hear {op}", 1, action) for op in ("begin", "go", "complete")
        ]
        out += [Scenario(rng.choice(ROLLOUTS), f"say {op}", 1, action) for op in ("enter", "ready", "arrived")]
    out += [Scenario(role, "take", rng.randint(1, 12), "kill") for role in ROLLOUTS]
    return list(dict.fromkeys(out))


def test_there_are_enough_scenarios() -> None:
    assert len(scenarios()) >= 40


@pytest.mark.parametrize("scenario", scenarios(), ids=str)
def test_nobody_hangs_and_nobody_serves_a_mixture(pool: Pool, scenario: Scenario) -> None:
    run_scenario(pool, scenario)
