"""Faults of processes that write into each other's memory, as those of `test_gpu_worlds`, but without a GPU.

`host_gpu` stands in for it: its kernels are threads of their process, so they die and are stopped with it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

pytest.importorskip("zmq", reason="needs pyzmq (the zmq extra)")

from fault_pool import (
    GPU_SCENARIOS,
    LOST_SECS,
    Pool,
    Scenario,
    Shared,
    check_survivors,
    check_unknown,
    run_late_writer,
    run_scenario,
)

DEADLINE_SECS = 6.0
SCENARIOS = [one for one in GPU_SCENARIOS if one.action != "drop" or one.role == "t1"]  # the others take a deadline too
STOPPED = Scenario("t0", "launch", 1, "stop")


@pytest.fixture(scope="module")
def shared() -> Iterator[Shared]:
    with Shared.serving(DEADLINE_SECS, host_gpu=True) as made:
        yield made


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_nobody_hangs_and_nobody_serves_a_mixture(pool: Pool, scenario: Scenario) -> None:
    run_scenario(pool, scenario)


def test_who_was_stopped_and_replaced_writes_nothing_when_it_goes_on(pool: Pool) -> None:
    run_late_writer(pool, STOPPED, DEADLINE_SECS)


def test_once_a_stopped_writer_is_killed_the_outcome_is_known(pool: Pool) -> None:
    before = pool.seed
    pool.is_whole = False  # until the end
    victim = pool.at[STOPPED.role]
    seed = pool.begin((STOPPED.role, (STOPPED.point, STOPPED.n, STOPPED.action)))
    victim.wait_until_stopped()
    check_survivors(pool, STOPPED, seed, before)
    failed_at = time.monotonic()
    pool.replace(STOPPED.role)
    check_unknown(pool)
    victim.end()
    pool.check_update()
    assert time.monotonic() - failed_at < DEADLINE_SECS
    pool.is_whole = True


def test_who_dies_before_it_offers_its_inboxes_is_named_to_the_others(pool: Pool) -> None:
    left = pool.at["t1"]
    assert left.call("close")["outcome"] == "ok"
    pool.replace("t1")  # so that all of them meet again
    pool.spares.append(left)
    run_scenario(pool, Scenario("r0", "offer inboxes", 1, "kill"))


def test_who_is_stopped_before_it_offers_its_inboxes_is_named_to_the_others_as_soon_as_it_is_lost(pool: Pool) -> None:
    left = pool.at["t1"]
    assert left.call("close")["outcome"] == "ok"
    pool.replace("t1")  # so that all of them meet again
    pool.spares.append(left)
    before, victim, stopped = pool.seed, pool.at["r0"], Scenario("r0", "offer inboxes", 1, "stop")
    pool.is_whole = False  # until the end
    seed = pool.begin((stopped.role, (stopped.point, stopped.n, stopped.action)))
    victim.wait_until_stopped()
    stopped_at = time.monotonic()
    answers = check_survivors(pool, stopped, seed, before)
    assert time.monotonic() - stopped_at < LOST_SECS + 1.5
    assert {answer["outcome"] for answer in answers.values()} == {"RankLost"}, answers
    victim.end()
    pool.replace("r0")
    pool.check_update()
    pool.is_whole = True
