"""Hugging Face's own names: against a list of the hub's tensors, and values from and to other engines."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from checkpoints import GPT_OSS, LLAMA, QWEN3, QWEN3_MOE, TINY, checkpoint, into_tunix
from engine_checks import check_route, mesh
from fp4_engines import triton
from jax.sharding import AbstractMesh, PartitionSpec as P

import shardfly_jax as sf
from shardfly_jax.engines.canonical import tensors
from shardfly_jax.engines.models import Model
from shardfly_jax.planning import make_plan

FACTS = json.loads((Path(__file__).parent / "data" / "hf_tensors.json").read_text())
ABSTRACT = AbstractMesh((1,), ("x",))


def expanded(model: str) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of every tensor of a checkpoint, by name, from the list in `data`."""
    out = {}
    for row in FACTS[model]:
        for i in range(*row["layers"]) if row["layers"] else (None,):
            for e in range(row["experts"]) if row["experts"] else (None,):
                name = row["name"].replace("{i}", str(i)).replace("{e}", str(e))
                out[name] = (tuple(row["shape"]), row["dtype"])
    return out


@pytest.mark.parametrize("name", sf.engines.names())
def test_names_shapes_and_dtypes_are_those_of_the_hub(name: str) -> None:
    leaves = sf.engines.hf.rollout(sf.engines.model(name), ABSTRACT).params
    assert {k: (leaf.shape, str(leaf.dtype)) for k, leaf in leaves.items()} == expanded(name)


def test_totals_are_those_that_were_published() -> None:
    file = Path(sf.engines.__file__).with_name("models.json")
    published = {
        name: entry["published"]["total"]
        for name, entry in json.loads(file.read_text()).items()
        if "total" in entry["published"]
    }
    assert len(published) >= 10
    for name, total in published.items():
        leaves = sf.engines.hf.rollout(sf.engines.model(name), ABSTRACT).params.values()
        count = sum(leaf.size for leaf in leaves)
        assert abs(count - total["value"]) <= total["rel_tol"] * total["value"], name


@pytest.mark.parametrize("axes", [("fsdp", "tp"), ("fsdp", "sp", "tp")], ids=" ".join)
@pytest.mark.parametrize("model", [QWEN3, QWEN3_MOE, LLAMA], ids=lambda m: m.name)
def test_tunix_params_become_the_checkpoint_they_were_loaded_from(
    model: Model, axes: tuple[str, ...], rng: np.random.Generator
) -> None:
    ck = checkpoint(model, rng)
    trainer = sf.engines.tunix.trainer(model, mesh((2,) * len(axes), axes), dtype="float32")
    cut = trainer.params["layers"]["0"]["attn"]["o_proj"]["w"].sharding.spec[2]
    assert cut == (("fsdp", "sp") if "sp" in axes and model is not LLAMA else "fsdp")
    check_route(
        trainer,
        into_tunix(model, ck),
        sf.engines.hf.rollout(model, mesh((1,), ("x",)), dtype="float32"),
        lambda rank: ck,
    )


@pytest.mark.parametrize("model", TINY, ids=lambda m: m.name)
def test_named_params_reach_another_mesh_unchanged(model: Model, rng: np.random.Generator) -> None:
    ck = checkpoint(model, rng)
    specs = {"*.o_proj.weight": P(None, "x"), "*.input_layernorm.weight": P("x")}
    trainer = sf.engines.hf.trainer(model, mesh((2,), ("x",)), dtype="float32", specs=specs)
    rollout = sf.engines.hf.rollout(
        model,
        mesh((2, 2), ("replica", "y"), 4),
        dtype="float32",
        specs={"lm_head.weight": P("y")} if not model.tied else None,
    )

    def wanted(rank: int) -> dict[str, np.ndarray]:
        half = np.split(ck["lm_head.weight"], 2)[rank % 2] if not model.tied else None
        return ck | ({} if half is None else {"lm_head.weight": half})

    check_route(trainer, ck, rollout, wanted)


SMALLEST = ("Qwen3-0.6B", "Qwen3-30B-A3B", "Llama-3.1-8B", "Moonlight-16B-A3B", "gpt-oss-20b", "GLM-4.5-Air")


@pytest.mark.parametrize("name", [*SMALLEST, "DeepSeek-V3"])
def test_the_smallest_of_every_family_and_the_largest_plan_from_and_to_their_own_names(name: str) -> None:
    model = sf.engines.model(name)
    trainer, rollout = (side(model, ABSTRACT) for side in (sf.engines.hf.trainer, sf.engines.hf.rollout))
    plan = make_plan(trainer.params, rollout.params, sf.engines.route(trainer, rollout))
    want = sum(int(np.prod(t.shape)) * len(t.names) * (4 if t.dtype else 2) for t in tensors(model))
    assert plan.target_nbytes == want


@pytest.mark.parametrize("cut", [None, "fsdp", "tensor"])
def test_gpt_oss_becomes_the_hubs_mxfp4(cut: str | None, rng: np.random.Generator) -> None:
    """Inputs of experts are last in the hub's tensors, and trainers cut them inside blocks."""
    assert GPT_OSS.experts is not None
    model = dataclasses.replace(GPT_OSS, hidden=96, experts=dataclasses.replace(GPT_OSS.experts, width=64))
    ck = checkpoint(model, rng)
    want = dict(ck)
    for name in [name for name in ck if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        turned = want.pop(name).transpose(0, 2, 1)
        experts, rows, columns = turned.shape
        codes, scales = triton(turned.reshape(-1, columns))
        want[name + "_blocks"] = codes.reshape(experts, rows, columns // 2)
        want[name + "_scales"] = scales.reshape(experts, rows, columns // 32)
    specs = {} if cut is None else {"*.experts.gate_up_proj": P(None, "x"), "*.experts.down_proj": P(None, None, "x")}
    if cut == "tensor":
        specs = {"*.experts.gate_up_proj": P("x", None, None), "*.experts.down_proj": P(None, "x")}
    trainer = sf.engines.hf.trainer(model, mesh((4,), ("x",)), dtype="float32", specs=specs)
    rollout = sf.engines.hf.rollout(
        model, mesh((2, 2), ("replica", "y"), 4), dtype="float32", quantization="mxfp4",
        specs={"*.gate_up_proj_blocks": P(None, "y"), "*.gate_up_proj_scales": P(None, "y")},
    )  # fmt: skip

    def wanted(rank: int) -> dict[str, np.ndarray]:
        halves = {
            name: np.split(x, 2, axis=1)[rank % 2]
            for name, x in want.items()
            if name.endswith(("gate_up_proj_blocks", "gate_up_proj_scales"))
        }
        return want | halves

    check_route(trainer, ck, rollout, wanted)


def test_the_hubs_mxfp4_has_the_shapes_of_its_files() -> None:
    """openai/gpt-oss-20b, model.safetensors.index.json: blocks [32, 5760, 90, 16], scales [32, 5760, 90]."""
    model = sf.engines.model("gpt-oss-20b")
    plain, packed = (sf.engines.hf.rollout(model, ABSTRACT, quantization=q).params for q in (None, "mxfp4"))
    p = "model.layers.23.mlp.experts."
    blocks, scales = (packed[p + "gate_up_proj" + ending] for ending in ("_blocks", "_scales"))
    assert (blocks.shape, scales.shape) == ((32, 5760, 90 * 16), (32, 5760, 90))
    blocks, scales = (packed[p + "down_proj" + ending] for ending in ("_blocks", "_scales"))
    assert (blocks.shape, scales.shape) == ((32, 2880, 90 * 16), (32, 2880, 90))
    gone = {name for name in plain if name.endswith(("experts.gate_up_proj", "experts.down_proj"))}
    assert plain.keys() - packed.keys() == gone
    assert len(packed) == len(plain) + len(gone)


@pytest.mark.parametrize(("model", "quantization"), [(LLAMA, "mxfp4"), (GPT_OSS, "fp8_block")])
def test_quantizations_that_a_checkpoint_has_not_are_refused(model: Model, quantization: str) -> None:
    with pytest.raises(sf.PlanError, match=f"quantization of hf is '{quantization}' for {model.name}"):
        sf.engines.hf.rollout(model, ABSTRACT, quantization=quantization)


@pytest.mark.parametrize("engine", [sf.engines.vllm, sf.engines.sglang])
def test_engines_that_rearrange_mxfp4_are_refused_with_what_to_do_instead(engine) -> None:
    with pytest.raises(sf.PlanError, match=r"'mxfp4', but each of its kernels.*engines\.hf\.rollout"):
        engine.rollout(sf.engines.model("gpt-oss-20b"), AbstractMesh((1,), ("tp",)), quantization="mxfp4")


def test_a_spec_that_matches_nothing_is_refused() -> None:
    with pytest.raises(sf.PlanError, match=r"'\*\.qkv_proj' matches no tensor of tiny-llama"):
        sf.engines.hf.rollout(LLAMA, ABSTRACT, specs={"*.norm.weight": P(), "*.qkv_proj": P("x")})
