"""Addresses that cannot work, and strangers at those that do."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("zmq", reason="needs pyzmq (the zmq extra)")

import zmq
from small_world import TOKEN
from threaded_world import eventually, together

import shardfly_jax as sf
from shardfly_jax.transports.sockets import MAX_REFUSED, Incoming
from shardfly_jax.worlds.serving import Serving
from shardfly_jax.worlds.wire import Seal


@pytest.mark.parametrize("address", ["tcp://127.0.0.1", "tcp://", "ipc://"])
@pytest.mark.parametrize("serve", [False, True], ids=["join", "serve"])
def test_an_address_without_host_port_or_path_is_refused_at_once(address: str, serve: bool) -> None:
    (error,) = together(lambda: sf.connect(address, TOKEN, serve=serve, deadline_secs=5))
    assert isinstance(error, sf.WorldError), error
    assert repr(address) in str(error)
    assert "tcp://host:port or ipc://path" in str(error)


class Flood:
    """A socket from which a stranger's messages never end, until it is told."""

    def __init__(self, socket: Any):
        self._socket, self.flows, self.taken = socket, True, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def poll(self, timeout_ms: int) -> int:
        return int(self.flows)

    def recv_multipart(self, **options: Any) -> list[Any]:
        self.taken += 1
        return [b"no", b"message"] if options else [b"stranger", b"no", b"message"]


def test_a_stranger_who_floods_the_rendezvous_stops_neither_its_beats_nor_its_clock(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    turns = []
    monkeypatch.setattr(Serving, "_beat", lambda serving, now: turns.append(now))
    flood = None
    receive = Serving._receive

    def flooded(serving: Serving, frames: list[bytes]) -> None:
        nonlocal flood
        if flood is None:
            flood = serving._socket = Flood(serving._socket)
        receive(serving, frames)

    monkeypatch.setattr(Serving, "_receive", flooded)
    with zmq.Context() as context:
        serving = Serving(context, "tcp://127.0.0.1:0", Seal(TOKEN), 5.0, 0.2)
        try:
            with context.socket(zmq.DEALER) as stranger:
                stranger.setsockopt(zmq.LINGER, 1000)
                stranger.connect(serving.address)
                stranger.send_multipart([b"no", b"message"])
                eventually(lambda: flood is not None and flood.taken > 100)
                before = len(turns)
                eventually(lambda: len(turns) > before + 5)
        finally:
            if flood is not None:
                flood.flows = False
            serving.close()
    assert flood is not None
    assert 0 < caplog.text.count("refused") < flood.taken / 10


def test_a_stranger_who_floods_a_receiver_does_not_keep_it_from_its_clock() -> None:
    with zmq.Context() as context:
        incoming = Incoming(context, "tcp://127.0.0.1:0", Seal(TOKEN), 64)
        flood = incoming.socket = Flood(incoming.socket)
        try:
            (message,) = together(incoming.take)
            assert message is None
            assert flood.taken == MAX_REFUSED
        finally:
            flood.flows = False
            incoming.close()
