"""How processes write into each other's memory: all of it but the GPU, which `host_gpu` stands in for.

Here processes are threads; `test_gpu_faults` has real ones, that die and are stopped.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from typing import Any

import jax
import numpy as np
import pytest

pytest.importorskip("zmq", reason="needs pyzmq (the zmq extra)")

import host_gpu
from checks import registered_bytes
from quantized_world import FORMATS, make_quantized_plan
from small_world import TOKEN, make_plan, params_of, served
from threaded_world import (
    PATIENCE_SECS,
    Process,
    Processes,
    addresses,
    check_update,
    errors,
    eventually,
    hold_up_launches,
    together,
)

import shardfly_jax as sf
from shardfly_jax.executors.persistent import Started
from shardfly_jax.pallas_kernels import launch_words as lw
from shardfly_jax.worlds.gpu_part import GpuPart
from shardfly_jax.worlds.gpu_run import GpuRun

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="needs CPU devices, as host memory is written")
SPREAD = [0], [1], [2], [3], [4, 5]


def part_of(process: Process) -> GpuPart:
    part = process.plan.registered().part
    assert isinstance(part, GpuPart)
    return part


def test_every_update_is_right_in_every_byte(driver: host_gpu.Driver, rendezvous: Any) -> None:
    with Processes(rendezvous, *SPREAD) as processes:
        assert {part_of(process).transport for process in processes} == {"ipc"}
        for seed in range(10):
            check_update(processes, seed)


def test_processes_that_hold_trainers_and_rollouts_write_to_themselves_and_others(
    driver: host_gpu.Driver, rendezvous: Any
) -> None:
    with Processes(rendezvous, [0, 4], [1, 2, 3], [5]) as processes:
        for seed in range(3):
            check_update(processes, seed)


def test_a_launch_that_is_still_queued_keeps_its_numbers(driver: host_gpu.Driver, rendezvous: Any) -> None:
    """The next one is given others: a *ready* that was given up must not say that the next attempt may begin."""
    with Processes(rendezvous, *SPREAD) as processes:
        check_update(processes, 1)
        executor = part_of(processes[2]).session.executor
        (ready,) = executor.ready(executor._attempt())._launches
        number = ready.works[0]._device
        at = executor.inboxes[number].unsafe_buffer_pointer()
        ready._report.words()
        queue, go = host_gpu.Report.lanes[at], threading.Event()
        queue._thread = threading.Thread(target=go.wait)  # the device is busy
        queue._thread.start()
        first, second = (executor._attempt() for _ in range(2))
        reports = [ready.start(attempt, np.zeros(0, np.uint64)) for attempt in (first, second)]
        go.set()
        for report, attempt in zip(reports, (first, second), strict=True):
            report.words()
            assert int(report._array.numbers[lw.EPOCH]) == attempt.epoch
        assert host_gpu.flag_at(at + 4 * executor.ready_word(number)).value >> 32 == second.epoch


def test_nothing_is_mapped_or_made_anew_while_the_same_processes_meet(driver: host_gpu.Driver, rendezvous: Any) -> None:
    with Processes(rendezvous, *SPREAD) as processes:
        check_update(processes, 1)
        before = dict(driver.calls)
        for seed in range(2, 5):
            check_update(processes, seed)
        made = {name for name, n in driver.calls.items() if n != before.get(name)}
        assert made == set()


def test_a_rank_that_holds_nothing_of_a_tensor_takes_part(driver: host_gpu.Driver, rendezvous: Any) -> None:
    shape = (4, host_gpu.UNIT // 16)  # fills a piece of memory, so that what has no bytes lies behind it
    source = {"w": sf.Layout(shape, "float32", {0: [(0, 4), (0, shape[1])]})}
    target = {"w": sf.Layout(shape, "float32", {0: [(0, 4), (0, shape[1])], 1: [(4, 4), (0, shape[1])]})}
    value = np.random.default_rng().standard_normal(shape, np.float32)
    with Processes(rendezvous, [0], [1, 2], make=lambda: sf.make_plan(source, target, None)) as (trainer, rollout):
        assert part_of(rollout).transport == "ipc"
        params = {"w": {0: jax.device_put(value)}}
        results = together(lambda: sf.sync(params, trainer.plan), lambda: sf.receive(rollout.plan, wait_secs=10))
        assert errors(results) == []
        assert sorted(registered_bytes(rollout.plan).values()) == [b"", value.tobytes()]


def test_the_portable_executor_is_refused_between_processes_with_gpus(driver: host_gpu.Driver, rendezvous: Any) -> None:
    with sf.connect(rendezvous.address, TOKEN) as world:
        words = "executor is 'portable', but between processes over ipc there is only 'persistent'. Leave executor out"
        with pytest.raises(sf.RegistrationError, match=words):
            sf.register(make_plan(), world=world, ranks=[2, 3], executor="portable")
        plan = sf.register(make_plan(), world=world, ranks=[2, 3], executor="persistent")
        assert plan.registered().part.transport == "ipc"


def test_a_refused_update_leaves_what_was_served(driver: host_gpu.Driver, rendezvous: Any) -> None:
    with Processes(rendezvous, [0, 1], [2, 3], [4, 5]) as (trainer, *rollouts):
        check_update([trainer, *rollouts], 1)
        bad = params_of(2, [0, 1]) | {"norm": {0: jax.numpy.zeros(3), 1: jax.numpy.zeros(3)}}
        results = together(lambda: sf.sync(bad, trainer.plan), *(lambda p=p: p.update(2) for p in rollouts))
        assert errors(results) == ["ParamsMismatch", "UpdateRefused", "UpdateRefused"]
        assert [served(process.plan, [1, 2]) for process in rollouts] == ["1", "1"]
        check_update([trainer, *rollouts], 3)


def test_params_on_another_device_than_the_registered_one_are_refused(driver: host_gpu.Driver, rendezvous: Any) -> None:
    other = jax.devices("cpu")[1]
    with Processes(rendezvous, [0, 1], [2, 3, 4, 5]) as (trainer, rollout):
        moved = jax.tree.map(lambda x: jax.device_put(x, other), params_of(1, [0, 1]))
        results = together(lambda: sf.sync(moved, trainer.plan), lambda: rollout.update(1))
        assert errors(results) == ["ParamsMismatch", "UpdateRefused"]
        assert "was registered on cpu:0. Make the plan from the trainer's jax.Arrays" in str(results[0])
        check_update([trainer, rollout], 2)


def test_values_that_are_not_finite_make_nothing_complete(
    driver: host_gpu.Driver, rendezvous: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rollouts' kernels end well: only whoever encodes knows that what it sent is void, and must confirm."""
    fail = GpuRun._fail

    def fail_late(self: GpuRun, *args: Any) -> None:
        attempt = rendezvous._serving._rendezvous.attempt
        if self._part.sends and attempt is not None:
            eventually(lambda: attempt.targets <= attempt.arrived or rendezvous._serving._rendezvous.attempt is None)
        fail(self, *args)

    monkeypatch.setattr(GpuRun, "_fail", fail_late)
    monkeypatch.delitem(FORMATS, "padded")  # which rollouts encode
    with Processes(rendezvous, *SPREAD, make=make_quantized_plan) as processes:
        check_update(processes, 1)
        results = together(*(lambda p=process: p.update(2, spoiled=bool(p.trainers)) for process in processes))
        assert errors(results) == ["NotFinite"] * 5
        assert "hold NaN or infinity" in str(results[-1])
        assert {served(process.plan, [1, 2]) for process in processes[2:]} == {"poisoned"}
        check_update(processes, 3)


def test_a_launch_that_waits_ends_soon_after_the_attempt_has_failed(
    driver: host_gpu.Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One trainer says that it failed instead of launching; the others wait for it, with a minute left."""

    launch, victims = GpuRun._launch, set()

    def fail(self: GpuRun) -> None:
        if self._part in victims:
            raise RuntimeError("out of luck")
        launch(self)

    monkeypatch.setattr(GpuRun, "_launch", fail)
    with (
        sf.connect("tcp://127.0.0.1:0", TOKEN, serve=True, deadline_secs=PATIENCE_SECS) as world,
        Processes(world, *SPREAD) as processes,
    ):
        check_update(processes, 1)
        victims.add(part_of(processes[1]))
        start = time.monotonic()
        results = together(*(lambda p=process: p.update(2) for process in processes))
        assert time.monotonic() - start < PATIENCE_SECS / 4
        assert errors(results) == ["TransferError", "RuntimeError", "TransferError", "TransferError", "TransferError"]
        assert "rank 1 failed: RuntimeError: out of luck" in str(results[3])
        victims.clear()
        check_update(processes, 3)


def test_rescaling_keeps_buffers_and_allocates_only_new_ones(driver: host_gpu.Driver, rendezvous: Any) -> None:
    members = Processes(rendezvous, [0, 1], [2, 3])
    for process in members.all:
        process.world.close()
    members = Processes(rendezvous, [0, 1], [2, 3], make=lambda: make_plan(replicas=1))
    with members as (trainer, rollout):
        check_update(members.all, 1)
        before, created = addresses(rollout), driver.calls["cuMemCreate"]
        trainer.rescale([0, 1], 2)
        done = rollout.rescale([2, 3, 4, 5], 2)
        assert (done.allocated, done.kept) == (len(before), len(before))
        assert before < addresses(rollout)
        assert driver.calls["cuMemCreate"] == created + 1  # both new ranks are on one device
        assert served(rollout.plan, [1]) == "poisoned"
        check_update(members.all, 2)


def test_a_restarted_trainer_takes_up_where_the_old_one_ended(driver: host_gpu.Driver, rendezvous: Any) -> None:
    members = Processes(rendezvous, [0], [1], [2, 3, 4, 5])
    with members as (trainer, _, rollout):
        check_update(members.all, 1)
        where = addresses(rollout)
        trainer.world.close()
        members.all[0] = Process(rendezvous, [0])
        check_update(members.all, 2)
        assert addresses(rollout) == where


def test_a_process_without_a_gpu_among_others_is_refused(driver: host_gpu.Driver, rendezvous: Any) -> None:
    """Its buffers are an owner's, so that its payload travels over sockets."""
    plan, owner = make_plan(), {}
    for index in plan.target_families:
        family = plan.families[index]
        shapes = {rank: family.layout.buffer_shape(rank) for rank in (4, 5)}
        for name in family.names:
            owner[name] = {r - 2: jax.device_put(np.zeros(shapes[r], family.layout.dtype)) for r in shapes}
    with Processes(rendezvous, [0, 1], [2, 3]) as (trainer, rollout):
        other = Process(rendezvous, [4, 5], plan, owner)
        with other.world:
            assert other.plan.registered().part.transport == "zmq"
            results = together(*(lambda p=p: p.update(1) for p in (trainer, rollout, other)))
        assert errors(results)[:2] == ["TransferError", "TransferError"]
        assert "Put all ranks of a plan on GPUs, or all on CPU devices" in str(results[0])
        assert isinstance(results[2], sf.ShardflyError)


def test_who_could_not_meet_the_others_in_time_meets_them_in_the_next_attempt(
    driver: host_gpu.Driver, rendezvous: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainers have met the first rollout, which did not find the second one's memory: it had not compiled yet."""
    ask, calls, made = GpuPart._ask, [], []

    def slow(self: GpuPart, stack: Any, epoch: int, until: float, name: str, what: str) -> Any:
        if self.held == {2, 3} and name == part_of(made[2]).process and what.startswith("inboxes"):
            calls.append(what)
            if len(calls) == 1:
                eventually(lambda: all(part_of(process)._met is not None for process in (made[0], made[2])))
                raise sf.SyncTimeout("update: it takes too long.")
        return ask(self, stack, epoch, until, name, what)

    monkeypatch.setattr(GpuPart, "_ask", slow)
    with Processes(rendezvous, [0, 1], [2, 3], [4, 5]) as processes:
        made += processes
        assert errors(together(*(lambda p=process: p.update(1) for process in processes))) == [
            "UpdateRefused", "SyncTimeout", "UpdateRefused",
        ]  # fmt: skip
        check_update(processes, 2)
    assert len(calls) == 2
    made.clear()


def test_a_launch_that_breaks_ends_the_attempt_at_once(
    driver: host_gpu.Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes, broken = Started.outcomes, []

    def fail(self: Started) -> Any:
        if any("send of rank 1 " in work.name for launch in self._launches for work in launch.works) and broken:
            outcomes(self)
            raise RuntimeError(broken.pop())
        return outcomes(self)

    monkeypatch.setattr(Started, "outcomes", fail)
    with (
        sf.connect("tcp://127.0.0.1:0", TOKEN, serve=True, deadline_secs=PATIENCE_SECS) as world,
        Processes(world, *SPREAD) as processes,
    ):
        check_update(processes, 1)
        broken.append("an illegal memory access was encountered")
        start = time.monotonic()
        results = together(*(lambda p=process: p.update(2) for process in processes))
        assert time.monotonic() - start < PATIENCE_SECS / 4
        assert errors(results) == ["TransferError", "RuntimeError", "TransferError", "TransferError", "TransferError"]
        assert "rank 1 failed: RuntimeError: an illegal memory access" in str(results[0])
        check_update(processes, 3)


def test_who_cannot_register_because_an_update_is_pending_offers_nothing(
    driver: host_gpu.Driver, rendezvous: Any
) -> None:
    with Processes(rendezvous, [0, 1], [2, 3, 4, 5]) as (trainer, rollout):
        check_update([trainer, rollout], 1)
        pending = trainer.update(2, wait=False)
        before = set(trainer.world.exports._offers)
        with pytest.raises(sf.UpdateRefused, match="pending"):
            sf.register(make_plan(scale=2.0), world=trainer.world, ranks=[0, 1])
        assert set(trainer.world.exports._offers) == before
        rollout.update(2)
        pending.result()


def test_who_launches_after_the_others_gave_up_writes_nothing(
    driver: host_gpu.Driver, rendezvous: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    holds_up, failed = hold_up_launches(monkeypatch)
    with Processes(rendezvous, *SPREAD) as processes:
        check_update(processes, 1)
        before = [registered_bytes(process.plan) for process in processes]
        holds_up.set()

        def release() -> None:
            eventually(lambda: all(part_of(process).doubtful for process in processes[2:]))
            assert [registered_bytes(process.plan) for process in processes] == before
            failed.set()

        results = together(*(lambda p=process: p.update(2) for process in processes), release)
        assert errors(results) == ["RuntimeError", *["TransferError"] * 4]
        assert [registered_bytes(process.plan) for process in processes] == before
        assert {served(process.plan, [1]) for process in processes[2:]} == {"poisoned"}
        holds_up.clear()
        check_update(processes, 3)


def test_who_may_still_write_is_waited_for_after_a_rescale_too(
    driver: host_gpu.Driver, rendezvous: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The buffers that were kept are the same, whatever the plan is now."""
    holds_up, goes_on = hold_up_launches(monkeypatch)
    with Processes(rendezvous, [0], [1], [2, 3, 4, 5]) as (trainer, stopped, rollout):
        check_update([trainer, stopped, rollout], 1)
        holds_up.set()
        stuck = threading.Thread(target=together, args=(lambda: stopped.update(2),), daemon=True)
        stuck.start()
        assert errors(together(lambda: trainer.update(2), lambda: rollout.update(2))) == [
            "RuntimeError",
            "TransferError",
        ]
        holds_up.clear()
        trainer.rescale([0], replicas=1)
        rollout.rescale([2, 3], replicas=1)
        other = Process(rendezvous, [1], make_plan(replicas=1))
        with other.world:
            before = registered_bytes(rollout.plan)
            results = together(*(lambda p=p: p.update(3) for p in (trainer, other, rollout)))
            assert errors(results) == ["UpdateRefused", "UpdateRefused", "UnknownOutcome"], results
            assert registered_bytes(rollout.plan) == before
            goes_on.set()
            stuck.join(PATIENCE_SECS)
            stopped.world.close()
            eventually(lambda: not any(errors(together(*(lambda p=p: p.update(4) for p in (trainer, other, rollout))))))
            assert served(rollout.plan, [3, 4]) == "4"


def test_who_waits_for_memory_of_others_hears_at_once_that_its_world_was_closed(
    driver: host_gpu.Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer = GpuPart._offer

    def keep(self: GpuPart, what: str, addresses: Any) -> None:
        if self.sends or not what.startswith("inboxes"):
            offer(self, what, addresses)

    monkeypatch.setattr(GpuPart, "_offer", keep)
    with (
        sf.connect("tcp://127.0.0.1:0", TOKEN, serve=True, deadline_secs=PATIENCE_SECS) as world,
        Processes(world, [0, 1], [2, 3, 4, 5]) as (trainer, rollout),
    ):
        start = time.monotonic()
        pending = trainer.update(1, wait=False)

        def close() -> None:
            eventually(lambda: part_of(trainer)._prepared is not None)
            trainer.world.close()

        assert errors(together(pending.result, lambda: rollout.update(1), close)) == ["WorldLost", "RankLost"]
        assert time.monotonic() - start < PATIENCE_SECS / 4


def test_a_world_that_fails_to_close_has_given_back_everything_else(
    driver: host_gpu.Driver, rendezvous: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That no memory, descriptor or thread is left is for `driver` to see."""
    with Processes(rendezvous, [0, 1], [2, 3, 4, 5]) as (trainer, rollout):
        check_update([trainer, rollout], 1)
        exports, neighbours = rollout.world.exports, list(part_of(rollout)._neighbours.values())
        withdraw, failed = exports.withdraw, []

        def fail(prefix: str) -> None:
            if prefix:
                failed.append(prefix.split()[0])
                raise OSError(errno.EIO, prefix)
            withdraw(prefix)

        monkeypatch.setattr(exports, "withdraw", fail)
        with pytest.raises(OSError, match="buffers"):  # the first
            rollout.world.close()
        assert failed == ["buffers", "inboxes"]
        assert rollout.world.context.closed
        assert not os.path.exists(exports.path)
        assert [neighbour._socket for neighbour in neighbours] == [None]
        rollout.world.close()  # is closed
