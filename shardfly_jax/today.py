"""The way an update is written today: one jitted conversion of the whole tree, then `jax.device_put`.

The demo and the benchmarks compare with it. The conversion is built from the same mapping, with the operations a user
would write: transposes, reshapes, repeats, and concatenation of the parts' cuts for fused tensors.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardfly_jax.executors import convert
from shardfly_jax.layout import leaf_names
from shardfly_jax.planning import Plan
from shardfly_jax.sharding import language as lang
from shardfly_jax.sharding.formats import Amax, Encode, ToScale, conversion, number
from shardfly_jax.sharding.grids import Segments
from shardfly_jax.sharding.language import Expr, axis_sizes, split_pattern
from shardfly_jax.sharding.patterns import FAMILY, name_pattern
from shardfly_jax.sharding.quantization import Format


def make_update(plan: Plan) -> Callable[[Any], dict[str, jax.Array]]:
    """A function from params to the rollout's tensors by name, placed as the plan's targets are; blocks until done.

    Args:
      plan: Made from trees on concrete meshes. Tensors that are aliases are left out: the user ties them.
    """
    conversion, shardings = make_conversion(plan)
    converted = jax.jit(conversion)

    def update(params: Any) -> dict[str, jax.Array]:
        names, leaves, _ = leaf_names(params)
        placed = jax.device_put(converted(dict(zip(names, leaves, strict=True))), shardings)
        return jax.block_until_ready(placed)

    return update


def make_conversion(plan: Plan) -> tuple[Callable[[dict[str, jax.Array]], dict[str, jax.Array]], dict[str, Any]]:
    """The conversion alone, to be jitted, from the trainer's tensors by name; and where its outputs belong."""
    wanted = []
    shardings: dict[str, Any] = {}
    for index in plan.target_families:
        family = plan.families[index]
        if family.alias_of is None:
            wanted += [(f"{family.tree}:{family.name(k)}", family, family.first + k) for k in range(family.count)]
            for name in family.names:
                shardings[f"{family.tree}:{name}"] = plan.targets[family.tree].shardings[name]

    def converted(tensors: dict[str, jax.Array]) -> dict[str, jax.Array]:
        def source(name: str, i: int) -> jax.Array:
            return tensors[name_pattern(name).format({FAMILY: i})]

        out = {}
        for name, family, i in wanted:
            assert family.expr is not None
            out[name] = _build(family.expr, source, i, len(family.cuts)).astype(family.layout.dtype)
        return out

    return converted, shardings


def _build(expr: Expr, source: Callable[[str, int], jax.Array], i: int, cuts: int) -> jax.Array:
    def build(node: Expr) -> jax.Array:
        return _build(node, source, i, cuts)

    match expr:
        case lang.Src(name):
            return source(name, i)
        case lang.Concat(parts, axis):
            return jnp.concatenate([build(part) for part in parts], axis)
        case lang.Stack(parts, axis):
            return jnp.stack([build(part) for part in parts], axis)
        case lang.Fuse(parts, axis, own_cuts):
            return _fused([build(part) for part in parts], axis, cuts if own_cuts is None else len(own_cuts))
    x = build(expr.value)  # type: ignore[attr-defined]
    match expr:
        case lang.Quantize(_, format, segments):
            amax = _block_maxima(format, x, segments)
            spread = functools.partial(_of_each, format, x.shape, segments)
            encode = conversion(x.dtype.name, (Encode(format),), format.stored)
            codes = convert.apply(encode, x, amax=amax, spread=spread)
            return lax.bitcast_convert_type(codes, jnp.dtype(format.stored))
        case lang.Scales(_, format, segments):
            to_scale = conversion("uint32", (ToScale(format),), format.scale_dtype)
            bits = convert.apply(to_scale, _block_maxima(format, x, segments))
            return lax.bitcast_convert_type(bits, jnp.dtype(format.scale_dtype))
        case lang.Rearrange(_, pattern, _):
            left, right = split_pattern(pattern)
            sizes = axis_sizes(expr, x.shape)
            names = [name for group in left for name in group]
            x = x.reshape([sizes[name] for name in names])
            x = x.transpose([names.index(name) for group in right for name in group])
            return x.reshape([math.prod(sizes[name] for name in group) for group in right])
        case lang.Index(_, items):
            return x[tuple(item.value.at(i) if isinstance(item, lang.FamilyIndex) else item for item in items)]
        case lang.Take(_, indices, axis):
            return jnp.take(x, jnp.array(indices), axis)
        case lang.TakePerLayer(_, per_layer, axis):
            return jnp.take(x, jnp.array(dict(per_layer)[i]), axis)
        case lang.Repeat(_, repeats, axis):
            return jnp.repeat(x, repeats, axis)
        case lang.Pad(_, widths, fill):
            return jnp.pad(x, widths, constant_values=number(fill))
        case lang.Scale(_, factor, add):
            return (x.astype(jnp.float32) * factor + add).astype(x.dtype)
        case lang.Divided(_, divisor):
            return (x.astype(jnp.float32) / divisor).astype(x.dtype)
        case lang.Astype(_, dtype):
            return x.astype(dtype)
    raise TypeError(f"{type(expr).__name__} is not an operation of the language")


def _block_maxima(format: Format, x: jax.Array, segments: Sequence[Segments]) -> jax.Array:
    """Bits of the largest absolute value of each block: padded to whole blocks, or part by part."""
    amax = convert.apply(conversion(x.dtype.name, (Amax(),), "uint32"), x)
    for axis, block, cut in zip((-2, -1), format.block, segments, strict=True):
        if cut:
            indices = range(1 + max(index for _, _, index in cut))
            parts = [
                [lax.slice_in_dim(amax, lo, hi, axis=axis) for lo, hi, k in cut if k == index] for index in indices
            ]
            amax = jnp.concatenate([jnp.concatenate(part, axis).max(axis, keepdims=True) for part in parts], axis)
            continue
        n, at = x.shape[axis], axis % x.ndim
        size = n if block is None else block
        padded = jnp.pad(amax, [(0, -n % size if a == at else 0) for a in range(x.ndim)])
        amax = padded.reshape(*padded.shape[:at], -1, size, *padded.shape[at + 1 :]).max(at + 1)
    return amax


def _of_each(format: Format, shape: Sequence[int], segments: Sequence[Segments], number: jax.Array) -> jax.Array:
    """From one number per block, as `_block_maxima` gives them, to that of each element's block."""
    for axis, block, cut in zip((-2, -1), format.block, segments, strict=True):
        if cut:
            parts = []
            for lo, hi, k in cut:
                part = lax.slice_in_dim(number, k, k + 1, axis=axis)
                parts.append(jnp.repeat(part, hi - lo, axis))
            number = jnp.concatenate(parts, axis)
            continue
        number = jnp.repeat(number, shape[axis] if block is None else block, axis)
        number = lax.slice_in_dim(number, 0, shape[axis], axis=axis)
    return number


def _fused(parts: list[jax.Array], axis: int, cuts: int) -> jax.Array:
    axis %= parts[0].ndim
    split = [x.reshape(*x.shape[:axis], cuts, x.shape[axis] // cuts, *x.shape[axis + 1 :]) for x in parts]
    joined = jnp.concatenate(split, axis + 1)
    return joined.reshape(*joined.shape[:axis], -1, *joined.shape[axis + 2 :])
