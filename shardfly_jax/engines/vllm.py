"""vLLM as rollout: the parameters of `model.named_parameters()` in *kernel format*, unquantized or quantized.

Names, shapes and order as in vLLM 0.21.0, `model_executor/`: `layers/{linear,vocab_parallel_embedding}.py`,
`layers/fused_moe/{layer,config,unquantized_fused_moe_method,oracle/unquantized}.py`,
`models/{qwen3,qwen3_moe,llama,deepseek_v2,glm4_moe,gpt_oss}.py`. On CUDA, linears keep the layout of their loader, and
experts do with the Triton backend. There the absorbed matrices of latent attention (`W_UK_T`, `W_UV`) are views of an
unquantized `kv_b_proj.weight`, so that writing it in place renews them.

Quantized, parameters are those of `layers/quantization/fp8.py`, or `compressed_tensors/` there. The absorbed matrices
are copies then, in the dtype of activations, that a write to `kv_b_proj` does not renew
(`layers/attention/mla_attention.py`). They share one storage, which is a target of its own here,
`self_attn.mla_attn.mla_attn.W_UK_T`: [rows of kv_b_proj, kv_rank], with DeepGEMM [kv_rank, rows of kv_b_proj]. It gets
the trainer's own values; vLLM, when it loads, puts those of its codes there, 2.3% away in the mean
(`docs/design/quantization.md`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardfly_jax.engines import block_sizes, quantized
from shardfly_jax.engines.canonical import LAYER
from shardfly_jax.engines.fused import Cuts, FusedBuilder, Placement
from shardfly_jax.engines.models import Model, require_family
from shardfly_jax.engines.side import AnyMesh, Side, axis_size
from shardfly_jax.sharding.errors import PlanError
from shardfly_jax.sharding.language import src
from shardfly_jax.sharding.quantization import Fp8Block

FAMILIES = ("qwen3", "qwen3_moe", "llama3", "deepseek_v3", "gpt_oss", "glm4_moe")

PADDING = ("deepep_high_throughput", "deepep_low_latency", "nixl_ep")
"""`all2all_backend`s that pad the hidden size of experts, unless it is one of `UNPADDED`."""
UNPADDED = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)
SEQUENCE_PARALLEL = ("allgather_reducescatter", "mori", *PADDING)
"""`all2all_backend`s with which the ranks of a TP group share out tokens between TP, DP and EP
(`ParallelConfig.use_sequence_parallel_moe`)."""
DEFAULT_ALL2ALL = SEQUENCE_PARALLEL[0]
ALL2ALL = (*SEQUENCE_PARALLEL, "flashinfer_nvlink_two_sided", "flashinfer_nvlink_one_sided")

UP_FIRST = {"triton": False, "flashinfer_cutlass": True}
"""`moe_backend`s whose experts a mapping can write, and whether the halves of w13 are swapped."""
QUANTIZATIONS = ("fp8_block", "fp8_block_ue8m0", "fp8_tensor", "fp8_channel", "int8_channel")
LATENT_QUANTIZATIONS = QUANTIZATIONS[:2]


def rollout(
    model: Model,
    mesh: AnyMesh,
    *,
    dtype: Any = "bfloat16",
    expert_parallel: bool = False,
    moe_backend: str = "triton",
    all2all_backend: str = DEFAULT_ALL2ALL,
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
      quantization: Linears and experts as codes with scales, made from the trainer's own dtype.
        `fp8_block`: `weight_scale_inv` per 128 x 128 block, float32, as of an fp8 checkpoint, for the CUTLASS and
        Triton kernels (DeepGEMM not installed, or `VLLM_USE_DEEP_GEMM=0`).
        `fp8_block_ue8m0`: powers of two kept as float32, for DeepGEMM on Hopper, where it is vLLM's default if
        installed (`VLLM_USE_DEEP_GEMM_E8M0`). On Blackwell vLLM packs them into int32, and Marlin repacks weights: both
        have buffers of other shapes and are not described.
        `fp8_tensor`: `weight_scale` [1] per linear and [experts] for experts, over what each rank holds, so it changes
        with tp: what `--quantization fp8` makes of a bfloat16 checkpoint.
        `fp8_channel`, `int8_channel`: `weight_scale` [..., rows, 1] over whole rows of all ranks together, as of a
        compressed-tensors checkpoint (W8A8, dynamic activations, symmetric;
        `schemes/compressed_tensors_w8a8_{fp8,int8}.py`, `compressed_tensors_moe_w8a8_{fp8,int8}.py`).
        The last three are not for latent attention. vLLM keeps their linears as `.t()` of what is written here.

    Raises:
      PlanError: A family without a mapping, sizes that the mesh or blocks do not divide (all are listed), options that
        vLLM does not take, or a backend that pads experts or rearranges them after loading.
    """
    require_family(model, FAMILIES, "vllm")
    given: dict[str, Any] = {
        "expert_parallel": expert_parallel, "moe_backend": moe_backend, "all2all_backend": all2all_backend,
        "quantization": quantization,
    }  # fmt: skip
    builder = _builder(model, mesh, dtype, placement, **given)
    if faults := _indivisible(builder, quantization):
        raise _refusal(builder, faults, {"tp": builder.ways(("tp",)), **given})
    _add_parameters(builder, moe_backend)
    if quantization is None:
        return builder.side("rollout")
    if model.latent is not None:
        _absorbed(builder, into_first=quantization == "fp8_block_ue8m0")
    return quantized.side(builder, quantized.FORMATS[quantization])


def _builder(
    model: Model,
    mesh: AnyMesh,
    dtype: Any,
    placement: Placement | None,
    *,
    expert_parallel: bool,
    moe_backend: str,
    all2all_backend: str,
    quantization: str | None,
) -> FusedBuilder:
    """What is to collect the parameters, once options and sizes are checked.

    Raises:
      PlanError: See `rollout`; but for sizes that blocks do not divide.
    """
    tp, dp = axis_size("vllm", mesh, "tp"), dict(mesh.shape).get("dp", 1)
    _check_expert_parallel(model, expert_parallel)
    exchanges = expert_parallel and dp > 1
    _check_quantization(model, quantization, moe_backend)
    _check_backends(model, moe_backend, all2all_backend, exchanges)
    ranks = ("dp", "tp") if "dp" in mesh.axis_names else ("tp",)
    # glm4_moe.py does not pass is_sequence_parallel on to its shared expert
    whole = exchanges and tp > 1 and all2all_backend in SEQUENCE_PARALLEL and model.family == "deepseek_v3"
    cuts = Cuts(
        tp=("tp",), shared=() if whole else ("tp",), experts=ranks if expert_parallel else (),
        width=() if expert_parallel else ranks,
    )  # fmt: skip
    return FusedBuilder(model, mesh, cuts, dtype, placement)


def takes(
    model: Model, mesh: AnyMesh, *, tp: int | None = None, placement: Placement | None = None, **options: Any
) -> bool:
    """Whether `rollout` takes options, on a mesh that has another tp if one is given."""
    defaults = {"expert_parallel": False, "moe_backend": "triton", "all2all_backend": DEFAULT_ALL2ALL}
    mesh = mesh if tp is None else block_sizes.with_tp(mesh, tp)
    try:
        builder = _builder(model, mesh, "bfloat16", placement, **{**defaults, **options})
    except PlanError:
        return False
    return not _indivisible(builder, options["quantization"])


def _indivisible(builder: FusedBuilder, quantization: str | None) -> list[str]:
    format = None if quantization is None else quantized.FORMATS[quantization]
    return block_sizes.indivisible(builder, format) if isinstance(format, Fp8Block) else []


def _refusal(builder: FusedBuilder, faults: list[str], given: dict[str, Any]) -> PlanError:
    def does(settings: block_sizes.Settings) -> bool:
        return takes(builder.model, builder.mesh, placement=builder.placement, **settings)

    known: dict[str, Sequence[Any]] = {}
    if builder.model.experts is not None:
        known = {"expert_parallel": (False, True), "all2all_backend": (DEFAULT_ALL2ALL,)}
    by_row = block_sizes.offers(given, {"quantization": ("fp8_channel",), "moe_backend": ("triton",)}, does)
    others = [f"{change}, whose scales per row take any size" for change in by_row]
    last = block_sizes.offers(given, {"quantization": (None,)}, does)
    return block_sizes.refusal(builder.model, faults, given, known, does, others, last)


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


def _absorbed(b: FusedBuilder, into_first: bool) -> None:
    """What `MLAAttention.process_weights_after_loading` keeps beside a quantized `kv_b_proj`.

    Args:
      into_first: [kv_rank, rows] instead of [rows, kv_rank], as DeepGEMM's product with an identity matrix leaves it
        (`get_and_maybe_dequant_weights`).
    """
    m = b.model
    assert m.latent is not None
    whole, layers, tp = src(LAYER + "self_attn.kv_b_proj.weight"), range(m.layers), b.cuts.tp
    rows, name = m.heads * (m.latent.nope + m.latent.value), LAYER + "self_attn.mla_attn.mla_attn.W_UK_T"
    if into_first:
        b.add(name, whole.rearrange("n r -> r n"), (m.latent.kv_rank, rows), (), tp, layers=layers)
    else:
        b.add(name, whole, (rows, m.latent.kv_rank), tp, layers=layers)


def _check_quantization(model: Model, quantization: Any, moe_backend: str) -> None:
    if quantization is None:
        return
    quantized.require(model, quantization, QUANTIZATIONS, "vllm")
    if quantization in LATENT_QUANTIZATIONS:
        return
    if model.latent is not None:
        raise PlanError(
            f"engine: quantization of vllm is {quantization!r}, but for the latent attention of {model.name} only "
            f"{list(LATENT_QUANTIZATIONS)} are described. Choose one of them."
        )
    if model.experts is not None and moe_backend != "triton":
        raise PlanError(
            f"engine: moe_backend of vllm is {moe_backend!r}, but with quantization={quantization!r} only triton keeps "
            "the experts as they are quantized. Start vLLM with --moe-backend triton."
        )


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
            f"size is {model.hidden}. Choose {DEFAULT_ALL2ALL}."
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
