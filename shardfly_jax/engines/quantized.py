"""What quantization makes of a rollout's parameters: codes under the weight's name, scales under another.

vLLM and SGLang quantize the same modules: all linears of the layers and the experts, given their `quant_config`. They
keep embeddings, `lm_head`, norms, biases and the router as they are (`quantization/fp8.py` and
`models/{qwen3,qwen3_moe,llama,deepseek_v2,glm4_moe}.py` of both). Scales of experts are named `w13_weight_scale...`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
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
from shardfly_jax.sharding.quantization import (
    Format,
    Fp8Block,
    Fp8Channel,
    Fp8Tensor,
    Int8Channel,
    deepgemm_ue8m0,
    vllm_fp8_block,
    vllm_fp8_tensor,
)

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

TPS = (1, 2, 4, 8, 16, 32, 64)
"""Sizes that are proposed where one does not do."""


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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ways:
    """Into how many parts the ranks of an engine cut.

    Attributes:
      tp: Heads and widths of dense MLPs.
      shared: The width of the expert that all tokens pass; None where it is one of the others.
      width: Widths of experts.
    """

    tp: int
    shared: int | None
    width: int


def check_blocks(
    model: Model, format: Fp8Block, ways: Callable[[int], Ways], tp: int, *, otherwise: str, multiple_of: int = 1
) -> None:
    """The engines' own rule for blocks, before anything is planned.

    It is `validate_fp8_block_shape` (`quantization/utils/fp8_utils.py`) and `Fp8MoEMethod.create_weights`
    (`quantization/fp8.py`) of vLLM, `validate_block_quant_shapes` and the like of SGLang: what a rank holds of rows or
    columns that are cut, and each part of a fused weight but the last of an uncut one, are whole blocks.

    Args:
      ways: What a tp makes ranks hold.
      tp: The one that is wanted.
      otherwise: What to do where blocks divide no tp's sizes and the attention has other formats too.
      multiple_of: Each tp that is proposed instead.

    Raises:
      PlanError: Some size is no multiple of the block; all are listed, with each tp that would do.
    """

    def indivisible(one: Ways) -> list[tuple[str, int]]:
        return [(what, n) for what, n, block in _sizes(model, format, one) if n % block]

    here = ways(tp)
    faults = indivisible(here)
    if not faults:
        return
    good = [t for t in TPS if model.heads % t == 0 and t % multiple_of == 0 and not indivisible(ways(t))]
    remedies = [f"Choose tp from {good}"] if good else []
    if here.width > 1 and not indivisible(dataclasses.replace(here, width=1)):
        remedies.append("let ranks share out whole experts (expert_parallel)")
    if not remedies:
        alone = "" if model.latent is not None else f", or {otherwise}"
        remedies = [f"No tp does, so {model.name} cannot be quantized in such blocks: leave quantization out{alone}"]
    remedy = ", or ".join(remedies)
    raise PlanError(
        [
            f"indivisible: {model.name} has {n} {what} per rank with tp={tp}, but blocks of {format.rows} x "
            f"{format.columns} do not divide them. {remedy[0].upper()}{remedy[1:]}."
            for what, n in faults
        ]
    )


def _sizes(m: Model, format: Fp8Block, ways: Ways) -> Iterator[tuple[str, int, int]]:
    """(what a rank holds, how much, and the length of the blocks that must divide it)."""
    rows, columns, tp = format.rows, format.columns, ways.tp
    if m.latent is None:
        yield "query rows of self_attn.qkv_proj.weight", m.heads * m.head_dim // tp, rows
        yield "key rows of self_attn.qkv_proj.weight", max(m.kv_heads, tp) * m.head_dim // tp, rows
        value = m.head_dim
    else:
        mla, value = m.latent, m.latent.value
        if mla.q_rank is not None:
            yield "rows of q_a_proj in self_attn.fused_qkv_a_proj", mla.q_rank, rows
        if tp > 1:
            queries = "q_proj" if mla.q_rank is None else "q_b_proj"
            yield f"rows of self_attn.{queries}.weight", m.heads * m.head_dim // tp, rows
            yield "rows of self_attn.kv_b_proj.weight", m.heads * (mla.nope + mla.value) // tp, rows
    if tp > 1:
        yield "columns of self_attn.o_proj.weight", m.heads * value // tp, columns
    mlps = [("mlp.", m.width, tp)] if m.dense_layers else []
    if m.experts is not None and m.experts.shared_width and ways.shared is not None:
        mlps.append(("mlp.shared_experts.", m.experts.shared_width, ways.shared))
    for prefix, width, cuts in mlps:
        yield f"gate rows of {prefix}gate_up_proj.weight", width // cuts, rows
        if cuts > 1:
            yield f"columns of {prefix}down_proj.weight", width // cuts, columns
    if m.experts is not None:
        yield "gate rows of mlp.experts.w13_weight", m.experts.width // ways.width, rows
        if tp > 1:  # also where experts are whole
            yield "columns of mlp.experts.w2_weight", m.experts.width // ways.width, columns


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
