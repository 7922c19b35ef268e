"""Plans of one size class share compiled kernels: replicas of a small model join without compiling."""

from __future__ import annotations

import types
from typing import Any

import pytest
from jax.sharding import AbstractMesh

import shardfly_jax as sf
from shardfly_jax.executors.phases import Phases
from shardfly_jax.sharding import optable
from shardfly_jax.sharding.moves import Key
from shardfly_jax.sharding.optable import Inbox

HOPPER = types.SimpleNamespace(core_count=132)


def kernels(replicas: int, tp: int, devices: int) -> set[tuple[Any, ...]]:
    """What tells apart the kernels of Qwen3-0.6B's updates; the trainer is on device 0, rollout ranks take turns."""
    model = sf.engines.model("Qwen3-0.6B")
    trainer = sf.engines.tunix.trainer(model, AbstractMesh((1, 1), ("fsdp", "tp")))
    rollout = sf.engines.vllm.rollout(model, AbstractMesh((replicas, tp), ("replica", "tp")))
    plan = sf.make_plan(trainer.params, rollout.params, sf.engines.route(trainer, rollout), allow_cast="*")
    places = {rank: 0 if rank == 0 or devices == 1 else 1 + (rank - 1) % (devices - 1) for rank in range(plan.ranks)}
    at: dict[Key, int] = {}

    def locate(key: Key) -> tuple[int, int]:
        return places[key[2]], at.setdefault(key, 4096 * (len(at) + 1))

    tables = optable.make_tables(plan, places, locate)
    fixed: dict[Key | Inbox, int] = {k: address for k, address in at.items() if k[0] in plan.target_families}
    fixed |= {Inbox(k): 64 * (k + 1) for k in range(len(tables.devices))}
    phases = Phases(plan, tables, [HOPPER] * len(tables.devices), fixed)  # type: ignore[list-item]
    out = set()
    for works in (phases.ready(), phases.send(), phases.finish()):
        for number, work in works.items():
            numbers, table, _ = work.numbers()
            out.add((*work.variant, len(table), len(numbers), tables.devices[number]))
    return out


@pytest.mark.parametrize("tp", [1, 2])
def test_a_third_replica_of_qwen3_on_one_gpu_compiles_nothing(tp: int) -> None:
    assert kernels(3, tp, 1) <= kernels(2, tp, 1)


def test_a_third_replica_on_a_gpu_of_its_own_compiles_there_only() -> None:
    new = kernels(3, 1, 4) - kernels(2, 1, 3)
    assert {kernel[-1] for kernel in new} == {3}


def test_other_work_is_another_kernel() -> None:
    """Else the tests above could not fail."""
    assert kernels(2, 1, 3) - kernels(2, 1, 1)
    assert kernels(6, 2, 1) - kernels(2, 2, 1)
