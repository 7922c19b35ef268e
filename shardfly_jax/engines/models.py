"""Shapes of the models that the engine adapters know, read from `models.json`.

Sources of every figure stand in the file, per model: the model's public configuration and, where there is one, a
published total that the tests compare with.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import json
import reprlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from shardfly_jax.sharding.errors import PlanError


def _wrong_sizes(what: str, of: Any, **least: int) -> Iterator[str]:
    """Faults of fields that are no whole numbers, or less than they may be."""
    for field, lowest in least.items():
        value = getattr(of, field)
        if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < lowest:
            yield (
                f"{what} {field} is {value!r}, but a whole number of at least {lowest} is needed. Take it from the "
                "model's config.json."
            )


def _refuse(faults: list[str]) -> None:
    """Raises:
    PlanError: There are some.
    """
    if faults:
        raise PlanError(faults)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The expert part of a mixture-of-experts model.

    Attributes:
      count: Routed experts per layer.
      width: Intermediate size of one expert.
      dense_layers: How many of the first layers have a dense MLP instead.
      shared_width: Intermediate size of the MLP that every token passes; 0 without one.
      correction: Whether the router has `e_score_correction_bias`, float32.
      interleaved: gpt-oss' form: one tensor per layer whose columns alternate between gate and up, [in, out], with
        biases, and a router with a bias.

    Raises:
      PlanError: A size is none; lists all.
    """

    count: int
    width: int
    dense_layers: int = 0
    shared_width: int = 0
    correction: bool = False
    interleaved: bool = False

    def __post_init__(self) -> None:
        _refuse([*_wrong_sizes("experts:", self, count=1, width=1, dense_layers=0, shared_width=0)])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, section 2.1).

    Attributes:
      q_rank: Of the query's compression; None where queries are projected at once.
      kv_rank: Of the joint compression of keys and values.
      nope, rope: Head dimensions of queries and keys without and with rotary embedding.
      value: Head dimension of values.

    Raises:
      PlanError: A size is none; lists all.
    """

    q_rank: int | None
    kv_rank: int
    nope: int
    rope: int
    value: int

    def __post_init__(self) -> None:
        ranks = {"kv_rank": 1} if self.q_rank is None else {"q_rank": 1, "kv_rank": 1}
        _refuse([*_wrong_sizes("latent:", self, **ranks, nope=1, rope=1, value=1)])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Sizes of a decoder-only transformer in Hugging Face's terms. Draft layers (MTP) are another model's.

    Attributes:
      family: `qwen3`, `qwen3_moe`, `llama3`, `deepseek_v3`, `gpt_oss` or `glm4_moe`.
      head_dim: Of queries and keys.
      tied: Whether `lm_head` is the embedding.
      experts: None for dense models.
      latent: None for grouped-query attention.
      qk_norm: Whether queries and keys are normed per head.
      qkv_bias, o_bias: Whether those projections have biases.
      sinks: Whether each head has an attention sink.

    Raises:
      PlanError: Sizes that no model has; lists all.
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
    experts: Experts | None = None
    latent: Latent | None = None
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    sinks: bool = False

    def __post_init__(self) -> None:
        _refuse([*self._faults()])

    def _faults(self) -> Iterator[str]:
        what = f"model: {self.name!r}"
        for field in ("name", "family"):
            if not isinstance(value := getattr(self, field), str):
                yield f"{what} {field} is {value!r}, but a string is needed. Give one."
        for field, kind in (("experts", Experts), ("latent", Latent)):
            if not isinstance(value := getattr(self, field), kind | None):
                yield (
                    f"{what} {field} is {reprlib.repr(value)}, but {kind.__name__} or None is needed. Give "
                    f"sf.engines.{kind.__name__}(...)."
                )
                return
        sizes = ("layers", "hidden", "heads", "kv_heads", "head_dim", "vocab")
        has_mlp = self.experts is None or self.experts.dense_layers > 0
        faults = [*_wrong_sizes(what, self, **dict.fromkeys(sizes, 1), width=int(has_mlp))]
        yield from faults
        if faults:
            return
        if self.heads % self.kv_heads:
            yield (
                f"{what} heads is {self.heads}, but it must be a multiple of kv_heads, {self.kv_heads}: as many heads "
                "share each. Mend one of them."
            )
        if self.experts is not None and self.experts.dense_layers > self.layers:
            yield (
                f"{what} layers is {self.layers}, but experts.dense_layers is {self.experts.dense_layers}. Mend one of "
                "them."
            )
        if self.latent is not None and self.head_dim != self.latent.nope + self.latent.rope:
            yield (
                f"{what} head_dim is {self.head_dim}, but that of queries, latent.nope + latent.rope, is "
                f"{self.latent.nope + self.latent.rope}. Mend one of them."
            )

    @property
    def dense_layers(self) -> range:
        """Layers with a dense MLP."""
        return range(self.layers if self.experts is None else self.experts.dense_layers)

    @property
    def sparse_layers(self) -> range:
        """Layers with experts."""
        return range(len(self.dense_layers), self.layers)


def names() -> tuple[str, ...]:
    """All models of the file."""
    return tuple(_file())


def model(name: str) -> Model:
    """The sizes of a model.

    Raises:
      PlanError: The file does not have it.
    """
    data = _file()
    if not isinstance(name, str) or name not in data:
        raise PlanError(f"model: {name!r} is unknown, but one of these is needed: {', '.join(data)}.")
    c = data[name]
    moe, mla = c["moe"], c["mla"]
    experts = latent = None
    if moe:
        experts = Experts(
            count=moe["num_experts"], width=moe["moe_intermediate_size"], dense_layers=moe["first_dense_layers"],
            shared_width=moe["shared_intermediate_size"], correction=moe["e_score_correction_bias"] is not None,
            interleaved=moe["hf_fused_gate_up"] == "interleaved",
        )  # fmt: skip
    if mla:
        latent = Latent(
            q_rank=mla["q_lora_rank"], kv_rank=mla["kv_lora_rank"], nope=mla["qk_nope_head_dim"],
            rope=mla["qk_rope_head_dim"], value=mla["v_head_dim"],
        )  # fmt: skip
    return Model(
        name=name, family=c["family"], layers=c["num_layers"], hidden=c["hidden_size"], heads=c["num_heads"],
        kv_heads=c["num_kv_heads"], head_dim=latent.nope + latent.rope if latent else c["head_dim"],
        width=c["intermediate_size"], vocab=c["vocab_size"], tied=c["tie_word_embeddings"], experts=experts,
        latent=latent, qk_norm=c["qk_norm"] == "per_head", qkv_bias=c["attention_bias"], o_bias=c["o_proj_bias"],
        sinks=c["attention_sinks"],
    )  # fmt: skip


@functools.cache
def _file() -> dict[str, Any]:
    text = importlib.resources.files("shardfly_jax.engines").joinpath("models.json").read_text()
    return json.loads(text)


def require_model(given: Any) -> None:
    """Raises:
    PlanError: Something else than a `Model`, such as its name.
    """
    if not isinstance(given, Model):
        name = repr(given) if isinstance(given, str) else "name"
        raise PlanError(
            f"model: {given!r} is of type {type(given).__name__}, but a Model is needed. Give "
            f"sf.engines.model({name}), or your own sizes as sf.engines.Model(...)."
        )


def require_family(sizes: Model, families: tuple[str, ...], engine: str) -> None:
    """Raises:
    PlanError: No `Model`, or the adapter has no mapping for its family.
    """
    require_model(sizes)
    if sizes.family not in families:
        raise PlanError(
            f"engine: {engine} has no mapping for {sizes.name!r} of family {sizes.family!r}, but only for "
            f"{list(families)}. Write an sf.Mapping for it."
        )
