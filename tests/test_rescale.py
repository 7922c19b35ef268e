"""Rollouts that join, leave and change between updates of one process: what is kept, who may be read, what arrives."""

from __future__ import annotations

import dataclasses
import gc
import io
import runpy
import threading
import weakref
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from checks import fresh, like, mesh, poison_buffers, put
from flax import nnx
from jax.sharding import AbstractMesh, Mesh

import shardfly_jax as sf
from shardfly_jax.executors.memory import host_bytes
from shardfly_jax.sharding.moves import View

MAPPING = sf.Mapping(
    {
        "norm": sf.src("norm"),
        "h.{i}.wt": sf.src("h.{i}.w").rearrange("a b -> b a").astype("bfloat16"),
        "h.{i}.both": sf.fuse(sf.src("h.{i}.w"), sf.src("h.{i}.w").scale(2.0), axis=0),
    }
)
CUT = {"norm": (), "wt": ("tp",), "both": ("tp",)}


def values_of(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Whole sources."""
    return {"norm": fresh(rng, 6)} | {f"h.{i}.w": rng.standard_normal((8, 12), np.float32) for i in range(2)}


def params_of(values: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    over = mesh((2,), "x", [0, 1])
    return {name: put(x, over, *(("x",) if x.ndim == 2 else ())) for name, x in values.items()}


def target_on(over: Mesh | AbstractMesh) -> dict[str, jax.ShapeDtypeStruct]:
    """What a rollout holds; `tp` is the last axis of its mesh, another axis makes replicas."""
    out = {"norm": like((6,), "float32", over)}
    for i in range(2):
        out[f"h.{i}.wt"] = like((12, 8), "bfloat16", over, "tp")
        out[f"h.{i}.both"] = like((16, 12), "float32", over, "tp")
    return out


def meaning(values: dict[str, np.ndarray], name: str, box: Any, ranks_of_tp: int) -> np.ndarray:
    """What one rank holds of a target, by hand."""
    if name == "norm":
        return values["norm"]
    x = values[name.rsplit(".", 1)[0] + ".w"]
    lo, hi = box[0]
    if name.endswith("wt"):
        return np.ascontiguousarray(x.T[lo:hi]).astype("bfloat16")
    rows = slice(lo // 2, hi // 2)  # of each of the two parts
    assert (hi - lo) * ranks_of_tp == 16
    return np.concatenate([x[rows], x[rows] * np.float32(2)])


def wrong_shards(plan: sf.Plan, values: dict[str, np.ndarray], replica: str) -> list[str]:
    """Names and ranks of shards of a replica that do not hold an update, byte for byte."""
    (ranks,) = [r.ranks for r in plan.replicas if r.name == replica]
    wrong = []
    for (index, k, rank), shard in plan.registered().buffers.items():
        if rank not in ranks:
            continue
        family = plan.families[index]
        want = meaning(values, family.name(k), family.layout.box(rank), len(ranks))
        flat = host_bytes(shard.address, shard.nbytes).view(want.dtype)
        have = View(0, family.layout.local_shape(rank), family.layout.local_strides(rank)).of(flat)
        if have.tobytes() != want.tobytes():
            wrong.append(f"{family.name(k)} of rank {rank}")
    return wrong


def where(plan: sf.Plan) -> dict[tuple[str, str, jax.Device], tuple[int, tuple[int, ...]]]:
    """Address and shape of each tensor of a tree on a device."""
    out = {}
    for (index, k, rank), shard in plan.registered().buffers.items():
        family = plan.families[index]
        out[family.tree, family.name(k), shard.device] = shard.address, family.layout.buffer_shape(rank)
    return out


def check_update(plan: sf.Plan, values: dict[str, np.ndarray]) -> None:
    """A complete update is right in every byte of every replica."""
    poison_buffers(plan)
    newest = max(plan.version.values())
    sf.sync(params_of(values), plan)
    assert len(set(plan.version.values())) == 1
    assert min(plan.version.values()) > newest
    assert set(plan.staleness.values()) == {0}
    for replica in plan.replicas:
        assert wrong_shards(plan, values, replica.name) == []
    sf.params(plan)


# Any pool


def random_target(rng: np.random.Generator) -> Any:
    """One tree of some replicas on any devices in any order, or several trees."""
    free = [int(d) for d in rng.permutation([2, 3, 4, 5, 6, 7])]
    if rng.integers(0, 2):
        replicas, tp = [(1, 1), (1, 2), (2, 1), (2, 2), (3, 1), (3, 2), (1, 4)][rng.integers(0, 7)]
        ids = free if rng.integers(0, 2) else sorted(free)
        return target_on(mesh((replicas, tp), "replica tp", ids[: replicas * tp]))
    trees = {}
    for name in rng.permutation(["a", "b", "c"])[: rng.integers(1, 4)]:
        tp = int(rng.integers(1, 3))
        ids, free = free[:tp], free[tp:]
        trees[str(name)] = target_on(mesh((1, tp), "replica tp", ids))
    return sf.replicas(trees)


@pytest.mark.parametrize("seed", range(20))
def test_a_pool_that_changes_at_random_keeps_what_fits_and_serves_nothing_else(seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = values_of(rng)
    plan = sf.register(sf.make_plan(params_of(values), random_target(rng), MAPPING, allow_cast="*"))
    check_update(plan, values)
    number, is_whole = 1, True
    for _ in range(6):
        before, versions = where(plan), dict(plan.version)
        old, of_replica = plan, {d: r.name for r in plan.replicas for d in devices_of(plan, r)}
        plan = sf.rescale(plan, random_target(rng))
        after, done = where(plan), plan.rescaled
        assert done is not None
        fit = {key for key, (_, shape) in after.items() if key in before and before[key][1] == shape}
        assert {key for key in fit if after[key] != before[key]} == set()
        assert (done.kept, done.allocated, done.freed) == (len(fit), len(after) - len(fit), len(before) - len(fit))
        assert set(done.serving) | set(done.joined) == {r.name for r in plan.replicas}
        for replica in plan.replicas:
            if replica.name in done.serving:
                assert wrong_shards(plan, values, replica.name) == []
                held = {versions[of_replica[device]] for device in devices_of(plan, replica)}
                assert {plan.version[replica.name]} == held
                assert plan.staleness[replica.name] == 0
            else:
                assert not is_whole or wrong_shards(plan, values, replica.name), "it could have gone on serving"
                assert plan.version[replica.name] == 0
                assert plan.staleness[replica.name] == number
        if done.joined:
            with pytest.raises(sf.Poisoned, match="joined, its layout changed or an update had failed"):
                sf.params(plan)
        else:
            sf.params(plan)
        with pytest.raises(sf.NotRegistered, match=r"replaced by sf\.rescale"):
            sf.sync(params_of(values), old)
        if rng.integers(0, 3):  # else it changes twice between two updates
            values = values_of(rng)
            check_update(plan, values)
            number += 1
            assert set(plan.version.values()) == {number}
        is_whole = not any(plan.staleness.values())


def devices_of(plan: sf.Plan, replica: Any) -> set[jax.Device]:
    return {shard.device for (_, _, rank), shard in plan.registered().buffers.items() if rank in replica.ranks}


# Joining, leaving, changing


class Scene:
    """Two replicas of two ranks that hold an update."""

    def __init__(self, rng: np.random.Generator):
        self.rng, self.values = rng, values_of(rng)
        target = target_on(mesh((2, 2), "replica tp", [2, 3, 4, 5]))
        self.plan = sf.register(sf.make_plan(params_of(self.values), target, MAPPING, allow_cast="*"))
        check_update(self.plan, self.values)


@pytest.fixture
def scene(rng: np.random.Generator) -> Scene:
    return Scene(rng)


def test_a_replica_joins_while_the_others_keep_address_version_and_bytes(scene: Scene) -> None:
    before, arrays = where(scene.plan), sf.params(scene.plan)
    plan = sf.rescale(scene.plan, target_on(mesh((3, 2), "replica tp", [2, 3, 4, 5, 6, 7])))
    after = where(plan)
    assert {key: after[key] for key in before} == before
    assert dict(plan.version) == {"rollout/0": 1, "rollout/1": 1, "rollout/2": 0}
    assert dict(plan.staleness) == {"rollout/0": 0, "rollout/1": 0, "rollout/2": 1}
    with pytest.raises(sf.Poisoned, match=r"'rollout/2'.*joined"):
        sf.params(plan)
    np.testing.assert_array_equal(np.asarray(arrays["norm"].addressable_shards[0].data), scene.values["norm"])
    done = plan.rescaled
    assert (done.serving, done.joined) == (("rollout/0", "rollout/1"), ("rollout/2",))
    assert (done.kept, done.allocated, done.freed) == (20, 10, 0)
    assert (done.kept_nbytes, done.allocated_nbytes) == (2 * done.allocated_nbytes, plan.target_nbytes // 3)
    text = plan.explain()
    assert "Rescaled: 20 buffers kept" in text
    assert "go on serving: rollout/0, rollout/1" in text
    assert "wait for an update: rollout/2" in text
    check_update(plan, values_of(scene.rng))
    assert where(plan) == after


def test_the_first_replica_leaves_and_its_memory_is_freed(scene: Scene) -> None:
    before = where(scene.plan)
    arrays = [weakref.ref(s.array) for k, s in scene.plan.registered().buffers.items() if k[2] in (2, 3)]
    plan = sf.rescale(scene.plan, target_on(mesh((1, 2), "replica tp", [4, 5])))
    assert {key: before[key] for key in where(plan)} == where(plan)
    assert dict(plan.version) == {"rollout": 1}
    assert wrong_shards(plan, scene.values, "rollout") == []
    sf.params(plan)
    gc.collect()
    assert [ref() for ref in arrays] == [None] * 10, "although the old plan is still at hand"
    check_update(plan, values_of(scene.rng))


def test_ranks_that_trade_places_keep_their_memory_but_not_what_it_means(scene: Scene) -> None:
    """The same shapes everywhere: only who holds which cut has changed."""
    before = where(scene.plan)
    plan = sf.rescale(scene.plan, target_on(mesh((2, 2), "replica tp", [3, 2, 4, 5])))
    assert where(plan) == before
    assert plan.rescaled.joined == ("rollout/0",)
    assert plan.rescaled.serving == ("rollout/1",)
    check_update(plan, values_of(scene.rng))


def test_a_changed_meaning_is_a_change_although_every_buffer_fits(scene: Scene) -> None:
    mapping = sf.Mapping({**MAPPING, "norm": sf.src("norm").scale(2.0)})
    target = target_on(mesh((2, 2), "replica tp", [2, 3, 4, 5]))
    new = sf.make_plan(params_of(scene.values), target, mapping, allow_cast="*")
    before = where(scene.plan)
    plan = sf.rescale(scene.plan, new)
    assert where(plan) == before
    assert plan.rescaled.serving == ()
    assert set(plan.version.values()) == {0}


def test_the_trainer_may_change_its_mesh(scene: Scene) -> None:
    over = mesh((4,), "x", [0, 1, 6, 7])
    params = {n: put(x, over, *(("x",) if x.ndim == 2 else ())) for n, x in scene.values.items()}
    new = sf.make_plan(params, target_on(mesh((2, 2), "replica tp", [2, 3, 4, 5])), MAPPING, allow_cast="*")
    before = where(scene.plan)
    plan = sf.rescale(scene.plan, new)
    assert where(plan) == before
    assert plan.rescaled.joined == ()
    poison_buffers(plan)
    sf.sync(params, plan)
    assert [wrong_shards(plan, scene.values, r.name) for r in plan.replicas] == [[], []]


def test_ranks_without_planned_devices_stay_where_they_are_and_joiners_take_idle_devices(scene: Scene) -> None:
    source, values = params_of(scene.values), scene.values
    target = target_on(AbstractMesh((2, 2), ("replica", "tp")))
    placement = {k: jax.devices()[7 - k] for k in range(4)}
    plan = sf.register(sf.make_plan(source, target, MAPPING, allow_cast="*"), placement=placement)
    check_update(plan, values)
    before = where(plan)
    plan = sf.rescale(plan, target_on(AbstractMesh((3, 2), ("replica", "tp"))))
    assert {key: where(plan)[key] for key in before} == before
    joined = {d for _, _, d in where(plan)} - {d for _, _, d in before}
    assert joined == set(jax.devices()[:2])
    check_update(plan, values)
    plan = sf.rescale(
        plan, target_on(AbstractMesh((1, 2), ("replica", "tp"))), placement=lambda k: jax.devices()[5 - k]
    )
    assert {d for _, _, d in where(plan)} == {jax.devices()[5], jax.devices()[4]}
    assert plan.rescaled.serving == ("rollout",), "the second replica's devices, and what they hold"
    check_update(plan, values)


def test_replicas_of_their_own_mappings_join_and_leave_by_name(scene: Scene) -> None:
    def tree(ids: list[int]) -> Any:
        return target_on(mesh((len(ids),), "tp", ids))

    params = params_of(scene.values)
    mappings = dict.fromkeys("ab", MAPPING)
    plan = sf.register(sf.make_plan(params, {"a": tree([2, 3]), "b": tree([4, 5])}, mappings, allow_cast="*"))
    check_update(plan, scene.values)
    with pytest.raises(sf.PlanError, match="do not name the targets"):
        sf.rescale(plan, {"b": tree([4, 5]), "c": tree([2, 3])})
    sf.params(plan)
    plan = sf.rescale(plan, {"b": tree([4, 5])})
    assert dict(plan.version) == {"b": 1}
    assert sf.params(plan).keys() == {"b"}
    both = sf.make_plan(params, {"b": tree([4, 5]), "c": tree([2, 3])}, dict.fromkeys("bc", MAPPING), allow_cast="*")
    plan = sf.rescale(plan, both)
    assert dict(plan.version) == {"b": 1, "c": 0}
    check_update(plan, values_of(scene.rng))
    assert dict(plan.version) == {"b": 2, "c": 2}


# Owners


class Rollout(nnx.Module):
    def __init__(self, over: Mesh):
        self.w = nnx.Param(put(np.zeros((4, 6), np.float32), over, "tp"))


FIRST, SECOND = [2, 3], [4, 5]


def owned(kind: str) -> Any:
    """The buffers of a replica of two ranks, in hands of some kind."""
    over = mesh((2,), "tp", FIRST)
    tree = {"w": put(np.zeros((4, 6), np.float32), over, "tp")}
    by_rank = {"w": {k: jax.device_put(np.zeros((2, 6), np.float32), jax.devices()[d]) for k, d in enumerate(FIRST)}}
    return {"tree": tree, "ranks": by_rank, "function": lambda: tree, "module": Rollout(over)}[kind]


def one_owned(rng: np.random.Generator, kind: str) -> tuple[sf.Plan, dict[str, jax.Array], Any]:
    params = {"w": put(fresh(rng, 4, 6), mesh((2,), "x"), "x")}
    owner = owned(kind)
    plan = sf.register(sf.make_plan(params, sf.replicas({"a": w_on(FIRST)})), {"a": owner})
    sf.sync(params, plan)
    return plan, params, owner


def w_on(ids: list[int], axes: str = "tp") -> dict[str, jax.ShapeDtypeStruct]:
    return {"w": like((4, 6), "float32", mesh((len(ids),), "tp", ids), axes)}


@pytest.mark.parametrize("kind", ["tree", "ranks", "function", "module"])
def test_an_owner_whose_tree_stays_is_kept_when_another_joins(rng: np.random.Generator, kind: str) -> None:
    plan, params, owner = one_owned(rng, kind)
    before, structure = where(plan), jax.tree.structure(sf.params(plan)["a"])
    plan = sf.rescale(plan, sf.replicas({"b": w_on(SECOND), "a": w_on(FIRST)}))
    assert {key: where(plan)[key] for key in before} == before
    assert plan.rescaled.serving == ("a",)
    if kind in ("function", "module"):
        assert plan.registered().owners["a"].given is owner
    poison_buffers(plan)
    out = sf.sync(params, plan)
    assert sf.verify(params, plan) == plan.target_nbytes
    assert jax.tree.structure(out["a"]) == structure
    if kind == "module":
        np.testing.assert_array_equal(np.asarray(owner.w[...]), np.asarray(params["w"]))


@pytest.mark.parametrize("kind", ["function", "module"])
def test_an_owner_that_cannot_be_changed_from_outside_must_be_given_again(rng: np.random.Generator, kind: str) -> None:
    plan, params, _ = one_owned(rng, kind)
    with pytest.raises(sf.RegistrationError, match=r"the buffers of 'a' are owned by.*layout has changed"):
        sf.rescale(plan, sf.replicas({"a": w_on(SECOND)}))
    assert sf.verify(params, plan) == plan.target_nbytes, "the old plan stays in force"
    other = put(np.zeros((4, 6), np.float32), mesh((2,), "tp", SECOND), "tp")
    plan = sf.rescale(plan, sf.replicas({"a": w_on(SECOND)}), {"a": {"w": other}})
    assert {shard.address for shard in plan.registered().buffers.values()} == {
        shard.data.unsafe_buffer_pointer() for shard in other.addressable_shards
    }
    assert plan.rescaled.joined == ("a",)
    with pytest.raises(sf.Poisoned):
        sf.params(plan)
    sf.sync(params, plan)
    assert sf.verify(params, plan) == plan.target_nbytes


def test_a_tree_that_changes_is_built_anew_from_what_fits(rng: np.random.Generator) -> None:
    plan, params, _ = one_owned(rng, "tree")
    plan = sf.rescale(plan, sf.replicas({"a": w_on([3, 6])}))
    assert (plan.rescaled.kept, plan.rescaled.allocated, plan.rescaled.freed) == (1, 1, 1)
    sf.sync(params, plan)
    assert sf.verify(params, plan) == plan.target_nbytes


def test_an_owner_that_is_given_decides_and_what_it_kept_is_counted(rng: np.random.Generator) -> None:
    plan, params, owner = one_owned(rng, "tree")
    other = {"w": put(np.zeros((4, 6), np.float32), mesh((2,), "tp", SECOND), "tp")}
    target = sf.replicas({"a": w_on(FIRST), "b": w_on(SECOND)})
    plan = sf.rescale(plan, target, {"a": owner, "b": other})
    assert (plan.rescaled.serving, plan.rescaled.joined) == (("a",), ("b",))
    assert (plan.rescaled.kept, plan.rescaled.allocated) == (2, 2)
    with pytest.raises(sf.RegistrationError, match=r"owners are given for \['a'\]"):
        sf.rescale(plan, target, {"a": owner})
    sf.sync(params, plan)
    assert sf.verify(params, plan) == plan.target_nbytes


def test_aliases_that_shared_a_buffer_share_it_again(rng: np.random.Generator) -> None:
    params = {"w": put(fresh(rng, 4, 6), mesh((2,), "x"), "x")}
    mapping = sf.Mapping({"w": sf.src("w"), "head": sf.alias("w")})

    def tree(ids: list[int]) -> Any:
        return {name: w_on(ids)["w"] for name in ("w", "head")}

    plan = sf.register(sf.make_plan(params, tree([2, 3]), mapping))
    sf.sync(params, plan)
    before = where(plan)
    assert len({address for address, _ in before.values()}) == 2
    for ids, kept in (([2, 3], 2), ([3, 2], 2), ([2, 6], 1)):
        plan = sf.rescale(plan, tree(ids))
        assert len({address for address, _ in where(plan).values()}) == 2
        assert plan.rescaled.kept == kept
        poison_buffers(plan)
        sf.sync(params, plan)
        assert sf.verify(params, plan) == plan.target_nbytes
    untied = sf.make_plan(params, tree([2, 6]), sf.Mapping({"w": sf.src("w"), "head": sf.src("w")}))
    plan = sf.rescale(plan, untied)
    assert len({address for address, _ in where(plan).values()}) == 4
    poison_buffers(plan)
    sf.sync(params, plan)
    assert sf.verify(params, plan) == plan.target_nbytes


def test_kept_targets_need_their_owner(rng: np.random.Generator) -> None:
    params = {"w": put(fresh(rng, 4, 6), mesh((2,), "x"), "x")}

    def tree(ids: list[int]) -> Any:
        return {**w_on(ids), "cache": like((3,), "float32", mesh((len(ids),), "tp", ids))}

    def owner(ids: list[int]) -> Any:
        over = mesh((2,), "tp", ids)
        return {"w": put(np.zeros((4, 6), np.float32), over, "tp"), "cache": put(np.ones(3, np.float32), over)}

    plan = sf.register(sf.make_plan(params, sf.replicas({"a": tree(FIRST)}), keep="cache"), {"a": owner(FIRST)})
    sf.sync(params, plan)
    with pytest.raises(sf.RegistrationError, match="keeps some targets"):
        sf.rescale(plan, sf.replicas({"a": tree(FIRST), "b": tree(SECOND)}))
    given = {"a": sf.params(plan)["a"], "b": owner(SECOND)}
    plan = sf.rescale(plan, sf.replicas({"a": tree(FIRST), "b": tree(SECOND)}), given)
    assert plan.rescaled.serving == ("a",)
    sf.sync(params, plan)
    assert sf.verify(params, plan) == plan.target_nbytes
    plan = sf.rescale(plan, sf.replicas({"a": tree(FIRST)}))
    np.testing.assert_array_equal(np.asarray(sf.params(plan)["a"]["cache"]), np.ones(3))


# What is refused


def test_a_rescale_that_cannot_be_leaves_the_plan_in_force(scene: Scene) -> None:
    odd = {"norm": like((7,), "float32", mesh((2,), "tp", [2, 3]))}
    for target in (odd, {}, target_on(mesh((1, 5), "r tp", [2, 3, 4, 5, 6]))):
        with pytest.raises(sf.PlanError):
            sf.rescale(scene.plan, target)
    fine = target_on(mesh((1, 2), "replica tp", [2, 3]))
    for options in ({"ranks": [2, 3]}, {"placement": 3}, {"owner": {"norm": None}}):
        with pytest.raises(sf.RegistrationError):
            sf.rescale(scene.plan, fine, **options)
    sf.params(scene.plan)
    check_update(scene.plan, values_of(scene.rng))


def test_a_plan_that_was_never_registered_or_has_been_replaced_cannot_be_rescaled(scene: Scene) -> None:
    target = target_on(mesh((1, 2), "replica tp", [2, 3]))
    with pytest.raises(sf.NotRegistered):
        sf.rescale(sf.make_plan(params_of(scene.values), target, MAPPING, allow_cast="*"), target)
    plan = sf.rescale(scene.plan, target)
    with pytest.raises(sf.NotRegistered, match=r"replaced by sf\.rescale"):
        sf.rescale(scene.plan, target)
    for call in (lambda: sf.params(scene.plan), lambda: scene.plan.version, lambda: scene.plan.rescaled):
        with pytest.raises(sf.NotRegistered, match=r"replaced by sf\.rescale"):
            call()
    assert sf.register(scene.plan).rescaled is None, "it is still a plan"
    sf.params(plan)


def test_a_rescale_waits_for_no_pending_update(scene: Scene) -> None:
    target = target_on(mesh((1, 2), "replica tp", [2, 3]))
    gate = threading.Event()
    values = values_of(scene.rng)
    handle = sf.sync(params_of(values), scene.plan, wait=False, progress=lambda _: gate.wait(60) and None)
    with pytest.raises(sf.UpdateRefused, match="pending"):
        sf.rescale(scene.plan, target)
    gate.set()
    handle.result(60)
    plan = sf.rescale(scene.plan, target)
    with pytest.raises(sf.NotRegistered, match="replaced"):
        handle.result()
    assert dict(plan.version) == {"rollout": 2}


def test_a_replica_that_an_update_has_spoilt_stays_poisoned(scene: Scene) -> None:
    def progress(_: int) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        sf.sync(params_of(scene.values), scene.plan, progress=progress)
    plan = sf.rescale(scene.plan, target_on(mesh((2, 2), "replica tp", [2, 3, 4, 5])))
    assert (plan.rescaled.kept, plan.rescaled.serving) == (20, ())
    with pytest.raises(sf.Poisoned):
        sf.params(plan)
    check_update(plan, values_of(scene.rng))
    assert set(plan.version.values()) == {3}, "numbers go on"


def test_a_loaded_plan_is_rescaled_to_a_plan(scene: Scene) -> None:
    def loaded(plan: sf.Plan) -> sf.Plan:
        file = io.BytesIO()
        plan.save(file)
        file.seek(0)
        return sf.load_plan(file)

    plan = sf.register(loaded(scene.plan))
    check_update(plan, scene.values)
    target = target_on(mesh((3, 2), "replica tp", [2, 3, 4, 5, 6, 7]))
    with pytest.raises(sf.PlanError, match=r"was loaded.*Give the new plan"):
        sf.rescale(plan, target)
    before = {shard.address for shard in plan.registered().buffers.values()}
    plan = sf.rescale(plan, loaded(sf.make_plan(params_of(scene.values), target, MAPPING, allow_cast="*")))
    assert (plan.rescaled.kept, plan.rescaled.allocated) == (20, 10)
    assert before <= {shard.address for shard in plan.registered().buffers.values()}
    check_update(plan, values_of(scene.rng))


def test_the_example_of_a_joining_replica_runs(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = dataclasses.replace(
        sf.engines.model("Qwen3-0.6B"),
        layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, width=96, vocab=128,
    )  # fmt: skip
    example = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "rescale.py"))
    done = example["run"](sizes)
    assert done.allocated == done.kept // 2
    assert (done.serving, done.joined) == (("rollout/0", "rollout/1"), ("rollout/2",))
    assert "update 4" in capsys.readouterr().out
