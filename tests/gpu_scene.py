"""What the tests of the persistent executor share: random data, small plans, and a small model on GPUs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, SingleDeviceSharding

import shardfly_jax as sf
from shardfly_jax.sharding.formats import np_dtype


def gpus() -> list[jax.Device]:
    return jax.local_devices(backend="gpu")


def raw(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Any bits."""
    size = int(np.prod(shape)) * np_dtype(dtype).itemsize
    return rng.integers(0, 256, size, np.uint8).view(np_dtype(dtype)).reshape(shape)


def numbers(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32).astype(np_dtype(dtype))


def plan_on_one_gpu(arrays: dict[str, np.ndarray], mapping: sf.Mapping, targets: dict[str, Any]) -> tuple[Any, sf.Plan]:
    place = SingleDeviceSharding(gpus()[0])
    params = {name: jax.device_put(x, place) for name, x in arrays.items()}
    target = {name: jax.ShapeDtypeStruct(shape, dtype, sharding=place) for name, (shape, dtype) in targets.items()}
    plan = sf.make_plan(params, target, mapping, allow_cast="*")
    return params, sf.register(plan, executor="persistent")


def random_view(rng: np.random.Generator, arrays: dict[str, np.ndarray], name: str) -> tuple[Any, np.ndarray]:
    """An expression over one source, with its value: a slice at any offsets, then its axes in any order."""
    x = arrays[name]
    items = []
    for n in x.shape:
        lo = int(rng.integers(0, min(n, 40)))
        hi = int(rng.integers(max(lo + 1, n - 40), n + 1))
        items.append(slice(lo, hi))
    letters = "abc"[: x.ndim]
    order = "".join(rng.permutation(list(letters)))
    expr = sf.src(name)[tuple(items)].rearrange(f"{' '.join(letters)} -> {' '.join(order)}")
    return expr, x[tuple(items)].transpose([letters.index(letter) for letter in order])


MODEL = dataclasses.replace(
    sf.engines.model("Qwen3-0.6B"), layers=2, hidden=256, heads=8, kv_heads=4, head_dim=32, width=512, vocab=1024
)


def small_model(
    trainers: Mesh, placement: Callable[[int], jax.Device], rollout: tuple[int, int] = (2, 2)
) -> tuple[Any, sf.Plan]:
    trainer = sf.engines.tunix.trainer(MODEL, trainers, dtype="float32")
    target = sf.engines.vllm.rollout(MODEL, AbstractMesh(rollout, ("replica", "tp")))
    plan = sf.make_plan(trainer.params, target.params, sf.engines.route(trainer, target), allow_cast="*")
    return trainer.params, sf.register(plan, placement=placement, executor="persistent")


def one_gpu_mesh() -> Mesh:
    return Mesh(np.array(gpus()[:1]).reshape(1, 1), ("fsdp", "tp"))


def fresh_params(shapes: Any, rng: np.random.Generator) -> Any:
    return jax.tree.map(lambda s: jax.device_put(numbers(rng, s.shape, "float32"), s.sharding), shapes)


def executor_of(plan: sf.Plan) -> Any:
    return plan.registered().executor


def contents(plan: sf.Plan) -> dict[Any, np.ndarray]:
    return {key: np.asarray(jnp.copy(shard.array)) for key, shard in plan.registered().buffers.items()}
