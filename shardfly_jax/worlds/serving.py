"""The rendezvous as a thread with a socket."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from typing import Any

import zmq

from shardfly_jax.transports.sockets import bind
from shardfly_jax.worlds.link import BEATS_PER_LOSS, Wake
from shardfly_jax.worlds.rendezvous import GONE_SECS, Out, Rendezvous
from shardfly_jax.worlds.wire import MAX_HEADER_NBYTES, TO_RENDEZVOUS, Complaints, Header, Refused, Seal

log = logging.getLogger("shardfly_jax.worlds")


class Serving:
    """Listens for processes and answers them.

    Args:
      context: Of the process' sockets.
      address: To bind; port 0 or `*` takes a free one.
      seal: Made of the token.
      deadline_secs, lost_secs: See `Rendezvous`.

    Attributes:
      address: Where it listens, with the port.

    Raises:
      WorldError: The address cannot be bound.
    """

    def __init__(self, context: zmq.Context[Any], address: str, seal: Seal, deadline_secs: float, lost_secs: float):
        self._seal = seal
        self._rendezvous = Rendezvous(
            session=secrets.randbits(62), deadline_secs=deadline_secs, lost_secs=lost_secs
        )  # fmt: skip
        self._tick_secs = min(lost_secs / BEATS_PER_LOSS, GONE_SECS / 4)
        self._numbers: dict[bytes, int] = {}  # of the last message to each process
        self._seen: dict[bytes, int] = {}  # and from it
        self._socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_HEADER_NBYTES)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # says whether there is a connection
        try:
            bind(self._socket, address, "address")
        except BaseException:
            self._socket.close(0)
            raise
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._complaints = Complaints("a message")
        self._nudge = Wake()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="shardfly-rendezvous", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread; the world is lost for all."""
        self._stopping = True
        self._nudge.set()
        self._thread.join()
        self._nudge.close()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._nudge.fileno(), zmq.POLLIN)
        tick = turn = time.monotonic()
        while not self._stopping:
            poller.poll(max(1, int((tick - time.monotonic()) * 1000)))
            # Much of it before the clock, as after a pause nobody has been silent, but not all: strangers may send on
            # and on. zmq takes from every connection in turn, so theirs do not hold up those of others.
            until = time.monotonic() + self._tick_secs
            while time.monotonic() < until and self._socket.poll(0):
                self._receive(self._socket.recv_multipart())
            now = time.monotonic()
            if now - turn > self._rendezvous.lost_secs / 2:  # this process was stopped, the one that it serves too
                self._rendezvous.pardon(now)
            turn = now
            if now >= tick:
                self._beat(now)
                self._send(self._rendezvous.tick(now))
                self._complaints.flush()
                tick = now + self._tick_secs
        self._socket.close(1000)

    def _receive(self, frames: list[bytes]) -> None:
        who, *rest = frames
        try:
            header = self._seal.open(rest, TO_RENDEZVOUS)
        except Refused as refused:
            self._complaints.add(refused)
            if refused.is_foreign and who not in self._seen:
                refusal = {"op": "refused", "session": self._rendezvous.session, "seq": 0, "why": "token"}
                self._post(who, refusal)
            return
        if header["seq"] <= self._seen.get(who, 0):
            log.warning("%r came twice; ignored", header["op"])
            return
        self._seen[who] = header["seq"]
        self._send(self._rendezvous.handle(who, header, time.monotonic()))
        if header["op"] == "leave":
            self._seen.pop(who, None)
            self._numbers.pop(who, None)

    def _send(self, out: Out) -> None:
        for who, header in out:
            self._numbers[who] = number = self._numbers.get(who, 0) + 1
            self._post(who, {**header, "seq": number})

    def _beat(self, now: float) -> None:
        """Tells every process that this one lives, and sees whether there is a connection."""
        for who in list(self._rendezvous.members):
            self._numbers[who] = number = self._numbers.get(who, 0) + 1
            beat = {"op": "beat", "session": self._rendezvous.session, "seq": number}
            self._rendezvous.reach(who, self._post(who, beat), now)

    def _post(self, who: bytes, header: Header) -> bool:
        """Sends a message if there is a connection, and says whether."""
        try:
            self._socket.send_multipart([who, *self._seal.close(header)], zmq.NOBLOCK)
        except zmq.Again:
            log.warning("a process does not take its messages; one was dropped")
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True
