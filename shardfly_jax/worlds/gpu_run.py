"""One attempt in a process whose ranks are on GPUs: launches, and what the rendezvous says about them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import zmq

from shardfly_jax.executors.launches import Attempt, Outcome
from shardfly_jax.executors.persistent import PersistentExecutor
from shardfly_jax.pallas_kernels import launch_words as lw
from shardfly_jax.sharding.errors import SyncTimeout
from shardfly_jax.sharding.finiteness import not_finite
from shardfly_jax.sharding.moves import Key
from shardfly_jax.sharding.optable import Inbox
from shardfly_jax.transports.vmm import write
from shardfly_jax.worlds.attempt import failure
from shardfly_jax.worlds.rendezvous import GRACE_SECS
from shardfly_jax.worlds.wire import Header

if TYPE_CHECKING:
    from shardfly_jax.worlds.gpu_part import GpuPart


class GpuRun:
    """What a process does in one attempt.

    Args:
      part: Whose attempt it is.
      executor: Prepared for those who take part.
      begin: The message that began it.
      addresses: Of all that moves.
      until: When it must be over, as `time.monotonic` counts.
      progress: Called with bytes written.

    Attributes:
      complete: The replicas that hold all of the update, as the rendezvous said.
    """

    def __init__(
        self,
        part: GpuPart,
        executor: PersistentExecutor,
        begin: Header,
        addresses: Mapping[Key | Inbox, int],
        *,
        until: float,
        progress: Callable[[int], None] | None,
    ):
        self._part, self._executor, self._link = part, executor, part.world.link
        self._addresses, self._until, self._progress = addresses, until, progress
        self.epoch = begin["epoch"]
        left_ms = max(1, int((until - time.monotonic()) * 1000))
        self._attempt = Attempt(begin["session"] & 0xFFFFFFFF, self.epoch, begin["number"], left_ms)
        self.complete: set[str] = set()
        self._is_done = self._is_ended = False
        self._outcomes: list[Outcome] | None = None
        self._broken: BaseException | None = None
        self._handled = False
        self._waiter: threading.Thread | None = None

    def run(self) -> None:
        """Goes on until the outcome is known.

        Raises:
          SyncTimeout, RankLost, UpdateRefused, NotFinite, TransferError, WorldLost: The attempt failed for this
            process.
          Any error of its own; the others are told.
        """
        try:
            self._executor.ready(self._attempt).outcomes()
            if self._part.own:
                self._link.say("ready", epoch=self.epoch)
            poller = zmq.Poller()
            poller.register(self._link.wake.fileno(), zmq.POLLIN)
            while True:
                self._link.wake.clear()
                self._listen()
                self._judge()
                if self._is_over():
                    return
                left = self._until + 2 * (GRACE_SECS + self._link.lost_secs) - time.monotonic()
                if left <= 0:
                    self._is_ended = True
                    raise SyncTimeout(
                        f"update: the rendezvous did not say how attempt {self.epoch} ended. Replicas that did not "
                        "complete it are poisoned until the next complete update."
                    )
                poller.poll(int(left * 1000) + 1)
        except BaseException as error:
            if not self._is_ended:  # said first, as giving up fails where the device has
                held = self._part.held
                phase = "send" if self._part.sends else "finish"
                self._fail("error", phase, min(held), f"rank {min(held)} failed: {type(error).__name__}: {error}")
            self._give_up()
            raise

    def _is_over(self) -> bool:
        is_told = self._part.own <= self.complete and (self._is_done or not self._part.sends)
        return is_told and self._outcomes is not None

    def _fail(self, kind: str, phase: str, rank: int, why: str) -> None:
        self._link.say("fail", epoch=self.epoch, kind=kind, phase=phase, rank=rank, why=why[:2000])

    def _listen(self) -> None:
        """Acts on what the rendezvous says."""
        while (header := self._link.take()) is not None:
            if header.get("epoch") != self.epoch:
                continue
            match header["op"]:
                case "go":
                    self._launch()
                case "complete":
                    self.complete |= set(header["replicas"])
                case "done":
                    self._is_done = True
                case "failed" if self._part.sends or not self._part.own <= self.complete:
                    self._is_ended = True
                    raise failure(header)

    def _launch(self) -> None:
        """Launches *send* and *finish*; a thread waits for them, as a poller cannot."""
        started = self._executor.transfer(self._attempt, self._addresses)

        def wait() -> None:
            try:
                self._outcomes = started.outcomes()
            except BaseException as error:
                self._broken = error
            self._link.wake.set()

        self._waiter = threading.Thread(target=wait, name="shardfly-launches", daemon=True)
        self._waiter.start()

    def _judge(self) -> None:
        """Says how the launches ended, once."""
        if self._broken is not None:
            raise self._broken
        if self._outcomes is None or self._handled:
            return
        self._handled = True
        for work, error, word in self._outcomes:
            if why := work.fault(error):
                kind = "timeout" if error >> lw.ERROR_SHIFT in (lw.HEAD, lw.TAIL, lw.COUNTER) else "error"
                self._fail(kind, *work.blamed(error), why)
                return
            if key := work.refused(word):
                why = str(not_finite(self._part.session.plan.families[key[0]], key[1])).rstrip(".")
                self._fail("not finite", *work.blamed(error), why)
                return
        if self._progress is not None:
            self._progress(sum(shard.nbytes for shard in self._part.session.buffers.values()))
        self._link.say("arrived", epoch=self.epoch)

    def _give_up(self) -> None:
        """Ends launches that still wait, and lets nobody begin to write here in this attempt any more."""
        attempt = self._attempt
        try:
            for number, array in self._executor.inboxes.items():
                ordinal, at = self._executor.devices[number].local_hardware_id, array.unsafe_buffer_pointer()
                write(ordinal, at + 4 * lw.ABORTED, [attempt.session, attempt.epoch & 0xFFFFFFFF])
                write(ordinal, at + 4 * self._executor.ready_word(number), [0, 0])
            if self._waiter is not None:
                self._waiter.join()
        finally:
            self._part.doubt()
