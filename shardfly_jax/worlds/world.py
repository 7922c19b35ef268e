"""A world: this process' place among others, with its sockets and threads."""

from __future__ import annotations

import atexit
from typing import TYPE_CHECKING, Any

import zmq

from shardfly_jax.sharding.errors import WorldError
from shardfly_jax.worlds.link import Link
from shardfly_jax.worlds.serving import Serving
from shardfly_jax.worlds.wire import Seal

if TYPE_CHECKING:
    from shardfly_jax.session import Session
    from shardfly_jax.worlds.part import Part


class World:
    """Processes that find each other at a rendezvous. Made by `connect`; a context manager that leaves it.

    Attributes:
      address: Of the rendezvous, with its port.
      listen: Where this process takes payload; None if nowhere.
      link: To the rendezvous.
    """

    def __init__(
        self,
        address: str,
        token: str,
        *,
        serve: bool,
        listen: str | None,
        name: str,
        deadline_secs: float,
        lost_secs: float,
    ):
        self.listen, self.seal = listen, Seal(token)
        self.context: zmq.Context[Any] = zmq.Context()
        self._serving: Serving | None = None
        self._part: Part | None = None
        try:
            if serve:
                self._serving = Serving(self.context, address, self.seal, deadline_secs, lost_secs)
                address = self._serving.address
            self.address = address
            self.link = Link(self.context, address, self.seal, name, deadline_secs)
            atexit.register(self.close)  # so that what was said last still gets out
        except BaseException:
            if self._serving is not None:
                self._serving.close()
            self.context.term()
            raise

    def part_of(self, session: Session) -> Part:
        """Takes part in a plan; see `Part`."""
        from shardfly_jax.worlds.part import Part  # which imports the transports

        return Part(session, self)

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
        part.close()
        self._part = None

    def check(self, part: Part) -> None:
        """Raises:
        WorldError: Another plan was registered in this world since.
        """
        if part is not self._part:
            raise WorldError(
                f"world: plan {part.session.digest[:12]} is no longer registered in it: a later registration took its "
                "place, or the world was closed. Register it again."
            )

    def close(self) -> None:
        """Leaves the world. Where the rendezvous is served from here, the world is lost for all."""
        if self.context.closed:
            return
        atexit.unregister(self.close)
        self.link.leave()  # first, so that an update that is under way ends
        if self._part is not None:
            self._part.close()
            self._part = None
        self.link.close()
        if self._serving is not None:
            self._serving.close()
        self.context.term()

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<World at {self.address}{', served from here' if self._serving else ''}>"
