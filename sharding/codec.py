"""Expressions, families and conversions as JSON, for plan files and digests."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from shardfly_jax.sharding import language
from shardfly_jax.sharding.errors import LanguageError, PlanFileError
from shardfly_jax.sharding.families import Family
from shardfly_jax.sharding.formats import Amax, Cast, Conversion, Divide, Encode, Fill, MulAdd, ToScale
from shardfly_jax.sharding.language import Expr, FamilyIndex
from shardfly_jax.sharding.layouts import Layout
from shardfly_jax.sharding.patterns import Affine
from shardfly_jax.sharding.quantization import Format, format_class

_NODES: dict[str, type[Any]] = {
    node.__name__: node
    for node in (
        language.Src, language.Rearrange, language.Index, language.Take, language.TakePerLayer, language.Repeat,
        language.Pad, language.Scale, language.Divided, language.Astype, language.Concat, language.Stack, language.Fuse,
        language.Quantize, language.Scales,
    )
}  # fmt: skip
_STEPS: dict[str, type[Any]] = {step.__name__: step for step in (Cast, MulAdd, Divide, Fill, Amax, ToScale, Encode)}


def _to_json(value: Any) -> Any:
    if isinstance(value, Expr):
        return {type(value).__name__: [_to_json(getattr(value, f.name)) for f in dataclasses.fields(value)]}  # type: ignore[arg-type]
    if isinstance(value, tuple):
        return [_to_json(item) for item in value]
    if isinstance(value, slice):
        return {"slice": [value.start, value.stop, value.step]}
    if isinstance(value, FamilyIndex):
        return {"i": list(dataclasses.astuple(value.value))}
    if isinstance(value, Format):
        stated = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return {"format": [value.full_name(), stated, value.constants]}
    return value


def _format(name: str, stated: dict[str, Any], constants: dict[str, Any]) -> Format:
    try:
        found = format_class(name)(**stated)
    except KeyError:
        raise PlanFileError(
            f"plan file: the format {name!r} is not known. Import the module that defines it."
        ) from None
    except LanguageError as error:
        raise PlanFileError(f"plan file: the format {name!r} is refused by now: {error} Make the plan again.") from None
    if found.constants != constants:
        raise PlanFileError(
            f"plan file: the format {name!r} states {found.constants}, but the plan was made with {constants}. "
            "Make the plan again."
        )
    return found


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_from_json(item) for item in value)
    if isinstance(value, dict):
        ((name, args),) = value.items()
        if name == "slice":
            return slice(*args)
        if name == "i":
            return FamilyIndex(Affine(*args))
        if name == "format":
            return _format(*args)
        return _NODES[name](*(_from_json(arg) for arg in args))
    return value


def layout_to_json(layout: Layout) -> dict[str, Any]:
    """Shape, dtype, ranks, boxes, strides."""
    return {
        "shape": list(layout.shape),
        "dtype": layout.dtype,
        "ranks": list(layout.ranks),
        "bounds": layout.bounds.ravel().tolist(),
        "strides": None if layout.strides is None else layout.strides.tolist(),
    }


def layout_from_json(data: dict[str, Any]) -> Layout:
    """Inverse of `layout_to_json`; checks everything again."""
    shape, ranks = tuple(data["shape"]), data["ranks"]
    bounds: list[Any] = np.array(data["bounds"], np.int64).reshape(len(ranks), len(shape), 2).tolist()
    strides = None if data["strides"] is None else dict(zip(ranks, data["strides"], strict=True))
    return Layout(shape, data["dtype"], dict(zip(ranks, bounds, strict=True)), strides)


def family_to_json(family: Family) -> dict[str, Any]:
    """Everything a family says."""
    return {
        "tree": family.tree,
        "pattern": family.pattern,
        "first": family.first,
        "count": family.count,
        "layout": layout_to_json(family.layout),
        "expr": None if family.expr is None else _to_json(family.expr),
        "alias_of": family.alias_of,
    }


def family_from_json(data: dict[str, Any]) -> Family:
    """Inverse of `family_to_json`."""
    expr = None if data["expr"] is None else _from_json(data["expr"])
    layout = layout_from_json(data["layout"])
    return Family(data["tree"], data["pattern"], data["first"], data["count"], layout, expr, data["alias_of"])


def conversion_to_json(conversion: Conversion) -> list[Any]:
    """Source dtype, steps, target dtype."""
    return [
        conversion.source,
        [
            [type(step).__name__, *(_to_json(getattr(step, f.name)) for f in dataclasses.fields(step))]
            for step in conversion.steps
        ],
        conversion.target,
    ]


def conversion_from_json(data: list[Any]) -> Conversion:
    """Inverse of `conversion_to_json`."""
    source, steps, target = data
    return Conversion(source, tuple(_STEPS[name](*map(_from_json, args)) for name, *args in steps), target)
