"""The mapping language: expressions over source tensors that say what a target tensor is.

Nodes are immutable values that compare and hash by content. What they *mean* stands in `evaluate`; how they become
moves stands in `lowering`; the shape and dtype of the result in `inference`. Nothing here touches data.
"""

from __future__ import annotations

import dataclasses
import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from einops import EinopsError
from einops.parsing import ParsedExpression

from shardfly_jax.sharding.errors import LanguageError
from shardfly_jax.sharding.formats import dtype_name, number_text
from shardfly_jax.sharding.grids import PLAIN, Segments
from shardfly_jax.sharding.patterns import Affine, parse_affine
from shardfly_jax.sharding.quantization import Format


@dataclasses.dataclass(frozen=True)
class FamilyIndex:
    """An index that follows a variable: `"{i}"`, `"{i}-3"`, `"{2*i}+1"`."""

    value: Affine


IndexItem = int | slice | FamilyIndex


class Expr:
    """Base of all nodes. Methods build larger expressions; none of them computes."""

    __slots__ = ()
    __iter__ = None  # indexing alone would make an endless sequence of it
    __contains__ = None

    def rearrange(self, pattern: str, **sizes: int) -> Expr:
        """Permutes, splits and merges axes by an einops pattern such as `"d n h -> (n h) d"`.

        Args:
          pattern: Both sides name the same axes; `1` inserts or drops an axis of length one.
          **sizes: Lengths of axes that the pattern alone does not determine.

        Raises:
          LanguageError: The pattern is malformed, repeats an axis, or its sides name different axes.
        """
        split_pattern(pattern)
        return Rearrange(self, pattern, tuple(sorted((name, operator.index(n)) for name, n in sizes.items())))

    def __getitem__(self, items: int | slice | str | tuple[int | slice | str, ...]) -> Expr:
        """Basic indexing as in NumPy; a string such as `"{i}"` or `"{i}-3"` indexes a `src` by the family variable."""
        parsed: list[IndexItem] = []
        for item in items if isinstance(items, tuple) else (items,):
            if isinstance(item, str):
                if not isinstance(self, Src):
                    raise LanguageError(
                        f"index: {item!r} is applied to {self}, but only a src can be indexed by a variable. "
                        "Index first."
                    )
                parsed.append(FamilyIndex(parse_index(item)))
            elif isinstance(item, slice):
                bounds = [None if n is None else operator.index(n) for n in (item.start, item.stop, item.step)]
                if bounds[2] == 0:
                    raise LanguageError(
                        "index: a slice has step 0, but a step moves. Use repeat for repeated elements."
                    )
                parsed.append(slice(*bounds))
            elif isinstance(item, int | np.integer) and not isinstance(item, bool):
                parsed.append(int(item))
            else:
                raise LanguageError(
                    f"index: {item!r} is a {type(item).__name__}, but only ints, slices and '{{i}}' can index. "
                    "Use take for lists."
                )
        return Index(self, tuple(parsed))

    def take(self, indices: Sequence[int] | Mapping[int, Sequence[int]], *, axis: int) -> Expr:
        """`np.take` along an axis; `{i: indices}` gives every layer its own list (expert maps)."""
        if isinstance(indices, Mapping):
            if not indices:
                raise LanguageError("take: no lists. Give one for every layer.")
            per_layer = tuple(
                sorted((operator.index(i), tuple(operator.index(k) for k in row)) for i, row in indices.items())
            )
            if len({len(row) for _, row in per_layer}) != 1:
                raise LanguageError(
                    "take: the lists of different layers differ in length. Give every layer the same number of indices."
                )
            return TakePerLayer(self, per_layer, operator.index(axis))
        return Take(self, tuple(operator.index(k) for k in indices), operator.index(axis))

    def repeat(self, repeats: int, *, axis: int) -> Expr:
        """`np.repeat`: each element next to its copies."""
        if repeats < 1:
            raise LanguageError(f"repeat: {repeats} repeats, but at least one copy must remain.")
        return Repeat(self, operator.index(repeats), operator.index(axis))

    def pad(self, widths: Sequence[tuple[int, int]], value: float = 0) -> Expr:
        """`np.pad` with a constant: `(before, after)` per axis."""
        pairs = tuple((operator.index(before), operator.index(after)) for before, after in widths)
        if any(before < 0 or after < 0 for before, after in pairs):
            raise LanguageError(f"pad: widths {pairs} are negative. Use a slice to truncate.")
        return Pad(self, pairs, number_text(value))

    def scale(self, factor: float, add: float = 0.0) -> Expr:
        """`x * factor + add`, computed in float32 and rounded back to the dtype of `x`."""
        if not _finite("scale", factor):
            raise LanguageError("scale: the factor is 0, which would lose the value.")
        return Scale(self, _finite("scale", factor), _finite("scale", add))

    def divide(self, divisor: float) -> Expr:
        """`x / divisor`, a true float32 division, rounded back to the dtype of `x`."""
        if not np.float32(_finite("divide", divisor)):
            raise LanguageError(f"divide: the divisor {divisor:g} is 0 in float32.")
        return Divided(self, float(divisor))

    def astype(self, dtype: Any) -> Expr:
        """Casts, rounding to nearest even. Written in a mapping it also permits narrowing."""
        return Astype(self, dtype_name(dtype))

    def quantize(self, format: Format) -> Expr:
        """Codes of a format; stands outermost. Its scales are another target, `scale_of`."""
        if not isinstance(format, Format):
            raise LanguageError(f"quantize: {format!r} is not a format. Give one, e.g. sf.formats.Fp8Block().")
        if isinstance(self, ScaleOf):
            raise LanguageError("quantize: scales of scales are not known. Leave the scales as they are.")
        return Quantize(self, format)


@dataclasses.dataclass(frozen=True)
class Src(Expr):
    """A source tensor, or the family of tensors that a name with `{i}` matches."""

    name: str


@dataclasses.dataclass(frozen=True)
class Rearrange(Expr):
    value: Expr
    pattern: str
    sizes: tuple[tuple[str, int], ...]


@dataclasses.dataclass(frozen=True)
class Index(Expr):
    value: Expr
    items: tuple[IndexItem, ...]


@dataclasses.dataclass(frozen=True)
class Take(Expr):
    value: Expr
    indices: tuple[int, ...]
    axis: int


@dataclasses.dataclass(frozen=True)
class TakePerLayer(Expr):
    value: Expr
    indices: tuple[tuple[int, tuple[int, ...]], ...]
    axis: int


@dataclasses.dataclass(frozen=True)
class Repeat(Expr):
    value: Expr
    repeats: int
    axis: int


@dataclasses.dataclass(frozen=True)
class Pad(Expr):
    value: Expr
    widths: tuple[tuple[int, int], ...]
    fill: str  # as text: -0.0 is not 0.0, and large integers stay exact


@dataclasses.dataclass(frozen=True)
class Scale(Expr):
    value: Expr
    factor: float
    add: float


@dataclasses.dataclass(frozen=True)
class Divided(Expr):
    value: Expr
    divisor: float


@dataclasses.dataclass(frozen=True)
class Astype(Expr):
    value: Expr
    dtype: str


@dataclasses.dataclass(frozen=True)
class Concat(Expr):
    parts: tuple[Expr, ...]
    axis: int


@dataclasses.dataclass(frozen=True)
class Stack(Expr):
    parts: tuple[Expr, ...]
    axis: int


@dataclasses.dataclass(frozen=True)
class Fuse(Expr):
    """Parts cut as the target is cut along `axis`; the cuts of one rank lie side by side.

    Under `Scales` the target is the payload's: its cuts stand in `cuts`, set when the plan is made.
    """

    parts: tuple[Expr, ...]
    axis: int
    cuts: tuple[tuple[int, int], ...] | None = None


@dataclasses.dataclass(frozen=True)
class Quantize(Expr):
    """Codes of a format. `segments` of rows and columns are set when the plan is made, where a layout decides them."""

    value: Expr
    format: Format
    segments: tuple[Segments, Segments] = PLAIN


@dataclasses.dataclass(frozen=True)
class ScaleOf(Expr):
    """The scales of a quantized target."""

    name: str


@dataclasses.dataclass(frozen=True)
class Scales(Expr):
    """What `ScaleOf` becomes when the plan is made: the scales of `Quantize` with the same fields."""

    value: Expr
    format: Format
    segments: tuple[Segments, Segments]


@dataclasses.dataclass(frozen=True)
class Alias(Expr):
    """The same value as another target; only ever the whole expression of a target."""

    name: str


def src(name: str) -> Expr:
    """The source tensor called `name`; `{i}` in it follows the target's `{i}`."""
    if not isinstance(name, str):
        raise LanguageError(f"src: the name {name!r} is a {type(name).__name__}, but a string is needed.")
    return Src(name)


def concat(parts: Sequence[Expr], axis: int = 0) -> Expr:
    """`np.concatenate` in global coordinates."""
    return Concat(_parts("concat", parts), operator.index(axis))


def stack(parts: Sequence[Expr], axis: int = 0) -> Expr:
    """`np.stack`."""
    return Stack(_parts("stack", parts), operator.index(axis))


def fuse(*parts: Expr, axis: int) -> Expr:
    """Fuses parts rank by rank, as tensor-parallel engines store qkv and gate_up.

    Every part is cut along `axis` in the proportions in which the target is cut; each rank holds its cuts of all parts
    side by side. Stands outermost: only `astype` may follow.
    """
    return Fuse(_parts("fuse", parts), operator.index(axis))


def scale_of(name: str) -> Expr:
    """The scales of the quantized target called `name`, one per block: as many axes as the target has.

    Layout operations may follow: transposed scales, `"1 1 -> "` for a scalar, `astype`.
    """
    if not isinstance(name, str):
        raise LanguageError(f"scale_of: the name {name!r} is a {type(name).__name__}, but a string is needed.")
    return ScaleOf(name)


def alias(name: str) -> Expr:
    """Another target's value: one buffer where the rollout registers one for both, else a copy of its own."""
    return Alias(name)


def _finite(op: str, number: float) -> float:
    """A constant as a Python float, finite in float32."""
    if not isinstance(number, int | float | np.number):
        raise LanguageError(f"{op}: the constant {number!r} is a {type(number).__name__}, but a number is needed.")
    with np.errstate(over="ignore"):
        if not np.isfinite(np.float32(number)):
            raise LanguageError(f"{op}: the constant {number:g} is not finite in float32.")
    return float(number)


def _parts(op: str, parts: Sequence[Expr]) -> tuple[Expr, ...]:
    if isinstance(parts, Expr) or not parts or not all(isinstance(part, Expr) for part in parts):
        raise LanguageError(f"{op}: needs one or more expressions, got {parts!r}.")
    if any(isinstance(part, Alias) for part in parts):
        raise LanguageError(f"{op}: an alias stands alone as the expression of a target.")
    return tuple(parts)


def parse_index(text: str) -> Affine:
    """Reads `{i}`, `{i}-3`, `{2*i+1}` as an affine function of one variable."""
    match = re.fullmatch(r"\{([^{}:]+)\}\s*([+-]\s*\d+)?", text.strip())
    if not match:
        raise LanguageError(f"index: {text!r} is not of the form '{{i}}', '{{i}}+1' or '{{i}}-3'.")
    inner = parse_affine(match.group(1))
    shift = int(match.group(2).replace(" ", "")) if match.group(2) else 0
    return dataclasses.replace(inner, offset=inner.offset + shift)


Axes = list[list[str]]


def split_pattern(pattern: str) -> tuple[Axes, Axes]:
    """The axis groups of both sides of an einops pattern; `1` gives an empty group.

    Raises:
      LanguageError: Malformed; the message is einops' own.
    """
    sides = pattern.split("->")
    if len(sides) != 2:
        raise LanguageError(f"rearrange: {pattern!r} must contain exactly one '->'.")
    try:
        left, right = (ParsedExpression(side.strip()) for side in sides)
    except EinopsError as error:
        raise LanguageError(f"rearrange: {pattern!r}: {error}") from error
    if left.has_ellipsis or right.has_ellipsis:
        raise LanguageError(f"rearrange: {pattern!r} has an ellipsis, but the axes of a weight are known. Name them.")
    if left.has_non_unitary_anonymous_axes or right.has_non_unitary_anonymous_axes:
        raise LanguageError(f"rearrange: {pattern!r} has a number other than 1. Name the axis and give its size.")
    if left.identifiers != right.identifiers:
        only = sorted(left.identifiers ^ right.identifiers)
        raise LanguageError(
            f"rearrange: {pattern!r} has {only} on one side only, but both sides must name the same axes."
        )
    return [list(group) for group in left.composition], [list(group) for group in right.composition]


def axis_sizes(expr: Rearrange, shape: Sequence[int]) -> dict[str, int]:
    """Length of every named axis of a rearrange applied to `shape`.

    Raises:
      LanguageError: The shape has another number of axes, or does not divide.
    """
    left, _ = split_pattern(expr.pattern)
    sizes = dict(expr.sizes)
    names = {name for group in left for name in group}
    if unknown := sorted(set(sizes) - names):
        raise LanguageError(f"rearrange: sizes {unknown} are not axes of {expr.pattern!r}.")
    if len(left) != len(shape):
        raise LanguageError(
            f"rearrange: {expr.pattern!r} has {len(left)} axes, but it is applied to the shape {tuple(shape)}."
        )
    for group, extent in zip(left, shape, strict=True):
        open_ = [name for name in group if name not in sizes]
        known = 1
        for name in group:
            known *= sizes.get(name, 1)
        if len(open_) > 1:
            raise LanguageError(f"rearrange: {expr.pattern!r} leaves the sizes of {open_} open. Give all but one.")
        if known == 0 or extent % known or (not open_ and known != extent):
            given = ", ".join(f"{name}={sizes[name]}" for name in group if name in sizes) or "length 1"
            raise LanguageError(
                f"rearrange: an axis of length {extent} does not divide into ({' '.join(group)}) with {given} "
                f"in {expr.pattern!r}."
            )
        if open_:
            sizes[open_[0]] = extent // known
    return sizes
