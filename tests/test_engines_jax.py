"""A rollout in JAX with shardings and names of its own, fed by any trainer."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from checkpoints import QWEN3, QWEN3_MOE, checkpoint, into_tunix
from engine_checks import named, placed
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import shardfly_jax as sf
from shardfly_jax.engines.models import Model


def meshes() -> tuple[Mesh, Mesh]:
    devices = np.array(jax.devices()[:8])
    return Mesh(devices[:4].reshape(2, 2), ("fsdp", "tp")), Mesh(devices[4:], ("x",))


@pytest.mark.parametrize("model", [QWEN3, QWEN3_MOE], ids=lambda m: m.name)
def test_hugging_faces_names_are_enough_for_any_sharding(model: Model, rng: np.random.Generator) -> None:
    here, there = meshes()
    ck = checkpoint(model, rng)
    target = {
        name: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(there, P("x") if x.shape[0] % 4 == 0 else P())
        )
        for name, x in ck.items()
    }
    trainer = sf.engines.tunix.trainer(model, here, dtype="float32")
    rollout = sf.engines.jax.rollout(model, target)
    plan = sf.register(sf.make_plan(trainer.params, rollout.params, sf.engines.route(trainer, rollout), allow_cast="*"))
    out = named(sf.sync(placed(trainer, into_tunix(model, ck)), plan))
    for name, x in ck.items():
        assert np.asarray(out[name]).tobytes() == np.ascontiguousarray(x).tobytes(), name


def test_a_rollout_may_have_names_and_shapes_of_its_own(rng: np.random.Generator) -> None:
    here, there = meshes()
    ck = checkpoint(QWEN3, rng)
    m = QWEN3
    place = NamedSharding(there, P(None, "x"))
    target: dict[str, Any] = {
        f"block_{i}": {"down": jax.ShapeDtypeStruct((m.width, m.hidden), "bfloat16", sharding=place)}
        for i in range(m.layers)
    }
    mapping = sf.Mapping({"block_{i}.down": sf.src("model.layers.{i}.mlp.down_proj.weight").rearrange("o f -> f o")})
    trainer = sf.engines.tunix.trainer(m, here, dtype="float32")
    rollout = sf.engines.jax.rollout(m, target, mapping)
    route = sf.engines.route(trainer, rollout)
    plan = sf.register(sf.make_plan(trainer.params, target, route, allow_cast="*", unused="*"))
    out = sf.sync(placed(trainer, into_tunix(m, ck)), plan)
    for i in range(m.layers):
        want = ck[f"model.layers.{i}.mlp.down_proj.weight"].T.astype("bfloat16")
        assert np.asarray(out[f"block_{i}"]["down"]).tobytes() == np.ascontiguousarray(want).tobytes()


def test_what_cannot_be_a_rollout_is_refused() -> None:
    with pytest.raises(sf.PlanError, match=r"mapping is a dict, but an sf\.Mapping or None is needed"):
        sf.engines.jax.rollout(QWEN3, {"w": jax.numpy.zeros(3)}, {"w": "w"})  # type: ignore[arg-type]
    with pytest.raises(sf.PlanError):
        sf.engines.jax.rollout(QWEN3, {"w": np.zeros(3)})
    with pytest.raises(sf.PlanError):
        sf.engines.jax.rollout("Qwen3-0.6B", {"w": jax.numpy.zeros(3)})  # type: ignore[arg-type]
    assert sf.engines.jax.rollout(dataclasses.replace(QWEN3), {"w": jax.numpy.zeros(3)}).role == "rollout"
