"""Launches of the transfer kernel: what one phase on one device is given, and what its report means."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from shardfly_jax.pallas_kernels import transfer
from shardfly_jax.sharding import records
from shardfly_jax.sharding.formats import Conversion
from shardfly_jax.sharding.moves import Key
from shardfly_jax.sharding.optable import OpTable, State

BLOCKS_PER_SM = 4
FREE_SMS = 16
"""Multiprocessors that a launch which waits for other devices leaves to others."""
ROOM_OF_ONE = 128 << 10
"""Bytes of shared memory that make sure that only one block fits on a multiprocessor."""


class Wait(NamedTuple):
    """A flag of another device.

    Attributes:
      word: Of the waiting device's state.
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


class Launch:
    """One phase on one device, launched once per update.

    Args:
      name: Of the phase and its ranks, for messages.
      device: Where it runs.
      table: Its records, if it has any.
      conversions: What they name.
      n_devices: Of the plan: as many flags it may wait for or set.
      state: Of the device; changed in place.
      counters: First counter of a state.
      fixed: Addresses of states and of the buffers that never move.
      blocks, room: Of the kernel, see `transfer.make_kernel`.
      heads, tails: Flags it waits for before its first tile, and before it ends.
      tells: Device numbers and words of their states that it sets.
      reset: How many counters it zeroes.
      publishes: Whether it sets the version.
    """

    def __init__(
        self,
        name: str,
        device: jax.Device,
        table: OpTable | None,
        conversions: tuple[Conversion, ...],
        n_devices: int,
        state: jax.Ref,
        counters: int,
        fixed: Mapping[Key | State, int],
        *,
        blocks: int = 1,
        room: int = 0,
        heads: Sequence[Wait] = (),
        tails: Sequence[Wait] = (),
        tells: Sequence[tuple[int, int]] = (),
        reset: int = 0,
        publishes: bool = False,
    ):
        self.name, self.device, self.table, self.state = name, device, table, state
        self.heads, self.tails, self.publishes = heads, tails, publishes
        buffers = list(dict.fromkeys([*(table.buffers if table else ()), *(State(number) for number, _ in tells)]))
        places = [index for index, key in enumerate(buffers) if key not in fixed]
        self.moving = [key for key in buffers if key not in fixed and not isinstance(key, State)]
        self._places, self._taken = np.array(places, np.int64), np.zeros(0, np.int64)
        flags, room_for = size_class(n_devices), size_class(len(buffers))
        tails_at, tells_at, self._bases_at, size = transfer.launch_size(flags, room_for)
        self._bases = np.array([fixed.get(key, 0) for key in buffers] + [0] * (room_for - len(buffers)), np.uint64)
        self._numbers = np.zeros(size, np.uint32)
        self._numbers[transfer.COUNTERS], self._numbers[transfer.RESET] = counters, reset
        for count, values in ((transfer.N_HEADS, heads), (transfer.N_TAILS, tails), (transfer.N_TELLS, tells)):
            self._numbers[count] = len(values)
        self._numbers[transfer.LISTS : transfer.LISTS + len(heads)] = [wait.word for wait in heads]
        self._numbers[tails_at : tails_at + len(tails)] = [wait.word for wait in tails]
        told = [number for device_, word in tells for number in (buffers.index(State(device_)), word)]
        self._numbers[tells_at : tells_at + len(told)] = told
        n_records = len(table.words) if table else 0
        words = np.zeros((size_class(n_records), records.WORDS), np.int32)
        if table:
            words[:n_records] = table.words
        self._table = jax.device_put(words.reshape(-1), device)
        self._kernel = _jitted(conversions if table else (), blocks, flags, room)
        self._compile()

    def _compile(self) -> None:
        """Launches it with nothing to do, so that the first update compiles nothing."""
        numbers = np.zeros_like(self._numbers)
        numbers[transfer.NEW_VERSION] = 0xFFFFFFFF
        self._launch(numbers).block_until_ready()

    def _launch(self, numbers: np.ndarray) -> jax.Array:
        # What jax.jit does for a Ref among its arguments, but on its fast path: a tenth of the host time.
        state = self.state._refs._buf
        report, new = self._kernel(self._table, numbers.view(np.int32), state)
        state._replace_with(new)
        return report

    def take_from(self, keys: Sequence[Key]) -> None:
        """Says in which order `start` will get the addresses of buffers that are not fixed."""
        number = {key: k for k, key in enumerate(keys)}
        self._taken = np.array([number[key] for key in self.moving], np.int64)

    def start(self, attempt: Attempt, sources: np.ndarray) -> jax.Array:
        """Launches the phase.

        Args:
          attempt: Of this update.
          sources: uint64 addresses of the buffers that are not fixed, as `take_from` said.

        Returns:
          Its report: int32 [2], see `fault`.
        """
        self._bases[self._places] = sources[self._taken]
        numbers = self._numbers.copy()
        numbers[transfer.N_TILES] = self.table.n_tiles if self.table else 0
        numbers[transfer.DEADLINE_MS], numbers[transfer.SESSION] = attempt.deadline_ms, attempt.session
        numbers[transfer.EPOCH] = attempt.epoch & 0xFFFFFFFF
        numbers[transfer.NEW_VERSION] = attempt.version & 0xFFFFFFFF if self.publishes else 0xFFFFFFFF
        numbers[self._bases_at :] = self._bases.view(np.uint32)
        return self._launch(numbers)

    def fault(self, report: np.ndarray) -> str | None:
        """What a report says went wrong: who waited for whom in which phase."""
        error = int(report[0]) & 0xFFFFFFFF
        kind, which = error >> transfer.ERROR_SHIFT, error & ((1 << transfer.ERROR_SHIFT) - 1)
        if not error:
            return None
        if kind == transfer.LATE:
            return f"{self.name} came after a later attempt had begun, and wrote nothing"
        if kind == transfer.COUNTER:
            assert self.table is not None
            at, to = self.table.moves[which]
            return f"{self.name} waited for what rank {at} was to forward to rank {to}"
        return f"{self.name} waited for {(self.heads if kind == transfer.HEAD else self.tails)[which].who}"


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
