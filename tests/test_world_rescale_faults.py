"""Pools of five processes that lose some of them in any phase: without the dead, or with others, all goes on.

Two trainers, a rollout of two processes, a rollout of one. Whoever is lost, the survivors rescale to what is left of
the pool, and later to a whole one with new processes; every update in between is right in every byte.
"""

from __future__ import annotations

import dataclasses
import random
import signal
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("zmq", reason="needs pyzmq (the zmq extra)")

from small_world import RANKS, TOKEN
from threaded_world import eventually
from worker_process import PATIENCE_SECS, Process

import shardfly_jax as sf
from shardfly_jax.worlds.world import World

DEADLINE_SECS = 3.0
LOST_SECS = 4.0
TYPED = {"RankLost", "SyncTimeout", "WorldLost", "UpdateRefused"}


class Pool:
    """Processes by role, the ranks they have now, and what they serve."""

    def __init__(self, world: World):
        self.world, self.address = world, world.address
        self.at = {role: Process() for role in RANKS}
        self.seed = self.version = 0
        for role, process in self.at.items():
            process.ask("join", address=self.address, ranks=RANKS[role])
        self.ranks = dict(RANKS)
        self.tp, self.is_whole = 2, True
        assert {process.answer()["outcome"] for process in self.at.values()} == {"ok"}

    def update(self, fault: tuple[str, tuple[str, int, str]] | None = None) -> dict[str, dict[str, Any]]:
        """An update of fresh weights, in which one process may have a fault; what each that is left answers."""
        self.seed += 1
        for role, process in self.at.items():
            mine = fault[1] if fault is not None and fault[0] == role else None
            process.ask("update", seed=self.seed, fault=mine)
        return {r: p.answer() for r, p in self.at.items() if fault is None or r != fault[0]}

    def rollouts(self) -> list[str]:
        return [role for role in self.at if role.startswith("r")]

    def serves(self, role: str) -> str:
        return self.at[role].call("serves", seeds=list(range(self.seed, 0, -1)))["serves"]

    def check_update(self) -> None:
        answers = self.update()
        assert {role: answer["outcome"] for role, answer in answers.items()} == dict.fromkeys(self.at, "ok"), answers
        versions = set(answers["t0"]["versions"].values())
        assert len(versions) == 1
        assert min(versions) > self.version
        self.version = versions.pop()
        assert {self.serves(role) for role in self.rollouts()} == {str(self.seed)}

    def lose(self, role: str) -> Process:
        """Counts a process as gone."""
        self.is_whole = False  # until the scenario has come to its end
        return self.at.pop(role)

    def counts(self, role: str) -> bool:
        """Whether the first process of a role is still a member for the rendezvous."""
        assert self.world._serving is not None
        name = "-".join(map(str, RANKS[role]))  # as it joined
        return name in {member.name for member in list(self.world._serving._rendezvous.members.values())}

    def rescale(self, ranks: dict[str, list[int]], replicas: int, tp: int) -> None:
        """All change to a pool of these roles and ranks, missing ones in new processes. Who serves goes on serving."""
        joining = ranks.keys() - self.at.keys()
        before = {role: self.serves(role) for role in self.rollouts() if role in ranks}
        for role in joining:
            self.at[role] = Process()
            self.at[role].ask("join", address=self.address, ranks=ranks[role], replicas=replicas, tp=tp)
        for role in self.at.keys() - ranks.keys():
            assert self.at[role].call("close")["outcome"] == "ok"
            self.at.pop(role).end()
        for role in self.at.keys() - joining:
            self.at[role].ask("rescale", ranks=ranks[role], replicas=replicas, tp=tp)
        for role, process in self.at.items():
            answer = process.answer()
            assert answer["outcome"] == "ok", (role, answer)
            if role in before:
                unchanged = len(ranks[role]) == len(self.ranks[role]) and tp == self.tp and self.cut_alike(role, ranks)
                assert (answer["allocated"] == 0) == (tp == self.tp and len(ranks[role]) <= len(self.ranks[role]))
                serves = before[role] if unchanged and before[role] != "empty" else "poisoned"
                assert self.serves(role) == serves, (role, before, answer)
            elif role in joining and role.startswith("r"):
                assert self.serves(role) == "empty"
        self.ranks, self.tp = dict(ranks), tp

    def cut_alike(self, role: str, ranks: dict[str, list[int]]) -> bool:
        """Whether a process that holds one of two ranks of a replica holds the same one as before."""
        return all(new % self.tp == old % self.tp for new, old in zip(ranks[role], self.ranks[role], strict=True))

    def end(self) -> None:
        for process in self.at.values():
            process.end()


@pytest.fixture(scope="module")
def pools() -> Iterator[list[Pool]]:
    with sf.connect("tcp://127.0.0.1:0", TOKEN, serve=True, deadline_secs=DEADLINE_SECS, lost_secs=LOST_SECS) as world:
        made = [Pool(world)]
        try:
            yield made
        finally:
            made[0].end()


@pytest.fixture
def pool(pools: list[Pool]) -> Pool:
    """Five processes that have done an update; scenarios share them as long as none of them fails."""
    if not pools[0].is_whole:
        pools[0].end()
        pools[0] = Pool(pools[0].world)
    pools[0].check_update()
    return pools[0]


@dataclasses.dataclass(frozen=True)
class Scenario:
    """Who is lost how and when, and the pools that the survivors change to until it is whole again."""

    role: str
    action: str
    point: str
    n: int
    tp: int

    def __str__(self) -> str:
        return f"{self.action}-{self.role}-{self.point.replace(' ', '_')}-{self.n}-to-tp{self.tp}"


WITHOUT = {
    ("r0", 2): ({"t0": [0], "t1": [1], "r2": [2, 3]}, 1),  # half of a replica is none: r1 goes, too
    ("r1", 2): ({"t0": [0], "t1": [1], "r2": [2, 3]}, 1),
    ("r2", 2): ({"t0": [0], "t1": [1], "r0": [2], "r1": [3]}, 1),
    ("r0", 1): ({"t0": [0], "t1": [1], "r1": [2], "r2": [3, 4]}, 3),
    ("r1", 1): ({"t0": [0], "t1": [1], "r0": [4], "r2": [3, 2]}, 3),
    ("r2", 1): ({"t0": [0], "t1": [1], "r1": [2], "r0": [3]}, 2),
}
"""By who is lost and the ranks that a replica is to have: ranks of those who go on, and how many replicas they make."""


def scenarios() -> list[Scenario]:
    rng = random.Random(20261130)
    points = [("say enter", 1), ("hear begin", 1), ("say ready", 1), ("take", 12), ("send", 4), ("say arrived", 1)]
    out = []
    for k, (role, tp) in enumerate(WITHOUT):
        for action in ("kill", "stop") if k < 4 else ("kill",):
            point, n = points[len(out) % len(points)]
            out.append(Scenario(role, action, point, rng.randint(1, n), tp))
    return out


@pytest.mark.parametrize("scenario", scenarios(), ids=str)
def test_a_pool_goes_on_without_who_was_lost_and_later_with_another(pool: Pool, scenario: Scenario) -> None:
    before, victim = pool.seed, pool.at[scenario.role]
    answers = pool.update((scenario.role, (scenario.point, scenario.n, scenario.action)))
    assert {answer["outcome"] for answer in answers.values()} <= {"ok", *TYPED}, answers
    for role in pool.rollouts():
        if role != scenario.role:
            assert pool.serves(role) in {str(before), str(pool.seed), "poisoned"}
    pool.lose(scenario.role)
    try:
        pool.rescale(*WITHOUT[scenario.role, scenario.tp], scenario.tp)
        pool.check_update()
        if scenario.action == "stop":
            eventually(lambda: not pool.counts(scenario.role))
            victim.popen.send_signal(signal.SIGCONT)
            assert victim.answer()["outcome"] in {"ok", *TYPED}
            assert victim.call("rescale", ranks=RANKS[scenario.role], replicas=2)["outcome"] == "WorldLost"
            assert {pool.serves(role) for role in pool.rollouts()} == {str(pool.seed)}, "it came too late"
        else:
            assert victim.popen.wait(timeout=PATIENCE_SECS) == -signal.SIGKILL
    finally:
        victim.end()
    pool.rescale(RANKS, 2, 2)
    pool.check_update()
    pool.is_whole = True


@pytest.mark.parametrize("point", ["say enter", "hear go", "send"])
def test_a_trainer_that_was_lost_is_restarted_in_a_pool_that_changes(pool: Pool, point: str) -> None:
    answers = pool.update(("t1", (point, 1, "kill")))
    assert {answer["outcome"] for answer in answers.values()} <= TYPED, answers
    pool.lose("t1").end()
    pool.rescale({"t0": [0], "t1": [1], "r0": [2], "r1": [3]}, 1, 2)
    pool.check_update()
    pool.rescale({"t0": [0], "t1": [1], "r0": [2, 3], "r1": [4, 5]}, 4, 1)
    pool.check_update()
    pool.rescale(RANKS, 2, 2)
    pool.check_update()
    pool.is_whole = True
