"""Ranks on several GPUs of one process: any layouts and places, forwarding both ways, launches that never come.

What does not need the kernel runs on CPU devices too, so that the tests themselves are tested everywhere. Launches that
never come are tried on simulated devices as well, by the kernel's own code.
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_same_bits, bits, cut, fresh, sources_of
from hypothesis import HealthCheck, given, settings, strategies as st
from jax.sharding import AbstractMesh, Mesh, SingleDeviceSharding
from kernel_jobs import Job
from random_problems import Case, cases, expected_buffers, source_buffers

import shardfly_jax as sf
from shardfly_jax.executors.host import HostExecutor
from shardfly_jax.executors.memory import Shard
from shardfly_jax.pallas_kernels import launch_words as lw
from shardfly_jax.sharding.families import TargetTree
from shardfly_jax.sharding.formats import np_dtype
from shardfly_jax.sharding.layouts import Layout
from shardfly_jax.sharding.mapping import Mapping

PLATFORMS = ["cpu", pytest.param("gpu", marks=[pytest.mark.gpu, pytest.mark.multigpu])]
EXECUTORS = {"cpu": "auto", "gpu": "persistent"}
on_gpus = pytest.mark.multigpu


def devices_of(platform: str) -> list[jax.Device]:
    return jax.local_devices(backend=platform)[:2]


# Any layouts, any places


def run_random_case(case: Case, platform: str, places: list[int]) -> None:
    """Rank r is on device `places[r]`; every byte, in place."""
    plan, devices = case.plan(), devices_of(platform)
    place = [devices[number] for number in places]
    want = expected_buffers(case, plan)
    shards = {}
    for key, flat in want.items():
        poison = np.full(flat.nbytes, 0xA5, np.uint8).view(flat.dtype)
        shards[key] = Shard.of(jnp.array(jax.device_put(poison, place[key[2]]), copy=True))
    sources = {key: jax.device_put(x, place[key[2]]) for key, x in source_buffers(case, plan).items()}
    if platform == "gpu":
        from shardfly_jax.executors.persistent import PersistentExecutor

        executor: Any = PersistentExecutor(plan, shards, {key[2]: place[key[2]] for key in sources})
    else:
        executor = HostExecutor(plan, shards)
    executor.start(sources_of(sources))()
    for key, flat in want.items():
        assert bits(jnp.array(shards[key].array, copy=True)).tobytes() == bits(flat).tobytes(), key


@pytest.mark.hypothesis
@pytest.mark.parametrize("platform", PLATFORMS)
def test_any_layouts_arrive_wherever_the_ranks_are(platform: str) -> None:
    @settings(max_examples=15, suppress_health_check=list(HealthCheck))
    @given(cases(max_depth=3), st.lists(st.integers(0, 1), min_size=32, max_size=32))
    def run(case: Case, places: list[int]) -> None:
        run_random_case(case, platform, places)

    run()


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32"])
def test_slices_at_any_offset_cross_in_both_directions_at_once(
    platform: str, dtype: str, rng: np.random.Generator
) -> None:
    """Two trainer ranks hold half of the tensors each, and the rollout rank on the other device gets them."""
    devices = devices_of(platform)
    for _ in range(8 if platform == "gpu" else 3):
        source, target, params, mapping, want = {}, {}, {}, {}, {}
        for k in range(8):
            shape = tuple(int(n) for n in rng.integers(1, 700, int(rng.integers(1, 3))))
            if rng.integers(0, 2):  # lengths at which every kind of record is used
                shape = tuple(-(-n // 16) * 16 for n in shape)
            x = rng.integers(0, 256, int(np.prod(shape)) * np_dtype(dtype).itemsize, np.uint8)
            x = x.view(np_dtype(dtype)).reshape(shape)
            part = tuple(slice(int(rng.integers(0, min(n, 20))), n) for n in shape)
            expr, value = sf.src(f"w{k}")[part], x[part]
            if len(shape) == 2 and rng.integers(0, 2):
                expr, value = expr.rearrange("a b -> b a"), value.T
            source[f"w{k}"] = Layout(shape, dtype, {k % 2: [(0, n) for n in shape]})
            target[f"t{k}"] = Layout(value.shape, dtype, {1 - k % 2: [(0, n) for n in value.shape]})
            params[f"w{k}"] = {k % 2: jax.device_put(x, devices[k % 2])}
            mapping[f"t{k}"], want[f"t{k}"] = expr, value
        plan = sf.make_plan(source, target, sf.Mapping(mapping))
        plan = sf.register(plan, placement=lambda rank: devices[rank], executor=EXECUTORS[platform])
        out = sf.sync(params, plan)
        for name, value in want.items():
            (array,) = out[name].values()
            assert array.devices() == {devices[1 - int(name[1:]) % 2]}
            assert np.array_equal(bits(array), bits(value)), name


# A model, its trainer and its replicas anywhere

MODEL = dataclasses.replace(
    sf.engines.model("Qwen3-0.6B"), layers=2, hidden=256, heads=8, kv_heads=4, head_dim=32, width=512, vocab=1024
)
PLACES = {
    # GPUs of the trainer's ranks (fsdp), and of the TP ranks of each replica
    "disjoint": ((0,), ((1, 1), (1, 1))),
    "the other way": ((1,), ((0, 0), (0, 0))),
    "a replica beside the trainer and one apart": ((0,), ((0, 0), (1, 1))),
    "replicas across both": ((0,), ((0, 1), (1, 0), (0, 1))),
    "all to all": ((0, 1), ((0, 1),)),
    "all to all, crossed": ((0, 1), ((1, 0), (0, 1))),
    "a replica on each, forwarded both ways": ((0, 1), ((0, 0), (1, 1), (0, 0), (1, 1))),
    "trainer in reverse order": ((1, 0), ((0, 1), (1, 1))),
}


def placed_model(name: str, platform: str) -> tuple[Any, sf.Plan]:
    trainer, replicas = PLACES[name]
    devices = devices_of(platform)
    mesh = Mesh(np.array([devices[k] for k in trainer]).reshape(-1, 1), ("fsdp", "tp"))
    source = sf.engines.tunix.trainer(MODEL, mesh, dtype="float32")
    target = sf.engines.vllm.rollout(MODEL, AbstractMesh((len(replicas), 2), ("replica", "tp")))
    plan = sf.make_plan(source.params, target.params, sf.engines.route(source, target), allow_cast="*")
    ranks = [devices[k] for replica in replicas for k in replica]
    return source.params, sf.register(plan, placement=lambda rank: ranks[rank], executor=EXECUTORS[platform])


def fresh_params(shapes: Any) -> Any:
    rng = np.random.default_rng()
    return jax.tree.map(lambda s: jax.device_put(rng.standard_normal(s.shape, np.float32), s.sharding), shapes)


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("name", PLACES)
def test_every_replica_gets_every_byte_of_each_update(name: str, platform: str) -> None:
    shapes, plan = placed_model(name, platform)
    for version in range(1, 6):
        params = fresh_params(shapes)
        sf.sync(params, plan)
        assert sf.verify(params, plan) == plan.target_nbytes
        assert set(plan.version.values()) == {version}


@on_gpus
@pytest.mark.gpu
@pytest.mark.parametrize("name", ["a replica on each, forwarded both ways", "all to all, crossed"])
def test_a_step_on_the_trainers_mesh_sends_while_replicas_forward(name: str) -> None:
    shapes, plan = placed_model(name, "gpu")
    step = jax.jit(lambda params, x, sender: sf.send(jax.tree.map(lambda p: p * x, params), sender), donate_argnums=0)
    params = fresh_params(shapes)
    for k in range(5):
        with sf.receiving(plan):
            params = step(params, jnp.float32(1.5 - k), plan.sender)
        assert sf.verify(params, plan) == plan.target_nbytes


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("busy", [0, 1])
def test_a_device_that_is_busy_delays_its_writers_and_reads_the_old_weights(busy: int, platform: str) -> None:
    shapes, plan = placed_model("a replica on each, forwarded both ways", platform)
    device = devices_of(platform)[busy]
    first, second = fresh_params(shapes), fresh_params(shapes)
    sf.sync(first, plan)
    shard = next(shard for shard in plan.registered().buffers.values() if shard.device == device)

    @jax.jit
    def slow(leaf: jax.Array, x: jax.Array) -> jax.Array:
        x = jax.lax.fori_loop(0, 40, lambda _, x: x @ x, x)
        return leaf + x[0, 1].astype(leaf.dtype)  # which adds zero

    x = jax.device_put(np.eye(4096 if platform == "gpu" else 256, dtype=np.float32), device)
    want = np.asarray(slow(shard.array, x))
    read = slow(shard.array, x)
    sf.sync(second, plan)
    assert_same_bits(read, want)
    sf.verify(second, plan)


# Large tensors: many bands, forwarded while later ones arrive


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("trainer", [(0,), (0, 1)])
def test_bands_are_forwarded_both_ways_while_later_ones_arrive(trainer: tuple[int, ...], platform: str) -> None:
    """Two replicas on each device; compared there, with data that is new each time."""
    devices = devices_of(platform)
    shape = (8192, 4096) if platform == "gpu" else (256, 128)
    mesh = Mesh(np.array([devices[k] for k in trainer]), ("fsdp",))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
    source = {f"w{k}": jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=place) for k in range(4)}
    whole = {rank: [(0, shape[1]), (0, shape[0])] for rank in range(4)}
    target = {f"t{k}": sf.Layout(shape[::-1], "bfloat16", whole) for k in range(4)}
    mapping = sf.Mapping({f"t{k}": sf.src(f"w{k}").rearrange("a b -> b a") for k in range(4)})
    plan = sf.make_plan(source, target, mapping)
    plan = sf.register(plan, placement=lambda rank: devices[rank % 2], executor=EXECUTORS[platform])
    assert plan.moves.hop.max() > 0
    key = jax.random.key(secrets.randbits(31))

    def draw(key: jax.Array) -> dict[str, jax.Array]:
        drawn = {n: jax.random.bits(jax.random.fold_in(key, k), shape, jnp.uint16) for k, n in enumerate(source)}
        return {n: jax.lax.bitcast_convert_type(x, jnp.bfloat16) for n, x in drawn.items()}

    sharded = jax.jit(draw, out_shardings=place)
    on = {device: jax.jit(draw, out_shardings=SingleDeviceSharding(device)) for device in devices}
    same = jax.jit(lambda a, b: (as_integers(a.reshape(b.T.shape)) == as_integers(b).T).all())
    for step in range(20 if platform == "gpu" else 2):
        now = jax.random.fold_in(key, step)
        out = sf.sync(sharded(now), plan)
        for number, device in enumerate(devices):
            want = on[device](now)
            for k in range(4):
                for rank in (number, number + 2):
                    assert same(out[f"t{k}"][rank], want[f"w{k}"]), (step, k, rank)


def as_integers(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.uint16)


# Launches that never come

LEFT_OUT = {
    # what one device leaves out, and what the others say
    "send": "waited for (send of|what) rank",
    "finish": "waited for (finish of|what) rank",
}


@contextlib.contextmanager
def without(executor: Any, phase: str, number: int) -> Iterator[None]:
    """Leaves out a phase of a device, with a short deadline; then all is as it was.

    The *ready* that would be queued behind it, for the next update, does not come either.
    """
    usual = executor.works, executor._readies, executor._launches, executor.deadline_ms
    executor.works = {
        name: {device: work for device, work in works.items() if device != number or name not in (phase, "ready")}
        for name, works in usual[0].items()
    }
    executor._readies, executor._launches = executor.launches("ready"), executor.launches("send", "finish")
    executor.deadline_ms = 300
    try:
        yield
    finally:
        executor.works, executor._readies, executor._launches, executor.deadline_ms = usual


@on_gpus
@pytest.mark.gpu
@pytest.mark.parametrize("phase", LEFT_OUT)
@pytest.mark.parametrize("number", [0, 1])
def test_a_gpu_that_leaves_out_a_phase_is_named_and_the_next_update_heals(phase: str, number: int) -> None:
    shapes, plan = placed_model("a replica on each, forwarded both ways", "gpu")
    params = fresh_params(shapes)
    sf.sync(params, plan)
    with without(plan.registered().executor, phase, number), pytest.raises(sf.SyncTimeout, match=LEFT_OUT[phase]):
        sf.sync(params, plan)
    with pytest.raises(sf.Poisoned, match="SyncTimeout"):
        sf.params(plan)
    for _ in range(3):
        params = fresh_params(shapes)
        sf.sync(params, plan)
        sf.verify(params, plan)


@on_gpus
@pytest.mark.gpu
@pytest.mark.parametrize("reads", ["a computation", "a copy to the other GPU", "a copy to the host"])
def test_what_was_queued_on_the_other_gpu_before_sync_reads_the_old_weights(reads: str) -> None:
    """The first update launches *ready* itself, those after it find it launched with the one before."""
    shapes, plan = placed_model("disjoint", "gpu")
    devices, olds = devices_of("gpu"), fresh_params(shapes)
    out = sf.sync(olds, plan)
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 200, lambda _, y: jnp.tanh(y @ y), x))
    busy = jax.device_put(np.ones((4096, 4096), np.float32), devices[1])
    other = {"a copy to the other GPU": devices[0], "a copy to the host": jax.local_devices(backend="cpu")[0]}
    for _ in range(4):
        before = jax.tree.map(lambda x: np.asarray(jnp.copy(x)), out)
        queued = slow(busy)
        kept = jax.tree.map(lambda x: jax.device_put(x, other[reads]) if reads in other else jnp.copy(x), out)
        out = sf.sync(fresh_params(shapes), plan)
        same = jax.tree.map(lambda a, b: np.array_equal(bits(np.asarray(a)), bits(b)), kept, before)
        assert all(jax.tree.leaves(same))
        del queued


@on_gpus
@pytest.mark.gpu
def test_a_gpu_that_was_never_ready_is_not_written() -> None:
    shapes, plan = placed_model("disjoint", "gpu")
    params = fresh_params(shapes)
    sf.sync(params, plan)
    executor: Any = plan.registered().executor
    before = {key: np.asarray(jnp.copy(shard.array)) for key, shard in plan.registered().buffers.items()}
    params = fresh_params(shapes)
    executor._announced = None, None  # as after a fault: *ready* has not gone along with the update before
    with without(executor, "ready", 1), pytest.raises(sf.SyncTimeout, match="waited for ready of rank"):
        sf.sync(params, plan)
    for key, shard in plan.registered().buffers.items():
        assert np.array_equal(bits(jnp.copy(shard.array)), bits(before[key])), key
    sf.sync(params, plan)
    sf.verify(params, plan)


def forwarded_case(rng: np.random.Generator) -> Case:
    """Two trainer ranks with half of each tensor, four replicas with all of it."""
    arrays = {"w": fresh(rng, 24, 32), "v": fresh(rng, 16, 16, dtype="bfloat16")}
    halves = {name: cut(x.shape, x.dtype.name, 0, 2) for name, x in arrays.items()}
    targets = {
        "t": Layout((32, 24), "bfloat16", {rank: [(0, 32), (0, 24)] for rank in range(4)}),
        "v": Layout((16, 16), "bfloat16", {rank: [(0, 16), (0, 16)] for rank in range(4)}),
    }
    mapping = Mapping({"t": sf.src("w").rearrange("a b -> b a"), "v": sf.src("v")})
    return Case(arrays, halves, 2, [TargetTree(name="r", tensors=targets, mapping=mapping, ranks=4)])


@pytest.mark.parametrize("phase", LEFT_OUT)
@pytest.mark.parametrize("number", [0, 1])
def test_a_simulated_device_that_leaves_out_a_phase_is_named_and_the_next_update_heals(
    phase: str, number: int, rng: np.random.Generator
) -> None:
    job = Job(forwarded_case(rng), devices=2)
    assert {key[1].value for key in job.tables.tables} == {"send", "finish"}
    job.update(int(rng.integers(2**32)))
    job.check()
    job.epoch += 1
    job.run(("ready",), 0)
    errors = job.run(("send", "finish"), int(rng.integers(2**32)), left_out=(number, phase))
    works = {work.name: work for name in ("send", "finish") for work in getattr(job.phases(), name)().values()}
    said = [works[name].fault(error) for name, error in errors.items() if error]
    assert said
    assert all("waited for" in str(fault) for fault in said)
    inbox = job.inboxes[1 - number].data.view(np.int32)
    assert inbox[lw.POISONED] == 1
    for buffer in job.targets.values():
        buffer.data[:] = 0xA5
    job.update(int(rng.integers(2**32)))
    job.check()
