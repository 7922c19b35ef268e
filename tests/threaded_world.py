"""Worlds whose processes are threads of one: quick to make, and their memory can be looked at."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from checks import poison_buffers
from small_world import TOKEN, make_plan, params_of, served, target_of

import shardfly_jax as sf
from shardfly_jax.worlds.gpu_run import GpuRun

PATIENCE_SECS = 60.0


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Runs calls at once, as processes would; what each returned, or the error it raised."""
    out: list[Any] = [None] * len(calls)

    def run(k: int) -> None:
        try:
            out[k] = calls[k]()
        except BaseException as error:
            out[k] = error

    threads = [threading.Thread(target=run, args=(k,), daemon=True) for k in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_SECS)
        assert not thread.is_alive(), "a process hangs"
    return out


class Process:
    """What a process has: a world and a plan, registered with its ranks."""

    def __init__(self, rendezvous: Any, ranks: list[int], plan: sf.Plan | None = None, owner: Any = None):
        self.ranks = ranks
        self.world = sf.connect(rendezvous.address, TOKEN, listen="tcp://127.0.0.1:0", name=f"process {ranks}")
        try:
            self.plan = sf.register(plan or make_plan(), owner, world=self.world, ranks=ranks)
        except BaseException:
            self.world.close()
            raise

    def rescale(self, ranks: list[int], replicas: int, tp: int = 2) -> sf.Rescaled:
        self.ranks = ranks
        self.plan = sf.rescale(self.plan, target_of(replicas, tp), ranks=ranks)
        assert self.plan.rescaled is not None
        return self.plan.rescaled

    @property
    def trainers(self) -> list[int]:
        return [rank for rank in self.ranks if rank < 2]

    def update(self, seed: int, spoiled: bool = False, **options: Any) -> Any:
        if self.trainers:
            return sf.sync(params_of(seed, self.trainers, spoiled), self.plan, **options)
        return sf.receive(self.plan, **{"wait_secs": 10, **options})


class Processes:
    """Several of them."""

    def __init__(self, rendezvous: Any, *spread: list[int], make: Callable[[], sf.Plan] = make_plan):
        self.all = [Process(rendezvous, ranks, make()) for ranks in spread]

    def update(self, seed: int) -> list[Any]:
        return together(*(lambda process=process: process.update(seed) for process in self.all))

    def __enter__(self) -> list[Process]:
        return self.all

    def __exit__(self, *_: object) -> None:
        for process in self.all:
            process.world.close()


def hold_up_launches(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """While the first event is set, the process of rank 0 fails to launch, and that of rank 1 waits for the second."""
    launch, holds_up, goes_on = GpuRun._launch, threading.Event(), threading.Event()

    def late(self: GpuRun) -> None:
        if holds_up.is_set() and self._part.held == {0}:
            raise RuntimeError("out of luck")
        if holds_up.is_set() and self._part.held == {1}:
            assert goes_on.wait(PATIENCE_SECS)
        launch(self)

    monkeypatch.setattr(GpuRun, "_launch", late)
    return holds_up, goes_on


def errors(results: list[Any]) -> list[str]:
    return [type(result).__name__ for result in results if isinstance(result, BaseException)]


def eventually(what: Any) -> None:
    """Waits until something holds; news travel by themselves."""
    until = time.monotonic() + PATIENCE_SECS
    while not what():
        assert time.monotonic() < until, "it never came to that"
        time.sleep(0.005)


def behind(process: Process) -> set[int]:
    return set(process.plan.staleness.values())


def addresses(process: Process) -> set[int]:
    return {shard.address for shard in process.plan.registered().buffers.values()}


def check_update(processes: list[Process], seed: int) -> int:
    """An update is right in every byte everywhere, and its number is newer than all; the number."""
    before = max(number for process in processes for number in process.plan.version.values())
    for process in processes:
        poison_buffers(process.plan)
    assert errors(together(*(lambda p=process: p.update(seed) for process in processes))) == []
    for process in processes:
        assert max(process.ranks) < 2 or served(process.plan, [seed]) == str(seed)

    def versions() -> set[int]:
        return {number for process in processes for number in process.plan.version.values()}

    eventually(lambda: len(versions()) == 1)  # a rollout does not wait for others
    assert min(versions()) > before
    return versions().pop()
