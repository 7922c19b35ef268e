"""Binding a plan to buffers: who may own them, which are refused, and what stays untouched."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import adoptable, assert_holds, fresh, like, memory, mesh, pointers, poison_buffers, put
from jax.sharding import NamedSharding, PartitionSpec as P

import shardfly_jax as sf


class Scene:
    """Two trainers, two rollouts, the plan between them, and buffers for it."""

    def __init__(self, rng: np.random.Generator):
        self.rng = rng
        self.trainer, self.rollout = mesh((2,), "x"), mesh((2,), "y", [2, 3])
        self.values = {"a": fresh(rng, 4, 6), "b": fresh(rng, 4)}
        self.params = {"a": put(self.values["a"], self.trainer, "x"), "b": put(self.values["b"], self.trainer)}
        self.target = {"a": like((4, 6), "float32", self.rollout, None, "y"), "b": like((4,), "float32", self.rollout)}
        self.plan = sf.make_plan(self.params, self.target)

    def owner(self) -> dict[str, Any]:
        return {"a": put(fresh(self.rng, 4, 6), self.rollout, None, "y"), "b": put(fresh(self.rng, 4), self.rollout)}

    def check(self, plan: sf.Plan) -> Any:
        poison_buffers(plan)
        out = sf.sync(self.params, plan)
        for name, x in self.values.items():
            assert_holds(out[name], x, name)
        return out


@pytest.fixture
def scene(rng: np.random.Generator) -> Scene:
    return Scene(rng)


def refused(plan: sf.Plan, owner: Any, *words: str, **options: Any) -> None:
    """Registration raises an error that contains all of the words, and writes nothing."""
    before = memory({k: v for k, v in owner.items() if isinstance(v, jax.Array)}) if isinstance(owner, dict) else {}
    with pytest.raises(sf.RegistrationError) as caught:
        sf.register(plan, owner, **options)
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"
    if before:
        assert memory({k: v for k, v in owner.items() if isinstance(v, jax.Array)}) == before


# Owners


def test_buffers_are_allocated_on_the_planned_devices_and_aligned(scene: Scene) -> None:
    plan = sf.register(scene.plan)
    out = scene.check(plan)
    for name, leaf in out.items():
        assert leaf.sharding == scene.target[name].sharding
        for shard in leaf.addressable_shards:
            assert shard.data.unsafe_buffer_pointer() % 256 == 0


def test_an_owner_keeps_its_own_buffers(scene: Scene) -> None:
    owner = scene.owner()
    where, before = pointers(owner), memory(owner)
    plan = sf.register(scene.plan, owner)
    assert memory(owner) == before
    assert pointers(sf.params(plan)) == where
    assert pointers(scene.check(plan)) == where


def test_registration_waits_for_what_fills_the_buffers(scene: Scene) -> None:
    """A copy from the host that ends after the first update has begun would undo what that writes."""
    owner = scene.owner()
    waited: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "block_until_ready", lambda tree: waited.extend(jax.tree.leaves(tree)) or tree)
        plan = sf.register(scene.plan, owner)
    assert {x.unsafe_buffer_pointer() for x in waited} >= set(pointers(owner).values())
    scene.check(plan)


def test_an_owner_may_be_a_function_that_is_asked_before_every_update(scene: Scene) -> None:
    held, asked = {"params": scene.owner()}, []

    def owner() -> dict[str, jax.Array]:
        asked.append(True)
        return held["params"]

    plan = sf.register(scene.plan, owner)
    for _ in range(3):  # an engine that stores what it is given
        count = len(asked)
        held["params"] = scene.check(plan)
        assert len(asked) > count
    old = held["params"]
    held["params"] = jax.tree.map(jnp.copy, old)
    with pytest.raises(sf.StaleBuffer, match="register again"):
        sf.sync(scene.params, plan)
    held["params"] = old
    scene.check(plan)


def test_kept_targets_are_never_touched(scene: Scene) -> None:
    owner = scene.owner() | {"cache": put(fresh(scene.rng, 8), scene.rollout), "step": put(np.int32(3), scene.rollout)}
    target = scene.target | {name: owner[name] for name in ("cache", "step")}
    plan = sf.register(sf.make_plan(scene.params, target, keep=("cache", "step")), owner)
    before = memory({"cache": owner["cache"]})
    out = scene.check(plan)
    assert memory({"cache": out["cache"]}) == before == memory({"cache": owner["cache"]})
    assert out["cache"] is owner["cache"]
    owner["cache"] = put(fresh(scene.rng, 8), scene.rollout)  # theirs to rebind
    sf.sync(scene.params, plan)


def test_a_kept_target_in_the_buffer_of_another_target_is_refused(scene: Scene) -> None:
    """An update would write into it."""
    owner = scene.owner()
    owner["cache"] = owner["b"]
    plan = sf.make_plan(scene.params, owner, keep=("cache",))
    refused(plan, owner, "'b'", "'cache'", "share")
    tied = sf.Mapping({"a": sf.src("a"), "b": sf.alias("cache"), "cache": sf.src("b")})
    refused(sf.make_plan(scene.params, owner, tied, keep=("cache",)), owner, "'b'", "'cache'", "share")


def test_a_plan_that_nobody_holds_frees_its_buffers_and_threads(scene: Scene) -> None:
    before = set(threading.enumerate())
    plan = sf.register(scene.plan)
    scene.check(plan)
    with pytest.raises(sf.ParamsMismatch):
        sf.sync({}, plan)
    session, buffer = weakref.ref(plan.session), weakref.ref(next(iter(plan.session.buffers.values())).array)
    del plan
    gc.collect()
    assert session() is None
    assert buffer() is None
    for thread in set(threading.enumerate()) - before:
        thread.join(20)
        assert not thread.is_alive()


def test_a_plan_that_keeps_targets_needs_an_owner(scene: Scene) -> None:
    target = scene.target | {"cache": like((8,), "float32", scene.rollout)}
    plan = sf.make_plan(scene.params, target, keep=("cache",))
    refused(plan, None, "keeps", "no owner", "Give the rollout's params")


# Buffers that do not fit


def test_all_buffers_that_do_not_fit_are_listed_at_once(scene: Scene) -> None:
    rollout = scene.rollout
    owner = {
        "a": put(fresh(scene.rng, 6, 4), rollout),
        "b": put(np.zeros(4, np.int32), rollout),
        "c": scene.owner()["b"],
    }
    words = ("3 faults", "'a' has shape (6, 4)", "(4, 6)", "'b' is int32", "float32", "'c' is not a target", "keep=")
    refused(scene.plan, owner, *words)


@pytest.mark.parametrize("leaf", [np.zeros((4, 6), np.float32), 1.0, jax.ShapeDtypeStruct((4, 6), "float32")])
def test_a_buffer_that_is_no_jax_array_is_refused(scene: Scene, leaf: Any) -> None:
    refused(scene.plan, scene.owner() | {"a": leaf}, f"'a' is a {type(leaf).__name__}", "sf.register(plan)")


def test_a_missing_buffer_is_refused(scene: Scene) -> None:
    refused(scene.plan, {"a": scene.owner()["a"]}, "'b' is missing", "Give a buffer")
    refused(scene.plan, {}, "'a' is missing", "'b' is missing")


@pytest.mark.parametrize("ids", [[3, 2], [4, 5]])
def test_a_buffer_on_other_devices_or_in_another_order_is_refused(scene: Scene, ids: list[int]) -> None:
    a = put(fresh(scene.rng, 4, 6), mesh((2,), "y", ids), None, "y")
    refused(scene.plan, scene.owner() | {"a": a}, "'a' is cut by", "not how the plan cuts it")


def test_a_buffer_that_is_cut_otherwise_is_refused(scene: Scene) -> None:
    a = put(fresh(scene.rng, 4, 6), scene.rollout, "y")
    refused(scene.plan, scene.owner() | {"a": a}, "'a' is cut by", "planned mesh and spec")


def test_a_deleted_buffer_is_refused(scene: Scene) -> None:
    owner = scene.owner()
    owner["a"].delete()
    with pytest.raises(sf.RegistrationError, match=r"'a'.*deleted"):
        sf.register(scene.plan, owner)


def test_owners_must_name_the_targets(scene: Scene) -> None:
    plan = sf.make_plan(scene.params, sf.replicas({"left": scene.target, "right": scene.target}))
    refused(plan, {"left": scene.owner()}, "['left']", "['left', 'right']", "one owner for each")
    refused(plan, [scene.owner(), scene.owner()], "list", "['left', 'right']")


# Memory that may not be written


def test_two_targets_in_one_buffer_are_refused_unless_they_are_aliases(rng: np.random.Generator) -> None:
    trainer, rollout = mesh((2,), "x"), mesh((2,), "y", [2, 3])
    x = fresh(rng, 4, 6)
    params = {"e": put(x, trainer, "x")}
    shared = put(fresh(rng, 4, 6), rollout, "y")
    owner = {"embed": shared, "head": shared}
    twice = sf.Mapping({"embed": sf.src("e"), "head": sf.src("e")})
    refused(sf.make_plan(params, owner, twice), owner, "'embed'", "'head'", "share one buffer", "sf.alias")
    tied = sf.Mapping({"embed": sf.src("e"), "head": sf.alias("embed")})
    plan = sf.register(sf.make_plan(params, owner, tied), owner)
    poison_buffers(plan)
    out = sf.sync(params, plan)
    assert_holds(out["embed"], x)
    assert set(pointers({"": out["embed"]}).values()) == set(pointers({"": out["head"]}).values())


def test_replicated_shards_in_one_buffer_are_refused(rng: np.random.Generator) -> None:
    """JAX on CPUs lets all shards of a replicated array adopt the memory of the NumPy array it was made from."""
    rollout = mesh((2,), "y", [2, 3])
    owner = {"norm": jax.device_put(adoptable(fresh(rng, 64)), NamedSharding(rollout, P()))}
    if len(set(pointers(owner).values())) == 2:
        pytest.skip("JAX copied NumPy's memory")
    params = {"norm": put(fresh(rng, 64), mesh((1,), "x"))}
    plan = sf.make_plan(params, owner)
    refused(plan, owner, "'norm' of rank 1", "'norm' of rank 2", "share one buffer", "give each its own")


def test_targets_that_overlap_in_memory_are_refused(rng: np.random.Generator) -> None:
    """JAX on CPUs adopts aligned NumPy memory, so two arrays may overlap."""
    raw = adoptable(fresh(rng, 96))
    device = jax.devices()[2]
    owner = {"a": jax.device_put(raw[:64], device), "b": jax.device_put(raw[32:96], device)}
    if owner["b"].unsafe_buffer_pointer() - owner["a"].unsafe_buffer_pointer() != 128:
        pytest.skip("JAX copied NumPy's memory")
    params = {name: put(fresh(rng, 64), mesh((1,), "x")) for name in "ab"}
    refused(sf.make_plan(params, owner), owner, "'a'", "'b'", "overlap in memory")


def test_read_only_memory_is_refused(rng: np.random.Generator, tmp_path: Path) -> None:
    """An array over a memory-mapped checkpoint; a write would end the process."""
    x = fresh(rng, 2048)
    x.tofile(tmp_path / "weights")
    mapped = np.memmap(tmp_path / "weights", np.float32, "r")
    owner = {"a": jax.device_put(mapped, jax.devices()[2])}
    if owner["a"].unsafe_buffer_pointer() != mapped.ctypes.data:
        pytest.skip("JAX copied the mapped file")
    params = {"a": put(x, mesh((1,), "x"))}
    plan = sf.make_plan(params, owner)
    refused(plan, owner, "'a'", "read-only memory", "copy=True")
    assert_holds(sf.sync(params, sf.register(plan))["a"], x)


@pytest.mark.parametrize("start", [0, 32])
@pytest.mark.parametrize("device", [0, 1])
def test_params_that_share_memory_with_the_rollout_are_refused(
    rng: np.random.Generator, device: int, start: int
) -> None:
    """Both sides made from one NumPy array: an update would overwrite the trainer's weights."""
    raw = adoptable(fresh(rng, 8, 12))
    source = jax.device_put(raw, NamedSharding(mesh((1,), "x", [0]), P()))
    target = jax.device_put(
        raw.reshape(-1)[start : start + 64].reshape(8, 8), NamedSharding(mesh((1,), "y", [device]), P())
    )
    if target.unsafe_buffer_pointer() - source.unsafe_buffer_pointer() != 4 * start:
        pytest.skip("JAX copied NumPy's memory")
    params, owner = {"w": source}, {"w": target}
    mapping = sf.Mapping({"w": sf.src("w")[:, 4:].rearrange("a b -> b a")})
    plan = sf.make_plan(params, owner, mapping)
    before = raw.copy()
    with pytest.raises((sf.RegistrationError, sf.ParamsMismatch), match=r"'w'.*of its own"):
        sf.sync(params, sf.register(plan, owner))
    assert (raw == before).all(), "the trainer's weights were overwritten"


@pytest.mark.parametrize("given", [None, {"w": 1}, "plan"])
def test_what_is_no_plan_is_refused(given: Any) -> None:
    with pytest.raises(
        sf.RegistrationError, match=rf"a {type(given).__name__} is given, .* Make one with sf.make_plan"
    ):
        sf.register(given)
