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

from shardfly_jax.executors import hostcopy
from shardfly_jax.sharding.errors import (
    DigestMismatch,
    RankLost,
    ShardflyError,
    SyncTimeout,
    TransferError,
    UpdateRefused,
)
from shardfly_jax.sharding.formats import np_dtype
from shardfly_jax.sharding.moves import Key
from shardfly_jax.transports.sockets import Incoming, Outgoing
from shardfly_jax.worlds.link import Link
from shardfly_jax.worlds.rendezvous import GRACE_SECS
from shardfly_jax.worlds.steps import Band, Step, Steps
from shardfly_jax.worlds.wire import Header

log = logging.getLogger("shardfly_jax.worlds")

KINDS: Mapping[str, type[ShardflyError]] = {
    "timeout": SyncTimeout, "lost": RankLost, "refused": UpdateRefused, "digest": DigestMismatch,
}  # fmt: skip
"""What each kind of failure is raised as; others are `TransferError`."""


def failure(header: Header) -> ShardflyError:
    """The error that a *failed* message stands for."""
    if header["epoch"]:
        where = f"in phase {header['phase']} of attempt {header['epoch']}"
        rest = "Replicas that did not complete it are poisoned until the next complete update."
    else:
        where = "before anything was written"
        rest = "The old version is still served."
    return KINDS.get(header["kind"], TransferError)(f"update: {header['why']}, {where}. {rest}")


class Run:
    """What a process does in one attempt.

    Args:
      steps: Its part of the plan.
      begin: The message that began the attempt.
      memory: Bytes of every local buffer, sources and targets.
      link, incoming, outgoing: Its channels; `incoming` is None if it holds no rollout rank.
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
        self._begin, self._memory, self._link = begin, memory, link
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
        self._forwards: dict[Band, list[Step]] = {}
        first = []
        for step in steps.outgoing:
            if step.waits is not None and self._left.get(step.waits, 0):
                self._forwards.setdefault(step.waits, []).append(step)
            else:
                first.append(step)
        self._first = [*(step for step in steps.incoming if step.pair[0] < 0), *first]

    def run(self) -> None:
        """Goes on until the outcome is known.

        Raises:
          SyncTimeout, RankLost, UpdateRefused, TransferError, WorldLost: The attempt failed for this process.
          Any error of its own; the others are told.
        """
        try:
            if self._incoming is not None:
                self._link.say("ready", epoch=self.epoch)
            while not self._is_over():
                self._listen()
                worked = self._work() | self._send() | self._receive()
                if self._has_gone and not self._expected and not self._said_arrived and self._incoming is not None:
                    self._said_arrived = True
                    self._link.say("arrived", epoch=self.epoch)
                self._watch_the_time()
                if not worked and not self._is_over():
                    self._sleep()
        except BaseException as error:
            self._outgoing.reset()
            if not self._is_ended:
                rank, phase = min(self._held), "send" if self._needs_done else "finish"
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
            self._there.setdefault(endpoint, collections.deque()).append(step)

    def _source(self, step: Step) -> np.ndarray:
        return step.read.of(self._memory[step.source].view(np_dtype(step.conversion.source)))

    def _target(self, step: Step) -> np.ndarray:
        return step.write.of(self._memory[step.target].view(np_dtype(step.conversion.target)))

    def _work(self) -> bool:
        """Writes one chunk from this process to itself."""
        if not self._here:
            return False
        step = self._here.popleft()
        target = self._target(step)
        if step.pair[0] < 0:
            target[...] = step.conversion.apply(np.empty(target.shape, target.dtype))
        else:
            hostcopy.copy(target, self._source(step), step.conversion)
        self._arrive(step)
        return True

    def _send(self) -> bool:
        """Converts and sends one chunk to each process that can take one."""
        sent = False
        for endpoint, queue in self._there.items():
            if queue and self._outgoing.has_room(endpoint):
                step = queue.popleft()
                payload = np.empty(step.write.extents, np_dtype(step.conversion.target))
                hostcopy.copy(payload, self._source(step), step.conversion)
                source, target = step.pair
                header = {"op": "chunk", "session": self.session, "epoch": self.epoch,
                          "source": source, "target": target, "number": step.number}  # fmt: skip
                self._outgoing.send(endpoint, header, payload.reshape(-1).view(np.uint8))
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
            hostcopy.place(self._target(step), payload)
            self._arrive(step)
        return True

    def _arrive(self, step: Step) -> None:
        """Counts a chunk that was written, and takes up what waited for its band."""
        del self._expected[(*step.pair, step.number)]
        if self._progress is not None:
            self._progress(step.nbytes)
        if step.fills is not None:
            self._left[step.fills] -= 1
            if not self._left[step.fills]:
                for forward in self._forwards.pop(step.fills, ()):
                    self._queue(forward)

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
        if self._expected and not self._first:
            source, target, _ = min(self._expected)
            count = sum(pair[:2] == (source, target) for pair in self._expected)
            phase = "send" if source < self._source_ranks else "finish"
            self._fail("timeout", phase, source, f"rank {target} waited for {count} chunks of rank {source}")
        elif blocked := [step for queue in self._there.values() for step in queue]:
            source, target = blocked[0].pair
            self._fail(
                "timeout", "send", target, f"rank {target} did not take {len(blocked)} chunks that rank {source} had"
            )

    def _waited(self) -> str:
        if self._expected:
            source, target, _ = min(self._expected)
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
