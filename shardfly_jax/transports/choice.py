"""Which transports can carry payload between processes, and why not the others."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

import jax


def why_not_zmq(devices: Iterable[jax.Device]) -> str | None:
    """Why chunks cannot travel over sockets to and from these devices; None if they can."""
    if importlib.util.find_spec("zmq") is None:
        return "pyzmq is not installed (pip install 'shardfly-jax[zmq]')"
    return _why_not_host(devices)


def _why_not_host(devices: Iterable[jax.Device]) -> str | None:
    other = sorted({str(device) for device in devices if device.platform != "cpu"})
    return f"{', '.join(other)} is no CPU device, and only host memory is read and written so far" if other else None


STARTED_BY_MPI = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK")
"""Variables by which launchers of MPI jobs are known, without starting MPI here."""


def why_not_mpi(devices: Iterable[jax.Device]) -> str | None:
    """Why chunks cannot travel over MPI to and from these devices; None if they can."""
    missing = [name for name in ("mpi4jax", "mpi4py") if importlib.util.find_spec(name) is None]
    if missing:
        return f"{' and '.join(missing)} cannot be imported (make setup-mpi builds mpi4jax)"
    if not any(name in os.environ for name in STARTED_BY_MPI):
        return "this process was not started by mpirun"
    return _why_not_host(devices)


def why_not_ipc(devices: Iterable[jax.Device]) -> str | None:
    """Why processes cannot write straight into each other's memory of these devices; None if they can, on one host."""
    devices = list(devices)
    other = sorted({str(device) for device in devices if device.platform != "gpu"})
    if other or not devices:
        return f"{', '.join(other) or 'nothing here'} is no GPU"
    if sys.platform != "linux":
        return "it needs Linux, whose sockets carry descriptors of memory"
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        return "cuda-bindings is not installed (pip install 'shardfly-jax[gpu]')"
    return None


def why_not_nvshmem(devices: Iterable[jax.Device]) -> str | None:
    """Why chunks cannot travel over NVSHMEM's symmetric heap between these devices; None if they can."""
    missing = [name for name in ("nvshmem", "mpi4py", "cuda") if importlib.util.find_spec(name) is None]
    if missing:
        return f"{' and '.join(missing)} cannot be imported (pip install 'shardfly-jax[gpu]' mpi4py)"
    if not any(name in os.environ for name in STARTED_BY_MPI):
        return "this process was not started by mpirun"
    other = sorted({str(device) for device in devices if device.platform != "gpu"})
    return f"{', '.join(other)} is no GPU" if other else None


PROBES: Mapping[str, Callable[[Iterable[jax.Device]], str | None]] = MappingProxyType(
    {
        "ipc": why_not_ipc,
        "nvshmem": why_not_nvshmem,
        "zmq": why_not_zmq,
        "mpi": why_not_mpi,
    }
)
"""Transports between processes, fastest first: each says why it cannot reach some devices, or None."""


def choose(
    devices: Iterable[jax.Device], among: Iterable[str], known: Mapping[str, str] = MappingProxyType({})
) -> tuple[str | None, dict[str, str]]:
    """The fastest transport that reaches the devices of this process; None if there is none.

    Args:
      devices: Of its ranks.
      among: Those that its world has, fastest first.
      known: What speaks against some of them, besides.

    Returns:
      Its name, and the reasons against those that were passed over.
    """
    devices = list(devices)
    reasons: dict[str, str] = {}
    for name in among:
        reason = PROBES[name](devices) or known.get(name)
        if reason is None:
            return name, reasons
        reasons[name] = reason
    return None, reasons
