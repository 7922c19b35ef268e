"""Worlds of MPI: the processes that `mpirun` started, no more and no fewer, and their updates.

There is no rendezvous. Before an update every process tells every other what it votes, afterwards how it fared. Payload
goes in between, chunk after chunk in the plan's order, which is the same everywhere: of the first chunk that is not
through, both sides have come to it, so that nobody waits in a circle. A process that is lost cannot be replaced: who
misses it at a vote gets `WorldLost`, and who waits for its chunks beyond the deadline ends the whole job.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

from shardfly_jax.buffers import Wanted, zeros
from shardfly_jax.sharding.errors import RegistrationError, UpdateRefused, WorldError, WorldLost

if TYPE_CHECKING:
    from shardfly_jax.session import Session
    from shardfly_jax.worlds.mpi_part import MpiPart

log = logging.getLogger("shardfly_jax.worlds")

CONTROL, PAYLOAD = 1, 2
"""Tags of messages."""
REFUSE = "refuse"
"""Said instead of what a process was to say, where it failed before."""
SHORTEST_NAP_SECS, LONGEST_NAP_SECS = 0.0001, 0.01
NAP_OF_WAIT = 8
"""How many times longer a wait is than the nap that may outlast it."""

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
      keeps_buffers: See `World`; here all processes allocate together.
    """

    keeps_buffers = False

    def __init__(self, deadline_secs: float):
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise WorldError("world: MPI was started for one thread, but several are needed. Let mpi4py start it.")
        self._lost: str | None = None
        self._known: Exception | None = None
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

    @contextlib.contextmanager
    def registering(self) -> Iterator[None]:
        """While this process registers a plan, which all do together: what goes wrong here alone ends it for all.

        Raises:
          UpdateRefused: An update is pending.
        """
        if self._part is not None:
            self._part.session.check_idle()  # which is no mistake, and whose messages are not to be crossed
        try:
            yield
        except Exception as error:
            if self._lost is None and error is not self._known:
                with contextlib.suppress(WorldError):  # its own error is what this process should know
                    self.exchange({"op": REFUSE, "why": f"{type(error).__name__}: {error}"[:2000]}, self.deadline_secs)
            raise

    def known[E: Exception](self, error: E) -> E:
        """An error that follows from what all have said to all: each of them has it, and need not be told."""
        self._known = error
        return error

    def part_of(self, session: Session) -> MpiPart:
        """Takes part in a plan; in one at a time."""
        part = self._new_part(session)
        self._part = part
        return part

    def _new_part(self, session: Session) -> MpiPart:
        from shardfly_jax.worlds.mpi_part import MpiPart  # which imports this module

        return MpiPart(session, self)

    @property
    def devices(self) -> Sequence[jax.Device]:
        """As of `World`."""
        return jax.local_devices()

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
          WorldLost: Some process says nothing in time, or this one was interrupted.
          WorldError: Some process says something of another kind: it is somewhere else in its program.
          RegistrationError, UpdateRefused: Some process failed before it came to say anything of this kind.
        """
        try:
            said = self._exchanged(json.dumps(words).encode(), words["op"], wait_secs)
        except BaseException as error:  # what the others said would be taken for what they say next
            if self._lost is None:
                self._lose(f"{type(error).__name__} came while this process waited for others at {words['op']!r}")
            raise
        said[self.process] = words
        for process, theirs in said.items():
            if theirs["op"] == REFUSE != words["op"]:
                is_update = words["op"] == "update"
                why = f"{self._named([process])} failed: {theirs['why'].rstrip('.')}"
                text = f"{'update' if is_update else 'registration'}: {why}. It ends for all; call again everywhere."
                raise self.known((UpdateRefused if is_update else RegistrationError)(text))
        if strays := [process for process in range(self.processes) if said[process]["op"] != words["op"] != REFUSE]:
            raise self.known(
                WorldError(
                    f"world: {self._named(strays[:1])} says {said[strays[0]]['op']!r}, but this one {words['op']!r}. "
                    "All processes of an MPI world register and update together."
                )
            )
        return [said[process] for process in range(self.processes)]

    def _exchanged(self, text: bytes, op: str, wait_secs: float) -> dict[int, Words]:
        """Tells all others something; what each of them says."""
        self._unsent = [request for request in self._unsent if not request.Test()]
        others = [process for process in range(self.processes) if process != self.process]
        self._unsent += [self._comm.Isend([text, MPI.BYTE], dest=process, tag=CONTROL) for process in others]
        said: dict[int, Words] = {}
        start = time.monotonic()
        while missing := [process for process in others if process not in said]:
            heard = False
            for process in missing:
                status = MPI.Status()
                if self._comm.Iprobe(source=process, tag=CONTROL, status=status):
                    message = bytearray(status.Get_count(MPI.BYTE))
                    self._comm.Recv([message, MPI.BYTE], source=process, tag=CONTROL)
                    said[process] = json.loads(message)
                    heard = True
            if heard:
                continue
            waited = time.monotonic() - start
            if waited > wait_secs:
                self._lose(f"{self._named(missing)} did not come to {op!r} within {wait_secs:g} s")
                self.check(None)
            time.sleep(min(max(waited / NAP_OF_WAIT, SHORTEST_NAP_SECS), LONGEST_NAP_SECS))
        return said

    def _named(self, processes: list[int]) -> str:
        held = self._part.ranks_of if self._part is not None else {}
        return " and ".join(f"process {p}" + (f" (ranks {held[p]})" if p in held else "") for p in processes)

    def _lose(self, why: str) -> None:
        self._lost = f"{why}. An MPI job cannot go on without it; start the job again"
        atexit.register(MPI.COMM_WORLD.Abort, 1)  # ends the others, and a finalization that would wait for them

    def deadline(self, describe: Callable[[], str], more_secs: float = 0.0) -> threading.Timer:
        """A timer that ends the whole job, saying why: nothing else ends a wait for a chunk.

        Args:
          describe: Says why.
          more_secs: To wait beyond the deadline.
        """

        def end() -> None:
            why = f"after {self.deadline_secs + more_secs:g} s {describe()}"
            print(f"shardfly_jax: SyncTimeout: {why}. The job ends.", file=sys.stderr, flush=True)
            MPI.COMM_WORLD.Abort(1)

        timer = threading.Timer(self.deadline_secs + more_secs, end)
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


# mpi4jax is imported late: a world whose payload goes another way needs only mpi4py.


def _send(comm: Any, payload: jax.Array, process: int) -> jax.Array:
    import mpi4jax

    mpi4jax.send(payload, dest=process, tag=PAYLOAD, comm=comm)
    return jnp.zeros((), jnp.int32)  # something to wait for


def _receive(comm: Any, nbytes: int, process: int) -> jax.Array:
    import mpi4jax

    return mpi4jax.recv(jnp.zeros(nbytes, jnp.uint8), source=process, tag=PAYLOAD, comm=comm)
