"""Hugging Face's own names: against a list of the hub's tensors, and values from and to other engines."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from checkpoints import LLAMA, QWEN3, QWEN3_MOE, TINY, checkpoint, into_tunix
from engine_checks import check_route, mesh
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


def test_a_spec_that_matches_nothing_is_refused() -> None:
    with pytest.raises(sf.PlanError, match=r"'\*\.qkv_proj' matches no tensor of tiny-llama"):
        sf.engines.hf.rollout(LLAMA, ABSTRACT, specs={"*.norm.weight": P(), "*.qkv_proj": P("x")})
