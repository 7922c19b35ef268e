"""A rendezvous ends with the trainer that served it; a new one takes up where the processes that stay have been."""

from __future__ import annotations

import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("zmq", reason="needs pyzmq (the zmq extra)")

import host_gpu
from checks import registered_bytes
from small_world import TOKEN, make_plan, params_of, served
from threaded_world import PATIENCE_SECS, Process, addresses, errors, eventually, hold_up_launches, together

import shardfly_jax as sf


def serving(address: str = "tcp://127.0.0.1:0", lost_secs: float = 1, token: str = TOKEN) -> Any:
    return sf.connect(address, token, serve=True, deadline_secs=5, lost_secs=lost_secs)


def again(process: Process, rendezvous: Any) -> None:
    """A rollout whose world is lost joins another one; it has the same buffers there."""
    process.world.close()
    process.world = sf.connect(rendezvous.address, TOKEN, listen="tcp://127.0.0.1:0")
    process.plan = sf.register(process.plan, world=process.world, ranks=process.ranks)


@pytest.fixture(params=["zmq", "ipc"])
def transport(request: pytest.FixtureRequest) -> str:
    """Which one takes part: between CPU devices, or these taken for GPUs."""
    if request.param == "ipc":
        if jax.default_backend() != "cpu":
            pytest.skip("needs CPU devices, as host memory is written")
        request.getfixturevalue("driver")
    else:
        request.getfixturevalue("small_chunks")
    return str(request.param)


def test_versions_go_on_and_rollouts_go_on_serving(transport: str) -> None:
    with serving() as first:
        trainer = Process(first, [0, 1])
        rollouts = [Process(first, [2, 3]), Process(first, [4, 5])]
        for seed in (1, 2, 3):
            assert errors(together(*(lambda p=p, s=seed: p.update(s) for p in (trainer, *rollouts)))) == []
        where, content = [addresses(p) for p in rollouts], [registered_bytes(p.plan) for p in rollouts]
        trainer.world.close()
    before = [process.plan for process in rollouts]
    eventually(lambda: all(process.world.link.lost for process in rollouts))
    with serving() as second:
        try:
            for process in rollouts:
                again(process, second)
                own = process.plan.replicas[process.ranks[0] // 4].name
                assert process.plan.registered().part.transport == transport
                assert (process.plan.version[own], process.plan.staleness[own]) == (3, 0)
                assert served(process.plan, [1, 2, 3]) == "3"
            assert [addresses(p) for p in rollouts] == where
            assert [registered_bytes(p.plan) for p in rollouts] == content
            for plan in before:
                with pytest.raises(sf.NotRegistered, match=r"replaced by sf\.register"):
                    sf.receive(plan)
            trainer = Process(second, [0, 1])
            for seed in (4, 5):
                assert errors(together(*(lambda p=p, s=seed: p.update(s) for p in (trainer, *rollouts)))) == []
                assert [served(p.plan, [3, 4, 5]) for p in rollouts] == [str(seed)] * 2
                assert set(trainer.plan.version.values()) == {seed}
            assert [addresses(p) for p in rollouts] == where
        finally:
            for process in (trainer, *rollouts):
                process.world.close()
    for process in rollouts:
        process.plan = None  # type: ignore[assignment]  # nobody has the memory any more
    before.clear()


def test_who_waits_hears_at_once_that_another_rendezvous_has_taken_the_address(small_chunks: None) -> None:
    """Nobody has been silent for long enough to be lost, and messages of the new one are numbered from 1 again."""
    lost_secs = 10.0  # beats every 2 s
    with serving(lost_secs=lost_secs) as first:
        trainer, rollout = Process(first, [0, 1]), Process(first, [2, 3, 4, 5])
        assert errors(together(lambda: trainer.update(1), lambda: rollout.update(1))) == []

        def restart() -> Any:
            first.close()
            return serving(first.address, lost_secs)

        start = time.monotonic()
        error, second = together(lambda: sf.receive(rollout.plan, wait_secs=PATIENCE_SECS / 2), restart)
        with second, rollout.world, trainer.world:
            assert isinstance(error, sf.WorldLost), error
            assert "another rendezvous answers at" in str(error)
            assert time.monotonic() - start < lost_secs
            assert served(rollout.plan, [1]) == "1"


def test_a_rendezvous_with_another_token_at_the_address_does_not_pass_for_the_one_before(small_chunks: None) -> None:
    with serving() as first:
        rollout = Process(first, [2, 3])
        first.close()
        with serving(first.address, token="another token"), rollout.world:
            start = time.monotonic()
            with pytest.raises(sf.WorldLost, match="nothing was heard of the rendezvous"):
                sf.receive(rollout.plan, wait_secs=PATIENCE_SECS / 2)
            assert time.monotonic() - start < PATIENCE_SECS / 4


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="needs CPU devices, as host memory is written")
@pytest.mark.parametrize("has_gone", [False, True], ids=["alive", "gone"])
def test_who_may_still_write_into_buffers_is_waited_for_in_another_world_too(
    driver: host_gpu.Driver, monkeypatch: pytest.MonkeyPatch, has_gone: bool
) -> None:
    holds_up, goes_on = hold_up_launches(monkeypatch)
    with serving() as first:
        trainer, stopped, rollout = Process(first, [0]), Process(first, [1]), Process(first, [2, 3, 4, 5])
        holds_up.set()
        stuck = threading.Thread(target=together, args=(lambda: stopped.update(1),), daemon=True)
        stuck.start()
        results = together(lambda: trainer.update(1), lambda: rollout.update(1))
        assert errors(results) == ["RuntimeError", "TransferError"]
        holds_up.clear()
        if has_gone:
            goes_on.set()
            stuck.join(PATIENCE_SECS)
            stopped.world.close()
            trainer.world.close()
            exports, part = rollout.world.exports, rollout.plan.registered().part
            eventually(lambda: not any(map(exports.may_write, part.doubtful)))
        rollout.world.close()
        trainer.world.close()
    with serving() as second, sf.connect(second.address, TOKEN, listen="tcp://127.0.0.1:0") as world:
        plan = sf.register(rollout.plan, world=world, ranks=rollout.ranks)
        trainer = Process(second, [0, 1])
        with trainer.world:
            results = together(lambda: trainer.update(2), lambda: sf.receive(plan, wait_secs=10))
            assert errors(results) == ([] if has_gone else ["UpdateRefused", "UnknownOutcome"]), results
            goes_on.set()
            stuck.join(PATIENCE_SECS)
            stopped.world.close()
            eventually(
                lambda: errors(together(lambda: trainer.update(3), lambda: sf.receive(plan, wait_secs=10))) == []
            )
            assert served(plan, [2, 3]) == "3"
    rollout.plan = None  # type: ignore[assignment]


@pytest.mark.parametrize("gives", ["nothing", "its arrays", "its arrays, and a new plan"])
def test_buffers_that_hold_a_mixture_stay_poisoned(small_chunks: None, gives: str) -> None:
    with serving() as first:
        trainer, rollout = Process(first, [0, 1]), Process(first, [2, 3, 4, 5])
        assert errors(together(lambda: trainer.update(1), lambda: rollout.update(1))) == []
        owner = sf.params(rollout.plan)

        def break_off(_: int) -> None:
            raise ZeroDivisionError

        results = together(lambda: trainer.update(2), lambda: rollout.update(2, progress=break_off))
        assert errors(results) == ["TransferError", "ZeroDivisionError"]
        for process in (trainer, rollout):
            process.world.close()
    with serving() as second, sf.connect(second.address, TOKEN, listen="tcp://127.0.0.1:0") as world:
        where = addresses(rollout)
        plan = sf.register(
            make_plan() if gives.endswith("plan") else rollout.plan,
            None if gives == "nothing" else owner,
            world=world,
            ranks=rollout.ranks,
        )
        assert {shard.address for shard in plan.registered().buffers.values()} == where
        assert served(plan, [1, 2]) == "poisoned"
        assert set(plan.staleness.values()) == ({0} if gives.endswith("plan") else {1})
        trainer = Process(second, [0, 1])
        with trainer.world:
            assert errors(together(lambda: trainer.update(3), lambda: sf.receive(plan))) == []
        assert served(plan, [3]) == "3"
        assert set(plan.version.values()) == ({1} if gives.endswith("plan") else {3})


def test_a_plan_whose_buffers_another_one_has_taken_over_no_longer_vouches_for_them(small_chunks: None) -> None:
    """The other one's update is cut; the first plan had filled them, but that was before."""
    with serving() as world:
        trainer, rollout = Process(world, [0, 1]), Process(world, [2, 3, 4, 5])
        assert errors(together(lambda: trainer.update(1), lambda: rollout.update(1))) == []
        first, owner = rollout.plan, sf.params(rollout.plan)
        rollout.plan = sf.register(make_plan(), owner, world=rollout.world, ranks=rollout.ranks)

        def break_off(_: int) -> None:
            raise ZeroDivisionError

        results = together(lambda: trainer.update(2), lambda: rollout.update(2, progress=break_off))
        assert errors(results) == ["TransferError", "ZeroDivisionError"]
        assert served(first, [1, 2]) == "poisoned"
        rollout.plan = sf.register(first, world=rollout.world, ranks=rollout.ranks)
        assert served(rollout.plan, [1, 2]) == "poisoned"
        with trainer.world, rollout.world:
            assert errors(together(lambda: trainer.update(3), lambda: rollout.update(3))) == []
            assert served(rollout.plan, [3]) == "3"


def test_buffers_of_an_owner_are_served_after_their_first_complete_update(small_chunks: None) -> None:
    """What they held before, nobody here knows."""
    with serving() as world:
        rollout = Process(world, [2, 3, 4, 5])
        owner = rollout.plan.registered().handles()
        rollout.world.close()
        trainer, rollout = Process(world, [0, 1]), Process(world, rollout.ranks, owner=owner)
        with trainer.world, rollout.world:
            with pytest.raises(sf.Poisoned, match="not been filled by a complete update since it was registered"):
                sf.params(rollout.plan)
            assert errors(together(lambda: trainer.update(1), lambda: rollout.update(1))) == []
            assert served(rollout.plan, [1]) == "1"


def test_a_registration_that_is_refused_leaves_the_one_before_in_force(small_chunks: None) -> None:
    with serving() as first, serving() as second:
        process, rival = Process(first, [2, 3]), Process(second, [3])
        try:
            with sf.connect(second.address, TOKEN, listen="tcp://127.0.0.1:0") as world:
                owner = process.plan.registered().handles()
                with pytest.raises(sf.WorldError, match="rank 3 is held by process"):
                    sf.register(process.plan, owner, world=world, ranks=[2, 3])
            trainer, other = Process(first, [0, 1]), Process(first, [4, 5])
            with trainer.world, other.world:
                assert errors(together(*(lambda p=p: p.update(1) for p in (trainer, process, other)))) == []
            assert served(process.plan, [1]) == "1"
        finally:
            for one in (process, rival):
                one.world.close()


def test_other_buffers_begin_anew_with_numbers_that_go_on(small_chunks: None) -> None:
    with serving() as first:
        trainer, rollout = Process(first, [0, 1]), Process(first, [2, 3, 4, 5])
        for seed in (1, 2):
            assert errors(together(lambda s=seed: trainer.update(s), lambda s=seed: rollout.update(s))) == []
        trainer.world.close()
        rollout.world.close()
    with serving() as second, sf.connect(second.address, TOKEN, listen="tcp://127.0.0.1:0") as world:
        owner = jax.tree.map(lambda x: jnp.array(x, copy=True), sf.params(rollout.plan))
        plan = sf.register(rollout.plan, owner, world=world, ranks=rollout.ranks)
        assert served(plan, [1, 2]) == "poisoned"
        assert (set(plan.version.values()), set(plan.staleness.values())) == ({0}, {2})
        trainer = Process(second, [0, 1], make_plan())
        with trainer.world:
            sf.sync(params_of(3, [0, 1]), trainer.plan, wait=False)
            sf.receive(plan)
        assert set(plan.version.values()) == {3}
