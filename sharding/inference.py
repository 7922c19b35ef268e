"""Shape and dtype of an expression, and every reason why it has none."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from shardfly_jax.sharding.errors import LanguageError
from shardfly_jax.sharding.formats import FLOAT_TO_INT, holds, is_float, is_narrowing, number
from shardfly_jax.sharding.grids import grid_shape
from shardfly_jax.sharding.language import (
    Alias,
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
    ScaleOf,
    Scales,
    Src,
    Stack,
    Take,
    TakePerLayer,
    axis_sizes,
    split_pattern,
)


class TensorType(NamedTuple):
    """Global shape (without the family axis) and dtype name."""

    shape: tuple[int, ...]
    dtype: str


Lookup = Callable[[str, range], TensorType]
"""The type of the source tensors that a name stands for over a range of the family variable."""


def infer(expr: Expr, lookup: Lookup, layers: range) -> TensorType:
    """The type of `expr` for each value of the family variable in `layers`.

    Raises:
      LanguageError: Some operation does not fit its operand; the message says which.
    """
    match expr:
        case Src(name):
            return lookup(name, layers)
        case Concat(parts, axis) | Fuse(parts, axis):
            op = "concat" if isinstance(expr, Concat) else "fuse"
            types = [infer(part, lookup, layers) for part in parts]
            _same_dtype(op, types)
            a = _axis(op, axis, types[0].shape)
            rest = {(*t.shape[:a], -1, *t.shape[a + 1 :]) for t in types}
            if len(rest) > 1:
                raise LanguageError(f"{op}: parts of shapes {[t.shape for t in types]} differ away from axis {a}.")
            total = sum(t.shape[a] for t in types)
            return TensorType((*types[0].shape[:a], total, *types[0].shape[a + 1 :]), types[0].dtype)
        case Stack(parts, axis):
            types = [infer(part, lookup, layers) for part in parts]
            _same_dtype("stack", types)
            if len({t.shape for t in types}) > 1:
                raise LanguageError(f"stack: parts of shapes {[t.shape for t in types]} differ.")
            a = _axis("stack", axis, (*types[0].shape, 1))
            return TensorType((*types[0].shape[:a], len(types), *types[0].shape[a:]), types[0].dtype)
        case Alias(name):
            raise LanguageError(f"alias: {name!r} stands for another target, which has no expression of its own.")
        case ScaleOf(name):
            raise LanguageError(f"scale_of: {name!r} is not the name of a quantized target.")
    shape, dtype = infer(expr.value, lookup, layers)  # type: ignore[attr-defined]
    match expr:
        case Astype(_, target):
            if is_float(dtype) and not is_float(target):
                raise LanguageError(f"astype: from {dtype} to {target}, but {FLOAT_TO_INT}.")
            return TensorType(shape, target)
        case Scale() | Divided():
            if not is_float(dtype):
                op = "scale" if isinstance(expr, Scale) else "divide"
                raise LanguageError(f"{op}: applied to {dtype}, but only floating-point values are scaled. Cast first.")
            return TensorType(shape, dtype)
        case Quantize(_, format, segments) | Scales(_, format, segments):
            if not is_float(dtype) or is_narrowing(dtype, "float32"):
                raise LanguageError(
                    f"quantize: applied to {dtype}, but blocks are scaled in float32. Use astype('float32') first."
                )
            grid = grid_shape(format, shape, segments)
            if isinstance(expr, Scales):
                return TensorType(grid, format.scale_dtype)
            return TensorType(format.stored_shape(shape), format.stored)
        case Rearrange(_, pattern, _):
            sizes = axis_sizes(expr, shape)
            _, right = split_pattern(pattern)
            return TensorType(tuple(math.prod(sizes[name] for name in group) for group in right), dtype)
        case Index(_, items):
            return TensorType(_indexed(items, shape, layers), dtype)
        case Take(_, indices, axis):
            a = _axis("take", axis, shape)
            return TensorType(_taken(indices, a, shape), dtype)
        case TakePerLayer(_, per_layer, axis):
            a = _axis("take", axis, shape)
            missing = sorted(set(layers) - {i for i, _ in per_layer})
            if missing:
                raise LanguageError(f"take: no indices for layers {missing}. Give a list for every layer.")
            return TensorType(next(_taken(row, a, shape) for i, row in per_layer if i in layers), dtype)
        case Repeat(_, repeats, axis):
            a = _axis("repeat", axis, shape)
            return TensorType((*shape[:a], shape[a] * repeats, *shape[a + 1 :]), dtype)
        case Pad(_, widths, fill):
            if not holds(dtype, number(fill)):
                raise LanguageError(f"pad: the value {fill} does not exist in {dtype}. Choose another, or cast first.")
            if len(widths) != len(shape):
                raise LanguageError(
                    f"pad: {len(widths)} widths for the shape {shape}. Give (before, after) for every axis."
                )
            return TensorType(
                tuple(n + before + after for n, (before, after) in zip(shape, widths, strict=True)), dtype
            )
    raise LanguageError(f"{type(expr).__name__} is not an operation of the language.")


def _same_dtype(op: str, types: list[TensorType]) -> None:
    if len({t.dtype for t in types}) > 1:
        raise LanguageError(
            f"{op}: parts have dtypes {[t.dtype for t in types]}, but one tensor has one. Use astype on the parts."
        )


def _axis(op: str, axis: int, shape: tuple[int, ...]) -> int:
    if not -len(shape) <= axis < len(shape):
        raise LanguageError(f"{op}: axis {axis} does not exist in the shape {shape}.")
    return axis % len(shape)


def _taken(indices: tuple[int, ...], axis: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    n = shape[axis]
    if bad := [k for k in indices if not -n <= k < n]:
        raise LanguageError(f"take: indices {bad} are outside axis {axis} of length {n}.")
    return (*shape[:axis], len(indices), *shape[axis + 1 :])


def _indexed(items: tuple[int | slice | FamilyIndex, ...], shape: tuple[int, ...], layers: range) -> tuple[int, ...]:
    if len(items) > len(shape):
        raise LanguageError(f"index: {len(items)} indices for the shape {shape}.")
    out: list[int] = []
    for item, n in zip(items, shape, strict=False):
        if isinstance(item, slice):
            out.append(len(range(n)[item]))
        elif isinstance(item, FamilyIndex):
            reached = [item.value.at(layers[0]), item.value.at(layers[-1])]
            if min(reached) < 0 or max(reached) >= n:
                raise LanguageError(
                    f"index: {{{item.value}}} reaches {min(reached)} to {max(reached)} for layers {layers[0]} "
                    f"to {layers[-1]}, outside an axis of length {n}."
                )
        elif not -n <= item < n:
            raise LanguageError(f"index: {item} is outside an axis of length {n}.")
    return (*out, *shape[len(items) :])
