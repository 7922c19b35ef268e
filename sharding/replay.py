"""Runs a plan's moves on NumPy buffers, one after the other: what the moves say, next to what the language means."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from shardfly_jax.sharding.errors import NotFinite
from shardfly_jax.sharding.finiteness import not_finite
from shardfly_jax.sharding.formats import np_dtype
from shardfly_jax.sharding.moves import (
    Key,
    View,
    packed_axis,
    reduced_axes,
    source_key,
    source_view,
    target_key,
    target_view,
)
from shardfly_jax.sharding.plan import Plan, slot_key, staging_sizes

Buffers = Callable[[int, int, int], np.ndarray]
"""Flat local buffer of (family, tensor, rank)."""


def replay(plan: Plan, buffers: Buffers, writes: Buffers | None = None) -> None:
    """Executes every expansion in global order.

    Args:
      plan: Any plan.
      buffers: Flat arrays of the families' dtypes; sources are read, targets are written.
      writes: If given, integer arrays of the targets' sizes that count how often each element was written.

    Raises:
      NotFinite: A block to be quantized holds NaN or infinity.
    """
    staging = {key: np.zeros(size, np.uint32) for key, size in staging_sizes(plan).items()}

    def buffer(key: Key) -> np.ndarray:
        return staging[key] if key in staging else buffers(*key)

    for move, k in plan.moves.in_order():
        key = target_key(move, k)
        conversion = plan.conversions[move.convert]
        target = target_view(move).of(buffer(key))
        if move.source_rank < 0:
            value = np.empty(move.extents, np_dtype(conversion.source))
        else:
            value = source_view(move, k).of(buffer(source_key(move, k)))
        within, amax = reduced_axes(move), None
        if move.block >= 0:
            block = plan.blocks[move.block]
            within = tuple(axis for axis, step in enumerate(block.strides) if not step)
            if block.family >= 0:
                amax = View(block.offset, move.extents, block.strides).of(staging[slot_key(plan, move, k)])
        try:
            done = conversion.apply(value, within, amax, packed_axis(move))
        except NotFinite:
            raise not_finite(plan.families[key[0]], key[1]) from None
        target[...] = np.maximum(target, done) if key in staging else done
        if writes is not None and key not in staging:
            target_view(move).of(writes(*key))[...] += 1
