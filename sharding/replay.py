"""Runs a plan's moves on NumPy buffers, one after the other: what the moves say, next to what the language means."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from shardfly_jax.sharding.moves import source_key, source_view, target_key, target_view
from shardfly_jax.sharding.plan import Plan

Buffers = Callable[[int, int, int], np.ndarray]
"""Flat local buffer of (family, tensor, rank)."""


def replay(plan: Plan, buffers: Buffers, writes: Buffers | None = None) -> None:
    """Executes every expansion in global order.

    Args:
      plan: Any plan.
      buffers: Flat arrays of the families' dtypes; sources are read, targets are written.
      writes: If given, integer arrays of the targets' sizes that count how often each element was written.
    """
    for move, k in plan.moves.in_order():
        key = target_key(move, k)
        target = target_view(move).of(buffers(*key))
        if move.source_rank < 0:
            value = np.empty(target.shape, target.dtype)
        else:
            value = source_view(move, k).of(buffers(*source_key(move, k)))
        target[...] = plan.conversions[move.convert].apply(value)
        if writes is not None:
            target_view(move).of(writes(*key))[...] += 1
