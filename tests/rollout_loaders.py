"""How vLLM and SGLang load a checkpoint on one rank, in plain NumPy: buffers are allocated, then filled name by name.

Written after the engines' weight loaders (see `shardfly_jax.engines.{vllm,sglang}` for versions and files); no mapping
is used. A buffer element that no name fills stays NaN and fails the comparison.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from checkpoints import Arrays

from shardfly_jax.engines.models import Model


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rank:
    """One rank of an engine.

    Attributes:
      tp, tp_size: Place among the ranks that cut heads and MLPs.
      moe_tp, moe_tp_size: Place among the ranks that cut the same experts.
      ep, ep_size: Place among the groups that share out experts.
      slots: The expert in each slot of all ranks.
    """

    tp: int
    tp_size: int
    moe_tp: int = 0
    moe_tp_size: int = 1
    ep: int = 0
    ep_size: int = 1
    slots: Sequence[int] = ()


def cut(w: np.ndarray, axis: int, rank: int, size: int) -> np.ndarray:
    """`loaded_weight.narrow(axis, rank * shard_size, shard_size)`."""
    n = w.shape[axis] // size
    return np.take(w, range(rank * n, (rank + 1) * n), axis=axis)


def qkv(m: Model, ck: Arrays, name: str, r: Rank) -> np.ndarray:
    """`QKVParallelLinear.weight_loader`: replicas of a kv head are neighbours."""
    q = ck[name.replace("qkv", "q")]
    replicas = max(1, r.tp_size // m.kv_heads)
    kv_rows = max(1, m.kv_heads // r.tp_size) * m.head_dim
    q_rows = m.heads // r.tp_size * m.head_dim
    out = np.full((q_rows + 2 * kv_rows, *q.shape[1:]), np.nan, q.dtype)
    out[:q_rows] = q[r.tp * q_rows : (r.tp + 1) * q_rows]
    start = r.tp // replicas * kv_rows
    for k, other in enumerate("kv"):
        offset = q_rows + k * kv_rows
        out[offset : offset + kv_rows] = ck[name.replace("qkv", other)][start : start + kv_rows]
    return out


def vocabulary(w: np.ndarray, r: Rank) -> np.ndarray:
    """`VocabParallelEmbedding.weight_loader`: rows past the vocabulary are zero."""
    rows = -(-w.shape[0] // 64) * 64 // r.tp_size
    out = np.zeros((rows, w.shape[1]), w.dtype)
    mine = w[r.tp * rows : (r.tp + 1) * rows]
    out[: len(mine)] = mine
    return out


def gate_up(ck: Arrays, p: str, r: Rank) -> np.ndarray:
    """`MergedColumnParallelLinear.weight_loader`."""
    return np.concatenate([cut(ck[f"{p}{name}_proj.weight"], 0, r.tp, r.tp_size) for name in ("gate", "up")])


def experts(m: Model, names: list[str], ck: Arrays, r: Rank, up_first: bool) -> tuple[np.ndarray, np.ndarray]:
    """`FusedMoE.weight_loader` with `_load_w13` and `_load_w2`; `names` are the prefixes of all experts in slots."""
    assert m.experts is not None
    here = names[len(names) // r.ep_size * r.ep :][: len(names) // r.ep_size]
    f = m.experts.width // r.moe_tp_size
    w13, w2 = (
        np.full((len(here), 2 * f, m.hidden), np.nan, np.float32),
        np.full((len(here), m.hidden, f), np.nan, np.float32),
    )
    for slot, prefix in enumerate(here):
        first, second = (f, 0) if up_first else (0, f)
        w13[slot, first : first + f] = cut(ck[prefix + "gate_proj.weight"], 0, r.moe_tp, r.moe_tp_size)
        w13[slot, second : second + f] = cut(ck[prefix + "up_proj.weight"], 0, r.moe_tp, r.moe_tp_size)
        w2[slot] = cut(ck[prefix + "down_proj.weight"], 1, r.moe_tp, r.moe_tp_size)
    return w13, w2


def _common(m: Model, ck: Arrays, r: Rank, embedding: str, attn: str, fused_a: str) -> Arrays:
    """What both engines hold beside experts."""
    embed = vocabulary(ck["model.embed_tokens.weight"], r)
    head = embed if m.tied else vocabulary(ck["lm_head.weight"], r)
    out = {embedding: embed, "model.norm.weight": ck["model.norm.weight"], "lm_head.weight": head}
    for i in range(m.layers):
        p, a = f"model.layers.{i}.", f"model.layers.{i}.self_attn."
        for norm in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            out[p + norm] = ck[p + norm]
        out[f"{p}{attn}.o_proj.weight"] = cut(ck[a + "o_proj.weight"], 1, r.tp, r.tp_size)
        if m.latent is None:
            out[f"{p}{attn}.qkv_proj.weight"] = qkv(m, ck, a + "qkv_proj.weight", r)
        else:
            if m.latent.q_rank is None:
                out[a + "q_proj.weight"] = cut(ck[a + "q_proj.weight"], 0, r.tp, r.tp_size)
                out[a + "kv_a_proj_with_mqa.weight"] = ck[a + "kv_a_proj_with_mqa.weight"]
            else:
                both = [ck[a + "q_a_proj.weight"], ck[a + "kv_a_proj_with_mqa.weight"]]
                out[f"{a}{fused_a}.weight"] = np.concatenate(both)
                out[a + "q_a_layernorm.weight"] = ck[a + "q_a_layernorm.weight"]
                out[a + "q_b_proj.weight"] = cut(ck[a + "q_b_proj.weight"], 0, r.tp, r.tp_size)
            out[a + "kv_a_layernorm.weight"] = ck[a + "kv_a_layernorm.weight"]
            out[a + "kv_b_proj.weight"] = cut(ck[a + "kv_b_proj.weight"], 0, r.tp, r.tp_size)
        if m.qkv_bias:
            out[f"{p}{attn}.qkv_proj.bias"] = qkv(m, ck, a + "qkv_proj.bias", r)
        if m.o_bias:
            out[f"{p}{attn}.o_proj.bias"] = ck[a + "o_proj.bias"]
        if m.sinks:
            out[f"{p}{attn}.sinks"] = cut(ck[a + "sinks"], 0, r.tp, r.tp_size)
        for norm in ("q_norm", "k_norm") if m.qk_norm else ():
            out[f"{p}{attn}.{norm}.weight"] = ck[f"{a}{norm}.weight"]
        if i in m.dense_layers:
            out[p + "mlp.gate_up_proj.weight"] = gate_up(ck, p + "mlp.", r)
            out[p + "mlp.down_proj.weight"] = cut(ck[p + "mlp.down_proj.weight"], 1, r.tp, r.tp_size)
    return out


def _routed(m: Model, p: str, r: Rank) -> list[str]:
    assert m.experts is not None
    return [f"{p}mlp.experts.{e}." for e in r.slots or range(m.experts.count)]


def _router_and_shared(m: Model, ck: Arrays, p: str, r: Rank, with_shared: bool) -> Arrays:
    assert m.experts is not None
    out = {p + "mlp.gate.weight": ck[p + "mlp.gate.weight"]}
    if m.experts.correction:
        out[p + "mlp.gate.e_score_correction_bias"] = ck[p + "mlp.gate.e_score_correction_bias"]
    if m.experts.shared_width and with_shared:
        s = p + "mlp.shared_experts."
        out[s + "gate_up_proj.weight"] = gate_up(ck, s, r)
        out[s + "down_proj.weight"] = cut(ck[s + "down_proj.weight"], 1, r.tp, r.tp_size)
    return out


def _gpt_oss(m: Model, ck: Arrays, p: str, r: Rank, biases: tuple[str, str]) -> Arrays:
    """`GptOssModel._load_weights_other`: experts by EP, or columns `2 * start : 2 * end`; then transposed."""
    assert m.experts is not None
    x = p + "mlp.experts."
    n = m.experts.count // r.ep_size
    mine = range(n * r.ep, n * (r.ep + 1))
    f = m.experts.width // r.moe_tp_size
    start, end = r.moe_tp * f, (r.moe_tp + 1) * f
    w2_bias = ck[x + "down_proj_bias"][mine]
    return {
        p + "mlp.router.weight": ck[p + "mlp.router.weight"],
        p + "mlp.router.bias": ck[p + "mlp.router.bias"],
        x + "w13_weight": ck[x + "gate_up_proj"][mine][:, :, 2 * start : 2 * end].transpose(0, 2, 1),
        x + "w2_weight": ck[x + "down_proj"][mine][:, start:end].transpose(0, 2, 1),
        x + biases[0]: ck[x + "gate_up_proj_bias"][mine][:, 2 * start : 2 * end],
        x + biases[1]: w2_bias if r.moe_tp == 0 else np.zeros_like(w2_bias),
    }


def vllm(m: Model, ck: Arrays, r: Rank, up_first: bool = False, sequence_parallel: bool = False) -> Arrays:
    """A rank of vLLM; `sequence_parallel` disables TP of DeepSeek's shared expert (`DeepseekV2MLP`)."""
    gpt_oss = m.family == "gpt_oss"
    embedding = "model.embedding.weight" if gpt_oss else "model.embed_tokens.weight"
    out = _common(m, ck, r, embedding, "attn" if gpt_oss else "self_attn", "fused_qkv_a_proj")
    for i in m.sparse_layers:
        p = f"model.layers.{i}."
        if gpt_oss:
            out |= _gpt_oss(m, ck, p, r, ("w13_bias", "w2_bias"))
            continue
        whole = sequence_parallel and m.family == "deepseek_v3"
        out |= _router_and_shared(m, ck, p, Rank(tp=0, tp_size=1) if whole else r, with_shared=True)
        x = p + "mlp.experts."
        out[x + "w13_weight"], out[x + "w2_weight"] = experts(m, _routed(m, p, r), ck, r, up_first)
    return {name: np.ascontiguousarray(w) for name, w in out.items()}


def sglang(m: Model, ck: Arrays, r: Rank, runner: str = "triton", fused_shared: bool = False) -> Arrays:
    """A rank of SGLang, with the storage of what it derives."""
    out = _common(m, ck, r, "model.embed_tokens.weight", "self_attn", "fused_qkv_a_proj_with_mqa")
    for i in range(m.layers) if m.latent else ():  # post_load_weights
        a = f"model.layers.{i}.self_attn."
        assert m.latent is not None
        heads = out[a + "kv_b_proj.weight"].reshape(-1, m.latent.nope + m.latent.value, m.latent.kv_rank)
        out[a + "w_kc"], out[a + "w_vc"] = heads[:, : m.latent.nope].transpose(0, 2, 1), heads[:, m.latent.nope :]
    for i in m.sparse_layers:
        p, x = f"model.layers.{i}.", f"model.layers.{i}.mlp.experts."
        if m.family == "gpt_oss":
            out |= _gpt_oss(m, ck, p, r, ("w13_weight_bias", "w2_weight_bias"))
        else:
            out |= _router_and_shared(m, ck, p, r, with_shared=not fused_shared)
            if m.family == "glm4_moe":
                out[p + "mlp.gate._weight_fp32"] = ck[p + "mlp.gate.weight"]
            names = _routed(m, p, r) + [p + "mlp.shared_experts."] * fused_shared
            w13, w2 = experts(m, names, ck, r, up_first=runner == "flashinfer_cutlass")
            out[x + "w13_weight"], out[x + "w2_weight"] = w13, w2
        if runner == "triton_kernel":
            for name in ("w13_weight", "w2_weight"):
                out[x + name] = out[x + name].transpose(0, 2, 1)
    return {name: np.ascontiguousarray(w) for name, w in out.items()}
