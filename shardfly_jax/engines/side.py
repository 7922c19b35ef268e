"""What an adapter gives: one side's tensors, and how they relate to the canonical ones of `canonical`.

A trainer says what each canonical tensor is in its own tensors; a rollout says what each of its tensors is in canonical
ones; `route` composes the two. Nothing is ever held in canonical form.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping as AbstractMapping
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from shardfly_jax.engines.models import Model
from shardfly_jax.sharding.composition import compose
from shardfly_jax.sharding.errors import PlanError
from shardfly_jax.sharding.language import Expr
from shardfly_jax.sharding.mapping import Mapping

AnyMesh = jax.sharding.Mesh | jax.sharding.AbstractMesh


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One side of a route.

    Attributes:
      params: Tree of `ShapeDtypeStruct`s with shardings.
      mapping: A trainer's: canonical name -> expression over its own tensors. A rollout's: own name -> expression over
        canonical tensors.
      model: Whose; None if unknown.
    """

    params: Any
    mapping: Mapping
    model: Model | None = None


def route(trainer: Side, rollout: Side) -> Mapping:
    """The mapping from a trainer's tensors to a rollout's.

    Raises:
      PlanError: They describe models of other sizes.
    """
    if trainer.model is not None and rollout.model is not None:
        ours, theirs = (dataclasses.asdict(side.model) | {"name": ""} for side in (trainer, rollout) if side.model)
        if other := [f"{key} ({ours[key]} and {theirs[key]})" for key in ours if ours[key] != theirs[key]]:
            raise PlanError(
                f"route: trainer and rollout describe other models: they differ in {', '.join(other)}. "
                "Give both the same engines.model(...)."
            )
    return compose(rollout.mapping, trainer.mapping)


class SideBuilder:
    """Collects the leaves and the mapping of one side.

    Args:
      mesh: Of all leaves.
      dtype: Of leaves that give none of their own.
      model: Whose they are.
    """

    def __init__(self, mesh: AnyMesh, dtype: Any, model: Model):
        self.mesh, self.dtype, self.model = mesh, dtype, model
        self.leaves: dict[str, jax.ShapeDtypeStruct] = {}
        self.entries: dict[str, Expr] = {}

    def leaf(
        self, pattern: str, shape: tuple[int, ...], *spec: Any, layers: Iterable[int] | None = None, dtype: Any = None
    ) -> None:
        """Adds a tensor, or one per layer for `{i}` in the pattern."""
        leaf = tensor(self.mesh, self.dtype if dtype is None else dtype, shape, *spec)
        if layers is None:
            self.leaves[pattern] = leaf
        else:
            self.leaves.update((pattern.format(i=i), leaf) for i in layers)

    def side(self) -> Side:
        """What was collected, leaves as nested dicts."""
        return Side(params=nested(self.leaves), mapping=Mapping(self.entries), model=self.model)


def tensor(mesh: AnyMesh, dtype: Any, shape: tuple[int, ...], *spec: Any) -> jax.ShapeDtypeStruct:
    """A leaf of a side's tree."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))


def axis_size(engine: str, mesh: AnyMesh, axis: str) -> int:
    """Length of a mesh axis.

    Raises:
      PlanError: The mesh does not have it.
    """
    sizes = dict(mesh.shape)
    if axis not in sizes:
        raise PlanError(f"engine: the mesh of {engine} has the axes {list(sizes)}, but an axis {axis!r} is needed.")
    return sizes[axis]


def nested(flat: AbstractMapping[str, Any]) -> dict[str, Any]:
    """Names with dots as nested dicts."""
    out: dict[str, Any] = {}
    for name, leaf in flat.items():
        *parents, last = name.split(".")
        node = out
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = leaf
    return out
