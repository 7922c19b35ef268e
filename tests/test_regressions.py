"""Once found by people who tried to break it."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from checks import like, mesh, put

import shardfly_jax as sf
from shardfly_jax.sharding.layouts import Layout
from shardfly_jax.sharding.topology import preset


def trainer_and_rollout(rng: np.random.Generator, **shapes: tuple[int, ...]) -> tuple[dict, dict]:
    source, target = mesh((2,), "x", [0, 1]), mesh((2,), "y", [2, 3])
    params = {n: put(rng.standard_normal(s, np.float32), source, "x") for n, s in shapes.items()}
    return params, {n: like(s, "float32", target) for n, s in shapes.items()}


def test_an_index_of_an_enumerated_variable_before_the_first_element_is_refused(rng: np.random.Generator) -> None:
    params, _ = trainer_and_rollout(rng, w=(4, 2))
    target = {"e": {"0": {"w": like((2,), "float32", mesh((1,), "y"))}}}
    with pytest.raises(sf.PlanError, match=r"'e\.0\.w'.*before the first"):
        sf.make_plan(params, target, sf.Mapping({"e.{e}.w": sf.src("w")["{e}-1"]}))


@pytest.mark.parametrize("use", [list, lambda e: sf.fuse(*e, axis=0), lambda e: "x" in e])
def test_an_expression_is_no_sequence(use: object) -> None:
    with pytest.raises(TypeError):
        use(sf.src("w"))


def test_sync_inside_a_progress_callback_is_refused_and_the_update_heals(rng: np.random.Generator) -> None:
    params, target = trainer_and_rollout(rng, w=(8, 4))
    plan = sf.register(sf.make_plan(params, target))
    with pytest.raises(sf.ShardflyError, match="inside an update"):
        sf.sync(params, plan, progress=lambda _: sf.sync(params, plan))
    with pytest.raises(sf.Poisoned):
        sf.params(plan)
    sf.sync(params, plan)
    assert sf.verify(params, plan)


def test_progress_reaches_all_bytes_with_shared_aliases(rng: np.random.Generator) -> None:
    params, target = trainer_and_rollout(rng, w=(8, 4))
    target["tied"] = target["w"]
    plan = sf.register(sf.make_plan(params, target, sf.Mapping({"w": sf.src("w"), "tied": sf.alias("w")})))
    seen: list[int] = []
    sf.sync(params, plan, progress=seen.append)
    assert sum(seen) == plan.target_nbytes


def test_fills_keep_the_sign_of_zero(rng: np.random.Generator) -> None:
    params, _ = trainer_and_rollout(rng, w=(4,))
    target = {n: like((5,), "float32", mesh((1,), "y")) for n in ("plus", "minus")}
    padded = {"plus": sf.src("w").pad([(0, 1)], 0.0), "minus": sf.src("w").pad([(0, 1)], -0.0)}
    plan = sf.register(sf.make_plan(params, target, sf.Mapping(padded)))
    out = sf.sync(params, plan)
    sf.verify(params, plan)
    assert [bool(np.signbit(np.asarray(out[n])[-1])) for n in ("plus", "minus")] == [False, True]


def test_large_integer_fills_are_exact() -> None:
    with jax.enable_x64(True):
        source = {"w": Layout((2,), "int64", {0: [(0, 2)]})}
        target = {"w": Layout((3,), "int64", {0: [(0, 3)]})}
        plan = sf.make_plan(source, target, sf.Mapping({"w": sf.src("w").pad([(0, 1)], 2**53 + 1)}))
        plan = sf.register(plan)
        out = sf.sync({"w": {0: jax.numpy.arange(2)}}, plan)
        assert np.asarray(out["w"][0]).tolist() == [0, 1, 2**53 + 1]


def test_a_rank_that_holds_nothing_is_verified_too(rng: np.random.Generator) -> None:
    params, _ = trainer_and_rollout(rng, w=(10, 4))
    target = {"w": Layout((10, 4), "float32", {0: [(0, 10), (0, 4)], 1: [(5, 5), (0, 4)]})}
    plan = sf.register(sf.make_plan(params, target))
    sf.sync(params, plan)
    assert sf.verify(params, plan) == 160


def test_names_may_have_digits_of_any_script(rng: np.random.Generator) -> None:
    params, target = trainer_and_rollout(rng, **{"layers.².w": (4, 2), "²": (2,)})
    plan = sf.register(sf.make_plan(params, target))
    sf.sync(params, plan)
    assert sf.verify(params, plan)


def test_names_with_braces_are_refused_by_name(rng: np.random.Generator) -> None:
    params, target = trainer_and_rollout(rng, **{"w{i}": (4, 2)})
    with pytest.raises(sf.PlanError, match=r"'w\{i\}' of 'rollout' has braces"):
        sf.make_plan(params, target)


def test_a_leaf_of_an_unsupported_dtype_is_named(rng: np.random.Generator) -> None:
    params, target = trainer_and_rollout(rng, w=(4, 2))
    with pytest.raises(sf.PlanError, match=r"'key' of source.*nnx\.Param"):
        sf.make_plan({**params, "key": jax.random.key(0)}, target)


def test_floats_do_not_become_integers(rng: np.random.Generator) -> None:
    params, _ = trainer_and_rollout(rng, w=(4, 2))
    target = {"w": like((4, 2), "int8", mesh((1,), "y"))}
    with pytest.raises(sf.PlanError, match=r"'w'.*not defined"):
        sf.make_plan(params, target, allow_cast="*")


@pytest.mark.parametrize("names", [["rollout"], ["a/0"], [""], [3]])
def test_replica_names_that_would_be_mistaken_are_refused(names: list) -> None:
    with pytest.raises(sf.PlanError, match="names"):
        sf.replicas({name: {} for name in names})


def test_a_topology_may_be_named(rng: np.random.Generator) -> None:
    params, target = trainer_and_rollout(rng, w=(4, 2))
    assert sf.make_plan(params, target, topology="h100") == sf.make_plan(params, target, topology=preset("h100"))


def test_params_on_other_devices_are_told_apart_in_the_message(rng: np.random.Generator) -> None:
    params, target = trainer_and_rollout(rng, w=(4, 2))
    plan = sf.register(sf.make_plan(params, target))
    moved = {"w": put(np.asarray(params["w"]), mesh((2,), "x", [4, 5]), "x")}
    with pytest.raises(sf.ParamsMismatch) as caught:
        sf.sync(moved, plan)
    assert str(jax.devices()[4]) in str(caught.value)


def test_a_plan_is_loaded_by_the_digest_that_reports_print(rng: np.random.Generator, tmp_path) -> None:  # type: ignore[no-untyped-def]
    params, target = trainer_and_rollout(rng, w=(4, 2))
    plan = sf.make_plan(params, target)
    plan.save(tmp_path / "plan")
    assert sf.load_plan(tmp_path / "plan", digest=plan.digest[:12]) == plan
    assert [path.name for path in tmp_path.iterdir()] == ["plan"]
    with pytest.raises(sf.DigestMismatch):
        sf.load_plan(tmp_path / "plan", digest=plan.digest[:4])
