"""tunix as trainer: flax nnx modules, one per layer, kernels as [in, out...].

Names, shapes and default specs as in google/tunix@c7d8950, `tunix/models/{qwen3,llama3}/{model,params}.py`: mesh axes
`fsdp` and `tp`; experts ride on `fsdp` in their leading axis; norms are cut over `tp`. Rotary lanes are Hugging Face's
halves, and no value is scaled.
"""

from __future__ import annotations

from typing import Any

from shardfly_jax.engines.canonical import LAYER
from shardfly_jax.engines.models import Model, require_family
from shardfly_jax.engines.side import AnyMesh, Side, SideBuilder, axis_size
from shardfly_jax.sharding.language import src

FAMILIES = ("qwen3", "qwen3_moe", "llama3")


def trainer(model: Model, mesh: AnyMesh, *, dtype: Any = "bfloat16") -> Side:
    """The trainer side of a model.

    Args:
      model: From `engines.model(name)`.
      mesh: With axes `fsdp` and `tp`; and `sp` where Qwen3's `ShardingConfig` has `enable_sp`.
      dtype: tunix' `param_dtype`; its own default is float32.

    Raises:
      PlanError: A family without a mapping, or a mesh without those axes.
    """
    require_family(model, FAMILIES, "tunix")
    for axis in ("fsdp", "tp"):
        axis_size("tunix", mesh, axis)
    builder = SideBuilder(mesh, dtype, model)
    fsdp = ("fsdp", "sp") if "sp" in mesh.axis_names and model.family != "llama3" else ("fsdp",)
    _outside_layers(model, builder, fsdp)
    _attention(model, builder, fsdp)
    if model.experts is None:
        _mlp(model, builder, fsdp)
    else:
        _experts(model, builder)
    return builder.side("trainer")


def _outside_layers(m: Model, b: SideBuilder, fsdp: tuple[str, ...]) -> None:
    b.leaf("embedder.input_embedding", (m.vocab, m.hidden), "tp", fsdp)
    b.entries["model.embed_tokens.weight"] = src("embedder.input_embedding")
    b.leaf("final_norm.w", (m.hidden,), "tp")
    b.entries["model.norm.weight"] = src("final_norm.w")
    if not m.tied:
        b.leaf("lm_head.w", (m.hidden, m.vocab), fsdp, "tp")
        b.entries["lm_head.weight"] = src("lm_head.w").rearrange("d v -> v d")


def _attention(m: Model, b: SideBuilder, fsdp: tuple[str, ...]) -> None:
    layers = range(m.layers)
    for head, heads in (("q", m.heads), ("k", m.kv_heads), ("v", m.kv_heads)):
        name = f"layers.{{i}}.attn.{head}_proj.w"
        b.leaf(name, (m.hidden, heads, m.head_dim), fsdp, "tp", None, layers=layers)
        b.entries[f"{LAYER}self_attn.{head}_proj.weight"] = src(name).rearrange("d n h -> (n h) d")
    out = "layers.{i}.attn.o_proj.w"
    b.leaf(out, (m.heads, m.head_dim, m.hidden), "tp", None, fsdp, layers=layers)
    b.entries[LAYER + "self_attn.o_proj.weight"] = src(out).rearrange("n h d -> d (n h)")
    for norm in ("q_norm", "k_norm") if m.qk_norm else ():
        b.leaf(f"layers.{{i}}.attn.{norm}.w", (m.head_dim,), "tp", layers=layers)
        b.entries[f"{LAYER}self_attn.{norm}.weight"] = src(f"layers.{{i}}.attn.{norm}.w")
    for norm in ("input_layernorm", "post_attention_layernorm"):
        b.leaf(f"layers.{{i}}.{norm}.w", (m.hidden,), "tp", layers=layers)
        b.entries[f"{LAYER}{norm}.weight"] = src(f"layers.{{i}}.{norm}.w")


def _mlp(m: Model, b: SideBuilder, fsdp: tuple[str, ...]) -> None:
    into, out = (m.hidden, m.width), (m.width, m.hidden)
    for name, shape, spec in (
        ("gate_proj", into, (fsdp, "tp")),
        ("up_proj", into, (fsdp, "tp")),
        ("down_proj", out, ("tp", fsdp)),
    ):
        kernel = f"layers.{{i}}.mlp.{name}.kernel"
        b.leaf(kernel, shape, *spec, layers=range(m.layers))
        b.entries[f"{LAYER}mlp.{name}.weight"] = src(kernel).rearrange("i o -> o i")


def _experts(m: Model, b: SideBuilder) -> None:
    assert m.experts is not None
    e, f, layers = m.experts.count, m.experts.width, range(m.layers)
    b.leaf("layers.{i}.mlp.router.kernel", (m.hidden, e), layers=layers)
    b.entries[LAYER + "mlp.gate.weight"] = src("layers.{i}.mlp.router.kernel").rearrange("d e -> e d")
    for name, shape, spec in (
        ("gate_proj", (e, m.hidden, f), ("fsdp", None, "tp")),
        ("up_proj", (e, m.hidden, f), ("fsdp", None, "tp")),
        ("down_proj", (e, f, m.hidden), ("fsdp", "tp", None)),
    ):
        stacked = f"layers.{{i}}.mlp.{name}"
        b.leaf(stacked, shape, *spec, layers=layers)
        b.entries[f"{LAYER}mlp.experts.{name}.weight"] = src(stacked).rearrange("e i o -> e o i")
