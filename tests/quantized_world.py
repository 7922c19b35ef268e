"""A small plan that quantizes, with the trainers, weights and ranks of `small_world`.

Trainer ranks 0 and 1 each hold half of the columns of `h.{i}.w`, transposed. Of its targets `block` has blocks that one
trainer holds; every block of the others lies on both. Padding is quantized by the rollouts themselves.
"""

from __future__ import annotations

from typing import Any

from jax.sharding import AbstractMesh
from small_world import LAYERS, TRAINER, like

import shardfly_jax as sf
from shardfly_jax import formats

FORMATS: dict[str, formats.Format] = {
    "block": formats.Fp8Block(rows=2, columns=4),
    "ue8m0": formats.Fp8Block(rows=3, columns=16, scale="power_of_two"),
    "padded": formats.Fp8Block(rows=2, columns=32, scale="e8m0"),
    "channel": formats.Fp8Channel(floor=1 / 512, formula="divide"),
    "int8": formats.Int8Channel(),
    "tensor": formats.Fp8Tensor(),
    "mxfp4": formats.triton_mxfp4(),
}
SCALES = {"block": (6, 4), "ue8m0": (4, 1), "padded": (6, 1), "channel": (12, 1), "int8": (12, 1), "tensor": (1, 1),
          "mxfp4": (12, 1)}  # fmt: skip
"""Shapes of the scales."""
PADDING = 4


def quantized_target_of(replicas: int, tp: int = 2) -> dict[str, Any]:
    """What rollouts of some replicas of `tp` ranks hold: codes cut in rows, scales in rows or not at all."""
    rollout = AbstractMesh((replicas, tp), ("replica", "tp"))
    target: dict[str, Any] = {"norm": like(rollout, (12,), "float32")}
    for i in range(LAYERS):
        for name, format in FORMATS.items():
            shape = (12, 16 + (PADDING if name == "padded" else 0))
            cut = "tp" if name in ("block", "ue8m0", "channel") else None
            target[f"h.{i}.{name}"] = like(rollout, format.stored_shape(shape), format.stored, "tp")
            target[f"h.{i}.{name}_scale"] = like(rollout, SCALES[name], format.scale_dtype, cut)
    return target


def make_quantized_plan(replicas: int = 2, tp: int = 2) -> sf.Plan:
    """The plan; another number of replicas or `tp` makes another one."""
    source: dict[str, Any] = {"norm": like(TRAINER, (12,), "float32")}
    source.update({f"h.{i}.w": like(TRAINER, (16, 12), "float32", "fsdp") for i in range(LAYERS)})
    mapping: dict[str, sf.Expr] = {"norm": sf.src("norm")}
    for name, format in FORMATS.items():
        value = sf.src("h.{i}.w").rearrange("a b -> b a")
        if name == "padded":
            value = value.pad([(0, 0), (0, PADDING)], 7.0)
        mapping[f"h.{{i}}.{name}"] = value.quantize(format)
        mapping[f"h.{{i}}.{name}_scale"] = sf.scale_of(f"h.{{i}}.{name}")
    return sf.make_plan(source, quantized_target_of(replicas, tp), sf.Mapping(mapping))
