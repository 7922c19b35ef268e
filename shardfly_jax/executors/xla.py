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
from shardfly_jax.sharding.formats import Conversion
from shardfly_jax.sharding.moves import View, source_key, source_view, target_key, target_view
from shardfly_jax.sharding.plan import Plan


class XlaExecutor:
    """Runs a plan whose ranks all live in this process.

    Args:
      plan: The plan.
      buffers: Registered shards of all target families; their arrays are replaced by each run.
    """

    alignment = 1

    def __init__(self, plan: Plan, buffers: Mapping[Key, Shard]):
        self.plan, self.buffers = plan, buffers
        self._order = list(plan.moves.in_order())

    def start(self, sources: Sources, progress: Callable[[int], None] | None = None) -> Callable[[], None]:
        """Executes every move; see `Executor`.

        Raises:
          StaleBuffer: XLA moved a buffer, because somebody holds a view of it.
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
        for move, k in self._order:
            target = self.buffers[target_key(move, k)]
            conversion = self.plan.conversions[move.convert]
            written = target_view(move)
            if move.source_rank < 0:
                piece = _fill(written.extents, conversion, target.device)
            else:
                key = source_key(move, k)
                if move.hop and self.buffers[key].address == target.address:
                    if progress is not None:
                        progress(self.plan.move_nbytes(move))
                    continue
                source = arrays[self.buffers[key].address] if move.hop else sources[key]
                piece = jax.device_put(_gather(source, source_view(move, k), conversion), target.device)
            arrays[target.address] = _scatter(arrays[target.address], written, piece)
            if progress is not None:
                progress(self.plan.move_nbytes(move))


@functools.partial(jax.jit, static_argnums=(1, 2), compiler_options=convert.EXACT)
def _gather_region(x: jax.Array, where: Region, conversion: Conversion, starts: jax.Array) -> jax.Array:
    flat = x.reshape(-1)
    if conversion.is_bits:
        return where.read(convert.as_bits(flat), starts)
    return convert.apply(conversion, where.read(flat, starts))


@functools.partial(jax.jit, static_argnums=(1, 2), compiler_options=convert.EXACT)
def _gather_elements(x: jax.Array, view: View, conversion: Conversion) -> jax.Array:
    lo, hi = _reach(view)
    values = lax.slice(x.reshape(-1), (lo,), (hi,))[indices(view.extents, view.strides)]
    return convert.apply(conversion, values)


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
