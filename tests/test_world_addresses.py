"""Addresses that cannot work, and strangers at those that do."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("zmq", reason="needs pyzmq (the zmq extra)")

import zmq
from small_world import TOKEN, make_plan, params_of, served, target_of
from threaded_world import errors, eventually, together

import shardfly_jax as sf
from shardfly_jax.transports.sockets import MAX_REFUSED, Incoming
from shardfly_jax.worlds.serving import Serving
from shardfly_jax.worlds.wire import MAX_SECS, Seal


@pytest.mark.parametrize("address", ["tcp://127.0.0.1", "tcp://", "ipc://"])
@pytest.mark.parametrize("serve", [False, True], ids=["join", "serve"])
def test_an_address_without_host_port_or_path_is_refused_at_once(address: str, serve: bool) -> None:
    (error,) = together(lambda: sf.connect(address, TOKEN, serve=serve, deadline_secs=5))
    assert isinstance(error, sf.WorldError), error
    assert repr(address) in str(error)
    assert "tcp://host:port or ipc://path" in str(error)


@pytest.mark.parametrize("serve", [False, True], ids=["join", "serve"])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"address": "tcp://127.0.0.1:99999"}, "'tcp://127.0.0.1:99999', but that names no place"),
        ({"address": 5}, "address is 5, but it must begin with"),
        ({"listen": "tcp://*:0"}, "listen is 'tcp://*:0', but others need a host"),
        ({"listen": "tcp://0.0.0.0:0"}, "others need a host"),
        ({"listen": "tcp://0:0"}, "others need a host"),
        ({"listen": "tcp://[::]:0"}, "others need a host"),
        ({"listen": "tcp://[0:0::0]:0"}, "others need a host"),
        ({"listen": "tcp://127.0.0.1"}, "names no place"),
        ({"listen": "tcp://127.0.0.1:\udc80"}, "names no place"),
        ({"serve": "yes"}, "serve is 'yes', but True or False"),
        ({"token": b"token"}, "token is empty or no string"),
        ({"name": "x" * 201}, "name has 201 letters"),
        ({"deadline_secs": True}, "deadline_secs is True, but a positive number of seconds"),
        ({"deadline_secs": 1e300}, "600,000 at most"),
        ({"deadline_secs": 10**400}, "600,000 at most"),
        ({"lost_secs": "10"}, "lost_secs is '10', but"),
    ],
)
def test_arguments_that_cannot_work_are_refused_at_once(options: dict[str, Any], words: str, serve: bool) -> None:
    (error,) = together(
        lambda: sf.connect(**{"address": "tcp://127.0.0.1:5", "token": TOKEN, "serve": serve, **options})
    )
    assert isinstance(error, sf.WorldError), error
    assert words in str(error)


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="needs a host with IPv6")
def test_processes_meet_and_send_at_addresses_of_ipv6() -> None:
    with (
        sf.connect("tcp://[::1]:0", TOKEN, serve=True) as trainer,
        sf.connect(trainer.address, TOKEN, listen="tcp://[::1]:0") as rollout,
    ):
        sends = sf.register(make_plan(), world=trainer, ranks=[0, 1])
        takes = sf.register(make_plan(), world=rollout, ranks=[2, 3, 4, 5])
        assert errors(together(lambda: sf.sync(params_of(1, [0, 1]), sends), lambda: sf.receive(takes))) == []
        assert served(takes, [1]) == "1"


def test_the_longest_waits_can_be_waited() -> None:
    longest = {"deadline_secs": MAX_SECS, "lost_secs": MAX_SECS}
    with (
        sf.connect("tcp://127.0.0.1:0", TOKEN, serve=True, **longest) as trainer,
        sf.connect(trainer.address, TOKEN, listen="tcp://127.0.0.1:0", **longest) as rollout,
    ):
        sends = sf.register(make_plan(), world=trainer, ranks=[0, 1])
        takes = sf.register(make_plan(), world=rollout, ranks=[2, 3, 4, 5])
        handle = sf.sync(params_of(1, [0, 1]), sends, wait=False, wait_secs=MAX_SECS)
        eventually(lambda: set(takes.staleness.values()) == {1})
        assert errors(together(lambda: sf.receive(takes, wait_secs=MAX_SECS), handle.result)) == []
        assert served(takes, [1]) == "1"


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:0", "tcp://127.0.0.1:*", "tcp://*:5555"])
def test_an_address_at_which_only_the_serving_process_can_listen_is_refused_to_others(address: str) -> None:
    with pytest.raises(sf.WorldError, match=r"needs the host and port of the one that does. Give its world\.address"):
        sf.connect(address, TOKEN)


def test_a_host_whose_number_ends_in_zeros_is_one() -> None:
    (error,) = together(lambda: sf.connect("tcp://127.0.0.1:5", TOKEN, listen="tcp://10.0.0.0:0", deadline_secs=0.1))
    assert "nobody answers" in str(error)


ODD_RANKS = [5, "01", [0.5], [True], [[0]], [], [6], [-1], print]


@pytest.mark.parametrize("ranks", ODD_RANKS, ids=repr)
@pytest.mark.parametrize("call", ["register", "rescale"])
def test_ranks_that_are_none_are_refused(rendezvous: Any, ranks: Any, call: str) -> None:
    with sf.connect(rendezvous.address, TOKEN) as world:
        plan = make_plan()
        if call == "rescale":
            plan = sf.register(plan, world=world, ranks=[0, 1])
        (error,) = together(
            lambda: (
                sf.register(plan, world=world, ranks=ranks)
                if call == "register"
                else sf.rescale(plan, target_of(2), ranks=ranks)
            )
        )
        assert isinstance(error, sf.RegistrationError), error
        assert "but the plan has ranks 0 to 5. Give a list of those that live in this process" in str(error)


def test_a_world_that_is_none_or_was_closed_is_refused(rendezvous: Any) -> None:
    plan = make_plan()
    with pytest.raises(sf.RegistrationError, match=r"world is a str, but what sf\.connect returns is needed"):
        sf.register(plan, world=rendezvous.address, ranks=[0])
    world = sf.connect(rendezvous.address, TOKEN, listen="tcp://127.0.0.1:0")
    registered = sf.register(plan, world=world, ranks=[0, 1])
    world.close()
    for call in (
        lambda: sf.register(plan, world=world, ranks=[0, 1]),
        lambda: sf.register(plan, world=world, ranks=[2]),
        lambda: sf.rescale(registered, target_of(1), ranks=[0, 1]),
        lambda: sf.sync(params_of(1, [0, 1]), registered),
    ):
        with pytest.raises(sf.WorldLost, match=r"it was closed in this process\. sf\.connect again"):
            call()


# Paths and ports that somebody has


def serving(path: Path) -> Any:
    return sf.connect(f"ipc://{path}", TOKEN, serve=True, deadline_secs=5)


def test_a_path_at_which_a_living_process_listens_is_not_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "meet"
    with serving(path) as first:
        with pytest.raises(sf.WorldError, match="a living process listens there") as caught:
            serving(path)
        assert str(path) in str(caught.value)
        assert "or end the process that has it" in str(caught.value)
        with sf.connect(first.address, TOKEN, listen=first.address) as other:
            with pytest.raises(sf.WorldError, match=r"listen is .*\(a living process listens there"):
                sf.register(make_plan(), world=other, ranks=[2])
            sf.register(make_plan(), world=other, ranks=[0])
    with serving(path):  # it is free again
        pass


def test_of_processes_that_begin_at_once_one_serves_a_path(tmp_path: Path) -> None:
    """Two that look at it before either has bound it would both find it free."""
    for k in range(3):
        results = together(*[lambda k=k: serving(tmp_path / str(k))] * 4)
        worlds = [result for result in results if not isinstance(result, BaseException)]
        assert errors(results) == ["WorldError"] * 3
        worlds[0].close()


def test_a_path_that_a_killed_process_left_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "meet"
    code = (
        "import sys, shardfly_jax as sf; w = sf.connect(sys.argv[1], 'token', serve=True); print('up', flush=True); "
        "sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-P", "-c", code, f"ipc://{path}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(sf.WorldError, match="a living process listens there"):
            serving(path)
        process.kill()
    assert path.is_socket()
    with serving(path) as world, sf.connect(world.address, TOKEN):
        pass


@pytest.mark.parametrize("make", [Path.touch, Path.mkdir], ids=["file", "folder"])
def test_what_is_no_socket_is_never_removed(tmp_path: Path, make: Callable[[Path], None]) -> None:
    path = tmp_path / "weights"
    make(path)
    with pytest.raises(sf.WorldError, match="something that is no socket"):
        serving(path)
    assert path.exists()


@pytest.mark.parametrize("kind", ["tcp", "ipc"])
def test_who_listens_at_a_fixed_place_can_register_and_rescale_again(
    rendezvous: Any, tmp_path: Path, kind: str
) -> None:
    """As processes behind a firewall do; the plan before listens there until then."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    listen = f"tcp://127.0.0.1:{port}" if kind == "tcp" else f"ipc://{tmp_path / 'weights'}"
    with (
        sf.connect(rendezvous.address, TOKEN) as trainer,
        sf.connect(rendezvous.address, TOKEN, listen=listen) as rollout,
    ):
        sends = sf.register(make_plan(), world=trainer, ranks=[0, 1])
        takes = sf.register(make_plan(), world=rollout, ranks=[2, 3, 4, 5])
        for seed in (1, 2, 3):
            update = (lambda s=seed, p=sends: sf.sync(params_of(s, [0, 1]), p)), (lambda p=takes: sf.receive(p))
            assert errors(together(*update)) == []
            assert served(takes, [seed]) == str(seed)
            if seed == 1:
                takes = sf.register(make_plan(), world=rollout, ranks=[2, 3, 4, 5])
            else:
                sends = sf.rescale(sends, target_of(1), ranks=[0, 1])
                takes = sf.rescale(takes, target_of(1), ranks=[2, 3])


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
