"""Replicas of a world that join, leave and change: what is kept, who is served, what arrives."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest

pytest.importorskip("zmq", reason="needs pyzmq (the zmq extra)")

from small_world import TOKEN, make_plan, params_of, served, target_of
from threaded_world import (
    PATIENCE_SECS,
    Process,
    Processes,
    addresses,
    check_update,
    errors,
    eventually,
    together,
)

import shardfly_jax as sf

pytestmark = pytest.mark.usefixtures("small_chunks")


def test_a_replica_joins_while_another_serves(rendezvous: Any) -> None:
    trainer, first = (Process(rendezvous, ranks, make_plan(replicas=1)) for ranks in ([0, 1], [2, 3]))
    joiner = Process(rendezvous, [4, 5])
    try:
        check_update([trainer, first], 1)
        before = addresses(first)
        done = [trainer.rescale([0, 1], 2), first.rescale([2, 3], 2)]
        assert (done[0].serving, done[0].joined, done[0].kept) == ((), (), 0)
        assert (done[1].serving, done[1].joined, done[1].allocated) == (("rollout/0",), (), 0)
        assert addresses(first) == before
        assert served(first.plan, [1]) == "1"
        assert served(joiner.plan, [1]) == "empty"
        for process in (trainer, first, joiner):
            eventually(lambda process=process: dict(process.plan.version) == {"rollout/0": 1, "rollout/1": 0})
            eventually(lambda process=process: dict(process.plan.staleness) == {"rollout/0": 0, "rollout/1": 1})
        assert check_update([trainer, first, joiner], 2) == 2
        assert addresses(first) == before
    finally:
        for process in (trainer, first, joiner):
            process.world.close()


def test_when_the_first_replica_leaves_the_second_takes_its_ranks_with_its_own_buffers(rendezvous: Any) -> None:
    members = Processes(rendezvous, [0, 1], [2, 3], [4, 5])
    with members as (trainer, first, second):
        for seed in (1, 2):
            members.update(seed)
        first.world.close()
        before = addresses(second)
        trainer.rescale([0, 1], 1)
        done = second.rescale([2, 3], 1)
        assert (done.serving, done.kept, done.allocated, done.freed) == (("rollout",), len(before), 0, 0)
        assert addresses(second) == before
        assert served(second.plan, [1, 2]) == "2"
        eventually(lambda: dict(trainer.plan.version) == {"rollout": 2})
        assert check_update([trainer, second], 3) == 3


def test_a_process_changes_its_tensor_parallelism(rendezvous: Any) -> None:
    members = Processes(rendezvous, [0, 1], [2, 3], [4, 5])
    with members as (trainer, first, second):
        members.update(1)
        names, buffers = first.plan.families, first.plan.registered().buffers
        norms = {shard.address for key, shard in buffers.items() if names[key[0]].pattern == "norm"}
        trainer.rescale([0, 1], 2, tp=1)
        done = [first.rescale([2], 2, tp=1), second.rescale([3], 2, tp=1)]
        assert [d.joined for d in done] == [("rollout/0",), ("rollout/1",)]
        assert addresses(first) & norms, "what is whole on every rank fits"
        assert served(first.plan, [1]) == "poisoned"
        assert set(first.plan.version.values()) == {0}
        assert check_update([trainer, first, second], 2) == 2
        trainer.rescale([0, 1], 3, tp=1)
        assert [first.rescale([2, 3], 3, tp=1).serving, second.rescale([4], 3, tp=1).serving] == [
            ("rollout/0",), ("rollout/2",)
        ]  # fmt: skip
        assert check_update([trainer, first, second], 3) == 3


def test_a_restarted_trainer_takes_its_ranks_back_and_nobody_else_does_anything(rendezvous: Any) -> None:
    members = Processes(rendezvous, [0], [1], [2, 3, 4, 5])
    with members as (one, _, rollout):
        members.update(1)
        before = addresses(rollout)
        one.world.close()
        assert served(rollout.plan, [1]) == "1"
        members.all[0] = Process(rendezvous, [0])
        assert check_update(members.all, 2) == 2
        assert addresses(rollout) == before


def test_trainer_processes_are_joined_into_one(rendezvous: Any) -> None:
    members = Processes(rendezvous, [0], [1], [2, 3, 4, 5])
    with members as (one, other, rollout):
        members.update(1)
        for process in (one, other):
            process.world.close()
        members.all = [Process(rendezvous, [0, 1]), rollout]
        assert check_update(members.all, 2) == 2


def test_who_missed_a_rescale_is_told_before_anything_is_written(rendezvous: Any) -> None:
    members = Processes(rendezvous, [0, 1], [2, 3], [4, 5])
    with members as (trainer, first, second):
        members.update(1)
        second.world.close()
        trainer.rescale([0, 1], 1)
        results = together(lambda: trainer.update(2), lambda: first.update(2))
        assert errors(results) == ["DigestMismatch", "DigestMismatch"]
        assert served(first.plan, [1, 2]) == "1"
        first.rescale([2, 3], 1)
        assert check_update([trainer, first], 3) == 2


def test_ranks_are_said_in_a_world_and_those_of_others_are_refused(rendezvous: Any) -> None:
    with sf.connect("tcp://127.0.0.1:0", TOKEN, serve=True, deadline_secs=0.5, lost_secs=2.5) as hasty:
        members = Processes(hasty, [0, 1], [2, 3], [4, 5])
        with members as (trainer, first, second):
            members.update(1)
            with pytest.raises(sf.RegistrationError, match="rescale: this plan is registered in a world, so say which"):
                sf.rescale(trainer.plan, target_of(1))
            assert errors(members.update(2)) == [], "nothing has changed"
            first.rescale([2, 3], 1)
            with pytest.raises(sf.WorldError, match=r"rank 2 is held by process 'process \[2, 3\]'"):
                second.rescale([2, 3], 1)
            with pytest.raises(sf.WorldError, match="no longer registered"):
                second.update(3)
            trainer.rescale([0, 1], 1)
            assert check_update([trainer, first], 4) == 3


def test_a_pending_update_is_not_rescaled_away(rendezvous: Any) -> None:
    members = Processes(rendezvous, [0, 1], [2, 3, 4, 5])
    with members as (trainer, rollout):
        handle = sf.sync(params_of(1, [0, 1]), trainer.plan, wait=False)
        with pytest.raises(sf.UpdateRefused, match="pending"):
            trainer.rescale([0, 1], 1)
        assert errors(together(lambda: rollout.update(1), lambda: handle.result(PATIENCE_SECS))) == []


class Broken(Exception):
    pass


def break_off(_: int) -> None:
    raise Broken


@pytest.mark.parametrize("seed", range(10))
def test_a_pool_of_processes_that_changes_at_random_serves_whole_versions_only(rendezvous: Any, seed: int) -> None:
    """Replicas join, leave, break off half way, change their ranks; trainers restart."""
    rng = random.Random(seed)
    tp, weights = 2, 1
    trainers = [Process(rendezvous, ranks) for ranks in ([[0, 1]] if seed % 2 else [[0], [1]])]
    rollouts = [Process(rendezvous, [2, 3]), Process(rendezvous, [4, 5])]
    try:
        number = check_update([*trainers, *rollouts], weights)
        holding = dict.fromkeys(rollouts, weights)
        for _ in range(5):
            event = rng.choice(["join", "leave", "tp", "trainer", "broken"])
            if event == "broken":
                victim = rng.choice(rollouts)
                weights += 1
                options = {process: {"progress": break_off} if process is victim else {} for process in rollouts}
                results = together(
                    *(functools.partial(p.update, weights, **options.get(p, {})) for p in [*trainers, *rollouts])
                )
                assert "Broken" in errors(results)
                number += 1
                for process in rollouts:
                    got = served(process.plan, [weights, holding.get(process, 0)])
                    assert got in {str(weights), "poisoned"}
                    holding[process] = weights if got == str(weights) else 0
            elif event == "trainer":
                trainers[0].world.close()
                trainers[0] = Process(rendezvous, trainers[0].ranks, make_plan(replicas=len(rollouts), tp=tp))
            else:
                change = {"tp": 3 - tp}.get(event, tp)
                if event == "leave" and len(rollouts) > 1:
                    gone = rollouts.pop(rng.randrange(len(rollouts)))
                    gone.world.close()
                joined = event == "join" and len(rollouts) < 4
                count = len(rollouts) + joined
                for process in trainers:
                    process.rescale(process.ranks, count, change)
                order = rollouts if rng.randrange(2) else rollouts[::-1]  # who comes first does not matter
                for process in order:
                    k = rollouts.index(process)
                    done = process.rescale(list(range(2 + k * change, 2 + (k + 1) * change)), count, change)
                    kept = holding[process] if change == tp else 0
                    assert bool(done.serving) == bool(kept), (event, done)
                    assert served(process.plan, [kept]) == (str(kept) if kept else "poisoned")
                    holding[process] = kept
                if joined:
                    ranks = list(range(2 + (count - 1) * change, 2 + count * change))
                    rollouts.append(Process(rendezvous, ranks, make_plan(replicas=count, tp=change)))
                    assert served(rollouts[-1].plan, [weights]) == "empty"
                tp = change
            if rng.randrange(3):
                weights += 1
                assert check_update([*trainers, *rollouts], weights) == number + 1
                number += 1
                holding = dict.fromkeys(rollouts, weights)
            else:
                holding = {process: holding.get(process, 0) for process in rollouts}
    finally:
        for process in [*trainers, *rollouts]:
            process.world.close()
