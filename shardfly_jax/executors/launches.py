"""Launches of the transfer kernel: what one phase on one device is given, and what its report means."""

from __future__ import annotations

import functools
import itertools
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from shardfly_jax.executors.memory import host_bytes
from shardfly_jax.pallas_kernels import launch_words as lw, transfer
from shardfly_jax.sharding import records
from shardfly_jax.sharding.formats import Conversion
from shardfly_jax.sharding.moves import Key
from shardfly_jax.sharding.optable import Inbox, OpTables, Phase

FREE_SMS = 16
"""Multiprocessors that a launch which waits for other devices leaves to others."""
LEAST_RECORDS, LEAST_ADDRESSES, LEAST_FLAGS = 4096, 2048, 16
"""Smallest size classes: 0.8 MB and 16 KB on a device, and the flags of 8 devices. Small models stay within them when
replicas join."""


class Wait(NamedTuple):
    """A flag that another device raises.

    Attributes:
      device: Number of that whose inbox it is in.
      word: Of that inbox.
      who: What should have raised it, for messages.
      phase, rank: The same: the phase, and the first rank that takes part in it.
    """

    device: int
    word: int
    who: str
    phase: str
    rank: int


class Attempt(NamedTuple):
    """One try at an update.

    Attributes:
      session: Random number of the registration.
      epoch: Counts attempts; never used twice.
      version: What the replicas hold if it succeeds.
      deadline_ms: How long a launch may wait, from its start.
    """

    session: int
    epoch: int
    version: int
    deadline_ms: int


class Outcome(NamedTuple):
    """What a launch reports.

    Attributes:
      work: What it did.
      error: Which wait failed, for `Work.fault`.
      refused: Which record met values that are not finite, for `Work.refused`.
    """

    work: Work
    error: int
    refused: int

    @classmethod
    def of(cls, work: Work, words: np.ndarray) -> Outcome:
        """From the report's two words."""
        error, refused = (int(word) & 0xFFFFFFFF for word in words)
        return cls(work, error, refused)


class Work:
    """What one phase does on one device, as the numbers that its kernel reads.

    Args:
      name: Of the phase and its ranks, for messages.
      tables: Of the plan.
      device: Number of the device, and so of its inbox.
      phase: Whose records it has, if any.
      conversions: What they name.
      fixed: Addresses of the inboxes and buffers that never move.
      blocks, workers: Of the kernel, see `transfer.make_kernel`.
      heads, tails: Flags it waits for before its first tile, and before it ends.
      tells: Device numbers and words of their inboxes that it sets.
      reset: How many counters it zeroes.
      publishes: Whether it sets the version.
    """

    def __init__(
        self,
        name: str,
        tables: OpTables,
        device: int,
        phase: Phase | None,
        conversions: tuple[Conversion, ...],
        fixed: Mapping[Key | Inbox, int],
        *,
        blocks: int = 1,
        workers: int = 1,
        heads: Sequence[Wait] = (),
        tails: Sequence[Wait] = (),
        tells: Sequence[tuple[int, int]] = (),
        reset: int = 0,
        publishes: bool = False,
    ):
        self.name, self.heads, self.tails, self.publishes = name, heads, tails, publishes
        self.table = table = tables.tables.get((device, phase)) if phase else None
        self.conversions, self.blocks, self.workers = conversions if table else (), blocks, workers
        self.flags = size_class(2 * len(tables.devices), LEAST_FLAGS)  # a tail for each device's send and finish
        self._tables, self._device, self._reset, self._tells, self._fixed = tables, device, reset, tells, fixed
        others = (*(number for number, _ in tells), *(wait.device for wait in heads))
        named = (*(table.buffers if table else ()), *(Inbox(number) for number in (device, *others)))
        self._named = tuple(dict.fromkeys(named))
        self.moving = [key for key in self._named if key not in fixed]

    @property
    def variant(self) -> tuple[tuple[Conversion, ...], int, int, int]:
        """Arguments of `transfer.make_kernel`; with the sizes of what `numbers` returns they tell kernels apart."""
        return self.conversions, self.blocks, self.flags, self.workers

    def numbers(
        self, operands: Mapping[Key | Inbox, int] = MappingProxyType({}), n_operands: int = 0
    ) -> tuple[np.ndarray, np.ndarray, dict[Key | Inbox, int]]:
        """The numbers of a launch but for its attempt, and the records that go with them.

        Args:
          operands: Which of the launch's operands holds a buffer.
          n_operands: How many there are; they take the first places among the addresses.

        Returns:
          uint32 numbers with the fixed addresses filled in, int32 [records * WORDS], and the word of each address.
        """
        named = [key for key in self._named if key not in operands]
        places = dict(operands) | {key: place for place, key in enumerate(named, n_operands)}
        tails_at, tells_at, bases_at, size = lw.launch_size(
            self.flags, size_class(n_operands + len(named), LEAST_ADDRESSES if self.table else LEAST_FLAGS)
        )
        numbers = np.zeros(size, np.uint32)
        numbers[lw.N_TILES] = self.table.n_tiles if self.table else 0
        numbers[lw.INBOX], numbers[lw.COUNTERS] = places[Inbox(self._device)], self._tables.counters
        numbers[lw.RESET], numbers[lw.SEVERAL] = self._reset, len(self._tables.devices) > 1
        heads = [number for wait in self.heads for number in (places[Inbox(wait.device)], wait.word)]
        told = [number for device, word in self._tells for number in (places[Inbox(device)], word)]
        for count, at, values, per in (
            (lw.N_HEADS, lw.LISTS, heads, 2),
            (lw.N_TAILS, tails_at, [wait.word for wait in self.tails], 1),
            (lw.N_TELLS, tells_at, told, 2),
        ):
            numbers[count] = len(values) // per
            numbers[at : at + len(values)] = values
        words = {key: bases_at + 2 * place for key, place in places.items()}
        for key, address in ((key, self._fixed[key]) for key in places if key in self._fixed):
            numbers[words[key] : words[key] + 2] = address & 0xFFFFFFFF, address >> 32
        return numbers, self._records(places), words

    def _records(self, places: Mapping[Key | Inbox, int]) -> np.ndarray:
        """The records, their buffers named by place, padded so that plans of one size class share a kernel."""
        n_records = len(self.table.words) if self.table else 0
        words = np.zeros((size_class(n_records, LEAST_RECORDS if n_records else 1), records.WORDS), np.int32)
        if self.table:
            words[:n_records] = self.table.words
            place = np.array([*(places[key] for key in self.table.buffers), -1], np.int32)  # -1 names nothing
            for word in records.BUFFERS:
                words[:n_records, word] = place[self.table.words[:, word]]
        return words.reshape(-1)

    def fault(self, error: int) -> str | None:
        """What a report's error says went wrong: who waited for whom in which phase."""
        kind, which = error >> lw.ERROR_SHIFT, error & ((1 << lw.ERROR_SHIFT) - 1)
        if not error:
            return None
        if kind == lw.LATE:
            return f"{self.name} came after a later attempt had begun, and wrote nothing"
        if kind == lw.GIVEN_UP:
            return f"{self.name} was given up, because others had failed"
        if kind == lw.COUNTER:
            assert self.table is not None
            at, to = self.table.moves[which]
            who = " and ".join(f"rank {rank}" for rank in self._raise(which))
            source = int(self.table.words[which, records.SOURCE])
            if self.table.words[which, records.ROLE] or (source >= 0 and isinstance(self.table.buffers[source], Inbox)):
                return f"{self.name} waited for the maxima of blocks from {who}"
            return f"{self.name} waited for what {who} sends to rank {at}, which forwards it to rank {to}"
        return f"{self.name} waited for {(self.heads if kind == lw.HEAD else self.tails)[which].who}"

    def blamed(self, error: int) -> tuple[str, int]:
        """Phase and rank that a report's error is about: who was waited for, or else this launch itself."""
        kind, which = error >> lw.ERROR_SHIFT, error & ((1 << lw.ERROR_SHIFT) - 1)
        if kind in (lw.HEAD, lw.TAIL):
            wait = (self.heads if kind == lw.HEAD else self.tails)[which]
            return wait.phase, wait.rank
        if kind == lw.COUNTER and (writers := self._raise(which)):
            return Phase.SEND.value, writers[0]
        ranks = self._tables.ranks_on(self._device) or self._tables.ranks_on(self._device, Phase.SEND)
        return Phase.FINISH.value if self.publishes else Phase.SEND.value, min(ranks, default=0)

    def _raise(self, record: int) -> list[int]:
        """The ranks for which a record waits."""
        assert self.table is not None
        inbox = self.table.buffers[self.table.words[record, records.WAIT_INBOX]]
        assert isinstance(inbox, Inbox)
        return self._tables.ranks_that_raise(inbox.device, int(self.table.words[record, records.WAIT]))

    def refused(self, word: int) -> Key | None:
        """Which target a report's second word says would be made of values that are not finite."""
        if not word:
            return None
        assert self.table is not None
        key = self.table.buffers[self.table.words[word - 1, records.TARGET]]
        assert not isinstance(key, Inbox)
        return key


def set_attempt(
    numbers: np.ndarray, attempt: Attempt, publishes: np.ndarray | bool, parts: np.ndarray | int = 0
) -> None:
    """Fills in what changes from update to update.

    Args:
      numbers: uint32 [..., words] of launches.
      attempt: Of the update.
      publishes: Of each part: whether the version is set.
      parts: First word of each work's numbers.
    """
    numbers[..., parts + lw.DEADLINE_MS] = attempt.deadline_ms
    numbers[..., parts + lw.SESSION] = attempt.session
    numbers[..., parts + lw.EPOCH] = attempt.epoch & 0xFFFFFFFF
    numbers[..., parts + lw.NEW_VERSION] = np.where(publishes, attempt.version & 0xFFFFFFFF, 0xFFFFFFFF)


class Report:
    """What a launch reports, for which a host can wait.

    JAX learns of the end of a launch from a thread that the driver wakes, half a millisecond late. The report's memory
    shows it at once: its last words are a number that no other launch of this process is given. A report is one copy
    within one cache line, so what stands before that number has come with it; one that is not is JAX's to wait for.

    Args:
      array: In the host's memory, perhaps not yet computed: int32 [works * lw.REPORT_SIZE + STAMP_SIZE].
      stamp: Its last words.
    """

    def __init__(self, array: jax.Array, stamp: int):
        self._array, self._stamp = array, stamp

    @functools.cached_property
    def _memory(self) -> np.ndarray | None:
        address, nbytes = self._array.unsafe_buffer_pointer(), self._array.nbytes
        if address // LINE_NBYTES != (address + nbytes - 1) // LINE_NBYTES:
            return None
        return host_bytes(address, nbytes).view(np.uint64)

    def _has_come(self) -> bool:
        return self._memory is not None and int(self._memory[-1]) == self._stamp

    def is_over(self) -> bool:
        """Whether the launch has ended."""
        return self._has_come() or self._array.is_ready()  # type: ignore[attr-defined]  # if it failed it never comes

    def words(self) -> np.ndarray:
        """uint32 [works, lw.REPORT_SIZE], see `transfer.make_kernel`; waits for the launch.

        Raises:
          Whatever JAX raises for a launch that failed.
        """
        began = time.monotonic()
        while not self.is_over():
            time.sleep(min(max((time.monotonic() - began) * NAP, LEAST_NAP_SECS), MOST_NAP_SECS))
        words = self._memory
        if words is None or not self._has_come():
            words = np.asarray(self._array).view(np.uint64)
        return words[:-1].copy().view(np.uint32).reshape(-1, lw.REPORT_SIZE)


NAP, LEAST_NAP_SECS, MOST_NAP_SECS = 1e-3, 2e-5, 1e-2
"""How long a host sleeps before it looks again: a part of what it has waited already."""
LINE_NBYTES = 64
STAMP_SIZE = 2
_STAMPS = itertools.count(secrets.randbits(63))
_COMPILED: set[tuple[object, ...]] = set()
"""What tells apart the kernels that this process has compiled."""


class Launch:
    """Work of one device, launched phase by phase by one call of the host, which pays for a call and not for each.

    Args:
      works: What it does, in this order.
      device: Where.
      sources: In which order `start` is given the addresses of what is not fixed.

    Attributes:
      is_new: Whether its kernel had to be compiled.
    """

    def __init__(self, works: Sequence[Work], device: jax.Device, sources: Sequence[Key | Inbox]):
        self.works = tuple(works)
        place = {key: k for k, key in enumerate(sources)}
        tables, all_numbers, kernels, taken, low, at = [], [], [], [], [], 0
        for work in works:
            numbers, table, words = work.numbers()
            tables.append(table)
            all_numbers.append(numbers)
            kernels.append((*work.variant, 0, at))
            taken += [place[key] for key in work.moving]
            low += [at + words[key] for key in work.moving]
            at += len(numbers)
        self._numbers = np.concatenate([*all_numbers, np.zeros(STAMP_SIZE, np.uint32)])
        self._parts = np.array([kernel[-1] for kernel in kernels])
        self._publishes = np.array([work.publishes for work in works])
        self._taken, self._words = np.array(taken, np.int64), np.array(low, np.int64)[:, None] + np.arange(2)
        self._tables = jax.device_put(tables, device)
        self._device = device
        self._state = jax.device_put(np.zeros(lw.STATE, np.int32), device)
        self.kernels = _jitted(tuple(kernels), device)
        compiled = (*kernels, *(len(table) for table in tables), device)
        self.is_new = compiled not in _COMPILED
        self._compile()
        _COMPILED.add(compiled)

    def _compile(self) -> None:
        """Launches it with nothing to do, so that the first update compiles nothing."""
        self._write_numbers()
        for word in (lw.N_TILES, lw.RESET, lw.N_HEADS, lw.N_TAILS, lw.N_TELLS):
            self._words_given[self._parts + word] = 0
        set_attempt(self._words_given, Attempt(0, 0, 0, 0), np.zeros_like(self._publishes), self._parts)
        self._launch().words()
        self._words_given[:] = self._numbers

    def _write_numbers(self) -> None:
        """Puts the numbers into new memory that launches fetch; to be given a NumPy array costs them 0.1 ms more."""
        numbers = self._numbers.view(np.int32).copy()  # which JAX may adopt
        self._given = jax.device_put(numbers, _on(self._device, "pinned_host"))
        self._given.block_until_ready()
        self._words_given = host_bytes(self._given.unsafe_buffer_pointer(), self._given.nbytes).view(np.uint32)

    def _launch(self) -> Report:
        stamp = next(_STAMPS)
        self._words_given[-STAMP_SIZE:] = stamp & 0xFFFFFFFF, stamp >> 32
        array, self._state = self.kernels(self._tables, self._given, self._state)
        self._report = Report(array, stamp)
        return self._report

    def start(self, attempt: Attempt, sources: np.ndarray) -> Report:
        """Launches the phases.

        Args:
          attempt: Of this update.
          sources: uint64 addresses of what is not fixed.

        Returns:
          Their reports.
        """
        # a launch that was given up may still be queued, and must not get these
        if not self._report.is_over():
            self._write_numbers()
        set_attempt(self._words_given, attempt, self._publishes, self._parts)
        self._words_given[self._words] = sources[self._taken].view(np.uint32).reshape(-1, 2)  # low, high
        return self._launch()


@functools.lru_cache(maxsize=64)
def _jitted(kernels: tuple[tuple[Any, ...], ...], device: jax.Device) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """Kernels by their arguments, in a row.

    They share a state, whose words are zero between them, and which keeps them in order. The reports go to the host on
    the same stream: fetching them afterwards takes a quarter of a millisecond.
    """
    made = [transfer.make_kernel(*kernel) for kernel in kernels]

    def launch(tables: list[jax.Array], given: jax.Array, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        numbers = jax.device_put(given, _on(device, "device"))
        ref = jax.new_ref(state)
        reports = [kernel(table, numbers, ref) for kernel, table in zip(made, tables, strict=True)]
        return jax.numpy.concatenate([*reports, numbers[-STAMP_SIZE:]]), jax.freeze(ref)

    places = _on(device, "pinned_host"), _on(device, "device")
    return jax.jit(launch, donate_argnums=2, out_shardings=places)


def _on(device: jax.Device, memory: str) -> SingleDeviceSharding:
    return SingleDeviceSharding(device, memory_kind=memory)


def size_class(n: int, least: int = 1) -> int:
    """The next power of two, or `least`: plans of one class share a compiled kernel."""
    return max(least, 1 << max(n - 1, 1).bit_length())
