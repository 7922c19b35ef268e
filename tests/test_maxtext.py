"""Against MaxText itself: its model classes on its own shardings, its own converter to Hugging Face's checkpoints.

Nothing here says what a parameter is called, how it lies or what is done to its values: MaxText's classes, its config,
and the tables and code of its `checkpoint_conversion.to_huggingface` do.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import flax
import jax
import numpy as np
import pytest
from checkpoints import DEEPSEEK, GPT_OSS, LLAMA, QWEN3, QWEN3_MOE
from engine_checks import mesh, named
from flax import nnx
from jax.sharding import Mesh

import shardfly_jax as sf
from shardfly_jax.engines.models import Model

pytestmark = pytest.mark.filterwarnings("ignore")  # MaxText's own
NEEDED = ("maxtext", "aqt", "drjax", "pathwaysutils", "tiktoken", "tokamax", "transformers")

QWEN3_EVEN = dataclasses.replace(QWEN3, vocab=96)
LLAMA_ROUNDED = dataclasses.replace(LLAMA, head_dim=6)  # sqrt(6) rounds, as sqrt(128) does
NAMES = {
    "qwen3": "qwen3-0.6b", "qwen3_moe": "qwen3-30b-a3b", "llama3": "llama3.1-8b", "deepseek_v3": "deepseek3-671b",
    "gpt_oss": "gpt-oss-20b",
}  # fmt: skip
"""A model of MaxText's for each family, whose sizes are then replaced."""


@pytest.fixture(scope="module")
def maxtext() -> Iterator[SimpleNamespace]:
    """MaxText's modules. Importing them talks, and sets variables and a flag of flax that other tests rely on."""
    flag, environ = flax.config.flax_always_shard_variable, dict(os.environ)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        for name in NEEDED:
            pytest.importorskip(name, reason=f"needs {name} (the proof extra)")
        from maxtext.checkpoint_conversion import to_huggingface
        from maxtext.checkpoint_conversion.utils import hf_model_configs
        from maxtext.configs import pyconfig
        from maxtext.utils import model_creation_utils
    yield SimpleNamespace(
        to_huggingface=to_huggingface, configs=hf_model_configs.HF_MODEL_CONFIGS, pyconfig=pyconfig,
        creation=model_creation_utils,
    )  # fmt: skip
    flax.config.update("flax_always_shard_variable", flag)
    os.environ.clear()
    os.environ.update(environ)


def config(maxtext: SimpleNamespace, m: Model, scanned: bool, **parallelism: int) -> Any:
    """MaxText's config of a model with our sizes."""
    sizes: dict[str, Any] = {
        "base_emb_dim": m.hidden, "base_num_query_heads": m.heads, "base_num_kv_heads": m.kv_heads,
        "base_mlp_dim": m.width or 1, "base_num_decoder_layers": m.layers, "vocab_size": m.vocab,
        "logits_via_embedding": m.tied, "head_dim": m.head_dim,
    }  # fmt: skip
    if m.experts is not None:
        sizes |= {"num_experts": m.experts.count, "num_experts_per_tok": 2, "base_moe_mlp_dim": m.experts.width}
        if m.family != "deepseek_v3":
            sizes["base_mlp_dim"] = m.experts.width
    if m.latent is not None:
        assert m.experts is not None
        sizes |= {
            "first_num_dense_layers": m.experts.dense_layers, "q_lora_rank": m.latent.q_rank,
            "kv_lora_rank": m.latent.kv_rank, "qk_nope_head_dim": m.latent.nope, "qk_rope_head_dim": m.latent.rope,
            "v_head_dim": m.latent.value,
        }  # fmt: skip
        del sizes["head_dim"]
    base = Path(maxtext.pyconfig.__file__).with_name("base.yml")
    return maxtext.pyconfig.initialize(
        ["", str(base)], model_name=NAMES[m.family], override_model_config=True, scan_layers=scanned,
        weight_dtype="float32", enable_checkpointing=False, run_name="proof", base_output_directory="unused",
        dataset_type="synthetic", per_device_batch_size=1, max_target_length=8, log_config=False,
        skip_jax_distributed_system=True, jax_cache_dir="", **sizes, **parallelism,
    )  # fmt: skip


def described_to_transformers(maxtext: SimpleNamespace, m: Model) -> dict[str, Any]:
    """transformers' config of the same sizes, as MaxText's converter takes it."""
    there = copy.deepcopy(maxtext.configs[NAMES[m.family]])
    sizes = {
        "hidden_size": m.hidden, "num_attention_heads": m.heads, "num_key_value_heads": m.kv_heads,
        "head_dim": m.head_dim, "intermediate_size": m.width, "num_hidden_layers": m.layers, "vocab_size": m.vocab,
    }  # fmt: skip
    if m.experts is not None:
        count = {"deepseek_v3": "n_routed_experts", "gpt_oss": "num_local_experts"}.get(m.family, "num_experts")
        width = "intermediate_size" if m.family == "gpt_oss" else "moe_intermediate_size"
        sizes |= {count: m.experts.count, width: m.experts.width}
    if m.latent is not None:
        assert m.experts is not None
        assert m.latent.q_rank is not None
        sizes |= {
            "first_k_dense_replace": m.experts.dense_layers, "q_lora_rank": m.latent.q_rank,
            "kv_lora_rank": m.latent.kv_rank, "qk_nope_head_dim": m.latent.nope, "qk_rope_head_dim": m.latent.rope,
            "v_head_dim": m.latent.value, "qk_head_dim": m.head_dim,
        }  # fmt: skip
    for name, size in sizes.items():
        setattr(there, name, size)
    return there.to_dict() | sizes


def meshed(settings: Any, sizes: dict[str, int]) -> Mesh:
    """The first devices as a mesh with all of MaxText's axes."""
    shape = [sizes.get(axis, 1) for axis in settings.mesh_axes]
    return Mesh(np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape), settings.mesh_axes)


def abstract(maxtext: SimpleNamespace, settings: Any, on: Mesh) -> nnx.State:
    """The weights of MaxText's model, as shapes on its own shardings."""
    _, model = maxtext.creation.create_nnx_abstract_model(settings, on)
    # Everything but the state of random generators: DeepSeek's routing bias is no nnx.Param
    return nnx.state(model, nnx.Not(nnx.RngState), ...)[0]


def check_tree(real: dict[str, Any], described: dict[str, Any]) -> None:
    """Names, shapes, dtypes and shardings."""
    assert {name: (leaf.shape, leaf.dtype) for name, leaf in described.items()} == {
        name: (leaf.shape, leaf.dtype) for name, leaf in real.items()
    }
    for name, leaf in described.items():
        assert leaf.sharding.is_equivalent_to(real[name].sharding, leaf.ndim), name


def converted(maxtext: SimpleNamespace, m: Model, settings: Any, weights: nnx.State) -> dict[str, np.ndarray]:
    """What MaxText writes as a checkpoint: `to_huggingface.main` from the loaded weights on."""
    convert = maxtext.to_huggingface
    maps = convert._get_model_mappings(
        NAMES[m.family], settings.scan_layers, described_to_transformers(maxtext, m), settings
    )
    held = convert.detect_and_extract_checkpoint(nnx.to_pure_dict(weights))
    bias = "params-decoder-moe_layers-DeepSeekMoeBlock_0-MoeBlock_0-gate-bias"
    if bias in held:  # MaxText 0.2.5 stacks its layers on axis 0, and its converter looks for them on axis 1
        held[bias] = held[bias].T
    out: dict[str, np.ndarray] = {}
    for key in convert.validate_and_filter_param_map_keys(maps["param_mapping"], set(held)):
        weight = [held[each] for each in key] if isinstance(key, tuple) else held[key]
        out |= convert.process_maxtext_param(
            key, weight, maps["param_mapping"], maps["hook_fn_mapping"], maps["shape_mapping"], settings
        )
    return out


MODELS = (QWEN3_EVEN, QWEN3_MOE, LLAMA_ROUNDED, DEEPSEEK, GPT_OSS)


@pytest.mark.parametrize("scanned", [True, False], ids=["scanned", "unscanned"])
@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.name)
def test_a_sync_writes_what_maxtexts_converter_writes(
    maxtext: SimpleNamespace, model: Model, scanned: bool, rng: np.random.Generator
) -> None:
    settings = config(maxtext, model, scanned, ici_fsdp_parallelism=2, ici_tensor_parallelism=2)
    on = meshed(settings, {"fsdp": 2, "tensor": 2})

    def fresh(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        return jax.device_put(rng.standard_normal(leaf.shape, np.float32).astype(leaf.dtype), leaf.sharding)

    weights = jax.tree.map(fresh, abstract(maxtext, settings, on))
    trainer = sf.engines.maxtext.trainer(model, on, dtype="float32", scan_layers=scanned)
    check_tree(named(weights), named(trainer.params))
    rollout = sf.engines.hf.rollout(model, mesh((1,), ("x",), 6), dtype="float32")
    plan = sf.register(sf.make_plan(trainer.params, rollout.params, sf.engines.route(trainer, rollout)))
    ours = named(sf.sync(weights, plan))
    theirs = converted(maxtext, model, settings, weights)
    assert set(ours) == set(theirs)
    for name, leaf in ours.items():
        assert theirs[name].shape == leaf.shape, name
        assert np.asarray(leaf).tobytes() == np.ascontiguousarray(theirs[name]).tobytes(), name


@pytest.mark.parametrize(
    "sizes",
    [
        {"fsdp": 2, "fsdp_transpose": 2, "expert": 2},
        {"context": 2, "tensor": 2, "expert": 2},
        {"data": 2, "tensor_sequence": 2, "fsdp": 2},
    ],
    ids=lambda sizes: " ".join(sizes),
)
@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.name)
def test_the_adapter_describes_the_tree_that_maxtext_builds(
    maxtext: SimpleNamespace, model: Model, sizes: dict[str, int]
) -> None:
    for scanned in (True, False):
        settings = config(maxtext, model, scanned, **{f"ici_{axis}_parallelism": n for axis, n in sizes.items()})
        on = meshed(settings, sizes)
        trainer = sf.engines.maxtext.trainer(model, on, dtype="float32", scan_layers=scanned)
        check_tree(named(abstract(maxtext, settings, on)), named(trainer.params))
