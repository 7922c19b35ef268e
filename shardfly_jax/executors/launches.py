"""Launches of the transfer kernel: what one phase on one device is given, and what its report means."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import jax
import numpy as np

from shardfly_jax.pallas_kernels import transfer
from shardfly_jax.sharding import records
from shardfly_jax.sharding.formats import Conversion
from shardfly_jax.sharding.moves import Key
from shardfly_jax.sharding.optable import Inbox, OpTables, Phase

BLOCKS_PER_SM = 4
FREE_SMS = 16
"""Multiprocessors that a launch which waits for other devices leaves to others."""
ROOM_OF_ONE = 128 << 10
"""Bytes of shared memory that make sure that only one block fits on a multiprocessor."""


class Wait(NamedTuple):
    """A flag of another device.

    Attributes:
      word: Of the waiting device's inbox.
      who: What should have raised it, for messages.
    """

    word: int
    who: str


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
      fixed: Addresses of inboxes and of the buffers that never move.
      blocks, room: Of the kernel, see `transfer.make_kernel`.
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
        room: int = 0,
        heads: Sequence[Wait] = (),
        tails: Sequence[Wait] = (),
        tells: Sequence[tuple[int, int]] = (),
        reset: int = 0,
        publishes: bool = False,
    ):
        self.name, self.heads, self.tails, self.publishes = name, heads, tails, publishes
        self.table = table = tables.tables.get((device, phase)) if phase else None
        self.conversions, self.blocks, self.room = conversions if table else (), blocks, room
        self.flags = size_class(2 * len(tables.devices))  # a tail for each device's send and finish
        self._tables, self._device, self._reset, self._tells, self._fixed = tables, device, reset, tells, fixed
        self.moving = [key for key in table.buffers if key not in fixed and not isinstance(key, Inbox)] if table else []

    def numbers(
        self, operands: Mapping[Key, int] = MappingProxyType({}), n_operands: int = 0
    ) -> tuple[np.ndarray, np.ndarray, dict[Key | Inbox, int]]:
        """The numbers of a launch but for its attempt, and the records that go with them.

        Args:
          operands: Which of the launch's operands holds a buffer.
          n_operands: How many there are; they take the first places among the addresses.

        Returns:
          uint32 numbers with the fixed addresses filled in, int32 [records * WORDS], and the word of each address.
        """
        inboxes = [Inbox(number) for number in (self._device, *(number for number, _ in self._tells))]
        named = [key for key in (*(self.table.buffers if self.table else ()), *inboxes) if key not in operands]
        places = dict(operands) | {key: place for place, key in enumerate(dict.fromkeys(named), n_operands)}
        tails_at, tells_at, bases_at, size = transfer.launch_size(self.flags, size_class(n_operands + len(named)))
        numbers = np.zeros(size, np.uint32)
        numbers[transfer.N_TILES] = self.table.n_tiles if self.table else 0
        numbers[transfer.INBOX], numbers[transfer.COUNTERS] = places[Inbox(self._device)], self._tables.counters
        numbers[transfer.RESET], numbers[transfer.SEVERAL] = self._reset, len(self._tables.devices) > 1
        told = [number for device, word in self._tells for number in (places[Inbox(device)], word)]
        for count, at, values, per in (
            (transfer.N_HEADS, transfer.LISTS, [wait.word for wait in self.heads], 1),
            (transfer.N_TAILS, tails_at, [wait.word for wait in self.tails], 1),
            (transfer.N_TELLS, tells_at, told, 2),
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
        words = np.zeros((size_class(n_records), records.WORDS), np.int32)
        if self.table:
            words[:n_records] = self.table.words
            place = np.array([*(places[key] for key in self.table.buffers), -1], np.int32)  # -1 names nothing
            for word in records.BUFFERS:
                words[:n_records, word] = place[self.table.words[:, word]]
        return words.reshape(-1)

    def fault(self, error: int) -> str | None:
        """What a report's error says went wrong: who waited for whom in which phase."""
        kind, which = error >> transfer.ERROR_SHIFT, error & ((1 << transfer.ERROR_SHIFT) - 1)
        if not error:
            return None
        if kind == transfer.LATE:
            return f"{self.name} came after a later attempt had begun, and wrote nothing"
        if kind == transfer.COUNTER:
            assert self.table is not None
            at, to = self.table.moves[which]
            inbox = self.table.buffers[self.table.words[which, records.WAIT_INBOX]]
            assert isinstance(inbox, Inbox)
            writers = self._tables.ranks_that_raise(inbox.device, int(self.table.words[which, records.WAIT]))
            who = " and ".join(f"rank {rank}" for rank in writers)
            source = int(self.table.words[which, records.SOURCE])
            if self.table.words[which, records.ROLE] or (source >= 0 and isinstance(self.table.buffers[source], Inbox)):
                return f"{self.name} waited for the maxima of blocks from {who}"
            return f"{self.name} waited for what {who} sends to rank {at}, which forwards it to rank {to}"
        return f"{self.name} waited for {(self.heads if kind == transfer.HEAD else self.tails)[which].who}"

    def refused(self, word: int) -> Key | None:
        """Which target a report's second word says would be made of values that are not finite."""
        if not word:
            return None
        assert self.table is not None
        key = self.table.buffers[self.table.words[word - 1, records.TARGET]]
        assert not isinstance(key, Inbox)
        return key


def set_attempt(numbers: np.ndarray, attempt: Attempt, publishes: bool) -> None:
    """Fills in what changes from update to update.

    Args:
      numbers: uint32 [..., words] of launches.
      attempt: Of the update.
      publishes: Whether the version is set.
    """
    numbers[..., transfer.DEADLINE_MS], numbers[..., transfer.SESSION] = attempt.deadline_ms, attempt.session
    numbers[..., transfer.EPOCH] = attempt.epoch & 0xFFFFFFFF
    numbers[..., transfer.NEW_VERSION] = attempt.version & 0xFFFFFFFF if publishes else 0xFFFFFFFF


class Launch:
    """One phase on one device, launched once per update by the host.

    Args:
      work: What it does.
      device: Where.
      sources: In which order `start` is given the addresses of buffers that are not fixed.
    """

    def __init__(self, work: Work, device: jax.Device, sources: Sequence[Key]):
        self.work = work
        self._numbers, table, words = work.numbers()
        place = {key: k for k, key in enumerate(sources)}
        self._taken = np.array([place[key] for key in work.moving], np.int64)
        self._low = np.array([words[key] for key in work.moving], np.int64)
        self._table = jax.device_put(table, device)
        self._state = jax.device_put(np.zeros(transfer.STATE, np.int32), device)
        self._kernel = _jitted(work.conversions, work.blocks, work.flags, work.room)
        self._compile()

    def _compile(self) -> None:
        """Launches it with nothing to do, so that the first update compiles nothing."""
        numbers = self._numbers.copy()
        numbers[[transfer.N_TILES, transfer.RESET, transfer.N_HEADS, transfer.N_TAILS, transfer.N_TELLS]] = 0
        set_attempt(numbers, Attempt(0, 0, 0, 0), publishes=False)
        self._launch(numbers).block_until_ready()

    def _launch(self, numbers: np.ndarray) -> jax.Array:
        report, self._state = self._kernel(self._table, numbers.view(np.int32), self._state)
        return report

    def start(self, attempt: Attempt, sources: np.ndarray) -> jax.Array:
        """Launches the phase.

        Args:
          attempt: Of this update.
          sources: uint64 addresses of the buffers that are not fixed.

        Returns:
          Its report: int32 [2], see `transfer.make_kernel`.
        """
        numbers = self._numbers.copy()
        set_attempt(numbers, attempt, self.work.publishes)
        taken = sources[self._taken]
        numbers[self._low], numbers[self._low + 1] = taken & 0xFFFFFFFF, taken >> 32
        return self._launch(numbers)


@functools.lru_cache(maxsize=64)
def _jitted(
    conversions: tuple[Conversion, ...], blocks: int, flags: int, room: int
) -> Callable[[jax.Array, np.ndarray, jax.Array], tuple[jax.Array, jax.Array]]:
    kernel = transfer.make_kernel(conversions, blocks, flags, room)

    def launch(table: jax.Array, numbers: jax.Array, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        ref = jax.new_ref(state)
        return kernel(table, numbers, ref), jax.freeze(ref)

    return jax.jit(launch, donate_argnums=2)


def size_class(n: int) -> int:
    """The next power of two: plans of one class share a compiled kernel."""
    return 1 << max(n - 1, 1).bit_length()
