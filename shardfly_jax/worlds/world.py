"""A world: this process' place among others, with its sockets and threads."""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import zmq

from shardfly_jax.buffers import Wanted, zeros
from shardfly_jax.sharding.errors import RegistrationError, WorldError, WorldLost
from shardfly_jax.transports.choice import choose, why_not_ipc
from shardfly_jax.worlds.closing import close_all
from shardfly_jax.worlds.link import Link
from shardfly_jax.worlds.serving import Serving
from shardfly_jax.worlds.wire import Seal

if TYPE_CHECKING:
    from shardfly_jax.session import Session
    from shardfly_jax.transports.exports import Exports
    from shardfly_jax.transports.heap import Heap
    from shardfly_jax.worlds.part import Part


class World:
    """Processes that find each other at a rendezvous. Made by `connect`; a context manager that leaves it.

    Attributes:
      address: Of the rendezvous, with its port.
      transports: That it has, fastest first.
      listen: Where this process takes payload; None if nowhere.
      link: To the rendezvous.
      keeps_buffers: Whether a plan that is registered anew keeps its buffers where none are given.
    """

    keeps_buffers = True

    def __init__(
        self,
        address: str,
        token: str,
        *,
        transports: tuple[str, ...],
        serve: bool,
        listen: str | None,
        name: str,
        deadline_secs: float,
        lost_secs: float,
    ):
        self.transports, self.listen, self.seal = transports, listen, Seal(token)
        self.context: zmq.Context[Any] = zmq.Context()
        self._serving: Serving | None = None
        self._part: Part | None = None
        self._exports: Exports | None = None
        try:
            if serve:
                self._serving = Serving(self.context, address, self.seal, deadline_secs, lost_secs)
                address = self._serving.address
            self.address = address
            self.link = Link(self.context, address, self.seal, name, deadline_secs, serves=serve)
            atexit.register(self.close)  # so that what was said last still gets out
        except BaseException:
            if self._serving is not None:
                self._serving.close()
            self.context.term()
            raise

    def registering(self) -> contextlib.AbstractContextManager[None]:
        """While this process registers a plan; nobody waits for it meanwhile."""
        return contextlib.nullcontext()

    def part_of(self, session: Session) -> Part:
        """Takes part in a plan, by the fastest transport that reaches its buffers.

        Raises:
          RegistrationError: There is none; and as `Part`.
          WorldLost: The world was closed.
        """
        self._check_open()
        from shardfly_jax.worlds.part import Part, trainer_devices  # which imports the transports

        buffers = list(session.buffers.values())
        filled = [shard for shard in buffers if shard.nbytes]  # what has no bytes is nowhere
        has_heap = why_not_ipc([shard.device for shard in filled]) is None
        shares = not filled or (has_heap and all(self.heap.holds(shard.array) for shard in filled))
        known = {} if shares else {"ipc": "the buffers are an owner's; let sf.register(plan, world=...) allocate them"}
        transport, passed_over = choose(
            [*trainer_devices(session).values(), *(shard.device for shard in buffers)], self.transports, known
        )
        if transport is None:
            against = "; ".join(f"{name}: {reason}" for name, reason in passed_over.items())
            raise RegistrationError(f"registration: no transport reaches the rollout's buffers: {against}.")
        if transport == "ipc":
            from shardfly_jax.worlds.gpu_part import GpuPart

            return GpuPart(session, self, transport, passed_over)
        return Part(session, self, transport, passed_over)

    @property
    def devices(self) -> Sequence[jax.Device]:
        """What ranks of this process are on, in turn, where nobody says so."""
        return jax.local_devices()

    def allocator(self, devices: Sequence[jax.Device]) -> Callable[[Sequence[Wanted]], list[jax.Array]]:
        """What makes the buffers of a plan on some devices. Raises as `part_of`."""
        self._check_open()
        if why_not_ipc(devices) is not None:
            return zeros
        return self.heap.allocate

    @property
    def heap(self) -> Heap:
        """Of GPU memory that the others can map."""
        from shardfly_jax.transports.heap import process_heap

        return process_heap()

    @property
    def exports(self) -> Exports:
        """Where the others get it."""
        if self._exports is None:
            from shardfly_jax.transports.exports import Exports

            self._exports = Exports(self.seal)
        return self._exports

    def hold(self, part: Part) -> None:
        """Takes part in a plan; in one at a time, so the plan before it ends.

        Raises:
          UpdateRefused: An update of that one is pending.
        """
        if self._part is not None:
            self._part.session.check_idle()
            self._part.close()
        self._part = part

    def release(self, part: Part) -> None:
        """Gives up a part that could not be registered."""
        self._part = None
        part.close()

    def check(self, part: Part) -> None:
        """Raises:
        WorldLost: The world was closed.
        WorldError: Another plan was registered in it since.
        """
        self._check_open()
        if part is not self._part:
            raise WorldError(
                f"world: plan {part.session.digest[:12]} is no longer registered in it: a later registration took its "
                "place. Register it again."
            )

    def _check_open(self) -> None:
        if self.context.closed:
            raise WorldLost("world: it was closed in this process. sf.connect again, then register the plan.")

    def close(self) -> None:
        """Leaves the world, and gives back all that this process has of it, whatever of that fails.

        An update that this process is through with is first waited for, until it is over for the others too.

        Where the rendezvous is served from here, the world is lost for all.

        Raises:
          The first error of what failed.
        """
        if self.context.closed:
            return
        atexit.unregister(self.close)
        part, self._part = self._part, None
        kept = [one.close for one in (part, self._exports) if one is not None]
        last = [self._serving.close] if self._serving is not None else []
        settle = [part.settle] if part is not None else []
        # the link is left before the part ends, so that an update that is under way ends too
        close_all(*settle, self.link.leave, *kept, self.link.close, *last, self.context.term)

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<World at {self.address}{', served from here' if self._serving else ''}>"
