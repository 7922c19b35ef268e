"""The portable executor: jitted XLA and copies, on any platform, in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import jax

from shardfly_jax.executors.host import HostExecutor
from shardfly_jax.executors.memory import Key, Shard, Sources
from shardfly_jax.executors.xla import XlaExecutor
from shardfly_jax.sharding.plan import Plan

SourceShapes = Callable[[Key], tuple[tuple[int, ...], jax.Device]]
"""Local shape and device of a source shard."""


class Executor(Protocol):
    """Runs a plan on buffers that it was built for."""

    def run(self, sources: Sources, progress: Callable[[int], None] | None = None) -> None:
        """Executes every move of the plan.

        Args:
          sources: Gives the single-device array of each source shard.
          progress: Called with the bytes written, from several threads.
        """


def make_executor(plan: Plan, buffers: Mapping[Key, Shard], source_shapes: SourceShapes, source_devices: set[jax.Device]) -> Executor:
    """Compiles what a plan needs: through host memory if every device is a CPU, else through XLA alone."""
    devices = source_devices | {shard.device for shard in buffers.values()}
    if all(device.platform == "cpu" for device in devices):
        return HostExecutor(plan, buffers, source_shapes)
    return XlaExecutor(plan, buffers)
