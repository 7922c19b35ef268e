"""MaxText as trainer: layers stacked on axis 1 (`scan_layers`) or one by one, kernels as [in, out...].

Names, shapes and values as in maxtext 0.2.5, `layers/{attentions,attention_mla,linears,moe,nnx_scan}.py`,
`models/{llama2,qwen3,deepseek,gpt_oss}.py` and `checkpoint_conversion/utils/param_mapping.py`; specs as its
`configs/base.yml` resolves them. Names start under `params`: `token_embedder` and `decoder`. DeepSeek's routing bias is
a `MoEBiasVar` there and no `nnx.Param`: take `nnx.state(model, nnx.Not(nnx.RngState), ...)[0]`.

Not described, since they change the tree: `fused_qkv`, `fused_mlp`, `prefuse_moe_weights`, `shard_exp_on_fsdp`,
`use_2d_fsdp_sharding` and pipelines.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from shardfly_jax.engines.models import Model, require_family
from shardfly_jax.engines.side import AnyMesh, Side, SideBuilder, require_mesh
from shardfly_jax.sharding.errors import PlanError
from shardfly_jax.sharding.language import Expr, src, stack

FAMILIES = ("qwen3", "qwen3_moe", "llama3", "deepseek_v3", "gpt_oss")
CYCLE = 2
"""gpt-oss scans over pairs of layers (`inhomogeneous_layer_cycle_interval`): sliding window, then full attention."""

AXES = (
    "diloco", "data", "stage", "fsdp", "fsdp_transpose", "context", "context_usp_ulysses", "context_autoregressive",
    "tensor", "tensor_sequence", "expert", "autoregressive",
)  # fmt: skip

# Mesh axes of the logical axes of weights, in base.yml's order. Where a tensor's other axes have taken
# `fsdp_transpose` or `expert`, flax leaves it out: hence the second names.
HEADS = ("tensor", "tensor_sequence", "autoregressive")
EMBED = ("fsdp", "fsdp_transpose", "context", "context_usp_ulysses", "expert")
MLP = ("fsdp_transpose", "tensor", "tensor_sequence", "autoregressive")
MLP_EMBED = ("fsdp", "context", "context_usp_ulysses", "expert")
SHARED_GATE_EMBED = ("fsdp", "fsdp_transpose", "context", "context_usp_ulysses")
"""Of the router beside shared experts (`embed_router`); without them it is cut as any other kernel."""
EXPERT_EMBED = ("fsdp", "context", "context_usp_ulysses")
EXPERT = ("expert",)
NORM = ("tensor",)
STAGE = ("stage",)
BIAS_MLP = ("tensor", "tensor_sequence")


def trainer(
    model: Model,
    mesh: AnyMesh,
    *,
    dtype: Any = "bfloat16",
    scan_layers: bool = True,
    padded_vocab: int | None = None,
) -> Side:
    """The trainer side of a model.

    Args:
      model: From `engines.model(name)`.
      mesh: With any of MaxText's mesh axes; those of length 1 may be left out.
      dtype: MaxText's `weight_dtype`; its own default is float32, and bfloat16 for RL. The layer norms of gpt-oss are
        float32 in any case, so that bfloat16 rollouts need `allow_cast=("*layernorm.weight",)`.
      scan_layers: Whether layers are stacked on axis 1.
      padded_vocab: Rows of the embedding, where the vocabulary is padded; the rest is left behind.

    Raises:
      PlanError: A family without a mapping, or a mesh axis that MaxText does not have.
    """
    require_family(model, FAMILIES, "maxtext")
    require_mesh(mesh)
    if unknown := [axis for axis in mesh.axis_names if axis not in AXES]:
        raise PlanError(f"engine: the mesh has the axes {unknown}, but MaxText's are {list(AXES)}. Rename them.")
    builder = SideBuilder(mesh, dtype, model)
    _outside_layers(model, builder, model.vocab if padded_vocab is None else padded_vocab)
    for part in _stacks(model, builder, scan_layers):
        _attention(model, part) if model.latent is None else _latent_attention(model, part)
        if part.layers[0] in model.dense_layers:
            _mlp(part, "mlp.", "mlp.", model.hidden, model.width)
        elif model.family == "gpt_oss":
            _interleaved_experts(model, part)
        else:
            _experts(model, part)
    return builder.side("trainer")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Stack:
    """Layers that lie in one place.

    Attributes:
      name: Of the stack if scanned; of a layer, without its number, if not.
      layers: In Hugging Face's numbers; not empty.
      all_layers: Of the model.
    """

    builder: SideBuilder
    name: str
    layers: range
    all_layers: int
    scanned: bool

    @property
    def layer_axes(self) -> tuple[str, ...]:
        """What cuts the axis of layers: its logical name is `layers`, but DeepSeek's two have names without a rule."""
        return STAGE if self.name.startswith("decoder.layers") else ()

    def add(self, canonical: str, own: str, shape: tuple[int, ...], *spec: tuple[str, ...], dtype: Any = None) -> None:
        """Adds a tensor that is a canonical one as it stands."""
        self.entry(canonical, self.leaf(own, shape, *spec, dtype=dtype))

    def leaf(
        self, own: str, shape: tuple[int, ...], *spec: tuple[str, ...], dtype: Any = None, layer_axis: int = 1
    ) -> Expr:
        """Adds a tensor, or one per layer; returns the expression of a layer's."""
        count, step, first = len(self.layers), self.layers.step, self.layers[0]
        cut = [_present(self.builder.mesh, axes) for axes in spec]
        if self.scanned:
            cut.insert(layer_axis, _present(self.builder.mesh, self.layer_axes))
            whole = (*shape[:layer_axis], count, *shape[layer_axis:])
            self.builder.leaf(f"{self.name}.{own}", whole, *cut, dtype=dtype)
            layer = "{i}" if step > 1 or not first else f"{{i}}-{first}"
            return src(f"{self.name}.{own}")[(*(slice(None),) * layer_axis, layer)]
        self.builder.leaf(f"{self.name}_{{i}}.{own}", shape, *cut, layers=range(count), dtype=dtype)
        number = f"{{i-{first}}}" if first else "{i}"
        return src(f"{self.name}_{number}.{own}")

    def entry(self, canonical: str, expr: Expr) -> None:
        """Says what a canonical tensor is in the layers of this stack."""
        first, stop, step = self.layers.start, self.layers.stop, self.layers.step
        if step > 1:
            hole = f"{{{step}*i+{first}}}" if first else f"{{{step}*i}}"
        else:
            hole = "{i}" if len(self.layers) == self.all_layers else f"{{i:{first}:{stop}}}"
        self.builder.entries[f"model.layers.{hole}.{canonical}"] = expr

    def kernel(self, canonical: str, own: str, into: int, out: int, *spec: tuple[str, ...]) -> None:
        """Adds a kernel [in, out] that becomes a weight [out, in]."""
        self.entry(canonical + ".weight", self.leaf(own, (into, out), *spec).rearrange("i o -> o i"))


def _present(mesh: AnyMesh, axes: tuple[str, ...]) -> tuple[str, ...] | None:
    return tuple(axis for axis in axes if axis in mesh.axis_names) or None


def _stacks(m: Model, b: SideBuilder, scanned: bool) -> list[_Stack]:
    if m.family == "deepseek_v3":
        parts = [("decoder.dense_layers", m.dense_layers), ("decoder.moe_layers", m.sparse_layers)]
    elif m.family == "gpt_oss" and scanned:
        parts = [(f"decoder.layers.layers_{k}", range(k, m.layers, CYCLE)) for k in range(CYCLE)]
    else:
        parts = [("decoder.layers", range(m.layers))]
    return [
        _Stack(builder=b, name=name, layers=layers, all_layers=m.layers, scanned=scanned)
        for name, layers in parts
        if layers
    ]


def _outside_layers(m: Model, b: SideBuilder, rows: int) -> None:
    heads, embed = _present(b.mesh, HEADS), _present(b.mesh, EMBED)
    b.leaf("token_embedder.embedding", (rows, m.hidden), heads, embed)
    b.entries["model.embed_tokens.weight"] = src("token_embedder.embedding")[: m.vocab]
    b.leaf("decoder.decoder_norm.scale", (m.hidden,), _present(b.mesh, NORM))
    b.entries["model.norm.weight"] = src("decoder.decoder_norm.scale")
    if not m.tied:  # else logits_via_embedding
        b.leaf("decoder.logits_dense.kernel", (m.hidden, rows), embed, heads)
        b.entries["lm_head.weight"] = src("decoder.logits_dense.kernel")[:, : m.vocab].rearrange("d v -> v d")


def _norms(m: Model, s: _Stack) -> None:
    dtype = "float32" if m.family == "gpt_oss" else None  # models/gpt_oss.py says so
    s.add("input_layernorm.weight", "pre_self_attention_layer_norm.scale", (m.hidden,), NORM, dtype=dtype)
    s.add("post_attention_layernorm.weight", "post_self_attention_layer_norm.scale", (m.hidden,), NORM, dtype=dtype)


def _attention(m: Model, s: _Stack) -> None:
    _norms(m, s)
    own = "GptOssAttention." if m.family == "gpt_oss" else "self_attention."
    for name, head, heads in (("query", "q", m.heads), ("key", "k", m.kv_heads), ("value", "v", m.kv_heads)):
        kernel = s.leaf(f"{own}{name}.kernel", (m.hidden, heads, m.head_dim), EMBED, HEADS, ())
        if m.family == "llama3" and head == "q":
            kernel = kernel.scale(math.sqrt(m.head_dim))  # stored divided by it
        if m.family == "llama3" and head in "qk":  # rotary pairs lie side by side: even lanes first, then odd ones
            kernel = kernel.rearrange("d n (h pair) -> d n (pair h)", pair=2)
        s.entry(f"self_attn.{head}_proj.weight", kernel.rearrange("d n h -> (n h) d"))
        if m.qkv_bias:
            bias = s.leaf(f"{own}{name}.bias", (heads, m.head_dim), HEADS, ())
            s.entry(f"self_attn.{head}_proj.bias", bias.rearrange("n h -> (n h)"))
    out = s.leaf(own + "out.kernel", (m.heads, m.head_dim, m.hidden), HEADS, (), EMBED)
    s.entry("self_attn.o_proj.weight", out.rearrange("n h d -> d (n h)"))
    if m.o_bias:
        s.add("self_attn.o_proj.bias", own + "out.bias", (m.hidden,), EMBED)
    if m.sinks:
        s.add("self_attn.sinks", own + "sinks", (m.heads,), ())
    if m.qk_norm:
        s.add("self_attn.q_norm.weight", own + "query_norm.scale", (m.head_dim,), NORM)
        s.add("self_attn.k_norm.weight", own + "key_norm.scale", (m.head_dim,), NORM)


def _latent_attention(m: Model, s: _Stack) -> None:
    assert m.latent is not None
    _norms(m, s)
    mla, own = m.latent, "self_attention."
    if mla.q_rank is None:
        query = s.leaf(own + "query.kernel", (m.hidden, m.heads, m.head_dim), EMBED, HEADS, ())
        s.entry("self_attn.q_proj.weight", query.rearrange("d n h -> (n h) d"))
    else:
        s.kernel("self_attn.q_a_proj", own + "wq_a.kernel", m.hidden, mla.q_rank, EMBED, ())
        s.add("self_attn.q_a_layernorm.weight", own + "q_norm.scale", (mla.q_rank,), NORM)
        up = s.leaf(own + "wq_b.kernel", (mla.q_rank, m.heads, m.head_dim), EMBED, HEADS, ())
        s.entry("self_attn.q_b_proj.weight", up.rearrange("r n h -> (n h) r"))
    s.kernel("self_attn.kv_a_proj_with_mqa", own + "wkv_a.kernel", m.hidden, mla.kv_rank + mla.rope, EMBED, ())
    s.add("self_attn.kv_a_layernorm.weight", own + "kv_norm.scale", (mla.kv_rank,), NORM)
    up = s.leaf(own + "wkv_b.kernel", (mla.kv_rank, m.heads, mla.nope + mla.value), EMBED, HEADS, ())
    s.entry("self_attn.kv_b_proj.weight", up.rearrange("r n h -> (n h) r"))
    out = s.leaf(own + "out.kernel", (m.heads, mla.value, m.hidden), HEADS, (), EMBED)
    s.entry("self_attn.o_proj.weight", out.rearrange("n h d -> d (n h)"))


def _mlp(s: _Stack, canonical: str, own: str, hidden: int, width: int) -> None:
    s.kernel(canonical + "gate_proj", own + "wi_0.kernel", hidden, width, MLP_EMBED, MLP)
    s.kernel(canonical + "up_proj", own + "wi_1.kernel", hidden, width, MLP_EMBED, MLP)
    s.kernel(canonical + "down_proj", own + "wo.kernel", width, hidden, MLP, MLP_EMBED)


def _experts(m: Model, s: _Stack) -> None:
    assert m.experts is not None
    e, f = m.experts.count, m.experts.width
    block = "DeepSeekMoeBlock_0." if m.family == "deepseek_v3" else ""
    own = block + "MoeBlock_0." if block else "moe_block."
    s.kernel("mlp.gate", own + "gate.kernel", m.hidden, e, SHARED_GATE_EMBED if block else EMBED, ())
    if m.experts.correction:
        # no nnx.Param, so that nnx_scan.py leaves its layers on axis 0
        s.entry("mlp.gate.e_score_correction_bias", s.leaf(own + "gate.bias", (e,), (), layer_axis=0))
    for name, kernel in (("gate_proj", "wi_0"), ("up_proj", "wi_1")):
        wi = s.leaf(own + kernel, (e, m.hidden, f), EXPERT, EXPERT_EMBED, MLP)
        s.entry(f"mlp.experts.{name}.weight", wi.rearrange("e i o -> e o i"))
    wo = s.leaf(own + "wo", (e, f, m.hidden), EXPERT, MLP, EXPERT_EMBED)
    s.entry("mlp.experts.down_proj.weight", wo.rearrange("e i o -> e o i"))
    if m.experts.shared_width:
        _mlp(s, "mlp.shared_experts.", block + "shared_experts.", m.hidden, m.experts.shared_width)


def _interleaved_experts(m: Model, s: _Stack) -> None:
    assert m.experts is not None
    e, f, own = m.experts.count, m.experts.width, "GptOssMlp."
    s.kernel("mlp.router", own + "gate.kernel", m.hidden, e, EMBED, ())
    s.add("mlp.router.bias", own + "gate.bias", (e,), ())
    gate, up = (s.leaf(own + wi, (e, m.hidden, f), EXPERT, EXPERT_EMBED, MLP) for wi in ("wi_0", "wi_1"))
    s.entry("mlp.experts.gate_up_proj", stack([gate, up], axis=-1).rearrange("e d f two -> e d (f two)"))
    gate, up = (s.leaf(own + wi, (e, f), EXPERT, BIAS_MLP) for wi in ("wi_0_bias", "wi_1_bias"))
    s.entry("mlp.experts.gate_up_proj_bias", stack([gate, up], axis=-1).rearrange("e f two -> e (f two)"))
    s.add("mlp.experts.down_proj", own + "wo", (e, f, m.hidden), EXPERT, MLP, EXPERT_EMBED)
    s.add("mlp.experts.down_proj_bias", own + "wo_bias", (e, m.hidden), EXPERT, NORM)
