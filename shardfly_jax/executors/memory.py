"""Local buffers: JAX arrays at fixed addresses, and NumPy views of host memory at an address."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import jax
import numpy as np

from shardfly_jax.sharding.moves import Key as Key

Sources = Callable[[int, int, int], jax.Array]
"""The single-device array that holds a source shard."""


HOST = "host"
"""The memory that all CPU devices share."""


class MemoryRange(NamedTuple):
    """Half-open range of addresses in one memory: `HOST`, or a device's own."""

    memory: str
    start: int
    stop: int


def overlaps[T](
    ranges: Iterable[tuple[MemoryRange, T]],
) -> Iterator[tuple[tuple[MemoryRange, T], tuple[MemoryRange, T]]]:
    """Pairs of ranges that share addresses; each range is paired with the one before it that reaches furthest."""
    furthest: tuple[MemoryRange, T] | None = None
    for item in sorted(ranges, key=lambda r: r[0]):
        where = item[0]
        if furthest is not None and furthest[0].memory == where.memory and where.start < furthest[0].stop:
            yield furthest, item
        if furthest is None or furthest[0].memory != where.memory or where.stop > furthest[0].stop:
            furthest = item


@dataclasses.dataclass(slots=True)
class Shard:
    """A registered buffer.

    Attributes:
      array: Single-device array that lives in it. Only its memory counts: its value changes under it.
      address, nbytes: Where it is.
      device: Where that is.
    """

    array: jax.Array
    address: int
    nbytes: int
    device: jax.Device

    @property
    def range(self) -> MemoryRange:
        """Where it lies."""
        memory = HOST if self.device.platform == "cpu" else str(self.device)
        return MemoryRange(memory, self.address, self.address + self.nbytes)

    @classmethod
    def of(cls, array: jax.Array) -> Shard:
        """The buffer of a single-device array."""
        (device,) = array.devices()
        return cls(array, array.unsafe_buffer_pointer(), array.nbytes, device)


def host_bytes(address: int, nbytes: int) -> np.ndarray:
    """uint8 view of host memory; the caller keeps its owner alive."""
    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), np.uint8)


def wait_for_readers(devices: set[jax.Device]) -> None:
    """Blocks until computations that may read arrays on these devices have ended: all of their platform.

    JAX does not say which computations read a buffer, but whatever they compute is alive and not ready, or has gone and
    matters to nobody; effects (callbacks, prints) have their own fence. Errors of others' computations are theirs.
    """
    jax.effects_barrier()
    for platform in {device.platform for device in devices}:
        for array in jax.live_arrays(platform):
            if not array.is_deleted() and not array.is_ready():
                try:
                    array.block_until_ready()
                except (RuntimeError, ValueError):
                    continue
