"""Bad input to an update: an error of its own type with the tensor's name and a remedy; nothing is written, and the
old version is still served."""

from __future__ import annotations

import contextlib
import gc
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_holds, fresh, like, memory, mesh, pointers, poison_buffers, put, registered_bytes

import shardfly_jax as sf

SHAPES = {"a": (8, 4), "b": (4, 4)}


class Scene:
    """A trainer on four devices, a rollout on two others that owns its buffers, and one finished update."""

    def __init__(self, rng: np.random.Generator):
        self.rng = rng
        self.trainer, self.rollout = mesh((4,), "x"), mesh((2,), "y", [4, 5])
        self.params, self.values = self.fresh_params()
        self.owner = {
            "a": put(fresh(rng, 8, 4), self.rollout, None, "y"),
            "b": put(fresh(rng, 4, 4), self.rollout),
        }
        self.plan = sf.register(sf.make_plan(self.params, self.owner), self.owner)
        poison_buffers(self.plan)
        sf.sync(self.params, self.plan)

    def fresh_params(self) -> tuple[dict[str, jax.Array], dict[str, np.ndarray]]:
        values = {name: fresh(self.rng, *shape) for name, shape in SHAPES.items()}
        return {"a": put(values["a"], self.trainer, "x"), "b": put(values["b"], self.trainer)}, values

    def elsewhere(self, ids: list[int]) -> jax.Array:
        """`a` on other devices, or on the same ones in another order."""
        return put(self.values["a"], mesh((4,), "x", ids), "x")

    def check_served(self, values: dict[str, np.ndarray]) -> None:
        for name, leaf in sf.params(self.plan).items():
            assert_holds(leaf, values[name], name)

    @contextlib.contextmanager
    def refuses(self, error: type[sf.ShardflyError], *words: str, readable: bool = True) -> Iterator[None]:
        """The block raises; afterwards memory, version and what is served are what they were."""
        before, versions = registered_bytes(self.plan), dict(self.plan.version)
        with pytest.raises(error) as caught:
            yield
        assert type(caught.value) is error
        for word in words:
            assert word in str(caught.value), f"{word!r} is not in: {caught.value}"
        assert registered_bytes(self.plan) == before, "something was written"
        assert self.plan.version == versions
        if readable:
            self.check_served(self.values)

    def check_next_update(self) -> None:
        """A good update still works afterwards."""
        params, values = self.fresh_params()
        poison_buffers(self.plan)
        old = dict(self.plan.version)
        sf.sync(params, self.plan)
        self.check_served(values)
        assert self.plan.version == {name: number + 1 for name, number in old.items()}


@pytest.fixture
def scene(rng: np.random.Generator) -> Scene:
    return Scene(rng)


# Params that are not the planned ones

Change = Callable[[Scene, dict[str, jax.Array]], Any]
MISMATCHES: dict[str, tuple[Change, tuple[str, ...]]] = {
    "missing": (lambda s, p: {"a": p["a"]}, ("'b' is missing",)),
    "renamed": (lambda s, p: {"a": p["a"], "bb": p["b"]}, ("'b' is missing",)),
    "None": (lambda s, p: {"a": p["a"], "b": None}, ("'b' is missing",)),
    "another tree": (lambda s, p: [p["a"], p["b"]], ("'a' is missing", "'b' is missing")),
    "nothing": (lambda s, p: None, ("'a' is missing", "'b' is missing")),
    "NumPy": (lambda s, p: p | {"b": np.asarray(p["b"])}, ("'b' is a ndarray", "jax.Array")),
    "shape": (lambda s, p: p | {"b": p["b"][:2]}, ("'b'", "shape (2, 4)", "(4, 4)")),
    "transposed": (lambda s, p: p | {"a": put(s.values["a"].T, s.trainer, None, "x")}, ("'a'", "(4, 8)", "(8, 4)")),
    "dtype": (lambda s, p: p | {"a": p["a"].astype(jnp.bfloat16)}, ("'a' is bfloat16", "float32")),
    "spec": (lambda s, p: p | {"a": put(s.values["a"], s.trainer, None, "x")}, ("'a'", "sharding")),
    "device order": (lambda s, p: p | {"a": s.elsewhere([1, 0, 2, 3])}, ("'a'", "sharding")),
    "other devices": (lambda s, p: p | {"a": s.elsewhere([4, 5, 6, 7])}, ("'a'", "sharding")),
    "one device": (lambda s, p: p | {"b": jax.device_put(s.values["b"], jax.devices()[0])}, ("'b'", "sharding")),
    "both": (lambda s, p: {"a": p["a"][:4], "b": p["b"].astype(jnp.int32)}, ("2 differ", "'a'", "'b'")),
}  # fmt: skip


@pytest.mark.parametrize("kind", MISMATCHES)
def test_params_that_are_not_the_planned_ones_are_refused(scene: Scene, kind: str) -> None:
    change, words = MISMATCHES[kind]
    params, _ = scene.fresh_params()
    with scene.refuses(sf.ParamsMismatch, "nothing was written", "make a new plan", *words):
        sf.sync(change(scene, params), scene.plan)
    scene.check_next_update()


@pytest.mark.parametrize("kind", MISMATCHES)
def test_the_first_update_is_as_strict_as_later_ones(scene: Scene, kind: str) -> None:
    change, words = MISMATCHES[kind]
    params, _ = scene.fresh_params()
    plan = sf.register(sf.make_plan(scene.params, scene.owner), scene.owner)
    before = registered_bytes(plan)
    with pytest.raises(sf.ParamsMismatch) as caught:
        sf.sync(change(scene, params), plan)
    for word in ("nothing was written", *words):
        assert word in str(caught.value)
    assert registered_bytes(plan) == before
    assert set(plan.version.values()) == {0}


def test_deleted_or_donated_params_are_refused(scene: Scene) -> None:
    params, _ = scene.fresh_params()
    jax.jit(lambda x: x + 1, donate_argnums=0)(params["a"])
    params["b"].delete()
    with scene.refuses(sf.ParamsMismatch, "'a' was deleted or donated", "'b' was deleted", "train step returned"):
        sf.sync(params, scene.plan)
    scene.check_next_update()


def test_an_update_inside_jit_is_refused_with_what_to_call_instead(scene: Scene) -> None:
    with scene.refuses(sf.ParamsMismatch, "traced", "sf.send(params, sender)", "Inside a jitted step"):
        jax.jit(lambda params: sf.sync(params, scene.plan))(scene.params)
    fresh_plan = sf.register(sf.make_plan(scene.params, scene.owner), scene.owner)
    with pytest.raises(sf.ParamsMismatch, match="traced"):
        jax.jit(lambda params: sf.sync(params, fresh_plan))(scene.params)


def test_a_mesh_whose_devices_are_in_another_order_is_told_apart_from_the_planned_one(scene: Scene) -> None:
    with pytest.raises(sf.ParamsMismatch) as caught:
        sf.sync(scene.params | {"a": scene.elsewhere([3, 2, 1, 0])}, scene.plan)
    have, planned = str(caught.value).split("has sharding ")[1].split(", but the plan has ")
    assert have.strip(" .") != planned.strip(" .")
    assert [f"{d}" for d in jax.devices()[3::-1]] == re.findall(r"'([^']*)'", have.split("on the devices")[1])


def by_rank() -> tuple[sf.Plan, dict[int, jax.Array]]:
    """A plan whose trainer gives each rank's rows by themselves, and such rows on two devices."""
    layout = sf.Layout((8, 4), "float32", {0: [(0, 4), (0, 4)], 1: [(4, 8), (0, 4)]})
    plan = sf.register(sf.make_plan({"a": layout}, {"a": like((8, 4), "float32", mesh((2,), "y", [4, 5]))}))
    return plan, {rank: jax.device_put(jnp.ones((4, 4)), jax.devices()[rank]) for rank in range(2)}


def test_one_array_in_place_of_rank_shards_is_refused_with_what_it_holds_and_what_is_needed() -> None:
    plan, _ = by_rank()
    with pytest.raises(sf.ParamsMismatch, match=r"so \[0:8, 0:4\] on .*rank 0 there is \[0:4, 0:4\].*\{rank: array\}"):
        sf.sync({"a": jax.device_put(jnp.ones((8, 4)), jax.devices()[0])}, plan)


def test_a_rank_shard_that_was_deleted_before_the_first_update_is_refused_by_name() -> None:
    plan, shards = by_rank()
    shards[1].delete()
    with pytest.raises(sf.ParamsMismatch, match="'a' of rank 1 was deleted or donated"):
        sf.sync({"a": shards}, plan)


def test_params_that_lie_in_the_rollouts_buffers_are_refused(rng: np.random.Generator) -> None:
    over = mesh((2,), "x")
    params = {"a": put(fresh(rng, 4, 4), over, "x")}
    plan = sf.register(sf.make_plan(params, params), params)
    before = registered_bytes(plan)
    with pytest.raises(sf.ParamsMismatch, match=r"'a' lies in the buffer registered for 'a'.*of its own"):
        sf.sync(params, plan)
    assert registered_bytes(plan) == before
    assert set(plan.version.values()) == {0}


def test_params_may_come_in_another_container_and_an_equivalent_sharding(scene: Scene) -> None:
    """Names, not types of containers, are the contract; `P("x")` and `P("x", None)` cut alike."""
    values = {name: fresh(scene.rng, *shape) for name, shape in SHAPES.items()}
    params = {"b": put(values["b"], scene.trainer, None, None), "a": put(values["a"], scene.trainer, "x", None)}
    sf.sync(jax.tree.map(lambda x: x, params), scene.plan)
    scene.check_served(values)

    class Weights(dict):
        pass

    jax.tree_util.register_pytree_with_keys(
        Weights,
        lambda w: ([(jax.tree_util.DictKey(k), w[k]) for k in ("b", "a")], None),
        lambda _, leaves: Weights(zip(("b", "a"), leaves, strict=True)),
    )
    params, values = scene.fresh_params()
    sf.sync(Weights(params), scene.plan)
    scene.check_served(values)


# Plans


def test_an_unregistered_plan_is_refused(scene: Scene) -> None:
    plan = sf.make_plan(scene.params, scene.owner)
    for use in (
        lambda: sf.sync(scene.params, plan),
        lambda: sf.params(plan),
        lambda: sf.verify(scene.params, plan),
        lambda: plan.version,
    ):
        with scene.refuses(sf.NotRegistered, plan.digest[:12], "sf.register(plan"):
            use()


def test_registering_leaves_the_old_handle_as_it_was(scene: Scene) -> None:
    plan = sf.make_plan(scene.params, scene.owner)
    assert sf.register(plan, scene.owner) == plan
    with pytest.raises(sf.NotRegistered):
        sf.sync(scene.params, plan)


# Buffers that moved


def test_a_rebound_buffer_is_refused_until_it_is_back(scene: Scene) -> None:
    params, _ = scene.fresh_params()
    old = scene.owner["a"]
    scene.owner["a"] = put(fresh(scene.rng, 8, 4), scene.rollout, None, "y")
    orphan = memory(scene.owner)
    with scene.refuses(sf.StaleBuffer, "'a'", "rank", "instead of rebinding", "register again"):
        sf.sync(params, scene.plan)
    assert memory(scene.owner) == orphan
    scene.owner["a"] = old
    scene.check_next_update()


@pytest.mark.parametrize(
    ("leaf", "words"),
    [
        (lambda s: np.zeros((8, 4), np.float32), ("'a'", "no longer a live array")),
        (lambda s: put(np.zeros((8, 4), np.float32), s.trainer, "x"), ("'a'",)),
        (lambda s: put(np.zeros((2, 2), np.float32), s.rollout), ("'a'",)),
        (lambda s: put(np.zeros((8, 4), np.float16), s.rollout, None, "y"), ("'a'",)),
    ],
)
def test_a_buffer_rebound_to_something_else_is_refused(scene: Scene, leaf: Callable, words: tuple[str, ...]) -> None:
    scene.owner["a"] = leaf(scene)
    with scene.refuses(sf.StaleBuffer, *words, "egister"):
        sf.sync(scene.params, scene.plan)


def test_an_owner_of_another_structure_is_refused(scene: Scene) -> None:
    scene.owner["c"] = scene.owner["a"]
    with scene.refuses(sf.StaleBuffer, "'rollout'", "structure", "Register it again"):
        sf.sync(scene.params, scene.plan)
    del scene.owner["c"]
    scene.check_next_update()


@pytest.mark.parametrize("way", ["delete", "donate"])
@pytest.mark.parametrize("which", ["owner", "handle"])
def test_a_deleted_or_donated_buffer_is_refused(scene: Scene, way: str, which: str) -> None:
    leaf = (scene.owner if which == "owner" else sf.params(scene.plan))["a"]
    if way == "delete":
        leaf.delete()
    else:
        new = jax.jit(lambda x: x + 1, donate_argnums=0)(leaf)
        before = memory(new)
    with pytest.raises(sf.StaleBuffer, match=r"'a'.*(deleted or donated|live array).*egister"):
        sf.sync(scene.params, scene.plan)
    assert set(scene.plan.version.values()) == {1}
    if way == "donate":
        assert memory(new) == before, "the memory is another array's now"


def test_reading_params_whose_buffer_was_deleted_is_refused(scene: Scene) -> None:
    sf.params(scene.plan)["a"].delete()
    with pytest.raises(sf.StaleBuffer, match=r"'a'.*register"):
        sf.params(scene.plan)
    with pytest.raises(sf.StaleBuffer, match=r"'a'.*register"):
        sf.verify(scene.params, scene.plan)


def test_a_plan_keeps_its_buffers_alive(rng: np.random.Generator) -> None:
    over, rollout = mesh((2,), "x"), mesh((2,), "y", [4, 5])
    x = fresh(rng, 256, 64)
    params = {"a": put(x, over, "x")}
    plan = sf.make_plan(params, {"a": like((256, 64), "float32", rollout, "y")})
    owner = {"a": put(fresh(rng, 256, 64), rollout, "y")}
    where = pointers(owner)
    plan = sf.register(plan, owner)
    owner.clear()  # the dict is asked for its tensors: it has none any more
    with pytest.raises(sf.StaleBuffer, match="structure"):
        sf.sync(params, plan)
    held = {"a": put(fresh(rng, 256, 64), rollout, "y")}
    plan = sf.register(sf.make_plan(params, held), dict(held))
    where = pointers(held)
    del held
    gc.collect()
    others = [put(fresh(rng, 256, 64), rollout, "y") for _ in range(4)]  # would take freed memory
    sf.sync(params, plan)
    assert pointers(sf.params(plan)) == where
    assert_holds(sf.params(plan)["a"], x)
    assert not set(where.values()) & set(pointers(others).values())


def test_params_that_the_executor_cannot_read_where_they_lie_are_refused_and_nothing_is_poisoned() -> None:
    params = {"w": jnp.arange(64.0)}
    plan = sf.register(sf.make_plan(params, params))
    sf.sync(params, plan)
    plan.registered().executor.alignment = 1 << 40  # type: ignore[union-attr]
    with pytest.raises(sf.ParamsMismatch, match="'w' of rank 0 is not aligned"):
        sf.sync(params, plan)
    assert np.array_equal(sf.params(plan)["w"], params["w"])
