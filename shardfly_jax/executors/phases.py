"""The phases of an update, as work for each device: who waits for whom, who tells whom.

*ready* runs on every device with rollout buffers or slots, behind the computations that were queued there before: it
zeroes the arrival counters and the slots, and lets the writers write. Where one process has several devices it is
launched with the update before, behind its *finish*, and the process itself waits for what is queued afterwards: a
launch and the answer take a millisecond. *send* runs on every device with trainer shards, and moves; what it has
written to its own device it forwards from there. *finish* runs on the rollouts' devices again: it forwards what else
arrives, waits until everything has, and notes the version.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shardfly_jax.executors.launches import FREE_SMS, Wait, Work
from shardfly_jax.pallas_kernels.transfer import WORKERS
from shardfly_jax.sharding.moves import Key
from shardfly_jax.sharding.optable import Flag, Inbox, OpTables, Phase
from shardfly_jax.sharding.plan import Plan


class Phases:
    """Builds the work of a plan.

    Args:
      plan: The plan.
      tables: Its tables.
      devices: The tables' devices.
      fixed: Addresses of the inboxes and registered buffers that never move.
      here: Numbers of the devices to build for; by default all.
    """

    def __init__(
        self,
        plan: Plan,
        tables: OpTables,
        devices: Sequence[Any],
        fixed: Mapping[Key | Inbox, int],
        here: Iterable[int] | None = None,
    ):
        self.plan, self.tables, self.devices, self.fixed = plan, tables, devices, fixed
        self.numbers = range(len(devices)) if here is None else tuple(here)

    def ready(self) -> dict[int, Work]:
        """By device number: lets every device use this one's buffers and inbox, by a flag of its own that they read."""
        return {device: self._ready(device) for device in self.numbers if self._is_used(device)}

    def send(self) -> dict[int, Work]:
        """By device number: moves what this device's trainer ranks hold."""
        return {device: self._send(device) for device in self.numbers if (device, Phase.SEND) in self.tables.tables}

    def idle(self, device: int) -> Work:
        """Nothing."""
        return self._work(f"nothing on {self.devices[device]}", device, None)

    def finish(self) -> dict[int, Work]:
        """By device number: forwards and fills, then waits for everything that is written to this device."""
        busy = [d for d in self.numbers if self._is_used(d) or (d, Phase.FINISH) in self.tables.tables]
        return {device: self._finish(device) for device in busy}

    def _is_used(self, device: int) -> bool:
        return any(self.tables.writers(device, phase) for phase in Phase)

    def _ready(self, device: int) -> Work:
        return self._work(
            f"ready of {self._who(device)}",
            device,
            None,
            tells=[(device, self.tables.flag(Flag.READY, device))],
            reset=max(self.tables.n_counters[device], 1),
        )

    def _send(self, device: int) -> Work:
        targets = self.tables.targets(device, Phase.SEND)
        return self._work(
            f"send of {self._who(device, Phase.SEND)}",
            device,
            Phase.SEND,
            blocks=self.devices[device].core_count,
            workers=WORKERS,
            heads=self._readies(targets),
            tells=[(target, self.tables.flag(Flag.SENT, device)) for target in targets],
        )

    def _finish(self, device: int) -> Work:
        tables, cores = self.tables, self.devices[device].core_count
        targets = [target for target in tables.targets(device, Phase.FINISH) if target != device]
        alone = len(self.devices) == 1
        tails = [
            self._wait(device, flag, writer, phase)
            for flag, phase in ((Flag.SENT, Phase.SEND), (Flag.FORWARDED, Phase.FINISH))
            for writer in tables.writers(device, phase)
            if (phase, writer) != (Phase.FINISH, device)
        ]
        has_records = (device, Phase.FINISH) in tables.tables
        return self._work(
            f"finish of {self._who(device)}",
            device,
            Phase.FINISH,
            blocks=1 if not has_records else cores if alone else cores - FREE_SMS,
            workers=WORKERS if has_records else 1,
            heads=self._readies(targets),
            tails=tails,
            tells=[(target, tables.flag(Flag.FORWARDED, device)) for target in targets],
            publishes=True,
        )

    def _readies(self, targets: list[int]) -> list[Wait]:
        """The flags of devices that let this one write."""
        return [self._wait(target, Flag.READY, target, None) for target in targets]

    def _wait(self, at: int, flag: Flag, device: int, phase: Phase | None) -> Wait:
        """For what a device says in an inbox, in a phase that has records or (None) in *ready*."""
        name = phase.value if phase else "ready"
        who = f"{name} of {self._who(device, phase)}"
        return Wait(at, self.tables.flag(flag, device), who, name, min(self.tables.ranks_on(device, phase), default=0))

    def _who(self, device: int, phase: Phase | None = None) -> str:
        """The ranks of a device that read in a phase, or (None) that are written."""
        ranks = self.tables.ranks_on(device, phase)
        names = [
            next((f"{rank} ({replica.name})" for replica in self.plan.replicas if rank in replica.ranks), str(rank))
            for rank in ranks
        ]
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        return f"rank{'s' if len(names) != 1 else ''} {shown} on {self.devices[device]}"

    def _work(self, name: str, device: int, phase: Phase | None, **more) -> Work:  # type: ignore[no-untyped-def]
        """Work on a device, with its records of a phase if there are any."""
        return Work(name, self.tables, device, phase, self.tables.conversions, self.fixed, **more)
