"""Lowering: pieces and two layouts become strided moves between shards.

`denotation.denote` gives the pieces that tile an expression's value. `Lowerer.lower_box` clips them to one box of the
target, then to the boxes of the sources; each remaining piece is one move template.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from shardfly_jax.sharding.denotation import Value
from shardfly_jax.sharding.layouts import Box
from shardfly_jax.sharding.patterns import name_pattern
from shardfly_jax.sharding.pieces import SOURCE, TARGET, Piece, clip_box, span

MAX_DIMS = 5
BUFFERS = "(buffers) "
"""Put before a source name: one axis on which the local buffers of its shards lie one after the other."""


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

    def in_buffers(self) -> SourceShards:
        """The same shards by where they lie in memory (see `BUFFERS`)."""
        sizes = [
            1 + sum((hi - lo - 1) * step for (lo, hi), step in zip(box, strides, strict=True))
            for box, strides in self.held
        ]
        stops = np.cumsum(sizes, dtype=np.int64)
        bounds = np.stack([stops - sizes, stops], axis=1)[:, None]
        held: list[tuple[Box, tuple[int, ...]]] = [(((lo, hi),), (1,)) for ((lo, hi),) in bounds.tolist()]
        return self._replace(bounds=bounds, held=held)


class Clipped(NamedTuple):
    """A piece inside one source shard; a fill has the family -1.

    Attributes:
      first: Family variable of the family's first tensor.
      origin, strides: Global coordinate of the first element of the shard's local buffer, and its strides.
    """

    piece: Piece
    family: int
    shard: int
    first: int
    origin: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def source_start(self) -> tuple[int, int]:
        """Offset of the first element in the local buffer, and the tensor of the family."""
        if self.family < 0:
            return 0, 0
        steps = zip(self.piece.s_origin[1:], self.origin, self.strides, strict=True)
        return sum((at - lo) * step for at, lo, step in steps), self.piece.s_origin[0] - self.first

    def source_step(self, s_axis: int, s_radix: int) -> int:
        """Stride of a digit in the local buffer."""
        return s_radix * self.strides[s_axis - 1] if s_axis > 0 else 0

    def in_buffer(self, start: int) -> Clipped:
        """The same in the coordinates of `BUFFERS`, where axes that are contiguous in memory are one.

        Args:
          start: Of the shard there.
        """
        piece = self.piece
        assert piece.source is not None
        digits = tuple(
            d._replace(s_axis=1, s_radix=self.source_step(d.s_axis, d.s_radix)) if d.s_axis > 0 else d
            for d in piece.digits
        )
        origin = (piece.s_origin[0], start + self.source_start[0])
        flat = piece._replace(source=BUFFERS + piece.source, s_origin=origin, digits=digits)
        return self._replace(piece=flat, origin=(start,), strides=(1,))


class BlockView(NamedTuple):
    """Where the maxima of the blocks of a move's elements lie, as a strided view like the move's own.

    Attributes:
      family, rank: Of the staging buffer that holds them, its tensor being that of the move's layer. -1 where every
        block lies inside the move: then the maxima are the move's own.
      offset: Of the first element's block.
      strides: One per dimension of the move; 0 along dimensions within a block.
    """

    family: int
    rank: int
    offset: int
    strides: tuple[int, ...]


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
    block: BlockView | None = None

    @property
    def size(self) -> int:
        """Elements of one tensor's part that are written."""
        return math.prod(n for n, _, target_stride in self.dims if target_stride)


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
        return [template for part in self.clipped(box, layers) for template in _emit(part, buffer_origin, strides)]

    def clipped(self, box: Box, layers: tuple[int, int]) -> Iterator[Clipped]:
        """The pieces inside a target box and layers, each inside one source shard."""
        bounds = np.array(box, np.int64).reshape(-1, 2)
        near = ((self.spans[:, :, 0] < bounds[:, 1]) & (bounds[:, 0] < self.spans[:, :, 1])).all(1)
        for k in np.nonzero(near)[0]:
            for piece in clip_box(self.pieces[k], TARGET, (layers, *box)):
                if piece.source is None:
                    yield Clipped(piece, -1, 0, 0, (), ())
                    continue
                yield from self._from_sources(piece)

    def _from_sources(self, piece: Piece) -> Iterator[Clipped]:
        assert piece.source is not None
        literal = name_pattern(piece.source).is_literal
        reach = np.array([span(piece, SOURCE, a) for a in range(1, len(piece.s_origin))], np.int64).reshape(-1, 2)
        for shards in self.shards(piece.source):
            range_ = (0, 1) if literal else shards.layers
            near = ((shards.bounds[:, :, 0] < reach[:, 1]) & (reach[:, 0] < shards.bounds[:, :, 1])).all(1)
            for shard in np.nonzero(near)[0].tolist():
                box, source_strides = shards.held[shard]
                origin = tuple(lo for lo, _ in box)
                first = 0 if literal else shards.first
                for part in clip_box(piece, SOURCE, (range_, *box)):
                    yield Clipped(part, shards.family, shard, first, origin, source_strides)


def _emit(part: Clipped, target_start: Sequence[int], target_strides: Sequence[int]) -> list[Template]:
    piece = part.piece
    target_offset = sum(
        (piece.t_origin[a + 1] - lo) * step
        for a, (lo, step) in enumerate(zip(target_start, target_strides, strict=True))
    )
    source_offset, tensor = part.source_start
    dims: list[tuple[int, int, int]] = []
    count, tensor_step, offset_step, layer_step = 1, 0, 0, 1
    for n, t_axis, t_radix, s_axis, s_radix in piece.digits:
        stride = part.source_step(s_axis, s_radix)
        if t_axis == 0:
            count, layer_step = n, t_radix
            tensor_step, offset_step = (s_radix, 0) if s_axis == 0 else (0, stride)
        else:
            dims.append((n, stride, t_radix * target_strides[t_axis - 1] if t_axis > 0 else 0))
    dims = merge_dims(dims)
    heads = [(source_offset, target_offset)]
    while len(dims) > MAX_DIMS:
        movable = [d for d in range(len(dims)) if dims[d][2]]  # a block stays in one move
        n, source_stride, target_stride = dims.pop(min(movable, key=lambda d: dims[d][0]))  # fewest moves
        heads = [(s + k * source_stride, t + k * target_stride) for s, t in heads for k in range(n)]
    return [
        Template(
            part.family,
            part.shard,
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
