"""Worlds whose processes are threads of one: quick to make, and their memory can be looked at."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from small_world import TOKEN, make_plan, params_of

import shardfly_jax as sf

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

    @property
    def trainers(self) -> list[int]:
        return [rank for rank in self.ranks if rank < 2]

    def update(self, seed: int, **options: Any) -> Any:
        if self.trainers:
            return sf.sync(params_of(seed, self.trainers), self.plan, **options)
        return sf.receive(self.plan, **{"wait_secs": 10, **options})


class Processes:
    """Several of them."""

    def __init__(self, rendezvous: Any, *spread: list[int]):
        self.all = [Process(rendezvous, ranks) for ranks in spread]

    def update(self, seed: int) -> list[Any]:
        return together(*(lambda process=process: process.update(seed) for process in self.all))

    def __enter__(self) -> list[Process]:
        return self.all

    def __exit__(self, *_: object) -> None:
        for process in self.all:
            process.world.close()


def errors(results: list[Any]) -> list[str]:
    return [type(result).__name__ for result in results if isinstance(result, BaseException)]
