"""What an expression means, on whole NumPy arrays. This is the definition of the right answer.

Written to be obviously right and apart from lowering: it never sees a move, a piece or a box. `verify`, the demo and
the tests compare bytes against it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from shardfly_jax.sharding.finiteness import described
from shardfly_jax.sharding.formats import Cast, Divide, MulAdd, number
from shardfly_jax.sharding.grids import block_maxima, quantize
from shardfly_jax.sharding.language import (
    Astype,
    Concat,
    Divided,
    Expr,
    FamilyIndex,
    Fuse,
    Index,
    Pad,
    Quantize,
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

Cuts = Sequence[tuple[int, int]]
"""The half-open ranges, in order, into which the target is cut along the fused axis."""


def evaluate(expr: Expr, source: Callable[[str, int], np.ndarray], i: int, cuts: Cuts) -> np.ndarray:
    """The value of `expr` as a whole array.

    Args:
      expr: A bound expression (no variable but `{i}`).
      source: Gives the global array that a source name stands for at layer `i`.
      i: Value of the family variable.
      cuts: How the target is cut along the axis of an outer `fuse`; unused without one.

    Raises:
      NotFinite: A value to be quantized holds NaN or infinity.
    """
    match expr:
        case Src(name):
            return source(name, i)
        case Concat(parts, axis):
            return np.concatenate([evaluate(part, source, i, cuts) for part in parts], axis)
        case Stack(parts, axis):
            return np.stack([evaluate(part, source, i, cuts) for part in parts], axis)
        case Fuse(parts, axis, own_cuts):
            arrays = [evaluate(part, source, i, cuts) for part in parts]
            total = sum(x.shape[axis] for x in arrays)
            pieces = []
            for lo, hi in cuts if own_cuts is None else own_cuts:
                for x in arrays:
                    n = x.shape[axis]
                    pieces.append(np.take(x, range(lo * n // total, hi * n // total), axis))
            return np.concatenate(pieces, axis)
    x = evaluate(expr.value, source, i, cuts)  # type: ignore[attr-defined]
    match expr:
        case Rearrange(_, pattern, _):
            left, right = split_pattern(pattern)
            sizes = axis_sizes(expr, x.shape)
            names = [name for group in left for name in group]
            x = x.reshape([sizes[name] for name in names])
            x = x.transpose([names.index(name) for group in right for name in group])
            return x.reshape([math.prod(sizes[name] for name in group) for group in right])
        case Index(_, items):
            return x[tuple(item.value.at(i) if isinstance(item, FamilyIndex) else item for item in items)]
        case Take(_, indices, axis):
            return np.take(x, indices, axis)
        case TakePerLayer(_, per_layer, axis):
            return np.take(x, dict(per_layer)[i], axis)
        case Repeat(_, repeats, axis):
            return np.repeat(x, repeats, axis)
        case Pad(_, widths, fill):
            return np.pad(x, widths, constant_values=np.asarray(number(fill)).astype(x.dtype))
        case Scale(_, factor, add):
            return MulAdd(factor, add).apply(x)
        case Divided(_, divisor):
            return Divide(divisor).apply(x)
        case Astype(_, dtype):
            return Cast(dtype).apply(x)
        case Quantize(_, format, segments):
            return quantize(format, x, segments, described(expr, i))[0]
        case Scales(_, format, segments):
            return format.scales(block_maxima(format, x, segments, described(expr, i)))
    raise TypeError(f"{type(expr).__name__} is not an operation of the language")
