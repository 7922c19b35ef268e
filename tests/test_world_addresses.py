"""Addresses that cannot work, and strangers at those that do."""

from __future__ import annotations

import pytest

pytest.importorskip("zmq", reason="needs pyzmq (the zmq extra)")

from small_world import TOKEN
from threaded_world import together

import shardfly_jax as sf


@pytest.mark.parametrize("address", ["tcp://127.0.0.1", "tcp://", "ipc://"])
@pytest.mark.parametrize("serve", [False, True], ids=["join", "serve"])
def test_an_address_without_host_port_or_path_is_refused_at_once(address: str, serve: bool) -> None:
    (error,) = together(lambda: sf.connect(address, TOKEN, serve=serve, deadline_secs=5))
    assert isinstance(error, sf.WorldError), error
    assert repr(address) in str(error)
    assert "tcp://host:port or ipc://path" in str(error)
