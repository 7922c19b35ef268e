"""Five processes that tests of faults share: two trainers, a rollout of two processes, a rollout of one.

They are kept from scenario to scenario; who dies is replaced, who was stopped goes on and joins again later.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import signal
import time
from collections.abc import Iterator
from typing import Any

from small_world import RANKS, TOKEN
from worker_process import PATIENCE_SECS, Process

import shardfly_jax as sf

DEADLINE_SECS = 3.0
LOST_SECS = 4.0
TRAINERS, ROLLOUTS = ("t0", "t1"), ("r0", "r1", "r2")


class Pool:
    """The five processes and spare ones.

    Args:
      address: Of the rendezvous.
      platforms: Of the processes.
      gpus: Over how many GPUs they are spread; each sees its own only.
      host_gpu: Whether they take their CPU for a GPU.
      options: For them when they join.
    """

    def __init__(self, address: str, platforms: str = "cpu", gpus: int = 0, host_gpu: bool = False, **options: Any):
        self.address, self.options = address, options
        turns = itertools.count()
        self.new = lambda: Process(platforms, next(turns) % gpus if gpus else None, host_gpu)
        self.at = {role: self.new() for role in RANKS}
        self.spares = [self.new(), self.new()]
        self.seed = self.version = 0
        self.is_whole = True
        for role in RANKS:
            self.at[role].ask("join", address=address, ranks=RANKS[role], **options)
        for role in RANKS:
            assert self.at[role].answer()["outcome"] == "ok"

    def replace(self, role: str) -> None:
        """Puts a spare process in the place of one."""
        self.at[role] = self.spares.pop(0)
        answer = self.at[role].call("join", address=self.address, ranks=RANKS[role], **self.options)
        assert answer["outcome"] == "ok", answer
        if len(self.spares) < 2:
            self.spares.append(self.new())

    def begin(self, fault: tuple[str, tuple[str, int, str]] | None = None) -> int:
        """Begins an update of fresh weights, with a fault in one process; its seed."""
        self.seed += 1
        for role, process in self.at.items():
            mine = fault[1] if fault is not None and fault[0] == role else None
            process.ask("update", seed=self.seed, fault=mine)
        return self.seed

    def serves(self, role: str) -> str:
        return self.at[role].call("serves", seeds=list(range(self.seed, 0, -1)))["serves"]

    def check_update(self) -> None:
        """An update without faults is right in every byte everywhere, and all versions are equal."""
        before = self.version
        seed = self.begin()
        answers = {role: process.answer() for role, process in self.at.items()}
        assert {role: answer["outcome"] for role, answer in answers.items()} == dict.fromkeys(RANKS, "ok"), answers
        versions = set(answers["t0"]["versions"].values())
        assert len(versions) == 1
        self.version = versions.pop()
        assert self.version > before
        assert {self.serves(role) for role in ROLLOUTS} == {str(seed)}

    def end(self) -> None:
        for process in [*self.at.values(), *self.spares]:
            process.end()


class Shared:
    """The rendezvous, and the pool that scenarios share as long as none of them fails."""

    def __init__(self, address: str, **options: Any):
        self.address, self.options = address, options
        self.pool: Pool | None = None

    @classmethod
    @contextlib.contextmanager
    def serving(cls, deadline_secs: float = DEADLINE_SECS, **options: Any) -> Iterator[Shared]:
        """With a rendezvous in this process whose attempts have so long, until the module's tests are over."""
        with sf.connect(
            "tcp://127.0.0.1:0", TOKEN, serve=True, deadline_secs=deadline_secs, lost_secs=LOST_SECS
        ) as world:
            made = cls(world.address, **options)
            try:
                yield made
            finally:
                made.end()

    def whole(self) -> Pool:
        """Five processes that have done an update."""
        if self.pool is None:
            self.pool = Pool(self.address, **self.options)
            self.pool.check_update()
        return self.pool

    def end(self) -> None:
        if self.pool is not None:
            self.pool.end()
        self.pool = None


@dataclasses.dataclass(frozen=True)
class Scenario:
    """What goes wrong: who gets where how often, and what happens to it then."""

    role: str
    point: str
    n: int
    action: str

    def __str__(self) -> str:
        return f"{self.action}-{self.role}-{self.point.replace(' ', '_')}-{self.n}"


TYPED = {"RankLost", "SyncTimeout", "WorldLost", "UpdateRefused"}
EARLY = {"say enter", "hear begin", "say ready", "hear go", "tell", "told", "take", "send", "say arrived"}
"""Points at which no update can be complete for everybody."""


def check_survivors(pool: Pool, scenario: Scenario, seed: int, before: int) -> dict[str, dict[str, Any]]:
    """Everybody has an outcome: the new weights in every byte, or a typed error and nothing that is a mixture."""
    gone = scenario.action in ("kill", "stop")
    answers = {role: p.answer() for role, p in pool.at.items() if not (gone and role == scenario.role)}
    named = [f"rank {rank}" for rank in RANKS[scenario.role]]
    for role, answer in answers.items():
        assert answer["outcome"] in {"ok", *TYPED}, answer
        if gone and answer["outcome"] != "ok":
            assert any(name in answer["message"] for name in named), answer
        elif answer["outcome"] != "ok":
            assert "rank" in answer["message"], answer
        if role in ROLLOUTS:
            allowed = {str(seed)} if answer["outcome"] == "ok" else {str(before), str(seed), "poisoned", "empty"}
            assert pool.serves(role) in allowed, (role, answer)
    if gone and scenario.point in EARLY:
        failed = [role for role in TRAINERS if role in answers and answers[role]["outcome"] != "ok"]
        assert failed == [role for role in TRAINERS if role in answers], answers
    if scenario.action == "double":
        assert {answer["outcome"] for answer in answers.values()} == {"ok"}, answers
    return answers


def run_scenario(pool: Pool, scenario: Scenario) -> dict[str, dict[str, Any]]:
    """One update with a fault, which the next ones heal; what each survivor said of it."""
    before = pool.seed
    pool.is_whole = False  # until the end
    victim = pool.at[scenario.role]
    seed = pool.begin((scenario.role, (scenario.point, scenario.n, scenario.action)))
    if scenario.action == "stop":
        victim.wait_until_stopped()
    answers = check_survivors(pool, scenario, seed, before)
    if scenario.action == "kill":
        assert victim.popen.wait(timeout=PATIENCE_SECS) == -signal.SIGKILL
        victim.end()
        pool.replace(scenario.role)
    if scenario.action == "stop":
        pool.replace(scenario.role)
    pool.check_update()  # heals whatever the fault left
    if scenario.action == "stop":
        victim.popen.send_signal(signal.SIGCONT)
        assert victim.answer()["outcome"] in {"ok", *TYPED}
        late = victim.call("serves", seeds=[seed, before])["serves"]
        assert late in {"no rollout", "poisoned", "empty", str(before), str(seed)}
        assert {pool.serves(role) for role in ROLLOUTS} == {str(pool.seed)}, "a late writer touched a later version"
        pool.check_update()
        pool.spares.append(victim)
    pool.is_whole = True
    return answers


GPU_SCENARIOS = [
    Scenario(*fault)
    for fault in (
        ("t0", "say enter", 1, "kill"),
        ("t0", "launch", 1, "kill"),
        ("t1", "launched", 1, "kill"),
        ("r2", "say ready", 1, "kill"),
        ("r0", "launch", 1, "kill"),
        ("r2", "launched", 1, "kill"),
        ("r1", "say arrived", 1, "kill"),
        ("t1", "hear go", 1, "drop"),
        ("r2", "say arrived", 1, "drop"),
        ("r0", "say ready", 1, "double"),
    )
]
"""Where kernels are launched instead of chunks sent."""


def run_late_writer(pool: Pool, scenario: Scenario, deadline_secs: float) -> None:
    """A process is stopped in an attempt and replaced, and goes on when its kernel cannot write any more.

    Args:
      pool: Of processes that write into each other's memory.
      scenario: Whose process is stopped.
      deadline_secs: Of an attempt.
    """
    before = pool.seed
    pool.is_whole = False  # until the end
    victim = pool.at[scenario.role]
    seed = pool.begin((scenario.role, (scenario.point, scenario.n, scenario.action)))
    victim.wait_until_stopped()
    check_survivors(pool, scenario, seed, before)
    failed_at = time.monotonic()
    pool.replace(scenario.role)
    check_unknown(pool)
    time.sleep(max(0.0, failed_at + deadline_secs + 0.5 - time.monotonic()))
    pool.check_update()
    victim.popen.send_signal(signal.SIGCONT)
    assert victim.answer()["outcome"] in {"ok", *TYPED}
    assert {pool.serves(role) for role in ROLLOUTS} == {str(pool.seed)}, "a late writer touched a later version"
    pool.check_update()
    pool.spares.append(victim)
    pool.is_whole = True


def check_unknown(pool: Pool) -> None:
    """An update is refused, because somebody who is alive may still write."""
    pool.begin()
    answers = {role: process.answer() for role, process in pool.at.items()}
    assert {answer["outcome"] for answer in answers.values()} <= {"UnknownOutcome", "UpdateRefused"}, answers
    assert any("End that process, or try again in" in answer["message"] for answer in answers.values())
