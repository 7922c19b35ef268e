"""Runs a plan's moves on NumPy buffers, one after the other: what the moves say, next to what the language means."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from shardfly_jax.sharding.moves import source_view, target_view
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
    moves = list(plan.moves)
    for row, k in zip(*(index.tolist() for index in plan.moves.expanded()), strict=True):
        move = moves[row]
        tensor = move.target_tensor + k * move.target_tensor_step
        target = target_view(move).of(buffers(move.target_family, tensor, move.target_rank))
        if move.source_rank < 0:
            value = np.empty(target.shape, target.dtype)
        else:
            flat = buffers(move.source_family, move.source_tensor + k * move.source_tensor_step, move.source_rank)
            value = source_view(move, k).of(flat)
        target[...] = plan.conversions[move.convert].apply(value)
        if writes is not None:
            target_view(move).of(writes(move.target_family, tensor, move.target_rank))[...] += 1
