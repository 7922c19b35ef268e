"""A trainer described by a JSON parameter mapping of NVIDIA's JAX-Toolbox.

The schema is that of NVIDIA/JAX-Toolbox@bcbbfa5, `jax-inference-offloading/jax_inference_offloading/models/
mapping_util.py` (`load_mapping_from_json`), with the order of operations of `transport/model/nccl_unfused.py`: slice,
transpose, reshape. Its vLLM names are Hugging Face's, before vLLM fuses them, so that any rollout of `sf.engines` that
reads dense models goes with it.

Not read: what serves to load checkpoints (`partition_spec`, `mesh_axes`, a `vllm_param`'s `transform`), since shardings
come with the params; and `replication_axis` and `replication_count`, which JAX-Toolbox itself fills in from the running
engine: here the rollout's adapter repeats kv heads.

A mapping may leave out what its engine ties: `examples/mappings/llama3_8b_param_mapping.json` there has no
`lm_head.weight`, though Llama-3.1-8B is not tied. `route` refuses it for a rollout that has a head of its own: add an
entry, as `examples/jax_toolbox_mapping.json` here has.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Mapping as AbstractMapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shardfly_jax.engines.models import Model
from shardfly_jax.engines.side import Side
from shardfly_jax.layout import leaf_names
from shardfly_jax.sharding.errors import PlanError
from shardfly_jax.sharding.language import Expr, src
from shardfly_jax.sharding.mapping import Mapping

Shape = tuple[int, ...]

LAYER = "{layer}"
JAX_KEYS = ("name", "transform", "partition_spec")
VLLM_KEYS = ("name", "shape", "transform")
TRANSFORM_KEYS = ("slice", "transpose", "reshape", "replication_axis", "replication_count")


def trainer(
    mapping: str | os.PathLike[str] | AbstractMapping[str, Any], params: Any, *, model: Model | None = None
) -> Side:
    """The trainer side of a mapping.

    Args:
      mapping: Path of the JSON file, or what it holds.
      params: The trainer's tree: arrays or `ShapeDtypeStruct`s with shardings, an `nnx.State` or an `nnx.Module`.
      model: Where known: `route` then refuses a rollout of other sizes.

    Raises:
      PlanError: Entries that the schema does not have, names that the tree does not have, and shapes that do not become
        the vLLM parameter's. All are listed.
      OSError, json.JSONDecodeError: The file cannot be read.
    """
    held = mapping if isinstance(mapping, AbstractMapping) else json.loads(Path(mapping).read_text(encoding="utf-8"))
    names, leaves, _ = leaf_names(params)
    shapes = {name: tuple(leaf.shape) for name, leaf in zip(names, leaves, strict=True)}
    entries: dict[str, Expr] = {}
    faults: list[str] = []
    for entry in held.get("mappings", ()):
        try:
            name, expr = _entry(entry, shapes, held.get("num_layers", 0))
        except PlanError as error:
            faults += error.faults
            continue
        if name in entries:
            faults.append(f"doubly mapped: {name!r} stands twice in the mapping. Remove one of them.")
        entries[name] = expr
    if not entries and not faults:
        faults.append("mapping: it has no entries under 'mappings'. Give a parameter mapping of JAX-Toolbox.")
    if faults:
        raise PlanError(faults)
    return Side(role="trainer", params=params, mapping=Mapping(entries), model=model)


def _entry(entry: AbstractMapping[str, Any], shapes: AbstractMapping[str, Shape], layers: int) -> tuple[str, Expr]:
    """Hugging Face's name, and its expression over the trainer's tensors."""
    jax_param, vllm_param = entry["jax_param"], entry["vllm_param"]
    own, theirs = jax_param["name"], vllm_param["name"]
    transform = jax_param.get("transform", {})
    for what, given, known in (
        ("jax_param", jax_param, JAX_KEYS),
        ("vllm_param", vllm_param, VLLM_KEYS),
        ("transform", transform, TRANSFORM_KEYS),
    ):
        if unknown := [key for key in given if key not in known]:
            raise PlanError(f"mapping: {what} of {own!r} has {unknown}, but only {list(known)} are known. Mend it.")
    if (LAYER in own) != (LAYER in theirs):
        raise PlanError(
            f"mapping: {own!r} becomes {theirs!r}, but {LAYER} must stand in both names or in none. Write an "
            "sf.Mapping for stacks of layers."
        )
    found = {shapes.get(own.replace(LAYER, str(i))) for i in range(layers if LAYER in own else 1)}
    if len(found) != 1 or None in found:
        what = f"has shapes {sorted(shape for shape in found if shape)}" if found - {None} else "is not there"
        raise PlanError(
            f"missing: {own!r} {what} in the tree for all of {layers} layers, but one shape is needed. Mend the name "
            "or num_layers."
        )
    (shape,) = found
    assert shape is not None
    wanted = tuple(vllm_param["shape"])
    expr, have = _transformed(own, shape, transform)
    if have != wanted:
        raise PlanError(f"misshapen: {own!r} becomes {have}, but {theirs!r} is {wanted}. Mend its transform.")
    return theirs.replace(LAYER, "{i}"), expr


def _transformed(
    own: str, shape: tuple[int, ...], transform: AbstractMapping[str, Any]
) -> tuple[Expr, tuple[int, ...]]:
    """A tensor after slice, transpose and reshape, and its shape."""
    expr: Expr = src(own.replace(LAYER, "{i}"))
    if transform.get("slice"):
        items = _items(transform["slice"], len(shape))
        try:
            shape = np.broadcast_to(np.empty(()), shape)[items].shape
        except IndexError as error:
            raise PlanError(f"misshapen: {own!r} has shape {shape}, but its slice does not fit: {error}.") from error
        expr = expr[items]
    order = tuple(transform.get("transpose") or range(len(shape)))
    if sorted(order) != list(range(len(shape))):
        raise PlanError(f"misshapen: {own!r} has {len(shape)} axes, but its transpose is {list(order)}. Mend it.")
    turned = tuple(shape[axis] for axis in order)
    target = _reshaped(own, turned, tuple(transform.get("reshape") or turned))
    if order == tuple(range(len(shape))) and target == turned:
        return expr, target
    return _rearranged(own, expr, order, turned, target), target


def _items(given: Sequence[Any], rank: int) -> tuple[int | slice, ...]:
    """JSON's `"..."`, numbers, `[start, stop]` and `[start]` as NumPy's items."""
    items: list[int | slice] = []
    for item in given:
        if item == "...":
            items += [slice(None)] * (rank - len(given) + 1)
        elif isinstance(item, list):
            items.append(slice(*(*item, None, None)[:2]))
        else:
            items.append(item)
    return tuple(items)


def _reshaped(own: str, shape: Shape, target: Shape) -> Shape:
    """The target with its -1 filled in."""
    known = -math.prod(target) if -1 in target else math.prod(target)
    fill = math.prod(shape) // known if known > 0 and target.count(-1) == 1 else -1
    filled = tuple(fill if n == -1 else n for n in target)
    if math.prod(filled) != math.prod(shape) or min(filled, default=1) < 1:
        raise PlanError(f"misshapen: {own!r} is {shape} when it is to become {list(target)}. Mend its reshape.")
    return filled


def _rearranged(own: str, expr: Expr, order: Shape, shape: Shape, target: Shape) -> Expr:
    """A transpose and a reshape as one rearrangement of the axes' common factors.

    Args:
      order: The transpose.
      shape: After it.
      target: After the reshape.
    """
    ends = sorted({1, *_cumulative(shape), *_cumulative(target)})
    if any(later % earlier for earlier, later in itertools.pairwise(ends)):
        raise PlanError(
            f"reshape: {own!r} is {shape} when it is to become {target}, which cuts across its axes. Write an "
            "sf.Mapping."
        )

    def groups(sizes: Shape) -> list[str]:
        out, lo = [], 1
        for hi in _cumulative(sizes):
            axes = [f"a{k}" for k in range(ends.index(lo), ends.index(hi))]
            out.append(axes[0] if len(axes) == 1 else f"({' '.join(axes)})" if axes else "1")
            lo = hi
        return out

    before = groups(shape)
    left = [before[order.index(axis)] for axis in range(len(order))]
    lengths = {f"a{k}": ends[k + 1] // ends[k] for k in range(len(ends) - 1)}
    return expr.rearrange(f"{' '.join(left)} -> {' '.join(groups(target))}", **lengths)


def _cumulative(sizes: Shape) -> list[int]:
    """Products of the first one, two, ... sizes."""
    return [math.prod(sizes[: k + 1]) for k in range(len(sizes))]
