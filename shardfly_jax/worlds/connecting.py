"""`connect`: how a process joins a world."""

from __future__ import annotations

import importlib.util
import math
import os
import socket
from typing import TYPE_CHECKING

from shardfly_jax.sharding.errors import WorldError
from shardfly_jax.transports.choice import why_not_mpi, why_not_nvshmem

if TYPE_CHECKING:
    from shardfly_jax.worlds.mpi import MpiWorld
    from shardfly_jax.worlds.world import World

SCHEMES = ("tcp://", "ipc://")


def connect(
    address: str | None = None,
    token: str | None = None,
    *,
    transport: str = "zmq",
    serve: bool = False,
    listen: str | None = None,
    name: str | None = None,
    deadline_secs: float = 60.0,
    lost_secs: float = 10.0,
) -> World | MpiWorld:
    """Joins the processes that meet at an address, or those of an MPI job.

    Args:
      address: Of the rendezvous: `tcp://host:port`, or `ipc://path` on one host.
        Over MPI and NVSHMEM nothing but `deadline_secs` is said: the processes are those that mpirun started.
      token: A secret that all processes of the world share. It never travels; weights are not encrypted.
      transport: `zmq`: processes come and go, over sockets, and where all ranks are on GPUs of one host they write into
        each other's memory (ipc); `mpi`: all processes of an MPI job, of which none may be lost, and all of which
        register, update and rescale together; `nvshmem`: the same, each with a GPU, over NVSHMEM's symmetric heap.
      serve: The rendezvous runs in this process, which then listens at `address` (port 0 takes a free one, see
        `world.address`). Exactly one process of a world says so; when it ends, the world is lost.
      listen: Where this process takes weights, `tcp://this-host:0`; needed where it holds rollout ranks, or trainer
        ranks that share quantized blocks with other processes.
      name: Of this process in messages; by default host and process id.
      deadline_secs: How long to try to connect. The serving process' value also limits every update. Over MPI, how long
        others may take to come to an update, and how long it may take; beyond that the job is ended.
      lost_secs: Of silence after which a process is lost; the serving process' value counts.

    Raises:
      WorldError: pyzmq, mpi4jax or nvshmem4py is missing, this is no MPI job, an argument is unusable, nobody answers,
        or the token is refused.
    """
    if not isinstance(deadline_secs, int | float) or not 0 < deadline_secs < math.inf:
        raise WorldError(f"world: deadline_secs is {deadline_secs!r}, but a positive number of seconds is needed.")
    if transport in ("mpi", "nvshmem"):
        if any(given is not None for given in (address, token, listen, name)) or serve:
            raise WorldError(f"world: address, token, listen, name and serve are not for {transport}. Leave them out.")
        if reason := (why_not_mpi if transport == "mpi" else why_not_nvshmem)(()):
            raise WorldError(f"world: {reason}.")
        if transport == "nvshmem":
            from shardfly_jax.worlds.nvshmem import NvshmemWorld

            return NvshmemWorld(deadline_secs)
        from shardfly_jax.worlds.mpi import MpiWorld

        return MpiWorld(deadline_secs)
    if transport != "zmq":
        raise WorldError(f"world: transport is {transport!r}, but one of 'zmq', 'mpi' and 'nvshmem' is needed.")
    if importlib.util.find_spec("zmq") is None:
        raise WorldError("world: pyzmq is not installed. Install it with: pip install 'shardfly-jax[zmq]'.")
    for what, endpoint in (("address", address), ("listen", listen)):
        if endpoint is None and what == "listen":
            continue
        if not (isinstance(endpoint, str) and endpoint.startswith(SCHEMES)):
            raise WorldError(f"world: {what} is {endpoint!r}, but it must begin with one of {list(SCHEMES)}.")
    if not isinstance(token, str) or not token:
        raise WorldError("world: token is empty or no string. Give every process the same secret.")
    for what, text in (("token", token), ("name", name)):
        if text is not None and not (isinstance(text, str) and text.isprintable()):
            raise WorldError(f"world: {what} is no printable string. Give one.")
    if not isinstance(lost_secs, int | float) or not 0 < lost_secs < math.inf:
        raise WorldError(f"world: lost_secs is {lost_secs!r}, but a positive number of seconds is needed.")
    from shardfly_jax.worlds.world import World

    assert address is not None  # as was just checked
    return World(
        address,
        token,
        serve=serve,
        listen=listen,
        name=name or f"{socket.gethostname()}:{os.getpid()}",
        deadline_secs=deadline_secs,
        lost_secs=lost_secs,
    )
