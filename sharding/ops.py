"""What op tables are made of: records with the names of what they read, write, wait for and raise."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Hashable

import numpy as np

from shardfly_jax.sharding.moves import Key


class Phase(enum.Enum):
    """A phase with records."""

    SEND = "send"
    FINISH = "finish"


@dataclasses.dataclass(frozen=True, slots=True)
class Inbox:
    """The inbox of a device, as a buffer that a record can name."""

    device: int


@dataclasses.dataclass(frozen=True, slots=True)
class Counter:
    """A counter in the inbox of a device: how many tiles of what it names are done."""

    device: int
    what: Hashable


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """A record of a device and phase.

    Attributes:
      at: Device number.
      phase: In which it is done.
      record: Its buffers and counters are not filled in yet.
      ranks: That it reads from and writes to; a fill reads from -1.
      source, target: Buffers; None if it reads or writes no elements.
      side: Where its slots or scales are.
      wait: What must be done before it.
      signal, side_signal: What its elements, and its scales, are a part of.
    """

    at: int
    phase: Phase
    record: np.ndarray
    ranks: tuple[int, int]
    source: Key | Inbox | None = None
    target: Key | None = None
    side: Key | Inbox | None = None
    wait: Counter | None = None
    signal: Counter | None = None
    side_signal: Counter | None = None


class InboxWords:
    """Numbers the words of inboxes behind their flags: counters, and slots for the maxima of blocks.

    Args:
      devices: How many.
      first: Word of an inbox where they begin.
    """

    def __init__(self, devices: int, first: int):
        self._first = first
        self._numbers: list[dict[Hashable, int]] = [{} for _ in range(devices)]
        self.counts = [0] * devices

    def counter(self, counter: Counter) -> int:
        """Number of a counter."""
        return self._number(counter.device, counter, 1)

    def slots(self, device: int, what: Hashable, size: int) -> int:
        """Bytes from the start of an inbox to the first of some slots."""
        return 4 * (self._first + self._number(device, ("slots", what), size))

    def _number(self, device: int, what: Hashable, size: int) -> int:
        numbers = self._numbers[device]
        if what not in numbers:
            numbers[what] = self.counts[device]
            self.counts[device] += size
        return numbers[what]
