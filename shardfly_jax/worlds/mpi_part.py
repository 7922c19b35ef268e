"""A process' part in a plan of a world of MPI: votes, chunks, outcomes; see `mpi`."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from shardfly_jax.binding import Binding, bind, check_addresses, ready_shards
from shardfly_jax.executors.choice import check_executor
from shardfly_jax.executors.memory import Key, host_bytes, wait_for_readers
from shardfly_jax.sharding.errors import (
    DigestMismatch,
    NotFinite,
    ParamsMismatch,
    RegistrationError,
    ShardflyError,
    TransferError,
    UpdateRefused,
)
from shardfly_jax.transports.choice import PROBES, why_not_mpi
from shardfly_jax.worlds.mpi import Words
from shardfly_jax.worlds.steps import Step, steps_of
from shardfly_jax.worlds.wire import is_secs

if TYPE_CHECKING:
    from shardfly_jax.session import Session
    from shardfly_jax.worlds.mpi import MpiWorld

log = logging.getLogger("shardfly_jax.worlds")


class MpiPart:
    """What a process does for the ranks of a plan that it holds; as `worlds.part.Part`, which see.

    Raises:
      RegistrationError: The buffers are out of MPI's reach, or some rank is held by no process or by two.
      DigestMismatch: Some process holds another plan.
      WorldError, WorldLost: Some process does not register, or is gone.

    Attributes:
      ranks_of: Ranks of each process.
    """

    transport = "mpi"

    def __init__(self, session: Session, world: MpiWorld):
        self.session, self.world, self.held = session, world, session.held
        plan, devices = session.plan, [shard.device for shard in session.buffers.values()]
        self.sends = min(self.held) < plan.source_ranks
        self.own = frozenset(replica.name for replica in plan.replicas if self.held & set(replica.ranks))
        self.passed_over = {
            name: probe(devices) or f"this is a world of {self.transport}" for name, probe in PROBES.items()
        }
        del self.passed_over[self.transport]
        world.check(None)
        self._open()
        versions = {name: session.versions[name] for name in sorted(self.own)}
        said = world.exchange(
            {"op": "register", "digest": plan.digest, "held": sorted(self.held), "versions": versions, **self._offer()},
            world.deadline_secs,
        )
        self._check_digests(said)
        self.ranks_of = {process: words["held"] for process, words in enumerate(said)}
        self._process_of = {rank: process for process, ranks in self.ranks_of.items() for rank in ranks}
        dealt = sorted(rank for ranks in self.ranks_of.values() for rank in ranks)
        if dealt != list(range(plan.ranks)):
            raise world.known(
                RegistrationError(
                    f"registration: the processes hold the ranks {dealt}, but each of 0 to {plan.ranks - 1} is needed "
                    "once. An MPI world has no other processes to hold them."
                )
            )
        self._others: dict[str, int] = {}
        for words in said:
            for name, version in words["versions"].items():
                self._others[name] = min(version, self._others.get(name, version))
        self.newest = max([session.newest, *self._others.values()])
        self._meet(said)

    def _open(self) -> None:
        """Prepares to carry payload."""
        session = self.session
        check_executor(session.choice, self.transport, "portable")
        if reason := why_not_mpi(shard.device for shard in session.buffers.values()):
            raise RegistrationError(f"registration: {reason}. Hold all ranks in one process, or use another transport.")
        self._steps = steps_of(session.plan, self.held, session.buffers)
        self._targets = {key: host_bytes(shard.address, shard.nbytes) for key, shard in session.buffers.items()}

    def _offer(self) -> Words:
        """What else the others must know of this process to reach it."""
        return {}

    def _meet(self, said: Sequence[Words]) -> None:
        """Takes note of what all processes have said of themselves."""

    def versions_of_others(self) -> Mapping[str, int]:
        """Versions of replicas that other processes hold."""
        return {name: version for name, version in self._others.items() if name not in self.own}

    def prepare(
        self,
        check: Callable[[], None],
        params: Any,
        wait_secs: float | None,
        progress: Callable[[int], None] | None,
        stream: Any = None,
    ) -> Callable[[], None]:
        """As `Part.prepare`. Where arguments are wrong it waits for the others, to tell them."""
        session = self.session
        patience = wait_secs if wait_secs is not None and is_secs(wait_secs) else self.world.deadline_secs
        self.world.check(None)
        try:
            self.world.check(self)
            check()
            self._check_stream(stream)
            session.check_buffers()
            leaves, binding = bind(params, session) if self.sends else ([], None)
        except Exception as error:
            self._refuse(patience, error)
            raise

        def take_part() -> None:
            try:
                memory, kept = self._sources(leaves, binding) if binding is not None else ({}, [])
            except Exception as error:
                session.binding = None  # it may be where these params are that was wrong
                self._refuse(patience, error)
                raise
            finally:
                leaves.clear()  # an error that is kept would keep them
            number = self._vote(patience, None)
            self._move(memory, number, None if progress is None else session.guarded(progress), stream)
            kept.clear()  # not before

        return take_part

    def _check_stream(self, stream: Any) -> None:
        if stream is not None:
            raise ParamsMismatch("receive: stream is given, but the buffers are on CPU devices. Leave it out.")

    def _sources(self, leaves: list[Any], binding: Binding) -> tuple[dict[Key, np.ndarray], list[Any]]:
        arrays, kept = ready_shards(leaves, binding, keep=True)
        if reason := why_not_mpi(device for array in arrays.values() for device in array.devices()):
            raise ParamsMismatch(f"params: {reason}. Copy them to a CPU device.")
        check_addresses(self.session, binding, arrays)
        memory = {key: host_bytes(a.unsafe_buffer_pointer(), a.nbytes) for key, a in arrays.items()}
        return memory, [arrays, kept]

    def _refuse(self, wait_secs: float, error: Exception) -> None:
        """Votes against an update; its own error, not what others say, is what this process should know."""
        with contextlib.suppress(ShardflyError):
            self._vote(wait_secs, error)

    def _vote(self, wait_secs: float, error: Exception | None) -> int:
        """Votes for or against an update, with everybody; its number.

        Raises:
          UpdateRefused, DigestMismatch: Another process is against it; nothing was written.
          WorldLost, WorldError: Some process does not vote.
        """
        refusal = None if error is None else f"{type(error).__name__}: {error}"[:2000]
        said = self.world.exchange(
            {"op": "update", "digest": self.session.digest, "refusal": refusal, "newest": self.newest}, wait_secs
        )
        self._check_digests(said)
        self.newest = max(words["newest"] for words in said)
        for process, words in enumerate(said):
            if words["refusal"] is not None and process != self.world.process:
                raise UpdateRefused(
                    f"update: rank {min(self.ranks_of[process])} refused: {words['refusal'].rstrip('.')}, before "
                    "anything was written. Every replica is as it was."
                )
        return self.newest + 1

    def _move(self, sources: Any, number: int, progress: Callable[[int], None] | None, stream: Any) -> None:
        """Sends and receives everything, then hears how the others fared.

        Raises:
          TransferError: Another process failed. Every replica is poisoned.
          NotFinite: A tensor to be quantized holds NaN or infinity, here or in another process; the like.
          Any error of its own, as late: others count on this process until the last chunk.
        """
        session, memory = self.session, {**self._targets, **sources, **self._steps.fresh_slots()}
        self.newest = number
        session.begin(number, self.own)
        error: BaseException | None = None
        at: Step | None = None

        def describe() -> str:
            if at is None:
                return f"rank {min(self.held)} was through update {number}, but others were not"
            there = next((rank for rank in at.pair if rank not in self.held), at.pair[1])
            process = self._process_of[there]
            return (
                f"rank {min(self.held)} waited for rank {there} (process {process}) to take or send a chunk of update "
                f"{number}; rank {there} may have waited for another one"
            )

        timer = self.world.deadline(describe)
        timer.start()
        try:
            try:
                wait_for_readers({shard.device for shard in session.buffers.values()})
            except BaseException as new:
                error = new
            for at in self._steps.ordered:
                try:
                    self._do(at, memory, error is None, progress if self.own else None)
                except BaseException as new:
                    error = new if error is None else error
            at = None
            self._outcome(error, number)
        finally:
            timer.cancel()

    def _outcome(self, error: BaseException | None, number: int) -> None:
        """Hears how the others fared; publishes the version if all is well.

        Raises:
          TransferError, NotFinite: Another process failed.
          Its own error.
        """
        session = self.session
        why = None if error is None else f"{type(error).__name__}: {error}"[:2000].rstrip(".")
        words = {"op": "outcome", "why": why, "finite": not isinstance(error, NotFinite)}
        said = self.world.exchange(words, self.world.deadline_secs)
        failed = [(process, words) for process, words in enumerate(said) if words["why"] is not None]
        if failed and error is None:
            process, words = failed[0]
            error = (TransferError if words["finite"] else NotFinite)(
                f"update: rank {min(self.ranks_of[process])} failed: {words['why']}, in update {number}. All "
                "replicas are poisoned until the next complete update."
            )
        if error is not None:
            session.poison(f"an update failed half way: {type(error).__name__}: {error}", self.own)
            raise error
        self._others = dict.fromkeys(self._others, number)
        session.publish(self.own, number)

    def _do(
        self, step: Step, memory: Mapping[Key, np.ndarray], is_whole: bool, progress: Callable[[int], None] | None
    ) -> None:
        """One chunk: copies it, sends it or takes it. When all is lost anyway, something of its size travels."""
        source, target = step.pair
        if target in self.held:
            if source < 0 or source in self.held:
                if is_whole:
                    self._steps.copy(step, memory)
            else:
                payload = self.world.receive(step.nbytes, self._process_of[source])
                if is_whole:
                    self._steps.place(step, memory, payload)
            if progress is not None and is_whole and not step.merges:
                progress(step.nbytes)
            return
        payload = np.zeros(step.nbytes, np.uint8)
        try:
            if is_whole:
                payload = self._steps.payload(step, memory)
        finally:
            self.world.send(payload, self._process_of[target])

    def _check_digests(self, said: Iterable[Words]) -> None:
        digests = list(dict.fromkeys(words["digest"] for words in said))
        if len(digests) > 1:
            raise self.world.known(
                DigestMismatch(
                    f"world: its processes hold the plans {' and '.join(digest[:12] for digest in digests)}; nothing "
                    "was written. Make all of them plan from the same inputs."
                )
            )

    def close(self) -> None:
        """Nothing to free."""
