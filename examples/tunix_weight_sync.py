"""tunix' weight-sync coordinator over shardfly_jax, in one process: python examples/tunix_weight_sync.py

A trainer and a rollout of tunix' experimental orchestrator on separate devices. The coordinator runs its rounds (pause,
transfer, publish, resume); `shardfly_jax.adapters.tunix.Handler` moves the weights. The third round fails on purpose:
the rollout goes on with the weights of the second.

Needs google-tunix from its repository, at c7d8950 or so: no release has `tunix.experimental` yet.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import shardfly_jax as sf
from shardfly_jax.adapters.tunix import Handler


class Trainer:
    """The source of every round: new weights after every step."""

    def __init__(self, mesh: Mesh):
        self.sharding = NamedSharding(mesh, P("fsdp", "tp"))
        self.version = 0
        self.step()

    def step(self) -> None:
        self.version += 1
        values = np.random.default_rng(self.version).standard_normal((16, 32), np.float32)
        self.params = {"kernel": jax.device_put(values, self.sharding)}

    def info(self) -> Any:
        return _info("trainer-0", "trainer")

    async def prepare_weight_sync(self, sync_request: Any = None) -> list[Any]:
        return [_unit("trainer")]

    async def release_weight_sync(self, sync_request: Any = None) -> None:
        """Nothing is staged on the trainer's side: its params are read where they are."""


class Rollout:
    """The destination: serves with the weights that were published last."""

    def __init__(self, handler: Handler):
        from tunix.experimental.orchestrator.weight_sync_coordinator import WorkerRoundTracker

        self.handler, self.tracker = handler, WorkerRoundTracker()
        self.params: Any = None
        self.is_paused = False

    def info(self) -> Any:
        return _info("rollout-0", "rollout")

    async def bind_weight_sync(self) -> None:
        """The handler has registered its buffers already."""

    async def get_weight_sync_metadata(self) -> list[Any]:
        return [_unit("rollout")]

    async def pre_weight_sync(self, sync_request: Any = None) -> None:
        if self.tracker.admit(sync_request, "prepared"):
            self.is_paused = True  # here an engine drains requests and drops its prefix cache
            self.tracker.complete(sync_request, "prepared")

    async def weight_sync(self, sync_request: Any = None) -> None:
        if self.tracker.admit(sync_request, "h2d_done"):
            self.handler.staged(sync_request.extra_config["req_id"])
            self.tracker.complete(sync_request, "h2d_done")

    async def post_weight_sync(self, sync_request: Any = None) -> None:
        if self.tracker.admit(sync_request, "committed"):
            self.params = self.handler.publish(sync_request.extra_config["req_id"])
            self.is_paused = False
            self.tracker.complete(sync_request, "committed")

    async def abort_weight_sync(self, sync_request: Any = None) -> None:
        if self.tracker.admit(sync_request, "aborted"):
            self.is_paused = False
            self.tracker.complete(sync_request, "aborted")

    async def get_weight_sync_status(self) -> dict[str, Any]:
        return self.tracker.report()

    def answer(self, x: jax.Array) -> jax.Array:
        return x @ self.params["weight"].T


def _info(worker_id: str, role: str) -> Any:
    from tunix.experimental.common.datatypes import WorkerInfo

    return WorkerInfo(worker_id=worker_id, roles={role})


def _unit(job: str) -> Any:
    from tunix.experimental.orchestrator.weight_sync import WorkUnitId, WorkUnitMetadata

    return WorkUnitMetadata(unit=WorkUnitId(job_name=job))


def main() -> None:
    from tunix.experimental.orchestrator.weight_sync_coordinator import WeightSyncCoordinator, WeightSyncError
    from tunix.experimental.orchestrator.worker_registry import WorkerRegistry

    devices = np.array(jax.devices())
    trainer = Trainer(Mesh(devices[:4].reshape(2, 2), ("fsdp", "tp")))
    place = NamedSharding(Mesh(devices[4:].reshape(2, 2), ("replica", "tp")), P("tp"))
    served = {"weight": jax.ShapeDtypeStruct((32, 16), "bfloat16", sharding=place)}
    mapping = sf.Mapping({"weight": sf.src("kernel").rearrange("i o -> o i")})
    handler = Handler(sf.make_plan(trainer.params, served, mapping, allow_cast=("*",)), lambda: trainer.params)
    rollout = Rollout(handler)
    registry = WorkerRegistry()
    registry.register(trainer)
    registry.register(rollout)
    coordinator = WeightSyncCoordinator(registry, handler, controller_id="example")

    def expected() -> np.ndarray:
        return np.asarray(trainer.params["kernel"].astype(jnp.bfloat16)).T

    for _ in range(2):
        trainer.step()
        result = asyncio.run(coordinator.sync(policy_version=trainer.version))
        np.testing.assert_array_equal(np.asarray(rollout.params["weight"]), expected())
        print(f"round {result.round_index}: {result.state.value}, serving version {trainer.version}")

    kept, want = trainer.params, expected()
    trainer.params = {"kernel": kept["kernel"][:8]}  # not what was planned
    try:
        asyncio.run(coordinator.sync(policy_version=trainer.version + 1))
        raise AssertionError("a round with other params must not commit")
    except WeightSyncError as error:
        print(f"round {error.result.round_index}: {error.result.state.value}, {error.result.failures[0].split('.')[0]}")
    np.testing.assert_array_equal(np.asarray(rollout.params["weight"]), want)
    assert not rollout.is_paused

    trainer.params = kept
    trainer.step()
    result = asyncio.run(coordinator.sync(policy_version=trainer.version))
    np.testing.assert_array_equal(np.asarray(rollout.params["weight"]), expected())
    print(f"round {result.round_index}: {result.state.value}, serving version {trainer.version}")
    print("an answer:", np.asarray(rollout.answer(jnp.ones((1, 16), jnp.bfloat16)))[0, :4])


if __name__ == "__main__":
    main()
