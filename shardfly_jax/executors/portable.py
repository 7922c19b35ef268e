"""The portable executor: on any platform, in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import jax

from shardfly_jax.executors.host import HostExecutor, is_host
from shardfly_jax.executors.memory import Key, Shard, Sources
from shardfly_jax.executors.xla import XlaExecutor
from shardfly_jax.sharding.plan import Plan


class Executor(Protocol):
    """Runs a plan on buffers that it was built for."""

    def run(self, sources: Sources, progress: Callable[[int], None] | None = None) -> None:
        """Executes every move of the plan.

        Args:
          sources: Gives the single-device array of each source shard.
          progress: Called with the bytes written, from several threads.
        """


def make_executor(plan: Plan, buffers: Mapping[Key, Shard], source_devices: set[jax.Device]) -> Executor:
    """Prepares a plan for repeated runs: through host memory if every device is a CPU, else through XLA."""
    if is_host(source_devices | {shard.device for shard in buffers.values()}):
        return HostExecutor(plan, buffers)
    return XlaExecutor(plan, buffers)
