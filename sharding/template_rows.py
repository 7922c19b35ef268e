"""Templates as rows of integers, and where bands cut them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from shardfly_jax.sharding.lowering import MAX_DIMS

# Columns of a template as a row of integers; then its extents, source strides and target strides.
(
    GROUP,
    BAND,
    FAMILY,
    SHARD,
    CONVERT,
    SOURCE_OFFSET,
    TARGET_OFFSET,
    COUNT,
    SOURCE_TENSOR,
    SOURCE_TENSOR_STEP,
    SOURCE_OFFSET_STEP,
    LAYER,
    LAYER_STEP,
    BLOCK,
    _WIDTH,
) = range(15)
EXTENTS = slice(_WIDTH, _WIDTH + MAX_DIMS)
SOURCE_STRIDES = slice(EXTENTS.stop, EXTENTS.stop + MAX_DIMS)
TARGET_STRIDES = slice(SOURCE_STRIDES.stop, SOURCE_STRIDES.stop + MAX_DIMS)


class Cut(NamedTuple):
    """Templates of a whole box, cut at the bands of its group.

    Attributes:
      rows: Templates with their `BAND` set.
      template: int64 [rows], of which template each is a part.
      first: int64 [rows], step of that template's outermost dimension with which the part begins.
    """

    rows: np.ndarray
    template: np.ndarray
    first: np.ndarray


FAR = 1 << 62
"""Beyond every edge."""


def cut_at_bands(rows: np.ndarray, edges: Sequence[int]) -> Cut | None:
    """Cuts templates where the target's local buffer passes from one band to the next.

    Bands are ranges of a buffer's elements, and a template walks its outermost dimension upwards through the buffer. So
    each edge falls between two steps of that dimension, unless a step reaches across it.

    Args:
      rows: Templates of one group, for its whole box.
      edges: First element of every band but the first.

    Returns:
      The templates of all bands, by template; None if a step reaches across an edge.
    """
    if not edges:
        return Cut(rows, np.arange(len(rows)), np.zeros(len(rows), np.int64))
    extents, strides = rows[:, EXTENTS], rows[:, TARGET_STRIDES]
    fixed = strides[:, :1] <= 0  # it is reduced along its outermost dimension, or has none: it is never cut
    outer, step = np.where(fixed, 1, extents[:, :1]), np.where(fixed, FAR, strides[:, :1])
    inner_reach = ((extents[:, 1:] - 1) * strides[:, 1:]).sum(axis=1, keepdims=True)
    distance = np.array(edges) - rows[:, TARGET_OFFSET : TARGET_OFFSET + 1]
    inside = (distance > 0) & (distance <= (outer - 1) * step + inner_reach)
    within_step = distance % step
    if (inside & (within_step != 0) & (within_step <= inner_reach)).any():
        return None
    at = np.clip(-(-distance // step), 0, outer)
    at = np.concatenate([np.zeros_like(outer), at, outer], axis=1)
    lengths = np.diff(at, axis=1)
    row, band = np.nonzero(lengths)
    start = at[row, band]
    out = rows[row]
    out[:, BAND] = band
    out[:, EXTENTS.start] = np.where(fixed[row, 0], extents[row, 0], lengths[row, band])
    out[:, SOURCE_OFFSET] += start * out[:, SOURCE_STRIDES.start]
    out[:, TARGET_OFFSET] += start * out[:, TARGET_STRIDES.start]
    return Cut(out, row, start)
