"""The persistent kernel on one GPU, against the bound and the best jitted XLA program for the same targets.

Trainer and rollout are one rank each on the same GPU (two trainer ranks where rows are cut), so bytes are read and
written in one memory. What is quantized has to be read once, also where the kernel reads it twice. The bound is bytes
read plus written over the rate of `cudaMemcpy` from device to device, measured in the same run; the rate of a plain
elementwise XLA kernel stands beside it. Kernels are timed by the GPU's clock, from the start of *ready* to the end of
*finish*, and by the host's, which adds the host's work before and after. Every target is compared bit for bit with
XLA's conversion on the GPU before anything is timed, and the smallest model also with the mapping's meaning on the
host.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, SingleDeviceSharding

import shardfly_jax as sf
from benchmarks.profiled import phase_secs
from shardfly_jax.executors.convert import as_bits
from shardfly_jax.executors.memory import Sources
from shardfly_jax.layout import leaf_names
from shardfly_jax.sharding.grids import PLAIN, grid_shape
from shardfly_jax.today import make_update
from shardfly_jax.update import bound_sources

MODELS = [
    # model, layers, trainer dtype
    ("Qwen3-0.6B", 28, "bfloat16"),
    ("Qwen3-8B", 36, "bfloat16"),
    ("Qwen3-8B", 36, "float32"),
    ("Qwen3-30B-A3B", 12, "bfloat16"),
]
MATRICES = [
    # what happens to 64 matrices of 4096 x 12288, trainer dtype
    ("copied", "bfloat16"),
    ("copied", "float32"),
    ("transposed", "bfloat16"),
]
QUANTIZED = [
    # model, layers, trainer dtype, quantization if any
    ("Qwen3-0.6B", 28, "bfloat16", "fp8_block"),
    ("Qwen3-8B", 36, "bfloat16", "fp8_block"),
    ("Qwen3-8B", 36, "bfloat16"),
    ("Qwen3-30B-A3B", 12, "bfloat16", "fp8_block"),
]
FORMATS = [
    # in which format 32 matrices of 4096 x 12288 are quantized, transposed; how their input axis is cut
    ("fp8 channels", sf.formats.Fp8Channel(), "whole"),
    ("fp8 channels", sf.formats.Fp8Channel(), "cut in two"),
    ("fp8 tensor", sf.formats.vllm_fp8_tensor(), "whole"),
    ("int8 channels", sf.formats.Int8Channel(), "whole"),
    ("mxfp8", sf.formats.ocp_mxfp8(), "whole"),
    ("mxfp4", sf.formats.ocp_mxfp4(), "whole"),
]
RUNS = 11
COPIED_NBYTES = 4 << 30
SMALLEST_NBYTES, LARGEST_NBYTES, MOST_ARRAYS = 64 << 10, 1 << 30, 1000
"""Of arrays that take up memory: what is left, sizes, and how many (see `ballast`)."""


def timed(work: Callable[[], Any]) -> list[float]:
    """Seconds of `RUNS` runs after a warm one."""
    work()
    secs = []
    for _ in range(RUNS):
        start = time.perf_counter()
        work()
        secs.append(time.perf_counter() - start)
    return secs


def rates(gpu: jax.Device) -> dict[str, float]:
    """Bytes read plus written per second: of `cudaMemcpy` on the device, and of an elementwise XLA kernel."""
    from cuda.bindings import runtime

    x = jax.device_put(jnp.arange(COPIED_NBYTES // 4, dtype=jnp.int32), gpu)
    y = jax.device_put(jnp.zeros(COPIED_NBYTES // 4, jnp.int32), gpu)
    jax.block_until_ready((x, y))
    to, source = y.unsafe_buffer_pointer(), x.unsafe_buffer_pointer()

    def copy() -> None:
        (error,) = runtime.cudaMemcpy(to, source, COPIED_NBYTES, runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice)
        (late,) = runtime.cudaDeviceSynchronize()
        if error.value or late.value:
            raise RuntimeError(f"cudaMemcpy: {error}, {late}")

    copied = min(timed(copy))
    del y
    add = jax.jit(lambda x: x + 1)
    added = min(timed(lambda: add(x).block_until_ready()))
    return {"copy_rate": 2 * COPIED_NBYTES / copied, "elementwise_rate": 2 * COPIED_NBYTES / added}


def run(report: Callable[[str], None], quantizing: bool = False) -> list[dict[str, Any]]:
    """Cases on the first GPU: those that move and cast, or those that quantize."""
    gpu = jax.local_devices(backend="gpu")[0]
    rate = rates(gpu)
    rows = []
    for label, dtype, make in quantizing_cases(gpu) if quantizing else cases(gpu):
        report(f"{label}, {dtype}")
        case = make()
        row = {"case": label, "trainer_dtype": dtype} | measure(gpu, case) | rate
        if case.all_ways:
            row["step_secs"] = step_secs(case.params, case.plan)
            row["portable_secs"] = portable_secs(case)
        launched = statistics.median(row["launched_secs"])
        kernels = statistics.median(secs["whole"] for secs in row["phase_secs"])
        row["bound_secs"] = row["moved_nbytes"] / row["copy_rate"]
        row["of_bound"], row["of_bound_with_host"] = row["bound_secs"] / kernels, row["bound_secs"] / launched
        row["of_elementwise"] = row["moved_nbytes"] / row["elementwise_rate"] / kernels
        row["faster_than_xla"] = statistics.median(row["xla_secs"]) / launched
        report(
            f"  {row['of_bound']:.3f} of the bound, {row['of_bound_with_host']:.3f} with the host, "
            f"{row['faster_than_xla']:.2f}x XLA, {statistics.median(row['host_secs']) * 1e3:.2f} ms of host"
        )
        rows.append(row)
        del case
    return rows


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """What is measured.

    Attributes:
      params: Of the trainer.
      plan: Registered.
      update: The best jitted XLA program for the same targets, by name.
      on_host: Whether to compare with the mapping's meaning on the host too.
      all_ways: Whether to send from a jitted step and by the portable executor too.
    """

    params: Any
    plan: sf.Plan
    update: Callable[[], dict[str, jax.Array]]
    on_host: bool = False
    all_ways: bool = False


def cases(gpu: jax.Device) -> Iterator[tuple[str, str, Callable[[], Case]]]:
    """Names and trainer dtypes of the cases that move and cast, and what makes them."""
    for name, layers, dtype in MODELS:
        yield f"{name}, {layers} layers", dtype, functools.partial(of_model, gpu, name, layers, dtype)
    for what, dtype in MATRICES:
        yield f"64 matrices of 4096 x 12288 {what}", dtype, functools.partial(of_matrices, gpu, what, dtype)


def quantizing_cases(gpu: jax.Device) -> Iterator[tuple[str, str, Callable[[], Case]]]:
    """The same of those that quantize, and of the plain update of the same model, which they are to be faster than."""
    for name, layers, dtype, *quantization in QUANTIZED:
        label = ", ".join([name, f"{layers} layers", *quantization])
        yield label, dtype, functools.partial(of_model, gpu, name, layers, dtype, *quantization)
    for name, format, cut in FORMATS:
        label = f"32 matrices of 4096 x 12288 transposed, {name}, input axis {cut}"
        yield label, "bfloat16", functools.partial(of_format, gpu, format, cut)


def of_model(gpu: jax.Device, name: str, layers: int, dtype: str, quantization: str | None = None) -> Case:
    """tunix params of a model, and a plan to vLLM's layout."""
    model = dataclasses.replace(sf.engines.model(name), layers=layers)
    one = np.array([gpu]).reshape(1, 1)
    trainer = sf.engines.tunix.trainer(model, Mesh(one, ("fsdp", "tp")), dtype=dtype)
    rollout = sf.engines.vllm.rollout(model, Mesh(one, ("replica", "tp")), quantization=quantization)
    plan = sf.make_plan(trainer.params, rollout.params, sf.engines.route(trainer, rollout), allow_cast="*")
    return _case(random_params(trainer.params), plan, on_host=name == MODELS[0][0], all_ways=quantization is None)


def of_matrices(gpu: jax.Device, what: str, dtype: str) -> Case:
    """Matrices that only change their dtype, or their layout."""
    place = SingleDeviceSharding(gpu)
    shape = (4096, 12288)
    source = {f"w{k}": jax.ShapeDtypeStruct(shape, dtype, sharding=place) for k in range(64)}
    to = shape if what == "copied" else shape[::-1]
    target = {name: jax.ShapeDtypeStruct(to, jnp.bfloat16, sharding=place) for name in source}
    moved = {name: sf.src(name) if what == "copied" else sf.src(name).rearrange("a b -> b a") for name in source}
    return _case(random_params(source), sf.make_plan(source, target, sf.Mapping(moved), allow_cast="*"))


def of_format(gpu: jax.Device, format: sf.formats.Format, cut: str) -> Case:
    """Matrices [in, out] that become codes [out, in] and scales; if cut, two trainer ranks hold halves."""
    params, plan = quantized_matrices(gpu, format, count=32, n_in=4096, n_out=12288)
    if cut == "whole":
        return _case(params, plan)
    whole_update, (n_in, n_out) = make_update(plan), next(iter(params.values())).shape
    boxes = {rank: [(rank * n_in // 2, (rank + 1) * n_in // 2), (0, n_out)] for rank in range(2)}
    halves = {name: {0: x[: n_in // 2], 1: x[n_in // 2 :]} for name, x in params.items()}
    held = {name: sf.Layout(x.shape, x.dtype.name, boxes) for name, x in params.items()}
    cut_plan = sf.register(sf.make_plan(held, *_quantized(gpu, format, params)), executor="persistent")
    return Case(halves, cut_plan, lambda: whole_update(params))


def quantized_matrices(
    device: jax.Device, format: sf.formats.Format, *, count: int, n_in: int, n_out: int
) -> tuple[dict[str, jax.Array], sf.Plan]:
    """Random matrices [in, out], and the plan that makes codes [out, in] and scales of them on the same device."""
    place = SingleDeviceSharding(device)
    source = {f"w{k}": jax.ShapeDtypeStruct((n_in, n_out), "bfloat16", sharding=place) for k in range(count)}
    return random_params(source), sf.make_plan(source, *_quantized(device, format, source))


def _quantized(device: jax.Device, format: sf.formats.Format, source: dict[str, Any]) -> tuple[Any, sf.Mapping]:
    """Target and mapping of matrices that are quantized, transposed."""
    place = SingleDeviceSharding(device)
    target, mapping = {}, {}
    for name, x in source.items():
        shape = x.shape[::-1]
        scales = grid_shape(format, shape, PLAIN)
        target[name] = jax.ShapeDtypeStruct(format.stored_shape(shape), format.stored, sharding=place)
        target[f"{name}_scale"] = jax.ShapeDtypeStruct(scales, format.scale_dtype, sharding=place)
        mapping[name] = sf.src(name).rearrange("i o -> o i").quantize(format)
        mapping[f"{name}_scale"] = sf.scale_of(name)
    return target, sf.Mapping(mapping)


def _case(params: Any, plan: sf.Plan, on_host: bool = False, all_ways: bool = False) -> Case:
    update = make_update(plan)
    return Case(params, sf.register(plan, executor="persistent"), lambda: update(params), on_host, all_ways)


def random_params(shapes: Any) -> Any:
    """Normal values, other ones in each run."""
    keys = iter(jax.random.split(jax.random.key(time.time_ns() % 2**31), len(jax.tree.leaves(shapes))))
    params = jax.tree.map(lambda s: jax.device_put(jax.random.normal(next(keys), s.shape, s.dtype), s.sharding), shapes)
    return jax.block_until_ready(params)


def measure(gpu: jax.Device, case: Case) -> dict[str, Any]:
    """One case: checked, then timed."""
    params, plan = case.params, case.plan
    start = time.perf_counter()
    out = sf.sync(params, plan)
    first = time.perf_counter() - start
    checked = _compare(out, case.update())
    if case.on_host:
        sf.verify(params, plan)
    sources = bound_sources(params, plan)
    session = plan.registered()
    assert session.executor is not None
    executor = session.executor

    def launch() -> None:
        executor.start(unasked(sources))()

    held = ballast(gpu)
    before = memory(gpu)
    launched = timed(launch)
    sync = timed(lambda: sf.sync(params, plan))
    grown = memory(gpu) - before
    in_use = int(before[0]) - sum(array.nbytes for array in held)
    del held
    return {
        "arrays": len(jax.tree.leaves(params)),
        "launches": executor.kernels,
        "moved_nbytes": sum(leaf.nbytes for leaf in jax.tree.leaves(params)) + _written(plan),
        "checked_nbytes": checked,
        "first_secs": first,
        "launched_secs": launched,
        "phase_secs": phase_secs(launch, list(executor.works)),
        "sync_secs": sync,
        "host_secs": until_last_launch(executor, lambda: sf.sync(params, plan)),
        "xla_secs": timed(case.update),
        "grown_nbytes": grown.tolist(),
        "in_use_nbytes": in_use,
        "gpu": gpu.device_kind,
    }


def step_secs(params: Any, plan: sf.Plan) -> list[float]:
    """Seconds of updates by a jitted step that changes every array and sends them; the first one compiles it.

    Raises:
      VerificationError: What the step sent is not what XLA converts.
    """
    step = jax.jit(lambda params, sender: sf.send(jax.tree.map(lambda x: 1.5 * x, params), sender), donate_argnums=0)
    params = jax.tree.map(jnp.copy, params)
    secs = []
    for _ in range(4):
        jax.block_until_ready(params)
        start = time.perf_counter()
        with sf.receiving(plan) as update:
            params = step(params, plan.sender)
        secs.append(time.perf_counter() - start)
    _compare(update.params(), make_update(plan)(params))
    return secs


def portable_secs(case: Case) -> list[float]:
    """Seconds of the same updates by the portable executor, into buffers of its own.

    Raises:
      VerificationError: It does not give what XLA converts.
    """
    plan = sf.register(case.plan, executor="portable")
    _compare(sf.sync(case.params, plan), case.update())
    return timed(lambda: sf.sync(case.params, plan))


def memory(gpu: jax.Device) -> np.ndarray:
    """Bytes in use, and the most that this process ever used."""
    stats = gpu.memory_stats() or {}
    return np.array([stats.get("bytes_in_use", 0), stats.get("peak_bytes_in_use", 0)])


def unasked(sources: Sources) -> Sources:
    """The same shards, whose addresses an executor has to ask for again, as in every update."""
    return Sources(sources.places, sources.arrays)


def ballast(gpu: jax.Device) -> list[jax.Array]:
    """Arrays that take what this process ever used of a GPU and does not use now.

    While they live, whatever is allocated besides them raises the most that was ever used, if only for a moment.

    Raises:
      RuntimeError: The allocator has no such place.
    """
    held: list[jax.Array] = []
    with jax.default_device(gpu):
        while (missing := int(np.diff(memory(gpu))[0])) >= SMALLEST_NBYTES:
            held.append(jnp.zeros(min(missing, LARGEST_NBYTES), jnp.uint8).block_until_ready())
            if len(held) > MOST_ARRAYS:
                raise RuntimeError(f"benchmark: {missing} bytes were in use once and cannot be taken again")
    return held


def until_last_launch(executor: Any, sync: Callable[[], Any]) -> list[float]:
    """Seconds from the call of `sync` until its last launch is on its way, of several calls."""
    secs: list[float] = []
    start = executor.start

    def watched(*args: Any) -> Any:
        wait = start(*args)
        secs.append(time.perf_counter() - began)
        return wait

    executor.start = watched
    try:
        for _ in range(RUNS):
            began = time.perf_counter()
            sync()
    finally:
        del executor.start
    return secs


def _written(plan: sf.Plan) -> int:
    """Bytes of all targets, shared aliases once."""
    aliases = [plan.families[i] for i in plan.target_families if plan.families[i].alias_of]
    return plan.target_nbytes - sum(family.layout.nbytes * family.count for family in aliases)


def _compare(out: Any, built: dict[str, jax.Array]) -> int:
    """Bytes compared on the GPU.

    Raises:
      VerificationError: XLA's conversion gives other bits.
    """
    names, leaves, _ = leaf_names(out)
    have = dict(zip(names, leaves, strict=True))
    equal = jax.jit(lambda a, b: (as_bits(a) == as_bits(b)).all())
    for key, array in built.items():
        name = key.partition(":")[2]
        if not bool(equal(have[name], array)):
            raise sf.VerificationError(f"benchmark: {name!r} differs between the kernel and XLA.")
    return sum(array.nbytes for array in built.values())
