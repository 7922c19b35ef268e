"""How contiguous a plan's moves are: what can use bulk copies, what is a transpose, what must go element by element."""

from __future__ import annotations

import dataclasses

import numpy as np

from shardfly_jax.sharding.formats import itemsize
from shardfly_jax.sharding.moves import contiguous
from shardfly_jax.sharding.plan import Plan

BULK_NBYTES = 16
"""Bulk copies move whole multiples of this, from and to multiples of it."""
RUN_CLASSES = ("< 16 B", "16 - 63 B", "64 - 255 B", "256 - 4095 B", ">= 4096 B")
RUN_EDGES = (16, 64, 256, 4096)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """Bytes written, by length of the contiguous run on the side where it is shorter.

    Attributes:
      alike: int64 [classes]; moves that are contiguous in the same axis on both sides, and fills. Their run is what
        follows without a gap on both sides at once.
      reordered: int64 [classes]; all others, e.g. transposes. Their run is a side's innermost row.
      element: int64 [classes]; of both, what cannot use bulk copies: on some side the run, its offset or a stride
        between runs is no multiple of 16 bytes.
    """

    alike: np.ndarray
    reordered: np.ndarray
    element: np.ndarray


def runs(plan: Plan) -> Runs:
    """Classifies every move."""
    moves = plan.moves
    extents, source_steps, target_steps = moves.extents, moves.source_strides, moves.target_strides
    size = np.array([[itemsize(c.source), itemsize(c.target)] for c in plan.conversions], np.int64)[moves.convert]
    fills = moves.source_rank < 0
    both, both_rest = contiguous(extents, [np.where(fills[:, None], target_steps, source_steps), target_steps])
    alike = fills | (both > 1) | (moves.size == 1)
    found = []
    for side, steps in enumerate((source_steps, target_steps)):
        row, row_rest = contiguous(extents, [steps], rounds=1)
        run, rest = np.where(alike, both, row), np.where(alike[:, None], both_rest, row_rest)
        offset = moves.target_offset if side else moves.source_offset
        step = np.zeros_like(offset) if side else np.where(moves.count > 1, moves.source_offset_step, 0)
        places = np.column_stack([run, offset, step, np.where(rest, steps, 0)]) * size[:, side, None]
        found.append((run * size[:, side], (places % BULK_NBYTES != 0).any(axis=1)))
    (source_nbytes, source_off), (target_nbytes, target_off) = found
    element = target_off | (source_off & ~fills)
    run_nbytes = np.where(fills, target_nbytes, np.minimum(source_nbytes, target_nbytes))
    where = np.searchsorted(RUN_EDGES, run_nbytes, side="right")

    def total(chosen: np.ndarray) -> np.ndarray:
        out = np.zeros(len(RUN_CLASSES), np.int64)
        np.add.at(out, where[chosen], plan.row_nbytes[chosen])
        return out

    return Runs(alike=total(alike), reordered=total(~alike), element=total(element))
