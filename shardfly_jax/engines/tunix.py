"""tunix as trainer: flax nnx modules, one per layer, kernels as [in, out...].

Names, shapes and default specs as in google/tunix@c7d8950, `tunix/models/qwen3/{model,params}.py`: mesh axes `fsdp` and
`tp`; experts ride on `fsdp` in their hidden axis; norms are cut over `tp`.
"""

from __future__ import annotations

from typing import Any

import jax

from shardfly_jax.engines.models import Model, require_family
from shardfly_jax.engines.side import LAYER, Side, nested, tensor
from shardfly_jax.sharding.language import Expr, src
from shardfly_jax.sharding.mapping import Mapping

FAMILIES = ("qwen3", "qwen3_moe")


def trainer(model: Model, mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh, *, dtype: Any = "bfloat16") -> Side:
    """The trainer side of a model.

    Args:
      model: From `engines.model(name)`.
      mesh: With axes `fsdp` and `tp`.
      dtype: tunix' `param_dtype`; its own default is float32.

    Raises:
      PlanError: A family without a mapping.
    """
    require_family(model, FAMILIES, "tunix")
    return Side(params=nested(_tensors(model, mesh, dtype)), mapping=_mapping(model))


def _tensors(m: Model, mesh: Any, dtype: Any) -> dict[str, Any]:
    def t(shape: tuple[int, ...], *spec: Any) -> jax.ShapeDtypeStruct:
        return tensor(mesh, dtype, shape, *spec)

    tree = {"embedder.input_embedding": t((m.vocab, m.hidden), "tp", "fsdp"), "final_norm.w": t((m.hidden,), "tp")}
    if not m.tied:
        tree["lm_head.w"] = t((m.hidden, m.vocab), "fsdp", "tp")
    for i in range(m.layers):
        p = f"layers.{i}."
        tree[p + "attn.q_proj.w"] = t((m.hidden, m.heads, m.head_dim), "fsdp", "tp", None)
        tree[p + "attn.k_proj.w"] = t((m.hidden, m.kv_heads, m.head_dim), "fsdp", "tp", None)
        tree[p + "attn.v_proj.w"] = t((m.hidden, m.kv_heads, m.head_dim), "fsdp", "tp", None)
        tree[p + "attn.o_proj.w"] = t((m.heads, m.head_dim, m.hidden), "tp", None, "fsdp")
        for norm in ("q_norm", "k_norm"):
            tree[p + f"attn.{norm}.w"] = t((m.head_dim,), "tp")
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tree[p + f"{norm}.w"] = t((m.hidden,), "tp")
        if m.experts is None:
            tree[p + "mlp.gate_proj.kernel"] = t((m.hidden, m.width), "fsdp", "tp")
            tree[p + "mlp.up_proj.kernel"] = t((m.hidden, m.width), "fsdp", "tp")
            tree[p + "mlp.down_proj.kernel"] = t((m.width, m.hidden), "tp", "fsdp")
        else:
            e, f = m.experts.count, m.experts.width
            tree[p + "mlp.router.kernel"] = t((m.hidden, e))
            tree[p + "mlp.gate_proj"] = t((e, m.hidden, f), "fsdp", None, "tp")
            tree[p + "mlp.up_proj"] = t((e, m.hidden, f), "fsdp", None, "tp")
            tree[p + "mlp.down_proj"] = t((e, f, m.hidden), "fsdp", "tp", None)
    return tree


def _mapping(m: Model) -> Mapping:
    p = "layers.{i}."
    entries: dict[str, Expr] = {
        "model.embed_tokens.weight": src("embedder.input_embedding"),
        "model.norm.weight": src("final_norm.w"),
        LAYER + "input_layernorm.weight": src(p + "input_layernorm.w"),
        LAYER + "post_attention_layernorm.weight": src(p + "post_attention_layernorm.w"),
        LAYER + "self_attn.o_proj.weight": src(p + "attn.o_proj.w").rearrange("n h d -> d (n h)"),
    }
    for head in "qkv":
        entries[LAYER + f"self_attn.{head}_proj.weight"] = src(p + f"attn.{head}_proj.w").rearrange("d n h -> (n h) d")
    for norm in ("q_norm", "k_norm"):
        entries[LAYER + f"self_attn.{norm}.weight"] = src(p + f"attn.{norm}.w")
    if m.experts is None:
        for name in ("gate_proj", "up_proj", "down_proj"):
            entries[LAYER + f"mlp.{name}.weight"] = src(p + f"mlp.{name}.kernel").rearrange("i o -> o i")
    else:
        entries[LAYER + "mlp.gate.weight"] = src(p + "mlp.router.kernel").rearrange("d e -> e d")
        for name in ("gate_proj", "up_proj", "down_proj"):
            entries[LAYER + f"mlp.experts.{name}.weight"] = src(p + f"mlp.{name}").rearrange("e i o -> e o i")
    entries["lm_head.weight"] = src("embedder.input_embedding") if m.tied else src("lm_head.w").rearrange("d v -> v d")
    return Mapping(entries)
