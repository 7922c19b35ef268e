"""What an adapter gives: one side's tensors, and how they relate to Hugging Face's.

Trainers and rollouts meet in *canonical* names: Hugging Face's, with the experts of a layer stacked on a leading axis
(`model.layers.{i}.mlp.experts.gate_proj.weight` [experts, width, hidden]). A trainer says what each canonical tensor is
in its own tensors; a rollout says what each of its tensors is in canonical ones; `route` composes the two. Nothing is
ever held in canonical form.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from shardfly_jax.sharding.mapping import Mapping, compose

LAYER = "model.layers.{i}."
"""Prefix of canonical per-layer names."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One side of a route.

    Attributes:
      params: Tree of `ShapeDtypeStruct`s with shardings.
      mapping: A trainer's: canonical name -> expression over its own tensors. A rollout's: own name -> expression over
        canonical tensors.
    """

    params: Any
    mapping: Mapping


def route(trainer: Side, rollout: Side) -> Mapping:
    """The mapping from a trainer's tensors to a rollout's."""
    return compose(rollout.mapping, trainer.mapping)


def tensor(
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh, dtype: str, shape: tuple[int, ...], *spec: Any
) -> jax.ShapeDtypeStruct:
    """A leaf of a side's tree."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    """Names with dots as nested dicts."""
    out: dict[str, Any] = {}
    for name, leaf in flat.items():
        *parents, last = name.split(".")
        node = out
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = leaf
    return out
