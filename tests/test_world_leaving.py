"""Who leaves before an attempt in which it took part is over for the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("zmq", reason="needs pyzmq (the zmq extra)")

from small_world import TOKEN, make_plan, served
from threaded_world import PATIENCE_SECS, Process, Processes, errors, together

import shardfly_jax as sf

pytestmark = pytest.mark.usefixtures("small_chunks")
A_WHILE_SECS = 0.3


def hold_back_arrival(process: Process, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """A process has all its chunks, but the rendezvous hears of it only a while after the event."""
    link, goes_on = process.world.link, threading.Event()
    say = link.say

    def late(op: str, **fields: Any) -> None:
        def wait() -> None:
            if goes_on.wait(PATIENCE_SECS):
                time.sleep(A_WHILE_SECS)
                say(op, **fields)

        if op == "arrived":
            threading.Thread(target=wait, daemon=True).start()
        else:
            say(op, **fields)

    monkeypatch.setattr(link, "say", late)
    return goes_on


@pytest.mark.parametrize(
    "leave",
    [
        lambda process: process.world.close(),
        lambda process: sf.register(make_plan(scale=2.0), world=process.world, ranks=process.ranks),
        lambda process: process.rescale(process.ranks, 1),
    ],
    ids=["closes its world", "registers another plan", "rescales"],
)
def test_who_leaves_once_its_replica_is_complete_ends_the_update_of_nobody_else(
    rendezvous: Any, monkeypatch: pytest.MonkeyPatch, leave: Callable[[Process], object]
) -> None:
    with Processes(rendezvous, [0, 1], [2, 3], [4, 5]) as (trainer, first, second):
        goes_on = hold_back_arrival(second, monkeypatch)

        def receive_and_leave() -> None:
            first.update(1)
            assert served(first.plan, [1]) == "1"
            goes_on.set()
            leave(first)
            assert rendezvous._serving._rendezvous.attempt is None

        assert errors(together(lambda: trainer.update(1), receive_and_leave, lambda: second.update(1))) == []
        assert served(second.plan, [1]) == "1"


def test_who_leaves_does_not_wait_longer_than_the_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        sf.connect("tcp://127.0.0.1:0", TOKEN, serve=True, deadline_secs=1) as world,
        Processes(world, [0, 1], [2, 3], [4, 5]) as (trainer, first, second),
    ):
        hold_back_arrival(second, monkeypatch)

        def receive_and_leave() -> None:
            first.update(1)
            first.world.close()

        start = time.monotonic()
        results = together(lambda: trainer.update(1), receive_and_leave, lambda: second.update(1))
        assert errors(results) == ["SyncTimeout", "SyncTimeout"]
        assert time.monotonic() - start < PATIENCE_SECS / 4
