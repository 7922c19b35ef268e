"""Sends inside a jitted step, as far as a CPU can tell: what is lowered for CUDA, and what is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import shardfly_jax as sf
from shardfly_jax.executors.stepping import Sender, Step
from shardfly_jax.pallas_kernels import launch_words as lw, transfer
from shardfly_jax.pallas_kernels.transfer import WORKERS
from shardfly_jax.sharding.formats import conversion
from shardfly_jax.sharding.layouts import Layout

SHAPE = (16, 8)
KERNEL = ((conversion("bfloat16", (), "bfloat16"),), 132, 4, WORKERS, 512)


def mesh_of(devices: int) -> Mesh | None:
    return Mesh(np.array(jax.devices()[:devices]), ("x",)) if devices > 1 else None


def sender_on(mesh: Mesh | None, arrays: int) -> Sender:
    names = tuple(f"w{k}" for k in range(arrays))
    devices = 1 if mesh is None else mesh.size
    spec = P("x", None) if mesh else P()
    step = Step(names, (SHAPE,) * arrays, (np.dtype(jnp.bfloat16),) * arrays, mesh, (spec,) * arrays, KERNEL)

    def put(words: int) -> jax.Array:
        x = np.zeros(devices * words, np.int32)
        return jax.device_put(x, NamedSharding(mesh, P("x"))) if mesh else jnp.asarray(x)

    words = lw.launch_size(4, 512)[3]
    return Sender(put(96), put(words), jax.new_ref(put(lw.STATE)), step)


def params_on(mesh: Mesh | None, arrays: int) -> dict[str, jax.Array]:
    x = jnp.ones(SHAPE, jnp.bfloat16)
    x = jax.device_put(x, NamedSharding(mesh, P("x", None))) if mesh else x
    return {f"w{k}": x for k in range(arrays)}


def lowered(step: Any, *args: Any) -> str:
    return jax.jit(step, donate_argnums=0).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("devices", [1, 4])
def test_a_step_keeps_its_launch_though_nobody_uses_a_result(devices: int) -> None:
    def step(params: Any, sender: Sender) -> Any:
        params = jax.tree.map(lambda p: 2 * p, params)
        sf.send(params, sender)
        return params

    mesh = mesh_of(devices)
    text = lowered(step, params_on(mesh, 2), sender_on(mesh, 2))
    assert text.count("custom_call @mosaic_gpu") == 1
    assert "output_operand_aliases" in text  # the state is changed in place


def test_a_launch_stays_in_a_loop_that_does_not_use_its_result() -> None:
    def step(params: Any, sender: Sender) -> Any:
        def body(_: int, params: Any) -> Any:
            return sf.send(jax.tree.map(lambda p: 2 * p, params), sender)

        return jax.lax.fori_loop(0, 3, body, params)

    assert "custom_call @mosaic_gpu" in lowered(step, params_on(None, 2), sender_on(None, 2))


def test_every_phase_is_kept_when_its_report_is_not_used() -> None:
    def launch(table: jax.Array, numbers: jax.Array, state: jax.Ref) -> None:
        transfer.make_kernel((), 1, 4)(table, numbers, state)

    words = [jnp.zeros(n, jnp.int32) for n in (96, lw.launch_size(4, 8)[3])]
    state = jax.new_ref(jnp.zeros(lw.STATE, jnp.int32))
    text = jax.jit(launch).trace(*words, state).lower(lowering_platforms=("cuda",)).as_text()
    assert "custom_call @mosaic_gpu" in text


def test_a_step_with_a_thousand_arrays_lowers() -> None:
    def step(params: Any, sender: Sender) -> Any:
        return sf.send(params, sender)

    sender = sender_on(None, 1000)
    wide = dataclasses.replace(sender.step, kernel=(*KERNEL[:4], 2048))
    sender = dataclasses.replace(sender, step=wide)
    assert "custom_call @mosaic_gpu" in lowered(step, params_on(None, 1000), sender)


def test_params_that_are_not_the_planned_ones_are_refused_while_tracing() -> None:
    sender = sender_on(None, 2)
    with pytest.raises(sf.ParamsMismatch, match="'w1' is missing"):
        sf.send({"w0": jnp.ones(SHAPE, jnp.bfloat16)}, sender)
    with pytest.raises(sf.ParamsMismatch, match=r"'w0' is float32\[16, 8\], but the plan has bfloat16\[16, 8\]"):
        sf.send({"w0": jnp.ones(SHAPE), "w1": jnp.ones(SHAPE, jnp.bfloat16)}, sender)
    with pytest.raises(sf.ParamsMismatch, match="second argument is a dict"):
        sf.send({}, {})


def whole_plan() -> sf.Plan:
    whole = {"w": Layout((4,), "float32", {0: [(0, 4)]})}
    return sf.make_plan(whole, whole)


def test_a_sender_is_had_only_while_an_update_is_under_way() -> None:
    with pytest.raises(sf.NotRegistered):
        _ = whole_plan().sender
    with pytest.raises(sf.NoUpdate, match=r"with sf.receiving\(plan\)"):
        _ = sf.register(whole_plan()).sender


def test_receiving_says_why_a_plan_cannot_send_from_a_step() -> None:
    with (
        pytest.raises(sf.RegistrationError, match="does not know the trainer's shardings"),
        sf.receiving(sf.register(whole_plan())),
    ):
        pass
    w = {"w": jnp.ones(SHAPE)}
    with (
        pytest.raises(sf.RegistrationError, match="some ranks are not on a GPU"),
        sf.receiving(sf.register(sf.make_plan(w, w))),
    ):
        pass
    with pytest.raises(sf.NotRegistered):
        sf.receiving("plan")  # type: ignore[arg-type]


class Launches:
    """Stands for the kernels of a plan: what they would be told, and how they end."""

    def __init__(self, failure: Exception | None = None):
        self.told: list[str] = []
        self.failure = failure
        self.executor = self

    def begin(self) -> str:
        self.told.append("begin")
        return "attempt"

    def sender(self, attempt: str) -> str:
        return f"sender of {attempt}"

    def outcomes(self) -> list[Any]:
        self.told.append("sends have ended")
        return []

    def finish(self, attempt: str, sent: Callable[[], Any]) -> Callable[[], None]:
        self.told.append("finish")

        def wait() -> None:
            sent()
            if self.failure is not None:
                raise self.failure

        return wait


def test_replicas_are_poisoned_from_the_begin_of_an_update_in_a_step_until_its_end() -> None:
    w = {"w": jnp.ones(SHAPE)}
    plan = sf.register(sf.make_plan(w, w))
    sf.sync(w, plan)
    session = plan.registered()
    launches = Launches()
    session.stepping = lambda source: launches  # type: ignore[method-assign]
    with sf.receiving(plan) as update:
        assert plan.sender == "sender of attempt"
        with pytest.raises(sf.Poisoned, match="began and did not finish"):
            sf.params(plan)
        with pytest.raises(sf.ShardflyError, match="inside an update"):
            sf.sync(w, plan)
    assert launches.told == ["begin", "finish", "sends have ended"]
    assert update.params()["w"].shape == SHAPE
    assert dict(plan.version) == {"rollout": 2}
    with pytest.raises(sf.NoUpdate):
        _ = plan.sender


def test_an_update_in_a_step_that_fails_waits_for_its_sends_and_leaves_poison() -> None:
    w = {"w": jnp.ones(SHAPE)}
    plan = sf.register(sf.make_plan(w, w))
    sf.sync(w, plan)
    session = plan.registered()
    launches = Launches()
    session.stepping = lambda source: launches  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError), sf.receiving(plan):
        raise ZeroDivisionError
    assert launches.told == ["begin", "sends have ended"]
    with pytest.raises(sf.Poisoned, match="ZeroDivisionError"):
        sf.params(plan)
    launches.failure = sf.SyncTimeout("nobody sent")
    with pytest.raises(sf.SyncTimeout), sf.receiving(plan) as update:
        pass
    with pytest.raises(sf.Poisoned, match="SyncTimeout"):
        update.params()
    sf.sync(w, plan)
    assert dict(plan.version) == {"rollout": 4}
