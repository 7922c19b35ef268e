"""Which executor runs a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import jax

from shardfly_jax.executors.host import HostExecutor, is_host
from shardfly_jax.executors.memory import Key, Shard, Sources
from shardfly_jax.executors.xla import XlaExecutor
from shardfly_jax.sharding.errors import RegistrationError
from shardfly_jax.sharding.plan import Plan


class Executor(Protocol):
    """Runs a plan on buffers that it was built for.

    Attributes:
      alignment: Of the sources that it takes, bytes.
      in_order: Whether what it starts runs behind everything that reads the buffers and was queued before.
      kernels: Launches that it has compiled before its first update.
      compiled: Those among them that no executor of this process had compiled before.
    """

    alignment: int
    in_order: bool
    kernels: int
    compiled: int

    def start(self, sources: Sources, progress: Callable[[int], None] | None = None) -> Callable[[], None]:
        """Begins to execute every move of the plan.

        Args:
          sources: The single-device array of each source shard.
          progress: Called with the bytes written, from several threads.

        Returns:
          Waits until all is done, and raises what went wrong.
        """


EXECUTORS = ("auto", "portable", "persistent")


def why_not_persistent(
    plan: Plan, buffers: Mapping[Key, Shard], source_devices: Iterable[jax.Device]
) -> tuple[str, ...]:
    """Why the persistent kernel cannot run a plan with these buffers and trainer devices; empty if it can."""
    devices = {*source_devices} | {shard.device for shard in buffers.values()}
    if any(device.platform != "gpu" for device in devices):
        return ("some ranks are not on a GPU",)
    from shardfly_jax.executors import persistent  # Pallas takes a second to import, and only GPUs need it

    return persistent.why_not(plan, devices, {key: shard.address for key, shard in buffers.items()})


def make_executor(
    plan: Plan, buffers: Mapping[Key, Shard], source_devices: Mapping[int, jax.Device], choice: str = "auto"
) -> Executor:
    """Prepares a plan for repeated runs: the persistent kernel where it can, else the portable executor.

    Args:
      plan, buffers: Where the targets are.
      source_devices: Device of each trainer rank.
      choice: One of `EXECUTORS`.

    Raises:
      RegistrationError: `choice` is `persistent`, and it cannot; the reasons are listed.
    """
    devices = {*source_devices.values()} | {shard.device for shard in buffers.values()}
    if choice != "portable":
        reasons = why_not_persistent(plan, buffers, source_devices.values())
        if not reasons:
            from shardfly_jax.executors.persistent import PersistentExecutor

            return PersistentExecutor(plan, buffers, source_devices)
        if choice == "persistent":
            raise RegistrationError(
                f"registration: the persistent kernel cannot run this plan: {'; '.join(reasons)}. Use executor='auto'."
            )
    if is_host(devices):
        return HostExecutor(plan, buffers)
    return XlaExecutor(plan, buffers)


def check_executor(choice: str, transport: str, runs: str) -> None:
    """Refuses to run another executor than was asked for.

    Args:
      choice: What was asked for, as for `register`.
      transport: Over which ranks reach each other.
      runs: The only executor there.

    Raises:
      RegistrationError: They differ.
    """
    if choice not in ("auto", runs):
        raise RegistrationError(
            f"registration: executor is {choice!r}, but between processes over {transport} there is only {runs!r}. "
            "Leave executor out, or hold all ranks in one process."
        )
