"""`connect`: how a process joins a world."""

from __future__ import annotations

import importlib.util
import os
import socket
from typing import TYPE_CHECKING

from shardfly_jax.sharding.errors import WorldError
from shardfly_jax.transports.choice import why_not_mpi, why_not_nvshmem
from shardfly_jax.worlds.wire import MAX_SECS, is_secs

if TYPE_CHECKING:
    from shardfly_jax.worlds.mpi import MpiWorld
    from shardfly_jax.worlds.world import World

TCP, IPC = "tcp://", "ipc://"
TRANSPORTS = {"auto": ("ipc", "zmq"), "zmq": ("zmq",)}
"""Of worlds with a rendezvous, as they are asked for: fastest first."""
MAX_PORT, MAX_NAME = 65535, 200


def connect(
    address: str | None = None,
    token: str | None = None,
    *,
    transport: str = "auto",
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
      transport: `auto`: processes come and go, over sockets, and where all ranks are on GPUs of one host they write
        into each other's memory (ipc); `zmq`: the same over sockets alone; `mpi`: all processes of an MPI job, of which
        none may be lost, and all of which register, update and rescale together; `nvshmem`: the same, each with a GPU,
        over NVSHMEM's symmetric heap.
      serve: The rendezvous runs in this process, which then listens at `address` (port 0 takes a free one, see
        `world.address`; a path at which a living process listens is refused). Exactly one process of a world says so;
        when it ends, the world is lost.
      listen: Where this process takes weights, `tcp://this-host:0`, a host that others can connect to; needed where it
        holds rollout ranks, or trainer ranks that share quantized blocks with other processes.
      name: Of this process in messages; by default host and process id.
      deadline_secs: How long to try to connect. The serving process' value also limits every update. Over MPI, how long
        others may take to come to an update, and how long it may take; beyond that the job is ended.
      lost_secs: Of silence after which a process is lost; the serving process' value counts.

    Raises:
      WorldError: pyzmq, mpi4jax or nvshmem4py is missing, this is no MPI job, an argument is unusable, nobody answers,
        or the token is refused.
    """
    for what, secs in (("deadline_secs", deadline_secs), ("lost_secs", lost_secs)):
        if not is_secs(secs):
            raise WorldError(
                f"world: {what} is {secs!r}, but a positive number of seconds is needed, {MAX_SECS:,} at most."
            )
    if not isinstance(serve, bool):
        raise WorldError(f"world: serve is {serve!r}, but True or False is needed.")
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
    if transport not in list(TRANSPORTS):  # it may be anything
        raise WorldError(f"world: transport is {transport!r}, but one of 'auto', 'zmq', 'mpi' and 'nvshmem' is needed.")
    if importlib.util.find_spec("zmq") is None:
        raise WorldError("world: pyzmq is not installed. Install it with: pip install 'shardfly-jax[zmq]'.")
    _check_endpoint("address", address, joins=not serve)
    if listen is not None:
        _check_endpoint("listen", listen)
    if not isinstance(token, str) or not token:
        raise WorldError("world: token is empty or no string. Give every process the same secret.")
    for what, text in (("token", token), ("name", name)):
        if text is not None and not (isinstance(text, str) and text.isprintable()):
            raise WorldError(f"world: {what} is no printable string. Give one.")
    if name is not None and len(name) > MAX_NAME:
        raise WorldError(f"world: name has {len(name)} letters, but it stands in messages. Give {MAX_NAME} at most.")
    from shardfly_jax.worlds.world import World

    assert address is not None  # as was just checked
    return World(
        address,
        token,
        transports=TRANSPORTS[transport],
        serve=serve,
        listen=listen,
        name=name or f"{socket.gethostname()}:{os.getpid()}",
        deadline_secs=deadline_secs,
        lost_secs=lost_secs,
    )


def _check_endpoint(what: str, endpoint: object, *, joins: bool = False) -> None:
    """Checks an argument of `connect`.

    Args:
      what: Its name.
      endpoint: The argument.
      joins: Whether this process connects to it.

    Raises:
      WorldError: Nobody can listen there, or connect to it.
    """
    if not isinstance(endpoint, str) or not endpoint.startswith((TCP, IPC)):
        raise WorldError(f"world: {what} is {endpoint!r}, but it must begin with one of {[TCP, IPC]}.")
    host, _, port = endpoint.removeprefix(TCP).rpartition(":")
    has_port = port == "*" or (port.isascii() and port.isdigit() and int(port) <= MAX_PORT)
    is_place = host and has_port if endpoint.startswith(TCP) else endpoint != IPC
    if not is_place or not endpoint.isprintable():
        raise WorldError(f"world: {what} is {endpoint!r}, but that names no place. Give tcp://host:port or ipc://path.")
    if endpoint.startswith(IPC):
        return
    if joins and (host == "*" or port in ("*", "0")):
        raise WorldError(
            f"world: {what} is {endpoint!r}, but a process that does not serve needs the host and port of the one that "
            "does. Give its world.address."
        )
    if what == "listen" and _is_anywhere(host):
        raise WorldError(
            f"world: listen is {endpoint!r}, but others need a host to connect to. Give an address of this host, e.g. "
            "tcp://127.0.0.1:0."
        )


def _is_anywhere(host: str) -> bool:
    """Whether a host means every address of this one: `*`, or zero in any way that it can be written."""
    if host == "*":
        return True
    try:
        return not any(socket.inet_pton(socket.AF_INET6, host.strip("[]")) if "[" in host else socket.inet_aton(host))
    except OSError:  # no number, but a name
        return False
