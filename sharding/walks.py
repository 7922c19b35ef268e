"""What expressions are made of: walks through them, and what stands outermost."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from shardfly_jax.sharding.errors import LanguageError
from shardfly_jax.sharding.language import (
    Alias,
    Astype,
    Concat,
    Expr,
    Fuse,
    Quantize,
    Rearrange,
    ScaleOf,
    Scales,
    Src,
    Stack,
    split_pattern,
)


def children(expr: Expr) -> tuple[Expr, ...]:
    """The operands of a node."""
    match expr:
        case Src() | Alias() | ScaleOf():
            return ()
        case Concat(parts) | Stack(parts) | Fuse(parts):
            return parts
        case _:
            return (expr.value,)  # type: ignore[attr-defined]


def rewrite(expr: Expr, leaf: Callable[[Expr], Expr | None]) -> Expr:
    """A copy in which each node for which `leaf` returns something is replaced by that; others are descended."""
    replaced = leaf(expr)
    if replaced is not None:
        return replaced
    match expr:
        case Src() | Alias() | ScaleOf():
            return expr
        case Concat(parts) | Stack(parts) | Fuse(parts):
            return dataclasses.replace(expr, parts=tuple(rewrite(part, leaf) for part in parts))
        case _:
            return dataclasses.replace(expr, value=rewrite(expr.value, leaf))  # type: ignore[attr-defined,type-var]


def nodes(expr: Expr) -> Iterator[Expr]:
    """An expression and all that it is made of, each before its operands, these in order."""
    todo = [expr]
    while todo:
        node = todo.pop()
        yield node
        todo += reversed(children(node))


def sources(expr: Expr) -> tuple[str, ...]:
    """Names of all `src` leaves, in order, each once."""
    return tuple(dict.fromkeys(node.name for node in nodes(expr) if isinstance(node, Src)))


def reorders(expr: Expr) -> bool:
    """Whether it changes the order of axes somewhere, so that rows of one side may be columns of the other."""
    return any(
        len({tuple(name for group in side for name in group) for side in split_pattern(node.pattern)}) > 1
        for node in nodes(expr)
        if isinstance(node, Rearrange)
    )


def outer_fuse(expr: Expr) -> Fuse | None:
    """The fuse of an expression, which stands outermost but for casts and `quantize`.

    Raises:
      LanguageError: A fuse, quantize or alias stands further inside.
    """
    outermost = quantized(expr)
    node = expr if outermost is None else outermost.value
    while isinstance(node, Astype):
        node = node.value
    if isinstance(node, Alias) and node is not expr:
        raise LanguageError("alias: stands inside another operation, but it must be the whole expression of a target.")
    found = node if isinstance(node, Fuse) else None
    todo = list(children(node)) if found is not None or isinstance(node, Alias) else [node]
    while todo:
        inner = todo.pop()
        if isinstance(inner, Scales):
            continue  # its fuse is the payload's
        if isinstance(inner, Fuse | Quantize):
            op = type(inner).__name__.lower()
            raise LanguageError(
                f"{op}: stands inside another operation, but it must be outermost (only astype and quantize may follow "
                "a fuse, nothing may follow quantize). Move the operation into its parts."
            )
        if isinstance(inner, Alias):
            raise LanguageError(
                "alias: stands inside another operation, but it must be the whole expression of a target."
            )
        todo += children(inner)
    return found


def quantized(expr: Expr) -> Quantize | None:
    """The outermost `quantize` of an expression, under the cast to its own dtype that plans add."""
    node = expr.value if isinstance(expr, Astype) else expr
    return node if isinstance(node, Quantize) else None
