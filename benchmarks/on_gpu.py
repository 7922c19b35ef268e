"""The persistent kernel on one GPU, against the bound and the best jitted XLA program for the same targets.

Trainer and rollout are one rank each on the same GPU, so bytes are read and written in one memory. The bound is bytes
read plus written over the rate of a device-to-device copy, measured in the same run; the rate of a plain elementwise
XLA kernel stands beside it. Every target is compared bit for bit with XLA's conversion on the GPU before anything is
timed, and the smallest model also with the mapping's meaning on the host.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import shardfly_jax as sf
from shardfly_jax.layout import leaf_names
from shardfly_jax.today import make_update
from shardfly_jax.update import bound_sources

CASES = [
    # model, layers, trainer dtype, also checked on the host
    ("Qwen3-0.6B", 28, "bfloat16", True),
    ("Qwen3-8B", 36, "bfloat16", False),
    ("Qwen3-8B", 36, "float32", False),
    ("Qwen3-30B-A3B", 12, "bfloat16", False),
]
RUNS = 11


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
    """Bytes read plus written per second: of a device-to-device copy, and of an elementwise XLA kernel."""
    x = jax.device_put(jnp.arange(1 << 30, dtype=jnp.int32), gpu)
    add = jax.jit(lambda x: x + 1)
    copy = jax.jit(lambda x: jnp.copy(x))
    return {
        "copy_rate": 2 * x.nbytes / min(timed(lambda: copy(x).block_until_ready())),
        "elementwise_rate": 2 * x.nbytes / min(timed(lambda: add(x).block_until_ready())),
    }


def run(report: Callable[[str], None]) -> list[dict[str, Any]]:
    """All cases on the first GPU."""
    gpu = jax.local_devices(backend="gpu")[0]
    rate = rates(gpu)
    rows = []
    for model, layers, dtype, on_host in CASES:
        report(f"{model}, {layers} layers, {dtype}")
        rows.append(measure(gpu, model, layers, dtype, on_host) | rate)
        row = rows[-1]
        row["bound_secs"] = row["moved_nbytes"] / row["copy_rate"]
        row["of_bound"] = row["bound_secs"] / statistics.median(row["kernel_secs"])
        row["of_elementwise"] = row["moved_nbytes"] / row["elementwise_rate"] / statistics.median(row["kernel_secs"])
        row["faster_than_xla"] = statistics.median(row["xla_secs"]) / statistics.median(row["kernel_secs"])
        report(f"  {row['of_bound']:.3f} of the bound, {row['faster_than_xla']:.2f}x XLA")
    return rows


def measure(gpu: jax.Device, name: str, layers: int, dtype: str, on_host: bool) -> dict[str, Any]:
    """One case: checked, then timed."""
    model = dataclasses.replace(sf.engines.model(name), layers=layers)
    one = np.array([gpu]).reshape(1, 1)
    trainer = sf.engines.tunix.trainer(model, Mesh(one, ("fsdp", "tp")), dtype=dtype)
    rollout = sf.engines.vllm.rollout(model, Mesh(one, ("replica", "tp")))
    plan = sf.make_plan(trainer.params, rollout.params, sf.engines.route(trainer, rollout), allow_cast="*")
    plan = sf.register(plan, executor="persistent")
    keys = iter(jax.random.split(jax.random.key(time.time_ns() % 2**31), len(jax.tree.leaves(trainer.params))))
    params = jax.tree.map(
        lambda s: jax.device_put(jax.random.normal(next(keys), s.shape, s.dtype), s.sharding), trainer.params
    )
    jax.block_until_ready(params)
    start = time.perf_counter()
    out = sf.sync(params, plan)
    first = time.perf_counter() - start
    checked = _compare(out, make_update(plan)(params))
    if on_host:
        sf.verify(params, plan)
    before = (gpu.memory_stats() or {}).get("bytes_in_use", 0)
    sources = bound_sources(params, plan)
    session = plan.registered()
    assert session.executor is not None
    executor = session.executor
    kernel = timed(lambda: executor.start(sources)())
    after = (gpu.memory_stats() or {}).get("bytes_in_use", 0)
    sync = timed(lambda: sf.sync(params, plan))
    update = make_update(plan)
    return {
        "model": name,
        "layers": layers,
        "trainer_dtype": dtype,
        "moved_nbytes": sum(leaf.nbytes for leaf in jax.tree.leaves(params)) + _written(plan),
        "checked_nbytes": checked,
        "first_secs": first,
        "kernel_secs": kernel,
        "sync_secs": sync,
        "xla_secs": timed(lambda: update(params)),
        "grown_nbytes": after - before,
        "gpu": gpu.device_kind,
    }


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
    bits = functools.partial(jax.lax.bitcast_convert_type, new_dtype=jnp.uint16)
    equal = jax.jit(lambda a, b: (bits(a) == bits(b)).all())
    for key, array in built.items():
        name = key.partition(":")[2]
        if not bool(equal(have[name], array)):
            raise sf.VerificationError(f"benchmark: {name!r} differs between the kernel and XLA.")
    return sum(array.nbytes for array in built.values())
