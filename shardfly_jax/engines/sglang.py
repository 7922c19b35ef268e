"""SGLang as rollout: the parameters of `model.named_parameters()`, unquantized or in fp8, and what it derives of them.

Names, shapes and order as in SGLang 0.5.10.post1, `srt/`: `layers/{linear,vocab_parallel_embedding}.py`,
`layers/moe/fused_moe_triton/layer.py`, `layers/quantization/{unquant,fp8}.py`, `distributed/parallel_state.py`,
`models/{qwen3,qwen3_moe,llama,deepseek_v2,glm4_moe,gpt_oss}.py`, `models/deepseek_common/deepseek_weight_loader.py`.

SGLang keeps copies that a write to a parameter does not renew; they are targets of their own here:

* `self_attn.w_kc` and `self_attn.w_vc` (latent attention), by their storage: `w_kc.transpose(1, 2)` [heads, kv_rank,
  nope] and `w_vc.transpose(1, 2)` [heads, value, kv_rank], which are contiguous;
* `mlp.gate._weight_fp32` (GLM-4.5), which exists from the first forward pass on.

Quantized, `w_kc` and `w_vc` stay in bfloat16. They get the trainer's own values; SGLang, when it loads, puts those of
its codes there, 2.3% away in the mean (`docs/design/quantization.md`). (`SGL_USE_DEEPGEMM_BMM`, which is off by
default, keeps codes there: not described.)

Data-parallel attention (`--enable-dp-attention`) and DeepEP are not described.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from shardfly_jax.engines import block_sizes, quantized, vllm
from shardfly_jax.engines.canonical import LAYER
from shardfly_jax.engines.fused import Cuts, FusedBuilder, Placement
from shardfly_jax.engines.models import Model, require_family
from shardfly_jax.engines.side import AnyMesh, Side, axis_size
from shardfly_jax.sharding.errors import PlanError
from shardfly_jax.sharding.language import src
from shardfly_jax.sharding.quantization import Fp8Block

FAMILIES = ("qwen3", "qwen3_moe", "llama3", "deepseek_v3", "gpt_oss", "glm4_moe")
RUNNERS = ("triton", "triton_kernel", "flashinfer_cutlass")
"""`moe_runner_backend`s whose experts a mapping can write."""
QUANTIZED_RUNNERS = ("triton", "cutlass")
"""Those of quantized experts."""
QUANTIZATIONS = ("fp8_block", "fp8_block_ue8m0")


def rollout(
    model: Model,
    mesh: AnyMesh,
    *,
    dtype: Any = "bfloat16",
    expert_parallel: int = 1,
    moe_runner_backend: str = "triton",
    fuse_shared_experts: bool | None = None,
    sinks_dtype: Any = "bfloat16",
    placement: Placement | None = None,
    quantization: str | None = None,
) -> Side:
    """The rollout side of a model.

    Args:
      model: From `engines.model(name)`.
      mesh: With an axis `tp` (`--tp-size`); every other axis makes replicas.
      dtype: Of all parameters but those that SGLang keeps in float32.
      expert_parallel: `--ep-size`, a divisor of tp: so many groups of ranks share out whole experts; inside a group
        each expert is cut.
      moe_runner_backend: What SGLang runs with (`--moe-runner-backend`; its own default, `auto`, is `triton`, but for
        gpt-oss `triton_kernel`). `triton`, `triton_kernel` or `flashinfer_cutlass`; quantized, `triton` or `cutlass`.
      fuse_shared_experts: Whether the shared expert is the last routed one. None for what SGLang does on NVIDIA GPUs:
        yes for DeepSeek-V3's sizes and GLM-4.5 without expert parallelism; `--disable-shared-experts-fusion` is False.
      sinks_dtype: Of gpt-oss' sinks: float32 with the `trtllm_mha` attention backend.
      placement: The expert in each slot, of each layer if a dict, as EPLB has chosen by now. None for rising order.
      quantization: Linears and experts as e4m3 codes with `weight_scale_inv` per 128 x 128 block, float32, as of an fp8
        checkpoint, made from the trainer's own dtype. SGLang makes no such scales, it only reads them; those of
        `fp8_block` are vLLM's. `fp8_block_ue8m0` has the powers of two of its `per_block_cast_to_fp8`, kept as float32.
        On Blackwell SGLang packs them into int32 for DeepGEMM: buffers of another shape, which are not described.

    Raises:
      PlanError: A family without a mapping, sizes that the mesh or blocks do not divide (all are listed), options that
        SGLang does not combine, or a backend that rearranges experts after loading.
    """
    require_family(model, FAMILIES, "sglang")
    given: dict[str, Any] = {
        "expert_parallel": expert_parallel, "moe_runner_backend": moe_runner_backend,
        "fuse_shared_experts": fuse_shared_experts, "quantization": quantization,
    }  # fmt: skip
    builder = _builder(model, mesh, dtype, placement, **given)
    fuses = _fuses(model, fuse_shared_experts, expert_parallel)
    if faults := _indivisible(builder, quantization, fuses):
        raise _refusal(builder, mesh, faults, given)
    _add_parameters(builder, dtype, moe_runner_backend, fuses, sinks_dtype, quantization is not None)
    if quantization is None:
        return builder.side("rollout")
    return quantized.side(builder, quantized.FORMATS[quantization])


def _builder(
    model: Model,
    mesh: AnyMesh,
    dtype: Any,
    placement: Placement | None,
    *,
    expert_parallel: int,
    moe_runner_backend: str,
    fuse_shared_experts: bool | None,
    quantization: str | None,
) -> FusedBuilder:
    """What is to collect the parameters, once options and sizes are checked.

    Raises:
      PlanError: See `rollout`; but for sizes that blocks do not divide.
    """
    if quantization is not None:
        quantized.require(model, quantization, QUANTIZATIONS, "sglang")
    runners = RUNNERS if quantization is None else QUANTIZED_RUNNERS
    fuses = _fuses(model, fuse_shared_experts, expert_parallel)
    _check(model, axis_size("sglang", mesh, "tp"), expert_parallel, moe_runner_backend, fuses, runners)
    mesh, cuts = _cuts(mesh, expert_parallel)
    return FusedBuilder(model, mesh, cuts, dtype, placement)


def _indivisible(builder: FusedBuilder, quantization: str | None, fuses: bool) -> list[str]:
    if quantization is None:
        return []
    format = quantized.FORMATS[quantization]
    assert isinstance(format, Fp8Block)
    return block_sizes.indivisible(builder, format, shared_apart=not fuses)


def _refusal(builder: FusedBuilder, mesh: AnyMesh, faults: list[str], given: dict[str, Any]) -> PlanError:
    model, placement = builder.model, builder.placement

    def does(settings: block_sizes.Settings) -> bool:
        options = dict(settings)
        try:
            made = _builder(model, block_sizes.with_tp(mesh, options.pop("tp")), "bfloat16", placement, **options)
        except PlanError:
            return False
        fuses = _fuses(model, options["fuse_shared_experts"], options["expert_parallel"])
        return not _indivisible(made, options["quantization"], fuses)

    given = {"tp": dict(mesh.shape)["tp"], **given}
    known: dict[str, Sequence[Any]] = {}
    if model.experts is not None:
        known = {"expert_parallel": range(1, model.heads + 1), "fuse_shared_experts": (None,)}
    # cutlass runs quantized experts only
    last = block_sizes.offers(given, {"quantization": (None,), "moe_runner_backend": ("triton",)}, does)
    if vllm.takes(model, mesh, quantization="fp8_channel"):
        last = ["engines.vllm with quantization='fp8_channel', whose scales per row take any size", *last]
    return block_sizes.refusal(model, faults, given, known, does, (), last)


def _fuses(m: Model, given: bool | None, expert_parallel: int) -> bool:
    """Whether the shared expert is one of the others."""
    return expert_parallel == 1 and _fuses_by_default(m) if given is None else given


def _add_parameters(
    builder: FusedBuilder, dtype: Any, runner: str, fuse_shared: bool, sinks_dtype: Any, is_quantized: bool
) -> None:
    model = builder.model
    builder.outside_layers()
    if model.latent is None:
        builder.attention(sinks_dtype=sinks_dtype)
    else:
        builder.latent_attention("fused_qkv_a_proj_with_mqa")
        _absorbed(model, builder, "bfloat16" if is_quantized else None)
    builder.mlp()
    if model.experts is None:
        return
    into_first = runner == "triton_kernel"
    if model.experts.interleaved:
        builder.interleaved_experts(("w13_weight_bias", "w2_weight_bias"), "float32", into_first)
        return
    builder.router()
    if model.family == "glm4_moe":
        gate = src(LAYER + "mlp.gate.weight").astype(dtype)  # a copy of the parameter, with its rounding
        shape = (model.experts.count, model.hidden)
        builder.add(LAYER + "mlp.gate._weight_fp32", gate, shape, layers=model.sparse_layers, dtype="float32")
    builder.experts(up_first=runner == "flashinfer_cutlass", into_first=into_first, shared=fuse_shared)
    if not fuse_shared:
        builder.shared_expert()


def _fuses_by_default(m: Model) -> bool:
    """`determine_num_fused_shared_experts` of both models."""
    if m.experts is None or m.experts.shared_width != m.experts.width:
        return False
    return m.family == "glm4_moe" or (m.family == "deepseek_v3" and m.experts.count == 256)


def _check(m: Model, tp: int, ep: int, runner: str, fused: bool, runners: tuple[str, ...]) -> None:
    if isinstance(ep, bool) or not isinstance(ep, int):
        raise PlanError(
            f"engine: expert_parallel of sglang is {ep!r}, but it is a number of groups of ranks (--ep-size). Give a "
            f"divisor of tp={tp}; for whole experts on every rank, {tp}."
        )
    faults = []
    if ep < 1 or tp % ep:
        faults.append(f"engine: expert_parallel of sglang is {ep}, but it must divide tp={tp}. Choose a divisor.")
    if m.experts is None:
        if ep > 1:
            faults.append(f"engine: expert_parallel of sglang is {ep}, but {m.name} has no experts. Leave it out.")
        if runner not in runners:
            faults.append(
                f"engine: moe_runner_backend of sglang is {runner!r}, but one of {list(runners)} is needed, and "
                f"{m.name} has no experts. Leave it out."
            )
        if faults:
            raise PlanError(faults)
        return
    if runner not in runners or (m.experts.interleaved and runner == "flashinfer_cutlass"):
        usable = RUNNERS[:2] if m.experts.interleaved else runners
        faults.append(
            f"engine: moe_runner_backend of sglang is {runner!r}, but only {list(usable)} keep the experts of {m.name} "
            "as they are loaded. Start SGLang with --moe-runner-backend triton; or let it load and rearrange them: "
            "write Hugging Face names (engines.hf) and hand them to update_weights_from_disk, which processes weights "
            "anew."
        )
    if m.experts.interleaved and ep > 1:
        faults.append(
            f"engine: expert_parallel of sglang is {ep}, but its loader does not share out the bfloat16 experts of "
            f"{m.name}. Leave it out."
        )
    if runner == "triton_kernel" and ep > 1:
        faults.append(
            f"engine: expert_parallel of sglang is {ep}, but the triton_kernel runner has none. Choose triton."
        )
    if fused and (m.experts.shared_width != m.experts.width or ep > 1):
        faults.append(
            "engine: fuse_shared_experts of sglang is true, but that needs one shared expert as wide as the others and "
            f"no expert parallelism; {m.name} has a width of {m.experts.shared_width} beside {m.experts.width}, and "
            f"expert_parallel is {ep}. Leave it out."
        )
    if faults:
        raise PlanError(faults)


def _cuts(mesh: AnyMesh, ep: int) -> tuple[AnyMesh, Cuts]:
    """The mesh with `tp` split into groups for experts where it must be, and what its axes cut."""
    tp = dict(mesh.shape)["tp"]
    if ep == 1:
        return mesh, Cuts(tp=("tp",), shared=("tp",), width=("tp",))
    if ep == tp:
        return mesh, Cuts(tp=("tp",), shared=("tp",), experts=("tp",))
    at = mesh.axis_names.index("tp")
    sizes = list(mesh.shape.values())
    sizes[at : at + 1] = [ep, tp // ep]  # rank = group * (tp / ep) + place in it (`moe_ep`, `moe_tp`)
    names = (*mesh.axis_names[:at], "moe_ep", "moe_tp", *mesh.axis_names[at + 1 :])
    both = ("moe_ep", "moe_tp")
    cuts = Cuts(tp=both, shared=both, experts=("moe_ep",), width=("moe_tp",))
    if isinstance(mesh, Mesh):
        return Mesh(np.asarray(mesh.devices).reshape(sizes), names), cuts
    return AbstractMesh(tuple(sizes), names), cuts


def _absorbed(m: Model, b: FusedBuilder, dtype: str | None) -> None:
    """Halves of `kv_b_proj` that decoding multiplies into queries and outputs (`post_load_weights`)."""
    assert m.latent is not None
    mla, layers, tp = m.latent, range(m.layers), b.cuts.tp
    both = src(LAYER + "self_attn.kv_b_proj.weight").rearrange("(n x) r -> n x r", x=mla.nope + mla.value)
    keys = both[:, : mla.nope].rearrange("n x r -> n r x")
    b.add(LAYER + "self_attn.w_kc", keys, (m.heads, mla.kv_rank, mla.nope), tp, layers=layers, dtype=dtype)
    values = both[:, mla.nope :]
    b.add(LAYER + "self_attn.w_vc", values, (m.heads, mla.value, mla.kv_rank), tp, layers=layers, dtype=dtype)
