"""What quantization makes of a rollout's parameters: codes under the weight's name, scales under another."""

from __future__ import annotations

from collections.abc import Mapping as AbstractMapping, Sequence
from typing import Any

import jax

from shardfly_jax.sharding.errors import PlanError
from shardfly_jax.sharding.formats import np_dtype
from shardfly_jax.sharding.grids import PLAIN, grid_shape
from shardfly_jax.sharding.language import scale_of
from shardfly_jax.sharding.mapping import Mapping
from shardfly_jax.sharding.quantization import Format, Fp8Block, deepgemm_ue8m0, vllm_fp8_block

FORMATS: dict[str, Fp8Block] = {"fp8_block": vllm_fp8_block(), "fp8_block_ue8m0": deepgemm_ue8m0()}
"""By the name that engines take: float32 scales, or DeepGEMM's powers of two (vLLM's choice on Hopper where DeepGEMM is
installed and `VLLM_USE_DEEP_GEMM_E8M0` is not 0)."""


def format_of(quantization: str) -> Fp8Block:
    """Raises:
    PlanError: An unknown name.
    """
    if quantization not in FORMATS:
        raise PlanError(f"engine: quantization is {quantization!r}, but one of {list(FORMATS)} is needed.")
    return FORMATS[quantization]


def faults(
    model: str, format: Fp8Block, per_rank: AbstractMapping[int, AbstractMapping[str, int]], tp: int
) -> list[str]:
    """Faults of sizes that blocks do not divide.

    Args:
      model: Name of the model, for messages.
      format: With blocks of `rows` and `columns`.
      per_rank: For each tp that the model allows, what one rank holds of each size.
      tp: The one that is wanted.
    """

    def indivisible(sizes: AbstractMapping[str, int]) -> dict[str, int]:
        return {what: n for what, n in sizes.items() if n % format.rows or n % format.columns}

    good = [other for other, sizes in per_rank.items() if not indivisible(sizes)]
    return [
        f"indivisible: {model} has {n} as {what} per rank with tp={tp}, but blocks of {format.rows} x {format.columns} "
        f"do not divide it. Choose tp from {good}."
        for what, n in indivisible(per_rank[tp]).items()
    ]


def quantized(
    tensors: AbstractMapping[str, jax.ShapeDtypeStruct],
    mapping: Mapping,
    format: Format,
    weights: Sequence[str],
    suffix: str,
) -> tuple[dict[str, Any], Mapping]:
    """Parameters and mapping with some weights quantized, each followed by its scales, sharded alike.

    Args:
      tensors, mapping: Of the unquantized rollout; names are full.
      weights: Endings of the names of weights that are quantized.
      suffix: Of the names of scales.
    """
    ends = tuple(weights)
    tree: dict[str, Any] = {}
    for name, leaf in tensors.items():
        if not name.endswith(ends):
            tree[name] = leaf
            continue
        grid = grid_shape(format, leaf.shape, PLAIN)
        tree[name] = jax.ShapeDtypeStruct(leaf.shape, np_dtype(format.codes), sharding=leaf.sharding)
        tree[name + suffix] = jax.ShapeDtypeStruct(grid, np_dtype(format.scale_dtype), sharding=leaf.sharding)
    entries = dict(mapping)
    for name in [name for name in mapping if name.endswith(ends)]:
        entries[name] = mapping[name].quantize(format)
        entries[name + suffix] = scale_of(name)
    return tree, Mapping(entries)
