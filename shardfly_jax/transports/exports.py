"""How processes of one host hand each other GPU memory: descriptors over a Unix socket, under the world's token.

A process that wants to reach another one's memory connects to it and asks; the connection stays open as long as it
lives, so the owner knows when it has gone: the kernel of the host closes it, even when the process is killed, and not
when it is merely stopped.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import os
import select
import shutil
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from shardfly_jax.sharding.errors import TransferError
from shardfly_jax.worlds.wire import MAX_HEADER_NBYTES, Header, Refused, Seal, is_number, is_secs, is_text

log = logging.getLogger("shardfly_jax.worlds")

LENGTHS = struct.Struct("!II")
"""Before each message: bytes of its MAC and of its header."""
MAX_DESCRIPTORS = 64
"""In one message; an answer with more pieces is several. Linux takes up to 253 (SCM_MAX_FD)."""
RETRY_SECS = 0.1
"""After which to listen again, where no descriptor was left for another connection."""
LOOK_SECS = 0.5
"""How often a process that waits for another one's memory looks whether it still has to."""

Offered = tuple[list[int], list[int], list[list[int]]]
"""Bytes and descriptors of pieces of memory, and rows about what lies in them."""


def _are_rows(x: Any) -> bool:
    return isinstance(x, list) and all(isinstance(row, list) and all(map(is_number, row)) for row in x)


ASKS = {"want": {"who": is_text, "what": is_text, "secs": is_secs}}
"""What a process may ask for, and for how long the owner is to wait until it has it."""
ANSWERS = {
    "have": {
        "sizes": lambda x: isinstance(x, list) and all(map(is_number, x)), "rows": _are_rows, "left": is_number,
    },
    "lack": {},
}  # fmt: skip
"""Bytes of each memory whose descriptor comes along; `rows`, with the first message, are what the asked-for thing says
about all of them; `left` pieces come in the next ones."""


def _send(connection: socket.socket, seal: Seal, header: Header, descriptors: Sequence[int] = ()) -> None:
    mac, body = (bytes(frame) for frame in seal.close(header)[:2])
    message = LENGTHS.pack(len(mac), len(body)) + mac + body
    sent = socket.send_fds(connection, [message], list(descriptors)) if descriptors else 0
    connection.sendall(message[sent:])


def _duplicates(descriptors: Sequence[int]) -> list[int]:
    """Others of the same files; none of them is left open where the process may have no more."""
    with contextlib.ExitStack() as undo:
        made = []
        for descriptor in descriptors:
            made.append(os.dup(descriptor))
            undo.callback(os.close, made[-1])
        undo.pop_all()
    return made


def _answers(sizes: list[int], descriptors: list[int], rows: list[list[int]]) -> Iterator[tuple[Header, list[int]]]:
    """The messages that hand out an offer, with their descriptors."""
    for start in range(0, max(len(sizes), 1), MAX_DESCRIPTORS):
        end = min(start + MAX_DESCRIPTORS, len(sizes))
        header = {"op": "have", "sizes": sizes[start:end], "rows": [] if start else rows, "left": len(sizes) - end}
        yield header, descriptors[start:end]


def _missing(data: bytes) -> int:
    """How many bytes of a message are still to come, as far as is known."""
    known = LENGTHS.size if len(data) < LENGTHS.size else LENGTHS.size + sum(LENGTHS.unpack_from(data))
    return known - len(data)


def _receive(
    connection: socket.socket, seal: Seal, messages: Any, until_readable: Callable[[], object] = lambda: None
) -> tuple[Header, list[int]] | None:
    """The next message with its descriptors; None if the other side has gone.

    Args:
      until_readable: Called before each read.
    """
    until_readable()
    data, descriptors, _, _ = socket.recv_fds(connection, LENGTHS.size, MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
    try:
        # never into the next message, as the descriptors that come with it would be lost
        while missing := _missing(data):
            if missing > MAX_HEADER_NBYTES:
                raise Refused("a message that is too long")
            until_readable()
            more = connection.recv(min(missing, 1 << 20))
            if not more:
                raise ConnectionError
            data += more
        mac, body = LENGTHS.unpack_from(data)
        frames = [data[LENGTHS.size : LENGTHS.size + mac], data[LENGTHS.size + mac : LENGTHS.size + mac + body]]
        return seal.open(frames, messages), descriptors
    except BaseException as error:
        for descriptor in descriptors:
            os.close(descriptor)
        if isinstance(error, ConnectionError):
            return None
        raise


class Exports:
    """What this process lets others map. Listens at a Unix socket in a folder of its own.

    Args:
      seal: Made of the world's token.

    Attributes:
      path: Of the socket.
    """

    def __init__(self, seal: Seal):
        self._seal = seal
        self._folder = tempfile.mkdtemp(prefix="shardfly-")
        self.path = os.path.join(self._folder, "memory")
        self._offers: dict[str, Offered] = {}
        self._open: collections.Counter[str] = collections.Counter()  # connections of each process
        self._last: frozenset[str] = frozenset()  # who was connected as it was closed
        self._connections: set[socket.socket] = set()
        self._changed = threading.Condition()
        self._is_closed = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(self.path)
        self._socket.listen(64)
        threading.Thread(target=self._accept, name="shardfly-exports", daemon=True).start()

    def offer(self, what: str, sizes: Sequence[int], descriptors: Sequence[int], rows: Sequence[Sequence[int]]) -> None:
        """Lets others have memory.

        Args:
          what: Its name.
          sizes, descriptors: Bytes and descriptor of each piece; they stay open as long as this is offered.
          rows: About them.
        """
        offer = list(sizes), _duplicates(descriptors), [list(row) for row in rows]
        with self._changed:
            self._offers[what] = offer
            self._changed.notify_all()

    def withdraw(self, prefix: str) -> None:
        """No longer offers what has a name that begins so."""
        with self._changed:
            for what in [what for what in self._offers if what.startswith(prefix)]:
                for descriptor in self._offers.pop(what)[1]:
                    os.close(descriptor)

    def may_write(self, who: str) -> bool:
        """Whether a process is alive that has mapped some of this memory; once this is closed, whether it was then."""
        with self._changed:
            return who in self._last if self._is_closed else self._open[who] > 0

    def close(self) -> None:
        """Stops listening and answering; who has mapped something keeps it."""
        self.withdraw("")
        with self._changed:
            self._last = frozenset(who for who, count in self._open.items() if count)
            self._is_closed = True
            for one in (self._socket, *self._connections):
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)  # wakes its thread
            self._changed.notify_all()
        self._socket.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _has(self, what: str) -> bool:
        return what in self._offers or self._is_closed

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                if self._is_closed:
                    return
                log.warning("a process that asks for GPU memory is not heard: %s", error)
                time.sleep(RETRY_SECS)
                continue
            threading.Thread(target=self._answer, args=(connection,), name="shardfly-export", daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        who = None
        try:
            with self._changed:
                if self._is_closed:
                    return
                self._connections.add(connection)
            while (message := _receive(connection, self._seal, ASKS)) is not None:
                header, descriptors = message
                for descriptor in descriptors:
                    os.close(descriptor)
                with self._changed:
                    if who is None:
                        who = str(header["who"])
                        self._open[who] += 1
                    self._changed.wait_for(functools.partial(self._has, header["what"]), min(header["secs"], LOOK_SECS))
                    if self._is_closed:
                        return
                    offer = self._offers.get(header["what"])
                    given = _duplicates(offer[1]) if offer is not None else []
                try:  # without the lock: who asks may be stopped, and never take it
                    answers = _answers(offer[0], given, offer[2]) if offer is not None else [({"op": "lack"}, [])]
                    for answer, some in answers:
                        _send(connection, self._seal, answer, some)
                finally:
                    for descriptor in given:
                        os.close(descriptor)
        except (Refused, OSError) as error:
            log.warning("a process that asked for GPU memory was cut off: %s", error)
        finally:
            with self._changed:
                self._connections.discard(connection)
                if who is not None:
                    self._open[who] -= 1
            connection.close()


class Neighbour:
    """A process whose memory this one maps.

    Args:
      path: Of its socket.
      seal: Made of the world's token.
      name: Of this process.
    """

    def __init__(self, path: str, seal: Seal, name: str):
        self._path, self._seal, self._name = path, seal, name
        self._socket: socket.socket | None = None

    def ask(self, what: str, until: float, look: Callable[[], object] = lambda: None) -> Offered | None:
        """Asks for memory and waits for it, however the owner fares: it may be stopped.

        Args:
          what: Its name.
          until: When to give up, as `time.monotonic` counts.
          look: Called every `LOOK_SECS` meanwhile; what it raises ends the wait.

        Returns:
          Bytes and descriptor of each piece, which are the caller's to close, and what the owner says about them; None
          if it has not offered this, or has not answered, by then.

        Raises:
          TransferError: The owner has gone.
        """
        try:
            connection = self._connected()
            until_readable = functools.partial(_wait, connection, until, look)
            while (left_secs := until - time.monotonic()) > 0:
                secs = min(LOOK_SECS, left_secs)
                _send(connection, self._seal, {"op": "want", "who": self._name, "what": what, "secs": secs})
                if (found := self._answer(connection, until_readable)) is not None:
                    return found
                look()
            return None
        except BaseException as error:
            self.close()  # an answer that comes late must not be taken for that to another question
            if isinstance(error, _TooLate):
                return None
            if isinstance(error, Refused | OSError):
                raise TransferError(
                    f"update: asking {self._path} for GPU memory failed: {error}. Update again when its process goes "
                    "on or another one holds its ranks."
                ) from None
            raise

    def _connected(self) -> socket.socket:
        if self._socket is None:
            new = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                new.setblocking(False)  # who is stopped accepts nobody
                new.connect(self._path)
                new.setblocking(True)
            except (OSError, ValueError) as error:  # which a path with a zero in it is
                new.close()
                raise TransferError(
                    f"update: the GPU memory of another process cannot be reached at {self._path}: {error}. It has "
                    "ended, or runs on another host or in another file system; let all that share a plan run in one."
                ) from None
            self._socket = new
        return self._socket

    def _answer(self, connection: socket.socket, until_readable: Callable[[], object]) -> Offered | None:
        """What the owner answers; None if it has not offered that yet."""
        sizes: list[int] = []
        descriptors: list[int] = []
        rows: list[list[int]] = []
        with contextlib.ExitStack() as undo:
            left = 1
            while left:
                message = _receive(connection, self._seal, ANSWERS, until_readable)
                if message is None:
                    raise TransferError(
                        f"update: the process at {self._path} has ended, has left the world, or has another token. "
                        "Update again when another one holds its ranks."
                    )
                header, some = message
                for descriptor in some:
                    undo.callback(os.close, descriptor)
                if header["op"] == "lack":
                    return None
                if len(some) != len(header["sizes"]):
                    raise TransferError(
                        f"update: {len(header['sizes'])} descriptors were to come from {self._path}, but {len(some)} "
                        "came. Raise the limit of open files (ulimit -n)."
                    )
                sizes += header["sizes"]
                descriptors += some
                rows += header["rows"]
                left = header["left"]
            undo.pop_all()
        return sizes, descriptors, rows

    def close(self) -> None:
        """Lets its owner know that nothing of this process will write there any more, until it is asked again."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class _TooLate(Exception):
    """The time to wait for something is over."""


def _wait(connection: socket.socket, until: float, look: Callable[[], object]) -> None:
    """Until there is something to read, or the other side has gone; see `Neighbour.ask`.

    Raises:
      _TooLate: That takes too long.
      What `look` raises.
    """
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    while (left_secs := until - time.monotonic()) > 0:
        if poll.poll(1000 * min(LOOK_SECS, left_secs)):
            return
        look()
    raise _TooLate
