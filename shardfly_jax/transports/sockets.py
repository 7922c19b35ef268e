"""Payload over zmq: a process listens on one PULL socket and connects a PUSH socket to each process it sends to.

Queues are short, so that a sender stops when its receiver does; no call blocks.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import time
from collections.abc import Iterator
from typing import Any

import zmq

from shardfly_jax.sharding.errors import TransferError, WorldError
from shardfly_jax.worlds.wire import CHUNKS, Complaints, Header, Refused, Seal

QUEUE = 2
"""Chunks that wait in each direction of each connection, besides what the network holds."""
HEADER_ROOM = 1 << 16
MAX_REFUSED = 64
"""Messages that are no chunks and are dropped in one go, before whoever takes chunks looks at the clock again."""
IPC = "ipc://"
BIND_SECS, BIND_NAP_SECS = 1.0, 0.01
"""How long, and how often, a taken address is tried: what this process has just closed is free a little later."""


def allow_ipv6(one: zmq.Socket[bytes], endpoint: str) -> None:
    """Lets a socket have an address of IPv6, which stands in brackets."""
    if endpoint.startswith("tcp://["):
        one.setsockopt(zmq.IPV6, 1)


def bind(listener: zmq.Socket[bytes], endpoint: str, what: str) -> None:
    """Lets a socket listen at an address.

    Args:
      listener: The socket.
      endpoint: Where; port 0 or `*` takes a free one.
      what: It is called, for messages.

    Raises:
      WorldError: It cannot: the address is taken, or none of this host.
    """
    allow_ipv6(listener, endpoint)
    until = time.monotonic() + BIND_SECS
    while (reason := _why_not_bound(listener, endpoint, until)) is not None:
        is_taken, why = reason
        if not is_taken or time.monotonic() > until:
            raise WorldError(
                f"world: {what} is {endpoint!r}, but this process cannot listen at it ({why}). Give a free address of "
                "this host, tcp://host:port or ipc://path, or end the process that has it."
            )
        time.sleep(BIND_NAP_SECS)


def _why_not_bound(listener: zmq.Socket[bytes], endpoint: str, until: float) -> tuple[bool, str] | None:
    """Binds a socket; whether the address is taken, and what is wrong, if that fails."""
    path = endpoint.removeprefix(IPC)
    is_path = path != endpoint and not path.startswith(("@", "*"))  # which are names without a file, and a new path
    with _alone_in(os.path.dirname(path) or ".", until) if is_path else contextlib.nullcontext():
        if is_path and (why := _why_taken(path)) is not None:
            return True, why
        try:
            listener.bind(endpoint)
        except zmq.ZMQError as error:
            return error.errno == errno.EADDRINUSE, str(error.strerror)
    return None


def _why_taken(path: str) -> str | None:
    """What is at a path that zmq would take over; None if nothing is, or the socket of a process that has died."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return None
    if not stat.S_ISSOCK(mode):
        return "there is something that is no socket"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            time.sleep(BIND_NAP_SECS)  # who is about to close removes the path next, when it must not be another's
            return None
        except OSError:  # who lives may have no room for another connection, or be somebody else's process
            pass
    return "a living process listens there"


@contextlib.contextmanager
def _alone_in(folder: str, until: float) -> Iterator[None]:
    """While no other process looks at the paths of a folder and binds one, as far as that can be had in time."""
    import fcntl  # which is not everywhere; nor are paths as addresses

    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # zmq says what is wrong with the folder
            descriptor = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, descriptor)  # which unlocks it
            while time.monotonic() < until:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(BIND_NAP_SECS)
        yield


class Incoming:
    """Where this process takes chunks.

    Args:
      context: Of the process' sockets.
      listen: The endpoint to bind; port 0 or `*` takes a free one.
      seal: Made of the token.
      chunk_nbytes: Of the largest chunk that may come.

    Attributes:
      endpoint: What others connect to.
      socket: For pollers.

    Raises:
      WorldError: The endpoint cannot be bound.
    """

    def __init__(self, context: zmq.Context[Any], listen: str, seal: Seal, chunk_nbytes: int):
        self._seal, self._complaints = seal, Complaints("a chunk")
        self.socket: zmq.Socket[bytes] = context.socket(zmq.PULL)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVHWM, QUEUE)
        self.socket.setsockopt(zmq.MAXMSGSIZE, chunk_nbytes + HEADER_ROOM)
        try:
            bind(self.socket, listen, "listen")
        except BaseException:
            self.socket.close(0)
            raise
        self.endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def take(self) -> tuple[Header, Any] | None:
        """Header and payload of the next chunk; None if none has come, or none among many messages. What is no chunk is
        dropped and logged."""
        self._complaints.flush()
        for _ in range(MAX_REFUSED):
            if not self.socket.poll(0):
                break
            frames = self.socket.recv_multipart(copy=False)
            try:
                if len(frames) != 3:
                    raise Refused(f"a message of {len(frames)} frames")
                return self._seal.open([frame.buffer for frame in frames[:2]], CHUNKS), frames[2].buffer
            except Refused as refused:
                self._complaints.add(refused)
        return None

    def close(self) -> None:
        """Stops listening."""
        self.socket.close(0)


class Outgoing:
    """Connections to the processes that this one sends to.

    Args:
      context: Of the process' sockets.
      seal: Made of the token.
    """

    def __init__(self, context: zmq.Context[Any], seal: Seal):
        self._context, self._seal = context, seal
        self._sockets: dict[str, zmq.Socket[bytes]] = {}

    def connect(self, endpoint: str, rank: int) -> None:
        """Connects to where a rank takes chunks, unless that was done before.

        Raises:
          TransferError: That is nowhere.
        """
        if endpoint in self._sockets:
            return
        new = self._context.socket(zmq.PUSH)
        try:
            new.setsockopt(zmq.LINGER, 0)
            new.setsockopt(zmq.SNDHWM, QUEUE)
            allow_ipv6(new, endpoint)
            new.connect(endpoint)
        except zmq.ZMQError as error:
            new.close(0)
            raise TransferError(
                f"update: rank {rank} has registered {endpoint!r} as where it takes payload, but zmq cannot connect to "
                f"that ({error.strerror}). Put all ranks of a plan on GPUs of one host, or all on CPU devices."
            ) from None
        self._sockets[endpoint] = new

    def socket(self, endpoint: str) -> zmq.Socket[bytes]:
        """The connection to an endpoint, for pollers."""
        return self._sockets[endpoint]

    def has_room(self, endpoint: str) -> bool:
        """Whether a chunk can be sent there now."""
        return bool(self.socket(endpoint).poll(0, zmq.POLLOUT))

    def send(self, endpoint: str, header: Header, payload: Any) -> None:
        """Sends a chunk to an endpoint that has room; the payload must not change any more."""
        self.socket(endpoint).send_multipart(self._seal.close(header, payload), zmq.NOBLOCK, copy=False)

    def reset(self) -> None:
        """Drops what has not left yet, and every connection."""
        for one in self._sockets.values():
            one.close(0)
        self._sockets.clear()
