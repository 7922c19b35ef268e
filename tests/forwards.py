"""Forward passes over trainers' own trees in plain JAX: what the trainer's model answers, to compare rollouts with.

Written after the models' papers and configs, with kernels as tunix and MaxText hold them ([in, heads, head_dim], ...);
`tests/test_tunix.py` compares with tunix' own modules. Prompts are short, so that no window of gpt-oss is full.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from shardfly_jax.engines.models import Model

THETA, EPS, TOP_K = 1e6, 1e-6, 2
"""Of all small models: base of rotary embeddings (tunix 0.1.7 uses this one whatever its config says), eps of norms,
experts per token."""

Params = Mapping[str, jax.Array]


def tunix_logits(m: Model, p: Params, tokens: jax.Array) -> jax.Array:
    """Logits [batch, length, vocab] of Qwen3, Qwen3-MoE or Llama 3 from tunix' tree by name."""
    x = p["embedder.input_embedding"][tokens]
    for i in range(m.layers):
        own = f"layers.{i}."
        y = _norm(x, p[own + "input_layernorm.w"])
        q, k, v = (jnp.einsum("btd,dnh->btnh", y, p[f"{own}attn.{name}_proj.w"]) for name in "qkv")
        if m.qk_norm:
            q, k = _norm(q, p[own + "attn.q_norm.w"]), _norm(k, p[own + "attn.k_norm.w"])
        x = x + jnp.einsum("btnh,nhd->btd", _attention(q, k, v), p[own + "attn.o_proj.w"])
        y = _norm(x, p[own + "post_attention_layernorm.w"])
        mlp = own + "mlp."
        if m.experts is None:
            gate, up, down = (p[f"{mlp}{name}_proj.kernel"] for name in ("gate", "up", "down"))
            x = x + (jax.nn.silu(y @ gate) * (y @ up)) @ down
        else:
            weights = jax.nn.softmax((y @ p[mlp + "router.kernel"]).astype(jnp.float32), axis=-1)
            chosen = _top_k(weights)
            shares = jnp.where(chosen, weights, 0)
            shares = (shares / shares.sum(-1, keepdims=True)).astype(x.dtype)
            gate, up = (jnp.einsum("btd,edf->btef", y, p[f"{mlp}{name}_proj"]) for name in ("gate", "up"))
            each = jnp.einsum("btef,efd->bted", jax.nn.silu(gate) * up, p[mlp + "down_proj"])
            x = x + jnp.einsum("bted,bte->btd", each, shares)
    x = _norm(x, p["final_norm.w"])
    return x @ (p["embedder.input_embedding"].T if m.tied else p["lm_head.w"])


def gpt_oss_logits(m: Model, p: Params, tokens: jax.Array) -> jax.Array:
    """Logits [batch, length, vocab] of gpt-oss from MaxText's unscanned tree by name.

    Attention has a sink per head beside the keys; gates are clamped, `(up + 1) * gate * sigmoid(1.702 * gate)`; the
    softmax of the router is over the chosen experts alone (openai/gpt-oss, `torch/model.py`).
    """
    x = p["token_embedder.embedding"][tokens]
    for i in range(m.layers):
        own = f"decoder.layers_{i}."
        attn, mlp = own + "GptOssAttention.", own + "GptOssMlp."
        y = _norm(x, p[own + "pre_self_attention_layer_norm.scale"])
        q, k, v = (
            jnp.einsum("btd,dnh->btnh", y, p[f"{attn}{name}.kernel"]) + p[f"{attn}{name}.bias"]
            for name in ("query", "key", "value")
        )
        out = _attention(q, k, v, p[attn + "sinks"])
        x = x + jnp.einsum("btnh,nhd->btd", out, p[attn + "out.kernel"]) + p[attn + "out.bias"]
        y = _norm(x, p[own + "post_self_attention_layer_norm.scale"])
        scores = y @ p[mlp + "gate.kernel"] + p[mlp + "gate.bias"]
        shares = jax.nn.softmax(jnp.where(_top_k(scores), scores, -jnp.inf), axis=-1)
        gate, up = (jnp.einsum("btd,edf->btef", y, p[mlp + name]) + p[f"{mlp}{name}_bias"] for name in ("wi_0", "wi_1"))
        gate, up = jnp.minimum(gate, 7.0), jnp.clip(up, -7.0, 7.0)
        each = jnp.einsum("btef,efd->bted", (up + 1) * gate * jax.nn.sigmoid(1.702 * gate), p[mlp + "wo"])
        x = x + jnp.einsum("bted,bte->btd", each + p[mlp + "wo_bias"], shares)
    return _norm(x, p["decoder.decoder_norm.scale"]) @ p["decoder.logits_dense.kernel"]


FORWARDS: dict[str, Callable[[Model, Params, jax.Array], jax.Array]] = {
    "tunix": tunix_logits,
    "maxtext": gpt_oss_logits,
}
"""By the trainer whose tree they read."""


def _norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide = wide / jnp.sqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + EPS)
    return (wide * weight.astype(jnp.float32)).astype(x.dtype)


def _rotated(x: jax.Array) -> jax.Array:
    """Rotary embedding of [batch, length, heads, head_dim] whose pairs are the two halves."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] / THETA ** (jnp.arange(half) / half)
    sin, cos = (f(angles)[None, :, None].astype(x.dtype) for f in (jnp.sin, jnp.cos))
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _attention(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None = None) -> jax.Array:
    """Causal attention with grouped heads; a sink takes its share and gives nothing."""
    group, length = q.shape[2] // k.shape[2], q.shape[1]
    q, k = _rotated(q), jnp.repeat(_rotated(k), group, axis=2)
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) / jnp.sqrt(q.shape[-1]).astype(q.dtype)
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores.astype(jnp.float32), -jnp.inf)
    if sinks is not None:
        sink = jnp.broadcast_to(sinks.astype(jnp.float32)[:, None, None], (*scores.shape[:3], 1))
        scores = jnp.concatenate([scores, sink], axis=-1)
    shares = jax.nn.softmax(scores, axis=-1)[..., :length].astype(v.dtype)
    return jnp.einsum("bnts,bsnh->btnh", shares, jnp.repeat(v, group, axis=2))


def _top_k(scores: jax.Array) -> jax.Array:
    """Which experts are among the best, as booleans like `scores`."""
    return scores >= jax.lax.top_k(scores, TOP_K)[0][..., -1:]
