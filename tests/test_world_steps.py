"""Random plans, their ranks dealt to random processes: what each sends, forwards and receives gives the meaning.

The processes are `Run`s whose sockets are queues here; chunks are delivered in any order, some of them twice.
"""

from __future__ import annotations

import collections
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from random_problems import Case, cases, expected_buffers, source_buffers
from random_quantized import quantized_cases

pytest.importorskip("zmq", reason="needs pyzmq (the zmq extra)")

from shardfly_jax.executors import host
from shardfly_jax.executors.memory import Shard
from shardfly_jax.sharding.plan import Plan
from shardfly_jax.worlds.attempt import Run
from shardfly_jax.worlds.steps import steps_of

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


class Queues:
    """The network: chunks on their way, by the endpoint they go to."""

    def __init__(self, rng: random.Random):
        self.rng = rng
        self.at: dict[str, list[tuple[dict[str, Any], bytes]]] = collections.defaultdict(list)

    def outgoing(self) -> Any:
        def send(endpoint: str, header: dict[str, Any], payload: np.ndarray) -> None:
            for _ in range(self.rng.choice([1, 1, 2])):
                self.at[endpoint].append((header, payload.tobytes()))

        return SimpleNamespace(
            connect=lambda endpoint, rank: None, has_room=lambda endpoint: self.rng.random() < 0.7, send=send
        )

    def incoming(self, endpoint: str) -> Any:
        def take() -> tuple[dict[str, Any], bytes] | None:
            waiting = self.at[endpoint]
            return waiting.pop(self.rng.randrange(len(waiting))) if waiting else None

        return SimpleNamespace(take=take)


def run_in_processes(case: Case, plan: Plan, dealt: list[int], seed: int) -> None:
    """Runs a plan whose rank `r` lives in process `dealt[r]`, and compares every byte with the meaning."""
    want = expected_buffers(case, plan)
    sources = source_buffers(case, plan)
    have = {key: np.full(flat.nbytes, 0xA5, np.uint8) for key, flat in want.items()}
    network = Queues(random.Random(seed))
    processes = sorted(set(dealt))
    begin = {"epoch": 3, "session": 9, "endpoints": {str(r): str(dealt[r]) for r in range(plan.ranks)}}
    runs = []
    for process in processes:
        held = frozenset(r for r in range(plan.ranks) if dealt[r] == process)
        buffers: dict[Any, Any] = {
            key: Shard(None, flat.ctypes.data, flat.nbytes, None)  # type: ignore[arg-type]  # only addresses count
            for key, flat in have.items()
            if key[2] in held
        }
        memory = {key: have[key] for key in buffers}
        memory |= {key: x.reshape(-1).view(np.uint8) for key, x in sources.items() if key[2] in held}
        words = collections.deque([{"op": "go", "epoch": 3}])
        link = SimpleNamespace(
            deadline_secs=60.0, lost_secs=10.0, wake=SimpleNamespace(clear=lambda: None),
            take=lambda words=words: words.popleft() if words else None,
        )  # fmt: skip
        runs.append(
            Run(
                steps_of(plan, held, buffers), begin, memory, link=link, incoming=network.incoming(str(process)),  # type: ignore[arg-type]
                outgoing=network.outgoing(), own=frozenset(), held=held,
                source_ranks=plan.source_ranks, progress=None,
            )
        )  # fmt: skip
    rounds = 0
    while any(run._expected or any(run._there.values()) or run._here for run in runs):
        for run in network.rng.sample(runs, len(runs)):
            run._listen()
            for step in network.rng.sample([run._work, run._send, run._receive], 3):
                step()
        rounds += 1
        assert rounds < 20_000, "nothing moves any more"
    for key, flat in want.items():
        assert have[key].tobytes() == flat.tobytes(), key


def deal(case: Case, n: int, seed: int) -> None:
    """Deals the ranks of a case to up to `n` processes, with chunks of some size, and runs it."""
    plan = case.plan()
    rng = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "CHUNK_NBYTES", rng.choice([16, 100, 1 << 20]))
        run_in_processes(case, plan, [rng.randrange(n) for _ in range(plan.ranks)], seed)


@settings(max_examples=120, suppress_health_check=SLOW)
@given(cases(max_depth=3), st.integers(1, 4), st.integers(0, 1 << 30))
def test_any_dealing_of_ranks_to_processes_gives_the_meaning(case: Case, n: int, seed: int) -> None:
    deal(case, n, seed)


@settings(max_examples=200, suppress_health_check=SLOW)
@given(quantized_cases(), st.integers(1, 6), st.integers(0, 1 << 30))
def test_any_dealing_gives_the_meaning_of_quantized_plans(case: Case, n: int, seed: int) -> None:
    deal(case, n, seed)
