"""vLLM as rollout: the parameters of `model.named_parameters()` in *kernel format*, unquantized.

Names, shapes and order as in vLLM 0.21.0, `model_executor/`: `layers/{linear,vocab_parallel_embedding}.py`,
`layers/fused_moe/{layer,config,unquantized_fused_moe_method,oracle/unquantized}.py`,
`models/{qwen3,qwen3_moe,llama,deepseek_v2,glm4_moe,gpt_oss}.py`. On CUDA, linears keep the layout of their loader, and
experts do with the Triton backend. There the absorbed matrices of latent attention (`W_UK_T`, `W_UV`) are views of an
unquantized `kv_b_proj.weight`, so that writing it in place renews them.
"""

from __future__ import annotations

from typing import Any

from shardfly_jax.engines.fused import Cuts, FusedBuilder, Placement
from shardfly_jax.engines.models import Model, require_family
from shardfly_jax.engines.side import AnyMesh, Side, axis_size
from shardfly_jax.sharding.errors import PlanError

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


def rollout(
    model: Model,
    mesh: AnyMesh,
    *,
    dtype: Any = "bfloat16",
    expert_parallel: bool = False,
    moe_backend: str = "triton",
    all2all_backend: str = "allgather_reducescatter",
    placement: Placement | None = None,
) -> Side:
    """The rollout side of a model.

    Args:
      model: From `engines.model(name)`.
      mesh: With an axis `tp` (`--tensor-parallel-size`) and perhaps `dp` (`--data-parallel-size`), over which experts
        are shared out too; every other axis makes replicas.
      dtype: Of all parameters but those that vLLM keeps in float32.
      expert_parallel: Whole experts per rank (`--enable-expert-parallel`) instead of a cut of each.
      moe_backend: What vLLM runs with (`--moe-backend`; its own default, `auto`, depends on the GPU). `triton` or
        `flashinfer_cutlass`.
      all2all_backend: What vLLM runs with (`--all2all-backend`), here its default. Some keep the shared expert of
        DeepSeek-V3 whole on every rank where TP, DP and EP meet.
      placement: The expert in each slot, of each layer if a dict: `round_robin`, or what EPLB has chosen by now. None
        for vLLM's `linear`.

    Raises:
      PlanError: A family without a mapping, sizes that the mesh does not divide (all are listed), or a backend that
        pads experts or rearranges them after loading.
    """
    require_family(model, FAMILIES, "vllm")
    tp, dp = axis_size("vllm", mesh, "tp"), dict(mesh.shape).get("dp", 1)
    exchanges = expert_parallel and dp > 1
    if model.experts is not None:
        _check_backends(model, moe_backend, all2all_backend, exchanges)
    ranks = ("dp", "tp") if "dp" in mesh.axis_names else ("tp",)
    # glm4_moe.py does not pass is_sequence_parallel on to its shared expert
    whole = exchanges and tp > 1 and all2all_backend in SEQUENCE_PARALLEL and model.family == "deepseek_v3"
    cuts = Cuts(
        tp=("tp",), shared=() if whole else ("tp",), experts=ranks if expert_parallel else (),
        width=() if expert_parallel else ranks,
    )  # fmt: skip
    builder = FusedBuilder(model, mesh, cuts, dtype, placement)
    gpt_oss = model.family == "gpt_oss"
    builder.outside_layers("model.embedding.weight" if gpt_oss else "model.embed_tokens.weight")
    if model.latent is None:
        builder.attention("attn." if gpt_oss else "self_attn.")
    else:
        builder.latent_attention("fused_qkv_a_proj")
    builder.mlp()
    if model.experts is None:
        return builder.side()
    if model.experts.interleaved:
        builder.interleaved_experts(("w13_bias", "w2_bias"))
        return builder.side()
    builder.router(dtype="float32" if model.family == "glm4_moe" else None)
    builder.experts(up_first=UP_FIRST[moe_backend])
    builder.shared_expert()
    return builder.side()


def _check_backends(model: Model, backend: str, all2all: str, exchanges: bool) -> None:
    if all2all not in ALL2ALL:
        raise PlanError(f"engine: all2all_backend of vllm is {all2all!r}, but it has {list(ALL2ALL)}. Choose one.")
    if exchanges and all2all in PADDING and model.hidden not in UNPADDED:
        raise PlanError(
            f"engine: all2all_backend of vllm is {all2all!r}, but it pads the experts of {model.name}, whose hidden "
            f"size is {model.hidden}. Choose allgather_reducescatter."
        )
    usable = ["triton"] if model.family == "gpt_oss" else list(UP_FIRST)
    if backend not in usable:
        raise PlanError(
            f"engine: moe_backend of vllm is {backend!r}, but only {usable} keep the experts of {model.name} in an "
            "order that a mapping can write. Start vLLM with --moe-backend triton; or let it load and rearrange them: "
            "write Hugging Face names (engines.hf) and hand them to update_weights after "
            "start_weight_update(is_checkpoint_format=True)."
        )
