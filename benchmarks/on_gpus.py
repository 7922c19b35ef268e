"""Updates on several GPUs of one host: each checked, timed, checked again, by a program that holds the GPUs.

`python -m benchmarks.on_gpus CASE ...` prints a row for each case (`children`). Every target is compared on its GPU,
bit for bit, with the jitted conversion, after its memory was overwritten: before anything is timed, and again
afterwards.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, SingleDeviceSharding

import shardfly_jax as sf
from benchmarks import children, links, profiled
from benchmarks.on_gpu import RUNS, ballast, memory, random_params, timed, unasked, until_last_launch
from shardfly_jax.engines.models import Model
from shardfly_jax.executors import persistent
from shardfly_jax.layout import leaf_names
from shardfly_jax.sharding.topology import preset
from shardfly_jax.today import make_conversion, make_update
from shardfly_jax.update import bound_sources

PATIENCE_SECS = 8
"""What today's way, which may go through the host, is given for its runs."""
POISON = 0x5A
MATRICES = 64, (4096, 12288)
"""How many, and their shape, where nothing is converted."""
SWEPT_BLOCKS = (132, 64, 32, 16, 8)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One update.

    Attributes:
      name: For people.
      model: Of the engines, or `matrices` for `MATRICES` that are only copied.
      dtype: The trainer's.
      trainer: The GPU of each rank; more than one are fsdp.
      replicas: For each, the GPUs of its TP ranks.
      quantization: Of the rollout.
      sweeps: Whether the number of blocks is varied too.
    """

    name: str
    model: str = "Qwen3-8B"
    dtype: str = "bfloat16"
    trainer: tuple[int, ...] = (0,)
    replicas: tuple[tuple[int, ...], ...] = ((1,),)
    quantization: str | None = None
    sweeps: bool = False

    @property
    def gpus(self) -> int:
        """How many it needs."""
        return 1 + max(*self.trainer, *(gpu for replica in self.replicas for gpu in replica))

    @property
    def places(self) -> tuple[int, ...]:
        """GPU of every rank of the plan."""
        return (*self.trainer, *(gpu for replica in self.replicas for gpu in replica))


CASES = [
    Case(name="GPU 0 to 1", sweeps=True),
    Case(name="GPU 0 to 1, from float32", dtype="float32"),
    Case(name="fsdp 2 on both to TP 2 on both", trainer=(0, 1), replicas=((0, 1),)),
    Case(name="GPU 0 to a replica on each", replicas=((0,), (1,))),
    Case(name="GPU 0 to two replicas on 1", replicas=((1,), (1,))),
    Case(name="GPU 0 to 1, nothing converted", model="matrices"),
    Case(name="GPU 0 to 1, fp8 blocks", quantization="fp8_block"),
    Case(name="GPU 0 to 1, fp8 blocks from float32", dtype="float32", quantization="fp8_block"),
    Case(name="fsdp 2 on both to a replica on each", trainer=(0, 1), replicas=((0,), (1,))),
]


def prepare(case: Case, devices: Sequence[jax.Device], model: Model | None = None) -> tuple[Any, sf.Plan]:
    """The trainer's tree as shapes, and a plan to all replicas, not yet registered."""
    if case.model == "matrices":
        return _matrices(devices[case.trainer[0]], devices[case.replicas[0][0]])
    sizes = model or sf.engines.model(case.model)
    mesh = Mesh(np.array([devices[gpu] for gpu in case.trainer]).reshape(-1, 1), ("fsdp", "tp"))
    trainer = sf.engines.tunix.trainer(sizes, mesh, dtype=case.dtype)
    rollouts = [
        sf.engines.vllm.rollout(
            sizes,
            Mesh(np.array([devices[gpu] for gpu in replica]).reshape(1, -1), ("replica", "tp")),
            quantization=case.quantization,
        )
        for replica in case.replicas
    ]
    target = sf.replicas({f"r{k}": rollout.params for k, rollout in enumerate(rollouts)})
    topology = preset("h200", gpus_per_host=max(case.gpus, 2), gpu_of_rank=case.places)
    mapping = sf.engines.route(trainer, rollouts[0])
    return trainer.params, sf.make_plan(trainer.params, target, mapping, allow_cast="*", topology=topology)


def _matrices(source: jax.Device, target: jax.Device) -> tuple[Any, sf.Plan]:
    count, shape = MATRICES

    def tree(device: jax.Device) -> dict[str, jax.ShapeDtypeStruct]:
        place = SingleDeviceSharding(device)
        return {f"w{k}": jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=place) for k in range(count)}

    return tree(source), sf.make_plan(tree(source), sf.replicas({"r0": tree(target)}))


def needed(case: Case, plan: sf.Plan, model: Model | None = None) -> tuple[np.ndarray, np.ndarray]:
    """What must move, whatever the routes.

    Returns:
      int64 [gpus, gpus]: bytes that a GPU needs and another one holds, once for all replicas; and int64 [gpus]: the
      trainer's bytes that lie in each GPU's memory plus the bytes of all targets there.
    """
    between = np.zeros((case.gpus, case.gpus), np.int64)
    for replica in case.replicas:
        alone = dataclasses.replace(case, replicas=(replica,))
        traffic = (_abstract(alone, model) if case.model != "matrices" else plan).traffic()
        own = np.zeros_like(between)
        np.add.at(own, np.ix_(alone.places, alone.places), traffic)
        between = np.maximum(between, own)  # replicas alike need the same bytes
    touched = np.zeros(case.gpus, np.int64)
    for index in (*plan.source_families, *plan.target_families):
        family = plan.families[index]
        if family.alias_of is None:
            for rank in family.layout.ranks:
                nbytes = int(np.prod(family.layout.local_shape(rank))) * family.layout.itemsize * family.count
                touched[case.places[rank]] += nbytes
    return between, touched


def _abstract(case: Case, model: Model | None) -> sf.Plan:
    """The plan of a case with one replica, without devices."""
    sizes = model or sf.engines.model(case.model)
    trainer = sf.engines.tunix.trainer(sizes, AbstractMesh((len(case.trainer), 1), ("fsdp", "tp")), dtype=case.dtype)
    mesh = AbstractMesh((1, len(case.replicas[0])), ("replica", "tp"))
    rollout = sf.engines.vllm.rollout(sizes, mesh, quantization=case.quantization)
    return sf.make_plan(trainer.params, rollout.params, sf.engines.route(trainer, rollout), allow_cast="*")


def measure(
    case: Case, devices: Sequence[jax.Device], executor: str = "persistent", model: Model | None = None
) -> dict[str, Any]:
    """One case: checked, timed, checked again.

    Args:
      case: What.
      devices: GPUs by number.
      executor: Of the registration.
      model: In place of the case's, for a smaller one.

    Raises:
      VerificationError: A byte differs from the jitted conversion's.
      RegistrationError: The executor cannot run the plan; the reasons are listed.
    """
    shapes, plan = prepare(case, devices, model)
    if executor == "persistent" and (reasons := persistent.why_not(plan, {devices[gpu] for gpu in case.places}, {})):
        raise sf.RegistrationError(f"benchmark: {case.name!r} is not for the kernel: {'; '.join(reasons)}.")
    between, touched = needed(case, plan, model)
    plan = sf.register(plan, executor=executor)
    params = random_params(shapes)
    poison(plan)
    start = time.perf_counter()
    sf.sync(params, plan)
    first = time.perf_counter() - start
    placing = placing_jit(params, plan)
    update = placing or make_update(plan)
    built = update(params)
    checked = check(params, plan, built)
    sources = bound_sources(params, plan)
    running = plan.registered().executor
    assert running is not None
    held = [ballast(device) for device in devices[: case.gpus]]
    before = [memory(device) for device in devices[: case.gpus]]
    row = {
        "case": case.name,
        "model": case.model,
        "trainer_dtype": case.dtype,
        "arrays": len(jax.tree.leaves(params)),
        "needed_nbytes": between.tolist(),
        "touched_nbytes": touched.tolist(),
        "traffic_nbytes": _by_gpu(case, plan).tolist(),
        "checked_nbytes": checked,
        "first_secs": first,
        "kernel_secs": timed(lambda: running.start(unasked(sources))()),
        "sync_secs": timed(lambda: sf.sync(params, plan)),
        "host_secs": until_last_launch(running, lambda: sf.sync(params, plan)),
    }
    row["grown_nbytes"] = [int((memory(d) - b).max()) for d, b in zip(devices, before, strict=False)]
    del held
    if hasattr(running, "begin"):
        row["ready_secs"] = timed(running.begin)
    check(params, plan, built)
    if executor == "persistent":
        row |= kernels(lambda: (sf.sync(params, plan), settle(devices[: case.gpus])))
    if case.sweeps and executor == "persistent":
        row["sweep"] = sweep(params, plan, built, running, sources)
    del built
    secs = timed_within(lambda: update(params), PATIENCE_SECS)
    row["today_secs"], row["jit_secs"] = ([], secs) if placing else (secs, [])
    topology = preset("h200", gpus_per_host=max(case.gpus, 2), gpu_of_rank=case.places)
    row["predicted_secs"] = plan.simulate(topology).secs
    return row


def settle(devices: Sequence[jax.Device]) -> None:
    """Waits until nothing runs on some GPUs, *ready* of the next update neither."""
    from cuda.bindings import runtime

    for device in devices:
        links.check(runtime.cudaSetDevice(device.local_hardware_id))
        links.check(runtime.cudaDeviceSynchronize())


def kernels(update: Callable[[], Any]) -> dict[str, Any]:
    """Our kernels of one update by the GPUs' clocks, and what several took from the first's start to the last's end.

    Or why there is no profile, which must not cost the case.
    """
    try:
        updates = profiled.updates(update)
    except Exception as error:
        return {"kernels": f"{type(error).__name__}: {error}"}
    whole = [max(span.stop_secs for span in spans) - spans[0].start_secs for spans in updates]
    return {"kernels": [span._asdict() for span in updates[0]], "gpu_secs": whole}


def timed_within(work: Callable[[], Any], limit_secs: float) -> list[float]:
    """Seconds of `RUNS` runs that were warmed up before; of fewer, but one at least, when they take too long."""
    secs: list[float] = []
    while len(secs) < RUNS and sum(secs) < limit_secs:
        start = time.perf_counter()
        work()
        secs.append(time.perf_counter() - start)
    return secs


def _by_gpu(case: Case, plan: sf.Plan) -> np.ndarray:
    """int64 [gpus, gpus]: payload of the plan."""
    traffic = np.zeros((case.gpus, case.gpus), np.int64)
    np.add.at(traffic, np.ix_(case.places, case.places), plan.traffic())
    return traffic


def placing_jit(params: Any, plan: sf.Plan) -> Callable[[Any], dict[str, jax.Array]] | None:
    """One jitted conversion that also places its outputs, where the rollouts are on the trainer's devices.

    `jax.device_put` between meshes goes through the host there: 12 s for Qwen3-8B. Returns None where some rollout is
    on another device, or alone on one of one.
    """
    converted, shardings = make_conversion(plan)
    sources = [leaf.sharding for leaf in leaf_names(params)[1]]
    devices = {device for sharding in sources for device in sharding.device_set}
    sets = [sharding.device_set for sharding in shardings.values()]
    if len(devices) == 1 or not all(place <= devices for place in sets):
        return None
    if all(place == devices for place in sets):
        placed = jax.jit(converted, out_shardings=shardings)
        return lambda params: jax.block_until_ready(placed(_by_name(params)))
    # a replica on each: every device gets everything, once, and a replica is its device's part
    whole = jax.sharding.NamedSharding(sources[0].mesh, jax.sharding.PartitionSpec())
    first = next(iter(shardings)).partition(":")[0] + ":"
    everywhere = jax.jit(
        lambda tensors: {name: x for name, x in converted(tensors).items() if name.startswith(first)},
        out_shardings=whole,
    )

    def update(params: Any) -> dict[str, jax.Array]:
        arrays = jax.block_until_ready(everywhere(_by_name(params)))
        parts = {name: {shard.device: shard.data for shard in x.addressable_shards} for name, x in arrays.items()}
        return {
            name: parts[first + name.partition(":")[2]][next(iter(sharding.device_set))]
            for name, sharding in shardings.items()
        }

    return update


def _by_name(params: Any) -> dict[str, jax.Array]:
    return dict(zip(*leaf_names(params)[:2], strict=True))


def sweep(params: Any, plan: sf.Plan, built: dict[str, jax.Array], running: Any, sources: Any) -> list[dict[str, Any]]:
    """The launches' times by number of blocks of *send*; each number is checked first."""
    usual, works, rows = running._launches, running.works["send"], []
    blocks_of = {number: work.blocks for number, work in works.items()}
    try:
        for blocks in SWEPT_BLOCKS:
            for work in works.values():
                work.blocks = blocks
            running._launches = running.launches("send", "finish")
            check(params, plan, built)
            rows.append({"blocks": blocks, "kernel_secs": timed(lambda: running.start(unasked(sources))())})
    finally:
        running._launches = usual
        for number, work in works.items():
            work.blocks = blocks_of[number]
    return rows


def check(params: Any, plan: sf.Plan, built: dict[str, jax.Array]) -> int:
    """Overwrites every target, updates, and compares every shard with what `built` has; the bytes compared.

    Raises:
      VerificationError: Some differ.
    """
    poison(plan)
    out = sf.sync(params, plan)
    have = {
        f"{tree}:{name}": leaf
        for tree, target in out.items()
        for name, leaf in zip(*leaf_names(target)[:2], strict=True)
    }
    same, checked = {}, 0
    for key, array in built.items():
        shards = {shard.device: shard.data for shard in have[key].addressable_shards}
        for shard in array.addressable_shards:
            same[key, str(shard.device)] = _equal(shards[shard.device], shard.data)
            checked += shard.data.nbytes
    wrong = [key for key, yes in jax.device_get(same).items() if not yes]
    if wrong:
        raise sf.VerificationError(
            f"benchmark: {len(wrong)} shards differ from the jitted conversion, first {wrong[0]}."
        )
    return checked


@jax.jit
def _equal(a: jax.Array, b: jax.Array) -> jax.Array:
    bits = functools.partial(jax.lax.bitcast_convert_type, new_dtype=f"uint{8 * a.dtype.itemsize}")
    return (bits(a) == bits(b)).all()


def poison(plan: sf.Plan) -> None:
    """Overwrites every registered buffer."""
    for shard in plan.registered().buffers.values():
        if shard.device.platform == "cpu":
            import ctypes

            ctypes.memset(shard.address, POISON, shard.nbytes)
        else:
            from cuda.bindings import runtime

            links.check(runtime.cudaSetDevice(shard.device.local_hardware_id))
            links.check(runtime.cudaMemset(shard.address, POISON, shard.nbytes))
            links.check(runtime.cudaDeviceSynchronize())


def program(names: Sequence[str]) -> None:
    """Measures cases, a row each; ends with the first that fails."""
    devices = jax.local_devices(backend="gpu")
    cases = {case.name: case for case in CASES}
    for name in names:
        try:
            row = measure(cases[name], devices)
        except sf.RegistrationError as error:
            row = {"case": name, "refused": str(error)}
        except Exception as error:
            traceback.print_exc()
            children.emit({"case": name, "error": f"{type(error).__name__}: {error}"})
            sys.exit(0)
        children.emit(row)
        jax.clear_caches()
        gc.collect()


if __name__ == "__main__":
    program(sys.argv[1:])
