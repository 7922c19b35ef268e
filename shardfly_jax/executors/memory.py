"""Local buffers: JAX arrays at fixed addresses, and NumPy views of host memory at an address."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax._src.lib import xla_client

from shardfly_jax.sharding.moves import Key as Key

wait_for: Callable[[list[jax.Array]], object] = getattr(xla_client, "batched_block_until_ready", jax.block_until_ready)
"""Blocks until arrays are computed. `jax.block_until_ready` does the same, but asks of each leaf first whether it is an
array, which takes three times as long as the rest."""
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


class Sources(Mapping[Key, jax.Array]):
    """The single-device array that holds each source shard.

    Args:
      places: Of the shards among the arrays: the same object in every update of the same params, so that what is
        computed from it can be kept.
      arrays: All of them.
    """

    def __init__(self, places: Mapping[Key, int], arrays: Sequence[jax.Array]):
        self.places, self.arrays = places, arrays

    def __getitem__(self, key: Key) -> jax.Array:
        return self.arrays[self.places[key]]

    def __iter__(self) -> Iterator[Key]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)

    @functools.cached_property
    def addresses(self) -> np.ndarray:
        """int64 address of each array. Asking an array costs half a microsecond, so it is done once per update."""
        return np.array([array.unsafe_buffer_pointer() for array in self.arrays], np.int64)

    def address(self, key: Key) -> int:
        """Where a shard is."""
        return int(self.addresses[self.places[key]])


def memory_of(device: jax.Device) -> str:
    """Name of a device's memory."""
    return HOST if device.platform == "cpu" else str(device)


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
        return MemoryRange(memory_of(self.device), self.address, self.address + self.nbytes)

    @classmethod
    def of(cls, array: jax.Array) -> Shard:
        """The buffer of a single-device array."""
        (device,) = array.devices()
        return cls(array, array.unsafe_buffer_pointer(), array.nbytes, device)


def fresh_handle(array: jax.Array) -> jax.Array:
    """A new array over the same memory, which keeps host copies of its own."""
    return array.clone()  # type: ignore[attr-defined]  # building one anew takes six times as long


def nothing_left() -> None:
    """What an executor returns that has done all its work when it was started."""


class Occupied:
    """The memory of registered buffers, made for asking often whether arrays lie in it.

    Args:
      shards: Their ranges are disjoint or equal, as registration has checked.
    """

    def __init__(self, shards: Mapping[Key, Shard]):
        by_memory: dict[str, list[tuple[int, int, Key]]] = {}
        for key, shard in shards.items():
            if shard.nbytes:
                where = shard.range
                by_memory.setdefault(where.memory, []).append((where.start, where.stop, key))
        self._memories = {}
        for memory, ranges in by_memory.items():
            ranges.sort()
            bounds = np.array([r[:2] for r in ranges], np.int64)
            self._memories[memory] = (bounds[:, 0], bounds[:, 1], [r[2] for r in ranges])

    def first_overlap(self, memory: str, first: np.ndarray, nbytes: np.ndarray) -> tuple[int, Key] | None:
        """Which of some ranges shares addresses with a buffer, and with which; None if there is none.

        Args:
          memory: That they are in.
          first: int64 addresses.
          nbytes: int64 lengths.
        """
        if memory not in self._memories:
            return None
        starts, stops, owners = self._memories[memory]
        near = np.searchsorted(stops, first, side="right")
        shared = (near < len(starts)) & (starts[np.minimum(near, len(starts) - 1)] < first + nbytes) & (nbytes > 0)
        k = int(shared.argmax()) if len(shared) else 0
        return (k, owners[near[k]]) if shared.any() else None


def host_bytes(address: int, nbytes: int) -> np.ndarray:
    """uint8 view of host memory; the caller keeps its owner alive."""
    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), np.uint8)


def hold(arrays: Iterable[jax.Array]) -> list[np.ndarray]:
    """Views that keep the memory of arrays on CPU devices.

    While they live, JAX copies an array that a computation donates, instead of letting the result take its memory.
    Arrays on other devices are left alone.
    """
    on_cpu = [array for array in arrays if all(device.platform == "cpu" for device in array.devices())]
    return [np.asarray(fresh_handle(array)) for array in on_cpu]


def wait_for_readers(devices: set[jax.Device]) -> bool:
    """Blocks until computations that may read arrays on these devices have ended: all of their platform, and copies.

    JAX does not say which computations read a buffer, but whatever they compute is alive and not ready, or has gone and
    matters to nobody; effects (callbacks, prints) have a fence of their own, which knows those of the calling thread.
    Errors of others' computations are theirs.

    Returns:
      Whether all arrays there, and those on CPU devices, have been computed without an error.
    """
    jax.effects_barrier()
    well = True
    for platform in {device.platform for device in devices} | {"cpu"}:  # copies to the host are there
        try:
            alive = jax.live_arrays(platform)
        except RuntimeError:  # JAX_PLATFORMS leaves the CPU out
            continue
        try:
            wait_for(alive)
        except (RuntimeError, ValueError):  # somebody's, so wait for each of the others
            well = False
            for array in alive:
                with contextlib.suppress(RuntimeError, ValueError):
                    array.block_until_ready()
    return well
