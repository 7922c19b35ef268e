"""Processes on one GPU, or spread over all there are, that write into each other's buffers: updates and faults.

The faults are those of `test_world_faults`, at other points: kernels are launched instead of chunks sent. A process
that is stopped may have a kernel on its way, so the next update is refused until it cannot write any more.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest
import worker_process

pytest.importorskip("zmq", reason="needs pyzmq (the zmq extra)")
pytest.importorskip("cuda.bindings", reason="needs cuda-bindings (the gpu extra)")

from fault_pool import GPU_SCENARIOS, LOST_SECS, ROLLOUTS, Pool, Scenario, Shared, run_late_writer, run_scenario
from small_world import TOKEN

import shardfly_jax as sf

pytestmark = pytest.mark.gpu

DEADLINE_SECS = 12.0
"""Of an attempt: the first one of new processes compiles."""
COMPILE_SECS = 90.0
PLATFORMS = "cuda,cpu"
STOPPED = [Scenario("t0", "launch", 1, "stop"), Scenario("r0", "launched", 1, "stop")]


def count_gpus() -> int:
    return len(jax.local_devices(backend="gpu"))


@pytest.fixture(scope="module")
def environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        yield


@pytest.fixture(scope="module")
def shared(environment: None) -> Iterator[Shared]:
    with Shared.serving(DEADLINE_SECS, platforms=PLATFORMS, gpus=count_gpus()) as made:
        yield made


@pytest.fixture
def address(environment: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Of a rendezvous for other processes, that have the time to compile many conversions."""
    monkeypatch.setattr(worker_process, "PATIENCE_SECS", 2 * COMPILE_SECS)
    with sf.connect("tcp://127.0.0.1:0", TOKEN, serve=True, deadline_secs=COMPILE_SECS, lost_secs=LOST_SECS) as world:
        yield world.address


def test_a_hundred_updates_in_a_row_bring_fresh_weights(pool: Pool) -> None:
    for _ in range(100):
        pool.check_update()


@pytest.mark.parametrize("scenario", GPU_SCENARIOS, ids=str)
def test_nobody_hangs_and_nobody_serves_a_mixture(pool: Pool, scenario: Scenario) -> None:
    run_scenario(pool, scenario)


@pytest.mark.parametrize("scenario", STOPPED, ids=str)
def test_who_was_stopped_touches_nothing_when_it_goes_on(pool: Pool, scenario: Scenario) -> None:
    run_late_writer(pool, scenario, DEADLINE_SECS)


def test_blocks_that_span_processes_are_quantized_and_values_that_are_not_finite_refused(address: str) -> None:
    quantized = Pool(address, platforms=PLATFORMS, gpus=count_gpus(), quantized=True)
    try:
        quantized.check_update()
        quantized.check_update()
        quantized.seed += 1
        for process in quantized.at.values():
            process.ask("update", seed=quantized.seed, spoiled=True)
        answers = {role: process.answer() for role, process in quantized.at.items()}
        assert {answer["outcome"] for answer in answers.values()} == {"NotFinite"}, answers
        assert {quantized.serves(role) for role in ROLLOUTS} == {"poisoned"}
        quantized.check_update()
    finally:
        quantized.end()


def test_a_replica_leaves_and_joins_again(address: str) -> None:
    pool = Pool(address, platforms=PLATFORMS, gpus=count_gpus())
    try:
        pool.check_update()
        left = pool.at.pop("r2")
        assert left.call("close")["outcome"] == "ok"
        ranks = {"t0": [0], "t1": [1], "r0": [2], "r1": [3]}
        for role, process in pool.at.items():
            process.ask("rescale", ranks=ranks[role], replicas=1)
        kept = {role: process.answer() for role, process in pool.at.items()}
        assert {answer["outcome"] for answer in kept.values()} == {"ok"}, kept
        assert not any(answer["allocated"] for answer in kept.values())
        seed = pool.begin()
        assert {process.answer()["outcome"] for process in pool.at.values()} == {"ok"}
        assert {pool.serves(role) for role in ("r0", "r1")} == {str(seed)}
        for role, process in pool.at.items():
            process.ask("rescale", ranks=ranks[role], replicas=2)
        assert {process.answer()["outcome"] for process in pool.at.values()} == {"ok"}
        pool.at["r2"] = left
        assert left.call("join", address=address, ranks=[4, 5])["outcome"] == "ok"
        pool.check_update()
    finally:
        pool.end()
