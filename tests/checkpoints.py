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


def into_maxtext(m: Model, ck: Arrays, scanned: bool) -> Arrays:
    """MaxText's `param_mapping.py` towards MaxText: hooks per tensor; experts on axis 0, then layers on axis 1."""
    out = {
        "token_embedder.embedding": ck["model.embed_tokens.weight"],
        "decoder.decoder_norm.scale": ck["model.norm.weight"],
    }
    if not m.tied:
        out["decoder.logits_dense.kernel"] = ck["lm_head.weight"].T
    layers = [_maxtext_layer(m, ck, i) for i in range(m.layers)]
    dense = len(m.dense_layers)
    if m.family == "deepseek_v3":
        stacks = {"decoder.dense_layers": layers[:dense], "decoder.moe_layers": layers[dense:]}
    elif m.family == "gpt_oss" and scanned:
        stacks = {"decoder.layers.layers_0": layers[0::2], "decoder.layers.layers_1": layers[1::2]}
    else:
        stacks = {"decoder.layers": layers}
    for prefix, stack in stacks.items():
        for name in stack[0]:
            if scanned:
                # DeepSeek's routing bias is no nnx.Param: nnx_scan.py leaves its layers where scan put them
                axis = 0 if m.family == "deepseek_v3" and name.endswith("gate.bias") else 1
                out[f"{prefix}.{name}"] = np.stack([layer[name] for layer in stack], axis=axis)
            else:
                out |= {f"{prefix}_{j}.{name}": layer[name] for j, layer in enumerate(stack)}
    return out


def _maxtext_layer(m: Model, ck: Arrays, i: int) -> Arrays:
    p = f"model.layers.{i}."

    def kernel(name: str, *shape: int) -> np.ndarray:  # reshape_kernel
        w = ck[p + name + ".weight"]
        return w.T.reshape(shape) if shape else w.T

    out = {
        "pre_self_attention_layer_norm.scale": ck[p + "input_layernorm.weight"],
        "post_self_attention_layer_norm.scale": ck[p + "post_attention_layernorm.weight"],
    }
    if m.latent is not None:
        a, mla = "self_attention.", m.latent
        if mla.q_rank is None:
            out[a + "query.kernel"] = kernel("self_attn.q_proj", m.hidden, m.heads, m.head_dim)
        else:
            out[a + "wq_a.kernel"] = kernel("self_attn.q_a_proj")
            out[a + "q_norm.scale"] = ck[p + "self_attn.q_a_layernorm.weight"]
            out[a + "wq_b.kernel"] = kernel("self_attn.q_b_proj", mla.q_rank, m.heads, m.head_dim)
        out[a + "wkv_a.kernel"] = kernel("self_attn.kv_a_proj_with_mqa")
        out[a + "kv_norm.scale"] = ck[p + "self_attn.kv_a_layernorm.weight"]
        out[a + "wkv_b.kernel"] = kernel("self_attn.kv_b_proj", mla.kv_rank, m.heads, mla.nope + mla.value)
        out[a + "out.kernel"] = kernel("self_attn.o_proj", m.heads, mla.value, m.hidden)
    else:
        a = "GptOssAttention." if m.family == "gpt_oss" else "self_attention."
        for name, head, heads in (("query", "q", m.heads), ("key", "k", m.kv_heads), ("value", "v", m.kv_heads)):
            w = kernel(f"self_attn.{head}_proj", m.hidden, heads, m.head_dim)
            if m.family == "llama3" and head in "qk":  # adjust_rope
                halves = np.split(w, 2, axis=-1)
                w = np.stack(halves, axis=-1).reshape(w.shape)
            if m.family == "llama3" and head == "q":  # scale_query_layer
                w = w * np.float32(1 / np.sqrt(m.head_dim))
            out[f"{a}{name}.kernel"] = w
            if m.qkv_bias:
                out[f"{a}{name}.bias"] = ck[p + f"self_attn.{head}_proj.bias"].reshape(heads, m.head_dim)
        out[a + "out.kernel"] = kernel("self_attn.o_proj", m.heads, m.head_dim, m.hidden)
        if m.o_bias:
            out[a + "out.bias"] = ck[p + "self_attn.o_proj.bias"]
        if m.sinks:
            out[a + "sinks"] = ck[p + "self_attn.sinks"]
        if m.qk_norm:
            out[a + "query_norm.scale"] = ck[p + "self_attn.q_norm.weight"]
            out[a + "key_norm.scale"] = ck[p + "self_attn.k_norm.weight"]
    three = (("wi_0", "gate_proj"), ("wi_1", "up_proj"), ("wo", "down_proj"))
    if i in m.dense_layers:
        return out | {f"mlp.{own}.kernel": kernel(f"mlp.{name}") for own, name in three}
    assert m.experts is not None
    if m.experts.interleaved:
        g = "GptOssMlp."
        both, bias = ck[p + "mlp.experts.gate_up_proj"], ck[p + "mlp.experts.gate_up_proj_bias"]
        return out | {
            g + "gate.kernel": kernel("mlp.router"), g + "gate.bias": ck[p + "mlp.router.bias"],
            g + "wi_0": both[..., ::2], g + "wi_1": both[..., 1::2],
            g + "wi_0_bias": bias[..., ::2], g + "wi_1_bias": bias[..., 1::2],
            g + "wo": ck[p + "mlp.experts.down_proj"], g + "wo_bias": ck[p + "mlp.experts.down_proj_bias"],
        }  # fmt: skip
    block = "DeepSeekMoeBlock_0.MoeBlock_0." if m.family == "deepseek_v3" else "moe_block."
    out[block + "gate.kernel"] = kernel("mlp.gate")
    if m.experts.correction:
        out[block + "gate.bias"] = ck[p + "mlp.gate.e_score_correction_bias"]
    for own, name in three:
        out[block + own] = np.stack([kernel(f"mlp.experts.{e}.{name}") for e in range(m.experts.count)])
        if m.experts.shared_width:
            out[f"DeepSeekMoeBlock_0.shared_experts.{own}.kernel"] = kernel(f"mlp.shared_experts.{name}")
    return out
