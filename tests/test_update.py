"""One update in one process: addresses, order with other computations, aliases, verification."""

from __future__ import annotations

import ctypes
import io
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from checks import (
    assert_holds,
    assert_same_bits,
    fresh,
    like,
    mesh,
    pointers,
    poison_buffers,
    put,
    updated,
)
from jax.sharding import AbstractMesh

import shardfly_jax as sf
from shardfly_jax.sharding.formats import np_dtype

ROLLOUT = [6, 2, 5, 3]


def small_update(rng: np.random.Generator) -> tuple[sf.Plan, dict[str, jax.Array], np.ndarray]:
    """A transposing plan from two devices to two others, params for it, and what the target must hold."""
    over, rollout = mesh((2,), "x"), mesh((2,), "y", [4, 5])
    x = fresh(rng, 6, 4)
    params = {"w": put(x, over, "x")}
    target = {"t": like((4, 6), "float32", rollout, "y")}
    plan = sf.make_plan(params, target, sf.Mapping({"t": sf.src("w").rearrange("a b -> b a")}))
    return sf.register(plan), params, np.ascontiguousarray(x.T)


def test_meshes_may_order_their_devices_in_any_way(rng: np.random.Generator) -> None:
    """Ranks are places in the mesh; devices of both sides may be the same ones."""
    for _ in range(4):
        over = mesh((2, 4), "fsdp tp", rng.permutation(8).tolist())
        rollout = mesh((4, 2), "tp dp", rng.permutation(8).tolist())
        x = fresh(rng, 8, 16)
        params = {"w": put(x, over, "fsdp", "tp"), "v": put(x, over, ("tp", "fsdp"))}
        target = {
            "w": like((8, 16), "float32", rollout, None, ("dp", "tp")),
            "v": like((8, 16), "float32", rollout, "tp", "dp"),
        }
        out = updated(params, sf.register(sf.make_plan(params, target)))
        for name, leaf in out.items():
            assert leaf.sharding == target[name].sharding
            assert_holds(leaf, x, name)


def test_ranks_are_numbered_in_mesh_order_whatever_the_device_ids(rng: np.random.Generator) -> None:
    source = {"w": like((4, 4), "float32", mesh((4,), "x", [7, 0, 3, 1]), "x")}
    target = {"w": like((4, 4), "float32", mesh((2,), "y", [6, 2]), "y")}
    plan = sf.make_plan(source, target)
    other = {"w": like((4, 4), "float32", mesh((4,), "x", [2, 4, 6, 0]), "x")}
    assert sf.make_plan(other, target).digest == plan.digest
    pairs = {(move.source_rank, move.target_rank) for move in plan.moves}
    assert pairs == {(0, 4), (1, 4), (2, 5), (3, 5)}


def test_a_plan_over_abstract_meshes_takes_real_params(rng: np.random.Generator) -> None:
    x = fresh(rng, 8, 4)
    over = mesh((4,), "x", [3, 1, 2, 0])
    abstract = {"w": like((8, 4), "float32", AbstractMesh((4,), ("x",)), "x")}
    target = {"w": like((8, 4), "float32", AbstractMesh((2,), ("y",)), None, "y")}
    owner = {"w": put(fresh(rng, 8, 4), mesh((2,), "y", [7, 5]), None, "y")}
    plan = sf.register(sf.make_plan(abstract, target), owner)
    out = updated({"w": put(x, over, "x")}, plan)
    assert_holds(out["w"], x)
    assert pointers(out) == pointers(owner)


def test_a_loaded_plan_updates_buffers_that_it_allocates(rng: np.random.Generator) -> None:
    plan, params, want = small_update(rng)
    file = io.BytesIO()
    plan.save(file)
    file.seek(0)
    loaded = sf.register(sf.load_plan(file), placement=lambda rank: jax.devices()[7 - rank])
    out = updated(params, loaded)
    assert [next(iter(part.devices())).id for part in out["t"].values()] == [7, 6]
    assert_same_bits(np.concatenate(list(out["t"].values())), want)


def test_addresses_stay_while_numpy_views_of_earlier_results_are_held(rng: np.random.Generator) -> None:
    plan, _, _ = small_update(rng)
    held: list[Any] = []
    where = None
    for number in range(1, 6):
        x = fresh(rng, 6, 4)
        out = updated({"w": put(x, mesh((2,), "x"), "x")}, plan)
        where = where or pointers(out)
        assert pointers(out) == where == pointers(sf.params(plan))
        assert_holds(out["t"], np.ascontiguousarray(x.T))
        assert_same_bits(out["t"], np.ascontiguousarray(x.T), "as a reader sees it, whatever JAX cached")
        assert out["t"] is not (held[-1][0] if held else None), "a new array, so that no cached value is read"
        held.append((out["t"], np.asarray(out["t"]), [np.asarray(s.data) for s in out["t"].addressable_shards]))
        assert plan.version == {"rollout": number}


def test_a_jitted_reader_sees_each_update(rng: np.random.Generator) -> None:
    plan, _, _ = small_update(rng)
    double = jax.jit(lambda t: t * 2)
    for _ in range(3):
        x = fresh(rng, 6, 4)
        out = sf.sync({"w": put(x, mesh((2,), "x"), "x")}, plan)
        assert_same_bits(double(out["t"]), np.ascontiguousarray(x.T) * np.float32(2))
        assert_same_bits(double(sf.params(plan)["t"]), np.ascontiguousarray(x.T) * np.float32(2))


@jax.jit
def slowly(x: jax.Array) -> jax.Array:
    """`x` itself, read after some tenths of a second of other work."""
    zeros = jnp.zeros((256, 256))
    busy = jax.lax.fori_loop(0, 300, lambda _, y: jnp.tanh(y @ y), zeros)
    return x + busy[0, 0]


def test_computations_queued_before_an_update_see_the_old_weights(rng: np.random.Generator) -> None:
    plan, params, old = small_update(rng)
    out = sf.sync(params, plan)
    slowly(out["t"]).block_until_ready()  # compile
    queued = slowly(out["t"])
    assert not queued.is_ready(), "the reader must still be running when the update begins"
    x = fresh(rng, 6, 4)
    new = sf.sync({"w": put(x, mesh((2,), "x"), "x")}, plan)
    after = slowly(new["t"])
    assert_same_bits(queued, old)
    assert_same_bits(after, np.ascontiguousarray(x.T))


def test_an_update_waits_for_params_that_are_still_computed(rng: np.random.Generator) -> None:
    plan, params, want = small_update(rng)
    slowly(params["w"]).block_until_ready()
    late = slowly(params["w"])
    assert not late.is_ready()
    poison_buffers(plan)
    assert_holds(sf.sync({"w": late}, plan)["t"], want)


def test_params_may_be_donated_as_soon_as_sync_returns(rng: np.random.Generator) -> None:
    plan, params, want = small_update(rng)
    step = jax.jit(lambda w: w * 0, donate_argnums=0)
    out = sf.sync(params, plan)
    step(params["w"])
    assert_holds(out["t"], want)


@pytest.mark.parametrize("shared", [True, False])
def test_an_alias_has_one_buffer_or_two(rng: np.random.Generator, shared: bool) -> None:
    over, rollout = mesh((2,), "x"), mesh((2,), "y", [4, 5])
    embed = put(fresh(rng, 8, 4), rollout, "y")
    owner = {"embed": embed, "head": embed if shared else put(fresh(rng, 8, 4), rollout, "y")}
    mapping = sf.Mapping({"embed": sf.src("e").scale(2.0), "head": sf.alias("embed")})
    plan = sf.register(sf.make_plan({"e": like((8, 4), "float32", over, "x")}, owner, mapping), owner)
    where = pointers(owner)
    assert len(set(where.values())) == (2 if shared else 4)
    for _ in range(3):
        x = fresh(rng, 8, 4)
        out = updated({"e": put(x, over, "x")}, plan)
        assert_holds(out["embed"], x * np.float32(2), "embed")
        assert_holds(out["head"], x * np.float32(2), "head")
        assert pointers(out) == where


def test_an_alias_of_another_cut_or_dtype_has_a_buffer_of_its_own(rng: np.random.Generator) -> None:
    over, rollout = mesh((2,), "x"), mesh((2,), "y", [4, 5])
    target = {
        "embed": like((8, 4), "float32", rollout, "y"),
        "head": like((8, 4), "float32", rollout, None, "y"),
        "small": like((8, 4), "bfloat16", rollout, "y"),
    }
    mapping = sf.Mapping({"embed": sf.src("e"), "head": sf.alias("embed"), "small": sf.alias("embed")})
    x = fresh(rng, 8, 4)
    params = {"e": put(x, over)}
    plan = sf.register(sf.make_plan(params, target, mapping, allow_cast=("small",)))
    out = updated(params, plan)
    assert_holds(out["embed"], x)
    assert_holds(out["head"], x)
    assert_holds(out["small"], x.astype(ml_dtypes.bfloat16))


DTYPES = ["bool", "int8", "uint8", "int16", "int32", "uint32", "float16", "bfloat16", "float32"]
FLOATS_OF_A_BYTE = ["float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"]


@pytest.mark.parametrize("dtype", DTYPES + FLOATS_OF_A_BYTE)
def test_every_dtype_of_whole_bytes_is_moved(rng: np.random.Generator, dtype: str) -> None:
    """Random bits, not numbers; scalars too."""
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    x = rng.integers(0, 2, 24).astype(bool) if dtype == "bool" else np.frombuffer(rng.bytes(24 * kind.itemsize), kind)
    x = x.reshape(6, 4)
    over, rollout = mesh((2,), "x"), mesh((2,), "y", [4, 5])
    params = {"w": put(x, over, "x"), "s": put(x[0, 0].reshape(()), over)}
    target = {"t": like((4, 6), kind, rollout, "y"), "s": like((), kind, rollout)}
    mapping = sf.Mapping({"t": sf.src("w").rearrange("a b -> b a"), "s": sf.src("s")})
    plan = sf.register(sf.make_plan(params, target, mapping))
    out = updated(params, plan)
    assert_holds(out["t"], np.ascontiguousarray(x.T))
    assert_holds(out["s"], x[0, 0].reshape(()))
    assert sf.verify(params, plan) == 24 * kind.itemsize + 2 * kind.itemsize


@pytest.mark.parametrize("dtype", ["int4", "uint4", "int2", "float4_e2m1fn"])
def test_dtypes_of_less_than_a_byte_are_refused(dtype: str) -> None:
    """JAX packs several of their elements into one byte; NumPy does not."""
    kind = getattr(ml_dtypes, dtype)
    with pytest.raises((sf.PlanError, sf.LanguageError), match=dtype):
        sf.make_plan({"w": like((6, 4), kind, mesh((2,), "x"))}, {"w": like((6, 4), kind, mesh((2,), "y", [4, 5]))})


def test_progress_counts_every_byte(rng: np.random.Generator) -> None:
    plan, params, _ = small_update(rng)
    seen: list[int] = []
    sf.sync(params, plan, progress=seen.append)
    assert sum(seen) == plan.target_nbytes == 96
    seen.clear()
    assert sf.verify(params, plan, progress=seen.append) == sum(seen) == 96


# Verification


def test_verify_finds_any_flipped_byte_and_names_tensor_and_rank(rng: np.random.Generator) -> None:
    over, rollout = mesh((2,), "x"), mesh((2, 2), "dp tp", [4, 5, 6, 7])
    values = {f"h.{i}.w": fresh(rng, 4, 6) for i in range(3)}
    params = {name: put(x, over, "x") for name, x in values.items()}
    target = {f"t.{i}": like((4, 6), "bfloat16", rollout, None, "tp") for i in range(3)}
    plan = sf.make_plan(params, target, sf.Mapping({"t.{i}": sf.src("h.{i}.w").divide(3.0)}), allow_cast=("*",))
    plan = sf.register(plan)
    sf.sync(params, plan)
    assert sf.verify(params, plan) == 3 * 2 * 4 * 6 * 2
    buffers = plan.registered().buffers
    for key in [list(buffers)[k] for k in rng.choice(len(buffers), 4, replace=False)]:
        shard, name = buffers[key], plan.families[key[0]].name(key[1])
        position = int(rng.integers(shard.nbytes))
        byte = ctypes.c_uint8.from_address(shard.address + position)
        byte.value ^= 1 << int(rng.integers(8))
        with pytest.raises(
            sf.VerificationError, match=rf"1 target shards.*\n.*'{name}' of rank {key[2]}: 1 of 24 bytes"
        ):
            sf.verify(params, plan)
        sf.sync(params, plan)
    assert sf.verify(params, plan) == 288


@pytest.mark.parametrize(
    ("target", "expr"),
    [
        ("bfloat16", sf.src("w")),
        ("float16", sf.src("w").rearrange("a b -> b a")),
        ("float32", sf.src("w").scale(0.5)),
        ("float32", sf.src("w").divide(3.0)),
    ],
    ids=["cast", "cast and turned", "scaled", "divided"],
)
def test_any_nan_is_right_where_one_was_cast_or_scaled(target: str, expr: Any, rng: np.random.Generator) -> None:
    plan, params, bits = nan_update(target, expr, rng)
    at = np.flatnonzero(np.isnan(bits.view(np_dtype(target))))
    assert len(at) == 1
    bits[at] = np.array(-np.nan, np_dtype(target)).view(bits.dtype) ^ 1
    sf.verify(params, plan)
    right = bits.copy()
    bits[(at + 1) % len(bits)] = bits[at]  # NaN where there is none
    with pytest.raises(sf.VerificationError, match="'w' of rank 1"):
        sf.verify(params, plan)
    bits[:] = right
    bits[at] = 0
    with pytest.raises(sf.VerificationError, match="'w' of rank 1"):
        sf.verify(params, plan)


def test_nan_that_is_copied_keeps_its_bits(rng: np.random.Generator) -> None:
    plan, params, bits = nan_update("float32", sf.src("w"), rng)
    bits[np.isnan(bits.view(np.float32))] ^= 1
    with pytest.raises(sf.VerificationError, match=r"'w' of rank 1: 1 of"):
        sf.verify(params, plan)


def nan_update(target: str, expr: Any, rng: np.random.Generator) -> tuple[sf.Plan, dict[str, jax.Array], np.ndarray]:
    """A finished update of values with one NaN, its params, and the registered buffer as integers."""
    x = fresh(rng, 4, 4)
    x[1, 2] = np.nan
    params = {"w": jnp.array(x, copy=True)}
    place = params["w"].sharding
    plan = sf.make_plan(params, {"w": jax.ShapeDtypeStruct((4, 4), target, sharding=place)},
                        sf.Mapping({"w": expr}), allow_cast=("*",))  # fmt: skip
    plan = sf.register(plan)
    sf.sync(params, plan)
    sf.verify(params, plan)
    (shard,) = plan.registered().buffers.values()
    data = (ctypes.c_uint8 * shard.nbytes).from_address(shard.address)
    return plan, params, np.frombuffer(data, f"u{np_dtype(target).itemsize}")


def test_verify_tells_params_that_are_not_the_synced_ones(rng: np.random.Generator) -> None:
    plan, params, _ = small_update(rng)
    sf.sync(params, plan)
    other = {"w": params["w"].at[5, 3].add(1.0)}
    with pytest.raises(sf.VerificationError, match=r"'t' of rank 3: \d of 48 bytes"):
        sf.verify(other, plan)
    with pytest.raises(sf.ParamsMismatch, match="'w' is missing"):
        sf.verify({}, plan)


def test_verify_writes_nothing_and_changes_no_version(rng: np.random.Generator) -> None:
    plan, params, want = small_update(rng)
    out = sf.sync(params, plan)
    sf.verify(params, plan)
    assert_holds(out["t"], want)
    assert plan.version == {"rollout": 1}
