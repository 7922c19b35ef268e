"""Lowering: pieces and two layouts become strided moves between shards.

`denotation.denote` gives the pieces that tile an expression's value. `Lowerer.lower_box` clips them to one box of the
target, then to the boxes of the sources; each remaining piece is one move template.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from shardfly_jax.sharding.denotation import Value
from shardfly_jax.sharding.layouts import Box
from shardfly_jax.sharding.patterns import name_pattern
from shardfly_jax.sharding.pieces import SOURCE, TARGET, Piece, clip_box, span

MAX_DIMS = 5


class SourceShards(NamedTuple):
    """The distinct shards of the tensors that one source name stands for over a range of layers.

    Attributes:
      family: Index of the family in the plan.
      first: Family variable of the family's first tensor.
      layers: Half-open range of the family variable that these boxes hold for.
      bounds: int64 [shards, axes, 2].
      held: Box and local strides (elements) of each shard.
    """

    family: int
    first: int
    layers: tuple[int, int]
    bounds: np.ndarray
    held: list[tuple[Box, tuple[int, ...]]]


class Template(NamedTuple):
    """A move before its ranks are chosen; a fill has the family -1. Offsets and strides count local elements."""

    family: int
    shard: int
    steps: tuple[object, ...]
    dims: tuple[tuple[int, int, int], ...]  # (extent, source stride, target stride), outermost first, at most MAX_DIMS
    source_offset: int
    target_offset: int
    count: int  # type: ignore[assignment]  # the field's word, over tuple.count
    source_tensor: int
    source_tensor_step: int
    source_offset_step: int
    layer: int
    layer_step: int

    @property
    def size(self) -> int:
        """Elements of one tensor's part."""
        return math.prod(n for n, _, _ in self.dims)


class Lowerer:
    """Clips a value to target boxes.

    Args:
      value: From `denote`.
      shards: The shards of each source name, one entry per range of layers with the same layout.
    """

    def __init__(self, value: Value, shards: Callable[[str], list[SourceShards]]):
        self.pieces = value.pieces
        axes = range(len(value.shape))
        self.spans = np.array([[span(piece, TARGET, a + 1) for a in axes] for piece in value.pieces], np.int64)
        self.spans = self.spans.reshape(len(value.pieces), len(value.shape), 2)
        self.shards = shards

    def lower_box(
        self, box: Box, strides: Sequence[int], layers: tuple[int, int], buffer_origin: Sequence[int]
    ) -> list[Template]:
        """All templates that fill a target box.

        Args:
          box: In the target's global coordinates.
          strides: Of the target's local buffer, elements.
          layers: Half-open range of the family variable.
          buffer_origin: Global coordinate of the first element of the local buffer (a box may be a band of a shard).
        """
        bounds = np.array(box, np.int64).reshape(-1, 2)
        near = ((self.spans[:, :, 0] < bounds[:, 1]) & (bounds[:, 0] < self.spans[:, :, 1])).all(1)
        out: list[Template] = []
        for k in np.nonzero(near)[0]:
            for piece in clip_box(self.pieces[k], TARGET, (layers, *box)):
                if piece.source is None:
                    out += _emit(piece, -1, 0, 0, None, (), buffer_origin, strides)
                    continue
                out += self._from_sources(piece, buffer_origin, strides)
        return out

    def _from_sources(self, piece: Piece, buffer_origin: Sequence[int], strides: Sequence[int]) -> list[Template]:
        assert piece.source is not None
        out: list[Template] = []
        literal = name_pattern(piece.source).is_literal
        reach = np.array([span(piece, SOURCE, a) for a in range(1, len(piece.s_origin))], np.int64).reshape(-1, 2)
        for shards in self.shards(piece.source):
            range_ = (0, 1) if literal else shards.layers
            near = ((shards.bounds[:, :, 0] < reach[:, 1]) & (reach[:, 0] < shards.bounds[:, :, 1])).all(1)
            for shard in np.nonzero(near)[0].tolist():
                box, source_strides = shards.held[shard]
                origin = tuple(lo for lo, _ in box)
                for part in clip_box(piece, SOURCE, (range_, *box)):
                    first = 0 if literal else shards.first
                    out += _emit(part, shards.family, shard, first, origin, source_strides, buffer_origin, strides)
        return out


def _emit(
    piece: Piece,
    family: int,
    shard: int,
    first: int,
    source_start: Sequence[int] | None,
    source_strides: Sequence[int],
    target_start: Sequence[int],
    target_strides: Sequence[int],
) -> list[Template]:
    target_offset = sum(
        (piece.t_origin[a + 1] - lo) * step
        for a, (lo, step) in enumerate(zip(target_start, target_strides, strict=True))
    )
    source_offset = 0
    if source_start is not None:
        source_offset = sum(
            (piece.s_origin[a + 1] - lo) * step
            for a, (lo, step) in enumerate(zip(source_start, source_strides, strict=True))
        )
    dims: list[tuple[int, int, int]] = []
    count, tensor_step, offset_step, layer_step = 1, 0, 0, 1
    for n, t_axis, t_radix, s_axis, s_radix in piece.digits:
        stride = s_radix * source_strides[s_axis - 1] if s_axis > 0 else 0
        if t_axis == 0:
            count, layer_step = n, t_radix
            tensor_step, offset_step = (s_radix, 0) if s_axis == 0 else (0, stride)
        else:
            dims.append((n, stride, t_radix * target_strides[t_axis - 1]))
    dims = merge_dims(dims)
    tensor = piece.s_origin[0] - first if source_start is not None else 0
    heads = [(source_offset, target_offset)]
    while len(dims) > MAX_DIMS:
        n, source_stride, target_stride = dims.pop(min(range(len(dims)), key=lambda d: dims[d][0]))  # fewest moves
        heads = [(s + k * source_stride, t + k * target_stride) for s, t in heads for k in range(n)]
    return [
        Template(
            family,
            shard,
            piece.steps,
            tuple(dims),
            s,
            t,
            count,
            tensor,
            tensor_step,
            offset_step,
            piece.t_origin[0],
            layer_step,
        )
        for s, t in heads
    ]


def merge_dims(dims: Iterable[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Sorts by falling target stride and joins dimensions that are contiguous on both sides."""
    out: list[tuple[int, int, int]] = []
    for n, source_stride, target_stride in sorted(dims, key=lambda d: (-d[2], d[1])):
        if out and out[-1][1] == n * source_stride and out[-1][2] == n * target_stride:
            out[-1] = (out[-1][0] * n, source_stride, target_stride)
        else:
            out.append((n, source_stride, target_stride))
    return out
