"""The portable executor on CPU devices: straight from source memory into registered memory.

Every move is one strided, converting copy between two shards, with no program to compile and no buffer in between.
Writing goes through the buffer's address: donation would move a buffer of which somebody holds a NumPy view.

Workers claim moves in global order from one counter. Moves of one hop are done before the next hop starts, so a forward
finds what it forwards.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait

import jax
import numpy as np

from shardfly_jax.executors import hostquantize
from shardfly_jax.executors.memory import Key, Shard, Sources, host_bytes, nothing_left
from shardfly_jax.sharding.errors import NotFinite
from shardfly_jax.sharding.finiteness import not_finite
from shardfly_jax.sharding.formats import Conversion, np_dtype
from shardfly_jax.sharding.moves import (
    Move,
    View,
    move_size,
    reduced_axes,
    source_key,
    source_view,
    target_key,
    target_view,
)
from shardfly_jax.sharding.plan import Plan, slot_key, staging_sizes
from shardfly_jax.sharding.schedule import CHUNK_NBYTES


@dataclasses.dataclass(slots=True)
class _Item:
    """One chunk of one move.

    Attributes:
      source: Buffer that is read; None for a fill.
      view: What is read of it.
      target: What is written, as a view of registered memory or of staging.
      key: Of the target.
      within: Axes inside a block, of a conversion that quantizes.
      slots: The maxima of each element's block; None if they are found here.
      merges: Whether the target keeps the larger of what it holds and what is written: slots do.
    """

    source: Key | None
    view: View
    target: np.ndarray
    conversion: Conversion
    key: Key
    within: tuple[int, ...] = ()
    slots: np.ndarray | None = None
    merges: bool = False


class HostExecutor:
    """Runs a plan whose ranks all live on CPU devices of this process.

    Args:
      plan: The plan.
      buffers: Registered shards of all target families.
    """

    alignment = 1
    in_order = False
    kernels = compiled = 0

    def __init__(self, plan: Plan, buffers: Mapping[Key, Shard]):
        self.plan, self.buffers = plan, buffers
        self._targets = {key: host_bytes(shard.address, shard.nbytes) for key, shard in buffers.items()}
        self._n_workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._workers = ThreadPoolExecutor(self._n_workers, thread_name_prefix="shardfly")
        self._read: set[Key] = set()
        self._shared_nbytes = 0
        self._hops: list[list[_Item]] = []
        self._staging = {key: np.zeros(size, np.uint32) for key, size in staging_sizes(plan).items()}
        self._merging = threading.Lock()
        for move, k in plan.moves.in_order():
            stage = 0 if target_key(move, k) in self._staging else move.hop + 1  # slots are full before they are read
            self._hops += [[] for _ in range(stage + 1 - len(self._hops))]
            self._hops[stage] += self._items(move, k)

    def _items(self, move: Move, k: int) -> Iterator[_Item]:
        source, target = source_key(move, k), target_key(move, k)
        conversion = self.plan.conversions[move.convert]
        merges = target in self._staging
        flat = self._staging[target] if merges else self._targets[target].view(np_dtype(conversion.target))
        write = target_view(move)
        if move.hop == 0 and move.source_rank >= 0 and source not in self._staging:
            self._read.add(source)
        if conversion.reduces or conversion.encodes is not None:
            yield self._quantizing(move, k, write.of(flat), conversion, merges)
            return
        if move.source_rank < 0:
            yield _Item(None, write, write.of(flat), conversion, target)
            return
        if move.hop and self.buffers[source].address == self.buffers[target].address:
            self._shared_nbytes += self.plan.move_nbytes(move)
            return  # an alias that shares its buffer
        for read, part in chunks((source_view(move, k), write), move_size(move) * flat.itemsize):
            yield _Item(source, read, part.of(flat), conversion, target)

    def _quantizing(self, move: Move, k: int, target: np.ndarray, conversion: Conversion, merges: bool) -> _Item:
        within, slots = reduced_axes(move), None
        if move.block >= 0:
            block = self.plan.blocks[move.block]
            within = tuple(axis for axis, step in enumerate(block.strides) if not step)
            if block.family >= 0:
                view = View(block.offset, move.extents, block.strides)
                slots = view.of(self._staging[slot_key(self.plan, move, k)])
        source = source_key(move, k) if move.source_rank >= 0 else None
        key = target_key(move, k)
        return _Item(source, source_view(move, k), target, conversion, key, within, slots, merges)

    def start(self, sources: Sources, progress: Callable[[int], None] | None = None) -> Callable[[], None]:
        """Executes every move; see `Executor`.

        Raises:
          NotFinite: A tensor to be quantized holds NaN or infinity.
        """
        for slots in self._staging.values():
            slots[...] = 0
        arrays = {key: sources[key] for key in self._read}
        flats = {key: host_bytes(sources.address(key), array.nbytes) for key, array in arrays.items()}
        flats.update(self._targets)
        flats.update(self._staging)
        if progress is not None and self._shared_nbytes:
            progress(self._shared_nbytes)
        for items in self._hops:
            self._run_hop(items, flats, progress)
        return nothing_left

    def _run_hop(
        self, items: list[_Item], flats: Mapping[Key, np.ndarray], progress: Callable[[int], None] | None
    ) -> None:
        claims = iter(items)  # the counter: advancing a list iterator is atomic
        workers = [self._workers.submit(self._work, claims, flats, progress) for _ in range(self._n_workers)]
        try:
            for worker in workers:
                worker.result()
        finally:
            _finish(claims, workers)

    def _work(
        self, items: Iterator[_Item], flats: Mapping[Key, np.ndarray], progress: Callable[[int], None] | None
    ) -> None:
        for item in items:
            try:
                self._do(item, flats)
            except NotFinite:
                family, tensor, _ = item.key
                raise not_finite(self.plan.families[family], tensor) from None
            if progress is not None and not item.merges:
                progress(item.target.nbytes)

    def _do(self, item: _Item, flats: Mapping[Key, np.ndarray]) -> None:
        conversion, dtype = item.conversion, np_dtype(item.conversion.source)
        if item.source is None:
            source = np.empty(item.view.extents, dtype)
        else:
            source = item.view.of(flats[item.source].view(dtype))
        if item.merges:
            found = hostquantize.amax(source, conversion, item.within)
            with self._merging:
                np.maximum(item.target, found, out=item.target)
        else:
            hostquantize.write(item.target, source, conversion, item.within, item.slots)


def _finish(claims: Iterator[_Item], workers: list[Future[None]]) -> None:
    """After an error nobody may write any more: leaves nothing to claim and waits for what is under way.

    Not to be hurried: an update that is interrupted again still waits, and is interrupted once it is safe.
    """
    interrupted = False
    while True:
        try:
            for _ in claims:
                pass
            wait(workers)
            break
        except KeyboardInterrupt:
            interrupted = True
    if interrupted:
        raise KeyboardInterrupt


def chunks(views: tuple[View, ...], nbytes: int, axis: int = 0) -> Iterator[tuple[View, ...]]:
    """Cuts views of one shape along one dimension into parts that workers can share.

    Args:
      views: What a move reads and writes, and what else goes with each of its elements.
      nbytes: Of the largest; parts have about `CHUNK_NBYTES`.
      axis: The dimension; the outermost one makes the longest runs.
    """
    extents = views[0].extents
    parts = min(-(-nbytes // CHUNK_NBYTES), extents[axis]) if extents else 1
    edges = [k * extents[axis] // parts for k in range(parts + 1)] if parts > 1 else []
    if not edges:
        yield views
    for lo, hi in itertools.pairwise(edges):
        yield tuple(
            View(v.offset + lo * v.strides[axis], (*v.extents[:axis], hi - lo, *v.extents[axis + 1 :]), v.strides)
            for v in views
        )


def is_host(devices: set[jax.Device]) -> bool:
    """Whether this executor can reach all of these devices' memory."""
    return all(device.platform == "cpu" for device in devices)
