"""Predicted update times of real models on clusters of 2 to 2,048 GPUs, against the bound and others' ways.

A cell is a model, a trainer and a rollout pool, how the rollout pool is cut, and what it is quantized to, if anything.
Pools have hosts of their own unless both fit into one host of 8. Trainers are cut over tp 4 and fsdp 32 at most and
replicated beyond (HSDP). The presets of H20, H100 and H200 have the same rates, so one prediction speaks for all on
whose memory the weights fit.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import math
import multiprocessing
import os
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import AbstractMesh
from rich.console import Console
from rich.progress import Progress

import shardfly_jax as sf
from benchmarks import deepseek
from shardfly_jax.sharding.baselines import gather_broadcast_secs, shard_to_shard_secs
from shardfly_jax.sharding.topology import pools

TRAINERS = (2, 8, 128, 1024)
ROLLOUT_SIZES = (2, 8, 32, 128, 1024)
"""GPUs of a pool."""
ODD_SIZES = (3, 15, 22, 24, 40, 48)
"""Also of rollouts: numbers of replicas that divide no tensor's axis, and hosts that hold unequal numbers of them."""
MEMORY_NBYTES = {"h20": 96e9, "h100": 80e9, "h200": 141e9}
ROLLOUTS: dict[str, list[tuple[int, bool]]] = {
    # ranks of a replica, and whether each holds whole experts (EP)
    "Qwen3-8B": [(1, False), (2, False), (4, False), (8, False)],
    "Qwen3-32B": [(1, False), (2, False), (4, False), (8, False)],
    "Qwen3-30B-A3B": [(1, False), (2, False), (8, False), (8, True)],
    "Qwen3-235B-A22B": [(4, False), (8, False), (8, True), (16, True)],
    "DeepSeek-V3": [(16, True), (32, True), (64, True), (128, True)],
}
QUANTIZED: dict[str, dict[str, list[tuple[int, bool]]]] = {
    "fp8_block": {
        "Qwen3-8B": [(1, False), (8, False)],
        "Qwen3-32B": [(1, False), (4, False)],
        "Qwen3-30B-A3B": [(2, False), (8, True)],
        "Qwen3-235B-A22B": [(8, True)],
    },
    "fp8_channel": {"Qwen3-8B": [(2, False), (8, False)], "Qwen3-30B-A3B": [(8, False)]},
}
"""Ways of those that are also quantized, where the engine takes that."""
QUANTIZED_TRAINERS = (8, 128)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One prediction: `ranks` is the size of a replica."""

    model: str
    trainers: int
    rollouts: int
    ranks: int
    expert_parallel: bool
    quantization: str | None = None

    def inputs(self) -> tuple[Any, Any, sf.Mapping]:
        """Trees of both sides, and the mapping."""
        replicas = self.rollouts // self.ranks
        if self.model == "DeepSeek-V3":
            sizes = deepseek.Sizes()
            fsdp = min(8, self.trainers)
            expert = min(32, self.trainers // fsdp)
            trainer = deepseek.trainer(sizes, expert=expert, fsdp=fsdp, data=self.trainers // fsdp // expert)
            return (
                trainer,
                deepseek.rollout(sizes, dp=self.ranks // 8, tp=8, replicas=replicas),
                deepseek.mapping(sizes),
            )
        model = sf.engines.model(self.model)
        tp = min(4, self.trainers // 2)
        fsdp = min(32, self.trainers // tp)
        source = AbstractMesh((self.trainers // tp // fsdp, fsdp, tp), ("data", "fsdp", "tp"))
        target = AbstractMesh((replicas, self.ranks), ("replica", "tp"))
        trainer = sf.engines.tunix.trainer(model, source)
        rollout = sf.engines.vllm.rollout(
            model, target, expert_parallel=self.expert_parallel, quantization=self.quantization
        )
        return trainer.params, rollout.params, sf.engines.route(trainer, rollout)


def rank_nbytes(tree: Any) -> int:
    """Bytes that one rank holds of a tree."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def cells() -> Iterator[Cell]:
    """All of the grid whose replicas fill the rollout pool; the largest pools last."""
    found = [
        Cell(model=model, trainers=trainers, rollouts=rollouts, ranks=ranks, expert_parallel=expert_parallel)
        for model, ways in ROLLOUTS.items()
        for trainers in TRAINERS
        for rollouts in (*ROLLOUT_SIZES, *ODD_SIZES)
        for ranks, expert_parallel in ways
        if rollouts % ranks == 0
    ]
    found += [
        dataclasses.replace(cell, quantization=quantization)
        for cell in found
        for quantization, models in QUANTIZED.items()
        if (cell.ranks, cell.expert_parallel) in models.get(cell.model, ()) and cell.trainers in QUANTIZED_TRAINERS
    ]
    return iter(sorted(found, key=lambda cell: cell.rollouts))


def predict(cell: Cell) -> dict[str, Any] | None:
    """Plans and simulates one cell; None if its weights fit no GPU."""
    source, target, mapping = cell.inputs()
    needed = max(rank_nbytes(source), rank_nbytes(target))
    fits = [gpu for gpu, nbytes in MEMORY_NBYTES.items() if needed < nbytes]
    if not fits:
        return None
    topology = pools("h200", cell.trainers, cell.rollouts)
    plan = sf.make_plan(source, target, mapping, topology=topology)
    predicted = plan.simulate(topology)
    return dataclasses.asdict(cell) | {
        "fits": fits,
        "hosts": topology.hosts,
        "moves": len(plan.moves),
        "egress_nbytes": plan.egress_nbytes,
        "secs": predicted.secs,
        "bound_secs": predicted.bound_secs,
        "bound": predicted.bound.why,
        "stores_bound_secs": predicted.stores_bound_secs,
        "ratio": predicted.ratio,
        "schedule_ratio": predicted.schedule_ratio,
        "busiest": predicted.busiest,
        "gather_broadcast_secs": gather_broadcast_secs(plan, predicted.needs, topology),
        "shard_to_shard_secs": shard_to_shard_secs(plan, predicted.needs, topology),
    }


def run(console: Console) -> list[dict[str, Any]]:
    """The whole grid, one process per core; about 15 minutes on two."""
    todo = list(cells())
    workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    context = multiprocessing.get_context("spawn")
    with (
        Progress(console=console) as progress,
        concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool,
    ):
        task = progress.add_task("cells", total=len(todo))
        rows = []
        for row in pool.map(predict, todo):
            rows += [row] if row else []
            progress.advance(task)
    return rows
