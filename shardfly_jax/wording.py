"""Figures, types and expressions in words, for reports."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardfly_jax.sharding.language import (
    Astype,
    Concat,
    Divided,
    Expr,
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
    split_pattern,
)
from shardfly_jax.sharding.units import bytes_text as bytes_text, secs_text as secs_text
from shardfly_jax.sharding.walks import children

COPY = "copy"
"""What `in_words` says of an expression that changes nothing."""


def type_text(dtype: str, shape: Sequence[int]) -> str:
    """`bf16[151936,1024]`, as JAX prints types."""
    short = dtype
    for long, letter in (("float", "f"), ("uint", "u"), ("int", "i")):
        short = short.replace(long, letter)
    return f"{short}[{','.join(map(str, shape))}]"


def ranks_text(ranks: Iterable[int]) -> str:
    """`0-3, 8`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(f"{lo}" if lo == hi else f"{lo}-{hi}" for lo, hi in runs)


def some(items: Sequence[str], limit: int) -> str:
    """The first items, and how many more there are."""
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(items[:limit]) + more


def share_text(part: int, whole: int) -> str:
    """A percentage; `-` of nothing."""
    if not whole:
        return "-"
    return "< 0.1%" if 0 < part < whole / 2000 else f"{100 * part / whole:.1f}%"


def in_words(expr: Expr) -> str:
    """What an expression does to its sources, e.g. `fuse of 3: transpose, repeat x2`; `copy` if nothing."""
    if isinstance(expr, Quantize):
        inner_words = in_words(expr.value)
        return _format_words(expr) if inner_words == COPY else f"{inner_words}; {_format_words(expr)}"
    if isinstance(expr, Fuse | Concat | Stack):
        inner = [word for part in expr.parts for word in _words(part)]
        head = f"{type(expr).__name__.lower()} of {len(expr.parts)}"
        return f"{head}: {', '.join(dict.fromkeys(inner))}" if inner else head
    return ", ".join(dict.fromkeys(_words(expr))) or COPY


def _format_words(expr: Quantize | Scales) -> str:
    scope = {"rank": "what each rank holds", "part": "each fused part"}.get(expr.format.scope, expr.format.scope)
    return f"{'' if isinstance(expr, Quantize) else 'scales of '}{type(expr.format).__name__} per {scope}"


def _words(expr: Expr) -> list[str]:
    if isinstance(expr, Scales):
        return [_format_words(expr)]
    words = [word for child in children(expr) for word in _words(child)]
    match expr:
        case Src():
            return words
        case Rearrange(_, pattern, _):
            left, right = split_pattern(pattern)
            moved = [name for group in left for name in group] != [name for group in right for name in group]
            words += ["transpose"] if moved else ["reshape"] if left != right else []
        case Repeat(_, repeats, _):
            words.append(f"repeat x{repeats}")
        case Take(_, indices, _):
            words.append(f"take {len(indices)}")
        case TakePerLayer():
            words.append("take by layer")
        case Index():
            words.append("slice")
        case Pad():
            words.append("pad")
        case Scale(_, factor, add):
            words.append(f"scale {factor:g}" + (f"{add:+g}" if add else ""))
        case Divided(_, divisor):
            words.append(f"divide by {divisor:g}")
        case Astype(_, dtype):
            words.append(f"to {dtype}")
        case Fuse(parts, _) | Concat(parts, _) | Stack(parts, _):
            words.append(f"{type(expr).__name__.lower()} of {len(parts)}")
        case _:
            words.append(type(expr).__name__.lower())
    return words
