"""One attempt in one process: a loop that reads, writes, forwards and sends chunks, none of whose calls block.

A chunk is written only if it carries this attempt's session and epoch, has the size that the plan says, and has not
come before. The rendezvous says how the attempt ends; see `docs/design/worlds.md`.
"""

from __future__ import annotations

import collections
import logging
import time
from collections.abc import Callable, Mapping

import numpy as np
import zmq

from shardfly_jax.sharding.errors import (
    DigestMismatch,
    NotFinite,
    RankLost,
    ShardflyError,
    SyncTimeout,
    TransferError,
    UpdateRefused,
)
from shardfly_jax.sharding.moves import Key
from shardfly_jax.transports.sockets import Incoming, Outgoing
from shardfly_jax.worlds.link import Link
from shardfly_jax.worlds.rendezvous import GRACE_SECS
from shardfly_jax.worlds.steps import Band, Step, Steps
from shardfly_jax.worlds.wire import Header

log = logging.getLogger("shardfly_jax.worlds")

KINDS: Mapping[str, type[ShardflyError]] = {
    "timeout": SyncTimeout, "absent": SyncTimeout, "lost": RankLost, "refused": UpdateRefused, "digest": DigestMismatch,
    "not finite": NotFinite,
}  # fmt: skip
"""What each kind of failure is raised as; others are `TransferError`."""


def failure(header: Header) -> ShardflyError:
    """The error that a *failed* message stands for."""
    if header["epoch"]:
        where = f"in phase {header['phase']} of attempt {header['epoch']}"
        rest = "Replicas that did not complete it are poisoned until the next complete update."
    else:
        where = "before anything was written"
        rest = "Every replica is as it was."
    if header["kind"] in ("lost", "absent"):
        rest += f" Start a process that registers rank {header['rank']}, or sf.rescale to a plan without it."
    return KINDS.get(header["kind"], TransferError)(f"update: {header['why'].rstrip('.')}, {where}. {rest}")


def _is_found(step: Step) -> bool:
    """Whether a chunk has maxima that its sender found in its own shard."""
    return step.merges and step.conversion.reduces


class Run:
    """What a process does in one attempt.

    Args:
      steps: Its part of the plan.
      begin: The message that began the attempt.
      memory: Bytes of every local buffer, sources and targets.
      link, incoming, outgoing: Its channels; `incoming` is None if nothing comes from other processes.
      own: The replicas of which it holds ranks.
      held: Its ranks.
      source_ranks: Ranks below it are trainers.
      progress: Called with bytes written.

    Attributes:
      complete: The replicas that hold all of the update, as the rendezvous said.
    """

    def __init__(
        self,
        steps: Steps,
        begin: Header,
        memory: Mapping[Key, np.ndarray],
        *,
        link: Link,
        incoming: Incoming | None,
        outgoing: Outgoing,
        own: frozenset[str],
        held: frozenset[int],
        source_ranks: int,
        progress: Callable[[int], None] | None,
    ):
        self._begin, self._link = begin, link
        self._steps, self._memory = steps, {**memory, **steps.fresh_slots()}
        self._incoming, self._outgoing = incoming, outgoing
        self._progress = progress
        self.epoch, self.session = begin["epoch"], begin["session"]
        self.complete: set[str] = set()
        self._own = own
        self._held, self._source_ranks = held, source_ranks
        self._needs_done = min(held) < source_ranks
        self._is_done = self._is_ended = self._has_gone = self._said_arrived = False
        self._until = time.monotonic() + link.deadline_secs
        self._patience_secs = 2 * (GRACE_SECS + link.lost_secs)
        self._reported = False
        self._expected = {(*step.pair, step.number): step for step in steps.incoming}
        self._left = dict(steps.needed)
        self._here: collections.deque[Step] = collections.deque()
        self._there: dict[str, collections.deque[Step]] = {}
        self._waiting: dict[Band, list[Step]] = {}
        self._first = []
        for step in (*(step for step in steps.incoming if step.pair[0] < 0), *steps.outgoing):
            if step.waits is not None and self._left.get(step.waits, 0):
                self._waiting.setdefault(step.waits, []).append(step)
            else:
                self._first.append(step)

    def run(self) -> None:
        """Goes on until the outcome is known.

        Raises:
          SyncTimeout, RankLost, UpdateRefused, TransferError, WorldLost: The attempt failed for this process.
          NotFinite: A tensor to be quantized holds NaN or infinity, here or in another process.
          Any error of its own; the others are told.
        """
        try:
            if self._own:
                self._link.say("ready", epoch=self.epoch)
            while not self._is_over():
                self._listen()
                worked = self._work() | self._send() | self._receive()
                if self._has_gone and not self._expected and not self._said_arrived and self._own:
                    self._said_arrived = True
                    self._link.say("arrived", epoch=self.epoch)
                self._watch_the_time()
                if not worked and not self._is_over():
                    self._sleep()
        except BaseException as error:
            self._outgoing.reset()
            if not self._is_ended:
                rank, phase = min(self._held), "send" if self._needs_done else "finish"
                if isinstance(error, NotFinite):
                    self._fail("not finite", phase, rank, f"rank {rank} could not convert {error}".rstrip("."))
                else:
                    self._fail("error", phase, rank, f"rank {rank} failed: {type(error).__name__}: {error}")
            raise

    def _is_over(self) -> bool:
        return self._own <= self.complete and not any(self._there.values()) and (self._is_done or not self._needs_done)

    # What the rendezvous says

    def _listen(self) -> None:
        self._link.wake.clear()
        while (header := self._link.take()) is not None:
            if header.get("epoch") != self.epoch:
                continue
            match header["op"]:
                case "go":
                    self._has_gone = True
                    for step in self._first:
                        self._queue(step)
                    self._first = []
                case "complete":
                    self.complete |= set(header["replicas"])
                case "done":
                    self._is_done = True
                case "failed" if self._needs_done or not self._own <= self.complete:
                    self._is_ended = True
                    raise failure(header)
                case "failed":  # others failed; what this process was to get is here
                    self._there.clear()

    def _fail(self, kind: str, phase: str, rank: int, why: str) -> None:
        self._link.say("fail", epoch=self.epoch, kind=kind, phase=phase, rank=rank, why=why)

    # Chunks

    def _queue(self, step: Step) -> None:
        """Takes up a chunk that can be read now."""
        if (*step.pair, step.number) in self._expected:  # from this process to itself
            self._here.append(step)
        else:
            endpoint = self._begin["endpoints"][str(step.pair[1])]
            self._outgoing.connect(endpoint, step.pair[1])
            self._there.setdefault(endpoint, collections.deque()).append(step)

    def _work(self) -> bool:
        """Writes one chunk from this process to itself."""
        if not self._here:
            return False
        step = self._here.popleft()
        self._steps.copy(step, self._memory)
        self._arrive(step)
        return True

    def _send(self) -> bool:
        """Converts and sends one chunk to each process that can take one."""
        sent = False
        for endpoint, queue in self._there.items():
            if queue and self._outgoing.has_room(endpoint):
                step = queue.popleft()
                payload = self._steps.payload(step, self._memory)
                source, target = step.pair
                header = {"op": "chunk", "session": self.session, "epoch": self.epoch,
                          "source": source, "target": target, "number": step.number}  # fmt: skip
                self._outgoing.send(endpoint, header, payload)
                sent = True
        return sent

    def _receive(self) -> bool:
        """Writes one chunk that has come, if it belongs to this attempt."""
        message = self._incoming.take() if self._incoming is not None else None
        if message is None:
            return False
        header, payload = message
        if (header["session"], header["epoch"]) != (self.session, self.epoch):
            log.warning("dropped a chunk of attempt %d in attempt %d", header["epoch"], self.epoch)
            return True
        step = self._expected.get((header["source"], header["target"], header["number"]))
        if step is None:
            log.warning("dropped chunk %d of ranks %d to %d: it has come before, or is not planned",
                        header["number"], header["source"], header["target"])  # fmt: skip
        elif len(payload) != step.nbytes:
            log.warning("dropped a chunk of %d bytes, but the plan has %d", len(payload), step.nbytes)
        else:
            self._steps.place(step, self._memory, payload)
            self._arrive(step)
        return True

    def _arrive(self, step: Step) -> None:
        """Counts a chunk that was written, and takes up what waited for its band."""
        del self._expected[(*step.pair, step.number)]
        if self._progress is not None and not step.merges:
            self._progress(step.nbytes)
        if step.fills is not None:
            self._left[step.fills] -= 1
            if not self._left[step.fills]:
                for ready in self._waiting.pop(step.fills, ()):
                    self._queue(ready)

    # Time

    def _watch_the_time(self) -> None:
        now = time.monotonic()
        if now > self._until and not self._reported:
            self._reported = True
            self._report()
        if now > self._until + self._patience_secs:
            self._is_ended = True
            raise SyncTimeout(
                f"update: the rendezvous did not say how attempt {self.epoch} ended, {self._waited()}. Replicas that "
                "did not complete it are poisoned until the next complete update."
            )

    def _report(self) -> None:
        """Tells the rendezvous whom this process waits for; what it cannot know the rendezvous finds out itself."""
        step = self._missed()
        if step is not None and not self._first:
            source, target = step.pair
            count = sum(other.pair == step.pair for other in self._expected.values())
            if self._incoming is not None and self._incoming.socket.poll(0):  # it is this process that is slow
                why = f"rank {target} had not yet taken chunks that have come, and lacked {count} of rank {source}"
                self._fail("timeout", "finish", target, why)
                return
            kind = "withheld" if _is_found(step) else "timeout"
            phase = "send" if source < self._source_ranks else "finish"
            self._fail(kind, phase, source, f"rank {target} waited for {count} chunks of rank {source}")
        elif blocked := [step for queue in self._there.values() for step in queue]:
            source, target = blocked[0].pair
            self._fail(
                "timeout", "send", target, f"rank {target} did not take {len(blocked)} chunks that rank {source} had"
            )

    def _missed(self) -> Step | None:
        """A chunk of another process that is waited for; None if none is. Maxima of blocks first.

        Their sender found them by itself, while others may wait, as this process does, for the maxima of others.
        """
        missing = [step for step in self._expected.values() if step.pair[0] >= 0 and step.pair[0] not in self._held]
        return min(missing, key=lambda step: (not _is_found(step), step.pair), default=None)

    def _waited(self) -> str:
        if (step := self._missed()) is not None:
            source, target = step.pair
            return f"while rank {target} waited for {len(self._expected)} chunks, the first from rank {source}"
        return "while nothing was left to do here"

    def _sleep(self) -> None:
        """Until a message comes, a chunk comes, or a process that could not take a chunk can."""
        poller = zmq.Poller()
        poller.register(self._link.wake.fileno(), zmq.POLLIN)
        if self._incoming is not None:
            poller.register(self._incoming.socket, zmq.POLLIN)
        for endpoint, queue in self._there.items():
            if queue:
                poller.register(self._outgoing.socket(endpoint), zmq.POLLOUT)
        now = time.monotonic()
        until = self._until if now <= self._until else self._until + self._patience_secs
        poller.poll(max(1, int((until - now) * 1000) + 1))
