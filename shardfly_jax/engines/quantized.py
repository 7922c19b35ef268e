"""What quantization makes of a rollout's parameters: codes under the weight's name, scales under another.

vLLM and SGLang quantize the same modules: all linears of the layers and the experts, given their `quant_config`. They
keep embeddings, `lm_head`, norms, biases and the router as they are (`quantization/fp8.py` and
`models/{qwen3,qwen3_moe,llama,deepseek_v2,glm4_moe}.py` of both). Scales of experts are named `w13_weight_scale...`.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from shardfly_jax.engines.fused import FusedBuilder
from shardfly_jax.engines.models import Model
from shardfly_jax.engines.side import Side, nested
from shardfly_jax.sharding.errors import PlanError
from shardfly_jax.sharding.formats import np_dtype
from shardfly_jax.sharding.grids import PLAIN, grid_shape
from shardfly_jax.sharding.language import Expr, scale_of
from shardfly_jax.sharding.mapping import Mapping
from shardfly_jax.sharding.presets import deepgemm_ue8m0, vllm_fp8_block, vllm_fp8_tensor
from shardfly_jax.sharding.quantization import Format, Fp8Block, Fp8Channel, Fp8Tensor, Int8Channel

FORMATS: dict[str, Format] = {
    "fp8_block": vllm_fp8_block(), "fp8_block_ue8m0": deepgemm_ue8m0(), "fp8_tensor": vllm_fp8_tensor(),
    "fp8_channel": Fp8Channel(formula="divide"), "int8_channel": Int8Channel(),
}  # fmt: skip
"""By the name that engines take. Channels are divided by their scales as in compressed-tensors 0.20.1
(`quantization/lifecycle/forward_helpers.py`), whose int8 scales are `amax / 127.5` and codes down to -128, though."""

BLOCK_SUFFIX, SUFFIX = "_scale_inv", "_scale"
"""What both engines append to a weight's name: `weight_scale_inv` for blocks, `weight_scale` else."""

FAMILIES = ("qwen3", "qwen3_moe", "llama3", "deepseek_v3", "glm4_moe")

QUANTIZED = (
    ".qkv_proj.weight", ".o_proj.weight",
    ".q_proj.weight", ".fused_qkv_a_proj.weight", ".fused_qkv_a_proj_with_mqa.weight", ".q_b_proj.weight",
    ".kv_a_proj_with_mqa.weight", ".kv_b_proj.weight",
    ".gate_up_proj.weight", ".down_proj.weight", ".experts.w13_weight", ".experts.w2_weight",
)  # fmt: skip
"""Endings of the names of weights that are quantized."""


def require(model: Model, quantization: Any, names: tuple[str, ...], engine: str) -> None:
    """Raises:
    PlanError: A name that the engine does not take, or a family that is not described quantized.
    """
    if model.family == "gpt_oss" and quantization == "mxfp4":
        raise PlanError(
            f"engine: quantization of {engine} is 'mxfp4', but each of its kernels for that rearranges experts after "
            "loading (triton_kernels swizzles, Marlin repacks, FlashInfer shuffles). Write the hub's names with "
            "engines.hf.rollout(quantization='mxfp4'), and hand them to the engine's own loader."
        )
    if not isinstance(quantization, str) or quantization not in names:
        raise PlanError(f"engine: quantization of {engine} is {quantization!r}, but one of {list(names)} is needed.")
    if model.family not in FAMILIES:
        raise PlanError(
            f"engine: quantization of {engine} is {quantization!r}, but {model.name} of family {model.family!r} is "
            f"described unquantized only; the families {list(FAMILIES)} are quantized. Leave it out."
        )


def side(builder: FusedBuilder, format: Format) -> Side:
    """The rollout that a builder has collected, with its linears and experts as codes, each followed by its scales.

    Scales of blocks are sharded like their weight, those of channels like its rows: ranks that cut the columns share
    them. Of scales per rank, a linear has [1] and experts have [experts].
    """
    suffix = BLOCK_SUFFIX if isinstance(format, Fp8Block) else SUFFIX
    leaves: dict[str, Any] = {}
    for name, leaf in builder.leaves.items():
        if not name.endswith(QUANTIZED):
            leaves[name] = leaf
            continue
        leaves[name] = jax.ShapeDtypeStruct(leaf.shape, np_dtype(format.stored), sharding=leaf.sharding)
        shape, sharding = grid_shape(format, leaf.shape, PLAIN), leaf.sharding
        if isinstance(format, Fp8Tensor):
            shape, sharding = _one_per_rank(builder, leaf)
        elif isinstance(format, Fp8Channel):
            sharding = NamedSharding(builder.mesh, PartitionSpec(*_cuts(leaf)[:-1]))
        leaves[name + suffix] = jax.ShapeDtypeStruct(shape, np_dtype(format.scale_dtype), sharding=sharding)
    entries = dict(builder.entries)
    for name in [name for name in entries if name.endswith(QUANTIZED)]:
        entries[name] = entries[name].quantize(format)
        per_rank = isinstance(format, Fp8Tensor)
        entries[name + suffix] = _rank_after_rank(name) if per_rank else scale_of(name)
    return Side(role="rollout", params=nested(leaves), mapping=Mapping(entries), model=builder.model)


def _cuts(leaf: jax.ShapeDtypeStruct) -> list[tuple[str, ...]]:
    """The mesh axes that cut each axis of a leaf."""
    assert isinstance(leaf.sharding, NamedSharding)
    spec = [*leaf.sharding.spec, *(None,) * (len(leaf.shape) - len(leaf.sharding.spec))]
    return [(cut,) if isinstance(cut, str) else tuple(cut or ()) for cut in spec]


def _one_per_rank(builder: FusedBuilder, leaf: jax.ShapeDtypeStruct) -> tuple[tuple[int, ...], NamedSharding]:
    """Shape and sharding of scales of what each rank holds of a weight, rank after rank."""
    axes = tuple(axis for cut in _cuts(leaf) for axis in cut)
    experts = leaf.shape[0] // builder.ways(builder.cuts.experts) if len(leaf.shape) == 3 else 1
    return (experts * builder.ways(axes),), NamedSharding(builder.mesh, PartitionSpec(axes))


def _rank_after_rank(name: str) -> Expr:
    """Scales [cuts of rows, cuts of columns] or [experts, cuts of rows, cuts of columns], flat, rank after rank.

    No engine with such scales cuts both between experts and through them.
    """
    return scale_of(name).rearrange("e r c -> (r c e)" if name.endswith("_weight") else "r c -> (r c)")
