"""The portable executor on CPU devices: straight from source memory into registered memory.

Where bytes are copied unchanged in runs, NumPy copies them from shard to shard, with nothing in between. Other moves go
through a jitted program on the source's device that gathers, transposes and converts, and whose output is then copied
into place. Writing goes through the buffer's address: donation would move a buffer of which somebody holds a NumPy view.

Workers claim moves in global order from one counter. Moves of one hop are done before the next hop starts, so a forward
finds what it forwards.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from shardfly_jax.executors import convert
from shardfly_jax.executors.memory import Key, Shard, Sources, host_bytes
from shardfly_jax.executors.strided import Region, region
from shardfly_jax.sharding.formats import Conversion, itemsize, np_dtype
from shardfly_jax.sharding.moves import View, move_size, source_view, target_view
from shardfly_jax.sharding.plan import Plan
from shardfly_jax.sharding.schedule import CHUNK_NBYTES

LEAST_RUN_NBYTES = 64
"""Shorter contiguous runs are gathered by a compiled program: NumPy's cost per run would dominate."""
LEAST_COMPILED_SIZE = 4096
"""Smaller moves are not worth a program of their own, elements."""


@dataclasses.dataclass(slots=True)
class _Copy:
    """Bytes copied unchanged between two buffers, or filled in.

    Attributes:
      source: Key of the buffer that is read; None for a fill.
      view: What is read of it.
      target: NumPy view of what is written.
      conversion: Applied in NumPy; bits for plain copies.
    """

    source: Key | None
    view: View
    target: np.ndarray
    conversion: Conversion


@dataclasses.dataclass(slots=True)
class _Compiled:
    """A gather-and-convert program whose output is copied to `target`."""

    source: Key
    program: Callable[..., jax.Array]
    starts: np.ndarray
    target: np.ndarray


class HostExecutor:
    """Runs a plan whose ranks all live on CPU devices of this process.

    Args:
      plan: The plan.
      buffers: Registered shards of all target families.
      source_shapes: Local shape and device of every source shard.
    """

    def __init__(self, plan: Plan, buffers: Mapping[Key, Shard], source_shapes: Callable[[Key], tuple[tuple[int, ...], jax.Device]]):
        self.plan, self.buffers, self.source_shapes = plan, buffers, source_shapes
        self._targets = {key: host_bytes(shard.address, shard.nbytes) for key, shard in buffers.items()}
        self._n_workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._workers = ThreadPoolExecutor(self._n_workers, thread_name_prefix="shardfly")
        self._read: set[Key] = set()
        self._programs: dict[Any, Callable[..., jax.Array]] = {}
        self.hops: list[list[_Copy | _Compiled]] = []
        rows, ks = plan.moves.expanded()
        moves = list(plan.moves)
        for row, k in zip(rows.tolist(), ks.tolist(), strict=True):
            hop = moves[row].hop
            self.hops += [[] for _ in range(hop + 1 - len(self.hops))]
            self.hops[hop] += self._items(moves[row], k)

    def _items(self, move: Any, k: int) -> list[_Copy | _Compiled]:
        target_key = (move.target_family, move.target_tensor + k * move.target_tensor_step, move.target_rank)
        conversion = self.plan.conversions[move.convert]
        flat = self._targets[target_key].view(np_dtype(conversion.target))
        view = target_view(move)
        if move.source_rank < 0:
            return [_Copy(None, view, view.of(flat), conversion)]
        source_key = (move.source_family, move.source_tensor + k * move.source_tensor_step, move.source_rank)
        read = source_view(move, k)
        if move.hop == 0:
            self._read.add(source_key)
        elif self.buffers[source_key].address == self.buffers[target_key].address:
            return []  # an alias that shares its buffer
        run_nbytes = max((n for n, a, b in zip(view.extents, read.strides, view.strides, strict=True) if a == b == 1), default=1) * flat.itemsize
        size = move_size(move)
        if (conversion.is_bits and run_nbytes >= LEAST_RUN_NBYTES) or size < LEAST_COMPILED_SIZE:
            return [_Copy(source_key, part, target.of(flat), conversion) for part, target in _chunks(read, view, size * flat.itemsize)]
        compiled = self._compiled(source_key, read, view.of(flat), conversion)
        return [compiled or _Copy(source_key, read, view.of(flat), conversion)]

    def _compiled(self, key: Key, view: View, target: np.ndarray, conversion: Conversion) -> _Compiled | None:
        shape, device = self.source_shapes(key)
        found = region(view, int(np.prod(shape)))
        if found is None:
            return None
        where, starts = found
        program_key = (where, shape, conversion, device)
        if program_key not in self._programs:
            self._programs[program_key] = _compile(where, shape, conversion, device)
        return _Compiled(key, self._programs[program_key], starts, target.view(convert.bits_dtype(target.itemsize)))

    def run(self, sources: Sources, progress: Callable[[int], None] | None = None) -> None:
        """Executes every move.

        Args:
          sources: Gives the array of each source shard; all are ready.
          progress: Called with the bytes written, from several threads.
        """
        arrays = {key: sources(*key) for key in self._read}
        flats = {key: host_bytes(array.unsafe_buffer_pointer(), array.nbytes) for key, array in arrays.items()}
        flats.update(self._targets)
        for items in self.hops:
            # one counter: `next` on it is atomic under the interpreter lock, and on free-threaded builds too
            counter = iter(items)
            claims = [self._workers.submit(self._work, counter, arrays, flats, progress) for _ in range(self._n_workers)]
            for claim in claims:
                claim.result()

    def _work(
        self, items: Iterable[_Copy | _Compiled], arrays: Mapping[Key, jax.Array], flats: Mapping[Key, np.ndarray], progress: Callable[[int], None] | None
    ) -> None:
        for item in items:
            if isinstance(item, _Compiled):
                out = item.program(arrays[item.source], item.starts).block_until_ready()
                value = host_bytes(out.unsafe_buffer_pointer(), out.nbytes).view(item.target.dtype).reshape(item.target.shape)
                np.copyto(item.target, value)
            elif item.source is None:
                item.target[...] = item.conversion.apply(np.empty(item.target.shape, item.target.dtype))
            else:
                value = item.view.of(flats[item.source].view(np_dtype(item.conversion.source)))
                if item.conversion.is_bits:
                    bits = convert.bits_dtype(item.target.itemsize)
                    np.copyto(item.target.view(bits), value.view(bits))
                else:
                    np.copyto(item.target, item.conversion.apply(value))
            if progress is not None:
                progress(item.target.nbytes)


def _chunks(read: View, write: View, nbytes: int) -> Iterable[tuple[View, View]]:
    """Cuts a copy along its outermost dimension into parts that workers can share."""
    parts = min(-(-nbytes // CHUNK_NBYTES), write.extents[0]) if write.extents else 1
    if parts <= 1:
        return [(read, write)]
    edges = [k * write.extents[0] // parts for k in range(parts + 1)]
    return [
        tuple(View(v.offset + lo * v.strides[0], (hi - lo, *v.extents[1:]), v.strides) for v in (read, write))  # type: ignore[misc]
        for lo, hi in itertools.pairwise(edges)
    ]


def _compile(where: Region, shape: tuple[int, ...], conversion: Conversion, device: jax.Device) -> Callable[..., jax.Array]:
    placed = functools.partial(jax.ShapeDtypeStruct, sharding=SingleDeviceSharding(device))

    def gather(x: jax.Array, starts: jax.Array) -> jax.Array:
        flat = x.reshape(-1)
        if conversion.is_bits:
            return where.read(convert.as_bits(flat), starts)
        return convert.apply(conversion, where.read(flat, starts))

    source = placed(shape, jnp.dtype(conversion.source))
    return jax.jit(gather).lower(source, placed((len(where.radices),), jnp.int32)).compile()


def payload_itemsize(conversion: Conversion) -> int:
    """Bytes per element after conversion."""
    return itemsize(conversion.target)
