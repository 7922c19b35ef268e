"""A process' control channel: one thread that talks to the rendezvous, says *beat*, and notices when nobody answers."""

from __future__ import annotations

import collections
import contextlib
import logging
import secrets
import socket
import threading
import time
from typing import Any

import zmq

from shardfly_jax.sharding.errors import WorldError, WorldLost
from shardfly_jax.transports.sockets import allow_ipv6
from shardfly_jax.worlds.wire import FROM_RENDEZVOUS, MAX_HEADER_NBYTES, PROTOCOL, Header, Refused, Seal

log = logging.getLogger("shardfly_jax.worlds")

BEATS_PER_LOSS = 5
"""Times a process says *beat* in the time after which its silence counts as a loss."""


class Wake:
    """Wakes a poller of another thread."""

    def __init__(self) -> None:
        self._read, self._write = socket.socketpair()
        for end in (self._read, self._write):
            end.setblocking(False)

    def fileno(self) -> int:
        """What to poll."""
        return self._read.fileno()

    def set(self) -> None:
        """Makes it readable. Safe from any thread."""
        with contextlib.suppress(OSError):  # readable enough, or closed
            self._write.send(b"!")

    def clear(self) -> None:
        """Makes it unreadable until it is set again."""
        with contextlib.suppress(BlockingIOError):
            while self._read.recv(4096):
                pass

    def close(self) -> None:
        """Frees both ends."""
        self._read.close()
        self._write.close()


class Link:
    """Messages to and from the rendezvous.

    Args:
      context: Of the process' sockets.
      address: Of the rendezvous.
      seal: Made of the token.
      name: Of this process, for messages.
      wait_secs: How long to try.
      serves: Whether the rendezvous is in this process.

    Attributes:
      session, deadline_secs, lost_secs: As the rendezvous says.
      lost: Why it can no longer be used; None while it can.
      news: The last *news*; they replace each other, so nobody has to take them.
      wake: Readable when there is something to take, or when the link was lost.

    Raises:
      WorldError: The address is none, nobody answers there, or it refuses this process.
    """

    def __init__(
        self, context: zmq.Context[Any], address: str, seal: Seal, name: str, wait_secs: float, *, serves: bool = False
    ):
        self.address, self.lost, self.news = address, None, None
        self._serves = serves
        self.wake = Wake()
        self._seal = seal
        self._socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_HEADER_NBYTES)
        self._socket.setsockopt(zmq.ROUTING_ID, b"m" + secrets.token_bytes(15))
        self._sent, self._seen, self._heard = 0, 0, 0.0
        self._outbox: collections.deque[Header] = collections.deque()
        self._inbox: collections.deque[Header] = collections.deque()
        self._nudge = Wake()
        self._ended = 0  # the last attempt of which it was said that it is over
        self._ending = threading.Condition()
        self._stopping = False
        try:
            self._connect()
            self._greet(name, wait_secs)
        except BaseException:
            self._socket.close(0)
            self.wake.close()
            self._nudge.close()
            raise
        self._thread = threading.Thread(target=self._run, name="shardfly-link", daemon=True)
        self._thread.start()

    lost: str | None
    news: Header | None

    def _connect(self) -> None:
        allow_ipv6(self._socket, self.address)
        try:
            self._socket.connect(self.address)
        except zmq.ZMQError as error:
            raise WorldError(
                f"world: address is {self.address!r}, but zmq cannot connect to it ({error.strerror}). Give "
                "tcp://host:port or ipc://path."
            ) from None

    def _greet(self, name: str, wait_secs: float) -> None:
        self._send({"op": "hello", "protocol": PROTOCOL, "name": name})
        until = time.monotonic() + wait_secs
        while self._socket.poll(max(0, int((until - time.monotonic()) * 1000))):
            try:
                header = self._seal.open(self._socket.recv_multipart(), FROM_RENDEZVOUS)
            except Refused as refused:
                if refused.is_foreign:
                    raise WorldError(
                        f"world: the rendezvous at {self.address} refuses this token. Give every process the same one."
                    ) from None
                raise WorldError(f"world: {self.address} answers with {refused}. Is it a rendezvous?") from None
            if header["op"] == "refused":
                raise WorldError(f"world: the rendezvous at {self.address} refuses this process: {header['why']}.")
            if header["op"] == "welcome":
                self.session, self._seen = header["session"], header["seq"]
                self.deadline_secs, self.lost_secs = header["deadline_secs"], header["lost_secs"]
                return
        raise WorldError(
            f"world: nobody answers at {self.address} within {wait_secs:g} s. One process must say serve=True there."
        )

    def say(self, op: str, **fields: Any) -> None:
        """Sends a message. Safe from any thread."""
        self._outbox.append({"op": op, "session": self.session, **fields})
        self._nudge.set()

    def take(self) -> Header | None:
        """The next message that is not a *beat*; None if there is none.

        Raises:
          WorldLost: The link is lost, and all that had come before was taken.
        """
        if self._inbox:
            return self._inbox.popleft()
        self._check()
        return None

    def _check(self) -> None:
        if self.lost is not None and self._stopping:
            raise WorldLost(f"world: {self.lost}. sf.connect again, then register the plan.")
        if self.lost is not None:
            others = " The rendezvous was this process' own, so all others have to do that too." if self._serves else ""
            raise WorldLost(
                f"world: {self.lost}. Close this world, then sf.connect again and sf.register(plan, world=..., "
                f"ranks=...), which keeps the plan's buffers.{others}"
            )

    def failed(self, epoch: int, secs: float = 0.0) -> Header | None:
        """The message that ended an attempt, for which it waits; it is left for `take`. None if none comes in time.

        Raises:
          WorldLost: The link is lost, and the attempt had not ended before.
        """
        until = time.monotonic() + secs
        poller = zmq.Poller()
        poller.register(self.wake.fileno(), zmq.POLLIN)
        while True:
            self.wake.clear()
            header = next((h for h in list(self._inbox) if h["op"] == "failed" and h["epoch"] == epoch), None)
            left = until - time.monotonic()
            if header is None:
                self._check()
            if header is not None or left <= 0:
                return header
            poller.poll(int(left * 1000) + 1)

    def wait(self, secs: float) -> Header | None:
        """The next message, for which it waits; None if none comes in time. Raises as `take`."""
        until = time.monotonic() + secs
        poller = zmq.Poller()
        poller.register(self.wake.fileno(), zmq.POLLIN)
        while True:
            self.wake.clear()
            header = self.take()
            left = until - time.monotonic()
            if header is not None or left <= 0:
                return header
            poller.poll(int(left * 1000) + 1)

    def wait_for_end(self, epoch: int, secs: float) -> None:
        """Waits until an attempt is over for all who take part, the link is lost, or the time is up."""
        with self._ending:
            self._ending.wait_for(lambda: self._ended >= epoch or self.lost is not None, max(0.0, secs))

    def leave(self) -> None:
        """Says *leave* and ends the thread; whoever still waits for a message gets `WorldLost`."""
        if not self._stopping:
            self._outbox.append({"op": "leave", "session": self.session})
            self._stopping = True
            self._nudge.set()
            self._thread.join()
            self._end(self.lost or "it was closed in this process")

    def close(self) -> None:
        """Frees what a link that was left holds; nobody may wait any more."""
        self._nudge.close()
        self.wake.close()

    # The thread

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._nudge.fileno(), zmq.POLLIN)
        self._heard = beat = turn = time.monotonic()
        while self.lost is None:
            poller.poll(max(1, int((beat - time.monotonic()) * 1000)))
            self._nudge.clear()
            stopping = self._stopping  # read before the outbox, which is complete by then
            while self._outbox:
                self._send(self._outbox.popleft())
            if stopping:
                break
            while self._socket.poll(0):
                self._receive(self._socket.recv_multipart())
            now = time.monotonic()
            if now - turn > self.lost_secs / 2:  # it was stopped: the silence was its own, and what was said comes yet
                self._heard = now
            turn = now
            if now >= beat:
                self._send({"op": "beat", "session": self.session})
                beat = now + self.lost_secs / BEATS_PER_LOSS
            if now - self._heard > self.lost_secs:
                whose = "its own rendezvous" if self._serves else "the rendezvous"
                self._lose(f"nothing was heard of {whose} at {self.address} for {self.lost_secs:g} s")
        self._socket.close(1000 if self._stopping else 0)  # ms, for *leave* to get out

    def _lose(self, why: str) -> None:
        if self.lost is None:  # else it was said already, as by the first of many messages
            log.warning("world lost: %s", why)
        self._end(why)

    def _end(self, why: str) -> None:
        """Nothing is said or heard any more; whoever waits wakes up."""
        with self._ending:
            self.lost = why
            self._ending.notify_all()
        self.wake.set()

    def _send(self, header: Header) -> None:
        self._sent += 1
        self._socket.send_multipart(self._seal.close({**header, "seq": self._sent}))

    def _receive(self, frames: list[bytes]) -> None:
        try:
            header = self._seal.open(frames, FROM_RENDEZVOUS)
        except Refused as refused:
            log.warning("the rendezvous sent %s; ignored", refused)
            return
        if header["session"] != self.session:  # its numbers are others', so that they say nothing
            self._lose(f"another rendezvous answers at {self.address}: the one of this world has ended")
            return
        self._heard = time.monotonic()
        if header["seq"] <= self._seen:
            log.warning("%r came twice; ignored", header["op"])
            return
        self._seen = header["seq"]
        if header["op"] == "expelled":
            self._lose(f"the rendezvous has expelled this process: {header['why']}")
        elif header["op"] == "news":
            self.news = header
        elif header["op"] != "beat":
            if header["op"] in ("done", "failed"):
                with self._ending:
                    self._ended = max(self._ended, header["epoch"])  # 0 is of no attempt
                    self._ending.notify_all()
            self._inbox.append(header)
            self.wake.set()
