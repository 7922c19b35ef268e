"""Plain Hugging Face names, as checkpoints on the hub have them: kernels [out, in], one tensor per expert.

For JAX code whose params carry these names, on either side: a rollout that loads checkpoints as they are, files for
other tools, a trainer ported name by name. gpt-oss' experts are one tensor per layer and bfloat16, as transformers
holds them, or, as a rollout, the hub's mxfp4.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping as AbstractMapping
from typing import Any

import jax
from jax.sharding import PartitionSpec

from shardfly_jax.engines.canonical import Tensor, tensors
from shardfly_jax.engines.models import Model, require_model
from shardfly_jax.engines.side import AnyMesh, Side, require_mesh, tensor
from shardfly_jax.sharding.errors import PlanError
from shardfly_jax.sharding.grids import PLAIN, grid_shape
from shardfly_jax.sharding.language import Expr, scale_of, src, stack
from shardfly_jax.sharding.mapping import Mapping, matches
from shardfly_jax.sharding.presets import triton_mxfp4

FAMILIES = ("qwen3", "qwen3_moe", "llama3", "deepseek_v3", "gpt_oss", "glm4_moe")

QUANTIZATIONS = ("mxfp4",)
MXFP4 = triton_mxfp4()
"""What serving stacks quantize gpt-oss with; with what OpenAI did is not published."""
PACKED = (".mlp.experts.gate_up_proj", ".mlp.experts.down_proj")
"""Endings of the names of what the hub's gpt-oss has in mxfp4."""

Specs = AbstractMapping[str, PartitionSpec]


def rollout(
    model: Model,
    mesh: AnyMesh,
    *,
    dtype: Any = "bfloat16",
    specs: Specs | None = None,
    quantization: str | None = None,
) -> Side:
    """The rollout side of a model: a flat dict from Hugging Face's names.

    Args:
      model: From `engines.model(name)`.
      mesh: Any. Axes that no spec uses make replicas.
      dtype: Of all params but the router's correction bias, which is float32.
      specs: How tensors are cut, by patterns such as `"*.q_proj.weight"` or `"model.layers.{i}.mlp.down_proj.weight"`;
        the first that matches counts, and whole where none does.
      quantization: `mxfp4` for gpt-oss: instead of `gate_up_proj` and `down_proj`, `gate_up_proj_blocks` [experts,
        2 * width, hidden / 2] and `gate_up_proj_scales` [experts, 2 * width, hidden / 32], `down_proj_blocks` [experts,
        hidden, width / 2] and `down_proj_scales` [experts, hidden, width / 32]. The hub has the blocks' bytes as
        [..., columns / 32, 16]; vLLM and SGLang flatten them to this as they load (`models/gpt_oss.py` of both).

    Raises:
      PlanError: A spec that matches no tensor, or does not fit the mesh or one that it matches; a quantization that is
        not known, or of another family.
    """
    require_model(model)
    own, entries = tensors(model), dict(own_names(model))
    if quantization is not None:
        if quantization not in QUANTIZATIONS or model.family != "gpt_oss":
            raise PlanError(
                f"engine: quantization of hf is {quantization!r} for {model.name} of family {model.family!r}, but "
                "'mxfp4' of 'gpt_oss' is known. Leave it out."
            )
        own = [made for t in own for made in _packed(t)]
        for name in [name for name in entries if name.endswith(PACKED)]:
            entries[name + "_blocks"] = entries.pop(name).rearrange("e i o -> e o i").quantize(MXFP4)
            entries[name + "_scales"] = scale_of(name + "_blocks")
    return Side(role="rollout", params=_leaves(own, model, mesh, dtype, specs), mapping=Mapping(entries), model=model)


def _packed(t: Tensor) -> list[Tensor]:
    """What stands for a tensor in a checkpoint with mxfp4."""
    if not t.name.endswith(PACKED):
        return [t]
    experts, inputs, outputs = t.shape
    shape = (experts, outputs, inputs)
    made = {"_blocks": MXFP4.stored_shape(shape), "_scales": grid_shape(MXFP4, shape, PLAIN)}
    return [dataclasses.replace(t, name=t.name + ending, shape=of, dtype="uint8") for ending, of in made.items()]


def own_names(model: Model) -> Mapping:
    """What each of a checkpoint's tensors is in canonical ones."""
    entries: dict[str, Expr] = {}
    for t in tensors(model):
        entries[_pattern(t)] = src(t.name)["{e}"] if t.per_expert else src(t.name)
    return Mapping(entries)


def trainer(model: Model, mesh: AnyMesh, *, dtype: Any = "bfloat16", specs: Specs | None = None) -> Side:
    """The trainer side of a model: as `rollout`, read instead of written."""
    require_model(model)
    own = tensors(model)
    entries: dict[str, Expr] = {}
    for t in own:
        per_expert = _pattern(t)
        parts = [src(per_expert.replace("{e}", str(e))) for e in range(t.shape[0])] if t.per_expert else []
        entries[t.name] = stack(parts) if parts else src(t.name)
    return Side(role="trainer", params=_leaves(own, model, mesh, dtype, specs), mapping=Mapping(entries), model=model)


def _pattern(t: Tensor) -> str:
    """The checkpoint's name of a canonical tensor, with `{e}` for the expert."""
    return t.name.replace("mlp.experts.", "mlp.experts.{e}.") if t.per_expert else t.name


def _leaves(
    own: list[Tensor], model: Model, mesh: AnyMesh, dtype: Any, specs: Specs | None
) -> dict[str, jax.ShapeDtypeStruct]:
    require_mesh(mesh)
    specs = {} if specs is None else specs
    used: set[str] = set()
    out: dict[str, jax.ShapeDtypeStruct] = {}
    for t in own:
        shape = t.shape[1:] if t.per_expert else t.shape
        names = [t.name] if t.layers is None else [_pattern(t).replace("{i}", str(i)) for i in t.layers]
        if t.per_expert:
            names = [name.replace("{e}", str(e)) for name in names for e in range(t.shape[0])]
        by_spec: dict[str | None, jax.ShapeDtypeStruct] = {}
        for name in names:
            found = matches(name, tuple(specs))
            if found not in by_spec:
                spec = PartitionSpec() if found is None else specs[found]
                by_spec[found] = tensor(mesh, dtype if t.dtype is None else t.dtype, shape, *spec)
            out[name] = by_spec[found]
        used |= {pattern for pattern in by_spec if pattern is not None}
    if idle := [pattern for pattern in specs if pattern not in used]:
        raise PlanError([f"spec: {pattern!r} matches no tensor of {model.name}. Mend the pattern." for pattern in idle])
    return out
