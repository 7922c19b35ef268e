"""MaxText's trees, scanned and unscanned: values against its own conversion, specs, padding, and every known model."""

from __future__ import annotations

import dataclasses
import math

import ml_dtypes
import numpy as np
import pytest
from checkpoints import DEEPSEEK, GLM, GPT_OSS, LLAMA, MOONLIGHT, QWEN3, QWEN3_MOE, checkpoint, into_maxtext
from engine_checks import check_route, mesh, named
from jax.sharding import AbstractMesh, PartitionSpec as P

import shardfly_jax as sf
from shardfly_jax.engines.models import Model
from shardfly_jax.planning import make_plan
from shardfly_jax.sharding.evaluate import evaluate

MODELS = (QWEN3, QWEN3_MOE, LLAMA, DEEPSEEK, MOONLIGHT, GPT_OSS)
KNOWN = [name for name in sf.engines.names() if sf.engines.model(name).family in sf.engines.maxtext.FAMILIES]
WIDE = AbstractMesh((2, 2, 2, 2), ("fsdp", "fsdp_transpose", "tensor", "expert"))


@pytest.mark.parametrize("scanned", [True, False], ids=["scanned", "unscanned"])
@pytest.mark.parametrize("axes", [("fsdp", "tensor"), ("expert", "fsdp_transpose")])
@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.name)
def test_params_become_the_checkpoint_they_were_loaded_from(
    model: Model, axes: tuple[str, str], scanned: bool, rng: np.random.Generator
) -> None:
    ck = checkpoint(model, rng)
    trainer = sf.engines.maxtext.trainer(model, mesh((2, 2), axes), dtype="float32", scan_layers=scanned)
    rollout = sf.engines.hf.rollout(model, mesh((1,), ("x",), 6), dtype="float32")
    check_route(trainer, into_maxtext(model, ck, scanned), rollout, lambda rank: ck)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_llamas_query_is_multiplied_in_float32_and_rounded_once(dtype: type, rng: np.random.Generator) -> None:
    model = dataclasses.replace(LLAMA, head_dim=6)  # sqrt(6) rounds, as sqrt(128) does
    kernel = rng.standard_normal((model.hidden, model.heads, 6)).astype(dtype)
    side = sf.engines.maxtext.trainer(model, WIDE, dtype="bfloat16", scan_layers=False)
    have = evaluate(side.mapping["model.layers.{i}.self_attn.q_proj.weight"], lambda name, i: kernel, 0, ())
    scaled = (kernel.astype(np.float32) * np.float32(math.sqrt(6))).astype(dtype)
    want = np.concatenate([scaled[..., ::2], scaled[..., 1::2]], axis=-1).reshape(model.hidden, -1).T
    assert have.tobytes() == np.ascontiguousarray(want).tobytes()


def test_specs_are_those_that_base_yml_resolves_to() -> None:
    def specs(model: Model) -> dict[str, P]:
        return {
            name: leaf.sharding.spec for name, leaf in named(sf.engines.maxtext.trainer(model, WIDE).params).items()
        }

    embed, heads, mlp, some = ("fsdp", "fsdp_transpose", "expert"), ("tensor",), ("fsdp_transpose", "tensor"), ("fsdp",)
    dense, sparse, latent = specs(QWEN3), specs(QWEN3_MOE), specs(DEEPSEEK)
    assert dense["token_embedder.embedding"] == P(heads, embed)
    assert dense["decoder.layers.self_attention.query.kernel"] == P(embed, None, heads, None)
    assert dense["decoder.layers.self_attention.out.kernel"] == P(heads, None, None, embed)
    assert dense["decoder.layers.self_attention.query_norm.scale"] == P(heads, None)
    assert dense["decoder.layers.mlp.wi_0.kernel"] == P(("fsdp", "expert"), None, mlp)
    assert dense["decoder.layers.mlp.wo.kernel"] == P(mlp, None, ("fsdp", "expert"))
    assert sparse["decoder.layers.moe_block.gate.kernel"] == P(embed, None, None)
    gate = "decoder.moe_layers.DeepSeekMoeBlock_0.MoeBlock_0.gate.kernel"
    assert latent[gate] == P(("fsdp", "fsdp_transpose"), None, None)
    assert sparse["decoder.layers.moe_block.wi_1"] == P(("expert",), None, some, mlp)
    assert sparse["decoder.layers.moe_block.wo"] == P(("expert",), None, mlp, some)
    assert latent["decoder.moe_layers.self_attention.wkv_b.kernel"] == P(embed, None, heads, None)
    stages = AbstractMesh((3, 2), ("stage", "tensor"))
    staged = named(sf.engines.maxtext.trainer(LLAMA, stages).params)
    assert staged["decoder.layers.mlp.wo.kernel"].sharding.spec == P(("tensor",), ("stage",), None)
    whole = named(sf.engines.maxtext.trainer(DEEPSEEK, stages).params)
    assert whole["decoder.moe_layers.self_attention.kv_norm.scale"].sharding.spec == P(("tensor",), None)


def test_rows_that_pad_the_vocabulary_stay_behind(rng: np.random.Generator) -> None:
    ck = checkpoint(LLAMA, rng)
    loaded = into_maxtext(LLAMA, ck, True)
    loaded["token_embedder.embedding"] = np.pad(
        loaded["token_embedder.embedding"], [(0, 16), (0, 0)], constant_values=7
    )
    loaded["decoder.logits_dense.kernel"] = np.pad(
        loaded["decoder.logits_dense.kernel"], [(0, 0), (0, 16)], constant_values=7
    )
    there = mesh((2, 2), ("fsdp", "tensor"))
    trainer = sf.engines.maxtext.trainer(LLAMA, there, dtype="float32", padded_vocab=80)
    check_route(trainer, loaded, sf.engines.hf.rollout(LLAMA, mesh((1,), ("x",)), dtype="float32"), lambda rank: ck)


def test_the_layer_norms_of_gpt_oss_are_float32_and_need_leave_to_be_narrowed() -> None:
    trainer = sf.engines.maxtext.trainer(GPT_OSS, WIDE)
    rollout = sf.engines.hf.rollout(GPT_OSS, AbstractMesh((1,), ("x",)))
    mapping = sf.engines.route(trainer, rollout)
    with pytest.raises(sf.PlanError, match=r"input_layernorm.weight.*allow_cast") as caught:
        make_plan(trainer.params, rollout.params, mapping)
    assert len(caught.value.faults) == 2 * GPT_OSS.layers
    make_plan(trainer.params, rollout.params, mapping, allow_cast=("*layernorm.weight",))


@pytest.mark.parametrize("scanned", [True, False], ids=["scanned", "unscanned"])
@pytest.mark.parametrize("name", KNOWN)
def test_every_known_model_has_as_many_parameters_as_its_checkpoint(name: str, scanned: bool) -> None:
    model = sf.engines.model(name)
    trainer = named(sf.engines.maxtext.trainer(model, AbstractMesh((1,), ("fsdp",)), scan_layers=scanned).params)
    rollout = sf.engines.hf.rollout(model, AbstractMesh((1,), ("x",))).params
    assert sum(leaf.size for leaf in trainer.values()) == sum(leaf.size for leaf in rollout.values())


def test_what_maxtext_does_not_have_is_refused() -> None:
    with pytest.raises(sf.PlanError, match="maxtext has no mapping for 'tiny-glm'"):
        sf.engines.maxtext.trainer(GLM, WIDE)
    with pytest.raises(sf.PlanError, match=r"the mesh has the axes \['tp'\]"):
        sf.engines.maxtext.trainer(LLAMA, AbstractMesh((2, 2), ("fsdp", "tp")))
