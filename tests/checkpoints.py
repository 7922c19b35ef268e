"""Tiny models of every family, their checkpoints, and how trainers and engines load them.

The loaders are plain NumPy and know nothing of mappings: each follows, tensor by tensor and rank by rank, what the
engine's own loading code does with a Hugging Face checkpoint. They are the oracle of the engine adapters.
"""

from __future__ import annotations

import numpy as np

from shardfly_jax.engines import hf
from shardfly_jax.engines.models import Experts, Latent, Model

Arrays = dict[str, np.ndarray]

QWEN3 = Model(
    name="tiny-qwen3", family="qwen3", layers=2, hidden=16, heads=8, kv_heads=2, head_dim=16, width=32, vocab=100,
    tied=True, qk_norm=True,
)  # fmt: skip
QWEN3_MOE = Model(
    name="tiny-qwen3-moe", family="qwen3_moe", layers=2, hidden=16, heads=8, kv_heads=2, head_dim=16, width=0, vocab=64,
    tied=False, qk_norm=True, experts=Experts(count=8, width=16),
)  # fmt: skip
LLAMA = Model(
    name="tiny-llama", family="llama3", layers=3, hidden=16, heads=8, kv_heads=4, head_dim=16, width=32, vocab=64,
    tied=False,
)  # fmt: skip
DEEPSEEK = Model(
    name="tiny-deepseek", family="deepseek_v3", layers=4, hidden=16, heads=8, kv_heads=8, head_dim=12, width=32,
    vocab=64, tied=False, experts=Experts(count=8, width=16, dense_layers=1, shared_width=16, correction=True),
    latent=Latent(q_rank=8, kv_rank=4, nope=8, rope=4, value=6),
)  # fmt: skip
MOONLIGHT = Model(
    name="tiny-moonlight", family="deepseek_v3", layers=3, hidden=16, heads=8, kv_heads=8, head_dim=12, width=32,
    vocab=64, tied=False, experts=Experts(count=8, width=16, dense_layers=2, shared_width=32, correction=True),
    latent=Latent(q_rank=None, kv_rank=4, nope=8, rope=4, value=6),
)  # fmt: skip
GPT_OSS = Model(
    name="tiny-gpt-oss", family="gpt_oss", layers=4, hidden=16, heads=8, kv_heads=4, head_dim=8, width=16, vocab=64,
    tied=False, qkv_bias=True, o_bias=True, sinks=True, experts=Experts(count=8, width=16, interleaved=True),
)  # fmt: skip
GLM = Model(
    name="tiny-glm", family="glm4_moe", layers=3, hidden=16, heads=8, kv_heads=4, head_dim=8, width=32, vocab=64,
    tied=False, qk_norm=True, qkv_bias=True,
    experts=Experts(count=8, width=16, dense_layers=1, shared_width=16, correction=True),
)  # fmt: skip
TINY = (QWEN3, QWEN3_MOE, LLAMA, DEEPSEEK, MOONLIGHT, GPT_OSS, GLM)


def checkpoint(model: Model, rng: np.random.Generator) -> Arrays:
    """Random float32 values under the names and in the shapes of a checkpoint (which tests compare with the hub's)."""
    from jax.sharding import AbstractMesh

    leaves = hf.rollout(model, AbstractMesh((1,), ("x",))).params
    return {name: rng.standard_normal(leaf.shape, np.float32) for name, leaf in leaves.items()}


def into_tunix(m: Model, ck: Arrays) -> Arrays:
    """tunix' params.py of qwen3 and llama3: transpose kernels, then reshape to heads; stack experts."""
    out = {"embedder.input_embedding": ck["model.embed_tokens.weight"], "final_norm.w": ck["model.norm.weight"]}
    if not m.tied:
        out["lm_head.w"] = ck["lm_head.weight"].T
    for i in range(m.layers):
        here, there = f"layers.{i}.", f"model.layers.{i}."
        for name, heads in (("q", m.heads), ("k", m.kv_heads), ("v", m.kv_heads)):
            kernel = ck[there + f"self_attn.{name}_proj.weight"]
            out[here + f"attn.{name}_proj.w"] = kernel.T.reshape(m.hidden, heads, m.head_dim)
        out[here + "attn.o_proj.w"] = ck[there + "self_attn.o_proj.weight"].T.reshape(m.heads, m.head_dim, m.hidden)
        for norm in ("q_norm", "k_norm") if m.qk_norm else ():
            out[here + f"attn.{norm}.w"] = ck[there + f"self_attn.{norm}.weight"]
        for norm in ("input_layernorm", "post_attention_layernorm"):
            out[here + norm + ".w"] = ck[there + norm + ".weight"]
        for name in ("gate_proj", "up_proj", "down_proj"):
            if m.experts is None:
                out[here + f"mlp.{name}.kernel"] = ck[there + f"mlp.{name}.weight"].T
            else:
                each = [ck[there + f"mlp.experts.{e}.{name}.weight"].T for e in range(m.experts.count)]
                out[here + f"mlp.{name}"] = np.stack(each)
        if m.experts is not None:
            out[here + "mlp.router.kernel"] = ck[there + "mlp.gate.weight"].T
    return out
