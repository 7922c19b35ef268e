"""Faults while processes tell each other the maxima of blocks: typed errors, no hang, and the next update is right."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("zmq", reason="needs pyzmq (the zmq extra)")

from fault_pool import ROLLOUTS, Pool, Scenario, Shared, run_scenario
from small_world import RANKS


@pytest.fixture(scope="module")
def shared() -> Iterator[Shared]:
    with Shared.serving(quantized=True) as made:
        yield made


SCENARIOS = [
    Scenario("t1", "tell", 1, "kill"), Scenario("t0", "tell", 4, "kill"), Scenario("t1", "told", 2, "kill"),
    Scenario("r0", "take", 3, "kill"), Scenario("t0", "told", 1, "stop"), Scenario("t1", "tell", 5, "stop"),
    Scenario("t0", "tell", 2, "double"), Scenario("t1", "told", 3, "drop"), Scenario("t1", "tell", 3, "drop"),
]  # fmt: skip


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_whoever_is_lost_with_maxima_under_way_nobody_hangs_or_serves_a_mixture(pool: Pool, scenario: Scenario) -> None:
    answers = run_scenario(pool, scenario)
    kinds = {answer["outcome"] for answer in answers.values()}
    match scenario.action:
        case "kill":
            assert kinds == {"RankLost"}
        case "drop":  # though both may wait for each other then
            assert kinds == {"SyncTimeout"}
            named = "rank 0 waited for 1 chunks of rank 1" if scenario.point == "tell" else "chunks of rank 0"
            assert all(named in answer["message"] for answer in answers.values()), answers
        case "stop":
            assert kinds <= {"RankLost", "SyncTimeout"}


def test_processes_refuse_values_that_are_not_finite_and_the_next_update_heals(pool: Pool) -> None:
    pool.is_whole = False
    pool.seed += 1
    for process in pool.at.values():
        process.ask("update", seed=pool.seed, spoiled=True)
    answers = {role: process.answer() for role, process in pool.at.items()}
    assert {role: answer["outcome"] for role, answer in answers.items()} == dict.fromkeys(RANKS, "NotFinite"), answers
    assert all("target 'h.1." in answer["message"] for answer in answers.values())
    assert {pool.serves(role) for role in ROLLOUTS} == {"poisoned"}
    pool.check_update()
    pool.is_whole = True
