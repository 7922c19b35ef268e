"""The persistent executor inside jitted steps on GPUs, and with ranks on several of them."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_same_bits
from gpu_scene import executor_of, fresh_params, gpus, one_gpu_mesh, small_model
from jax.sharding import Mesh, SingleDeviceSharding

import shardfly_jax as sf
from shardfly_jax.sharding.formats import np_dtype

pytestmark = pytest.mark.gpu


@pytest.fixture
def model() -> tuple[Any, sf.Plan]:
    return small_model(one_gpu_mesh(), lambda rank: gpus()[0])


def trained(traces: list[int]) -> Callable[..., Any]:
    """A jitted step that donates, ends with a send, and notes when it is traced."""

    def step(params: Any, moment: Any, x: jax.Array, sender: Any) -> tuple[Any, Any]:
        traces.append(1)
        moment = jax.tree.map(lambda m, p: 0.9 * m + 0.01 * p * x, moment, params)
        params = jax.tree.map(jnp.subtract, params, moment)
        return sf.send(params, sender), moment

    return jax.jit(step, donate_argnums=(0, 1))


def check_steps(shapes: Any, plan: sf.Plan, steps: int = 4) -> None:
    params = fresh_params(shapes, np.random.default_rng())
    moment = jax.tree.map(jnp.zeros_like, params)
    traces: list[int] = []
    step = trained(traces)
    pointers = None
    version = 0
    for k in range(steps):
        with sf.receiving(plan) as update:
            params, moment = step(params, moment, jnp.float32(k + 1), plan.sender)
        assert sf.verify(params, plan) == plan.target_nbytes
        now = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(update.params())]
        assert pointers in (None, now)
        pointers = now
        assert k == 0 or plan.version["rollout/0"] == version + 1  # a failed attempt has left a gap before the first
        version = plan.version["rollout/0"]
    assert len(traces) == 1
    sf.sync(params, plan)  # both ways may take turns
    assert sf.verify(params, plan) == plan.target_nbytes


def test_a_jitted_step_that_donates_sends_its_new_params(model: tuple[Any, sf.Plan]) -> None:
    check_steps(*model)


def test_a_step_that_does_not_send_times_out_and_the_next_one_heals(model: tuple[Any, sf.Plan]) -> None:
    shapes, plan = model
    params = fresh_params(shapes, np.random.default_rng())
    sf.sync(params, plan)
    executor_of(plan).deadline_ms = 200
    with pytest.raises(sf.SyncTimeout, match="waited for send of ranks 0, "), sf.receiving(plan):
        pass
    with pytest.raises(sf.Poisoned):
        sf.params(plan)
    executor_of(plan).deadline_ms = 60_000
    check_steps(shapes, plan, 2)


def test_an_error_in_the_step_leaves_the_replicas_poisoned_until_the_next_update(model: tuple[Any, sf.Plan]) -> None:
    shapes, plan = model
    with pytest.raises(ZeroDivisionError), sf.receiving(plan):
        raise ZeroDivisionError
    with pytest.raises(sf.Poisoned, match="ZeroDivisionError"):
        sf.params(plan)
    check_steps(shapes, plan, 2)


def test_a_flax_module_trains_and_sends_inside_nnx_jit() -> None:
    from flax import nnx

    gpu, rng = gpus()[0], np.random.default_rng()
    place = SingleDeviceSharding(gpu)
    with jax.default_device(gpu):
        layer = nnx.Linear(64, 128, rngs=nnx.Rngs(secrets.randbits(31)))
    target = {"weight": jax.ShapeDtypeStruct((128, 64), jnp.bfloat16, sharding=place)}
    mapping = sf.Mapping({"weight": sf.src("kernel").rearrange("a b -> b a")})
    plan = sf.make_plan(layer, target, mapping, allow_cast="*", unused="bias")
    plan = sf.register(plan, executor="persistent")

    @nnx.jit
    def step(layer: nnx.Linear, x: jax.Array, sender: Any) -> jax.Array:
        loss, grads = nnx.value_and_grad(lambda layer: (layer(x) ** 2).mean())(layer)
        nnx.update(layer, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(layer, nnx.Param), grads))
        sf.send(layer, sender)
        return loss

    x = jax.device_put(rng.standard_normal((8, 64), np.float32), gpu)
    for _ in range(3):
        with sf.receiving(plan) as update:
            step(layer, x, plan.sender)
        want = np.asarray(layer.kernel[...]).T.astype(np_dtype("bfloat16"))
        assert_same_bits(update.params()["weight"], np.ascontiguousarray(want))


@pytest.mark.multigpu
class TestSeveralGpus:
    """Ranks on several GPUs of one process."""

    def test_replicas_on_other_gpus_get_every_byte(self) -> None:
        devices = gpus()
        shapes, plan = small_model(one_gpu_mesh(), lambda rank: devices[(rank + 1) % len(devices)], (4, 2))
        rng = np.random.default_rng()
        for _ in range(20):
            params = fresh_params(shapes, rng)
            sf.sync(params, plan)
            assert sf.verify(params, plan) == plan.target_nbytes

    def test_a_sharded_trainer_reaches_replicas_on_the_same_gpus(self) -> None:
        devices = gpus()[:2]
        mesh = Mesh(np.array(devices).reshape(2, 1), ("fsdp", "tp"))
        shapes, plan = small_model(mesh, lambda rank: devices[rank % 2], (3, 2))
        for _ in range(20):
            params = fresh_params(shapes, np.random.default_rng())
            sf.sync(params, plan)
            assert sf.verify(params, plan) == plan.target_nbytes

    def test_a_jitted_step_on_a_mesh_sends_from_every_gpu(self) -> None:
        devices = gpus()[:2]
        mesh = Mesh(np.array(devices).reshape(2, 1), ("fsdp", "tp"))
        check_steps(*small_model(mesh, lambda rank: devices[rank % 2], (2, 2)))

    def test_a_gpu_that_never_sends_is_named_on_the_gpu_that_waits(self) -> None:
        devices = gpus()[:2]
        shapes, plan = small_model(one_gpu_mesh(), lambda rank: devices[1], (2, 1))
        params = fresh_params(shapes, np.random.default_rng())
        sf.sync(params, plan)
        executor = executor_of(plan)
        executor.deadline_ms, executor._launches = 300, executor.launches("finish")
        with pytest.raises(sf.SyncTimeout, match=r"on cuda:1 waited for (send of rank 0 on cuda:0|what rank 0 sends)"):
            sf.sync(params, plan)
