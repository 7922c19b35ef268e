"""What an adapter gives: one side's tensors, and how they relate to the canonical ones of `canonical`.

A trainer says what each canonical tensor is in its own tensors; a rollout says what each of its tensors is in canonical
ones; `route` composes the two. Nothing is ever held in canonical form.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping as AbstractMapping
from typing import Any, Literal

import jax
from jax.sharding import NamedSharding, PartitionSpec

from shardfly_jax.engines.models import Model
from shardfly_jax.sharding.composition import compose, undefined
from shardfly_jax.sharding.errors import LanguageError, PlanError
from shardfly_jax.sharding.formats import dtype_name, np_dtype
from shardfly_jax.sharding.language import Expr
from shardfly_jax.sharding.mapping import Mapping

AnyMesh = jax.sharding.Mesh | jax.sharding.AbstractMesh
Role = Literal["trainer", "rollout"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One side of a route.

    Attributes:
      role: Which side it is, and so how its mapping is meant.
      params: Tree of `ShapeDtypeStruct`s with shardings.
      mapping: A trainer's: canonical name -> expression over its own tensors. A rollout's: own name -> expression over
        canonical tensors.
      model: Whose; None if unknown.
    """

    role: Role
    params: Any
    mapping: Mapping
    model: Model | None = None


def route(trainer: Side, rollout: Side) -> Mapping:
    """The mapping from a trainer's tensors to a rollout's.

    Raises:
      PlanError: Not a trainer and a rollout in this order, models of other sizes, or tensors that the rollout reads and
        the trainer does not have; all of these are listed.
    """
    _check_roles(trainer, rollout)
    if trainer.model is not None and rollout.model is not None:
        ours, theirs = (dataclasses.asdict(side.model) | {"name": ""} for side in (trainer, rollout) if side.model)
        if other := [f"{key} ({ours[key]} and {theirs[key]})" for key in ours if ours[key] != theirs[key]]:
            raise PlanError(
                f"route: trainer and rollout describe other models: they differ in {', '.join(other)}. "
                "Give both the same engines.model(...)."
            )
    if missing := undefined(rollout.mapping, trainer.mapping):
        raise PlanError([_missing(name, trainer.model, rollout.model) for name in missing])
    return compose(rollout.mapping, trainer.mapping)


def _check_roles(trainer: Any, rollout: Any) -> None:
    given = tuple(side.role if isinstance(side, Side) else type(side).__name__ for side in (trainer, rollout))
    if given == ("trainer", "rollout"):
        return
    if given == ("rollout", "trainer"):
        raise PlanError("route: it was given a rollout and a trainer, but it takes the trainer first. Swap them.")
    raise PlanError(
        f"route: it was given {given[0]!r} and {given[1]!r}, but it takes one trainer and one rollout. Give what "
        "sf.engines.<engine>.trainer(...) and .rollout(...) return."
    )


def _missing(name: str, trainer: Model | None, rollout: Model | None) -> str:
    """The fault of a tensor that only the rollout knows."""
    ours, theirs = ("" if model is None else f" of {model.name}" for model in (trainer, rollout))
    if name == "lm_head.weight" and rollout is not None:
        remedy = (
            f"{rollout.name} is not tied here: add the head to the trainer's description; or, if the trainer does tie "
            "it to the embedding, give both sides dataclasses.replace(model, tied=True)."
        )
    else:
        remedy = "Add it to the trainer's description, or give both sides the model that the trainer has."
    return f"route: {name!r} is read by the rollout{theirs}, but the trainer{ours} does not define it. {remedy}"


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

    def side(self, role: Role) -> Side:
        """What was collected, leaves as nested dicts."""
        return Side(role=role, params=nested(self.leaves), mapping=Mapping(self.entries), model=self.model)


def tensor(mesh: AnyMesh, dtype: Any, shape: tuple[int, ...], *spec: Any) -> jax.ShapeDtypeStruct:
    """A leaf of a side's tree.

    Raises:
      PlanError: No dtype, or a spec that does not fit the mesh or the shape.
    """
    try:
        name = dtype_name(dtype)
        return jax.ShapeDtypeStruct(shape, np_dtype(name), sharding=NamedSharding(mesh, PartitionSpec(*spec)))
    except LanguageError as error:
        raise PlanError(str(error)) from error
    except ValueError as error:
        raise PlanError(
            f"spec: {PartitionSpec(*spec)} does not fit shape {shape} on a mesh with the axes {list(mesh.axis_names)}: "
            f"{error} Mend the spec."
        ) from error


def require_mesh(given: Any) -> None:
    """Raises:
    PlanError: Something else than a mesh.
    """
    if not isinstance(given, AnyMesh):
        raise PlanError(
            f"mesh: {given!r} is of type {type(given).__name__}, but a jax.sharding.Mesh or AbstractMesh is needed. "
            "Give one."
        )


def axis_size(engine: str, mesh: AnyMesh, axis: str) -> int:
    """Length of a mesh axis.

    Raises:
      PlanError: The mesh does not have it, or is none.
    """
    require_mesh(mesh)
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
