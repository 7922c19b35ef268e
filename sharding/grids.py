"""Block grids: which elements of a tensor share a scale, and quantization of a whole array over a grid.

A grid is separable: on each axis a coordinate has a block index, and a block is one index per axis. Axes before the
last two have blocks of one element. *Segments* `(lo, hi, index)` tile an axis whose blocks a layout decides: the parts
of a fused tensor, or what each rank holds. Several segments may share an index: part q of `[q_0; k_0; q_1; k_1]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from shardfly_jax.sharding.errors import LanguageError, NotFinite
from shardfly_jax.sharding.formats import NOT_FINITE, Amax
from shardfly_jax.sharding.quantization import Format

Segments = tuple[tuple[int, int, int], ...]
"""(lo, hi, block index) in rising order; empty where the format's block size decides."""

PLAIN: tuple[Segments, Segments] = ((), ())


class Run(NamedTuple):
    """Blocks of one size that follow each other on one axis.

    Attributes:
      lo, hi: Half-open range of coordinates.
      index: Of the first block.
      block: Length of each block inside this run.
      whole: Whether the blocks have no part outside this run.
    """

    lo: int
    hi: int
    index: int  # type: ignore[assignment]  # the field's word, over tuple.index
    block: int
    whole: bool


def axis_runs(length: int, block: int | None, segments: Segments = ()) -> tuple[Run, ...]:
    """The runs that tile an axis: of segments, or of whole blocks and what is left at the end."""
    if segments:
        sizes: dict[int, int] = {}
        for lo, hi, index in segments:
            sizes[index] = sizes.get(index, 0) + hi - lo
        return tuple(Run(lo, hi, index, hi - lo, sizes[index] == hi - lo) for lo, hi, index in segments)
    block = max(length, 1) if block is None else block
    inner = length // block * block
    runs = (Run(0, inner, 0, block, True), Run(inner, length, inner // block, length - inner, True))
    return tuple(run for run in runs if run.lo < run.hi)


def grid_runs(format: Format, shape: Sequence[int], segments: Sequence[Segments]) -> tuple[tuple[Run, ...], ...]:
    """The runs of every axis of a tensor."""
    blocks = (*(1,) * (len(shape) - 2), *format.block)
    given = (*((),) * (len(shape) - 2), *segments)
    return tuple(axis_runs(n, block, cut) for n, block, cut in zip(shape, blocks, given, strict=True))


def grid_shape(format: Format, shape: Sequence[int], segments: Sequence[Segments]) -> tuple[int, ...]:
    """Blocks per axis: the shape of the scales.

    Raises:
      LanguageError: The tensor has fewer than two axes.
    """
    if len(shape) < 2:
        raise LanguageError(
            f"quantize: a value of shape {tuple(shape)} has no rows and columns. Quantize matrices; rearrange first."
        )
    return tuple(
        max((run.index + (run.hi - run.lo) // run.block for run in runs), default=0)
        for runs in grid_runs(format, shape, segments)
    )


def block_indices(format: Format, shape: Sequence[int], segments: Sequence[Segments]) -> list[np.ndarray]:
    """The block index of every coordinate, per axis; written apart from the runs, as part of the meaning."""
    indices = [np.arange(n) for n in shape]
    for axis, block, cut in zip((-2, -1), format.block, segments, strict=True):
        if cut:
            indices[axis] = np.concatenate([np.full(hi - lo, index) for lo, hi, index in cut])
        elif block is None:
            indices[axis] = np.zeros(shape[axis], int)
        else:
            indices[axis] = np.arange(shape[axis]) // block
    return indices


def quantize(
    format: Format, x: np.ndarray, segments: Sequence[Segments] = PLAIN, what: str = "an array"
) -> tuple[np.ndarray, np.ndarray]:
    """Quantizes a whole array: the meaning.

    Args:
      format: How.
      x: Values, [..., rows, columns].
      segments: Of rows and columns, where the format's scope is a part or a rank.
      what: For messages.

    Returns:
      Codes as they are stored, in the shape of `x` unless some share a byte, and scales, one per block.

    Raises:
      LanguageError: `x` has fewer than two axes, or its last one ends inside a byte of codes.
      NotFinite: `x` holds NaN or infinity.
    """
    amax = block_maxima(format, x, segments, what)
    format.stored_shape(x.shape)
    scales = format.scales(amax)
    for axis, index in enumerate(block_indices(format, x.shape, segments)):
        amax = amax.take(index, axis)
    return format.pack(format.encode(x, amax)), scales


def block_maxima(format: Format, x: np.ndarray, segments: Sequence[Segments], what: str) -> np.ndarray:
    """The largest absolute value of each block of a whole array, float32.

    Raises:
      LanguageError, NotFinite: As `quantize`.
    """
    grid_shape(format, x.shape, segments)
    amax = Amax().apply(x, ())
    for axis, index in enumerate(block_indices(format, x.shape, segments)):
        order = np.argsort(index, kind="stable")
        starts = np.searchsorted(index[order], np.arange(index.max() + 1))
        in_order = amax if (order[1:] > order[:-1]).all() else amax.take(order, axis)
        amax = np.maximum.reduceat(in_order, starts, axis)
    if (bad := int((amax >= NOT_FINITE).sum())) > 0:
        raise NotFinite(
            f"quantize: the values of {what} hold NaN or infinity in {bad} of {amax.size} blocks, but a scale needs "
            "finite values. Look at the trainer's weights."
        )
    return amax.view(np.float32)
