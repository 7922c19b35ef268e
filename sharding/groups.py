"""Ranks that need the same bytes, and the parts in which these are passed on."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence

import numpy as np

from shardfly_jax.sharding.language import Expr
from shardfly_jax.sharding.layouts import Box, box_shape
from shardfly_jax.sharding.lowering import merge_dims
from shardfly_jax.sharding.records import PIECE_NBYTES, TRANSPOSE_ROWS
from shardfly_jax.sharding.routes import Route, route
from shardfly_jax.sharding.walks import quantized, reorders

SMALLEST_BAND_NBYTES = 64 << 10
"""Boxes are cut so that several members are roots at once, down to bands of this size."""
MOST_TURNS = 256
"""Turns of a group at a plan's pace; where hosts of many sizes would need more, their NICs bring almost equal parts."""

SMALLEST_RUN_NBYTES = 128
"""Of bands that have gaps."""
LEAST_ROUNDS = 8
"""Bands of each root that whole tiles must leave."""


@dataclasses.dataclass(frozen=True, slots=True)
class Pass:
    """One pass over the layers, of tensors whose trees are alike.

    Attributes:
      per_layer: Ticks of each layer.
      layers: First layer, and one past the last.
    """

    per_layer: int
    layers: tuple[int, int]

    @property
    def ticks(self) -> int:
        """Of all layers."""
        return self.per_layer * (self.layers[1] - self.layers[0])


@dataclasses.dataclass(frozen=True, slots=True)
class Pace:
    """The pace at which trees of hosts pass on: see `pace`.

    Attributes:
      front: Ticks before the first layer, in which tensors outside the layers are passed on.
      passes: In order.
    """

    front: int
    passes: tuple[Pass, ...]

    @property
    def ticks(self) -> int:
        """Of an update."""
        return self.front + sum(one.ticks for one in self.passes)


@dataclasses.dataclass(frozen=True, slots=True)
class Band:
    """A part of a box.

    Attributes:
      box: Global coordinates.
      offset: Of its first element in the local buffer.
      dims: Extents and strides there, the largest stride first, joined where one goes on in the next.
    """

    box: Box
    offset: int
    dims: tuple[tuple[int, int], ...]

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(extent for extent, _ in self.dims)

    @property
    def is_contiguous(self) -> bool:
        """Whether it is a range of the local buffer."""
        return self.dims in ((), ((self.size, 1),))


@dataclasses.dataclass(slots=True)
class Group:
    """Ranks that need the same bytes.

    Attributes:
      expr, layers, cuts, box, strides, itemsize: What they need, and how their buffers hold it.
      members: (target family, rank), one per rank, in the order in which bytes are passed on.
      twins: (index of a member, another family of its rank that needs the same), copied within the rank.
      bands: Parts that are forwarded separately; the whole box if nothing is.
      sizes: How many of the members each host has, in their order.
      roots: How many members are roots, evenly spaced. Of several bands each is root of an equal run; of one band they
        are root in turn, layer by layer.
      start: Member that is the first root.
      rounds: How many parts of a layer's span the bands are spread over.
      turn: int64 [bands]; which of the roots each band has, if roots do not change from layer to layer.
      round: int64 [bands]; the part of a layer's span in which each band is sent. Roots begin theirs in another one,
        as trainers have time (`schedule.begin_roots`).
      is_paced: Whether its bands are passed on at the plan's pace.
      pace: The plan's, if some of its groups have several hosts.
      pass_: Which of the pace's passes a group in layers is part of.
      first_tick, ticks: When a layer of the group begins within a layer of its pass, or among tensors outside the
        layers, and how long it takes; no ticks if it rides along.
    """

    expr: Expr
    layers: tuple[int, int]
    cuts: tuple[tuple[int, int], ...]
    box: Box
    strides: tuple[int, ...]
    itemsize: int
    members: list[tuple[int, int]]
    sizes: tuple[int, ...] = ()
    twins: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    bands: list[Band] = dataclasses.field(default_factory=list)
    roots: int = 1
    start: int = 0
    rounds: int = 1
    turn: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(1, np.int64))
    round: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(1, np.int64))
    is_paced: bool = False
    pace: Pace | None = None
    pass_: int = 0
    first_tick: int = 0
    ticks: int = 0

    @property
    def n_layers(self) -> int:
        """Tensors that the group's bytes are spread over."""
        return self.layers[1] - self.layers[0]

    @property
    def box_nbytes(self) -> int:
        """Bytes of one layer of one member."""
        return math.prod(box_shape(self.box)) * self.itemsize

    @property
    def in_ranges(self) -> bool:
        """Whether its bands are ranges of the local buffer."""
        return all(band.is_contiguous for band in self.bands)

    @property
    def is_forwarded(self) -> bool:
        """Whether anything is passed on."""
        return len(self.members) > 1 or bool(self.twins)

    @property
    def is_wide(self) -> bool:
        """Whether it has several hosts, which form a tree."""
        return len(self.sizes) > 1

    @property
    def trees(self) -> int:
        """Trees of hosts at a time: each member of a host is entry of two (see `pace`)."""
        return 2 * max(self.sizes)

    @property
    def turns(self) -> int:
        """Trees after which every member of every host has been entry equally often: those of some ticks."""
        of_all = math.lcm(self.trees, *self.sizes)
        return of_all if of_all <= MOST_TURNS else max(MOST_TURNS // self.trees, 1) * self.trees

    @property
    def takes_turns(self) -> bool:
        """Whether the root changes from layer to layer."""
        return len(self.bands) == 1 and self.roots > 1 and not self.is_paced

    @property
    def route(self) -> Route:
        """Who passes on to whom, turn by turn."""
        tiny = max(band.size for band in self.bands) * self.itemsize <= SMALLEST_BAND_NBYTES
        return route(self.sizes, self.start, self.roots, tiny, self.trees if self.is_paced else None)


def band_boxes(group: Group, count: int, roots: int = 0) -> list[Box]:
    """About `count` parts of a group's box, contiguous in the local buffer unless they are parts of a row of blocks.

    Args:
      group: With its box.
      count: Fewer where blocks are not cut.
      roots: How many roots share the parts, if those of a transpose shall be whole tiles: what is left of a tile costs
        as much as a whole one. Such parts may be few, but each root keeps `LEAST_ROUNDS`. 0: parts of any size.
    """
    return _cut(group.box, _outermost_first(group), count, _grains(group, roots))


def band_sizes(group: Group, count: int) -> tuple[int, int, int]:
    """How many parts `band_boxes` makes, and the elements of the smallest and the largest."""
    return _sizes(box_shape(group.box), _outermost_first(group), count, _grains(group))


def _outermost_first(group: Group) -> tuple[int, ...]:
    return tuple(sorted(range(len(group.box)), key=lambda a: (-group.strides[a], a)))


def bands_of(group: Group, boxes: Sequence[Box]) -> list[Band]:
    """Parts of a group's box as bands."""
    out = []
    for box in boxes:
        offset = sum(
            (lo - start) * step for (lo, _), (start, _), step in zip(box, group.box, group.strides, strict=True)
        )
        steps = [(n, step, step) for n, step in zip(box_shape(box), group.strides, strict=True) if n != 1]
        out.append(Band(box, offset, tuple((n, step) for n, step, _ in merge_dims(steps))))
    return out


def _grains(group: Group, roots: int = 0) -> tuple[int, ...]:
    """What bands are multiples of, per axis: the blocks of a quantized group, which are encoded in one piece.

    Args:
      group: With its box.
      roots: As for `band_boxes`.
    """
    expr = quantized(group.expr)
    if expr is None:
        shape = box_shape(group.box)
        outermost = _long(shape, _outermost_first(group))[:1] if roots and reorders(group.expr) else ()
        tiled = {axis for axis in outermost if shape[axis] // TRANSPOSE_ROWS >= LEAST_ROUNDS * roots}
        if not tiled:
            return (1,) * len(shape)
        return tuple(TRANSPOSE_ROWS if axis in tiled else n for axis, n in enumerate(shape))
    rows, columns = expr.format.block
    columns = columns if columns is None else columns // expr.format.per_byte
    sizes = zip((rows, columns), expr.segments, group.box[-2:], strict=True)
    blocks = (
        *(1,) * (len(group.box) - 2),
        # a box that begins inside a block has no edge of a block at a multiple of its size
        *(hi - lo if block is None or cut or lo % block else block for block, cut, (lo, hi) in sizes),
    )
    return _whole_inside(group, blocks)


def _whole_inside(group: Group, blocks: tuple[int, ...]) -> tuple[int, ...]:
    """The same grains; whole axes inside of one that has several elements to a block, unless forwards can move rows.

    What is cut there has gaps, so its runs must be pieces of 16 bytes, and long enough.
    """
    shape, grains, is_whole = box_shape(group.box), list(blocks), False
    axes = _long(shape, _outermost_first(group))
    for outer, inner in itertools.pairwise(axes):
        if blocks[outer] > 1:
            run, step = blocks[inner] * group.itemsize, group.strides[outer] * group.itemsize
            fits = run >= SMALLEST_RUN_NBYTES and run % PIECE_NBYTES == 0 and step % PIECE_NBYTES == 0
            is_whole = is_whole or blocks[outer] >= shape[outer] or not fits
        if is_whole:
            grains[inner] = shape[inner]
    return tuple(grains)


def _cut(box: Box, axes: tuple[int, ...], count: int, grains: tuple[int, ...]) -> list[Box]:
    """About `count` parts of a box: along its outermost axis, and further in where that one is too short."""
    axes = _long(box_shape(box), axes)
    if count <= 1 or not axes:
        return [box]
    axis, (lo, hi) = axes[0], box[axes[0]]
    edges, inner = _edges(hi - lo, grains[axis], count)
    cut = [(*box[:axis], (lo + a, lo + b), *box[axis + 1 :]) for a, b in itertools.pairwise(edges.tolist())]
    return cut if inner == 1 else [part for outer in cut for part in _cut(outer, axes[1:], inner, grains)]


@functools.lru_cache(maxsize=1 << 16)
def _sizes(shape: tuple[int, ...], axes: tuple[int, ...], count: int, grains: tuple[int, ...]) -> tuple[int, int, int]:
    """How many parts `_cut` makes of a box of a shape, and the elements of the smallest and the largest."""
    axes = _long(shape, axes)
    if count <= 1 or not axes:
        return 1, math.prod(shape), math.prod(shape)
    edges, inner = _edges(shape[axes[0]], grains[axes[0]], count)
    lengths, across = np.diff(edges), tuple(1 if a == axes[0] else n for a, n in enumerate(shape))
    number, least, most = _sizes(across, axes[1:], inner, grains)
    return len(lengths) * number, int(lengths.min()) * least, int(lengths.max()) * most


def _long(shape: Sequence[int], axes: tuple[int, ...]) -> tuple[int, ...]:
    """Axes from the first one on that has more than one element."""
    return next((axes[k:] for k, a in enumerate(axes) if shape[a] > 1), ())


def _edges(extent: int, least: int, count: int) -> tuple[np.ndarray, int]:
    """Where an axis is cut into about `count` parts, both ends included; into how many each is to be cut further in.

    Args:
      extent: Of the axis.
      least: What parts are multiples of.
      count: At least 2.
    """
    n = -(-extent // least)
    parts = min(count, n)
    # edges on multiples of a power of two keep runs aligned on the other side of a transpose; 16 bytes are worth uneven
    # bands, because less is moved an element at a time. Blocks are aligned as they are.
    wanted = (128, 64, 32, 16, 8, 4, 2) if least == 1 else ()
    grain = next((g for g in wanted if n // parts >= (16 if g > 8 else 2) * g), 1)
    edges = np.append(np.arange(parts) * n // parts // grain * grain * least, extent)
    return edges, -(-count // parts)
