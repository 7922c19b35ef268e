"""A flax model of one's own, on either side: its modules have Hugging Face's names, or yours by rules.

A flax `kernel` is [in..., out...] where Hugging Face's weight is [out, in]; heads may be axes of their own, in kernels
and biases. Which it is follows from the leaf's name and its shape, never from a guess: a square matrix that is called
neither `kernel` nor `weight` is refused.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping as AbstractMapping
from typing import Any

from shardfly_jax.engines.canonical import Tensor, tensors
from shardfly_jax.engines.models import Model, require_model
from shardfly_jax.engines.side import Side
from shardfly_jax.layout import leaf_names
from shardfly_jax.sharding.errors import PlanError
from shardfly_jax.sharding.language import Expr, src, stack
from shardfly_jax.sharding.mapping import Mapping

LEAVES = {"weight": ("kernel", "weight", "embedding", "scale", "w")}
"""Names that flax modules give what Hugging Face calls so."""

Rules = AbstractMapping[str, str]
"""Hugging Face's name, or a prefix of it that ends between two parts, to yours; the longest that fits counts."""


def trainer(model: Model, params: Any, *, rules: Rules | None = None, layer_axis: int = 0) -> Side:
    """The trainer side of a model.

    Rules rename prefixes, and the rest of a name stays Hugging Face's:

        {"model.layers.{i}": "blocks.{i}", "model.layers.{i}.self_attn.q_proj": "blocks.{i}.attn.query", "model": ""}

    finds `blocks.3.attn.query.kernel`, `blocks.3.mlp.gate_proj.kernel` and `norm.scale`. A prefix that loses its `{i}`
    names a stack of layers. Experts of a layer are one tensor [experts, ...]; `{e}` in a rule, or in Hugging Face's
    place for it, stands for modules per expert.

    Args:
      model: From `engines.model(name)`, or your own sizes.
      params: The model's tree, an `nnx.State` or the `nnx.Module` itself; arrays or `ShapeDtypeStruct`s with sharding.
      rules: None where all modules have Hugging Face's names.
      layer_axis: Of the layers in stacks of layers.

    Raises:
      PlanError: A tensor that is not found, is found twice, has a shape that does not fit, or could be meant either
        way; a leaf that is meant as two tensors; and a rule that renames nothing. All are listed.
    """
    found = _found(model, params, {} if rules is None else rules, layer_axis)
    entries = {one.tensor.name: one.canonical(layer_axis) for one in found}
    return Side(role="trainer", params=params, mapping=Mapping(entries), model=model)


def rollout(model: Model, params: Any, *, rules: Rules | None = None, layer_axis: int = 0) -> Side:
    """The rollout side of a model: as `trainer`, written instead of read."""
    found = _found(model, params, {} if rules is None else rules, layer_axis)
    entries = {one.own: one.from_canonical(layer_axis) for one in found}
    return Side(role="rollout", params=params, mapping=Mapping(entries), model=model)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """A canonical tensor in the user's tree.

    Attributes:
      own: Its name there, with `{i}` unless it is a stack of layers, and `{e}` where experts lie apart.
      shape: There, of one layer (and of one expert, with `{e}`).
      order: The axes of `shape` that make up each axis of the canonical tensor.
    """

    tensor: Tensor
    own: str
    shape: tuple[int, ...]
    order: tuple[tuple[int, ...], ...]

    @property
    def is_stack(self) -> bool:
        """Whether its layers lie in one tensor."""
        return self.tensor.layers is not None and "{i}" not in self.own

    @property
    def layers(self) -> range:
        """Hugging Face's numbers of the layers of a stack."""
        assert self.tensor.layers is not None
        return self.tensor.layers

    def canonical(self, layer_axis: int) -> Expr:
        """The canonical tensor as an expression over the user's."""

        def one(name: str) -> Expr:
            here: Expr = src(name)
            if self.is_stack:
                first = self.layers[0]
                here = here[(*(slice(None),) * layer_axis, f"{{i}}-{first}" if first else "{i}")]
            return here if self._is_same else here.rearrange(f"{self._flat} -> {self._grouped}")

        if "{e}" not in self.own:
            return one(self.own)
        return stack([one(self.own.replace("{e}", str(e))) for e in range(self.tensor.shape[0])])

    def from_canonical(self, layer_axis: int) -> Expr:
        """The user's tensor as an expression over the canonical one."""

        def one(name: str) -> Expr:
            whole = src(name)
            here = whole["{e}"] if "{e}" in self.own else whole
            if self._is_same:
                return here
            return here.rearrange(f"{self._grouped} -> {self._flat}", **{f"a{k}": n for k, n in enumerate(self.shape)})

        if not self.is_stack:
            return one(self.tensor.name)
        return stack([one(name) for name in self.tensor.names], axis=layer_axis)

    @property
    def _is_same(self) -> bool:
        return self.order == tuple((k,) for k in range(len(self.shape)))

    @property
    def _flat(self) -> str:
        return " ".join(f"a{k}" for k in range(len(self.shape)))

    @property
    def _grouped(self) -> str:
        return " ".join("(" + " ".join(f"a{k}" for k in group) + ")" for group in self.order)


def _found(model: Model, params: Any, rules: Rules, layer_axis: int) -> list[_Found]:
    require_model(model)
    if not (
        isinstance(rules, AbstractMapping) and all(isinstance(part, str) for rule in rules.items() for part in rule)
    ):
        raise PlanError(f"rules: they are {rules!r}, but a dict from names to names is needed. Give one.")
    names, leaves, _ = leaf_names(params)
    shapes = {name: tuple(leaf.shape) for name, leaf in zip(names, leaves, strict=True)}
    faults: list[str] = []
    found: list[_Found] = []
    used: set[str | None] = set()
    for tensor in tensors(model):
        prefix = _longest_prefix(tensor.name, rules)
        used.add(prefix)
        named = tensor.name if prefix is None else _joined(rules[prefix], tensor.name[len(prefix) :].removeprefix("."))
        try:
            found.append(_locate(model, tensor, named, prefix == tensor.name, shapes, layer_axis))
        except PlanError as error:
            faults += error.faults
    faults += _shared_leaves(found)
    faults += [
        f"rule: {key!r} renames no tensor of {model.name}. Mend or remove it." for key in rules if key not in used
    ]
    if faults:
        raise PlanError(faults)
    return found


def _shared_leaves(found: list[_Found]) -> list[str]:
    """Faults of leaves that rules give to several tensors."""
    owner: dict[str, str] = {}
    faults: dict[tuple[str, str], str] = {}
    for one in found:
        experts = range(one.tensor.shape[0]) if "{e}" in one.own else (0,)
        layers = one.layers if "{i}" in one.own else (0,)
        for i, e in itertools.product(layers, experts):
            leaf = one.own.replace("{i}", str(i)).replace("{e}", str(e))
            other = owner.setdefault(leaf, one.tensor.name)
            if other != one.tensor.name:
                faults.setdefault(
                    (other, one.tensor.name),
                    f"doubly mapped: {leaf!r} is meant as {other!r} and as {one.tensor.name!r}, but it can hold only "
                    "one of them. Mend the rules.",
                )
    return list(faults.values())


def _longest_prefix(name: str, rules: Rules) -> str | None:
    fitting = [key for key in rules if name == key or name.startswith(key + ".")]
    return max(fitting, key=len, default=None)


def _joined(*parts: str) -> str:
    return ".".join(part for part in parts if part)


def _locate(
    model: Model,
    tensor: Tensor,
    named: str,
    is_leaf: bool,
    shapes: AbstractMapping[str, tuple[int, ...]],
    layer_axis: int,
) -> _Found:
    """Finds a tensor under its (renamed) name, under a leaf that flax calls otherwise, or as a bare param."""
    module, _, leaf = named.rpartition(".")
    tried = [named] if is_leaf else [_joined(module, other) for other in LEAVES.get(leaf, (leaf,))]
    if not is_leaf and leaf in LEAVES:
        tried.append(module)
    if tensor.per_expert and "{e}" not in named:
        tried += [name.replace("experts.", "experts.{e}.") for name in tried if "experts." in name]
    first = 0 if tensor.layers is None else tensor.layers[0]
    held = [name for name in tried if name.replace("{i}", str(first)).replace("{e}", "0") in shapes]
    if len(held) != 1:
        what = f"is under several names, {held}" if held else f"is under none of {tried}"
        raise PlanError(f"missing: {tensor.name!r} {what} in the tree. Add a rule for it.")
    own = held[0]
    shape = shapes[own.replace("{i}", str(first)).replace("{e}", "0")]
    if tensor.layers is not None and "{i}" not in own:
        if len(shape) <= layer_axis or shape[layer_axis] != len(tensor.layers):
            raise PlanError(
                f"stack: {own!r} has shape {shape}, but {tensor.name!r} has the layers {tensor.layers} on axis "
                f"{layer_axis}. Give layer_axis=, or write an sf.Mapping."
            )
        shape = shape[:layer_axis] + shape[layer_axis + 1 :]
    canonical = tensor.shape[1:] if "{e}" in own else tensor.shape
    return _Found(tensor=tensor, own=own, shape=shape, order=_order(model, tensor, own, shape, canonical))


def _heads(model: Model, tensor: Tensor) -> dict[str, int]:
    """Which side of a projection counts heads, and how many: the only one that may be split, into (heads, the rest)."""
    module = tensor.name.rpartition(".")[0].rpartition(".")[2]
    if module in ("q_proj", "q_b_proj", "kv_b_proj"):
        return {"out": model.heads}
    if module in ("k_proj", "v_proj"):
        return {"out": model.kv_heads}
    return {"into": model.heads} if module == "o_proj" and tensor.name.endswith(".weight") else {}


def _order(
    model: Model, tensor: Tensor, own: str, shape: tuple[int, ...], canonical: tuple[int, ...]
) -> tuple[tuple[int, ...], ...]:
    """Which axes of the user's tensor make up each axis of the canonical one."""
    axes = tuple(range(len(shape)))
    heads = _heads(model, tensor)

    def is_split_right(side: str, sizes: tuple[int, ...]) -> bool:
        return len(sizes) == 1 or (len(sizes) == 2 and sizes[0] == heads.get(side))

    if len(canonical) == 1:
        if math.prod(shape) == canonical[0] and is_split_right("out", shape):
            return (axes,)
        raise _misfit(tensor, own, shape, canonical)
    leaf = own.rpartition(".")[2]
    as_is = tuple((k,) for k in axes) if shape == canonical else None
    turned = None
    is_linear = tensor.name.endswith(".weight") and tensor.name != "model.embed_tokens.weight"
    if is_linear:
        *experts, out, into = canonical
        lead = len(experts)
        for cut in range(lead + 1, len(shape)):
            fits = (math.prod(shape[lead:cut]), math.prod(shape[cut:])) == (into, out)
            fits = fits and is_split_right("into", shape[lead:cut]) and is_split_right("out", shape[cut:])
            if shape[:lead] == tuple(experts) and fits:
                turned = (*((k,) for k in axes[:lead]), axes[cut:], axes[lead:cut])
                break
    if is_linear and leaf == "kernel":
        as_is = None
    if leaf in ("weight", "embedding"):
        turned = None
    if as_is and turned:
        raise PlanError(
            f"ambiguous: {own!r} has shape {shape}, which may be [in, out] or the [out, in] of {tensor.name!r}. Name "
            "the leaf kernel or weight, or write an sf.Mapping."
        )
    chosen = as_is or turned
    if chosen is None:
        raise _misfit(tensor, own, shape, canonical)
    return chosen


def _misfit(tensor: Tensor, own: str, shape: tuple[int, ...], canonical: tuple[int, ...]) -> PlanError:
    return PlanError(
        f"misshapen: {own!r} has shape {shape}, but {tensor.name!r} has {canonical}, and neither that nor [in, "
        "out] fits, with heads first where they are axes of their own. Mend the rules, or write an sf.Mapping."
    )
