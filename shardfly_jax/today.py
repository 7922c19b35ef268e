"""The way an update is written today: one jitted conversion of the whole tree, then `jax.device_put`.

The demo and the benchmarks compare with it. The conversion is built from the same mapping, with the operations a user
would write: transposes, reshapes, repeats, and concatenation of the parts' cuts for fused tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from shardfly_jax.layout import leaf_names
from shardfly_jax.planning import Plan
from shardfly_jax.sharding import language as lang
from shardfly_jax.sharding.formats import number
from shardfly_jax.sharding.language import Expr, axis_sizes, split_pattern
from shardfly_jax.sharding.patterns import FAMILY, name_pattern


def make_update(plan: Plan) -> Callable[[Any], dict[str, jax.Array]]:
    """A function from params to the rollout's tensors by name, placed as the plan's targets are; blocks until done.

    Args:
      plan: Made from trees on concrete meshes. Tensors that are aliases are left out: the user ties them.
    """
    wanted = []
    shardings: dict[str, Any] = {}
    for index in plan.target_families:
        family = plan.families[index]
        if family.alias_of is None:
            wanted += [(f"{family.tree}:{family.name(k)}", family, family.first + k) for k in range(family.count)]
            for name in family.names:
                shardings[f"{family.tree}:{name}"] = plan.targets[family.tree].shardings[name]

    @jax.jit
    def converted(tensors: dict[str, jax.Array]) -> dict[str, jax.Array]:
        def source(name: str, i: int) -> jax.Array:
            return tensors[name_pattern(name).format({FAMILY: i})]

        out = {}
        for name, family, i in wanted:
            assert family.expr is not None
            out[name] = _build(family.expr, source, i, len(family.cuts)).astype(family.layout.dtype)
        return out

    def update(params: Any) -> dict[str, jax.Array]:
        names, leaves, _ = leaf_names(params)
        placed = jax.device_put(converted(dict(zip(names, leaves, strict=True))), shardings)
        return jax.block_until_ready(placed)

    return update


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
        case lang.Fuse(parts, axis):
            return _fused([build(part) for part in parts], axis, cuts)
    x = build(expr.value)  # type: ignore[attr-defined]
    match expr:
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


def _fused(parts: list[jax.Array], axis: int, cuts: int) -> jax.Array:
    axis %= parts[0].ndim
    split = [x.reshape(*x.shape[:axis], cuts, x.shape[axis] // cuts, *x.shape[axis + 1 :]) for x in parts]
    joined = jnp.concatenate(split, axis + 1)
    return joined.reshape(*joined.shape[:axis], -1, *joined.shape[axis + 2 :])
