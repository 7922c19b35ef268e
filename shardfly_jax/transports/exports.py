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
import shutil
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import Any

from shardfly_jax.sharding.errors import TransferError
from shardfly_jax.worlds.wire import MAX_HEADER_NBYTES, Header, Refused, Seal, is_number, is_secs, is_text

log = logging.getLogger("shardfly_jax.worlds")

LENGTHS = struct.Struct("!II")
"""Before each message: bytes of its MAC and of its header."""
MAX_DESCRIPTORS = 64
RETRY_SECS = 0.1
"""After which to listen again, where no descriptor was left for another connection."""
ANSWER_SECS = 10.0
"""How long an answer may take, besides the time for which the owner is to wait."""


def _are_rows(x: Any) -> bool:
    return isinstance(x, list) and all(isinstance(row, list) and all(map(is_number, row)) for row in x)


ASKS = {"want": {"who": is_text, "what": is_text, "secs": is_secs}}
"""What a process may ask for, and for how long the owner is to wait until it has it."""
ANSWERS = {
    "have": {"sizes": lambda x: isinstance(x, list) and all(map(is_number, x)), "rows": _are_rows},
    "lack": {},
}
"""Bytes of each memory whose descriptor comes along; `rows` are what the asked-for thing says about them."""


def _send(connection: socket.socket, seal: Seal, header: Header, descriptors: Sequence[int] = ()) -> None:
    mac, body = (bytes(frame) for frame in seal.close(header)[:2])
    message = LENGTHS.pack(len(mac), len(body)) + mac + body
    sent = socket.send_fds(connection, [message], list(descriptors)) if descriptors else 0
    connection.sendall(message[sent:])


def _receive(connection: socket.socket, seal: Seal, messages: Any) -> tuple[Header, list[int]] | None:
    """The next message with its descriptors; None if the other side has gone."""
    data, descriptors, _, _ = socket.recv_fds(connection, 1 << 16, MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
    try:
        while len(data) < LENGTHS.size or len(data) < LENGTHS.size + sum(LENGTHS.unpack_from(data)):
            if len(data) >= LENGTHS.size and sum(LENGTHS.unpack_from(data)) > MAX_HEADER_NBYTES:
                raise Refused("a message that is too long")
            more = connection.recv(1 << 20)
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
        self._offers: dict[str, tuple[Header, list[int]]] = {}
        self._open: collections.Counter[str] = collections.Counter()  # connections of each process
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
        header = {"op": "have", "sizes": list(sizes), "rows": [list(row) for row in rows]}
        with self._changed:
            self._offers[what] = header, [os.dup(descriptor) for descriptor in descriptors]
            self._changed.notify_all()

    def withdraw(self, prefix: str) -> None:
        """No longer offers what has a name that begins so."""
        with self._changed:
            for what in [what for what in self._offers if what.startswith(prefix)]:
                for descriptor in self._offers.pop(what)[1]:
                    os.close(descriptor)

    def may_write(self, who: str) -> bool:
        """Whether a process is alive that has mapped some of this memory."""
        with self._changed:
            return self._open[who] > 0

    def close(self) -> None:
        """Stops listening and answering; who has mapped something keeps it."""
        self.withdraw("")
        with self._changed:
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
                    self._changed.wait_for(functools.partial(self._has, header["what"]), header["secs"])
                    if self._is_closed:
                        return
                    answer, offered = self._offers.get(header["what"], ({"op": "lack"}, []))
                    given = [os.dup(descriptor) for descriptor in offered]
                try:  # without the lock: who asks may be stopped, and never take it
                    _send(connection, self._seal, answer, given)
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
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.connect(path)
        except OSError as error:
            self._socket.close()
            raise TransferError(
                f"update: the GPU memory of another process cannot be reached at {path}: {error}. It has ended, or "
                "runs on another host or in another file system; let all that share a plan run in one."
            ) from None

    def ask(self, what: str, secs: float) -> tuple[list[int], list[int], list[list[int]]] | None:
        """Asks for memory and waits for it.

        Returns:
          Bytes and descriptor of each piece, which are the caller's to close, and what the owner says about them; None
          if it has not offered this in time.

        Raises:
          TransferError: The owner has gone.
        """
        self._socket.settimeout(secs + ANSWER_SECS)
        try:
            _send(self._socket, self._seal, {"op": "want", "who": self._name, "what": what, "secs": secs})
            message = _receive(self._socket, self._seal, ANSWERS)
        except (Refused, OSError) as error:
            raise TransferError(
                f"update: asking {self._path} for GPU memory failed: {error}. Update again when its process goes on "
                "or another one holds its ranks."
            ) from None
        if message is None:
            raise TransferError(
                f"update: the process at {self._path} has ended, has left the world, or has another token. Update "
                "again when another one holds its ranks."
            )
        header, descriptors = message
        if header["op"] == "lack":
            return None
        if len(descriptors) != len(header["sizes"]):
            for descriptor in descriptors:
                os.close(descriptor)
            raise TransferError(
                f"update: {len(header['sizes'])} descriptors were to come from {self._path}, but {len(descriptors)} "
                "came. Raise the limit of open files (ulimit -n)."
            )
        return header["sizes"], descriptors, header["rows"]

    def close(self) -> None:
        """Lets its owner know that nothing of this process will write there any more."""
        self._socket.close()
