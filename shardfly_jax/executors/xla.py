"""The portable executor on accelerators: gather and convert on the source's device, copy, scatter in place.

Registered buffers are donated to the scatter, which XLA runs in place; a buffer that moved all the same is found by its
pointer and refused. JAX orders every step behind earlier readers of the same arrays.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardfly_jax.executors import convert
from shardfly_jax.executors.memory import Key, Shard, Sources, nothing_left
from shardfly_jax.executors.strided import Region, indices, region
from shardfly_jax.sharding.errors import StaleBuffer
from shardfly_jax.sharding.finiteness import not_finite
from shardfly_jax.sharding.formats import NOT_FINITE, Conversion, ToScale
from shardfly_jax.sharding.layouts import dense_strides
from shardfly_jax.sharding.moves import (
    Move,
    View,
    packed_axis,
    reduced_axes,
    source_key,
    source_view,
    target_key,
    target_view,
)
from shardfly_jax.sharding.plan import Plan, slot_key, staging_sizes


class XlaExecutor:
    """Runs a plan whose ranks all live in this process.

    Args:
      plan: The plan.
      buffers: Registered shards of all target families; their arrays are replaced by each run.
    """

    alignment = 1
    in_order = False
    kernels = compiled = 0

    def __init__(self, plan: Plan, buffers: Mapping[Key, Shard]):
        self.plan, self.buffers = plan, buffers
        self._order = list(plan.moves.in_order())
        self._staging = staging_sizes(plan)

    def start(self, sources: Sources, progress: Callable[[int], None] | None = None) -> Callable[[], None]:
        """Executes every move; see `Executor`.

        Raises:
          StaleBuffer: XLA moved a buffer, because somebody holds a view of it.
          NotFinite: A tensor to be quantized holds NaN or infinity.
        """
        arrays = {shard.address: shard.array for shard in self.buffers.values()}  # aliases share one
        try:
            self._run(arrays, sources, progress)
            jax.block_until_ready(list(arrays.values()))
        finally:  # donated arrays are gone also if the update failed: keep the ones that took their place
            for shard in self.buffers.values():
                shard.array = arrays[shard.address]
        moved = [key for key, shard in self.buffers.items() if shard.array.unsafe_buffer_pointer() != shard.address]
        if moved:
            family, tensor, rank = moved[0]
            raise StaleBuffer(
                f"buffer: {self.plan.families[family].name(tensor)!r} of rank {rank} and {len(moved) - 1} more moved "
                "during the update, because something holds a view of their memory. Drop np.asarray and dlpack views "
                "of rollout params, then register again."
            )
        return nothing_left

    def _run(self, arrays: dict[int, jax.Array], sources: Sources, progress: Callable[[int], None] | None) -> None:
        staging: dict[Key, jax.Array] = {}
        watched: list[tuple[Key, jax.Array]] = []
        for move, k in self._order:
            conversion = self.plan.conversions[move.convert]
            written, key = _without_reduced(target_view(move)), target_key(move, k)
            if key in self._staging:
                piece, _ = self._converted(self._source(move, k, arrays, staging, sources), move, k, None)
                if key not in staging:  # on the device of the first shard that is reduced
                    zeros = np.zeros(self._staging[key], np.uint32)
                    staging[key] = jax.device_put(zeros, next(iter(piece.devices())))
                piece = jax.device_put(piece.reshape(written.extents), next(iter(staging[key].devices())))
                staging[key] = _scatter(staging[key], written, _larger(_gather(staging[key], written, _SLOTS), piece))
                continue
            target = self.buffers[key]
            if move.source_rank < 0 and conversion.encodes is None and not conversion.reduces:
                piece = _fill(written.extents, conversion, target.device)
            elif move.hop and self.buffers[source_key(move, k)].address == target.address:
                if progress is not None:
                    progress(self.plan.move_nbytes(move))
                continue
            else:
                amax = None
                if move.block >= 0 and (block := self.plan.blocks[move.block]).family >= 0:
                    blocks = tuple(n if step else 1 for n, step in zip(move.extents, block.strides, strict=True))
                    view = View(block.offset, blocks, block.strides)
                    amax = _gather(staging[slot_key(self.plan, move, k)], view, _SLOTS)
                piece, worst = self._converted(self._source(move, k, arrays, staging, sources), move, k, amax)
                if worst is not None:
                    watched.append((key, worst))
                piece = jax.device_put(piece.reshape(written.extents), target.device)
            arrays[target.address] = _scatter(arrays[target.address], written, piece)
            if progress is not None:
                progress(self.plan.move_nbytes(move))
        for (family, tensor, _), worst in zip(
            [key for key, _ in watched], jax.device_get([worst for _, worst in watched]), strict=True
        ):
            if worst >= NOT_FINITE:
                raise not_finite(self.plan.families[family], tensor)

    def _source(
        self, move: Move, k: int, arrays: dict[int, jax.Array], staging: dict[Key, jax.Array], sources: Sources
    ) -> jax.Array | None:
        """What a move reads; None for a fill."""
        if move.source_rank < 0:
            return None
        key = source_key(move, k)
        if key in self._staging:
            return staging[key]
        return arrays[self.buffers[key].address] if move.hop else sources[key]

    def _converted(
        self, source: jax.Array | None, move: Move, k: int, amax: jax.Array | None
    ) -> tuple[jax.Array, jax.Array | None]:
        """The bits that a move writes, on its source's device, and the largest `amax` that a scale was made of."""
        conversion = self.plan.conversions[move.convert]
        within = reduced_axes(move)
        if move.block >= 0:
            within = tuple(axis for axis, step in enumerate(self.plan.blocks[move.block].strides) if not step)
        if source is None:  # a filled block that is quantized
            source = jnp.zeros(move.extents, conversion.source)
            view = View(0, move.extents, dense_strides(move.extents))
        else:
            view = source_view(move, k)
        if conversion.encodes is None and not conversion.reduces and not _makes_scales(conversion):
            return _gather(source, view, conversion), None
        if amax is not None:
            amax = jax.device_put(amax, next(iter(source.devices())))
        return _gather_watched(source, view, conversion, within, packed_axis(move), amax)


def _without_reduced(view: View) -> View:
    """What is written, without the axes that are reduced over."""
    kept = [(n, step) for n, step in zip(view.extents, view.strides, strict=True) if step]
    return View(view.offset, tuple(n for n, _ in kept), tuple(step for _, step in kept))


_SLOTS = Conversion("uint32", (), "uint32")


def _makes_scales(conversion: Conversion) -> bool:
    return any(isinstance(step, ToScale) for step in conversion.steps)


@jax.jit
def _larger(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.maximum(x, y)


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4), compiler_options=convert.EXACT)
def _watched_region(
    x: jax.Array, where: Region, rule: Conversion, within: tuple[int, ...], packed: int, starts: jax.Array, amax: Any
) -> tuple[jax.Array, jax.Array]:
    return convert.apply_watched(rule, where.read(x.reshape(-1), starts), within, amax, packed)


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4), compiler_options=convert.EXACT)
def _watched_elements(
    x: jax.Array, view: View, rule: Conversion, within: tuple[int, ...], packed: int, amax: Any
) -> tuple[jax.Array, jax.Array]:
    return convert.apply_watched(rule, _elements(x, view), within, amax, packed)


def _gather_watched(
    x: jax.Array, view: View, rule: Conversion, within: tuple[int, ...], packed: int, amax: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    found = region(view, x.size)
    if found is None:
        return _watched_elements(x, view, rule, within, packed, amax)
    where, starts = found
    return _watched_region(x, where, rule, within, packed, starts, amax)


def _elements(x: jax.Array, view: View) -> jax.Array:
    lo, hi = _reach(view)
    return lax.slice(x.reshape(-1), (lo,), (hi,))[indices(view.extents, view.strides)]


@functools.partial(jax.jit, static_argnums=(1, 2), compiler_options=convert.EXACT)
def _gather_region(x: jax.Array, where: Region, conversion: Conversion, starts: jax.Array) -> jax.Array:
    flat = x.reshape(-1)
    if conversion.is_bits:
        return where.read(convert.as_bits(flat), starts)
    return convert.apply(conversion, where.read(flat, starts))


@functools.partial(jax.jit, static_argnums=(1, 2), compiler_options=convert.EXACT)
def _gather_elements(x: jax.Array, view: View, conversion: Conversion) -> jax.Array:
    return convert.apply(conversion, _elements(x, view))


def _gather(x: jax.Array, view: View, conversion: Conversion) -> jax.Array:
    found = region(view, x.size)
    if found is None:
        return _gather_elements(x, view, conversion)
    where, starts = found
    return _gather_region(x, where, conversion, starts)


def _reach(view: View) -> tuple[int, int]:
    spans = [(n - 1) * step for n, step in zip(view.extents, view.strides, strict=True)]
    return view.offset + sum(s for s in spans if s < 0), view.offset + sum(s for s in spans if s > 0) + 1


@functools.partial(jax.jit, static_argnums=(1,), donate_argnums=(0,))
def _scatter_region(x: jax.Array, where: Region, starts: jax.Array, piece: jax.Array) -> jax.Array:
    flat = where.write(x.reshape(-1), starts, _values(piece, x.dtype))
    return flat.reshape(x.shape)


@functools.partial(jax.jit, static_argnums=(1,), donate_argnums=(0,))
def _scatter_elements(x: jax.Array, view: View, piece: jax.Array) -> jax.Array:
    index = indices(view.extents, view.strides) + _reach(view)[0]
    return x.reshape(-1).at[index].set(_values(piece, x.dtype), unique_indices=True).reshape(x.shape)


def _scatter(x: jax.Array, view: View, piece: jax.Array) -> jax.Array:
    found = region(view, x.size)
    if found is None:
        return _scatter_elements(x, view, piece)
    where, starts = found
    return _scatter_region(x, where, starts, piece)


def _values(bits: jax.Array, dtype: Any) -> jax.Array:
    return bits.astype(jnp.bool_) if dtype == jnp.bool_ else lax.bitcast_convert_type(bits, dtype)


@functools.cache
def _fill(extents: tuple[int, ...], conversion: Conversion, device: jax.Device) -> jax.Array:
    bits = conversion.apply(np.empty(extents, np.uint8))
    return jax.device_put(bits.view(convert.bits_dtype(bits.itemsize)), device)
