"""`connect`: how a process joins a world."""

from __future__ import annotations

import importlib.util
import math
import os
import socket
from typing import TYPE_CHECKING

from shardfly_jax.sharding.errors import WorldError

if TYPE_CHECKING:
    from shardfly_jax.worlds.world import World

SCHEMES = ("tcp://", "ipc://")


def connect(
    address: str,
    token: str,
    *,
    serve: bool = False,
    listen: str | None = None,
    name: str | None = None,
    deadline_secs: float = 60.0,
    lost_secs: float = 10.0,
) -> World:
    """Joins the processes that meet at an address.

    Args:
      address: Of the rendezvous: `tcp://host:port`, or `ipc://path` on one host.
      token: A secret that all processes of the world share. It never travels; weights are not encrypted.
      serve: The rendezvous runs in this process, which then listens at `address` (port 0 takes a free one, see
        `world.address`). Exactly one process of a world says so; when it ends, the world is lost.
      listen: Where this process takes weights, `tcp://this-host:0`; needed where it holds rollout ranks.
      name: Of this process in messages; by default host and process id.
      deadline_secs: How long to try to connect. The serving process' value also limits every update.
      lost_secs: Of silence after which a process is lost; the serving process' value counts.

    Raises:
      WorldError: pyzmq is missing, an argument is unusable, nobody answers, or the token is refused.
    """
    if importlib.util.find_spec("zmq") is None:
        raise WorldError("world: pyzmq is not installed. Install it with: pip install 'shardfly-jax[zmq]'.")
    for what, endpoint in (("address", address), ("listen", listen)):
        if endpoint is not None and not (isinstance(endpoint, str) and endpoint.startswith(SCHEMES)):
            raise WorldError(f"world: {what} is {endpoint!r}, but it must begin with one of {list(SCHEMES)}.")
    if not isinstance(token, str) or not token:
        raise WorldError("world: token is empty or no string. Give every process the same secret.")
    for what, secs in (("deadline_secs", deadline_secs), ("lost_secs", lost_secs)):
        if not isinstance(secs, int | float) or not 0 < secs < math.inf:
            raise WorldError(f"world: {what} is {secs!r}, but a positive number of seconds is needed.")
    from shardfly_jax.worlds.world import World

    return World(
        address,
        token,
        serve=serve,
        listen=listen,
        name=name or f"{socket.gethostname()}:{os.getpid()}",
        deadline_secs=deadline_secs,
        lost_secs=lost_secs,
    )
