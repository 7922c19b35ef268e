"""How processes hand each other memory: descriptors of files here, over the same socket."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shardfly_jax.sharding.errors import TransferError
from shardfly_jax.transports.exports import Exports, Neighbour, _send
from shardfly_jax.worlds.wire import Seal

SEAL = Seal("a token of the tests")


@pytest.fixture
def exports() -> Iterator[Exports]:
    made = Exports(SEAL)
    yield made
    made.close()


def piece(content: bytes) -> int:
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.flush()
        return os.dup(file.fileno())


def read(descriptor: int) -> bytes:
    with os.fdopen(descriptor, "rb") as file:
        file.seek(0)
        return file.read()


def test_descriptors_arrive_with_what_is_said_about_them(exports: Exports) -> None:
    given = [piece(b"one"), piece(b"three")]
    rows = [[k, 2 * k, 1 << 40] for k in range(20_000)]  # more than a socket takes at once
    exports.offer("buffers", [3, 5], given, rows)
    for descriptor in given:
        os.close(descriptor)  # the offer has its own
    neighbour = Neighbour(exports.path, SEAL, "a")
    for _ in range(2):
        answer = neighbour.ask("buffers", 5.0)
        assert answer is not None
        sizes, descriptors, back = answer
        assert (sizes, back) == ([3, 5], rows)
        assert [read(descriptor) for descriptor in descriptors] == [b"one", b"three"]
    neighbour.close()


def test_whoever_asks_early_waits_and_whoever_asks_in_vain_is_told(exports: Exports) -> None:
    neighbour = Neighbour(exports.path, SEAL, "a")
    assert neighbour.ask("inboxes", 0.05) is None
    threading.Timer(0.2, exports.offer, ("inboxes", [], [], [[1]])).start()
    assert neighbour.ask("inboxes", 10.0) == ([], [], [[1]])
    exports.withdraw("inb")
    assert neighbour.ask("inboxes", 0.05) is None
    neighbour.close()


def test_another_token_is_cut_off(exports: Exports) -> None:
    exports.offer("buffers", [], [], [])
    neighbour = Neighbour(exports.path, Seal("another"), "a")
    with pytest.raises(TransferError, match="has ended"):
        neighbour.ask("buffers", 5.0)
    neighbour.close()


def test_garbage_is_cut_off(exports: Exports) -> None:
    with socket.socket(socket.AF_UNIX) as raw:
        raw.connect(exports.path)
        raw.sendall(b"\xff" * 64)
        raw.settimeout(5.0)
        assert raw.recv(10) == b""


PROGRAM = """
import sys, time
from shardfly_jax.transports.exports import Neighbour
from shardfly_jax.worlds.wire import Seal
neighbour = Neighbour(sys.argv[1], Seal("a token of the tests"), "other")
neighbour.ask("buffers", 5.0)
time.sleep(60)
"""


def until(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + 10.0
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def test_a_stopped_process_may_write_and_a_dead_one_may_not(exports: Exports) -> None:
    exports.offer("buffers", [], [], [])
    assert not exports.may_write("other")
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, exports.path])
    try:
        assert until(lambda: exports.may_write("other"))
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.2)
        assert exports.may_write("other")
    finally:
        process.kill()
        process.wait()
    assert until(lambda: not exports.may_write("other"))


def test_a_closed_owner_is_named(exports: Exports) -> None:
    exports.close()
    with pytest.raises(TransferError, match="cannot be reached"):
        Neighbour(exports.path, SEAL, "a")


def test_who_asks_and_never_takes_the_answer_holds_up_nobody(exports: Exports) -> None:
    exports.offer("buffers", [], [], [[k] for k in range(500_000)])
    with socket.socket(socket.AF_UNIX) as stopped:
        stopped.connect(exports.path)
        _send(stopped, SEAL, {"op": "want", "who": "stopped", "what": "buffers", "secs": 0.01})
        assert until(lambda: exports.may_write("stopped"))
        time.sleep(0.2)  # the answer fills the socket
        done = threading.Event()

        def work() -> None:
            exports.offer("inboxes", [], [], [[1]])
            assert exports.may_write("stopped")
            done.set()

        threading.Thread(target=work, daemon=True).start()
        assert done.wait(5.0)
        neighbour = Neighbour(exports.path, SEAL, "a")
        assert neighbour.ask("inboxes", 5.0) == ([], [], [[1]])
        neighbour.close()


def test_closing_ends_every_connection_and_thread() -> None:
    before = set(threading.enumerate())
    exports = Exports(SEAL)
    exports.offer("buffers", [], [], [])
    neighbours = [Neighbour(exports.path, SEAL, name) for name in "ab"]
    assert neighbours[0].ask("buffers", 5.0) is not None

    def ask() -> None:
        with pytest.raises(TransferError):
            neighbours[1].ask("never", 30.0)

    waiting = threading.Thread(target=ask)
    waiting.start()
    assert until(lambda: exports.may_write("b"))
    exports.close()
    assert until(lambda: set(threading.enumerate()) <= before)
    with pytest.raises(TransferError, match="another one holds its ranks"):
        neighbours[0].ask("buffers", 5.0)
    for neighbour in neighbours:
        neighbour.close()


def test_a_process_without_descriptors_left_answers_again_later(
    exports: Exports, monkeypatch: pytest.MonkeyPatch
) -> None:
    exports.offer("buffers", [], [], [])
    accept, left = socket.socket.accept, [2]

    def scarce(self: socket.socket) -> Any:
        connection = accept(self)
        if left[0]:
            left[0] -= 1
            connection[0].close()
            raise OSError(errno.EMFILE, "Too many open files")
        return connection

    monkeypatch.setattr(socket.socket, "accept", scarce)
    for _ in range(3):  # the listener is in an unchanged call the first time
        neighbour = Neighbour(exports.path, SEAL, "a")
        with contextlib.suppress(TransferError):
            neighbour.ask("buffers", 5.0)
        neighbour.close()
    neighbour = Neighbour(exports.path, SEAL, "a")
    assert neighbour.ask("buffers", 5.0) is not None
    neighbour.close()
    assert left == [0]
