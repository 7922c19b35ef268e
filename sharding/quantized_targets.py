"""What a target's layout decides of its quantization: segments of part and rank scopes, and where blocks may be cut."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from shardfly_jax.sharding.errors import LanguageError
from shardfly_jax.sharding.grids import Segments
from shardfly_jax.sharding.language import Expr, Fuse, Quantize, Scales
from shardfly_jax.sharding.layouts import Layout
from shardfly_jax.sharding.quantization import Format
from shardfly_jax.sharding.walks import outer_fuse, rewrite

AXES = (-2, -1)
WORDS = {-2: "rows", -1: "columns"}


def bound_quantize(expr: Quantize, layout: Layout, parts: Sequence[int]) -> Quantize:
    """The expression with the segments that its target's layout decides.

    Args:
      parts: Lengths of the parts of its outer fuse; empty without one.

    Raises:
      LanguageError: Blocks that would cross from one rank or fused part into the next, ranks that do not tile the
        tensor, or parts fused along an axis whose codes share bytes.
    """
    if 0 in layout.shape:
        return expr  # an empty target is refused as such
    fused, scope = outer_fuse(expr), expr.format.scope
    layout = unpacked(layout, expr.format)
    axis = None if fused is None else fused.axis % len(layout.shape) - len(layout.shape)
    if axis == -1 and expr.format.per_byte > 1:
        raise LanguageError(
            f"quantize: parts are fused along the columns, but {type(expr.format).__name__} puts "
            f"{expr.format.per_byte} codes of neighbouring columns into each byte. Fuse rows, or use concat"
        )
    pieces = {a: _pieces(layout, a, parts if a == axis else ()) for a in AXES}
    if scope == "block":
        for a, block in zip(AXES, expr.format.block, strict=True):
            if block is not None:
                _check_edges(layout, a, block, pieces[a], parts if a == axis else ())
    segments: list[Segments] = [(), ()]
    for k, a in enumerate(AXES):
        if scope == "part" and a == axis and len(parts) > 1:
            segments[k] = tuple((lo, hi, part) for lo, hi, _, part in pieces[a])
        if scope == "rank" and expr.format.block[k] is None:
            cuts = layout.cuts(a % len(layout.shape))
            if [lo for lo, _ in cuts] != [0, *(hi for _, hi in cuts[:-1])] or cuts[-1][1] != layout.shape[a]:
                raise LanguageError(
                    f"quantize: the ranks cut the {WORDS[a]} into {list(cuts)}, which does not tile them, but each "
                    "rank has a scale of its own. Give boxes that tile the tensor"
                )
            segments[k] = tuple((lo, hi, rank) for rank, (lo, hi) in enumerate(cuts)) if len(cuts) > 1 else ()
    return dataclasses.replace(expr, segments=(segments[0], segments[1]))


def unpacked(layout: Layout, format: Format) -> Layout:
    """The layout of the values whose stored codes have a layout."""
    if format.per_byte == 1:
        return layout
    bounds = layout.bounds.copy()
    bounds[:, -1] *= format.per_byte
    shape = (*layout.shape[:-1], layout.shape[-1] * format.per_byte)
    return Layout.from_bounds(shape, layout.dtype, layout.ranks, bounds)


def scales(expr: Quantize, layout: Layout) -> Scales:
    """The scales of a bound expression, as an expression that no longer depends on the payload's layout."""

    def leaf(node: Expr) -> Expr | None:
        if not isinstance(node, Fuse):
            return None
        return dataclasses.replace(node, cuts=layout.cuts(node.axis % len(layout.shape)))

    return Scales(rewrite(expr.value, leaf), expr.format, expr.segments)


def _pieces(layout: Layout, axis: int, parts: Sequence[int]) -> list[tuple[int, int, int, int]]:
    """(lo, hi, cut, part) along an axis: each rank's cut of each part."""
    total, out = layout.shape[axis], []
    for cut, (lo, hi) in enumerate(layout.cuts(axis % len(layout.shape))):
        at = lo
        for part, n in enumerate(parts or [total]):
            length = (hi * n // total) - (lo * n // total)
            out.append((at, at + length, cut, part))
            at += length
    return out


def _check_edges(
    layout: Layout, axis: int, block: int, pieces: Sequence[tuple[int, int, int, int]], parts: Sequence[int]
) -> None:
    total = layout.shape[axis]
    edges = {edge for lo, hi, _, _ in pieces for edge in (lo, hi) if 0 < edge < total}
    if not any(edge % block for edge in edges):
        return
    word, cuts = WORDS[axis], len(layout.cuts(axis % len(layout.shape)))
    lengths = parts or [total]
    whole = math.gcd(*lengths) // block if not any(n % block for n in lengths) else 0
    ranks = [n for n in range(1, whole + 1) if whole % n == 0] or ([1] if len(lengths) == 1 else [])
    sizes = [n for n in range(1, block) if not any(edge % n for edge in edges)]
    ways = [f"{', '.join(map(str, ranks[:8]))} cuts of equal size"] if ranks else []
    ways += [f"blocks of {', '.join(map(str, sizes[-4:]))} {word}"]
    shown = ", ".join(str(hi - lo) for lo, hi, cut, _ in pieces if cut == 0)
    raise LanguageError(
        f"quantize: {cuts} cuts give parts of {shown} {word}, but a block of {block} {word} may not cross into the "
        f"next part or rank. These would do: {'; '.join(ways)}"
    )
