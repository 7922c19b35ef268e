"""The persistent executor: one launch of one kernel per device and phase.

An update is three phases. *ready* runs on every device with rollout buffers, behind the computations that were queued
there before: it zeroes the arrival counters and lets the writers write. *send* runs on every device with trainer
shards, launched once every *ready* has run, and moves. *finish* runs on the rollouts' devices again: it forwards what
arrives, waits until everything has, and notes the version.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping

import jax
import numpy as np

from shardfly_jax.executors.launches import BLOCKS_PER_SM, FREE_SMS, ROOM_OF_ONE, Attempt, Launch, Wait, size_class
from shardfly_jax.executors.memory import Key, Shard, Sources
from shardfly_jax.sharding import optable
from shardfly_jax.sharding.errors import StaleBuffer, SyncTimeout
from shardfly_jax.sharding.optable import Flag, Phase, State
from shardfly_jax.sharding.plan import Plan
from shardfly_jax.sharding.records import PIECE_NBYTES

SUPPORTED_CAPABILITY = "9.0"
DEADLINE_MS = 60_000
OTHER_CLIENT = "XLA_PYTHON_CLIENT_USE_TFRT_GPU_CLIENT"


def why_not(plan: Plan, devices: set[jax.Device]) -> tuple[str, ...]:
    """Why this executor cannot run a plan on these GPUs; empty if it can."""
    reasons = []
    for kind, capability in sorted({(d.device_kind, getattr(d, "compute_capability", "unknown")) for d in devices}):
        if capability != SUPPORTED_CAPABILITY:
            wanted = f"the kernel is built for {SUPPORTED_CAPABILITY} (Hopper)"
            reasons.append(f"{kind} has compute capability {capability}, and {wanted}")
    if os.environ.get(OTHER_CLIENT, "").lower() in ("1", "true"):
        reasons.append(f"{OTHER_CLIENT} is set, and that client does not run a device's computations in order")
    unsupported = optable.why_unsupported(plan)
    return (*reasons, unsupported) if unsupported else tuple(reasons)


class PersistentExecutor:
    """Runs a plan whose ranks are on GPUs of this process; several may share one.

    Args:
      plan: `why_not` has nothing against it.
      buffers: Registered shards of all target families.
      source_devices: Device of each trainer rank that holds a planned shard.

    Raises:
      StaleBuffer: A buffer is not aligned to 16 bytes.
    """

    def __init__(self, plan: Plan, buffers: Mapping[Key, Shard], source_devices: Mapping[int, jax.Device]):
        self.plan = plan
        self._session, self._epoch, self._version = secrets.randbits(32), 0, 0
        self.deadline_ms = DEADLINE_MS
        placed = dict(source_devices) | {key[2]: shard.device for key, shard in buffers.items()}
        tables = optable.make_tables(
            plan, lambda rank: placed[rank], lambda key: (buffers[key].device, buffers[key].address)
        )
        self._devices: list[jax.Device] = list(tables.devices)
        words = [size_class(tables.counters + n) for n in tables.n_counters]
        self._states = [
            jax.new_ref(jax.device_put(np.zeros(n, np.int32), device))
            for n, device in zip(words, self._devices, strict=True)
        ]
        fixed: dict[Key | State, int] = {key: shard.address for key, shard in buffers.items()}
        self._check_alignment(fixed)
        fixed |= {State(number): ref.unsafe_buffer_pointer() for number, ref in enumerate(self._states)}
        self._ready, self._send, self._finish = _Phases(plan, tables, self._devices, self._states, fixed).launches()
        self.source_keys = list(dict.fromkeys(key for launch in self._send for key in launch.moving))
        for launch in self._send:
            launch.take_from(self.source_keys)

    def _check_alignment(self, addresses: Mapping[Key | State, int]) -> None:
        for key, address in addresses.items():
            if address % PIECE_NBYTES and isinstance(key, tuple):
                raise StaleBuffer(
                    f"buffer: {self.plan.families[key[0]].name(key[1])!r} of rank {key[2]} is not aligned to "
                    f"{PIECE_NBYTES} bytes. Let JAX allocate params and rollout buffers, or use executor='portable'."
                )

    def start(self, sources: Sources, progress: Callable[[int], None] | None = None) -> Callable[[], None]:
        """Launches every phase; see `Executor`.

        Raises:
          StaleBuffer: A source is not aligned to 16 bytes.
          SyncTimeout: A phase waited for another one beyond the deadline, from what is returned.
        """
        arrays = [sources[key] for key in self.source_keys]  # alive until the kernels have ended
        addresses = np.array([array.unsafe_buffer_pointer() for array in arrays], np.uint64)
        if (addresses % PIECE_NBYTES).any():
            self._check_alignment(dict(zip(self.source_keys, addresses.tolist(), strict=True)))
        self._epoch += 1
        attempt = Attempt(self._session, self._epoch, self._version + 1, self.deadline_ms)
        ready = [(launch, launch.start(attempt, addresses)) for launch in self._ready]
        jax.block_until_ready([report for _, report in ready])
        started = [(launch, launch.start(attempt, addresses)) for launch in (*self._send, *self._finish)]

        def wait() -> None:
            self._check([(launch, np.asarray(report)) for launch, report in (*ready, *started)])
            arrays.clear()
            self._version += 1
            if progress is not None:
                progress(self.plan.target_nbytes)

        return wait

    def _check(self, reports: list[tuple[Launch, np.ndarray]]) -> None:
        faults = [fault for launch, report in reports if (fault := launch.fault(report))]
        if faults:
            raise SyncTimeout(
                f"sync: {len(faults)} of {len(reports)} launches did not get what they waited for within "
                f"{self.deadline_ms / 1000:g} s:\n" + "\n".join(f"  - {fault}." for fault in faults)
            )


class _Phases:
    """Builds the launches of a plan."""

    def __init__(
        self,
        plan: Plan,
        tables: optable.OpTables,
        devices: list[jax.Device],
        states: list[jax.Ref],
        fixed: Mapping[Key | State, int],
    ):
        self.plan, self.tables, self.devices, self.states, self.fixed = plan, tables, devices, states, fixed
        self.numbers = range(len(devices))

    def launches(self) -> tuple[list[Launch], list[Launch], list[Launch]]:
        """Those of ready, send and finish."""
        written = [d for d in self.numbers if self.tables.ranks_on(d)]
        reading = [d for d in self.numbers if (d, Phase.SEND) in self.tables.tables]
        forwarding = [d for d in self.numbers if (d, Phase.FINISH) in self.tables.tables]
        return (
            [self.ready(d) for d in written],
            [self.send(d) for d in reading],
            [self.finish(d) for d in sorted({*written, *forwarding})],
        )

    def ready(self, device: int) -> Launch:
        """Tells every device that writes this one's buffers."""
        tables = self.tables
        writers = {*tables.writers(device, Phase.SEND), *tables.writers(device, Phase.FINISH)}
        return self.launch(
            f"ready of {self.who(device)}",
            device,
            None,
            tells=[(writer, tables.flag(Flag.READY, device)) for writer in sorted(writers)],
            reset=tables.n_counters[device],
        )

    def send(self, device: int) -> Launch:
        """Moves what this device's trainer ranks hold."""
        targets = self.tables.targets(device, Phase.SEND)
        return self.launch(
            f"send of {self.who(device, Phase.SEND)}",
            device,
            Phase.SEND,
            blocks=self.devices[device].core_count * BLOCKS_PER_SM,
            heads=self.readies(targets),
            tells=[(target, self.tables.flag(Flag.SENT, device)) for target in targets],
        )

    def finish(self, device: int) -> Launch:
        """Forwards and fills, then waits for everything that is written to this device."""
        tables, cores = self.tables, self.devices[device].core_count
        targets = [target for target in tables.targets(device, Phase.FINISH) if target != device]
        alone = len(self.devices) == 1
        tails = [
            Wait(tables.flag(flag, writer), f"{phase.value} of {self.who(writer, phase)}")
            for flag, phase in ((Flag.SENT, Phase.SEND), (Flag.FORWARDED, Phase.FINISH))
            for writer in tables.writers(device, phase)
            if (phase, writer) != (Phase.FINISH, device)
        ]
        has_records = (device, Phase.FINISH) in tables.tables
        return self.launch(
            f"finish of {self.who(device)}",
            device,
            Phase.FINISH,
            blocks=1 if not has_records else cores * BLOCKS_PER_SM if alone else cores - FREE_SMS,
            room=0 if alone else ROOM_OF_ONE,
            heads=self.readies(targets),
            tails=tails,
            tells=[(target, tables.flag(Flag.FORWARDED, device)) for target in targets],
            publishes=True,
        )

    def readies(self, targets: list[int]) -> list[Wait]:
        """The flags of devices that let this one write."""
        return [Wait(self.tables.flag(Flag.READY, target), f"ready of {self.who(target)}") for target in targets]

    def who(self, device: int, phase: Phase | None = None) -> str:
        """The ranks of a device that take part in a phase."""
        ranks = self.tables.ranks_on(device, phase)
        names = [
            next((f"{rank} ({replica.name})" for replica in self.plan.replicas if rank in replica.ranks), str(rank))
            for rank in ranks
        ]
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        return f"rank{'s' if len(names) != 1 else ''} {shown} on {self.devices[device]}"

    def launch(self, name: str, device: int, phase: Phase | None, **more) -> Launch:  # type: ignore[no-untyped-def]
        """A launch on a device, with its records of a phase if there are any."""
        return Launch(
            name,
            self.devices[device],
            self.tables.tables.get((device, phase)) if phase else None,
            self.plan.conversions,
            len(self.devices),
            self.states[device],
            self.tables.counters,
            self.fixed,
            **more,
        )
