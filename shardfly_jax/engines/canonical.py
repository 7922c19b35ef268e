"""The tensors in which trainers and rollouts meet: Hugging Face's, with the experts of a layer stacked.

`mlp.experts.gate_proj.weight` [experts, width, hidden] stands for the `mlp.experts.{e}.gate_proj.weight` of a
checkpoint; gpt-oss' are stacked there too. Nothing is ever held in this form: names and shapes serve to write adapters
against, and to check them.
"""

from __future__ import annotations

import dataclasses

from shardfly_jax.engines.models import Model

LAYER = "model.layers.{i}."
"""Prefix of per-layer names."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """One tensor, or those of one name in several layers.

    Attributes:
      name: With `{i}` for the layer where there are layers.
      shape: Of each.
      layers: That have it; None for a tensor outside the layers.
      dtype: None for the model's.
      per_expert: Whether checkpoints hold one tensor per expert, and axis 0 counts them.
    """

    name: str
    shape: tuple[int, ...]
    layers: range | None
    dtype: str | None = None
    per_expert: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Names with the layers filled in."""
        return (self.name,) if self.layers is None else tuple(self.name.format(i=i) for i in self.layers)


def tensors(model: Model) -> list[Tensor]:
    """All tensors of a model; a tied `lm_head` is none of them."""
    found = [
        Tensor(name="model.embed_tokens.weight", shape=(model.vocab, model.hidden), layers=None),
        Tensor(name="model.norm.weight", shape=(model.hidden,), layers=None),
    ]
    if not model.tied:
        found.append(Tensor(name="lm_head.weight", shape=(model.vocab, model.hidden), layers=None))
    every = range(model.layers)
    for norm in ("input_layernorm", "post_attention_layernorm"):
        found.append(Tensor(name=LAYER + norm + ".weight", shape=(model.hidden,), layers=every))
    found += _attention(model) if model.latent is None else _latent_attention(model)
    if model.dense_layers:
        found += _mlp("mlp.", model.width, model.hidden, model.dense_layers)
    if model.experts is not None:
        found += _interleaved_experts(model) if model.experts.interleaved else _experts(model)
    return found


def _linear(name: str, out: int, into: int, layers: range, bias: bool = False) -> list[Tensor]:
    weight = Tensor(name=LAYER + name + ".weight", shape=(out, into), layers=layers)
    return [weight, Tensor(name=LAYER + name + ".bias", shape=(out,), layers=layers)] if bias else [weight]


def _attention(m: Model) -> list[Tensor]:
    every = range(m.layers)
    found = [
        *_linear("self_attn.q_proj", m.heads * m.head_dim, m.hidden, every, m.qkv_bias),
        *_linear("self_attn.k_proj", m.kv_heads * m.head_dim, m.hidden, every, m.qkv_bias),
        *_linear("self_attn.v_proj", m.kv_heads * m.head_dim, m.hidden, every, m.qkv_bias),
        *_linear("self_attn.o_proj", m.hidden, m.heads * m.head_dim, every, m.o_bias),
    ]
    if m.qk_norm:
        for norm in ("q_norm", "k_norm"):
            found.append(Tensor(name=f"{LAYER}self_attn.{norm}.weight", shape=(m.head_dim,), layers=every))
    if m.sinks:
        found.append(Tensor(name=LAYER + "self_attn.sinks", shape=(m.heads,), layers=every))
    return found


def _latent_attention(m: Model) -> list[Tensor]:
    assert m.latent is not None
    every, mla = range(m.layers), m.latent
    if mla.q_rank is None:
        found = _linear("self_attn.q_proj", m.heads * m.head_dim, m.hidden, every)
    else:
        found = [
            *_linear("self_attn.q_a_proj", mla.q_rank, m.hidden, every),
            Tensor(name=LAYER + "self_attn.q_a_layernorm.weight", shape=(mla.q_rank,), layers=every),
            *_linear("self_attn.q_b_proj", m.heads * m.head_dim, mla.q_rank, every),
        ]
    return [
        *found,
        *_linear("self_attn.kv_a_proj_with_mqa", mla.kv_rank + mla.rope, m.hidden, every),
        Tensor(name=LAYER + "self_attn.kv_a_layernorm.weight", shape=(mla.kv_rank,), layers=every),
        *_linear("self_attn.kv_b_proj", m.heads * (mla.nope + mla.value), mla.kv_rank, every),
        *_linear("self_attn.o_proj", m.hidden, m.heads * mla.value, every),
    ]


def _mlp(prefix: str, width: int, hidden: int, layers: range) -> list[Tensor]:
    return [
        *_linear(prefix + "gate_proj", width, hidden, layers),
        *_linear(prefix + "up_proj", width, hidden, layers),
        *_linear(prefix + "down_proj", hidden, width, layers),
    ]


def _experts(m: Model) -> list[Tensor]:
    assert m.experts is not None
    e, f, d, layers = m.experts.count, m.experts.width, m.hidden, m.sparse_layers
    found = _linear("mlp.gate", e, d, layers)
    if m.experts.correction:
        bias = LAYER + "mlp.gate.e_score_correction_bias"
        found.append(Tensor(name=bias, shape=(e,), layers=layers, dtype="float32"))
    for name, shape in (("gate_proj", (e, f, d)), ("up_proj", (e, f, d)), ("down_proj", (e, d, f))):
        stacked = f"{LAYER}mlp.experts.{name}.weight"
        found.append(Tensor(name=stacked, shape=shape, layers=layers, per_expert=True))
    if m.experts.shared_width:
        found += _mlp("mlp.shared_experts.", m.experts.shared_width, d, layers)
    return found


def _interleaved_experts(m: Model) -> list[Tensor]:
    assert m.experts is not None
    e, f, d, layers = m.experts.count, m.experts.width, m.hidden, m.sparse_layers
    shapes = {
        "gate_up_proj": (e, d, 2 * f),
        "gate_up_proj_bias": (e, 2 * f),
        "down_proj": (e, f, d),
        "down_proj_bias": (e, d),
    }
    stacked = [Tensor(name=f"{LAYER}mlp.experts.{name}", shape=s, layers=layers) for name, s in shapes.items()]
    return [*_linear("mlp.router", e, d, layers, bias=True), *stacked]
