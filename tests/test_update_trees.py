"""What params and rollouts may be: flax states and modules, layouts of one's own, rank-local trees, shared devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import (
    assert_holds,
    assert_same_bits,
    cut,
    fresh,
    like,
    memory,
    mesh,
    pointers,
    poison_buffers,
    put,
    updated,
)
from flax import nnx

import shardfly_jax as sf


class Net(nnx.Module):
    """Two linear layers in a list, a norm, and state that is no param."""

    def __init__(self, seed: int):
        rngs = nnx.Rngs(seed)
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(2)])
        self.norm = nnx.BatchNorm(8, use_running_average=True, rngs=rngs)
        self.drop = nnx.Dropout(0.0, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = self.drop(jnp.tanh(layer(x)))
        return self.norm(x)


NET_NAMES = [f"layers.{i}.{leaf}" for i in range(2) for leaf in ("bias", "kernel")] + ["norm.bias", "norm.scale"]


def sharded_net(seed: int, over: Any, axis: str) -> Net:
    """A net whose params have memory of their own on a mesh; kernels are cut along `axis` on their second axis."""
    net = Net(seed)

    def place(x: jax.Array) -> jax.Array:
        return put(np.asarray(x), over, *((None, axis) if x.ndim == 2 else ()))

    nnx.update(net, jax.tree.map(place, nnx.state(net, nnx.Param)))
    return net


def by_name(state: Any) -> dict[str, jax.Array]:
    """The arrays of a state by dotted path."""
    flat = nnx.to_flat_state(nnx.state(state, nnx.Param) if isinstance(state, nnx.Module) else state)
    return {".".join(map(str, path)): leaf[...] for path, leaf in flat}


def randomized(net: Net, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Gives a net fresh params in place; returns them by name."""
    state = nnx.state(net, nnx.Param)
    values = {name: fresh(rng, *x.shape) for name, x in by_name(state).items()}
    leaves, structure = jax.tree_util.tree_flatten_with_path(state)
    names = [
        ".".join(str(getattr(k, "key", getattr(k, "name", ""))) for k in path).removesuffix(".value")
        for path, _ in leaves
    ]
    new = [jax.device_put(values[name], leaf.sharding) for name, (_, leaf) in zip(names, leaves, strict=True)]
    nnx.update(net, jax.tree_util.tree_unflatten(structure, new))
    return values


@pytest.mark.parametrize("as_module", [True, False])
def test_a_trainer_may_be_an_nnx_state_or_module(rng: np.random.Generator, as_module: bool) -> None:
    net = sharded_net(0, mesh((2,), "x"), "x")
    rollout = mesh((4,), "y", [4, 5, 6, 7])
    target = {
        name: like(x.shape, "float32", rollout, *((None, "y") if x.ndim == 2 else ()))
        for name, x in by_name(net).items()
    }
    assert sorted(target) == NET_NAMES

    def params() -> Any:
        return net if as_module else nnx.state(net, nnx.Param)

    plan = sf.register(sf.make_plan(params(), target))
    for _ in range(2):
        values = randomized(net, rng)
        out = updated(params(), plan)
        for name, x in values.items():
            assert_holds(out[name], x, name)


def test_a_rollout_may_be_an_nnx_module_that_computes_with_the_new_weights(rng: np.random.Generator) -> None:
    trainer, engine = sharded_net(0, mesh((2,), "x"), "x"), sharded_net(1, mesh((2,), "y", [4, 5]), "y")
    other_state = memory(nnx.to_pure_dict(nnx.state(engine, nnx.BatchStat)))
    plan = sf.register(sf.make_plan(trainer, engine), engine)
    where = pointers(by_name(engine))
    x = put(fresh(rng, 3, 8), mesh((2,), "y", [4, 5]))
    for _ in range(3):
        values = randomized(trainer, rng)
        poison_buffers(plan)
        out = sf.sync(trainer, plan)
        assert pointers(by_name(engine)) == where
        for name, leaf in by_name(engine).items():
            assert_holds(leaf, values[name], name)
        assert by_name(out).keys() == values.keys()
        reference = Net(2)
        nnx.update(
            reference,
            jax.tree.map(lambda leaf: put(np.asarray(leaf), mesh((2,), "y", [4, 5])), nnx.state(engine, nnx.Param)),
        )
        np.testing.assert_allclose(
            np.asarray(engine(x)), np.asarray(reference(x)), rtol=1e-5
        )  # other shardings sum otherwise
    assert memory(nnx.to_pure_dict(nnx.state(engine, nnx.BatchStat))) == other_state
    engine.layers[0].kernel = nnx.Param(jnp.copy(engine.layers[0].kernel[...]))
    with pytest.raises(sf.StaleBuffer, match=r"'layers\.0\.kernel'"):
        sf.sync(trainer, plan)


def test_flax_params_are_named_by_their_path(rng: np.random.Generator) -> None:
    over, rollout = mesh((2,), "x"), mesh((2,), "y", [4, 5])
    x = fresh(rng, 4, 4)
    params = {"params": {"Dense_0": {"kernel": put(x, over, "x")}}, "list": [put(x, over), (put(x, over, None, "x"),)]}
    names = ("params.Dense_0.kernel", "list.0", "list.1.0")
    plan = sf.register(sf.make_plan(params, {name: like((4, 4), "float32", rollout, "y") for name in names}))
    for name, leaf in updated(params, plan).items():
        assert_holds(leaf, x, name)


# Layouts


def uneven(shape: tuple[int, int], edges: list[int], dtype: str = "float32") -> sf.Layout:
    """Rows cut at the given edges; rank k holds the k-th range."""
    return sf.Layout(shape, dtype, {k: [(edges[k], edges[k + 1]), (0, shape[1])] for k in range(len(edges) - 1)})


def test_layouts_may_be_uneven_on_both_sides(rng: np.random.Generator) -> None:
    source, target = uneven((10, 6), [0, 3, 4, 10]), uneven((6, 10), [0, 1, 6])
    plan = sf.make_plan({"w": source}, {"t": target}, sf.Mapping({"t": sf.src("w").rearrange("a b -> b a")}))
    plan = sf.register(plan)
    for _ in range(2):
        x = fresh(rng, 10, 6)
        parts = [x[0:3], x[3:4], x[4:10]]
        params = {"w": {k: jax.device_put(np.array(part), jax.devices()[k]) for k, part in enumerate(parts)}}
        out = updated(params, plan)["t"]
        assert_same_bits(out[0], np.ascontiguousarray(x.T[0:1]))
        assert_same_bits(out[1], np.ascontiguousarray(x.T[1:6]))
        assert sf.verify(params, plan) == x.nbytes


def test_a_rank_may_hold_nothing_of_a_tensor(rng: np.random.Generator) -> None:
    target = uneven((4, 6), [0, 0, 4, 4])
    x = fresh(rng, 4, 6)
    params = {"w": put(x, mesh((2,), "x"), "x")}
    out = updated(params, sf.register(sf.make_plan(params, {"w": target})))["w"]
    assert [part.shape for part in out.values()] == [(0, 6), (4, 6), (0, 6)]
    assert_same_bits(out[1], x)


def test_target_buffers_may_be_strided(rng: np.random.Generator) -> None:
    """Rank 0 holds its box transposed; rank 1 holds rows of 6 in steps of 8. Holes are left alone."""
    boxes = {0: [(0, 2), (0, 6)], 1: [(2, 5), (0, 6)]}
    target = sf.Layout((5, 6), "float32", boxes, {0: (1, 2), 1: (8, 1)})
    x = fresh(rng, 5, 6)
    params = {"w": put(x, mesh((1,), "x"))}
    plan = sf.register(sf.make_plan(params, {"w": target}))
    out = updated(params, plan)["w"]
    assert [part.shape for part in out.values()] == [(12,), (22,)]
    assert_same_bits(out[0], np.ascontiguousarray(x[0:2].T).reshape(-1))
    rows = np.pad(np.asarray(out[1]), (0, 2)).reshape(3, 8)
    assert_same_bits(np.ascontiguousarray(rows[:, :6]), x[2:5])
    assert (np.ascontiguousarray(rows[:2, 6:]).view(np.uint8) == 0xA5).all()
    assert sf.verify(params, plan) == x.nbytes


def test_source_buffers_may_be_strided(rng: np.random.Generator) -> None:
    """A strided buffer is given flat, as a rollout's is."""
    source = sf.Layout((4, 6), "float32", {0: [(0, 4), (0, 6)]}, (1, 4))
    x = fresh(rng, 4, 6)
    params = {"w": {0: jax.device_put(np.ascontiguousarray(x.T).reshape(-1), jax.devices()[0])}}
    plan = sf.register(sf.make_plan({"w": source}, {"w": like((4, 6), "float32", mesh((2,), "y", [4, 5]), "y")}))
    assert_holds(updated(params, plan)["w"], x)


def test_a_strided_source_is_not_taken_from_a_dense_array(rng: np.random.Generator) -> None:
    """Its memory would be read in the wrong order."""
    source = sf.Layout((4, 6), "float32", {0: [(0, 4), (0, 6)]}, (1, 4))
    plan = sf.register(sf.make_plan({"w": source}, {"w": like((4, 6), "float32", mesh((2,), "y", [4, 5]), "y")}))
    with pytest.raises(sf.ParamsMismatch, match=r"'w'.*\(24,\)"):
        sf.sync({"w": {0: jax.device_put(fresh(rng, 4, 6), jax.devices()[0])}}, plan)


def test_params_that_lack_the_shard_of_a_rank_are_refused(rng: np.random.Generator) -> None:
    plan = sf.register(sf.make_plan({"w": uneven((4, 6), [0, 1, 4])}, {"w": like((4, 6), "float32", mesh((1,), "y"))}))
    x = fresh(rng, 4, 6)
    good = {"w": {0: jnp.array(x[:1]), 1: jnp.array(x[1:])}}
    sf.sync(good, plan)
    for bad in (
        {"w": {0: good["w"][0]}},
        {"w": {0: good["w"][0], 2: good["w"][1]}},
        {"w": dict(enumerate([good["w"][1]] * 2))},
    ):
        with pytest.raises(sf.ParamsMismatch, match=r"'w'.*rank"):
            sf.sync(bad, plan)
    assert_holds(sf.params(plan)["w"], x)
    assert plan.version == {"rollout": 1}


def test_layouts_and_global_arrays_may_share_a_tree(rng: np.random.Generator) -> None:
    over = mesh((2,), "x", [3, 1])
    source = {"w": uneven((4, 6), [0, 1, 4]), "v": like((4,), "float32", over, "x")}
    plan = sf.register(
        sf.make_plan(source, {n: like(s, "float32", mesh((1,), "y")) for n, s in (("w", (4, 6)), ("v", (4,)))})
    )
    w, v = fresh(rng, 4, 6), fresh(rng, 4)
    first, second = (jax.devices()[k] for k in (3, 1))
    params = {"w": {0: jax.device_put(w[:1], first), 1: jax.device_put(w[1:], second)}, "v": put(v, over, "x")}
    out = updated(params, plan)
    assert_holds(out["w"], w)
    assert_holds(out["v"], v)
    params["w"] = {0: jax.device_put(w[:1], second), 1: jax.device_put(w[1:], first)}
    for registered in (plan, sf.register(plan)):
        with pytest.raises(sf.ParamsMismatch, match=r"'w'"):
            sf.sync(params, registered)


# Rank-local trees and shared devices


def test_rank_local_targets_are_cut_or_whole_by_their_shapes(rng: np.random.Generator) -> None:
    x, norm = fresh(rng, 4, 6), fresh(rng, 6)
    params = {"w": put(x, mesh((2,), "x"), "x"), "norm": put(norm, mesh((2,), "x"))}
    widths = [1, 3, 2]
    ranks = [
        {"w": jax.ShapeDtypeStruct((4, n), "float32"), "norm": jax.ShapeDtypeStruct((6,), "float32")} for n in widths
    ]
    plan = sf.register(
        sf.make_plan(params, sf.local(ranks)), placement={0: jax.devices()[5], 1: jax.devices()[5], 2: jax.devices()[2]}
    )
    out = updated(params, plan)
    assert [next(iter(tree["w"].devices())).id for tree in out] == [5, 5, 2]
    for tree, lo, n in zip(out, [0, 1, 4], widths, strict=True):
        assert_same_bits(tree["w"], np.ascontiguousarray(x[:, lo : lo + n]))
        assert_same_bits(tree["norm"], norm)


def test_pipeline_stages_hold_subsets_of_names_on_both_sides(rng: np.random.Generator) -> None:
    """Trainer stages hold layers 0 and 1-3, rollout stages 0-2 and 3; the tied head is on the last stage."""
    values = {f"h.{i}": fresh(rng, 4, 6) for i in range(4)} | {"embed": fresh(rng, 8, 4)}
    stages = [["embed", "h.0"], ["h.1", "h.2", "h.3"]]

    def struct(name: str) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(values[name].shape, "float32")

    source = sf.local([{name: struct(name) for name in stage} for stage in stages])
    target = sf.local([{"embed": struct("embed")} | {f"h.{i}": struct(f"h.{i}") for i in range(3)},
                       {"h.3": struct("h.3"), "head": struct("embed")}])  # fmt: skip
    mapping = sf.Mapping({"h.{i}": sf.src("h.{i}"), "embed": sf.src("embed"), "head": sf.alias("embed")})
    plan = sf.register(sf.make_plan(source, target, mapping), placement=lambda rank: jax.devices()[6 + rank])
    for _ in range(2):
        trees = [
            {name: jax.device_put(values[name], jax.devices()[k]) for name in stage} for k, stage in enumerate(stages)
        ]
        for params in (sf.local(trees), trees):
            first, second = updated(params, plan)
            for name in ("embed", "h.0", "h.1", "h.2"):
                assert_same_bits(first[name], values[name], name)
            assert_same_bits(second["h.3"], values["h.3"])
            assert_same_bits(second["head"], values["embed"])
        values = {name: fresh(rng, *x.shape) for name, x in values.items()}


def test_an_owner_may_be_rank_local_trees(rng: np.random.Generator) -> None:
    x = fresh(rng, 4, 6)
    params = {"w": put(x, mesh((2,), "x"), "x")}
    trees = [{"w": jax.device_put(fresh(rng, 2, 6), jax.devices()[4])} for _ in range(2)]  # two ranks on one device
    where = pointers(trees)
    for owner in (sf.local(trees), trees):
        plan = sf.register(sf.make_plan(params, sf.local(trees)), owner)
        out = updated(params, plan)
        assert isinstance(out, list)
        assert pointers(out) == where
        assert_same_bits(np.concatenate([tree["w"] for tree in out]), x)
    with pytest.raises(sf.RegistrationError, match=r"'w' has no buffer for the ranks \[1\]"):
        sf.register(plan, trees[:1])


def test_all_ranks_may_share_one_device(rng: np.random.Generator) -> None:
    (device,) = jax.devices()[:1]
    x = fresh(rng, 8, 6)
    params = {"w": {k: jax.device_put(x[2 * k : 2 * k + 2], device) for k in range(4)}}
    target = {"w": cut((8, 6), "float32", 1, 3), "again": cut((8, 6), "float32", 0, 2)}
    mapping = sf.Mapping({"w": sf.src("w"), "again": sf.src("w")})
    plan = sf.register(sf.make_plan({"w": cut((8, 6), "float32", 0, 4)}, target, mapping), placement=lambda _: device)
    out = updated(params, plan)
    assert_same_bits(np.concatenate(list(out["w"].values()), axis=1), x)
    assert_same_bits(np.concatenate(list(out["again"].values())), x)


def test_a_placement_must_name_a_device_for_every_rank(rng: np.random.Generator) -> None:
    plan = sf.make_plan({"w": cut((4, 6), "float32")}, {"w": cut((4, 6), "float32", 0, 2)})
    with pytest.raises(sf.RegistrationError, match="no device for rollout rank 1"):
        sf.register(plan, placement={0: jax.devices()[0]})
