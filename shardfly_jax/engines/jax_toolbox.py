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
import reprlib
from collections.abc import Callable, Iterator, Mapping as AbstractMapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shardfly_jax.engines.models import Model, require_model
from shardfly_jax.engines.side import Side
from shardfly_jax.layout import leaf_names
from shardfly_jax.sharding.errors import PlanError
from shardfly_jax.sharding.language import Expr, src
from shardfly_jax.sharding.mapping import Mapping

Shape = tuple[int, ...]

LAYER = "{layer}"
TOP_KEYS = ("num_layers", "mappings", "mesh_axes")
ENTRY_KEYS = ("jax_param", "vllm_param")
JAX_KEYS = ("name", "transform", "partition_spec")
VLLM_KEYS = ("name", "shape", "transform")
TRANSFORM_KEYS = ("slice", "transpose", "reshape", "replication_axis", "replication_count")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_ints(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(_is_int(n) for n in value)


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and value != "" and not set("{}") & set(value.replace(LAYER, ""))


def _is_slice(value: Any) -> bool:
    def is_item(item: Any) -> bool:
        if isinstance(item, list | tuple):
            return len(item) <= 2 and all(end is None or _is_int(end) for end in item)
        return item == "..." or _is_int(item)

    return isinstance(value, list | tuple) and all(is_item(item) for item in value) and value.count("...") <= 1


FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "num_layers": (lambda value: _is_int(value) and value > 0, "a positive number"),
    "mappings": (lambda value: isinstance(value, list | tuple) and len(value) > 0, "a list of entries"),
    "name": (_is_name, f"a name whose only variable is {LAYER}"),
    "shape": (lambda value: _is_ints(value) and all(n > 0 for n in value), "a list of sizes"),
    "slice": (_is_slice, "a list of numbers, [start, stop] without a step, and '...' once"),
    "transpose": (_is_ints, "a list of axes"),
    "reshape": (_is_ints, "a list of sizes"),
}
"""What fields hold, by key; others are not read, or objects with keys of their own."""


def trainer(
    mapping: str | os.PathLike[str] | AbstractMapping[str, Any], params: Any, *, model: Model | None = None
) -> Side:
    """The trainer side of a mapping.

    Args:
      mapping: Path of the JSON file, or what it holds.
      params: The trainer's tree: arrays or `ShapeDtypeStruct`s with shardings, an `nnx.State` or an `nnx.Module`.
      model: Where known: `route` then refuses a rollout of other sizes.

    Raises:
      PlanError: What is no JSON; keys and values that the schema does not have; names, or layers of them, that only the
        mapping or only the tree has; and shapes that do not become the vLLM parameter's. All are listed.
      OSError: The file cannot be read.
    """
    if model is not None:
        require_model(model)
    held = mapping if isinstance(mapping, AbstractMapping) else _read(mapping)
    names, leaves, _ = leaf_names(params)
    shapes = {name: tuple(leaf.shape) for name, leaf in zip(names, leaves, strict=True)}
    entries: dict[str, Expr] = {}
    faults = list(_malformed("the file", held, TOP_KEYS, ("mappings",)))
    if faults and not (isinstance(held, AbstractMapping) and isinstance(held.get("mappings"), list | tuple)):
        raise PlanError(faults)
    layers = held.get("num_layers")
    for k, entry in enumerate(held["mappings"]):
        if wrong := list(_malformed_entry(k, entry)):
            faults += wrong
            continue
        try:
            name, expr = _entry(entry, shapes, layers if FIELDS["num_layers"][0](layers) else None)
        except PlanError as error:
            faults += error.faults
            continue
        if name in entries:
            faults.append(f"doubly mapped: {name!r} stands twice in the mapping. Remove one of them.")
        entries[name] = expr
    if faults:
        raise PlanError(list(dict.fromkeys(faults)))
    return Side(role="trainer", params=params, mapping=Mapping(entries), model=model)


def _read(path: Any) -> Any:
    if not isinstance(path, str | os.PathLike):
        raise PlanError(
            f"mapping: it is of type {type(path).__name__}, but the path of a JSON file, or the dict that it holds, is "
            "needed. Give one of them."
        )
    if isinstance(path, str) and path.lstrip()[:1] in ("{", "["):
        raise PlanError("mapping: it is JSON itself, but a path, or a dict, is needed. Give json.loads(...) of it.")
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:  # UnicodeDecodeError and JSONDecodeError
        raise PlanError(f"mapping: {os.fspath(path)!r} does not hold JSON: {error}. Mend the file.") from error


def _malformed(where: str, given: Any, known: Sequence[str], needed: Sequence[str]) -> Iterator[str]:
    """Faults of an object's own keys and values."""
    if not isinstance(given, AbstractMapping):
        keys = list(needed or known)
        yield f"mapping: {where} is {reprlib.repr(given)}, but an object with {keys} is needed. Mend it."
        return
    if unknown := [key for key in given if key not in known]:
        yield f"mapping: {where} has {unknown}, but only {list(known)} are known. Mend it."
    if missing := [key for key in needed if key not in given]:
        yield f"mapping: {where} has no {missing}, but needs it. Add it."
    for key, value in given.items():
        is_right, wanted = FIELDS.get(key, (None, "")) if key in known else (None, "")
        if is_right is not None and not is_right(value):
            yield f"mapping: {where} has {reprlib.repr(value)} as {key}, but {wanted} is needed. Mend it."


def _malformed_entry(k: int, entry: Any) -> Iterator[str]:
    """Faults of an entry's form, as far down as it has one."""
    where = f"mappings[{k}]"
    if isinstance(entry, AbstractMapping) and isinstance(entry.get("jax_param"), AbstractMapping):
        where += f" ({entry['jax_param'].get('name')!r})"
    yield from _malformed(where, entry, ENTRY_KEYS, ENTRY_KEYS)
    if not isinstance(entry, AbstractMapping):
        return
    for part, known, needed in (("jax_param", JAX_KEYS, ("name",)), ("vllm_param", VLLM_KEYS, ("name", "shape"))):
        if part in entry:
            yield from _malformed(f"{part} of {where}", entry[part], known, needed)
    jax_param = entry.get("jax_param")
    if isinstance(jax_param, AbstractMapping) and "transform" in jax_param:
        yield from _malformed(f"transform of {where}", jax_param["transform"], TRANSFORM_KEYS, ())


def _entry(
    entry: AbstractMapping[str, Any], shapes: AbstractMapping[str, Shape], layers: int | None
) -> tuple[str, Expr]:
    """Hugging Face's name, and its expression over the trainer's tensors. `entry` is well formed."""
    jax_param, vllm_param = entry["jax_param"], entry["vllm_param"]
    own, theirs = jax_param["name"], vllm_param["name"]
    transform = jax_param.get("transform", {})
    if (LAYER in own) != (LAYER in theirs):
        raise PlanError(
            f"mapping: {own!r} becomes {theirs!r}, but {LAYER} must stand in both names or in none. Write an "
            "sf.Mapping for stacks of layers."
        )
    if LAYER in own and layers is None:
        raise PlanError(f"mapping: names have {LAYER}, but num_layers does not say how many layers there are. Give it.")
    count = layers if layers is not None and LAYER in own else 1
    if LAYER in own and own.replace(LAYER, str(count)) in shapes:
        raise PlanError(
            f"layers: num_layers is {count}, but the tree has {own.replace(LAYER, str(count))!r} too. Mend num_layers."
        )
    held = [shapes.get(own.replace(LAYER, str(i))) for i in range(min(count, len(shapes) + 1))]  # no more can be there
    if set(held) == {None}:
        raise PlanError(f"missing: {own!r} is not in the tree. Mend the name.")
    if None in held:
        raise PlanError(
            f"layers: num_layers is {count}, but the tree has no {own.replace(LAYER, str(held.index(None)))!r}. Mend "
            "num_layers, or give a tree with all layers."
        )
    found = {shape for shape in held if shape is not None}
    if len(found) > 1:
        raise PlanError(
            f"misshapen: {own!r} has the shapes {sorted(found)} in the tree, but one for all layers is needed. Write "
            "an sf.Mapping."
        )
    (shape,) = found
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
        elif isinstance(item, list | tuple):
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
