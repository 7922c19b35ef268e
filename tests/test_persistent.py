"""The persistent executor on GPUs: awkward layouts, phases, deadlines, long runs, memory, use inside jitted steps."""

from __future__ import annotations

import secrets
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from benchmark_modules import module
from checks import assert_same_bits, bits
from gpu_scene import (
    MODEL,
    contents,
    executor_of,
    fresh_params,
    gpus,
    numbers,
    one_gpu_mesh,
    plan_on_one_gpu,
    random_view,
    raw,
    small_model,
)
from jax.sharding import AbstractMesh, SingleDeviceSharding

import shardfly_jax as sf
from shardfly_jax.sharding import records as r
from shardfly_jax.sharding.formats import np_dtype

pytestmark = pytest.mark.gpu

FULL = 4096
"""Largest extent of an awkward layout: several tiles in each direction."""


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32", "int64"])
def test_slices_at_any_offset_in_any_order_arrive_bit_for_bit(dtype: str) -> None:
    seed = secrets.randbits(32)
    print("seed", seed)
    rng = np.random.default_rng(seed)
    kinds: set[int] = set()
    for _ in range(25):
        arrays, mapping, want = {}, {}, {}
        for k in range(8):
            size = int(2 ** rng.uniform(6, 19))
            dims = int(rng.integers(1, 4))
            cut = sorted(rng.uniform(0, 1, dims - 1))
            shape = tuple(max(1, round(size**f)) for f in np.diff([0.0, *cut, 1.0]))
            if rng.integers(0, 2):  # lengths at which every kind of record is used
                shape = tuple(-(-n // 16) * 16 for n in shape)
            arrays[f"w{k}"] = raw(rng, shape, dtype)
            mapping[f"t{k}"], want[f"t{k}"] = random_view(rng, arrays, f"w{k}")
        targets = {name: (x.shape, x.dtype) for name, x in want.items()}
        with jax.enable_x64(True):
            params, plan = plan_on_one_gpu(arrays, sf.Mapping(mapping), targets)
            buffers = sf.sync(params, plan)
            for name, x in want.items():
                assert np.array_equal(bits(buffers[name]), bits(x)), (seed, name, x.shape)
        for work in executor_of(plan).works["send"].values():
            kinds |= set(work.table.words[:, r.KIND].tolist()) if work.table else set()
    assert kinds == {r.ROWS, r.TRANSPOSE, r.ELEMENTS} | ({r.TRANSPOSE_ELEMENTS} if dtype != "int64" else set()), seed


@pytest.mark.parametrize("pair", ["float32 bfloat16", "bfloat16 float32", "float32 float16", "float16 bfloat16"])
def test_casts_of_slices_in_any_order_arrive_bit_for_bit(pair: str) -> None:
    source, target = pair.split()
    seed = secrets.randbits(32)
    print("seed", seed)
    rng = np.random.default_rng(seed)
    for _ in range(10):
        arrays = {f"w{k}": numbers(rng, tuple(rng.integers(16, 400, 2) // 8 * 8), source) for k in range(6)}
        mapping, want = {}, {}
        for k in range(6):
            expr, value = random_view(rng, arrays, f"w{k}") if k % 2 else (sf.src(f"w{k}"), arrays[f"w{k}"])
            expr, value = (expr, value) if k < 3 else (expr.rearrange("a b -> b a"), value.T)
            mapping[f"t{k}"], want[f"t{k}"] = expr, value.astype(np_dtype(target))
        params, plan = plan_on_one_gpu(arrays, sf.Mapping(mapping), {n: (x.shape, x.dtype) for n, x in want.items()})
        buffers = sf.sync(params, plan)
        for name, x in want.items():
            assert_same_bits(buffers[name], np.ascontiguousarray(x), f"{seed} {name}")


@pytest.fixture
def model() -> tuple[Any, sf.Plan]:
    return small_model(one_gpu_mesh(), lambda rank: gpus()[0])


@pytest.mark.parametrize("rollout", [(1, 1), (1, 4), (3, 1), (2, 4), (4, 2)])
def test_any_number_of_rollout_ranks_share_the_trainers_gpu(rollout: tuple[int, int]) -> None:
    shapes, plan = small_model(one_gpu_mesh(), lambda rank: gpus()[0], rollout)
    rng = np.random.default_rng()
    for _ in range(3):
        params = fresh_params(shapes, rng)
        sf.sync(params, plan)
        assert sf.verify(params, plan) == plan.target_nbytes


def test_trainer_ranks_share_a_gpu_with_each_other_and_with_the_rollouts() -> None:
    gpu, rng = gpus()[0], np.random.default_rng()
    layout = sf.Layout((96, 64), "float32", {rank: [(24 * rank, 24 * rank + 24), (0, 64)] for rank in range(4)})
    whole = sf.Layout((64, 96), "bfloat16", {rank: [(0, 64), (0, 96)] for rank in range(3)})
    plan = sf.make_plan(
        {"w": layout}, {"t": whole}, sf.Mapping({"t": sf.src("w").rearrange("a b -> b a")}), allow_cast="*"
    )
    plan = sf.register(plan, placement=lambda rank: gpu, executor="persistent")
    for _ in range(5):
        w = numbers(rng, (96, 64), "float32")
        params = {"w": {rank: jax.device_put(w[24 * rank : 24 * rank + 24], gpu) for rank in range(4)}}
        out = sf.sync(params, plan)
        for rank in range(3):
            assert_same_bits(np.asarray(out["t"][rank]).reshape(64, 96), w.T.astype(np_dtype("bfloat16")).copy())


def test_a_thousand_updates_in_a_row_bring_fresh_data_each_time(model: tuple[Any, sf.Plan]) -> None:
    shapes, plan = model
    key = jax.random.key(secrets.randbits(31))
    draw = jax.jit(
        lambda key: jax.tree.map(lambda s: jax.random.normal(key, s.shape, s.dtype), shapes),
        out_shardings=jax.tree.map(lambda s: s.sharding, shapes),
    )
    params = draw(key)
    sf.sync(params, plan)
    sf.verify(params, plan)
    pointers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(sf.params(plan))]
    total = jax.jit(lambda tree: [leaf.astype(jnp.float32).sum() for leaf in jax.tree.leaves(tree)])
    seen = set()
    for step in range(1000):
        params = draw(jax.random.fold_in(key, step))
        out = sf.sync(params, plan)
        seen.add(float(total(out)[0]))
        if step % 100 == 99:
            sf.verify(params, plan)
    assert len(seen) > 990  # each one was new
    assert plan.version["rollout/0"] == 1001
    assert pointers == [x.unsafe_buffer_pointer() for x in jax.tree.leaves(sf.params(plan))]


def test_updates_allocate_nothing_and_compile_nothing(model: tuple[Any, sf.Plan]) -> None:
    shapes, plan = model
    gpu = gpus()[0]
    first, second = fresh_params(shapes, np.random.default_rng()), fresh_params(shapes, np.random.default_rng())
    sf.sync(first, plan)
    sf.sync(second, plan)
    (launch,) = executor_of(plan)._launches
    compiled = launch.kernels._cache_size()
    assert compiled
    on_gpu = module("on_gpu")
    held = on_gpu.ballast(gpu)
    before = on_gpu.memory(gpu)
    for _ in range(10):
        sf.sync(first, plan)
        sf.sync(second, plan)
    in_use, most = on_gpu.memory(gpu) - before
    assert in_use == 0
    assert most <= 2 * launch._numbers.nbytes, "but for the numbers of a launch"
    probe = jax.device_put(np.zeros(1 << 20, np.uint8), gpu).block_until_ready()
    seen = (on_gpu.memory(gpu) - before)[1]
    assert seen > probe.nbytes - on_gpu.SMALLEST_NBYTES, "what is allocated for a moment is seen"
    del held
    assert compiled == launch.kernels._cache_size()


def test_a_new_plan_of_the_same_size_class_compiles_nothing(model: tuple[Any, sf.Plan]) -> None:
    _, plan = model
    (launch,) = executor_of(plan)._launches
    compiled = launch.kernels._cache_size()
    shapes, other = small_model(one_gpu_mesh(), lambda rank: gpus()[0], (2, 2))
    params = fresh_params(shapes, np.random.default_rng())
    sf.sync(params, other)
    assert executor_of(other)._launches[0].kernels is launch.kernels
    assert launch.kernels._cache_size() == compiled


def test_a_replica_joins_on_the_trainers_gpu_without_compiling_anything() -> None:
    shapes, plan = small_model(one_gpu_mesh(), lambda rank: gpus()[0], (2, 1))
    sf.sync(fresh_params(shapes, np.random.default_rng()), plan)
    compilations: list[str] = []
    before = {shard.address for shard in plan.registered().buffers.values()}
    jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: compilations.append(name))
    try:
        target = sf.engines.vllm.rollout(MODEL, AbstractMesh((3, 1), ("replica", "tp")))
        plan = sf.rescale(plan, target.params, placement=lambda rank: gpus()[0])
    finally:
        jax.monitoring.clear_event_listeners()
    assert not [name for name in compilations if "backend_compile" in name]
    assert (plan.rescaled.kernels, plan.rescaled.compiled) == (3, 0)
    assert before <= {shard.address for shard in plan.registered().buffers.values()}
    for _ in range(2):
        params = fresh_params(shapes, np.random.default_rng())
        sf.sync(params, plan)
        assert sf.verify(params, plan) == plan.target_nbytes


def test_updates_in_the_background_arrive_bit_for_bit(model: tuple[Any, sf.Plan]) -> None:
    shapes, plan = model
    for number in range(1, 4):
        params = fresh_params(shapes, np.random.default_rng())
        handle = sf.sync(params, plan, wait=False)
        handle.result(60)
        assert sf.verify(params, plan) == plan.target_nbytes
        assert set(plan.version.values()) == {number}


def test_a_trainer_that_never_sends_is_named_and_the_next_update_heals(model: tuple[Any, sf.Plan]) -> None:
    shapes, plan = model
    params = fresh_params(shapes, np.random.default_rng())
    sf.sync(params, plan)
    executor = executor_of(plan)
    executor.deadline_ms, whole, executor._launches = 200, executor._launches, executor.launches("ready", "finish")
    named = r"finish of ranks 1 \(rollout/0\).* on cuda:0 waited for send of ranks 0, "
    with pytest.raises(sf.SyncTimeout, match=named):
        sf.sync(params, plan)
    with pytest.raises(sf.Poisoned, match="SyncTimeout"):
        sf.params(plan)
    executor.deadline_ms, executor._launches = 60_000, whole
    params = fresh_params(shapes, np.random.default_rng())
    sf.sync(params, plan)
    sf.verify(params, plan)
    assert plan.version["rollout/0"] == 3


def test_a_send_without_ready_writes_nothing_and_names_who_was_not_ready(model: tuple[Any, sf.Plan]) -> None:
    shapes, plan = model
    params = fresh_params(shapes, np.random.default_rng())
    sf.sync(params, plan)
    before = contents(plan)
    executor = executor_of(plan)
    (launch,) = executor.launches("send")
    attempt = executor.begin()._replace(epoch=executor._epoch + 1, deadline_ms=200)  # which no ready has announced
    ((error, _),) = launch.start(attempt, addresses_of(fresh_params(shapes, np.random.default_rng()), plan)).words()
    assert "send of ranks 0, " in launch.works[0].fault(int(error))
    assert "waited for ready of ranks 1 (rollout/0)" in launch.works[0].fault(int(error))
    for key, flat in contents(plan).items():
        assert np.array_equal(flat.view(np.uint8), before[key].view(np.uint8))


def test_a_writer_that_comes_too_late_writes_nothing(model: tuple[Any, sf.Plan]) -> None:
    shapes, plan = model
    params, late = (fresh_params(shapes, np.random.default_rng()) for _ in range(2))
    sf.sync(params, plan)
    executor = executor_of(plan)
    old = executor.begin()
    sf.sync(params, plan)
    (launch,) = executor.launches("send")
    ((error, _),) = launch.start(old, addresses_of(late, plan)).words()
    assert "came after a later attempt had begun" in launch.works[0].fault(int(error))
    assert sf.verify(params, plan) == plan.target_nbytes


def addresses_of(params: Any, plan: sf.Plan) -> np.ndarray:
    from shardfly_jax.update import bound_sources

    sources = bound_sources(params, plan)
    return np.array([sources.address(key) for key in executor_of(plan).moving], np.uint64)


def test_a_copy_to_the_host_that_was_begun_before_sync_has_the_old_weights() -> None:
    gpu, cpu = gpus()[0], jax.local_devices(backend="cpu")[0]
    place = SingleDeviceSharding(gpu)
    tree = {f"w{k}": jax.ShapeDtypeStruct((8192, 8192), jnp.float32, sharding=place) for k in range(4)}
    plan = sf.register(sf.make_plan(tree, tree), executor="persistent")
    out = sf.sync({name: jnp.zeros(want.shape, want.dtype, device=gpu) for name, want in tree.items()}, plan)
    for value in range(1, 4):
        new = {name: jnp.full(want.shape, value, want.dtype, device=gpu) for name, want in tree.items()}
        jax.block_until_ready(new)
        copies = jax.device_put(out, cpu)
        out = sf.sync(new, plan)
        assert all((np.asarray(copy) == value - 1).all() for copy in copies.values()), value


def test_computations_queued_before_sync_see_the_old_weights_and_later_ones_the_new(model: tuple[Any, sf.Plan]) -> None:
    shapes, plan = model
    first, second = (fresh_params(shapes, np.random.default_rng()) for _ in range(2))
    rollout = sf.sync(first, plan)

    @jax.jit
    def slow(tree: Any, x: jax.Array) -> list[jax.Array]:
        x = jax.lax.fori_loop(0, 30, lambda _, x: x @ x, x)
        return [leaf + x[0, 1].astype(leaf.dtype) for leaf in jax.tree.leaves(tree)]  # which adds zero

    x = jax.device_put(np.eye(4096, dtype=np.float32), gpus()[0])
    want = [np.asarray(leaf) for leaf in slow(rollout, x)]
    before = slow(rollout, x)
    rollout = sf.sync(second, plan)
    after = slow(rollout, x)
    for old, new, known in zip(before, after, want, strict=True):
        assert np.array_equal(bits(old), bits(known))
        assert not np.array_equal(bits(new), bits(known))


def test_a_deleted_buffer_is_stale_and_nothing_is_written(model: tuple[Any, sf.Plan]) -> None:
    shapes, plan = model
    params = fresh_params(shapes, np.random.default_rng())
    out = sf.sync(params, plan)
    jax.tree.leaves(out)[0].delete()
    for shard in list(plan.registered().buffers.values())[:1]:
        shard.array.delete()
    with pytest.raises(sf.StaleBuffer):
        sf.sync(params, plan)
