"""Buffers of this process that others can map: a few pieces of GPU memory, with JAX arrays in them."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from shardfly_jax.buffers import ALIGNMENT, Wanted
from shardfly_jax.executors.foreign import array_at
from shardfly_jax.executors.persistent import can_reach
from shardfly_jax.transports.vmm import SharedMemory


class Heap:
    """Allocates; pieces live as long as some array lies in them."""

    def __init__(self) -> None:
        self._pieces: weakref.WeakSet[SharedMemory] = weakref.WeakSet()

    def allocate(self, wanted: Sequence[Wanted]) -> list[jax.Array]:
        """Zeroed arrays, those of one device in one piece of memory.

        Args:
          wanted: What is needed.

        Raises:
          RegistrationError: The driver has no memory, or JAX does not adopt it.
        """
        offsets: list[int] = []
        sizes: dict[jax.Device, int] = {}
        for one in wanted:
            start = sizes.get(one.device, 0)
            offsets.append(start)
            sizes[one.device] = start + -(-one.nbytes // ALIGNMENT) * ALIGNMENT
        pieces = {
            device: SharedMemory(device.local_hardware_id, nbytes, _peers(device)) for device, nbytes in sizes.items()
        }
        self._pieces.update(pieces.values())
        return [
            array_at(pieces[one.device].address + offset, one.shape, one.dtype, one.device, pieces[one.device])
            for one, offset in zip(wanted, offsets, strict=True)
        ]

    def words(self, device: jax.Device, count: int) -> jax.Array:
        """Zeroed int32 words."""
        return self.allocate([Wanted((count,), np.dtype(np.int32), device)])[0]

    def holds(self, array: Any) -> bool:
        """Whether an array of one device lies here."""
        return self._piece_of(array.unsafe_buffer_pointer()) is not None

    def located(self, addresses: Sequence[int]) -> tuple[list[SharedMemory], list[tuple[int, int]]]:
        """Where addresses are: the pieces, and for each address its piece and the offset in it."""
        pieces: dict[SharedMemory, int] = {}
        places = []
        for address in addresses:
            piece = self._piece_of(address)
            assert piece is not None
            places.append((pieces.setdefault(piece, len(pieces)), address - piece.address))
        return list(pieces), places

    def _piece_of(self, address: int) -> SharedMemory | None:
        return next((p for p in self._pieces if p.address <= address < p.address + p.nbytes), None)


@functools.cache
def process_heap() -> Heap:
    """That of this process: buffers outlive the world that they were allocated for, and serve in the next one."""
    return Heap()


def _peers(device: jax.Device) -> list[int]:
    """The other devices of this process that reach one: unlike JAX's memory, a piece is theirs only if one says so."""
    others = (one.local_hardware_id for one in jax.local_devices(backend=device.platform))
    return [one for one in others if one != device.local_hardware_id and can_reach(one, device.local_hardware_id)]
