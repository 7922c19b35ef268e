"""How processes hand each other memory: descriptors of files here, over the same socket."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import secrets
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
from shardfly_jax.transports.exports import MAX_DESCRIPTORS, Exports, Neighbour, _send
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


def soon(secs: float) -> float:
    return time.monotonic() + secs


def test_descriptors_arrive_with_what_is_said_about_them(exports: Exports) -> None:
    given = [piece(b"one"), piece(b"three")]
    rows = [[k, 2 * k, 1 << 40] for k in range(20_000)]  # more than a socket takes at once
    exports.offer("buffers", [3, 5], given, rows)
    for descriptor in given:
        os.close(descriptor)  # the offer has its own
    neighbour = Neighbour(exports.path, SEAL, "a")
    for _ in range(2):
        answer = neighbour.ask("buffers", soon(5.0))
        assert answer is not None
        sizes, descriptors, back = answer
        assert (sizes, back) == ([3, 5], rows)
        assert [read(descriptor) for descriptor in descriptors] == [b"one", b"three"]
    neighbour.close()


@pytest.mark.parametrize("count", [MAX_DESCRIPTORS, MAX_DESCRIPTORS + 1, 200])
def test_as_many_pieces_as_there_are_arrive_in_several_messages(exports: Exports, count: int) -> None:
    contents = [secrets.token_bytes(8) for _ in range(count)]
    given = [piece(content) for content in contents]
    rows = [[k, 1 << 40] for k in range(20_000)]
    exports.offer("buffers", range(count), given, rows)
    for descriptor in given:
        os.close(descriptor)
    neighbour = Neighbour(exports.path, SEAL, "a")
    for _ in range(2):
        answer = neighbour.ask("buffers", soon(5.0))
        assert answer is not None
        sizes, descriptors, back = answer
        assert (sizes, back) == (list(range(count)), rows)
        assert [read(descriptor) for descriptor in descriptors] == contents
    neighbour.close()


def test_whoever_asks_early_waits_and_whoever_asks_in_vain_is_told(exports: Exports) -> None:
    neighbour = Neighbour(exports.path, SEAL, "a")
    assert neighbour.ask("inboxes", soon(0.05)) is None
    threading.Timer(0.2, exports.offer, ("inboxes", [], [], [[1]])).start()
    assert neighbour.ask("inboxes", soon(10.0)) == ([], [], [[1]])
    exports.withdraw("inb")
    assert neighbour.ask("inboxes", soon(0.05)) is None
    neighbour.close()


def test_another_token_is_cut_off(exports: Exports) -> None:
    exports.offer("buffers", [], [], [])
    neighbour = Neighbour(exports.path, Seal("another"), "a")
    with pytest.raises(TransferError, match="has ended"):
        neighbour.ask("buffers", soon(5.0))
    neighbour.close()


def test_garbage_is_cut_off(exports: Exports) -> None:
    with socket.socket(socket.AF_UNIX) as raw:
        raw.connect(exports.path)
        raw.sendall(b"\xff" * 64)
        raw.settimeout(5.0)
        with contextlib.suppress(ConnectionResetError):  # with bytes that nobody has read
            assert raw.recv(10) == b""


PROGRAM = """
import sys, time
from shardfly_jax.transports.exports import Neighbour
from shardfly_jax.worlds.wire import Seal
neighbour = Neighbour(sys.argv[1], Seal("a token of the tests"), "other")
neighbour.ask("buffers", time.monotonic() + 5.0)
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


OWNER = """
import os, sys, time
from shardfly_jax.transports.exports import Exports
from shardfly_jax.worlds.wire import Seal
exports = Exports(Seal("a token of the tests"))
for what in ("buffers", "inboxes"):
    exports.offer(what, [len(what)], [os.open("/dev/null", os.O_RDONLY)], [[len(what)]])
exports.offer("many", range(100), [os.open("/dev/null", os.O_RDONLY) for _ in range(100)], [])
print(exports.path, flush=True)
time.sleep(60)
"""


@pytest.fixture
def owner() -> Iterator[tuple[subprocess.Popen[str], Neighbour]]:
    """Another process that has something, and who asks it; it has answered once."""
    process = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    neighbour = Neighbour(process.stdout.readline().strip(), SEAL, "a")
    try:
        check_answer(neighbour, "buffers")
        yield process, neighbour
    finally:
        neighbour.close()
        process.kill()
        process.wait()
        process.stdout.close()


def stop(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)


def check_answer(neighbour: Neighbour, what: str) -> None:
    answer = neighbour.ask(what, soon(10.0))
    assert answer is not None
    sizes, (descriptor,), rows = answer
    os.close(descriptor)
    assert (sizes, rows) == ([len(what)], [[len(what)]])


def test_who_asks_a_stopped_process_waits_no_longer_than_it_wants_to(owner: Any) -> None:
    process, neighbour = owner
    stop(process)
    for _ in range(2):  # with a connection from before, and with a new one
        start = time.monotonic()
        assert neighbour.ask("buffers", soon(0.3)) is None
        assert 0.3 <= time.monotonic() - start < 3.0
    process.send_signal(signal.SIGCONT)
    check_answer(neighbour, "inboxes")  # not what was asked for before


def test_who_asks_a_stopped_process_may_be_told_to_give_up(owner: Any) -> None:
    process, neighbour = owner
    stop(process)
    start = time.monotonic()

    def look() -> None:
        if time.monotonic() - start > 0.7:
            raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        neighbour.ask("buffers", soon(30.0), look)
    assert time.monotonic() - start < 3.0
    process.send_signal(signal.SIGCONT)
    check_answer(neighbour, "inboxes")


def test_a_stopped_process_with_many_that_ask_does_not_hold_up_another_one(owner: Any) -> None:
    process, neighbour = owner
    stop(process)
    asking = [Neighbour(neighbour._path, SEAL, str(k)) for k in range(80)]  # more than may wait to be accepted
    failed = 0
    start = time.monotonic()
    for one in asking:
        try:
            assert one.ask("buffers", soon(0.01)) is None
        except TransferError:
            failed += 1
    assert time.monotonic() - start < 10.0
    assert 0 < failed < 80
    process.send_signal(signal.SIGCONT)
    check_answer(neighbour, "inboxes")


def open_descriptors() -> set[int]:
    return set(map(int, os.listdir("/proc/self/fd")))


def test_a_process_that_may_not_open_so_many_files_says_so_and_keeps_none(owner: Any) -> None:
    _, neighbour = owner
    before = open_descriptors()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    room = next(limit for limit in range(soft) if limit - sum(k < limit for k in before) == 30)
    resource.setrlimit(resource.RLIMIT_NOFILE, (room, hard))
    try:
        with pytest.raises(TransferError, match="Raise the limit of open files"):
            neighbour.ask("many", soon(5.0))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert open_descriptors() < before  # the connection was closed
    answer = neighbour.ask("many", soon(10.0))
    assert answer is not None
    assert len(answer[1]) == 100
    for descriptor in answer[1]:
        os.close(descriptor)


def test_a_closed_owner_is_named(exports: Exports) -> None:
    exports.close()
    with pytest.raises(TransferError, match="cannot be reached"):
        Neighbour(exports.path, SEAL, "a").ask("buffers", soon(5.0))


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
        assert neighbour.ask("inboxes", soon(5.0)) == ([], [], [[1]])
        neighbour.close()


def test_closing_ends_every_connection_and_thread() -> None:
    before = set(threading.enumerate())
    exports = Exports(SEAL)
    exports.offer("buffers", [], [], [])
    neighbours = [Neighbour(exports.path, SEAL, name) for name in "ab"]
    assert neighbours[0].ask("buffers", soon(5.0)) is not None

    def ask() -> None:
        with pytest.raises(TransferError):
            neighbours[1].ask("never", soon(30.0))

    waiting = threading.Thread(target=ask)
    waiting.start()
    assert until(lambda: exports.may_write("b"))
    exports.close()
    assert until(lambda: set(threading.enumerate()) <= before)
    with pytest.raises(TransferError, match="another one holds its ranks"):
        neighbours[0].ask("buffers", soon(5.0))
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
            neighbour.ask("buffers", soon(5.0))
        neighbour.close()
    neighbour = Neighbour(exports.path, SEAL, "a")
    assert neighbour.ask("buffers", soon(5.0)) is not None
    neighbour.close()
    assert left == [0]
