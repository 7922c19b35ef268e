"""vLLM as rollout: fused, tensor-parallel parameters in the order in which `load_weights` fills them.

Names and shapes as in vLLM 0.21.0: `model_executor/layers/{linear,vocab_parallel_embedding}.py`,
`fused_moe/layer.py`, `models/{qwen3,qwen3_moe}.py`. Unquantized linears keep this layout on CUDA; experts do with the
Triton backend.

The parameters are described as global arrays cut over the mesh axis `tp`: a fused parameter [q_r; k_r; v_r] of rank r
is the r-th part of its global array.
"""

from __future__ import annotations

from typing import Any

import jax

from shardfly_jax.engines import fp8
from shardfly_jax.engines.models import Model, require_family
from shardfly_jax.engines.side import LAYER, Side, nested, tensor
from shardfly_jax.sharding.errors import PlanError
from shardfly_jax.sharding.language import Expr, alias, fuse, src
from shardfly_jax.sharding.mapping import Mapping

FAMILIES = ("qwen3", "qwen3_moe")
QUANTIZED = (
    ".self_attn.qkv_proj.weight", ".self_attn.o_proj.weight", ".mlp.gate_up_proj.weight", ".mlp.down_proj.weight",
    ".mlp.experts.w13_weight", ".mlp.experts.w2_weight",
)  # fmt: skip
"""Endings of the weights that fp8 quantizes; `quantization/fp8.py` names their scales with `_scale_inv`."""
VOCAB_MULTIPLE = 64
"""vLLM pads the vocabulary to a multiple of this (`DEFAULT_VOCAB_PADDING_SIZE`)."""


def rollout(
    model: Model,
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
    *,
    dtype: Any = "bfloat16",
    expert_parallel: bool = False,
    quantization: str | None = None,
) -> Side:
    """The rollout side of a model.

    Args:
      model: From `engines.model(name)`.
      mesh: With an axis `tp`; every other axis makes replicas.
      dtype: Of all parameters.
      expert_parallel: Whole experts per rank (`enable_expert_parallel`) instead of a cut of each.
      quantization: `fp8_block` or `fp8_block_ue8m0`: linears and experts as e4m3 codes with scales per 128 x 128 block,
        from the trainer's own dtype. Embeddings, `lm_head`, norms and the router stay as they are. This is what vLLM's
        CUTLASS and Triton kernels read, and with `_ue8m0` DeepGEMM on Hopper; it repacks weights for Marlin and scales
        for Blackwell.

    Raises:
      PlanError: A family without a mapping, or sizes that `tp` or blocks do not divide; all are listed.
    """
    require_family(model, FAMILIES, "vllm")
    tp = dict(mesh.shape).get("tp")
    if tp is None:
        raise PlanError(f"engine: the mesh of vllm has the axes {list(mesh.shape)}, but an axis 'tp' is needed.")
    _check(model, tp, expert_parallel)
    tensors, mapping = _tensors(model, mesh, tp, dtype, expert_parallel), _mapping(model, tp)
    if quantization is not None:
        format = fp8.format_of(quantization)
        sizes = {t: _block_sizes(model, t, expert_parallel) for t in (1, 2, 4, 8, 16, 32, tp) if model.heads % t == 0}
        if faults := fp8.faults(model.name, format, sizes, tp):
            raise PlanError(faults)
        tensors, mapping = fp8.quantized(tensors, mapping, format, QUANTIZED, "_scale_inv")
    return Side(params=nested(tensors), mapping=mapping)


def _block_sizes(m: Model, tp: int, expert_parallel: bool) -> dict[str, int]:
    """What fp8 blocks must divide: parts of fused rows, and columns that are cut (`validate_fp8_block_shape`)."""
    sizes = {"query rows": m.heads * m.head_dim // tp, "key rows": max(m.kv_heads, tp) * m.head_dim // tp}
    if m.experts is None:
        return sizes | {"MLP width": m.width // tp}
    return sizes | {"expert width": m.experts.width // (1 if expert_parallel else tp)}


def _check(m: Model, tp: int, expert_parallel: bool) -> None:
    parts = {"attention heads": m.heads, "padded vocabulary": padded_vocab(m)}
    if m.experts is None:
        parts["MLP width"] = m.width
    elif expert_parallel:
        parts["experts"] = m.experts.count
    else:
        parts["expert width"] = m.experts.width
    faults = [
        f"indivisible: {m.name} has {n} as {what}, but tp={tp} does not divide it. Choose another tp."
        for what, n in parts.items()
        if n % tp
    ]
    if max(tp, m.kv_heads) % min(tp, m.kv_heads):
        faults.append(
            f"indivisible: {m.name} has {m.kv_heads} kv heads, but neither divides the other with tp={tp}. "
            "Choose another tp."
        )
    if faults:
        raise PlanError(faults)


def padded_vocab(m: Model) -> int:
    """Rows of the embedding."""
    return -(-m.vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def _tensors(m: Model, mesh: Any, tp: int, dtype: Any, expert_parallel: bool) -> dict[str, Any]:
    def t(shape: tuple[int, ...], *spec: Any) -> jax.ShapeDtypeStruct:
        return tensor(mesh, dtype, shape, *spec)

    kv_heads = max(m.kv_heads, tp)
    vocab = padded_vocab(m)
    tree = {
        "model.embed_tokens.weight": t((vocab, m.hidden), "tp"),
        "model.norm.weight": t((m.hidden,)),
        "lm_head.weight": t((vocab, m.hidden), "tp"),
    }
    for i in range(m.layers):
        p = LAYER.format(i=i)
        tree[p + "self_attn.qkv_proj.weight"] = t(((m.heads + 2 * kv_heads) * m.head_dim, m.hidden), "tp")
        tree[p + "self_attn.o_proj.weight"] = t((m.hidden, m.heads * m.head_dim), None, "tp")
        for norm in ("q_norm", "k_norm"):
            tree[p + f"self_attn.{norm}.weight"] = t((m.head_dim,))
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tree[p + f"{norm}.weight"] = t((m.hidden,))
        if m.experts is None:
            tree[p + "mlp.gate_up_proj.weight"] = t((2 * m.width, m.hidden), "tp")
            tree[p + "mlp.down_proj.weight"] = t((m.hidden, m.width), None, "tp")
        else:
            e, f = m.experts.count, m.experts.width
            tree[p + "mlp.gate.weight"] = t((e, m.hidden))
            tree[p + "mlp.experts.w13_weight"] = t(
                (e, 2 * f, m.hidden), *(("tp",) if expert_parallel else (None, "tp"))
            )
            tree[p + "mlp.experts.w2_weight"] = t(
                (e, m.hidden, f), *(("tp",) if expert_parallel else (None, None, "tp"))
            )
    return tree


def _mapping(m: Model, tp: int) -> Mapping:
    copies = max(1, tp // m.kv_heads)

    def kv(name: str) -> Expr:
        weight = src(LAYER + f"self_attn.{name}_proj.weight")
        if copies == 1:
            return weight
        heads = weight.rearrange("(k h) d -> k h d", h=m.head_dim)
        return heads.repeat(copies, axis=0).rearrange("k h d -> (k h) d")

    def vocab(name: str) -> Expr:
        more = padded_vocab(m) - m.vocab
        return src(name).pad([(0, more), (0, 0)]) if more else src(name)

    entries: dict[str, Expr] = {
        "model.embed_tokens.weight": vocab("model.embed_tokens.weight"),
        "model.norm.weight": src("model.norm.weight"),
        "lm_head.weight": alias("model.embed_tokens.weight") if m.tied else vocab("lm_head.weight"),
        LAYER + "self_attn.qkv_proj.weight": fuse(src(LAYER + "self_attn.q_proj.weight"), kv("k"), kv("v"), axis=0),
    }
    same = ["self_attn.o_proj", "self_attn.q_norm", "self_attn.k_norm", "input_layernorm", "post_attention_layernorm"]
    if m.experts is None:
        same.append("mlp.down_proj")
        gate, up = (src(LAYER + f"mlp.{name}_proj.weight") for name in ("gate", "up"))
        entries[LAYER + "mlp.gate_up_proj.weight"] = fuse(gate, up, axis=0)
    else:
        same.append("mlp.gate")
        gate, up = (src(LAYER + f"mlp.experts.{name}_proj.weight") for name in ("gate", "up"))
        entries[LAYER + "mlp.experts.w13_weight"] = fuse(gate, up, axis=1)
        entries[LAYER + "mlp.experts.w2_weight"] = src(LAYER + "mlp.experts.down_proj.weight")
    for name in same:
        entries[LAYER + name + ".weight"] = src(LAYER + name + ".weight")
    return Mapping(entries)
