"""From an expression to the pieces that tile its value."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from shardfly_jax.sharding.errors import LanguageError
from shardfly_jax.sharding.formats import Cast, Divide, Fill, MulAdd
from shardfly_jax.sharding.inference import Lookup, infer
from shardfly_jax.sharding.language import (
    Astype,
    Concat,
    Divided,
    Expr,
    FamilyIndex,
    Fuse,
    Index,
    Pad,
    Rearrange,
    Repeat,
    Scale,
    Scales,
    Src,
    Stack,
    Take,
    TakePerLayer,
    axis_sizes,
    split_pattern,
)
from shardfly_jax.sharding.patterns import name_pattern
from shardfly_jax.sharding.pieces import (
    TARGET,
    Digit,
    Piece,
    clip,
    drop_axis,
    insert_axis,
    progressions,
    select,
    shift,
    split_axis,
)


class Value(NamedTuple):
    """Pieces that tile a tensor of `shape` for every layer of a range."""

    shape: tuple[int, ...]
    pieces: list[Piece]


class _Denoter:
    def __init__(
        self,
        lookup: Lookup,
        layers: range,
        cuts: Sequence[tuple[int, int]],
        scales: Callable[[Scales], Value] | None,
    ):
        self.lookup, self.layers, self.cuts, self.scales = lookup, layers, cuts, scales

    def __call__(self, expr: Expr) -> Value:
        match expr:
            case Src(name):
                return self.src(name)
            case Concat(parts, axis):
                return self.joined([self(part) for part in parts], axis, None)
            case Fuse(parts, axis, own_cuts):
                return self.joined([self(part) for part in parts], axis, self.cuts if own_cuts is None else own_cuts)
            case Scales():
                assert self.scales is not None
                return self.scales(expr)
            case Stack(parts, axis):
                values = [self(part) for part in parts]
                axis %= len(values[0].shape) + 1
                return self.joined([_unsqueezed(value, axis) for value in values], axis, None)
        value = self(expr.value)  # type: ignore[attr-defined]
        shape, pieces = value
        match expr:
            case Astype(_, dtype):
                return self.converted(value, Cast(dtype))
            case Scale(_, factor, add):
                return self.converted(value, MulAdd(factor, add))
            case Divided(_, divisor):
                return self.converted(value, Divide(divisor))
            case Repeat(_, repeats, axis):
                return _repeated(value, repeats, axis % len(shape))
            case Pad(inner, widths, fill):
                return self.padded(value, widths, Fill(fill, infer(inner, self.lookup, self.layers).dtype))
            case Take(_, indices, axis):
                axis %= len(shape)
                return Value(
                    (*shape[:axis], len(indices), *shape[axis + 1 :]), list(_taken(pieces, indices, axis, shape[axis]))
                )
            case TakePerLayer(_, per_layer, axis):
                return self.taken_per_layer(value, per_layer, axis % len(shape))
            case Index(_, items):
                return self.indexed(value, items)
            case Rearrange():
                return _rearranged(expr, value)
        raise TypeError(f"{type(expr).__name__} is not an operation of the language")

    def src(self, name: str) -> Value:
        shape, _ = self.lookup(name, self.layers)
        family = not name_pattern(name).is_literal
        first, count = self.layers[0], len(self.layers)
        digits = [Digit(n, a + 1, 1, a + 1, 1) for a, n in enumerate(shape) if n > 1]
        if count > 1:
            digits.insert(0, Digit(count, 0, 1, 0, 1) if family else Digit(count, 0, 1, -1, 0))
        zeros = (0,) * len(shape)
        return Value(shape, [Piece(name, (), (first, *zeros), (first if family else 0, *zeros), tuple(digits))])

    def joined(self, values: list[Value], axis: int, cuts: Sequence[tuple[int, int]] | None) -> Value:
        """Parts side by side: whole ones, or for each cut of the target the proportional cut of every part."""
        axis %= len(values[0].shape)
        lengths = [value.shape[axis] for value in values]
        total = sum(lengths)
        segments = [(k, 0, n) for k, n in enumerate(lengths)]
        if cuts is not None:
            segments = []
            for lo, hi in cuts:
                for k, n in enumerate(lengths):
                    if lo * n % total or hi * n % total:
                        raise LanguageError(
                            f"fuse: the cut {lo}:{hi} of {total} does not divide a part of length {n} on axis {axis}. "
                            f"Parts of lengths {lengths} can be cut into {math.gcd(*lengths)} or a divisor of it."
                        )
                    segments.append((k, lo * n // total, hi * n // total))
        pieces, offset = [], 0
        for k, lo, hi in segments:
            pieces += [
                shift(part, axis + 1, offset - lo)
                for piece in values[k].pieces
                for part in clip(piece, TARGET, axis + 1, lo, hi)
            ]
            offset += hi - lo
        shape = values[0].shape
        return Value((*shape[:axis], total, *shape[axis + 1 :]), pieces)

    def converted(self, value: Value, step: Cast | MulAdd | Divide) -> Value:
        return Value(value.shape, [piece._replace(steps=(*piece.steps, step)) for piece in value.pieces])

    def padded(self, value: Value, widths: Sequence[tuple[int, int]], fill: Fill) -> Value:
        pieces = list(value.pieces)
        for a, (before, _) in enumerate(widths):
            pieces = [shift(piece, a + 1, before) for piece in pieces]
        shape = tuple(n + before + after for n, (before, after) in zip(value.shape, widths, strict=True))
        box = [(0, n) for n in shape]
        for a, (before, after) in enumerate(widths):  # disjoint slabs: later axes only inside what earlier ones left
            for lo, hi in ((0, before), (shape[a] - after, shape[a])):
                if lo < hi:
                    pieces.append(self.constant([*box[:a], (lo, hi), *box[a + 1 :]], fill))
            box[a] = (before, shape[a] - after)
        return Value(shape, pieces)

    def constant(self, box: list[tuple[int, int]], fill: Fill) -> Piece:
        ranges = [(self.layers[0], self.layers[-1] + 1), *box]
        digits = tuple(Digit(hi - lo, a, 1, -1, 0) for a, (lo, hi) in enumerate(ranges) if hi - lo > 1)
        return Piece(None, (fill,), tuple(lo for lo, _ in ranges), (), digits)

    def taken_per_layer(self, value: Value, per_layer: Sequence[tuple[int, tuple[int, ...]]], axis: int) -> Value:
        pieces: list[Piece] = []
        count = 0
        for i, indices in per_layer:
            if i in self.layers:
                of_layer = [part for piece in value.pieces for part in clip(piece, TARGET, 0, i, i + 1)]
                pieces += _taken(of_layer, indices, axis, value.shape[axis])
                count = len(indices)
        return Value((*value.shape[:axis], count, *value.shape[axis + 1 :]), pieces)

    def indexed(self, value: Value, items: Sequence[int | slice | FamilyIndex]) -> Value:
        shape, pieces = value
        axis = 0
        for item in items:
            n = shape[axis]
            if isinstance(item, slice):
                start, stop, step = item.indices(n)
                count = len(range(start, stop, step))
                if (start, step, count) != (0, 1, n):
                    pieces = (
                        [part for piece in pieces for part in select(piece, axis + 1, start, step, count)]
                        if count
                        else []
                    )
                shape = (*shape[:axis], count, *shape[axis + 1 :])
                axis += 1
                continue
            if isinstance(item, FamilyIndex):
                start, count = item.value.at(self.layers[0]), len(self.layers)
                chosen = [part for piece in pieces for part in select(piece, axis + 1, start, item.value.scale, count)]
                pieces = [_tied(piece, axis + 1, self.layers[0]) for piece in chosen]
            else:
                pieces = [
                    drop_axis(part, axis + 1) for piece in pieces for part in select(piece, axis + 1, item % n, 1, 1)
                ]
            shape = shape[:axis] + shape[axis + 1 :]
        return Value(shape, pieces)


def denote(
    expr: Expr,
    lookup: Lookup,
    layers: range,
    cuts: Sequence[tuple[int, int]],
    scales: Callable[[Scales], Value] | None = None,
) -> Value:
    """The pieces of a bound expression over a range of layers.

    Args:
      expr: Already found sound by `infer`.
      lookup: Type of each source name.
      layers: Non-empty range of the family variable, step 1.
      cuts: Ranges into which the target is cut along the axis of an outer fuse.
      scales: Denotes the scales of a quantized value.

    Raises:
      LanguageError: A fuse whose parts the cuts do not divide.
    """
    return _Denoter(lookup, layers, cuts, scales)(expr)


def _unsqueezed(value: Value, axis: int) -> Value:
    return Value(
        (*value.shape[:axis], 1, *value.shape[axis:]), [insert_axis(piece, axis + 1) for piece in value.pieces]
    )


def _repeated(value: Value, repeats: int, axis: int) -> Value:
    a, pieces = axis + 1, []
    for piece in value.pieces:
        digits = tuple(d._replace(t_radix=d.t_radix * repeats) if d.t_axis == a else d for d in piece.digits)
        if repeats > 1:
            digits += (Digit(repeats, a, 1, -1, 0),)
        origin = list(piece.t_origin)
        origin[a] *= repeats
        pieces.append(piece._replace(t_origin=tuple(origin), digits=digits))
    return Value((*value.shape[:axis], value.shape[axis] * repeats, *value.shape[axis + 1 :]), pieces)


def _taken(pieces: Iterable[Piece], indices: tuple[int, ...], axis: int, length: int) -> Iterable[Piece]:
    pieces = list(pieces)
    for position, first, step, count in progressions(tuple(k % length for k in indices)):
        for piece in pieces:
            for part in select(piece, axis + 1, first, step, count):
                yield shift(part, axis + 1, position)


def _tied(piece: Piece, axis: int, first: int) -> Piece:
    """Target axis `axis`, counted from 0, becomes the family axis, counted from `first`."""
    digits = tuple(d._replace(t_axis=0) if d.t_axis == axis else d for d in piece.digits if d.t_axis != 0)
    origin = list(piece.t_origin)
    origin[0], origin[axis] = first + origin[axis], 0
    return drop_axis(piece._replace(t_origin=tuple(origin), digits=digits), axis)


def _rearranged(expr: Rearrange, value: Value) -> Value:
    left, right = split_pattern(expr.pattern)
    sizes = axis_sizes(expr, value.shape)
    pieces = value.pieces
    for group_index in reversed(range(len(left))):
        group, axis = left[group_index], group_index + 1
        if not group:
            pieces = [drop_axis(piece, axis) for piece in pieces]
        for name in reversed(group[1:]):
            pieces = [
                part
                for piece in pieces
                for part in split_axis(insert_axis(piece, axis + 1), axis, sizes[name], axis + 1)
            ]
    names = [name for group in left for name in group]
    place = {}
    for group_index, group in enumerate(right):
        for k, name in enumerate(group):
            place[name] = (group_index + 1, math.prod(sizes[inner] for inner in group[k + 1 :]))
    done = []
    for piece in pieces:
        origin = [piece.t_origin[0]] + [0] * len(right)
        for k, name in enumerate(names):
            axis, radix = place[name]
            origin[axis] += piece.t_origin[k + 1] * radix
        digits = []
        for d in piece.digits:
            if d.t_axis > 0:
                axis, radix = place[names[d.t_axis - 1]]
                d = d._replace(t_axis=axis, t_radix=d.t_radix * radix)
            digits.append(d)
        done.append(piece._replace(t_origin=tuple(origin), digits=tuple(digits)))
    return Value(tuple(math.prod(sizes[name] for name in group) for group in right), done)
