"""A rollout written in JAX, with shardings and names of its own: any tree of arrays, or of what stands for them."""

from __future__ import annotations

from typing import Any

from shardfly_jax.engines import hf
from shardfly_jax.engines.models import Model, require_model
from shardfly_jax.engines.side import Side
from shardfly_jax.layout import read_tree
from shardfly_jax.sharding.errors import PlanError
from shardfly_jax.sharding.mapping import Mapping


def rollout(model: Model, params: Any, mapping: Mapping | None = None) -> Side:
    """The rollout side of a model that JAX code serves.

    Where trainer and rollout have the same names and shapes, nothing of this is needed: `sf.make_plan(params, target)`.

    Args:
      model: From `engines.model(name)`.
      params: Tree of `jax.Array`s or `ShapeDtypeStruct`s with any `NamedSharding`s and dtypes; a flax module or state.
      mapping: For each of its names an expression over Hugging Face's names, with experts stacked as one tensor
        `model.layers.{i}.mlp.experts.gate_proj.weight`; None if it has Hugging Face's own names and shapes.

    Raises:
      PlanError: `params` is no such tree, or `mapping` no mapping.
    """
    require_model(model)
    read_tree(params, "params")
    if mapping is not None and not isinstance(mapping, Mapping):
        raise PlanError(f"jax.rollout: mapping is a {type(mapping).__name__}, but an sf.Mapping or None is needed.")
    return Side(role="rollout", params=params, mapping=hf.own_names(model) if mapping is None else mapping, model=model)
