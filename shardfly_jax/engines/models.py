"""Shapes of the models that the engine adapters know, read from `models.json`.

Sources of every figure stand in the file, per model: the model's public configuration and, where there is one, a
published total that the tests compare with.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import json
from typing import Any

from shardfly_jax.sharding.errors import PlanError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The expert part of a mixture-of-experts model.

    Attributes:
      count: Routed experts per layer.
      width: Intermediate size of one expert.
    """

    count: int
    width: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Sizes of a decoder-only transformer in Hugging Face's terms.

    Attributes:
      family: `qwen3`, `qwen3_moe`, `llama3`, ...
      experts: None for dense models.
      tied: Whether `lm_head` is the embedding.
    """

    name: str
    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int
    vocab: int
    tied: bool
    experts: Experts | None


def names() -> tuple[str, ...]:
    """All models of the file."""
    return tuple(_file())


def model(name: str) -> Model:
    """The sizes of a model.

    Raises:
      PlanError: The file does not have it.
    """
    data = _file()
    if name not in data:
        raise PlanError(f"model: {name!r} is unknown, but one of these is needed: {', '.join(data)}.")
    c = data[name]
    moe = c["moe"]
    return Model(
        name=name, family=c["family"], layers=c["num_layers"], hidden=c["hidden_size"], heads=c["num_heads"],
        kv_heads=c["num_kv_heads"], head_dim=c["head_dim"], width=c["intermediate_size"], vocab=c["vocab_size"],
        tied=c["tie_word_embeddings"],
        experts=Experts(count=moe["num_experts"], width=moe["moe_intermediate_size"]) if moe else None,
    )  # fmt: skip


@functools.cache
def _file() -> dict[str, Any]:
    text = importlib.resources.files("shardfly_jax.engines").joinpath("models.json").read_text()
    return json.loads(text)


def require_family(sizes: Model, families: tuple[str, ...], engine: str) -> None:
    """Raises:
    PlanError: The adapter has no mapping for the model's family.
    """
    if sizes.family not in families:
        raise PlanError(
            f"engine: {engine} has no mapping for {sizes.name!r} of family {sizes.family!r}, but only for "
            f"{list(families)}. Write an sf.Mapping for it."
        )
