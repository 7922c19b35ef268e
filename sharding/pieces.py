"""Pieces: strided bijections between target and source coordinates, and the operations that cut and relabel them.

A value of the mapping language is a list of pieces that tile it. A piece walks a rectangular set of steps
`k = (k_0, ..., k_m)`; digit `d` contributes `k_d * t_radix` to one target axis and `k_d * s_radix` to one source axis:

    target[a] = t_origin[a] + sum of k_d * t_radix_d over digits d with t_axis_d == a
    source[a] = s_origin[a] + sum of k_d * s_radix_d over digits d with s_axis_d == a

Axis 0 on both sides is the virtual axis of the family; axis `a` of the tensor is `a + 1`. A digit with `s_axis == -1`
leaves the source where it is (repeats, fills). A digit with `t_axis == -1` and radix 0 leaves the target where it is:
its steps lie within one block, of which the target holds the scale. A piece without a source is a fill. Radices may be
negative on the source side (reversed slices), never on the target side.

No operation ever looks at elements: the cost follows the number of boxes and of irregular cuts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from shardfly_jax.sharding.formats import Step

TARGET, SOURCE = 0, 1


class Digit(NamedTuple):
    """`count` steps, each moving `t_radix` along target axis `t_axis` and `s_radix` along source axis `s_axis`."""

    count: int  # type: ignore[assignment]  # the field's word, over tuple.count
    t_axis: int
    t_radix: int
    s_axis: int
    s_radix: int


class Piece(NamedTuple):
    """One tile of a value. `source` is a source name of the language, or None for a fill."""

    source: str | None
    steps: tuple[Step, ...]
    t_origin: tuple[int, ...]
    s_origin: tuple[int, ...]
    digits: tuple[Digit, ...]


def span(piece: Piece, side: int, axis: int) -> tuple[int, int]:
    """Half-open range of coordinates that a piece touches on one axis."""
    origin = (piece.s_origin if side else piece.t_origin)[axis]
    lo = hi = origin
    for count, t_axis, t_radix, s_axis, s_radix in piece.digits:
        a, radix = (s_axis, s_radix) if side else (t_axis, t_radix)
        if a == axis:
            reach = (count - 1) * radix
            if reach >= 0:
                hi += reach
            else:
                lo += reach
    return lo, hi + 1


def _restrict(piece: Piece, index: int, start: int, stop: int) -> Piece:
    """The steps `start <= k < stop` of one digit."""
    digit = piece.digits[index]
    t_origin, s_origin = piece.t_origin, piece.s_origin
    if start:
        t = list(t_origin)
        t[digit.t_axis] += start * digit.t_radix
        t_origin = tuple(t)
        if digit.s_axis >= 0:
            s = list(s_origin)
            s[digit.s_axis] += start * digit.s_radix
            s_origin = tuple(s)
    left = () if stop - start == 1 else (digit._replace(count=stop - start),)
    return Piece(piece.source, piece.steps, t_origin, s_origin, piece.digits[:index] + left + piece.digits[index + 1 :])


def clip(piece: Piece, side: int, axis: int, lo: int, hi: int) -> list[Piece]:
    """The parts of a piece whose coordinate on `axis` of `side` lies in [lo, hi): at most 1 + 2 per digit.

    The digit with the largest radix cuts the axis into blocks. Blocks wholly inside stay together; the few that
    straddle a boundary are clipped again by the remaining digits.
    """
    first, last = span(piece, side, axis)
    if lo <= first and last <= hi:
        return [piece]
    if last <= lo or hi <= first:
        return []
    index, best = -1, 0
    for k, digit in enumerate(piece.digits):
        if (digit.s_axis if side else digit.t_axis) == axis:
            radix = abs(digit.s_radix if side else digit.t_radix)
            if radix > best:
                index, best = k, radix
    digit = piece.digits[index]
    count, radix = digit.count, digit.s_radix if side else digit.t_radix
    block_lo, block_hi = span(_restrict(piece, index, 0, 1), side, axis)
    if radix > 0:
        whole = -((block_lo - lo) // radix), (hi - block_hi) // radix + 1
        touched = (lo - block_hi) // radix + 1, -((block_lo - hi) // radix)
    else:
        whole = -((hi - block_hi) // -radix), (block_lo - lo) // -radix + 1
        touched = (block_lo - hi) // -radix + 1, -((lo - block_hi) // -radix)
    start, stop = max(whole[0], 0), min(whole[1], count)
    touch_start, touch_stop = max(touched[0], 0), min(touched[1], count)
    if stop <= start:
        start = stop = touch_start
    parts: list[Piece] = []
    for k in range(touch_start, min(start, touch_stop)):
        parts += clip(_restrict(piece, index, k, k + 1), side, axis, lo, hi)
    if start < stop:
        parts.append(_restrict(piece, index, start, stop))
    for k in range(max(stop, touch_start), touch_stop):
        parts += clip(_restrict(piece, index, k, k + 1), side, axis, lo, hi)
    return parts


def clip_box(piece: Piece, side: int, box: tuple[tuple[int, int], ...]) -> list[Piece]:
    """The parts of a piece inside a box, whose first range is that of axis 0 (the family)."""
    parts = [piece]
    for axis, (lo, hi) in enumerate(box):
        parts = [part for whole in parts for part in clip(whole, side, axis, lo, hi)]
    return parts


def shift(piece: Piece, axis: int, offset: int) -> Piece:
    """Moves a piece along a target axis."""
    if not offset:
        return piece
    origin = list(piece.t_origin)
    origin[axis] += offset
    return piece._replace(t_origin=tuple(origin))


def insert_axis(piece: Piece, axis: int) -> Piece:
    """A new target axis of length one."""
    digits = tuple(d._replace(t_axis=d.t_axis + 1) if d.t_axis >= axis else d for d in piece.digits)
    return piece._replace(t_origin=(*piece.t_origin[:axis], 0, *piece.t_origin[axis:]), digits=digits)


def drop_axis(piece: Piece, axis: int) -> Piece:
    """Removes a target axis on which the piece stays at coordinate 0."""
    digits = tuple(d._replace(t_axis=d.t_axis - 1) if d.t_axis > axis else d for d in piece.digits)
    return piece._replace(t_origin=piece.t_origin[:axis] + piece.t_origin[axis + 1 :], digits=digits)


def split_axis(piece: Piece, axis: int, inner: int, inner_axis: int) -> list[Piece]:
    """Coordinate `c` of a target axis becomes `c // inner` there and `c % inner` on `inner_axis`, where it was 0.

    A piece whose digits do not carry across multiples of `inner` is only relabelled. A digit that straddles is split in
    two if it divides; otherwise the piece is cut at multiples of `inner`.
    """
    lo, hi = span(piece, TARGET, axis)
    low_reach = sum((d.count - 1) * d.t_radix for d in piece.digits if d.t_axis == axis and d.t_radix % inner)
    if lo % inner + low_reach < inner:
        digits = []
        for d in piece.digits:
            if d.t_axis == axis:
                d = d._replace(t_axis=inner_axis) if d.t_radix % inner else d._replace(t_radix=d.t_radix // inner)
            digits.append(d)
        origin = list(piece.t_origin)
        origin[axis], origin[inner_axis] = lo // inner, lo % inner
        return [piece._replace(t_origin=tuple(origin), digits=tuple(digits))]
    for index, d in enumerate(piece.digits):
        if d.t_axis != axis or d.t_radix % inner == 0 or inner % d.t_radix:
            continue
        per_block = inner // d.t_radix
        if d.count > per_block and d.count % per_block == 0 and (lo % inner) // d.t_radix == 0:
            outer = Digit(d.count // per_block, axis, inner, d.s_axis, d.s_radix * per_block)
            digits_ = (*piece.digits[:index], outer, d._replace(count=per_block), *piece.digits[index + 1 :])
            return split_axis(piece._replace(digits=digits_), axis, inner, inner_axis)
    first_multiple, last_multiple = -(-lo // inner) * inner, hi // inner * inner
    if (first_multiple, last_multiple) != (lo, hi) and first_multiple < last_multiple:
        inside = [first_multiple, last_multiple]
    else:
        inside = list(range(first_multiple if first_multiple > lo else lo + inner, hi, inner))
    edges = [lo, *inside, hi]
    return [
        done
        for start, stop in itertools.pairwise(edges)
        if start < stop
        for part in clip(piece, TARGET, axis, start, stop)
        for done in split_axis(part, axis, inner, inner_axis)
    ]


def straddles(piece: Piece, axis: int, block: int) -> bool:
    """Whether steps shorter than a block carry a piece across its edges: then digits or the piece have to be cut."""
    reach = sum((d.count - 1) * d.t_radix for d in piece.digits if d.t_axis == axis and d.t_radix % block)
    return piece.t_origin[axis] % block + reach >= block


def split_blocks(piece: Piece, axis: int, block: int) -> list[Piece]:
    """Cuts a piece so that every digit of a target axis moves by whole blocks, or stays within one."""
    if not straddles(piece, axis, block):
        return [piece]
    spare = len(piece.t_origin)
    out = []
    for part in split_axis(piece._replace(t_origin=(*piece.t_origin, 0)), axis, block, spare):
        digits = []
        for d in part.digits:
            if d.t_axis == axis:
                d = d._replace(t_radix=d.t_radix * block)
            elif d.t_axis == spare:
                d = d._replace(t_axis=axis)
            digits.append(d)
        origin = list(part.t_origin)
        origin[axis] = origin[axis] * block + origin.pop()
        out.append(part._replace(t_origin=tuple(origin), digits=tuple(digits)))
    return out


def join_digits(piece: Piece) -> Piece:
    """The same piece with fewer digits: those joined that go on where another one ends, on both sides."""
    out: list[Digit] = []
    for d in sorted(piece.digits, key=lambda d: (d.t_axis, d.s_axis, -d.t_radix)):
        if out and out[-1][1:] == (d.t_axis, d.t_radix * d.count, d.s_axis, d.s_radix * d.count):
            d = d._replace(count=d.count * out.pop().count)
        out.append(d)
    return piece if len(out) == len(piece.digits) else piece._replace(digits=tuple(out))


def outside(piece: Piece, box: tuple[tuple[int, int], ...]) -> list[Piece]:
    """The parts of a piece outside a box of target coordinates, whose first range is that of axis 0."""
    out, inside = [], [piece]
    for axis, (lo, hi) in enumerate(box):
        for part in inside:
            start, stop = span(part, TARGET, axis)
            out += clip(part, TARGET, axis, start, min(lo, stop)) + clip(part, TARGET, axis, max(hi, start), stop)
        inside = [kept for part in inside for kept in clip(part, TARGET, axis, lo, hi)]
    return out


def _flip(piece: Piece, axis: int, last: int) -> Piece:
    """Target coordinate `c` becomes `last - c`; digits turn round so that target radices stay positive."""
    t_origin, s_origin = list(piece.t_origin), list(piece.s_origin)
    t_origin[axis] = last - t_origin[axis]
    digits = []
    for d in piece.digits:
        if d.t_axis == axis:
            t_origin[axis] -= (d.count - 1) * d.t_radix
            if d.s_axis >= 0:
                s_origin[d.s_axis] += (d.count - 1) * d.s_radix
            d = d._replace(s_radix=-d.s_radix)
        digits.append(d)
    return piece._replace(t_origin=tuple(t_origin), s_origin=tuple(s_origin), digits=tuple(digits))


def select(piece: Piece, axis: int, start: int, step: int, count: int) -> Iterator[Piece]:
    """Target coordinates `start + k * step`, `0 <= k < count`, of an axis become `k`; others go. `step` != 0."""
    last = start + (count - 1) * step
    for part in clip(piece, TARGET, axis, min(start, last), max(start, last) + 1):
        if count == 1 or step == 1:
            yield shift(part, axis, -start)
        elif step == -1:
            yield _flip(part, axis, start)
        elif step < 0:
            for forward in select(part, axis, last, -step, count):
                yield _flip(forward, axis, count - 1)
        else:
            spare = len(part.t_origin)
            moved = shift(part, axis, -start)
            moved = moved._replace(t_origin=(*moved.t_origin, 0))
            for split in split_axis(moved, axis, step, spare):
                for kept in clip(split, TARGET, spare, 0, 1):
                    yield kept._replace(t_origin=kept.t_origin[:spare])


def progressions(indices: tuple[int, ...]) -> Iterator[tuple[int, int, int, int]]:
    """Greedy cover of a list by `(position, first index, step, count)` with step != 0."""
    k = 0
    while k < len(indices):
        stop = k + 1
        step = indices[stop] - indices[k] if stop < len(indices) else 0
        if step:
            while stop < len(indices) and indices[stop] - indices[stop - 1] == step:
                stop += 1
            if stop == k + 2 and step != 1 and stop < len(indices):
                stop = k + 1
        yield k, indices[k], step or 1, stop - k
        k = stop
