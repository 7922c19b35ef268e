"""What users of other weight syncs reported, each as a small test that it cannot happen here: wrong values, silently.

See also `test_field_operation` (crashes, memory, speed, versions) and `test_bad_sync`. The contract is that of
vllm#48312: a call that returns is no proof; the bytes at the receiver are.
"""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest
from checks import (
    POISON,
    assert_holds,
    assert_same_bits,
    check_meaning,
    fresh,
    like,
    memory,
    mesh,
    pointers,
    poison_buffers,
    put,
    registered_bytes,
    updated,
)

import shardfly_jax as sf

GRID = (1, 2, 4, 8)


def test_grouped_and_plain_qkv_are_different_layouts_and_both_are_right(rng: np.random.Generator) -> None:
    """NeMo-RL#2802: qkv was concatenated although the model interleaves it per group of kv heads."""
    heads, groups, dim, width = 4, 2, 3, 5
    q, k, v = fresh(rng, heads * dim, width), fresh(rng, groups * dim, width), fresh(rng, groups * dim, width)
    plain = np.concatenate([q, k, v])
    grouped = np.concatenate([q[0:6], k[0:3], v[0:3], q[6:12], k[3:6], v[3:6]])
    assert (plain != grouped).any()
    arrays, parts = {"q": q, "k": k, "v": v}, [sf.src("q"), sf.src("k"), sf.src("v")]
    check_meaning({"qkv": sf.concat(parts)}, arrays, {"qkv": plain})
    split = [
        sf.src("q").rearrange("(g m h) d -> g (m h) d", g=groups, h=dim),
        *(sf.src(name).rearrange("(g h) d -> g h d", g=groups) for name in "kv"),
    ]
    check_meaning({"qkv": sf.concat(split, axis=1).rearrange("g r d -> (g r) d")}, arrays, {"qkv": grouped})


def test_every_scanned_layer_arrives_and_a_missing_one_is_named(rng: np.random.Generator) -> None:
    """maxtext#4404: scanned layers were dropped."""
    over, rollout = mesh((2,), "x"), mesh((2,), "y", [2, 3])
    stack = fresh(rng, 3, 4, 6)
    params, mapping = {"layers": put(stack, over, None, "x")}, sf.Mapping({"h.{i}.w": sf.src("layers")["{i}"]})

    def target(layers: int) -> dict[str, object]:
        return {f"h.{i}.w": like((4, 6), "float32", rollout, None, "y") for i in range(layers)}

    plan = sf.register(sf.make_plan(params, target(3), mapping))
    for i, leaf in enumerate(updated(params, plan).values()):
        assert_holds(leaf, stack[i], f"layer {i}")
    with pytest.raises(sf.PlanError, match=r"'h\.3\.w'.*length 3"):
        sf.make_plan(params, target(4), mapping)
    named = {f"h.{i}.w": put(stack[i], over) for i in range(3)}
    with pytest.raises(sf.PlanError, match=r"unused: source 'h\.2\.w'"):
        sf.make_plan(named, target(2))
    with pytest.raises(sf.PlanError, match=r"missing: target 'h\.3\.w'"):
        sf.make_plan(named, target(4))


def test_a_tied_head_is_never_stale(rng: np.random.Generator) -> None:
    """prime-rl#2823, vllm#51665: the clone of a tied lm_head was left behind."""
    over, rollout = mesh((2,), "x"), mesh((2,), "y", [2, 3])
    target = {name: like((6, 4), "float32", rollout, "y") for name in ("embed", "lm_head")}
    mapping = sf.Mapping({"embed": sf.src("e"), "lm_head": sf.alias("embed")})
    params = {"e": put(fresh(rng, 6, 4), over)}
    plan = sf.register(sf.make_plan(params, target, mapping))
    for _ in range(2):
        x = fresh(rng, 6, 4)
        out = updated({"e": put(x, over)}, plan)
        assert_holds(out["embed"], x)
        assert_holds(out["lm_head"], x)
    twice = sf.Mapping({"{i}": sf.src("e"), "{i:1:}": sf.src("e")})
    with pytest.raises(sf.PlanError, match="doubly mapped"):
        sf.make_plan(params, {"1": target["embed"]}, twice)


def test_a_float32_router_bias_is_never_narrowed_in_silence(rng: np.random.Generator) -> None:
    """NeMo-RL#3540, Automodel#2553, vllm#50761."""
    over, rollout = mesh((2,), "x"), mesh((2,), "y", [2, 3])
    values = {"router.bias": fresh(rng, 8), "w": fresh(rng, 8, 8)}
    params = {name: put(x, over) for name, x in values.items()}
    narrow = {name: like(x.shape, "bfloat16", rollout) for name, x in values.items()}
    with pytest.raises(sf.PlanError, match=r"narrowing: target 'router\.bias'.*allow_cast="):
        sf.make_plan(params, narrow, allow_cast=("w",))
    kept = narrow | {"router.bias": like((8,), "float32", rollout)}
    out = updated(params, sf.register(sf.make_plan(params, kept, allow_cast=("w",))))
    assert_holds(out["router.bias"], values["router.bias"])
    assert_holds(out["w"], values["w"].astype(ml_dtypes.bfloat16))


def test_the_same_update_three_times_gives_the_same_bytes_at_the_same_places(rng: np.random.Generator) -> None:
    """sglang#28963, SkyRL#1680, SkyRL#1737, vllm#42821: a shuffle was applied twice. NeMo-RL#3739, vllm#48941: the
    first forward rebound storage."""
    over, rollout = mesh((4,), "x"), mesh((2,), "y", [4, 5])
    params = {"w": put(fresh(rng, 8, 4), over, "x")}
    expr = sf.src("w").rearrange("(two n) d -> d (n two)", two=2)
    target = {"t": put(fresh(rng, 4, 8), rollout, None, "y")}
    plan = sf.register(sf.make_plan(params, target, sf.Mapping({"t": expr})), target)
    where, first = pointers(target), None
    for _ in range(3):
        out = sf.sync(params, plan)
        first = first or memory(out)
        assert memory(out) == first
        assert pointers(out) == where == pointers(sf.params(plan))


def test_a_derived_copy_is_a_target_too(rng: np.random.Generator) -> None:
    """NeMo-RL#3739: the kernel's shuffled copy was not refreshed."""
    over, rollout = mesh((2,), "x"), mesh((2,), "y", [2, 3])
    mapping = sf.Mapping({"w": sf.src("w"), "w_shuffled": sf.src("w").rearrange("(a b) c -> (b a) c", b=2)})
    target = {name: like((6, 4), "float32", rollout, None, "y") for name in ("w", "w_shuffled")}
    plan = sf.register(sf.make_plan({"w": put(fresh(rng, 6, 4), over, "x")}, target, mapping))
    for _ in range(2):
        x = fresh(rng, 6, 4)
        out = updated({"w": put(x, over, "x")}, plan)
        assert_holds(out["w"], x)
        assert_holds(out["w_shuffled"], x[[0, 2, 4, 1, 3, 5]])


def test_extra_missing_and_duplicate_names_are_one_error(rng: np.random.Generator) -> None:
    """tunix#230: unmapped names were only logged."""
    over, rollout = mesh((2,), "x"), mesh((2,), "y", [2, 3])
    source = {name: like((4,), "float32", over) for name in ("h.0", "h.1", "idle")}
    target = {name: like((4,), "float32", rollout) for name in ("h.0", "h.1", "h.7", "extra")}
    mapping = sf.Mapping({"h.{i}": sf.src("h.{i}"), "h.{i:1:2}": sf.src("h.{i}")})
    with pytest.raises(sf.PlanError) as caught:
        sf.make_plan(source, target, mapping)
    found = {(fault.split(":")[0], name) for fault in caught.value.faults for name in [fault.split("'")[1]]}
    assert {("unmapped", "extra"), ("missing", "h.7"), ("doubly mapped", "h.1"), ("unused", "idle")} <= found


def test_a_plan_over_no_matches_is_an_error() -> None:
    """modelexpress#481: an empty plan reported success."""
    over = mesh((2,), "x")
    source = {"w": like((4,), "float32", over)}
    with pytest.raises(sf.PlanError, match="empty"):
        sf.make_plan(source, {}, unused=("w",))
    with pytest.raises(sf.PlanError, match="empty"):
        sf.make_plan(source, source, keep=("*",), unused=("w",))


@pytest.mark.parametrize("pattern", [POISON, 0xFF, 0x00])
def test_every_byte_of_every_buffer_is_written(rng: np.random.Generator, pattern: int) -> None:
    """tokenspeed#1373: the call succeeded, the memory was never written. 0xFF bytes are NaN."""
    over, rollout = mesh((2, 2), "x y"), mesh((4,), "z", [4, 5, 6, 7])
    values = {"a": fresh(rng, 8, 4), "b": fresh(rng, 4), "c": fresh(rng, 4, 8, dtype="bfloat16")}
    params = {
        name: put(x, over, *spec) for (name, x), spec in zip(values.items(), [("x", "y"), (), ("y",)], strict=True)
    }
    target = {
        "a": like((8, 4), "float32", rollout, "z"),
        "b": like((4,), "float32", rollout),
        "c": like((4, 8), "bfloat16", rollout, None, "z"),
    }
    plan = sf.register(sf.make_plan(params, target))
    poison_buffers(plan, pattern)
    sf.sync(params, plan)
    for name, leaf in sf.params(plan).items():
        assert_holds(leaf, values[name], name)
    assert sum(len(data) for data in registered_bytes(plan).values()) == plan.target_nbytes


def test_padding_of_the_vocabulary_is_filled_and_never_read(rng: np.random.Generator) -> None:
    """AReaL#149: the vocabulary was padded on one side only; 151 rows against 160."""
    over, rollout = mesh((1,), "x"), mesh((4,), "y", [4, 5, 6, 7])
    x = fresh(rng, 151, 8)
    padded = np.concatenate([x, np.zeros((9, 8), np.float32)])
    mapping = sf.Mapping({"e": sf.src("e").pad([(0, 9), (0, 0)])})
    params = {"e": put(x, over)}
    plan = sf.register(sf.make_plan(params, {"e": like((160, 8), "float32", rollout, "y")}, mapping))
    assert_holds(updated(params, plan)["e"], padded)
    assert plan.nbytes == 151 * 8 * 4, "padding is not payload"
    back = sf.Mapping({"e": sf.src("e")[:151]})
    params = {"e": put(padded, rollout, "y")}
    plan = sf.register(sf.make_plan(params, {"e": like((151, 8), "float32", over)}, back))
    assert_holds(updated(params, plan)["e"], x)


@pytest.mark.parametrize("source", GRID)
@pytest.mark.parametrize("target", GRID)
def test_axes_and_numbers_of_parts_may_differ_on_both_sides(rng: np.random.Generator, source: int, target: int) -> None:
    """ROCm/ATOM#2028: a tensor-parallel bug was invisible at TP = 1. Copies and transposes, each axis to each axis."""
    over = mesh((source,), "x", rng.permutation(8)[:source].tolist())
    rollout = mesh((target,), "y", rng.permutation(8)[:target].tolist())
    specs = [("x", None), (None, "x")]
    values = {f"{k}": fresh(rng, 8, 16) for k in range(4)}
    params, tree, entries, want = {}, {}, {}, {}
    for (name, x), (spec, to) in zip(values.items(), itertools.product(specs, specs), strict=True):
        params[name] = put(x, over, *spec)
        to = tuple("y" if axis else None for axis in to)
        tree |= {
            f"copy{name}": like((8, 16), "float32", rollout, *to),
            f"turn{name}": like((16, 8), "float32", rollout, *to),
        }
        entries |= {f"copy{name}": sf.src(name), f"turn{name}": sf.src(name).rearrange("a b -> b a")}
        want |= {f"copy{name}": x, f"turn{name}": np.ascontiguousarray(x.T)}
    plan = sf.register(sf.make_plan(params, tree, sf.Mapping(entries)))
    out = updated(params, plan)
    for name, x in want.items():
        assert_holds(out[name], x, name)
        assert_same_bits(out[name], x, name)
