"""Composing mappings: N + M adapters give N x M routes.

The inner mapping may define the layers of one name in parts, because they lie in several places: `h.{i:0:3}.w` in one
stack and `h.{i:3:}.w` in another, or `h.{2*i}.w` and `h.{2*i+1}.w`. An entry of the outer mapping that reads `h.{i}.w`
is then split in the same way, one entry per part, its layers renumbered so that `{i}` counts what the part counts, and
so is its `scale_of` or alias. An entry that reads one layer by its number, `h.7.w`, gets that layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping as AbstractMapping
from typing import NamedTuple

from shardfly_jax.sharding.errors import LanguageError
from shardfly_jax.sharding.language import Alias, Expr, FamilyIndex, Index, ScaleOf, Src, Take, TakePerLayer
from shardfly_jax.sharding.mapping import Mapping, bound_item
from shardfly_jax.sharding.patterns import FAMILY, Affine, Hole, NamePattern, name_pattern, name_shape
from shardfly_jax.sharding.walks import nodes, rewrite, sources


class Span(NamedTuple):
    """The layers `at(j)` for `lo <= j < hi`; no end where `hi` is None."""

    at: Affine
    lo: int
    hi: int | None

    def where(self, value: Affine, lo: int, hi: int | None) -> Span:
        """The part in which `value(j)` lies in a range."""
        first = max(self.lo, _first(value, lo))
        if hi is None:
            return Span(self.at, first, self.hi)
        stop = _first(value, hi)
        return Span(self.at, first, stop if self.hi is None else min(stop, self.hi))

    @property
    def is_empty(self) -> bool:
        return self.hi is not None and self.hi <= self.lo


EVERY = Span(Affine(FAMILY), 0, None)


def compose(outer: AbstractMapping[str, Expr], inner: AbstractMapping[str, Expr]) -> Mapping:
    """`outer` with every source name replaced by its expression in `inner`.

    Names are matched as text once variables are bound: `outer` may read `h.{i}.w` where `inner` defines `h.{i}.w`, or
    parts of its layers such as `h.{i:3:}.w` or `h.{2*i}.w`; or read one of its layers, `h.7.w`; or a stacked name at an
    index.

    Raises:
      LanguageError: `outer` reads a name that `inner` does not define, or defines in cycles that do not fit together.
    """
    parts = _Parts(inner)
    entries: dict[str, Expr] = {}
    for name, expr in outer.items():
        for span in parts.spans(_read(outer, expr)):
            within = _own_range(name_pattern(name), span)
            if not within.is_empty:
                entries[name_pattern(name).renumbered(*within)] = _renumbered(expr, span.at, parts.reader(span))
    return Mapping(entries)


def _read(outer: AbstractMapping[str, Expr], expr: Expr) -> list[str]:
    """Names of all sources of an expression, and of the entry of which it is an alias or the scales."""
    others = [node.name for node in nodes(expr) if isinstance(node, Alias | ScaleOf)]
    return [name for one in (expr, *(outer[other] for other in others if other in outer)) for name in sources(one)]


def undefined(outer: AbstractMapping[str, Expr], inner: AbstractMapping[str, Expr]) -> list[str]:
    """Names that `outer` reads and of which `inner` defines no layer, sorted; `compose` refuses each of them."""
    parts = _Parts(inner)
    return sorted({name for expr in outer.values() for name in sources(expr) if not parts.has(name)})


class _Parts:
    """An inner mapping: its entries by name, and those that define some layers of a name."""

    def __init__(self, inner: AbstractMapping[str, Expr]):
        self._inner = inner
        self._of_layers: dict[tuple[str, ...], list[tuple[Hole, Expr]]] = {}
        self._by_shape: dict[str, list[NamePattern]] = {}
        for text, expr in inner.items():
            pattern = name_pattern(text)
            if (hole := _layer_hole(pattern)) is not None:
                self._of_layers.setdefault(pattern.literals, []).append((hole, expr))
                self._by_shape.setdefault(pattern.shape, []).append(pattern)

    def has(self, name: str) -> bool:
        """Whether the inner mapping defines a name, or some of its layers."""
        if name in self._inner:
            return True
        pattern = name_pattern(name)
        if pattern.is_literal:
            return any(other.match(name) is not None for other in self._by_shape.get(name_shape(name), ()))
        return _layer_hole(pattern) is not None and pattern.literals in self._of_layers

    def spans(self, names: Iterable[str]) -> list[Span]:
        """Layers over which each of some sources is one entry of the inner mapping."""
        found = [EVERY]
        for name in names:
            if name not in self._inner and not name_pattern(name).is_literal:
                found = [part for span in found for part in self._split(span, name)]
        return found

    def reader(self, span: Span) -> Callable[[Src], Expr]:
        """Replaces a source by what the inner mapping says, for the layers of a span."""

        def read(node: Src) -> Expr:
            if node.name in self._inner:
                return _renumbered(self._inner[node.name], span.at, None)
            if name_pattern(node.name).is_literal:
                return self._one_layer(node.name)
            here = self._layer_of(node.name).of(span.at)
            for hole, expr in self._of_layers[name_pattern(node.name).literals]:
                there = _quotient(here, hole.value)
                if there is not None and not span.where(there, hole.lo, hole.hi).is_empty:
                    return _renumbered(expr, there, None)
            raise AssertionError(f"{node.name!r} was split into spans that no entry covers")

        return read

    def _one_layer(self, name: str) -> Expr:
        """What the inner mapping says of a layer that is read by its number."""
        for pattern in self._by_shape.get(name_shape(name), ()):
            if (values := pattern.match(name)) is not None:
                return _at_layer(self._inner[pattern.text], values[FAMILY])
        raise _undefined(name)

    def _layer_of(self, name: str) -> Affine:
        pattern = name_pattern(name)
        hole = _layer_hole(pattern)
        if hole is None or pattern.literals not in self._of_layers:
            raise _undefined(name)
        return hole.value

    def _split(self, span: Span, name: str) -> Iterator[Span]:
        here = self._layer_of(name).of(span.at)
        for hole, _ in self._of_layers[name_pattern(name).literals]:
            if here.scale % hole.value.scale == 0:
                there = _quotient(here, hole.value)
                part = None if there is None else span.where(there, hole.lo, hole.hi)
            elif hole.value.scale % here.scale == 0:  # the entry has fewer layers: count as it counts
                old = _quotient(hole.value, here)
                part = None
                if old is not None:
                    part = Span(span.at.of(old), hole.lo, hole.hi).where(old, span.lo, span.hi)
            else:
                raise LanguageError(
                    f"compose: {name!r} is read every {here.scale} layers, but defined every {hole.value.scale}. "
                    "Use cycles of which one divides the other."
                )
            if part is not None and not part.is_empty:
                yield part


def _undefined(name: str) -> LanguageError:
    return LanguageError(f"compose: {name!r} is read, but the inner mapping does not define it.")


def _layer_hole(pattern: NamePattern) -> Hole | None:
    """The hole of a name whose only variable is the layer's, once."""
    return pattern.holes[0] if len(pattern.holes) == 1 and pattern.variables == (FAMILY,) else None


def _own_range(pattern: NamePattern, span: Span) -> Span:
    """A span without the layers that a target's own pattern leaves out."""
    for hole in pattern.holes:
        if hole.value.variable == FAMILY:
            span = span.where(span.at, hole.lo, hole.hi)
    return span


def _first(value: Affine, bound: int) -> int:
    """The smallest j for which `value(j) >= bound`."""
    return -((value.offset - bound) // value.scale)


def _quotient(value: Affine, divisor: Affine) -> Affine | None:
    """The function q for which `divisor(q(j))` is `value(j)`; None where that is never whole."""
    scale, left = divmod(value.scale, divisor.scale)
    offset, rest = divmod(value.offset - divisor.offset, divisor.scale)
    return None if left or rest else Affine(FAMILY, scale, offset)


def _renumbered(expr: Expr, at: Affine, read: Callable[[Src], Expr] | None) -> Expr:
    """An expression whose layer `i` is `at(i)`; `read`, if given, replaces its sources."""
    if read is None and at == EVERY.at:
        return expr

    def leaf(node: Expr) -> Expr | None:
        match node:
            case Src(name):
                return read(node) if read else Src(name_pattern(name).renumbered(at))
            case Alias(name):
                return Alias(name_pattern(name).renumbered(at))
            case ScaleOf(name):
                return ScaleOf(name_pattern(name).renumbered(at))
            case Index(value, items):
                return Index(_renumbered(value, at, read), tuple(_renumbered_item(item, at) for item in items))
            case TakePerLayer(value, rows, axis):
                kept = {at.solve(i): row for i, row in rows}
                return TakePerLayer(
                    _renumbered(value, at, read), tuple((i, row) for i, row in kept.items() if i is not None), axis
                )
        return None

    return rewrite(expr, leaf)


def _at_layer(expr: Expr, layer: int) -> Expr:
    """An expression for one layer."""

    def leaf(node: Expr) -> Expr | None:
        match node:
            case Src(name):
                return Src(name_pattern(name).bind({FAMILY: layer}))
            case Index(value, items):
                chosen = tuple(bound_item(item, {FAMILY: layer}) for item in items)
                return Index(_at_layer(value, layer), chosen)
            case TakePerLayer(value, rows, axis):
                found = dict(rows).get(layer)
                if found is None:
                    raise LanguageError(f"take: no indices for layer {layer}. Give a list for every layer.")
                return Take(_at_layer(value, layer), found, axis)
        return None

    return rewrite(expr, leaf)


def _renumbered_item(item: int | slice | FamilyIndex, at: Affine) -> int | slice | FamilyIndex:
    if isinstance(item, FamilyIndex) and item.value.variable == FAMILY:
        return FamilyIndex(item.value.of(at))
    return item
