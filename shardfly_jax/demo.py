"""The demo: a real model's shapes from a trainer mesh to a rollout mesh, updated and checked on CPU devices."""

from __future__ import annotations

import contextlib
import dataclasses
import resource
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

import shardfly_jax as sf
from shardfly_jax.layout import leaves_of
from shardfly_jax.sharding.formats import np_dtype
from shardfly_jax.today import make_update
from shardfly_jax.wording import share_text

FSDP, TRAINER_TP, REPLICAS, ROLLOUT_TP = 2, 2, 2, 2
WARM_RUNS = 5


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a demo run measured.

    Attributes:
      unquantized_nbytes: Payload of the same route in bfloat16, if this one is quantized.
      plan_secs, register_secs, first_secs: Once each.
      later_secs: Of the updates after the first, in order.
      sync_secs, today_secs: `WARM_RUNS` warm runs each, taken in turn, of the same params.
      checked_nbytes: Bytes compared with the mapping's meaning, over all updates.
      peak_nbytes: The most memory the process ever held.
    """

    plan: sf.Plan
    unquantized_nbytes: int | None
    plan_secs: float
    register_secs: float
    first_secs: float
    later_secs: tuple[float, ...]
    sync_secs: tuple[float, ...]
    today_secs: tuple[float, ...]
    checked_nbytes: int
    peak_nbytes: int


def run(model: str = "Qwen3-0.6B", updates: int = 3, quantization: str | None = None) -> int:
    """Runs the demo and prints its table; the exit status."""
    console = Console(width=110) if not sys.stdout.isatty() else Console()
    figures = measure(model, updates, console, quantization)
    console.print(table(f"{model} in {quantization}," if quantization else model, figures))
    return 0


def measure(model: str, updates: int, console: Console, quantization: str | None = None) -> Figures:
    """Plans, registers, updates with fresh weights, checks every byte, and times today's way beside it.

    Raises:
      VerificationError: A byte is wrong.
      PlanError: The model has no mapping, or its sizes do not divide.
    """
    devices = jax.devices()
    need = FSDP * TRAINER_TP + REPLICAS * ROLLOUT_TP
    if len(devices) < need:
        raise sf.PlanError(
            f"demo: JAX has {len(devices)} devices, but {need} are needed. Start it with "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={need}."
        )
    half = FSDP * TRAINER_TP
    trainer_mesh = Mesh(np.array(devices[:half]).reshape(FSDP, TRAINER_TP), ("fsdp", "tp"))
    rollout_mesh = Mesh(np.array(devices[half:need]).reshape(REPLICAS, ROLLOUT_TP), ("replica", "tp"))
    sizes = sf.engines.model(model)
    console.print(
        f"{model}: tunix trainer fsdp {FSDP} x tp {TRAINER_TP} -> {REPLICAS} vLLM replicas of TP {ROLLOUT_TP}, "
        f"on {need} {devices[0].platform} devices" + (f", in {quantization}" if quantization else "")
    )
    start = time.perf_counter()
    trainer = sf.engines.tunix.trainer(sizes, trainer_mesh)
    rollout = sf.engines.vllm.rollout(sizes, rollout_mesh, quantization=quantization)
    plan = sf.make_plan(trainer.params, rollout.params, sf.engines.route(trainer, rollout))
    plan_secs = time.perf_counter() - start
    unquantized_nbytes = None
    if quantization is not None:
        plain = sf.engines.vllm.rollout(sizes, rollout_mesh)
        route = sf.engines.route(trainer, plain)
        unquantized_nbytes = sf.make_plan(trainer.params, plain.params, route).nbytes
    start = time.perf_counter()
    plan = sf.register(plan)
    register_secs = time.perf_counter() - start

    times, checked = [], 0
    params: Any = None
    seed = int(np.random.default_rng().integers(1 << 32))
    for number in range(1, updates + 1):
        params = None  # the old weights go before the new ones come
        with _bar(console, f"update {number}: new weights", _tree_nbytes(trainer.params)) as tick:
            params = random_params(trainer.params, (seed, number), tick)
        with _bar(console, f"update {number}: sync", plan.target_nbytes) as tick:
            start = time.perf_counter()
            sf.sync(params, plan, progress=tick)
            times.append(time.perf_counter() - start)
        with _bar(console, f"update {number}: verify", plan.target_nbytes) as tick:
            checked += sf.verify(params, plan, progress=tick)
    with _bar(console, "warm runs against today's way", 2 * WARM_RUNS) as tick:
        sync_secs, today_secs = _race(params, plan, tick)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return Figures(
        plan=plan, unquantized_nbytes=unquantized_nbytes, plan_secs=plan_secs,
        register_secs=register_secs, first_secs=times[0], later_secs=tuple(times[1:]),
        sync_secs=sync_secs, today_secs=today_secs, checked_nbytes=checked, peak_nbytes=peak,
    )  # fmt: skip


@contextlib.contextmanager
def _bar(console: Console, what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar with the time it took; only its end where the output is not a terminal."""
    columns = TextColumn("{task.description:<30}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console) as bars:
        task = bars.add_task(what, total=total)
        yield lambda n: bars.advance(task, n)
        bars.update(task, completed=total)


def _tree_nbytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def random_params(tree: Any, seed: tuple[int, ...], tick: Callable[[int], None] = lambda _: None) -> Any:
    """Finite random values for every `ShapeDtypeStruct` of a tree of bfloat16 or float32, on its sharding."""
    leaves, structure = leaves_of(tree)
    sequence = np.random.SeedSequence(seed)
    out = []
    for leaf, child in zip(leaves, sequence.spawn(len(leaves)), strict=True):
        bits = np.random.default_rng(child).integers(0, 1 << 16, leaf.shape, np.uint16)
        exponent = ((bits >> 7) & 15) + np.uint16(112)  # 2^-15 to 1
        bits = (bits & 0x807F) | (exponent << 7)
        values = bits.view(np_dtype("bfloat16")).astype(leaf.dtype)
        out.append(jax.device_put(values, leaf.sharding))
        tick(values.nbytes)
    return jax.block_until_ready(jax.tree_util.tree_unflatten(structure, out))


def _race(params: Any, plan: sf.Plan, tick: Callable[[int], None]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Times of `sync` and of today's way, in turn; both warm; their results compared first."""
    update = make_update(plan)
    _compare(update(params), plan)
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(WARM_RUNS):
        for k, work in enumerate((lambda: sf.sync(params, plan), lambda: update(params))):
            start = time.perf_counter()
            work()
            times[k].append(time.perf_counter() - start)
            tick(1)
    return tuple(times[0]), tuple(times[1])


def _compare(built: dict[str, jax.Array], plan: sf.Plan) -> None:
    """Raises:
    VerificationError: Today's way gives other values than `sync` did.
    """
    names, leaves, _ = sf.layout.leaf_names(sf.params(plan))
    have = dict(zip(names, leaves, strict=True))
    for key, array in built.items():
        name = key.partition(":")[2]
        for mine, theirs in zip(have[name].addressable_shards, array.addressable_shards, strict=True):
            if np.asarray(mine.data).tobytes() != np.asarray(theirs.data).tobytes():
                raise sf.VerificationError(f"demo: {name!r} differs between sync and a jitted conversion.")


def table(model: str, figures: Figures) -> Table:
    """The figures for people."""
    plan = figures.plan
    out = Table(title=f"{model} on this machine", show_header=False)
    out.add_column(style="bold")
    out.add_column(justify="right")
    later = min(figures.later_secs, default=figures.first_secs)
    unquantized = figures.unquantized_nbytes
    checked = "bytes checked against the mapping" if unquantized is None else "codes, scales and the rest checked"
    rows = [
        ("plan", f"{figures.plan_secs:.3f} s"),
        ("moves", f"{len(plan.moves):,} ({int(plan.moves.count.sum()):,} with all layers)"),
        ("payload, forwards included", gigabytes(plan.nbytes)),
        *([] if unquantized is None else [("  of what bfloat16 takes", share_text(plan.nbytes, unquantized))]),
        ("staging", f"{plan.staging_nbytes:,} bytes"),
        ("register", f"{figures.register_secs:.2f} s"),
        ("first update", f"{figures.first_secs:.2f} s"),
        (
            "later updates",
            ", ".join(f"{secs:.2f}" for secs in figures.later_secs) + " s" if figures.later_secs else "-",
        ),
        (
            "rate of the best later update" if figures.later_secs else "rate of the first update",
            f"{plan.nbytes / later / 1e9:.2f} GB/s",
        ),
        ("trainer egress", gigabytes(plan.egress_nbytes)),
        ("  as one broadcast to each replica", gigabytes(plan.broadcast_nbytes)),
        (checked, gigabytes(figures.checked_nbytes)),
        (f"sync, warm, best of {WARM_RUNS}", f"{min(figures.sync_secs):.2f} s"),
        (f"jitted conversion + device_put, warm, best of {WARM_RUNS}", f"{min(figures.today_secs):.2f} s"),
        ("  of the time of sync", f"{min(figures.today_secs) / min(figures.sync_secs):.2f}x"),
        ("peak memory of the process", gigabytes(figures.peak_nbytes)),
    ]
    for row in rows:
        out.add_row(*row)
    return out


def gigabytes(nbytes: int) -> str:
    """Decimal gigabytes."""
    return f"{nbytes / 1e9:.2f} GB"
