"""Payload over zmq: a process listens on one PULL socket and connects a PUSH socket to each process it sends to.

Queues are short, so that a sender stops when its receiver does; no call blocks.
"""

from __future__ import annotations

from typing import Any

import zmq

from shardfly_jax.sharding.errors import TransferError, WorldError
from shardfly_jax.worlds.wire import CHUNKS, Complaints, Header, Refused, Seal

QUEUE = 2
"""Chunks that wait in each direction of each connection, besides what the network holds."""
HEADER_ROOM = 1 << 16
MAX_REFUSED = 64
"""Messages that are no chunks and are dropped in one go, before whoever takes chunks looks at the clock again."""
ANYWHERE = ("0.0.0.0", "[::]", "://*")


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
      WorldError: The endpoint cannot be bound, or names no host that others could connect to.
    """

    def __init__(self, context: zmq.Context[Any], listen: str, seal: Seal, chunk_nbytes: int):
        if any(word in listen for word in ANYWHERE):
            raise WorldError(
                f"world: listen is {listen!r}, but others need a host to connect to. Give an address of this host, "
                "e.g. tcp://127.0.0.1:0."
            )
        self._seal, self._complaints = seal, Complaints("a chunk")
        self.socket: zmq.Socket[bytes] = context.socket(zmq.PULL)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVHWM, QUEUE)
        self.socket.setsockopt(zmq.MAXMSGSIZE, chunk_nbytes + HEADER_ROOM)
        try:
            self.socket.bind(listen)
        except zmq.ZMQError as error:
            self.socket.close(0)
            raise WorldError(f"world: cannot listen at {listen}: {error}. Choose another endpoint.") from None
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
        for socket in self._sockets.values():
            socket.close(0)
        self._sockets.clear()
