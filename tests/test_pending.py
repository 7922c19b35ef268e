"""Updates in the background: what their handle says, what is served meanwhile, how far behind replicas are."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from checks import assert_holds, fresh, like, mesh, poison_buffers, registered_bytes

import shardfly_jax as sf
from shardfly_jax import binding, session, update
from shardfly_jax.executors.xla import XlaExecutor

PATIENCE_SECS = 60.0
BEHIND = {"rollout/0": 1, "rollout/1": 1}
LEVEL = {"rollout/0": 0, "rollout/1": 0}


class Gate:
    """Something that waits until it is opened, and says when it is waited for."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def wait(self, *_: Any) -> None:
        self.reached.set()
        assert self.opened.wait(PATIENCE_SECS)

    def before_params(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As if the params were being computed until the gate is open."""
        real = update.ready_shards

        def ready_shards(*args: Any, **options: Any) -> Any:
            self.wait()
            return real(*args, **options)

        monkeypatch.setattr(update, "ready_shards", ready_shards)


class Scene:
    """A trainer on one device, two replicas of two ranks, and a first update."""

    def __init__(self, rng: np.random.Generator):
        self.rng = rng
        self.rollout = mesh((2, 2), "dp tp", [4, 5, 6, 7])
        target = {name: like((8, 8), "float32", self.rollout, None, "tp") for name in "ab"}
        params, self.first = self.params()
        self.plan = sf.register(sf.make_plan(params, target))
        sf.sync(params, self.plan)

    def params(self) -> tuple[dict[str, jax.Array], dict[str, np.ndarray]]:
        values = {name: fresh(self.rng, 8, 8) for name in "ab"}
        return {name: jax.device_put(np.array(x), jax.devices()[0]) for name, x in values.items()}, values

    def check(self, out: dict[str, jax.Array], values: dict[str, np.ndarray]) -> None:
        for name, x in values.items():
            assert_holds(out[name], x, name)


@pytest.fixture
def scene(rng: np.random.Generator) -> Scene:
    return Scene(rng)


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.opened.set()


def test_an_update_waits_for_its_params_in_the_background_while_the_old_ones_are_served(
    scene: Scene, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    params, values = scene.params()
    gate.before_params(monkeypatch)
    assert (scene.plan.version, scene.plan.staleness) == (BEHIND, LEVEL)
    handle = sf.sync(params, scene.plan, wait=False)
    assert not handle.done()
    assert (scene.plan.version, scene.plan.staleness) == (BEHIND, BEHIND)
    scene.check(sf.params(scene.plan), scene.first)
    with pytest.raises(sf.StillPending, match=r"no outcome after 0\.01 s"):
        handle.result(timeout=0.01)
    with pytest.raises(TimeoutError):
        handle.result(timeout=0)
    gate.opened.set()
    scene.check(handle.result(PATIENCE_SECS), values)
    assert handle.done()
    assert (scene.plan.version, scene.plan.staleness) == ({"rollout/0": 2, "rollout/1": 2}, LEVEL)


def test_sync_returns_while_a_train_step_still_computes_the_params(scene: Scene) -> None:
    params, values = scene.params()
    work = jax.device_put(np.full((600, 600), 1e-3, np.float32), jax.devices()[0])
    step = jax.jit(lambda x, w: x + 0 * jax.lax.fori_loop(0, 300, lambda _, y: y @ w, w)[0, 0])
    params["b"] = step(params["b"], work)
    was_computing = not params["b"].is_ready()
    handle = sf.sync(params, scene.plan, wait=False)
    assert was_computing
    assert not params["b"].is_ready()
    assert not handle.done()
    scene.check(handle.result(PATIENCE_SECS), values)


def test_every_byte_is_right_and_at_the_same_address_update_after_update(scene: Scene) -> None:
    where = {key: shard.address for key, shard in scene.plan.registered().buffers.items()}
    for _ in range(5):
        poison_buffers(scene.plan)
        params, values = scene.params()
        handle = sf.sync(params, scene.plan, wait=False)
        scene.check(handle.result(PATIENCE_SECS), values)
        scene.check(handle.result(), values)
        assert sf.verify(params, scene.plan) == scene.plan.target_nbytes
    assert where == {key: shard.address for key, shard in scene.plan.registered().buffers.items()}


def test_nothing_else_begins_while_an_update_is_pending(scene: Scene, gate: Gate) -> None:
    params, values = scene.params()
    others, _ = scene.params()
    handle = sf.sync(params, scene.plan, wait=False, progress=gate.wait)
    assert gate.reached.wait(PATIENCE_SECS)
    for call in (
        lambda: sf.sync(others, scene.plan),
        lambda: sf.sync(others, scene.plan, wait=False),
    ):
        with pytest.raises(sf.UpdateRefused, match=r"pending.*nothing was written.*result\(\)"):
            call()
    with pytest.raises(sf.Poisoned, match="began and did not finish"):
        sf.params(scene.plan)
    gate.opened.set()
    scene.check(handle.result(PATIENCE_SECS), values)
    scene.check(sf.sync(others, scene.plan), {name: np.asarray(x) for name, x in others.items()})


def test_wrong_arguments_are_refused_at_once_and_leave_nothing_pending(scene: Scene) -> None:
    before = registered_bytes(scene.plan)
    params, values = scene.params()
    with pytest.raises(sf.ParamsMismatch, match="'b' is missing"):
        sf.sync({"a": params["a"]}, scene.plan, wait=False)
    with pytest.raises(sf.ParamsMismatch, match="wait_secs is 0"):
        sf.sync(params, scene.plan, wait=False, wait_secs=0)
    assert registered_bytes(scene.plan) == before
    assert scene.plan.staleness == LEVEL
    scene.check(sf.sync(params, scene.plan, wait=False).result(PATIENCE_SECS), values)


def test_what_goes_wrong_comes_from_the_result_and_the_next_update_heals_it(scene: Scene) -> None:
    class Broken(Exception):
        pass

    def progress(_: int) -> None:
        raise Broken("a callback")

    doomed, _ = scene.params()
    alive = [weakref.ref(x) for x in doomed.values()]
    handle = sf.sync(doomed, scene.plan, wait=False, progress=progress)
    for _ in range(2):
        with pytest.raises(Broken, match="a callback"):
            handle.result(PATIENCE_SECS)
    assert handle.done()
    del doomed
    gc.collect()
    assert [ref() for ref in alive] == [None, None], "an error keeps no params"
    params, values = scene.params()
    assert (scene.plan.version, scene.plan.staleness) == (BEHIND, BEHIND)
    with pytest.raises(sf.Poisoned, match="Broken"):
        sf.params(scene.plan)
    handle = sf.sync(params, scene.plan, wait=False)
    scene.check(handle.result(PATIENCE_SECS), values)
    assert (scene.plan.version, scene.plan.staleness) == ({"rollout/0": 3, "rollout/1": 3}, LEVEL)
    with pytest.raises(Broken):
        sf.sync(params, scene.plan, progress=progress)
    with pytest.raises(sf.Poisoned):  # which another update has spoilt since
        handle.result()


def test_a_callback_that_syncs_is_refused_in_the_background_too(scene: Scene) -> None:
    params, values = scene.params()
    said: list[str] = []

    def progress(_: int) -> None:
        try:
            sf.sync(params, scene.plan)
        except sf.ShardflyError as error:
            said.append(str(error))

    scene.check(sf.sync(params, scene.plan, wait=False, progress=progress).result(PATIENCE_SECS), values)
    assert said
    assert all("inside an update" in text for text in said)


# Params


def test_the_params_live_until_the_update_is_done_and_no_longer(scene: Scene, gate: Gate) -> None:
    params, values = scene.params()
    alive = [weakref.ref(x) for x in params.values()]
    handle = sf.sync(params, scene.plan, wait=False, progress=gate.wait)
    assert gate.reached.wait(PATIENCE_SECS)
    del params
    gc.collect()
    assert all(ref() is not None for ref in alive)
    gate.opened.set()
    scene.check(handle.result(PATIENCE_SECS), values)
    gc.collect()
    assert [ref() for ref in alive] == [None, None]


DONATE = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_params_on_cpus_that_are_donated_while_they_are_read_arrive_all_the_same(scene: Scene, gate: Gate) -> None:
    params, values = scene.params()
    poison_buffers(scene.plan)
    handle = sf.sync(params, scene.plan, wait=False, progress=gate.wait)
    assert gate.reached.wait(PATIENCE_SECS)
    spoilt = [DONATE(x) for x in params.values()]
    jax.block_until_ready(spoilt)
    gate.opened.set()
    scene.check(handle.result(PATIENCE_SECS), values)


def test_params_that_are_donated_before_they_are_read_fail_the_update_and_nothing_is_written(
    scene: Scene, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    params, _ = scene.params()
    gate.before_params(monkeypatch)
    handle = sf.sync(params, scene.plan, wait=False)
    DONATE(params["a"]).block_until_ready()
    gate.opened.set()
    with pytest.raises(sf.ParamsMismatch, match=r"'a' was deleted or donated.*before it is done"):
        handle.result(PATIENCE_SECS)
    assert scene.plan.staleness == LEVEL
    scene.check(sf.params(scene.plan), scene.first)


@pytest.mark.parametrize("shows", [True, False], ids=["late", "never"])
def test_a_donation_that_is_half_done_is_told_as_one(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, shows: bool
) -> None:
    """JAX gives the buffers away before any array says that it is deleted."""

    def deleted(arrays: Any) -> None:
        if shows:
            threading.Timer(0.05, params["a"].delete).start()
        raise RuntimeError("INVALID_ARGUMENT: Clone() called on deleted or donated buffer")

    params, _ = scene.params()
    monkeypatch.setattr(binding, "hold", deleted)
    monkeypatch.setattr(binding, "DONATION_SECS", PATIENCE_SECS if shows else 0.1)
    handle = sf.sync(params, scene.plan, wait=False)
    with pytest.raises(sf.ParamsMismatch, match=f"{"'a'" if shows else 'an array'} was deleted or donated"):
        handle.result(PATIENCE_SECS)
    monkeypatch.undo()
    scene.check(sf.params(scene.plan), scene.first)


def test_params_whose_computation_fails_fail_the_update_and_nothing_is_written(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failed(_: Any) -> None:
        raise RuntimeError("a train step ran out of memory")

    params, _ = scene.params()
    monkeypatch.setattr(binding, "wait_for", failed)
    handle = sf.sync(params, scene.plan, wait=False)
    with pytest.raises(RuntimeError, match="ran out of memory"):
        handle.result(PATIENCE_SECS)
    monkeypatch.undo()
    scene.check(sf.params(scene.plan), scene.first)


def through_xla(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> sf.Plan:
    """The scene's plan, as it is executed on accelerators."""
    monkeypatch.setattr(session, "make_executor", lambda plan, buffers, *_: XlaExecutor(plan, buffers))
    place = jax.sharding.NamedSharding(scene.rollout, jax.sharding.PartitionSpec(None, "tp"))
    owner = {name: jax.jit(lambda: jax.numpy.zeros((8, 8)), out_shardings=place)() for name in "ab"}  # XLA's memory
    return sf.register(scene.plan, owner)


def test_the_portable_executor_of_accelerators_runs_in_the_background(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = through_xla(scene, monkeypatch)
    for _ in range(3):
        params, values = scene.params()
        scene.check(sf.sync(params, plan, wait=False).result(PATIENCE_SECS), values)


def test_params_that_an_accelerator_loses_while_they_are_read_are_never_served(
    scene: Scene, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = through_xla(scene, monkeypatch)
    params, values = scene.params()
    sf.sync(params, plan)
    lost, _ = scene.params()
    handle = sf.sync(lost, plan, wait=False, progress=gate.wait)
    assert gate.reached.wait(PATIENCE_SECS)
    for x in lost.values():
        x.delete()
    gate.opened.set()
    with pytest.raises((sf.ParamsMismatch, RuntimeError)):
        handle.result(PATIENCE_SECS)
    with pytest.raises(sf.Poisoned):
        sf.params(plan)
    scene.check(sf.sync(params, plan), values)


PROGRAM = """
import jax, numpy as np, threading
import shardfly_jax as sf
x = {"w": jax.device_put(np.ones((64, 64), np.float32))}
plan = sf.register(sf.make_plan(x, x))
begun = threading.Event()
def progress(_):
    begun.set()
    %s
handle = sf.sync(x, plan, wait=False, progress=progress)
assert begun.wait(60)
print("leaves", flush=True)
"""


@pytest.mark.parametrize("then", ["pass", "threading.Event().wait(0.2)"])
def test_a_process_may_end_while_its_update_is_pending(then: str) -> None:
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM % then], capture_output=True, text=True, timeout=120, env=env, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "leaves\n", "")
