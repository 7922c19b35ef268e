"""The persistent executor: one launch of one kernel per device and phase (see `phases`)."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import itertools
import os
import secrets
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from shardfly_jax.executors.launches import Attempt, Launch, Outcome, Report
from shardfly_jax.executors.memory import Key, Shard, Sources
from shardfly_jax.executors.phases import Phases
from shardfly_jax.sharding import optable
from shardfly_jax.sharding.errors import SyncTimeout
from shardfly_jax.sharding.finiteness import not_finite
from shardfly_jax.sharding.optable import Inbox
from shardfly_jax.sharding.plan import Plan
from shardfly_jax.sharding.records import PIECE_NBYTES

SUPPORTED_CAPABILITY = "9.0"
DEADLINE_MS = 60_000
NOTHING_ANNOUNCED: tuple[int | None, threading.Thread | None] = None, None
"""Otherwise the epoch of an attempt whose *ready* was launched ahead, and the thread that did."""
OTHER_CLIENT = "XLA_PYTHON_CLIENT_USE_TFRT_GPU_CLIENT"


def why_not(plan: Plan, devices: set[jax.Device], addresses: Mapping[Key, int]) -> tuple[str, ...]:
    """Why this executor cannot run a plan on these GPUs, with buffers at these addresses; empty if it can."""
    reasons = []
    for kind, capability in sorted({(d.device_kind, getattr(d, "compute_capability", "unknown")) for d in devices}):
        if capability != SUPPORTED_CAPABILITY:
            wanted = f"the kernel is built for {SUPPORTED_CAPABILITY} (Hopper)"
            reasons.append(f"{kind} has compute capability {capability}, and {wanted}")
    if os.environ.get(OTHER_CLIENT, "").lower() in ("1", "true"):
        reasons.append(f"{OTHER_CLIENT} is set, and that client does not run a device's computations in order")
    reasons += [
        f"{one} cannot reach the memory of {other}"
        for one, other in itertools.permutations(sorted(devices, key=lambda d: d.id), 2)
        if not can_reach(one.local_hardware_id, other.local_hardware_id)
    ]
    crooked = [key for key, address in addresses.items() if address % PIECE_NBYTES]
    if crooked:
        reasons.append(
            f"{len(crooked)} buffers are not aligned to {PIECE_NBYTES} bytes, such as that of "
            f"{plan.families[crooked[0][0]].name(crooked[0][1])!r} of rank {crooked[0][2]}"
        )
    unsupported = optable.why_unsupported(plan)
    return (*reasons, unsupported) if unsupported else tuple(reasons)


def can_reach(one: int, other: int) -> bool:
    """Whether kernels on one GPU can address another's memory, as the CUDA driver says.

    Args:
      one, other: Ordinals of visible GPUs. JAX lets all that can reach each other do so.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    answer, a, b = ctypes.c_int(0), ctypes.c_int(), ctypes.c_int()
    failed = driver.cuDeviceGet(ctypes.byref(a), one) or driver.cuDeviceGet(ctypes.byref(b), other)
    failed = failed or driver.cuDeviceCanAccessPeer(ctypes.byref(answer), a, b)
    return not failed and bool(answer.value)


@dataclasses.dataclass(frozen=True, slots=True)
class Others:
    """The ranks that other processes hold.

    Attributes:
      places: The device of each rank, as a name that all processes agree on.
      memory: Equal for two of their target buffers that are one.
      make_inbox: Zeroed int32 words on a device of this process, that the others reach.
    """

    places: Mapping[int, Hashable]
    memory: Callable[[Key], object]
    make_inbox: Callable[[jax.Device, int], jax.Array]


class Started:
    """Launches that have been started."""

    def __init__(self, launches: Sequence[Launch], reports: Sequence[Report]):
        self._launches, self._reports = launches, reports

    def outcomes(self) -> list[Outcome]:
        """What they report, for which this waits."""
        return [
            Outcome.of(work, words)
            for launch, report in zip(self._launches, self._reports, strict=True)
            for work, words in zip(launch.works, report.words(), strict=True)
        ]


class PersistentExecutor:
    """Runs a plan on the GPUs of this process, several ranks on one if need be; other processes may hold some ranks.

    Args:
      plan: `why_not` has nothing against it.
      buffers: Registered shards of all target families, of the ranks of this process.
      source_devices: Device of each trainer rank of this process that holds a planned shard.
      others: The other processes' ranks; None if there are none. Then `ready` and `transfer` run attempts, not `start`.

    Attributes:
      deadline_ms: How long a launch may wait for others.
      devices: That hold ranks, in the order in which the kernels number them: the places of others among them.
      inboxes: Of the devices of this process, by number.
      works: What each phase does on each of these that takes part in it, by number.
      idle: Gives the work of a device that takes part in a launch and has nothing to do.
      moving: What has no fixed address: source shards, and in a world the buffers and inboxes of others.
      kernels, compiled: See `Executor`.
    """

    alignment = PIECE_NBYTES

    def __init__(
        self,
        plan: Plan,
        buffers: Mapping[Key, Shard],
        source_devices: Mapping[int, jax.Device],
        others: Others | None = None,
    ):
        self.plan = plan
        self.deadline_ms = DEADLINE_MS
        self.in_order = len(jax.local_devices(backend="gpu")) == 1  # copies to other GPUs have streams of their own
        self._session, self._epoch, self._version = secrets.randbits(32), 0, 0
        self._announced = NOTHING_ANNOUNCED
        self._order: tuple[Mapping[Key, int], np.ndarray] | None = None  # of what is moving among sources
        placed: dict[int, Hashable] = dict(others.places) if others is not None else {}
        placed |= dict(source_devices) | {key[2]: shard.device for key, shard in buffers.items()}

        def memory(key: Key) -> object:
            shard = buffers.get(key)
            if shard is None:
                assert others is not None
                return others.memory(key)
            return shard.device, shard.address

        self._tables = tables = optable.make_tables(plan, placed, memory)
        self.devices: list[Any] = list(tables.devices)
        here = [number for number, device in enumerate(self.devices) if isinstance(device, jax.Device)]
        make_inbox = others.make_inbox if others is not None else _own_inbox
        inboxes = {  # written by kernels through their addresses, never given to XLA
            number: make_inbox(self.devices[number], self.inbox_words(number)) for number in here
        }
        self.inboxes = jax.block_until_ready(inboxes)  # a copy from the host must not undo what a kernel writes
        fixed: dict[Key | Inbox, int] = {key: shard.address for key, shard in buffers.items()}
        fixed |= {Inbox(number): array.unsafe_buffer_pointer() for number, array in self.inboxes.items()}
        phases = Phases(plan, tables, self.devices, fixed, here)
        self.works = {"ready": phases.ready(), "send": phases.send(), "finish": phases.finish()}
        self.idle = phases.idle
        works = [work for phase in self.works.values() for work in phase.values()]
        self.moving = list(dict.fromkeys(key for work in works for key in work.moving))
        alone = len(self.devices) == 1 and others is None
        self._launches = self.launches("ready", "send", "finish") if alone else self.launches("send", "finish")
        first = [*self._launches, *([] if alone else self._readies)]  # compiled now, not by the first update
        self.kernels = sum(len(launch.works) for launch in first)
        self.compiled = sum(len(launch.works) for launch in first if launch.is_new)

    def launches(self, *phases: str) -> list[Launch]:
        """Launches of some phases, one for each device of this process that has work in them."""
        works = {
            number: [self.works[phase][number] for phase in phases if number in self.works[phase]]
            for number in self.inboxes
        }
        return [Launch(of, self.devices[number], self.moving) for number, of in works.items() if of]

    def inbox_words(self, number: int) -> int:
        """Size of a device's inbox: flags, then counters."""
        return self._tables.counters + max(self._tables.n_counters[number], 1)

    def ready_word(self, number: int) -> int:
        """Word of a device's inbox, the first of two, in which it says *ready*."""
        return self._tables.flag(optable.Flag.READY, number)

    @functools.cached_property
    def _readies(self) -> list[Launch]:
        return self.launches("ready")

    @functools.cached_property
    def _finishes(self) -> list[Launch]:
        """Behind sends that are not this executor's."""
        return self.launches("finish")

    def start(self, sources: Sources, progress: Callable[[int], None] | None = None) -> Callable[[], None]:
        """Launches every phase; see `Executor`.

        On several devices *ready* of the next update goes along, behind *finish*. What is queued on them until then is
        waited for by `Session.wait_for_readers`, which knows no callbacks of other threads: an update in another
        thread than the one before, as all that go on in the background, launches *ready* again and waits for it.

        Raises:
          SyncTimeout: A phase waited for another one beyond the deadline, from what is returned.
          NotFinite: A tensor to be quantized holds NaN or infinity, from what is returned.
        """
        alone = len(self.devices) == 1
        (epoch, thread), self._announced = self._announced, NOTHING_ANNOUNCED
        here = threading.current_thread()
        attempt = self._attempt(epoch) if alone or thread is here else self.begin()
        if self._order is None or self._order[0] is not sources.places:
            places = [sources.places[key] for key in self.moving if not isinstance(key, Inbox)]  # none moves here
            self._order = sources.places, np.array(places, np.int64)
        started = self._start(self._launches, attempt, sources.addresses[self._order[1]].view(np.uint64))
        following = None if alone else self._attempt()
        if following is not None:
            try:
                self.ready(following)  # on every device behind its *finish*: the next update need not wait for it
            except BaseException:
                started.outcomes()  # they read the sources until then
                raise
        alive = [sources]  # until the kernels have ended

        def wait() -> None:
            self._end(started.outcomes())
            if following is not None:  # after a fault it counts for nothing, as it has to run when all else has ended
                self._announced = following.epoch, here
            alive.clear()
            if progress is not None:
                progress(self.plan.target_nbytes)

        return wait

    def finish(self, attempt: Attempt, sent: Callable[[], list[Outcome]]) -> Callable[[], None]:
        """Launches *finish* of an attempt that `begin` began and a jitted step sends.

        Args:
          attempt: From `begin`.
          sent: Waits for the sends, and returns what they report.

        Returns:
          Waits, and raises as what `start` returns.
        """
        finished = self._start(self._finishes, attempt)
        return lambda: self._end([*sent(), *finished.outcomes()])

    def begin(self) -> Attempt:
        """Begins an attempt: launches *ready* everywhere, and returns when all of them have run.

        On a single device it returns at once, as what is launched there afterwards runs afterwards.
        """
        self._announced = NOTHING_ANNOUNCED
        attempt = self._attempt()
        ready = self.ready(attempt)
        if len(self.devices) > 1:
            ready.outcomes()
        return attempt

    def ready(self, attempt: Attempt) -> Started:
        """Launches *ready* of an attempt."""
        return self._start(self._readies, attempt)

    def transfer(self, attempt: Attempt, addresses: Mapping[Any, int]) -> Started:
        """Launches *send* and *finish* of an attempt; on a single device without others *ready* before them.

        Args:
          attempt: The attempt.
          addresses: Of all that is `moving`.
        """
        taken = np.fromiter(map(addresses.__getitem__, self.moving), np.uint64, len(self.moving))
        return self._start(self._launches, attempt, taken)

    def _attempt(self, epoch: int | None = None) -> Attempt:
        """An attempt of the next epoch, or of one whose *ready* was launched ahead."""
        if epoch is None:
            self._epoch = epoch = self._epoch + 1
        return Attempt(self._session, epoch, self._version + 1, self.deadline_ms)

    def _start(self, launches: Sequence[Launch], attempt: Attempt, addresses: np.ndarray | None = None) -> Started:
        given = np.zeros(0, np.uint64) if addresses is None else addresses
        return Started(launches, [launch.start(attempt, given) for launch in launches])

    def _end(self, outcomes: Sequence[Outcome]) -> None:
        """Raises:
        SyncTimeout: Some work did not get what it waited for.
        NotFinite: A tensor to be quantized holds NaN or infinity.
        """
        faults = [fault for work, error, _ in outcomes if (fault := work.fault(error))]
        if faults:
            raise SyncTimeout(
                f"sync: {len(faults)} of {len(outcomes)} launches did not get what they waited for within "
                f"{self.deadline_ms / 1000:g} s:\n" + "\n".join(f"  - {fault}." for fault in faults)
            )
        for outcome in outcomes:
            self.check_finite(outcome)
        self._version += 1

    def check_finite(self, outcome: Outcome) -> None:
        """Raises:
        NotFinite: A tensor that it quantizes holds NaN or infinity.
        """
        if key := outcome.work.refused(outcome.refused):
            family, tensor, _ = key
            raise not_finite(self.plan.families[family], tensor)


def _own_inbox(device: jax.Device, words: int) -> jax.Array:
    return jax.device_put(np.zeros(words, np.int32), device)
