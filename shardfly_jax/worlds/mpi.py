"""Worlds of MPI: the processes that `mpirun` started, no more and no fewer, and their updates.

There is no rendezvous. Before an update every process tells every other what it votes, afterwards how it fared. Payload
goes in between, chunk after chunk in the plan's order, which is the same everywhere: of the first chunk that is not
through, both sides have come to it, so that nobody waits in a circle. A process that is lost cannot be replaced: who
misses it at a vote gets `WorldLost`, and who waits for its chunks beyond the deadline ends the whole job.
"""

from __future__ import annotations

import atexit
import functools
import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import mpi4jax
import numpy as np
from mpi4py import MPI

from shardfly_jax.binding import Binding, bind, check_addresses, ready_shards
from shardfly_jax.buffers import Wanted, zeros
from shardfly_jax.executors.memory import Key, host_bytes, wait_for_readers
from shardfly_jax.sharding.errors import (
    DigestMismatch,
    NotFinite,
    ParamsMismatch,
    RegistrationError,
    TransferError,
    UpdateRefused,
    WorldError,
    WorldLost,
)
from shardfly_jax.transports.choice import PROBES, why_not_mpi
from shardfly_jax.worlds.steps import Step, steps_of

if TYPE_CHECKING:
    from shardfly_jax.session import Session

log = logging.getLogger("shardfly_jax.worlds")

CONTROL, PAYLOAD = 1, 2
"""Tags of messages."""
LONGEST_NAP_SECS = 0.01

Words = dict[str, Any]
"""What a process says: a JSON object whose `op` names it."""


class MpiWorld:
    """All processes of an MPI job. Made by `connect`; a context manager.

    Args:
      deadline_secs: How long others may take to come to a vote, unless said otherwise, and all chunks of an update.

    Raises:
      WorldError: MPI allows one thread only.
      WorldLost: Some process does not connect in time.

    Attributes:
      process, processes: Number of this one, and how many there are.
    """

    def __init__(self, deadline_secs: float):
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise WorldError("world: MPI was started for one thread, but several are needed. Let mpi4py start it.")
        self._lost: str | None = None
        self._comm, connecting = MPI.COMM_WORLD.Idup()  # messages of others cannot be taken for its own
        until = time.monotonic() + deadline_secs
        while not connecting.Test():
            if time.monotonic() > until:
                self._lose(f"some process did not connect within {deadline_secs:g} s")
                self.check(None)
            time.sleep(LONGEST_NAP_SECS)
        self.process, self.processes, self.deadline_secs = self._comm.rank, self._comm.size, deadline_secs
        self._part: MpiPart | None = None
        self._unsent: list[Any] = []
        self._send = jax.jit(functools.partial(_send, self._comm), static_argnums=1)
        self._receive = jax.jit(functools.partial(_receive, self._comm), static_argnums=(0, 1))

    def part_of(self, session: Session) -> MpiPart:
        """Takes part in a plan; in one at a time."""
        if self._part is not None:
            self._part.session.check_idle()
        part = MpiPart(session, self)
        self._part = part
        return part

    def allocator(self, devices: Sequence[jax.Device]) -> Callable[[Sequence[Wanted]], list[jax.Array]]:
        """What makes the buffers of a plan: ordinary memory."""
        return zeros

    def check(self, part: MpiPart | None) -> None:
        """Raises:
        WorldLost: The world was closed, or a process was lost.
        WorldError: Another plan was registered in this world since.
        """
        if self._lost is not None:
            raise WorldLost(f"world: {self._lost}.")
        if part is not None and part is not self._part:
            raise WorldError(
                f"world: plan {part.session.digest[:12]} is no longer registered in it: a later registration took its "
                "place. Register it again."
            )

    def exchange(self, words: Words, wait_secs: float) -> list[Words]:
        """Tells every process something of the same kind.

        Returns:
          What each says, by number.

        Raises:
          WorldLost: Some process says nothing in time.
          WorldError: Some process says something of another kind: it is somewhere else in its program.
        """
        text = json.dumps(words).encode()
        self._unsent = [request for request in self._unsent if not request.Test()]
        others = [process for process in range(self.processes) if process != self.process]
        self._unsent += [self._comm.Isend([text, MPI.BYTE], dest=process, tag=CONTROL) for process in others]
        said: dict[int, Words] = {self.process: words}
        until, nap = time.monotonic() + wait_secs, 0.0001
        while missing := [process for process in others if process not in said]:
            heard = False
            for process in missing:
                status = MPI.Status()
                if self._comm.Iprobe(source=process, tag=CONTROL, status=status):
                    message = bytearray(status.Get_count(MPI.BYTE))
                    self._comm.Recv([message, MPI.BYTE], source=process, tag=CONTROL)
                    said[process] = json.loads(message)
                    heard = True
            if not heard and time.monotonic() > until:
                self._lose(f"{self._named(missing)} did not come to {words['op']!r} within {wait_secs:g} s")
                self.check(None)
            nap = 0.0001 if heard else min(2 * nap, LONGEST_NAP_SECS)
            time.sleep(0 if heard else nap)
        if strays := [process for process in range(self.processes) if said[process]["op"] != words["op"]]:
            raise WorldError(
                f"world: {self._named(strays[:1])} says {said[strays[0]]['op']!r}, but this one {words['op']!r}. All "
                "processes of an MPI world register and update together."
            )
        return [said[process] for process in range(self.processes)]

    def _named(self, processes: list[int]) -> str:
        held = self._part.ranks_of if self._part is not None else {}
        return " and ".join(f"process {p}" + (f" (ranks {held[p]})" if p in held else "") for p in processes)

    def _lose(self, why: str) -> None:
        self._lost = f"{why}. An MPI job cannot go on without it; start the job again"
        atexit.register(MPI.COMM_WORLD.Abort, 1)  # ends the others, and a finalization that would wait for them

    def deadline(self, describe: Callable[[], str]) -> threading.Timer:
        """A timer that ends the whole job, saying why: nothing else ends a wait for a chunk."""

        def end() -> None:
            why = f"after {self.deadline_secs:g} s {describe()}"
            print(f"shardfly_jax: SyncTimeout: {why}. The job ends.", file=sys.stderr, flush=True)
            MPI.COMM_WORLD.Abort(1)

        timer = threading.Timer(self.deadline_secs, end)
        timer.daemon = True
        return timer

    def send(self, payload: np.ndarray, process: int) -> None:
        """Sends uint8 bytes, and returns when they are on their way."""
        self._send(jnp.asarray(payload), process).block_until_ready()

    def receive(self, nbytes: int, process: int) -> np.ndarray:
        """The next bytes from a process."""
        return np.asarray(self._receive(nbytes, process))

    def close(self) -> None:
        """Takes part in nothing any more."""
        if self._part is not None:
            self._part.session.end_pending()
            self._part = None
        self._lost = self._lost or "it was closed. All processes of the job must connect anew"

    def __enter__(self) -> MpiWorld:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<World of MPI: process {self.process} of {self.processes}>"


def _send(comm: Any, payload: jax.Array, process: int) -> jax.Array:
    mpi4jax.send(payload, dest=process, tag=PAYLOAD, comm=comm)
    return jnp.zeros((), jnp.int32)  # something to wait for


def _receive(comm: Any, nbytes: int, process: int) -> jax.Array:
    return mpi4jax.recv(jnp.zeros(nbytes, jnp.uint8), source=process, tag=PAYLOAD, comm=comm)


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
        self.passed_over = {name: probe(devices) or "this is a world of MPI" for name, probe in PROBES.items()}
        del self.passed_over["mpi"]
        if reason := why_not_mpi(devices):
            raise RegistrationError(f"registration: {reason}. Hold all ranks in one process, or use another transport.")
        self._steps = steps_of(plan, self.held, session.buffers)
        self._targets = {key: host_bytes(shard.address, shard.nbytes) for key, shard in session.buffers.items()}
        world.check(None)
        versions = {name: session.versions[name] for name in sorted(self.own)}
        said = world.exchange(
            {"op": "register", "digest": plan.digest, "held": sorted(self.held), "versions": versions},
            world.deadline_secs,
        )
        _check_digests(said)
        self.ranks_of = {process: words["held"] for process, words in enumerate(said)}
        self._process_of = {rank: process for process, ranks in self.ranks_of.items() for rank in ranks}
        dealt = sorted(rank for ranks in self.ranks_of.values() for rank in ranks)
        if dealt != list(range(plan.ranks)):
            raise RegistrationError(
                f"registration: the processes hold the ranks {dealt}, but each of 0 to {plan.ranks - 1} is needed "
                "once. An MPI world has no other processes to hold them."
            )
        self._others: dict[str, int] = {}
        for words in said:
            for name, version in words["versions"].items():
                self._others[name] = min(version, self._others.get(name, version))
        self.newest = max([session.newest, *self._others.values()])

    def versions_of_others(self) -> Mapping[str, int]:
        """Versions of replicas that other processes hold."""
        return {name: version for name, version in self._others.items() if name not in self.own}

    def prepare(
        self, params: Any, wait_secs: float | None, progress: Callable[[int], None] | None, stream: Any = None
    ) -> Callable[[], None]:
        """As `Part.prepare`. Where arguments are wrong it waits for the others, to tell them."""
        session = self.session
        patience = self.world.deadline_secs if wait_secs is None else wait_secs
        self.world.check(self)
        try:
            if stream is not None:
                raise ParamsMismatch("receive: stream is given, but the buffers are on CPU devices. Leave it out.")
            session.check_buffers()
            leaves, binding = bind(params, session) if self.sends else ([], None)
        except Exception as error:
            self._vote(patience, error)
            raise

        def take_part() -> None:
            try:
                memory, kept = self._sources(leaves, binding) if binding is not None else ({}, [])
            except Exception as error:
                self._vote(patience, error)
                raise
            finally:
                leaves.clear()  # an error that is kept would keep them
            number = self._vote(patience, None)
            self._move({**self._targets, **memory}, number, None if progress is None else session.guarded(progress))
            kept.clear()  # not before

        return take_part

    def _sources(self, leaves: list[Any], binding: Binding) -> tuple[dict[Key, np.ndarray], list[Any]]:
        arrays, kept = ready_shards(leaves, binding, keep=True)
        if reason := why_not_mpi(device for array in arrays.values() for device in array.devices()):
            raise ParamsMismatch(f"params: {reason}. Copy them to a CPU device.")
        check_addresses(self.session, binding, arrays)
        memory = {key: host_bytes(a.unsafe_buffer_pointer(), a.nbytes) for key, a in arrays.items()}
        return memory, [arrays, kept]

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
        _check_digests(said)
        self.newest = max(words["newest"] for words in said)
        for process, words in enumerate(said):
            if words["refusal"] is not None and process != self.world.process:
                raise UpdateRefused(
                    f"update: rank {min(self.ranks_of[process])} refused: {words['refusal']}, before anything was "
                    "written. The old version is still served."
                )
        return self.newest + 1

    def _move(self, memory: Mapping[Key, np.ndarray], number: int, progress: Callable[[int], None] | None) -> None:
        """Sends and receives everything, then hears how the others fared.

        Raises:
          TransferError: Another process failed. Every replica is poisoned.
          NotFinite: A tensor to be quantized holds NaN or infinity, here or in another process; the like.
          Any error of its own, as late: others count on this process until the last chunk.
        """
        session, memory = self.session, {**memory, **self._steps.fresh_slots()}
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
            why = None if error is None else f"{type(error).__name__}: {error}"[:2000]
            words = {"op": "outcome", "why": why, "finite": not isinstance(error, NotFinite)}
            said = self.world.exchange(words, self.world.deadline_secs)
        finally:
            timer.cancel()
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

    def close(self) -> None:
        """Nothing to free."""


def _check_digests(said: Iterable[Words]) -> None:
    digests = list(dict.fromkeys(words["digest"] for words in said))
    if len(digests) > 1:
        raise DigestMismatch(
            f"world: its processes hold the plans {' and '.join(digest[:12] for digest in digests)}; nothing was "
            "written. Make all of them plan from the same inputs."
        )
