"""vLLM as rollout: the parameters of `model.named_parameters()` in *kernel format*, unquantized.

Names, shapes and order as in vLLM 0.21.0, `model_executor/`: `layers/{linear,vocab_parallel_embedding}.py`,
`layers/fused_moe/{layer,config,unquantized_fused_moe_method,oracle/unquantized}.py`,
`models/{qwen3,qwen3_moe,llama,deepseek_v2,glm4_moe,gpt_oss}.py`. On CUDA, linears keep the layout of their loader, and
experts do with the Triton backend. There the absorbed matrices of latent attention (`W_UK_T`, `W_UV`) are views of an
unquantized `kv_b_proj.weight`, so that writing it in place renews them.
"""

from __future__ import annotations

from typing import Any

from shardfly_jax.engines import fp8
from shardfly_jax.engines.fused import Cuts, FusedBuilder, Placement
from shardfly_jax.engines.models import Model, require_family
from shardfly_jax.engines.side import AnyMesh, Side, axis_size, nested
from shardfly_jax.sharding.errors import PlanError
from shardfly_jax.sharding.mapping import Mapping

FAMILIES = ("qwen3", "qwen3_moe", "llama3", "deepseek_v3", "gpt_oss", "glm4_moe")

PADDING = ("deepep_high_throughput", "deepep_low_latency", "nixl_ep")
"""`all2all_backend`s that pad the hidden size of experts, unless it is one of `UNPADDED`."""
UNPADDED = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)
SEQUENCE_PARALLEL = ("allgather_reducescatter", "mori", *PADDING)
"""`all2all_backend`s with which the ranks of a TP group share out tokens between TP, DP and EP
(`ParallelConfig.use_sequence_parallel_moe`)."""
ALL2ALL = (*SEQUENCE_PARALLEL, "flashinfer_nvlink_two_sided", "flashinfer_nvlink_one_sided")

UP_FIRST = {"triton": False, "flashinfer_cutlass": True}
"""`moe_backend`s whose experts a mapping can write, and whether the halves of w13 are swapped."""
QUANTIZED_FAMILIES = ("qwen3", "qwen3_moe")
QUANTIZED = (
    ".self_attn.qkv_proj.weight", ".self_attn.o_proj.weight", ".mlp.gate_up_proj.weight", ".mlp.down_proj.weight",
    ".mlp.experts.w13_weight", ".mlp.experts.w2_weight",
)  # fmt: skip
"""Endings of the weights that fp8 quantizes; `quantization/fp8.py` names their scales with `_scale_inv`."""


def rollout(
    model: Model,
    mesh: AnyMesh,
    *,
    dtype: Any = "bfloat16",
    expert_parallel: bool = False,
    moe_backend: str = "triton",
    all2all_backend: str = "allgather_reducescatter",
    placement: Placement | None = None,
    quantization: str | None = None,
) -> Side:
    """The rollout side of a model.

    Args:
      model: From `engines.model(name)`.
      mesh: With an axis `tp` (`--tensor-parallel-size`) and perhaps `dp` (`--data-parallel-size`), over which experts
        are shared out too; every other axis makes replicas.
      dtype: Of all parameters but those that vLLM keeps in float32.
      expert_parallel: Whole experts per rank (`--enable-expert-parallel`) instead of a cut of each. vLLM refuses to
        start with it for a model without experts (`ModelConfig._verify_with_expert_parallelism`).
      moe_backend: What vLLM runs with (`--moe-backend`; its own default, `auto`, depends on the GPU). `triton` or
        `flashinfer_cutlass`.
      all2all_backend: What vLLM runs with (`--all2all-backend`), here its default. Some keep the shared expert of
        DeepSeek-V3 whole on every rank where TP, DP and EP meet.
      placement: The expert in each slot, of each layer if a dict: in vLLM's `round_robin` order, say, or as EPLB has
        chosen by now. None for vLLM's `linear`.
      quantization: `fp8_block` or `fp8_block_ue8m0`: linears and experts as e4m3 codes with scales per 128 x 128 block,
        from the trainer's own dtype. Embeddings, `lm_head`, norms and the router stay as they are. This is what vLLM's
        CUTLASS and Triton kernels read, and with `_ue8m0` DeepGEMM on Hopper; it repacks weights for Marlin and scales
        for Blackwell.

    Raises:
      PlanError: A family without a mapping, sizes that the mesh or blocks do not divide (all are listed), options that
        vLLM does not take, or a backend that pads experts or rearranges them after loading.
    """
    require_family(model, FAMILIES, "vllm")
    tp, dp = axis_size("vllm", mesh, "tp"), dict(mesh.shape).get("dp", 1)
    _check_expert_parallel(model, expert_parallel)
    exchanges = expert_parallel and dp > 1
    _check_backends(model, moe_backend, all2all_backend, exchanges)
    ranks = ("dp", "tp") if "dp" in mesh.axis_names else ("tp",)
    # glm4_moe.py does not pass is_sequence_parallel on to its shared expert
    whole = exchanges and tp > 1 and all2all_backend in SEQUENCE_PARALLEL and model.family == "deepseek_v3"
    cuts = Cuts(
        tp=("tp",), shared=() if whole else ("tp",), experts=ranks if expert_parallel else (),
        width=() if expert_parallel else ranks,
    )  # fmt: skip
    builder = FusedBuilder(model, mesh, cuts, dtype, placement)
    _add_parameters(builder, moe_backend)
    if quantization is None:
        return builder.side("rollout")
    width_cuts = dp if "dp" in mesh.axis_names and not expert_parallel else 1
    return _quantized(builder, quantization, tp, width_cuts, expert_parallel)


def _add_parameters(builder: FusedBuilder, moe_backend: str) -> None:
    model = builder.model
    gpt_oss = model.family == "gpt_oss"
    builder.outside_layers("model.embedding.weight" if gpt_oss else "model.embed_tokens.weight")
    if model.latent is None:
        builder.attention("attn." if gpt_oss else "self_attn.")
    else:
        builder.latent_attention("fused_qkv_a_proj")
    builder.mlp()
    if model.experts is None:
        return
    if model.experts.interleaved:
        builder.interleaved_experts(("w13_bias", "w2_bias"))
        return
    builder.router(dtype="float32" if model.family == "glm4_moe" else None)
    builder.experts(up_first=UP_FIRST[moe_backend])
    builder.shared_expert()


def _quantized(builder: FusedBuilder, quantization: str, tp: int, dp: int, expert_parallel: bool) -> Side:
    """The rollout with its linears and experts as codes and scales."""
    model = builder.model
    require_family(model, QUANTIZED_FAMILIES, f"vllm with quantization={quantization!r}")
    format = fp8.format_of(quantization)
    ways = {t for t in (1, 2, 4, 8, 16, 32, tp) if model.heads % t == 0}
    sizes = {t: _block_sizes(model, t, 1 if expert_parallel else t * dp) for t in sorted(ways)}
    if faults := fp8.faults(model.name, format, sizes, tp):
        raise PlanError(faults)
    leaves, mapping = fp8.quantized(builder.leaves, Mapping(builder.entries), format, QUANTIZED, "_scale_inv")
    return Side(role="rollout", params=nested(leaves), mapping=mapping, model=model)


def _block_sizes(m: Model, tp: int, width_cuts: int) -> dict[str, int]:
    """What fp8 blocks must divide: parts of fused rows, and columns that are cut (`validate_fp8_block_shape`)."""
    sizes = {"query rows": m.heads * m.head_dim // tp, "key rows": max(m.kv_heads, tp) * m.head_dim // tp}
    if m.experts is None:
        return sizes | {"MLP width": m.width // tp}
    return sizes | {"expert width": m.experts.width // width_cuts}


def _check_expert_parallel(model: Model, given: bool) -> None:
    if not isinstance(given, bool):
        raise PlanError(
            f"engine: expert_parallel of vllm is {given!r}, but it is True or False: with True all ranks of dp and tp "
            "share out whole experts (--enable-expert-parallel). Give one of them."
        )
    if given and model.experts is None:
        raise PlanError(f"engine: expert_parallel of vllm is True, but {model.name} has no experts. Leave it out.")


def _check_backends(model: Model, backend: str, all2all: str, exchanges: bool) -> None:
    if all2all not in ALL2ALL:
        raise PlanError(f"engine: all2all_backend of vllm is {all2all!r}, but it has {list(ALL2ALL)}. Choose one.")
    if model.experts is not None and exchanges and all2all in PADDING and model.hidden not in UNPADDED:
        raise PlanError(
            f"engine: all2all_backend of vllm is {all2all!r}, but it pads the experts of {model.name}, whose hidden "
            f"size is {model.hidden}. Choose allgather_reducescatter."
        )
    usable = ["triton"] if model.family == "gpt_oss" else list(UP_FIRST)
    if backend not in usable and model.experts is None:
        raise PlanError(
            f"engine: moe_backend of vllm is {backend!r}, but one of {usable} is needed, and {model.name} has no "
            "experts. Leave it out."
        )
    if backend not in usable:
        raise PlanError(
            f"engine: moe_backend of vllm is {backend!r}, but only {usable} keep the experts of {model.name} in an "
            "order that a mapping can write. Start vLLM with --moe-backend triton; or let it load and rearrange them: "
            "write Hugging Face names (engines.hf) and hand them to update_weights after "
            "start_weight_update(is_checkpoint_format=True)."
        )
