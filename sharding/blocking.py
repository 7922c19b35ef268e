"""Quantization in moves: which blocks are encoded where they are read, and which need a slot for their maximum.

A block that lies inside one source shard, and inside what one move writes, needs nothing: its move finds the maximum
and encodes. Every other block has one 4-byte *slot* on one rank, its owner: each shard's part of the block is reduced
into the slot (the larger of two floats that are not negative is the larger of their bits), then each part is encoded
with the maximum that the slot holds. Slots are boxes of the block grid, so that moves reach them by strides.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from shardfly_jax.sharding.block_parts import Part, Slots, emitted, place_in_slots
from shardfly_jax.sharding.denotation import Value, denote
from shardfly_jax.sharding.errors import LanguageError
from shardfly_jax.sharding.formats import Amax, ToScale
from shardfly_jax.sharding.grids import Run, Segments, grid_runs, grid_shape
from shardfly_jax.sharding.inference import Lookup
from shardfly_jax.sharding.language import Expr
from shardfly_jax.sharding.layouts import Box, dense_strides
from shardfly_jax.sharding.lowering import (
    BUFFERS,
    MAX_DIMS,
    Clipped,
    Lowerer,
    SourceShards,
    Template,
    merge_dims,
)
from shardfly_jax.sharding.pieces import (
    TARGET,
    Digit,
    Piece,
    clip,
    clip_box,
    join_digits,
    outside,
    span,
    split_blocks,
    straddles,
)
from shardfly_jax.sharding.quantization import Format
from shardfly_jax.sharding.slot_boxes import boxes_of, merged, without

MASK_SIZE = 1 << 24
"""Blocks up to which those that need slots are marked one by one; beyond, they are kept as boxes."""
STAGING = "(staging)"
"""The tree of families that hold slots."""


class Blocks:
    """The blocks of one quantized value over a range of layers.

    Args:
      value: The expression that is quantized; a fuse in it has its cuts set.
      format, segments: The grid.
      layers: Half-open range of the family variable.
      lookup, shards: Types and shards of source names.
    """

    def __init__(
        self,
        value: Expr,
        format: Format,
        segments: tuple[Segments, Segments],
        layers: tuple[int, int],
        lookup: Lookup,
        shards: Callable[[str], list[SourceShards]],
    ):
        self.format, self.layers = format, layers
        denoted = denote(value, lookup, range(*layers), ())
        self.shape = denoted.shape
        self.grid = grid_shape(format, denoted.shape, segments)
        self.runs = grid_runs(format, denoted.shape, segments)
        self._lowerer = Lowerer(denoted, shards)
        self._needed: list[Box] = []
        self._seen: set[Box] = set()
        size = (layers[1] - layers[0], *self.grid)
        self._mask = np.zeros(size, bool) if math.prod(size) <= MASK_SIZE else None
        self.fix([])

    def unpacked(self, box: Box) -> Box:
        """A box of stored codes as one of the value, which is longer on its last axis where codes share a byte."""
        n, (lo, hi) = self.format.per_byte, box[-1]
        return (*box[:-1], (lo * n, hi * n))

    @property
    def whole(self) -> Box:
        """The box of the whole value."""
        return tuple((0, n) for n in self.shape)

    def parts(self, box: Box, layers: tuple[int, int]) -> Iterator[Part]:
        """The parts that tile a box of the value."""
        for clipped in self._lowerer.clipped(box, layers):
            clipped = self._contiguous(clipped)
            found: list[tuple[Piece, tuple[Run, ...]]] = [(clipped.piece, ())]
            for axis, runs in enumerate(self.runs):
                found = [
                    (done, (*before, run))
                    for piece, before in found
                    for run in runs
                    for part in clip(piece, TARGET, axis + 1, run.lo, run.hi)
                    for done in (split_blocks(part, axis + 1, run.block) if 1 < run.block < run.hi - run.lo else [part])
                ]
            yield from (Part(clipped._replace(piece=piece), runs) for piece, runs in found)

    def _contiguous(self, clipped: Clipped) -> Clipped:
        """A piece that blocks cut, with dimensions joined that are contiguous in its shard: fewer cuts do then."""
        piece = clipped.piece
        if piece.source is None or not any(
            outer.t_axis == inner.t_axis > 0
            and outer.t_radix == inner.count * inner.t_radix
            and self._is_cut(piece, inner.t_axis)
            for outer, inner in itertools.permutations(piece.digits, 2)
        ):
            return clipped
        (start,) = (
            shards.held[clipped.shard][0][0][0]
            for shards in self._lowerer.shards(BUFFERS + piece.source)
            if shards.family == clipped.family
        )
        flat = clipped.in_buffer(start)
        joined = join_digits(flat.piece)
        return clipped if joined is flat.piece else flat._replace(piece=joined)

    def _is_cut(self, piece: Piece, axis: int) -> bool:
        blocks = [run.block for run in self.runs[axis - 1] if 1 < run.block < run.hi - run.lo]
        if axis == len(self.shape):
            blocks.append(self.format.per_byte)
        return any(straddles(piece, axis, block) for block in blocks)

    # Slots

    def need(self, part: Part) -> None:
        """Gives every block of a part a slot."""
        new = [part.blocks]
        if new[0] in self._seen:
            return
        self._seen.add(new[0])
        if self._mask is not None:
            (first, last), *grid = new[0]
            at = (slice(first - self.layers[0], last - self.layers[0]), *(slice(lo, hi) for lo, hi in grid))
            self._mask[at] = True
            return
        for box in self._needed:
            new = [rest for one in new for rest in without(one, box)]
        self._needed += new

    @functools.cached_property
    def _all_parts(self) -> list[Part]:
        return list(self.parts(self.whole, self.layers))

    def need_split(self) -> None:
        """Gives a slot to every block that source shards share."""
        for part in self._all_parts:
            if self.local_reduction(part) is None:
                self.need(part)

    def slot_boxes(self) -> list[Box]:
        """Disjoint boxes of the blocks that need slots, as few as merging neighbours leaves."""
        if self._mask is None:
            return merged(self._needed)
        return [
            tuple(
                (lo + start, hi + start)
                for (lo, hi), start in zip(box, (self.layers[0], *[0] * len(self.grid)), strict=True)
            )
            for box in boxes_of(self._mask)
        ]

    def fix(self, slots: Sequence[Slots]) -> None:
        """Settles the slots of this value."""
        self.slots = list(slots)
        self._bounds = np.array([one.box for one in slots], np.int64).reshape(len(slots), len(self.shape) + 1, 2)

    def slots_of(self, part: Part) -> list[Slots]:
        """The slots that hold blocks of a part, in order: there may be thousands of both."""
        reach = np.array(part.blocks, np.int64)
        near = ((self._bounds[:, :, 0] < reach[:, 1]) & (reach[:, 0] < self._bounds[:, :, 1])).all(1)
        return [self.slots[k] for k in np.nonzero(near)[0]]

    def in_slots(self, part: Part, slots: Slots) -> Iterator[Part]:
        """What of a part has its blocks in a box of slots."""
        ranges = [slots.box[0]]
        for run, (lo, hi) in zip(part.runs, slots.box[1:], strict=True):
            ranges.append((run.lo + (lo - run.index) * run.block, run.lo + (hi - run.index) * run.block))
        for piece in clip_box(part.clipped.piece, TARGET, tuple(ranges)):
            yield part._replace(clipped=part.clipped._replace(piece=piece))

    def reductions(self, slots: Slots) -> Iterator[Template]:
        """The rows that reduce every part of the blocks of some slots into them."""
        along = []
        for runs, (lo, hi) in zip(self.runs, slots.box[1:], strict=True):
            ranges = []
            for run in runs:
                first, last = max(lo - run.index, 0), min(hi - run.index, (run.hi - run.lo) // run.block)
                if first < last:
                    ranges.append((run.lo + first * run.block, run.lo + last * run.block))
            along.append(ranges)
        for box in itertools.product(*along):
            for part in self.parts(box, slots.box[0]):
                piece = part.clipped.piece._replace(steps=(*part.clipped.piece.steps, Amax()))
                reduced = part._replace(clipped=part.clipped._replace(piece=piece))
                offset, steps = place_in_slots(reduced, slots)
                made = emitted(reduced, offset, steps, 0, [0] * len(steps), None)
                assert made is not None
                yield from made

    # Encoding

    def encoded(self, part: Part, start: Sequence[int], strides: Sequence[int]) -> list[Template] | None:
        """The rows that encode a complete part; None if its blocks have too many dimensions for one row.

        Args:
          start: Coordinate in the value of the first element of the target's local buffer.
          strides: Of that buffer, stored elements.

        Raises:
          LanguageError: It holds some value without the neighbour whose code shares a byte with its own.
        """
        part = self._in_pairs(part)
        if not part.is_complete:
            return None
        offset, steps = self._in_buffer(part, start, strides)
        across = dense_strides(self.grid)
        blocks = [
            across[d.t_axis - 1] * (d.t_radix // part.runs[d.t_axis - 1].block) if part.is_outer(d) else 0
            for d in part.digits
        ]
        return emitted(part, offset, steps, 0, blocks, (-1, -1))

    def encoded_with_slots(
        self, part: Part, slots: Slots, start: Sequence[int], strides: Sequence[int]
    ) -> list[Template]:
        """The rows that encode a part whose blocks all have their maxima in `slots`."""
        part = self._in_pairs(part)
        offset, steps = self._in_buffer(part, start, strides)
        block_offset, blocks = place_in_slots(part, slots)
        made = emitted(part, offset, steps, block_offset, blocks, (slots.family, slots.owner))
        assert made is not None
        return made

    def _in_pairs(self, part: Part) -> Part:
        """A part whose digits of the last axis move by whole stored elements, or stay within one."""
        axis, n, piece = len(self.shape), self.format.per_byte, part.clipped.piece
        if n == 1:
            return part
        first, *others = split_blocks(piece, axis, n)
        inner = math.prod(d.count for d in first.digits if d.t_axis == axis and d.t_radix % n)
        if others or inner != n:
            lo, hi = span(piece, TARGET, axis)
            raise LanguageError(
                f"quantize: columns {lo} to {hi} hold an odd run of one source shard, or of one part of the mapping, "
                f"but {type(self.format).__name__} puts {n} codes into each byte. Cut sources, and join parts, at even "
                "columns"
            )
        return part._replace(clipped=part.clipped._replace(piece=first))

    def _in_buffer(self, part: Part, start: Sequence[int], strides: Sequence[int]) -> tuple[int, list[int]]:
        """Offset and steps of a part in a local buffer of stored codes; 0 within one of them."""
        at, packs = part.clipped.piece.t_origin[1:], [*[1] * (len(strides) - 1), self.format.per_byte]
        offset = sum((a - lo) // n * step for a, lo, step, n in zip(at, start, strides, packs, strict=True))
        return offset, [d.t_radix // packs[d.t_axis - 1] * strides[d.t_axis - 1] for d in part.digits]

    # Scales

    def local_reduction(self, part: Part) -> Piece | None:
        """A complete part as a piece of the grid, which reduces over each block; None if one row cannot."""
        if not part.is_complete:
            return None
        piece, digits = part.clipped.piece, []
        for d in piece.digits:
            if d.t_axis and part.is_outer(d):
                d = d._replace(t_radix=d.t_radix // part.runs[d.t_axis - 1].block)
            elif d.t_axis:
                d = d._replace(t_axis=-1, t_radix=0)
            digits.append(d)
        within = [(d.count, part.clipped.source_step(d.s_axis, d.s_radix), 0) for d in digits if d.t_axis < 0]
        if len(merge_dims(within)) > MAX_DIMS:
            return None
        origin = tuple(lo for lo, _ in part.blocks)
        steps = (*piece.steps, Amax(), ToScale(self.format))
        return piece._replace(steps=steps, t_origin=origin, digits=tuple(digits))

    def scales(self) -> Value:
        """The stored scales as a value, once slots are fixed: read from slots where there are some, else reduced."""
        pieces = []
        for part in self._all_parts:
            piece = self.local_reduction(part)
            left = [] if piece is None else [piece]
            for slots in self.slots_of(part) if left else ():
                left = [rest for one in left for rest in outside(one, slots.box)]
            pieces += left
        for slots in self.slots:
            origin = tuple(lo for lo, _ in slots.box)
            digits = tuple(Digit(hi - lo, a, 1, a, 1) for a, (lo, hi) in enumerate(slots.box) if hi - lo > 1)
            pieces.append(Piece(slots.name, (ToScale(self.format),), origin, origin, digits))
        return Value(self.grid, pieces)
