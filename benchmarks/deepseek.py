"""DeepSeek-V3 from MaxText to vLLM, written by hand: the largest planning case.

Trainer: MaxText, two scanned stacks, mesh expert 32 x fsdp 8. Names and specs as in MaxText's `configs/base.yml` rules:
every axis called embed is cut over (fsdp, expert), experts over expert and their embed axis over fsdp.
Rollout: vLLM, 128 ranks, attention TP 8 x DP 16, experts whole on EP 128 ranks; parameters as in
`models/deepseek_v2.py` (fused_qkv_a_proj, w13, w2).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh

import shardfly_jax as sf
from shardfly_jax.engines.side import nested, tensor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """DeepSeek-V3's own sizes by default; tests use small ones."""

    layers: int = 61
    dense: int = 3
    hidden: int = 7168
    heads: int = 128
    q_rank: int = 1536
    kv_rank: int = 512
    nope: int = 128
    rope: int = 64
    value: int = 128
    width: int = 18432
    expert_width: int = 2048
    experts: int = 256
    vocab: int = 129280


def trainer(s: Sizes, expert: int = 32, fsdp: int = 8, data: int = 1) -> Any:
    """The trainer's tree on an abstract mesh, `data` times."""
    mesh = AbstractMesh((data, expert, fsdp), ("data", "expert", "fsdp"))
    embed = ("fsdp", "expert")

    def t(shape: tuple[int, ...], *spec: Any, dtype: str = "bfloat16") -> Any:
        return tensor(mesh, dtype, shape, *spec)

    tree = {
        "token_embedder.embedding": t((s.vocab, s.hidden), None, embed),
        "decoder.decoder_norm.scale": t((s.hidden,)),
        "decoder.logits_dense.kernel": t((s.hidden, s.vocab), embed),
    }
    qk = s.nope + s.rope
    for stack, n in (("dense_layers", s.dense), ("moe_layers", s.layers - s.dense)):
        p = f"decoder.{stack}."
        a = p + "self_attention."
        tree |= {
            p + "pre_self_attention_layer_norm.scale": t((s.hidden, n)),
            p + "post_self_attention_layer_norm.scale": t((s.hidden, n)),
            a + "wq_a.kernel": t((s.hidden, n, s.q_rank), embed),
            a + "wq_b.kernel": t((s.q_rank, n, s.heads, qk), embed),
            a + "wkv_a.kernel": t((s.hidden, n, s.kv_rank + s.rope), embed),
            a + "wkv_b.kernel": t((s.kv_rank, n, s.heads, s.nope + s.value), embed),
            a + "q_norm.scale": t((s.q_rank, n)),
            a + "kv_norm.scale": t((s.kv_rank, n)),
            a + "out.kernel": t((s.heads, n, s.value, s.hidden), None, None, None, embed),
        }
    m = "decoder.moe_layers.DeepSeekMoeBlock_0."
    n, f = s.layers - s.dense, s.expert_width
    for name in ("wi_0", "wi_1"):
        tree[f"decoder.dense_layers.mlp.{name}.kernel"] = t((s.hidden, s.dense, s.width), embed)
        tree[m + f"shared_experts.{name}.kernel"] = t((s.hidden, n, f), embed)
        tree[m + f"MoeBlock_0.{name}"] = t((s.experts, n, s.hidden, f), "expert", None, "fsdp")
    tree["decoder.dense_layers.mlp.wo.kernel"] = t((s.width, s.dense, s.hidden), None, None, embed)
    tree[m + "shared_experts.wo.kernel"] = t((f, n, s.hidden), None, None, embed)
    tree[m + "MoeBlock_0.wo"] = t((s.experts, n, f, s.hidden), "expert", None, None, "fsdp")
    tree[m + "MoeBlock_0.gate.kernel"] = t((s.hidden, n, s.experts), "fsdp")
    tree[m + "MoeBlock_0.gate.bias"] = t((s.experts, n), dtype="float32")
    return nested(tree)


def rollout(s: Sizes, dp: int = 16, tp: int = 8, replicas: int = 1) -> Any:
    """The rollout's tree on an abstract mesh; experts lie whole on the dp * tp ranks of each replica."""
    mesh = AbstractMesh((replicas, dp, tp), ("replica", "dp", "tp"))
    ep = ("dp", "tp")

    def t(shape: tuple[int, ...], *spec: Any, dtype: str = "bfloat16") -> Any:
        return tensor(mesh, dtype, shape, *spec)

    tree = {
        "model.embed_tokens.weight": t((s.vocab, s.hidden), "tp"),
        "model.norm.weight": t((s.hidden,)),
        "lm_head.weight": t((s.vocab, s.hidden), "tp"),
    }
    for i in range(s.layers):
        p = f"model.layers.{i}."
        a = p + "self_attn."
        tree |= {
            p + "input_layernorm.weight": t((s.hidden,)),
            p + "post_attention_layernorm.weight": t((s.hidden,)),
            a + "fused_qkv_a_proj.weight": t((s.q_rank + s.kv_rank + s.rope, s.hidden)),
            a + "q_a_layernorm.weight": t((s.q_rank,)),
            a + "kv_a_layernorm.weight": t((s.kv_rank,)),
            a + "q_b_proj.weight": t((s.heads * (s.nope + s.rope), s.q_rank), "tp"),
            a + "kv_b_proj.weight": t((s.heads * (s.nope + s.value), s.kv_rank), "tp"),
            a + "o_proj.weight": t((s.hidden, s.heads * s.value), None, "tp"),
        }
        if i < s.dense:
            tree[p + "mlp.gate_up_proj.weight"] = t((2 * s.width, s.hidden), "tp")
            tree[p + "mlp.down_proj.weight"] = t((s.hidden, s.width), None, "tp")
            continue
        tree |= {
            p + "mlp.gate.weight": t((s.experts, s.hidden)),
            p + "mlp.gate.e_score_correction_bias": t((s.experts,), dtype="float32"),
            p + "mlp.shared_experts.gate_up_proj.weight": t((2 * s.expert_width, s.hidden), "tp"),
            p + "mlp.shared_experts.down_proj.weight": t((s.hidden, s.expert_width), None, "tp"),
            p + "mlp.experts.w13_weight": t((s.experts, 2 * s.expert_width, s.hidden), ep),
            p + "mlp.experts.w2_weight": t((s.experts, s.hidden, s.expert_width), ep),
        }
    return nested(tree)


def mapping(s: Sizes, expert_maps: bool = False) -> sf.Mapping:
    """From MaxText's stacks to vLLM's parameters.

    Args:
      s: The sizes.
      expert_maps: Place the experts of every layer by a permutation of its own (seeded), as load balancers do.
    """
    rng = np.random.default_rng(0)
    placement = {i: rng.permutation(s.experts).tolist() for i in range(s.dense, s.layers)}

    def placed(expr: sf.Expr) -> sf.Expr:
        return expr.take(placement, axis=0) if expert_maps else expr

    entries: dict[str, sf.Expr] = {
        "model.embed_tokens.weight": sf.src("token_embedder.embedding"),
        "model.norm.weight": sf.src("decoder.decoder_norm.scale"),
        "lm_head.weight": sf.src("decoder.logits_dense.kernel").rearrange("d v -> v d"),
    }
    stacks = (("dense_layers", f"{{i:0:{s.dense}}}", "{i}"), ("moe_layers", f"{{i:{s.dense}:}}", f"{{i}}-{s.dense}"))
    for stack, here, at in stacks:
        p, a, t = f"decoder.{stack}.", f"decoder.{stack}.self_attention.", f"model.layers.{here}."

        def w(name: str, pattern: str, at: str = at) -> sf.Expr:
            return sf.src(name)[:, at].rearrange(pattern)

        qkv_a = [w(a + "wq_a.kernel", "d r -> r d"), w(a + "wkv_a.kernel", "d r -> r d")]
        entries |= {
            t + "input_layernorm.weight": sf.src(p + "pre_self_attention_layer_norm.scale")[:, at],
            t + "post_attention_layernorm.weight": sf.src(p + "post_self_attention_layer_norm.scale")[:, at],
            t + "self_attn.fused_qkv_a_proj.weight": sf.concat(qkv_a),
            t + "self_attn.q_a_layernorm.weight": sf.src(a + "q_norm.scale")[:, at],
            t + "self_attn.kv_a_layernorm.weight": sf.src(a + "kv_norm.scale")[:, at],
            t + "self_attn.q_b_proj.weight": w(a + "wq_b.kernel", "r n h -> (n h) r"),
            t + "self_attn.kv_b_proj.weight": w(a + "wkv_b.kernel", "r n h -> (n h) r"),
            t + "self_attn.o_proj.weight": w(a + "out.kernel", "n h d -> d (n h)"),
        }
    (_, here, at), (_, moe, moe_at) = stacks
    dense, m = "decoder.dense_layers.mlp.", "decoder.moe_layers.DeepSeekMoeBlock_0."

    def kernel(name: str, index: str) -> sf.Expr:
        return sf.src(name)[:, index].rearrange("i o -> o i")

    def expert(name: str) -> sf.Expr:
        return placed(sf.src(m + f"MoeBlock_0.{name}")[:, moe_at].rearrange("e i o -> e o i"))

    t, x = f"model.layers.{here}.mlp.", f"model.layers.{moe}.mlp."
    shared = m + "shared_experts."
    entries |= {
        t + "gate_up_proj.weight": sf.fuse(
            kernel(dense + "wi_0.kernel", at), kernel(dense + "wi_1.kernel", at), axis=0
        ),
        t + "down_proj.weight": kernel(dense + "wo.kernel", at),
        x + "gate.weight": placed(kernel(m + "MoeBlock_0.gate.kernel", moe_at)),
        x + "gate.e_score_correction_bias": placed(sf.src(m + "MoeBlock_0.gate.bias")[:, moe_at]),
        x + "shared_experts.gate_up_proj.weight": sf.fuse(
            kernel(shared + "wi_0.kernel", moe_at), kernel(shared + "wi_1.kernel", moe_at), axis=0
        ),
        x + "shared_experts.down_proj.weight": kernel(shared + "wo.kernel", moe_at),
        x + "experts.w13_weight": sf.fuse(expert("wi_0"), expert("wi_1"), axis=1),
        x + "experts.w2_weight": expert("wo"),
    }
    return sf.Mapping(entries)
