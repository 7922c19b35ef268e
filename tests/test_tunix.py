"""Against tunix itself: its model classes train, `sf.sync` writes Hugging Face's names, its own loader reads them back.

Nothing here says what a parameter is called or how it lies: tunix' classes, shardings and safetensors loader do.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import LLAMA, QWEN3, QWEN3_MOE
from engine_checks import mesh, named
from flax import nnx
from forwards import EPS, THETA, TOP_K, tunix_logits
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import shardfly_jax as sf
from shardfly_jax.engines.models import Model

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:tunix", "ignore::DeprecationWarning:flax")


@pytest.fixture(scope="module")
def tunix() -> Iterator[SimpleNamespace]:
    """tunix' modules. Importing them warns of old names in JAX, and sets a flag of flax that other tests rely on."""
    pytest.importorskip("safetensors.numpy", reason="needs safetensors (the proof extra)")
    flag = flax.config.flax_always_shard_variable
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("tunix", reason="needs google-tunix (the proof extra)")
        from tunix.models.llama3 import model as llama3, params as llama3_params
        from tunix.models.qwen3 import model as qwen3, params as qwen3_params
    yield SimpleNamespace(llama3=llama3, llama3_params=llama3_params, qwen3=qwen3, qwen3_params=qwen3_params)
    flax.config.update("flax_always_shard_variable", flag)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A family of tunix': its class, its config for a model of ours, and its loader."""

    build: Callable[..., nnx.Module]
    config: Any
    load: Callable[..., nnx.Module]


def family(tunix: SimpleNamespace, m: Model, dtype: Any) -> Family:
    sizes: dict[str, Any] = {
        "num_layers": m.layers, "vocab_size": m.vocab, "embed_dim": m.hidden, "num_heads": m.heads,
        "num_kv_heads": m.kv_heads, "head_dim": m.head_dim, "rope_theta": int(THETA), "norm_eps": EPS,
    }  # fmt: skip
    if m.family == "llama3":
        config = tunix.llama3.ModelConfig(**sizes, hidden_dim=m.width, weight_tying=m.tied)
        load = tunix.llama3_params.create_model_from_safe_tensors
        return Family(build=tunix.llama3.Llama3, config=config, load=load)
    experts: dict[str, Any] = {"hidden_dim": m.width}
    if m.experts is not None:
        experts = {"hidden_dim": m.experts.width, "num_experts": m.experts.count, "num_experts_per_tok": TOP_K}
    config = tunix.qwen3.ModelConfig(**sizes, **experts, use_tied_embedding=m.tied, dtype=dtype, param_dtype=dtype)
    return Family(build=tunix.qwen3.Qwen3, config=config, load=tunix.qwen3_params.create_model_from_safe_tensors)


def built(one: Family, on: Mesh, rng: np.random.Generator) -> nnx.Module:
    """tunix' model on the shardings of its own config, every parameter random (its MLPs would start as zeros)."""
    with jax.set_mesh(on):
        graph, state = nnx.split(nnx.eval_shape(lambda: one.build(one.config, rngs=nnx.Rngs(params=0))))

    def fresh(leaf: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.Array:
        values = rng.standard_normal(leaf.shape, np.float32).astype(leaf.dtype) / 4
        # a copy: on CPU devices all replicas may otherwise share NumPy's memory, which no rollout may
        return jnp.array(jax.device_put(values, sharding), copy=True)

    return nnx.merge(graph, jax.tree.map(fresh, state, nnx.get_named_sharding(state, on)))


class Forward:
    """A causal pass over whole prompts by tunix' own forward, compiled once for all models of a config and mesh.

    Not `nnx.jit`, which hands all parameters back as new arrays, so that a registered rollout's would be stale.
    """

    def __init__(self, model: nnx.Module, tokens: np.ndarray):
        graph, state = nnx.split(model)
        batch, length = tokens.shape
        positions = jnp.broadcast_to(jnp.arange(length), (batch, length))
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool)), (batch, length, length))
        program = jax.jit(lambda state: nnx.merge(graph, state)(tokens, positions, None, mask)[0])
        self.program = program.lower(state).compile()

    def __call__(self, model: nnx.Module) -> np.ndarray:
        return np.asarray(self.program(nnx.state(model)))


CASES = [(QWEN3, "float32"), (QWEN3, "bfloat16"), (QWEN3_MOE, "float32"), (QWEN3_MOE, "bfloat16"), (LLAMA, "float32")]


@pytest.mark.parametrize(("model", "dtype"), CASES, ids=lambda x: getattr(x, "name", x))
def test_tunix_loads_a_synced_checkpoint_as_the_model_that_was_trained(
    tunix: SimpleNamespace, model: Model, dtype: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    from safetensors.numpy import save_file

    one, on = family(tunix, model, jnp.dtype(dtype)), mesh((4, 2), ("fsdp", "tp"))
    trainer = sf.engines.tunix.trainer(model, on, dtype=dtype)
    rollout = sf.engines.hf.rollout(
        model, mesh((2,), ("x",), 3), dtype=dtype, specs={"*.o_proj.weight": P(None, "x"), "*.weight": P()}
    )
    plan = sf.register(sf.make_plan(trainer.params, rollout.params, sf.engines.route(trainer, rollout)))
    logits = Forward(built(one, on, rng), rng.integers(model.vocab, size=(2, 7)))
    seen = []
    for step in range(2):  # the second update must replace all of the first
        trained = built(one, on, rng)
        out = named(sf.sync(nnx.state(trained, nnx.Param), plan))
        folder = tmp_path / str(step)
        folder.mkdir()
        save_file({name: np.array(leaf) for name, leaf in out.items()}, folder / "model.safetensors")
        loaded = one.load(str(folder), one.config, on, jnp.dtype(dtype))
        ours, theirs = (named(nnx.state(each, nnx.Param)) for each in (trained, loaded))
        assert set(ours) == set(theirs)
        for name, leaf in ours.items():
            assert leaf.sharding == theirs[name].sharding, name
            assert np.asarray(leaf).tobytes() == np.asarray(theirs[name]).tobytes(), name
        seen.append(logits(loaded))
        assert np.isfinite(seen[-1].astype(np.float32)).all()
        # one program, the same bytes on the same devices: the same bits
        assert logits(trained).tobytes() == seen[-1].tobytes()
    assert not np.array_equal(*seen)


@pytest.mark.parametrize("model", [QWEN3, QWEN3_MOE, LLAMA], ids=lambda m: m.name)
def test_the_adapter_describes_the_tree_that_tunix_builds(
    tunix: SimpleNamespace, model: Model, rng: np.random.Generator
) -> None:
    on = mesh((4, 2), ("fsdp", "tp"))
    real = named(nnx.state(built(family(tunix, model, jnp.dtype("float32")), on, rng), nnx.Param))
    described = named(sf.engines.tunix.trainer(model, on, dtype="float32").params)
    assert {name: (leaf.shape, leaf.dtype) for name, leaf in described.items()} == {
        name: (leaf.shape, leaf.dtype) for name, leaf in real.items()
    }
    for name, leaf in described.items():
        assert leaf.sharding.is_equivalent_to(real[name].sharding, leaf.ndim), name


@pytest.mark.parametrize("model", [QWEN3, QWEN3_MOE, LLAMA], ids=lambda m: m.name)
def test_a_tunix_model_on_a_mesh_of_its_own_is_a_rollout(
    tunix: SimpleNamespace, model: Model, rng: np.random.Generator
) -> None:
    """The trainer's own tree on another mesh needs no mapping; the rollout's logits become the trainer's."""
    one = family(tunix, model, jnp.dtype("float32"))
    trained = built(one, mesh((2, 2), ("fsdp", "tp")), rng)
    served = built(one, mesh((2, 2), ("tp", "fsdp"), 4), rng)
    plan = sf.register(sf.make_plan(*(nnx.state(each, nnx.Param) for each in (trained, served))), served)
    tokens = rng.integers(model.vocab, size=(2, 7))
    want, logits = Forward(trained, tokens)(trained), Forward(served, tokens)
    before = logits(served)
    nnx.update(served, sf.sync(nnx.state(trained, nnx.Param), plan))
    # float32 matmuls over another order of devices: XLA adds in another order
    np.testing.assert_allclose(logits(served), want, rtol=1e-3, atol=1e-4)
    assert not np.allclose(before, want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("model", [QWEN3, QWEN3_MOE, LLAMA], ids=lambda m: m.name)
def test_the_forward_that_other_tests_use_is_tunix(
    tunix: SimpleNamespace, model: Model, rng: np.random.Generator
) -> None:
    trained = built(family(tunix, model, jnp.dtype("float32")), mesh((2, 2), ("fsdp", "tp")), rng)
    tokens = rng.integers(model.vocab, size=(2, 7))
    have = jax.jit(lambda p, tokens: tunix_logits(model, p, tokens))(named(nnx.state(trained, nnx.Param)), tokens)
    # the same sums in float32, in another order
    np.testing.assert_allclose(np.asarray(have), Forward(trained, tokens)(trained), rtol=1e-3, atol=1e-4)
