"""Bad input to planning: every fault at once, each with the tensor's name and what to do."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from checks import assert_holds, cut, fresh, like, mesh, put
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec as P

import shardfly_jax as sf
from shardfly_jax.sharding.families import TargetTree
from shardfly_jax.sharding.planner import build_plan
from shardfly_jax.sharding.problem import Problem


def trainer(**shapes: tuple[int, ...]) -> dict[str, Any]:
    """Replicated float32 sources on two devices; `__` in a name stands for a point."""
    return {name.replace("__", "."): like(shape, "float32", mesh((2,), "x")) for name, shape in shapes.items()}


def rollout(dtype: Any = "float32", **shapes: tuple[int, ...]) -> dict[str, Any]:
    """The like on two other devices."""
    over = mesh((2,), "y", [4, 5])
    return {name.replace("__", "."): like(shape, dtype, over) for name, shape in shapes.items()}


def faults_of(source: Any, target: Any, mapping: Any = None, **options: Any) -> tuple[str, ...]:
    """The faults of a plan that cannot be made."""
    entries = sf.Mapping(mapping) if isinstance(mapping, dict) and mapping else mapping
    with pytest.raises(sf.PlanError) as caught:
        sf.make_plan(source, target, entries, **options)
    for fault in caught.value.faults:
        assert fault in str(caught.value)
    return caught.value.faults


def only_fault(*args: Any, has: tuple[str, ...], **options: Any) -> None:
    """There is one fault, and it contains all of `has`."""
    faults = faults_of(*args, **options)
    assert len(faults) == 1, faults
    for word in has:
        assert word in faults[0], f"{word!r} is not in: {faults[0]}"


def test_an_unmapped_target_is_refused() -> None:
    has = ("unmapped", "'b'", "keep=")
    only_fault(trainer(a=(4,)), rollout(a=(4,), b=(4,)), {"a": sf.src("a")}, has=has)


def test_a_target_that_two_patterns_match_is_refused() -> None:
    mapping = {"h.{i}": sf.src("a"), "h.{i:1:}": sf.src("a")}
    has = ("doubly mapped", "'h.1'", "'h.{i}'", "'h.{i:1:}'", "range")
    only_fault(trainer(a=(4,)), rollout(h__0=(4,), h__1=(4,)), mapping, has=has)


def test_a_missing_source_is_refused() -> None:
    has = ("missing", "'b'", "source 'b' does not exist")
    only_fault(trainer(a=(4,)), rollout(a=(4,), b=(4,)), has=has)
    mapping = {"t.{i}": sf.src("h.{i}")}
    only_fault(trainer(h__0=(4,)), rollout(t__0=(4,), t__1=(4,)), mapping, has=("missing", "'t.1'", "'h.1'"))


def test_a_misshapen_target_is_refused() -> None:
    has = ("misshapen", "'a'", "(4, 2)", "(2, 4)", "Mend the mapping or the target")
    only_fault(trainer(a=(2, 4)), rollout(a=(4, 2)), has=has)


def test_a_pattern_that_names_an_unknown_axis_is_refused_when_it_is_written() -> None:
    with pytest.raises(sf.LanguageError, match=r"'a b -> a c'.*\['b', 'c'\].*both sides"):
        sf.src("a").rearrange("a b -> a c")
    mapping = {"a": sf.src("a").rearrange("a b -> b a", c=2)}
    has = ("misshapen", "'a'", "['c']", "not axes of 'a b -> b a'")
    only_fault(trainer(a=(2, 4)), rollout(a=(4, 2)), mapping, has=has)


def test_narrowing_is_refused_unless_it_is_allowed(rng: np.random.Generator) -> None:
    source, target = trainer(a=(4,), b=(4,)), rollout("bfloat16", a=(4,), b=(4,))
    faults = faults_of(source, target)
    assert len(faults) == 2
    for name, fault in zip("ab", faults, strict=True):
        for word in ("narrowing", repr(name), "bfloat16", "float32", "allow_cast=", ".astype('bfloat16')"):
            assert word in fault
    only_fault(source, target, has=("narrowing", "'b'"), allow_cast=("a",))

    values = {name: fresh(rng, 4) for name in "ab"}
    params = {name: put(x, mesh((2,), "x")) for name, x in values.items()}
    mapping = sf.Mapping({"a": sf.src("a"), "b": sf.src("b").astype("bfloat16")})
    plan = sf.register(sf.make_plan(params, target, mapping, allow_cast=("a",)))
    for name, leaf in sf.sync(params, plan).items():
        assert_holds(leaf, values[name].astype(ml_dtypes.bfloat16), name)


@pytest.mark.parametrize(
    ("source", "target"),
    [("int32", "int16"), ("int32", "float32"), ("float16", "bfloat16"), ("bfloat16", "float16")],
)
def test_casts_that_lose_values_are_narrowing(source: str, target: str) -> None:
    over = mesh((2,), "x")
    has = ("narrowing", "'a'", source, target)
    only_fault({"a": like((4,), source, over)}, {"a": like((4,), target, over)}, has=has)


def test_a_single_string_of_patterns_does_not_allow_every_cast() -> None:
    """A string is a tuple of characters, and one of them may be `*`."""
    source, target = trainer(h__0=(4,), router=(4,)), rollout("bfloat16", h__0=(4,), router=(4,))
    with pytest.raises((sf.PlanError, TypeError)):
        sf.make_plan(source, target, allow_cast="h.*")


@pytest.mark.parametrize("abstract", [False, True])
def test_a_mesh_that_does_not_divide_is_refused(abstract: bool) -> None:
    over = AbstractMesh((4,), ("x",)) if abstract else mesh((4,), "x")
    leaf = jax.ShapeDtypeStruct((6, 4), "float32", sharding=NamedSharding(over, P("x")))
    has = ("indivisible", "'a'", "6 elements on axis 0", "4 equal parts", "sf.Layout with uneven boxes")
    only_fault({"a": leaf}, rollout(a=(6, 4)), has=(*has, "source"))
    only_fault(trainer(a=(6, 4)), {"a": leaf}, has=(*has, "target"))


@pytest.mark.parametrize("target", [{}, None, []])
def test_an_empty_plan_is_refused(target: Any) -> None:
    (fault,) = faults_of({}, target)
    assert fault.startswith("empty"), fault
    assert "no target would be written" in fault


def test_a_plan_that_keeps_everything_is_refused() -> None:
    faults = faults_of(trainer(a=(4,)), rollout(a=(4,)), keep=("a",), unused=("a",))
    assert any(fault.startswith("empty") for fault in faults), faults


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3)])
def test_a_tensor_of_size_zero_is_refused(shape: tuple[int, ...]) -> None:
    has = ("zero-size", "'a'", str(shape), "keep=")
    only_fault(trainer(a=shape), rollout(a=shape), has=has)


def test_a_slice_that_is_empty_is_refused() -> None:
    has = ("zero-size", "'t'", "(0, 4)")
    only_fault(trainer(a=(3, 4)), rollout(t=(0, 4)), {"t": sf.src("a")[3:]}, has=has)


def test_a_source_that_reaches_no_target_is_refused_unless_listed() -> None:
    source, target = trainer(a=(4,), b=(4,)), rollout(a=(4,))
    only_fault(source, target, has=("unused", "'b'", "unused="))
    assert sf.make_plan(source, target, unused=("b",)).nbytes > 0


def test_patterns_that_match_nothing_are_refused() -> None:
    source, target = trainer(a=(4,)), rollout(a=(4,))
    only_fault(source, target, has=("unmatched", "keep=", "'z.*'", "mend the name"), keep=("z.*",))
    only_fault(source, target, has=("unmatched", "unused=", "'y.{i}'", "mend the name"), unused=("y.{i}",))
    only_fault(source, target, has=("unmatched", "unused=", "'a'"), unused=("a",))
    mapping = {"a": sf.src("a"), "lm_haed": sf.src("a"), "h.{i}": sf.src("a")}
    faults = faults_of(source, target, mapping)
    assert [fault.split(":")[0] for fault in faults] == ["unmatched", "unmatched"]
    assert "'lm_haed'" in faults[0]
    assert "'h.{i}'" in faults[1]


def test_all_faults_are_listed_at_once() -> None:
    source = trainer(a=(4,), b=(4, 2), c=(4,), d=(4,), idle=(4,))
    target = rollout(a=(4,), b=(2, 4), e=(4,), f=(4,), g=(0,)) | rollout("bfloat16", d=(4,))
    mapping = {
        "a": sf.src("a"), "b": sf.src("b"), "d": sf.src("d"), "f": sf.src("nowhere"),
        "g": sf.src("c")[4:], "typo": sf.src("c"),
    }  # fmt: skip
    faults = faults_of(source, target, mapping, keep=("zz",))
    kinds = {fault.split(":")[0]: fault for fault in faults}
    assert sorted(kinds) == sorted(
        ["misshapen", "unmapped", "missing", "zero-size", "narrowing", "unmatched", "unused"]
    ), faults
    for kind, name in {"misshapen": "b", "unmapped": "e", "missing": "f", "zero-size": "g", "narrowing": "d"}.items():
        assert repr(name) in kinds[kind]
    assert len([fault for fault in faults if fault.startswith("unmatched")]) == 2


def test_faults_of_all_replicas_are_listed_at_once() -> None:
    trees = sf.replicas({"left": rollout(a=(5,)), "right": rollout(a=(4,), b=(4,))})
    faults = faults_of(trainer(a=(4,)), trees)
    assert len(faults) == 2
    assert "'left'" in faults[0]
    assert "'a'" in faults[0]
    assert "'right'" in faults[1]
    assert "'b'" in faults[1]


# Trees that cannot be read


@pytest.mark.parametrize("leaf", [3.0, np.zeros(4, np.float32), jax.ShapeDtypeStruct((4,), "float32"), "w"])
def test_a_leaf_without_a_sharding_is_refused(leaf: Any) -> None:
    has = ("'a'", type(leaf).__name__, "NamedSharding", "jax.device_put")
    only_fault({"a": leaf}, rollout(a=(4,)), has=(*has, "source"))
    only_fault(trainer(a=(4,)), {"a": leaf}, has=(*has, "target"))


def test_two_leaves_of_one_name_are_refused() -> None:
    leaf = trainer(a=(4,))["a"]
    only_fault({"a.b": leaf, "a": {"b": leaf}}, rollout(a__b=(4,)), has=("'a.b'", "several leaves", "Rename"))


def test_a_mapping_of_another_kind_is_refused() -> None:
    with pytest.raises(sf.PlanError, match=r"str is neither an sf\.Mapping"):
        sf.make_plan(trainer(a=(4,)), rollout(a=(4,)), "a")
    with pytest.raises(sf.PlanError, match=r"\['a'\].*sf\.Mapping\(\{\.\.\.\}\)"):
        sf.make_plan(trainer(a=(4,)), rollout(a=(4,)), {"a": sf.src("a")})


def test_mappings_must_name_the_replicas() -> None:
    trees = sf.replicas({"left": rollout(a=(4,)), "right": rollout(a=(4,))})
    with pytest.raises(sf.PlanError, match=r"\['left'\].*\['left', 'right'\]"):
        sf.make_plan(trainer(a=(4,)), trees, {"left": None})
    with pytest.raises(sf.PlanError, match="one tree per replica"):
        sf.replicas({})


def test_rank_local_trees_that_do_not_fit_are_refused() -> None:
    with pytest.raises(sf.PlanError, match="one tree per rank"):
        sf.local([])
    a = trainer(a=(6, 4))
    for shapes in ([(3, 4), (2, 4)], [(3, 2), (3, 2)], [(3,), (3,)], [(6, 4), (3, 4)]):
        ranks = [{"a": jax.ShapeDtypeStruct(shape, "float32")} for shape in shapes]
        only_fault(a, sf.local(ranks), has=("misshapen", "'a'", "(6, 4)", "sf.Layout"))
    mixed = [{"a": jax.ShapeDtypeStruct((3, 4), dtype)} for dtype in ("float32", "float16")]
    only_fault(a, sf.local(mixed), has=("'a'", "float16", "float32"))


@pytest.mark.parametrize(
    ("boxes", "words"),
    [
        ({}, "empty"),
        ({0: [(0, 5), (0, 3)]}, r"rank 0 is not inside the shape \(4, 3\)"),
        ({0: [(2, 1), (0, 3)]}, "rank 0 is not inside"),
        ({0: [(0, 4)]}, "1 axes"),
        ({-1: [(0, 4), (0, 3)]}, "-1 is negative"),
    ],
)
def test_a_layout_with_impossible_boxes_is_refused(boxes: Mapping[int, Any], words: str) -> None:
    with pytest.raises(sf.PlanError, match=words):
        sf.Layout((4, 3), "float32", boxes)


@pytest.mark.parametrize("strides", [(1, 1), (2, 1), (3,), (0, 1), (-3, 1), {1: (3, 1)}])
def test_strides_that_make_elements_share_a_place_are_refused(strides: Any) -> None:
    with pytest.raises(sf.PlanError, match="strides"):
        sf.Layout((4, 3), "float32", {0: [(0, 4), (0, 3)]}, strides)


@pytest.mark.parametrize(
    ("boxes", "word"),
    [
        ([(0, 2), (3, 4)], "'t'.*leave out 3 of 12.*tile each tensor"),
        ([(0, 3), (2, 4)], "overlap.*'w'.*tile the tensor"),
        ([(0, 2), (1, 3)], "overlap.*'w'"),  # as much overlaps as is left out
    ],
)
def test_source_boxes_that_do_not_tile_their_tensor_are_refused(boxes: list[tuple[int, int]], word: str) -> None:
    source = sf.Layout((4, 3), "float32", {rank: [box, (0, 3)] for rank, box in enumerate(boxes)})
    tree = TargetTree(
        name="rollout", tensors={"t": cut((4, 3), "float32")}, mapping=sf.Mapping({"t": sf.src("w")}), ranks=1
    )
    with pytest.raises(sf.PlanError, match=word):
        build_plan(Problem({"w": source}, 2, [tree]))


def test_a_fuse_over_target_boxes_that_leave_a_gap_is_refused() -> None:
    target = sf.Layout((8, 3), "float32", {0: [(0, 4), (0, 3)], 1: [(6, 8), (0, 3)]})
    mapping = {"t": sf.fuse(sf.src("a"), sf.src("b"), axis=0)}
    has = ("misshapen", "'t'", "fuse", "does not tile")
    only_fault(trainer(a=(4, 3), b=(4, 3)), {"t": target}, mapping, has=has)


def test_a_topology_with_too_few_places_is_refused() -> None:
    with pytest.raises(sf.PlanError, match="rank"):
        sf.make_plan(trainer(a=(4,)), {"a": cut((4,), "float32", 0, 4)}, topology=sf.Topology(
            name="tiny", hosts=1, gpus_per_host=2, nvlink_rate=math.inf, nic_rate=0.0))  # fmt: skip
