"""Several rollouts: a mesh with an unused axis, or trees of their own; bytes go from rollout to rollout as planned."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from checks import assert_holds, fresh, like, mesh, pointers, poison_buffers, put, updated

import shardfly_jax as sf
from shardfly_jax.executors import hostcopy

BF16 = ml_dtypes.bfloat16


def spans(plan: sf.Plan, params: Any) -> list[tuple[int, int, int]]:
    """(address, end, rank) of all memory that an update reads or writes; trainers in mesh order."""
    out = []
    devices = [d for d in plan.source.devices if d is not None]
    for leaf in jax.tree.leaves(params):
        for shard in leaf.addressable_shards:
            start = shard.data.unsafe_buffer_pointer()
            out.append((start, start + shard.data.nbytes, devices.index(shard.device)))
    for (_, _, rank), shard in plan.registered().buffers.items():
        out.append((shard.address, shard.address + shard.nbytes, rank))
    return out


def measured_traffic(run: Callable[[], Any], where: list[tuple[int, int, int]], ranks: int, patch: Any) -> np.ndarray:
    """Bytes that the executor really copied from rank to rank, found by the addresses of its copies."""
    real, matrix, lock = hostcopy.copy, np.zeros((ranks, ranks), np.int64), threading.Lock()

    def rank_of(x: np.ndarray) -> int:
        start = x.__array_interface__["data"][0]
        (rank,) = {rank for lo, hi, rank in where if lo <= start < hi}
        return rank

    def copy(target: np.ndarray, source: np.ndarray, conversion: Any) -> None:
        with lock:
            matrix[rank_of(source), rank_of(target)] += target.nbytes
        real(target, source, conversion)

    patch.setattr(hostcopy, "copy", copy)
    run()
    return matrix


def two_pools(rng: np.random.Generator) -> tuple[sf.Plan, dict[str, jax.Array], dict[str, np.ndarray]]:
    """Four trainers to two replicas of two ranks; 12 layers and some replicated norms."""
    over, rollout = mesh((2, 2), "fsdp tp"), mesh((2, 2), "dp tp", [4, 5, 6, 7])
    values = {f"h.{i}.w": fresh(rng, 8, 16) for i in range(12)} | {f"h.{i}.norm": fresh(rng, 16) for i in range(12)}
    params = {name: put(x, over, *(("fsdp", "tp") if x.ndim == 2 else ())) for name, x in values.items()}
    target = {
        name: like(x.shape, "float32", rollout, *((None, "tp") if x.ndim == 2 else ())) for name, x in values.items()
    }
    return sf.register(sf.make_plan(params, target)), params, values


def test_a_mesh_axis_that_nothing_uses_makes_replicas(rng: np.random.Generator) -> None:
    plan, params, values = two_pools(rng)
    assert [(r.name, r.ranks) for r in plan.replicas] == [("rollout/0", (4, 5)), ("rollout/1", (6, 7))]
    out = updated(params, plan)
    for name, x in values.items():
        assert_holds(out[name], x, name)
    assert plan.version == {"rollout/0": 1, "rollout/1": 1}


def test_the_executor_sends_what_the_plan_says(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainers are read once for each distinct byte; replicas feed each other."""
    plan, params, values = two_pools(rng)
    poison_buffers(plan)
    where = spans(plan, params)
    found = measured_traffic(lambda: sf.sync(params, plan), where, plan.ranks, monkeypatch)
    np.testing.assert_array_equal(found, plan.traffic())
    wanted_once = sum(x.nbytes for x in values.values())
    assert found[:4].sum() == wanted_once == plan.egress_nbytes
    assert found[4:, 4:].sum() == plan.nbytes - wanted_once > 0
    for name, leaf in sf.params(plan).items():
        assert_holds(leaf, values[name], name)


@pytest.mark.parametrize("replicas", [1, 2, 3, 6])
def test_what_trainers_send_does_not_grow_with_the_number_of_replicas(rng: np.random.Generator, replicas: int) -> None:
    """Each replica a tree of its own, on meshes that share devices."""
    x = fresh(rng, 16, 12)
    params = {"w": put(x, mesh((2,), "x"), "x")}
    tree = {"w": like((12, 16), "bfloat16", mesh((2,), "y", [2, 3]), "y")}
    mapping = sf.Mapping({"w": sf.src("w").rearrange("a b -> b a").astype("bfloat16")})
    trees = sf.replicas({f"pool{k}": tree for k in range(replicas)})
    plan = sf.register(sf.make_plan(params, trees, mapping))
    assert plan.egress_nbytes == 16 * 12 * 2
    assert plan.nbytes == replicas * 16 * 12 * 2
    out = updated(params, plan)
    for k in range(replicas):
        assert_holds(out[f"pool{k}"]["w"], np.ascontiguousarray(x.T).astype(BF16), f"pool {k}")
    assert plan.version == {f"pool{k}": 1 for k in range(replicas)}


def test_replicas_may_differ_in_mesh_dtype_names_and_mapping(rng: np.random.Generator) -> None:
    over = mesh((2, 2), "fsdp tp")
    values = {f"h.{i}": fresh(rng, 8, 12) for i in range(3)}
    params = {name: put(x, over, "fsdp", "tp") for name, x in values.items()}
    first, second = mesh((4,), "tp", [4, 5, 6, 7]), mesh((2, 2), "dp tp", [7, 6, 1, 0])
    trees = {
        "exact": {name: like((8, 12), "float32", first, "tp") for name in values},
        "turned": {f"t.{i}": like((12, 8), "bfloat16", second, None, "tp") for i in range(3)},
        "stacked": {
            "all": sf.Layout((3, 8, 12), "float32", {0: [(0, 1), (0, 8), (0, 12)], 1: [(1, 3), (0, 8), (0, 12)]})
        },
    }
    mappings = {
        "exact": None,
        "turned": sf.Mapping({"t.{i}": sf.src("h.{i}").rearrange("a b -> b a").astype("bfloat16")}),
        "stacked": sf.Mapping({"all": sf.stack([sf.src(f"h.{i}") for i in range(3)])}),
    }
    for given in (sf.replicas(trees), trees):  # a plain dict will do where mappings name the trees
        plan = sf.register(sf.make_plan(params, given, mappings))
        assert [r.name for r in plan.replicas] == ["exact", "turned/0", "turned/1", "stacked"]
        out = updated(params, plan)
        for name, x in values.items():
            assert_holds(out["exact"][name], x, name)
            assert_holds(out["turned"][name.replace("h", "t")], np.ascontiguousarray(x.T).astype(BF16), name)
        parts = [np.asarray(part) for part in out["stacked"]["all"].values()]
        np.testing.assert_array_equal(np.concatenate(parts), np.stack(list(values.values())))
        assert sf.verify(params, plan) == plan.target_nbytes
        assert set(plan.version.values()) == {1}


def test_replicas_have_owners_of_their_own(rng: np.random.Generator) -> None:
    x = fresh(rng, 8, 4)
    params = {"w": put(x, mesh((2,), "x"), "x")}
    owners = {
        "left": {"w": put(fresh(rng, 8, 4), mesh((2,), "y", [4, 5]), "y")},
        "right": {"w": put(fresh(rng, 8, 4), mesh((2,), "y", [5, 4]), "y")},
    }
    held = dict(owners["right"])
    for given in (owners, sf.replicas(owners), owners | {"right": lambda: held}):
        plan = sf.register(sf.make_plan(params, sf.replicas(owners)), given)
        out = updated(params, plan)
        for name, owner in owners.items():
            assert pointers(out[name]) == pointers(owner)
            assert_holds(out[name]["w"], x, name)
    held["w"] = put(fresh(rng, 8, 4), mesh((2,), "y", [5, 4]), "y")
    before = np.asarray(owners["left"]["w"]).copy()
    params = {"w": put(fresh(rng, 8, 4), mesh((2,), "x"), "x")}
    with pytest.raises(sf.StaleBuffer, match=r"'w' of rank 4"):  # ranks: two trainers, left, then right
        sf.sync(params, plan)
    assert_holds(owners["left"]["w"], before, "a stale buffer on one side stops both")


def test_a_replica_in_another_cut_is_fed_by_trainers_and_still_right(rng: np.random.Generator) -> None:
    """Boxes that differ cannot be passed on as they are."""
    x = fresh(rng, 16, 16)
    params = {"w": put(x, mesh((4,), "x"), "x")}
    trees = sf.replicas({
        "rows": {"w": like((16, 16), "float32", mesh((2,), "y", [4, 5]), "y")},
        "columns": {"w": like((16, 16), "float32", mesh((2,), "y", [6, 7]), None, "y")},
        "whole": {"w": like((16, 16), "float32", mesh((1,), "y", [3]))},
    })  # fmt: skip
    plan = sf.register(sf.make_plan(params, trees))
    out = updated(params, plan)
    for name in ("rows", "columns", "whole"):
        assert_holds(out[name]["w"], x, name)


def test_first_hops_are_spread_over_the_replicas(rng: np.random.Generator) -> None:
    plan, _, _ = two_pools(rng)
    assert plan.first_hop_nbytes.max() <= 1.1 * plan.first_hop_nbytes.min()
