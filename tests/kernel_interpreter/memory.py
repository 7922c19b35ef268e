"""Simulated memory that checks every access: bounds, alignment, reads of bytes never written, races.

Races are found as FastTrack does (Flanagan and Freund, PLDI 2009): a byte remembers its last write and its last reads
as (who, at which time of theirs), and an access is right only if the one who makes it knows of that time. What threads
know of each other is kept by `warp`, as clocks int32 [lanes, views, columns]. A column is a thread or an mbarrier. A
view says what is known for which purpose: `ORDERED` holds what happened before; `ASYNC[space]` the part of it that a
`fence.proxy.async` has made visible to bulk copies of that space (PTX ISA, memory consistency model, proxies).

An access is packed into an int64: site << 40 | column << 24 | time. The last column is the bulk copies under way, whose
end nobody has seen yet: nobody knows of them. Times start at 1; zero stands for what was there before the launch.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kernel_interpreter.lanes import Fault

TIME_BITS, COLUMN_BITS = 24, 16
TIME, COLUMN = (1 << TIME_BITS) - 1, (1 << COLUMN_BITS) - 1
SITE_SHIFT = TIME_BITS + COLUMN_BITS
GLOBAL, SHARED = "global", "shared"
ORDERED, ASYNC = 0, {SHARED: 1, GLOBAL: 2}
VIEWS = 3
BULK_ALIGNMENT = 16


class Site(NamedTuple):
    """An instruction of the kernel."""

    text: str
    where: str
    is_async: bool

    def __str__(self) -> str:
        return f"`{self.text}` ({self.where})"


class Access(NamedTuple):
    """Who accesses memory now.

    Attributes:
      site: Index of the instruction.
      clocks: int32 [lanes, views, columns] of the lanes that take part.
      columns: int64 [lanes], their own.
      stamps: int64 [lanes], packed without the site.
    """

    site: int
    clocks: np.ndarray
    columns: np.ndarray
    stamps: np.ndarray

    @property
    def packed(self) -> np.ndarray:
        return self.stamps | self.site << SITE_SHIFT


class Atomic:
    """A location that atomic instructions use: who did, and what an acquire of its value makes known."""

    def __init__(self, nbytes: int, columns: int):
        self.nbytes = nbytes
        self.released: np.ndarray | None = None  # int32 [views, columns]
        self.writes, self.reads = np.zeros(columns, np.int64), np.zeros(columns, np.int64)  # site << 40 | time


class Names:
    """For messages: the instructions of all programs, and what columns are called."""

    def __init__(self, columns: list[str]):
        self.columns = columns
        self.sites: list[Site] = []
        self.is_async = np.zeros(0, bool)  # by site

    def add(self, sites: list[Site]) -> None:
        self.sites += sites
        self.is_async = np.array([site.is_async for site in self.sites])

    def describe(self, packed: int) -> str:
        column = packed >> TIME_BITS & COLUMN
        return f"{self.sites[packed >> SITE_SHIFT]} by {self.columns[column]}"


class Allocation:
    """Bytes that lie together; accesses beyond them are faults.

    Args:
      name: For messages.
      data: Contents at the start, uint8 [n], or a number of bytes never written.
      read_only: Writes are faults, and reads need no bookkeeping.
      once: Writing a byte twice in a launch is a fault, even in order.
      system: Other devices use it too: only instructions of `.sys` scope synchronise through it.
    """

    def __init__(
        self, name: str, data: np.ndarray | int, *, space: str = GLOBAL,
        read_only: bool = False, once: bool = False, system: bool = False,
    ):  # fmt: skip
        self.name, self.space, self.read_only, self.once, self.system = name, space, read_only, once, system
        self.nbytes = data if isinstance(data, int) else data.nbytes
        padded = np.full(-(-max(self.nbytes, 1) // 16) * 16, 0xA5, np.uint8)
        if not isinstance(data, int):
            padded[: self.nbytes] = data.reshape(-1).view(np.uint8)
        self.views = {n: padded.view(f"u{n}") for n in (1, 2, 4, 8)}
        self.words = {n: memoryview(padded).cast("BHIQ"[n.bit_length() - 1]) for n in (1, 2, 4, 8)}
        self.written = np.full(self.nbytes, not isinstance(data, int))
        self.full = not isinstance(data, int)  # at the start
        self.base = 0

    @property
    def data(self) -> np.ndarray:
        """uint8 [nbytes], as it is now."""
        return self.views[1][: self.nbytes]

    def fill(self, data: np.ndarray) -> None:
        """Gives it its contents before the launch, where they depend on addresses."""
        self.data[:] = data.reshape(-1).view(np.uint8)
        self.written[:] = self.full = True

    def begin(self, base: int, names: Names) -> None:
        """Places it at an address for a launch, and forgets who accessed it."""
        self.base, self.names = base, names
        self.bulk_reads: dict[object, tuple[int, int, int]] = {}  # copy: first byte, end, packed
        if not self.read_only:
            self.last_write, self.last_read = np.zeros(self.nbytes, np.int64), np.zeros(self.nbytes, np.int64)
            self.slot = np.zeros(self.nbytes, np.int32)  # row of `readers`, 0 for none
            self.readers = np.zeros((8, len(names.columns)), np.int64)  # site << 40 | time
            self.free = list(range(1, 8))
            self.atomics: dict[int, Atomic] = {}
            self.is_atomic = np.zeros(self.nbytes, bool)

    def fault(self, what: str, access: Access, lane: int, offset: int, nbytes: int, other: int | None = None) -> Fault:
        packed = int(access.packed[lane])
        text = f"{what}: {nbytes} bytes at {self.name}+{offset}, {self.names.describe(packed)}"
        return Fault(text if other is None else f"{text}; and {self.names.describe(other)}")

    def offset(self, address: int, nbytes: int, alignment: int, access: Access, lane: int) -> int:
        """Checks one access and says where it lies."""
        offset = address - self.base
        if not 0 <= offset <= self.nbytes - nbytes:
            raise self.fault(f"out of bounds of {self.nbytes} bytes", access, lane, offset, nbytes)
        if address % alignment:
            raise self.fault(f"not aligned to {alignment}", access, lane, offset, nbytes)
        return offset

    def offsets(self, addresses: np.ndarray, nbytes: int, access: Access) -> np.ndarray:
        """Checks the accesses of several lanes and says where they lie, int64 [lanes]."""
        offsets = addresses.astype(np.int64) - self.base
        if offsets.min() < 0 or offsets.max() > self.nbytes - nbytes or (addresses % nbytes).any():
            for lane, address in enumerate(addresses.tolist()):
                self.offset(address, nbytes, nbytes, access, lane)
        return offsets

    # Ordinary accesses: `offsets` int64 [lanes], each of `nbytes`.

    def read(self, offsets: np.ndarray, nbytes: int, access: Access, constant: bool = False) -> None:
        """Checks and notes that lanes read; `constant`: what no one writes during the launch."""
        at = offsets[:, None] + np.arange(nbytes)
        if not self.read_only:
            if constant and self.last_write[at].any():
                raise self.fault("ld.global.nc of bytes written in this launch", access, 0, int(at[0, 0]), nbytes)
            self._after_writes(at, access)
            if self.atomics and self.is_atomic[at].any():
                self._after_atomics(at, access, of_reads=False)
            packed = access.packed[:, None]
            old = self.last_read[at]
            others = old != packed
            self.last_read[at] = packed
            slots = self.slot[at]
            if others.any() or slots.any() or (self.last_read[at] != packed).any():
                self._note_readers(at, old, slots, access)
        if not (self.full or self.written[at].all()):
            lane, k = np.argwhere(~self.written[at])[0]
            raise self.fault("reads bytes never written", access, lane, int(at[lane, k]), 1)

    def _note_readers(self, at: np.ndarray, old: np.ndarray, slots: np.ndarray, access: Access) -> None:
        """Keeps all readers of a byte where one reader did not know of another."""
        known = self._known(old, access, ORDERED)
        shared = (~known | (self.last_read[at] != access.packed[:, None])) & (slots == 0)
        if shared.any():
            bytes_ = np.unique(at[shared])
            while len(self.free) < len(bytes_):
                n = len(self.readers)
                self.readers = np.concatenate([self.readers, np.zeros_like(self.readers)])
                self.free += range(n, 2 * n)
            taken = self.free[-len(bytes_) :]
            del self.free[-len(bytes_) :]
            self.readers[taken] = 0
            self.slot[bytes_] = taken
            lanes, k = np.nonzero(shared)
            packed = old[lanes, k]
            entry = packed >> SITE_SHIFT << SITE_SHIFT | packed & TIME
            self.readers[self.slot[at[lanes, k]], packed >> TIME_BITS & COLUMN] = entry
        slots = self.slot[at]
        lanes, k = np.nonzero(slots)
        entry = access.site << SITE_SHIFT | access.stamps & TIME
        self.readers[slots[lanes, k], access.columns[lanes]] = entry[lanes]

    def write(self, offsets: np.ndarray, nbytes: int, access: Access) -> None:
        """Checks and notes that lanes write."""
        at = offsets[:, None] + np.arange(nbytes)
        if self.read_only:
            raise self.fault("writes an operand that is only read", access, 0, int(at[0, 0]), nbytes)
        self._after_writes(at, access)
        self._after_reads(at, access)
        self._not_again(at, access)
        if self.atomics and self.is_atomic[at].any():
            self._after_atomics(at, access, of_reads=True)
            for offset in {int(x) for x in at[self.is_atomic[at]]} & set(self.atomics):
                self.atomics[offset].released = None
        packed = access.packed[:, None]
        self.last_write[at] = packed
        twice = self.last_write[at] != packed
        if twice.any():
            lane, k = np.argwhere(twice)[0]
            byte = int(at[lane, k])
            raise self.fault("race of two lanes", access, lane, byte, nbytes, int(self.last_write[byte]))
        self.written[at] = True

    def _known(self, packed: np.ndarray, access: Access, view: int) -> np.ndarray:
        """Which earlier accesses [lanes, n] the lanes know of."""
        lanes = np.arange(len(packed))[:, None]
        return access.clocks[lanes, view, packed >> TIME_BITS & COLUMN] >= packed & TIME

    def _after_writes(self, at: np.ndarray, access: Access) -> None:
        before = self.last_write[at]
        if not before.any():
            return
        known = self._known(before, access, ORDERED)
        if not known.all():
            lane, k = np.argwhere(~known)[0]
            raise self.fault("race", access, lane, int(at[lane, k]), at.shape[1], int(before[lane, k]))

    def _after_reads(self, at: np.ndarray, access: Access) -> None:
        """Before a write, which then stands for the reads."""
        before = self.last_read[at]
        if before.any():
            known = self._known(before, access, ORDERED)
            if not known.all():
                lane, k = np.argwhere(~known)[0]
                raise self.fault("race", access, lane, int(at[lane, k]), at.shape[1], int(before[lane, k]))
            self.last_read[at] = 0
        slots = self.slot[at]
        if slots.any():
            for lane, k in np.argwhere(slots).tolist():
                late = (self.readers[slots[lane, k]] & TIME) > access.clocks[lane, ORDERED]
                self._refuse(late, self.readers[slots[lane, k]], access, lane, int(at[lane, k]), at.shape[1])
            self.free += set(slots[slots > 0].tolist())
            self.slot[at] = 0
        for first, end, packed in self.bulk_reads.values():
            hit = (at >= first) & (at < end)
            if hit.any():
                lanes = np.nonzero(hit.any(1))[0]
                late = access.clocks[lanes, ORDERED, packed >> TIME_BITS & COLUMN] < packed & TIME
                if late.any():
                    lane = lanes[late][0]
                    raise self.fault("race", access, lane, int(at[lane, 0]), at.shape[1], packed)

    def _not_again(self, at: np.ndarray, access: Access) -> None:
        if self.once and self.last_write[at].any():
            lane, k = np.argwhere(self.last_write[at])[0]
            other = int(self.last_write[at[lane, k]])
            raise self.fault("written twice", access, lane, int(at[lane, k]), at.shape[1], other)

    def _refuse(self, late: np.ndarray, row: np.ndarray, access: Access, lane: int, offset: int, nbytes: int) -> None:
        """Raises if some access of a row, site << 40 | time by column, is late."""
        if late.any():
            column = int(late.argmax())
            raise self.fault("race", access, lane, offset, nbytes, int(row[column]) | column << TIME_BITS)

    def _after_atomics(self, at: np.ndarray, access: Access, *, of_reads: bool) -> None:
        for offset, atomic in self.atomics.items():
            for lane in np.nonzero(((at >= offset) & (at < offset + atomic.nbytes)).any(1))[0]:
                for row in (atomic.writes, atomic.reads)[: 2 if of_reads else 1]:
                    late = (row & TIME) > access.clocks[lane, ORDERED]
                    self._refuse(late, row, access, lane, int(at[lane, 0]), at.shape[1])

    def atomic(self, offset: int, nbytes: int, access: Access, *, reads: bool, writes: bool) -> Atomic:
        """Checks and notes that lanes use a location atomically; only one at a time writes."""
        if self.read_only and writes:
            raise self.fault("writes an operand that is only read", access, 0, offset, nbytes)
        if reads and not (self.full or self.written[offset : offset + nbytes].all()):
            raise self.fault("reads bytes never written", access, 0, offset, nbytes)
        if self.read_only:
            return Atomic(nbytes, 1)
        at = np.broadcast_to(np.arange(offset, offset + nbytes), (len(access.stamps), nbytes))
        self._after_writes(at, access)
        if writes:
            self._after_reads(at, access)
            self.written[offset : offset + nbytes] = True
        found = self.atomics.get(offset)
        if found is None:
            found = self.atomics[offset] = Atomic(nbytes, len(self.names.columns))
            self.is_atomic[offset : offset + nbytes] = True
        if found.nbytes != nbytes:
            raise self.fault(f"atomic of another size than before ({found.nbytes} bytes)", access, 0, offset, nbytes)
        row = found.writes if writes else found.reads
        row[access.columns] = access.site << SITE_SHIFT | access.stamps & TIME
        return found

    # Bulk copies: bytes [first, end) of one lane. They are noted when issued, under `packed`, whose column is that of
    # copies under way, and noted anew once someone sees their end.

    def begin_bulk_read(self, copy: object, first: int, end: int, packed: int, access: Access) -> None:
        if self.read_only:
            return
        self._before_bulk(first, end, access)
        self.bulk_reads[copy] = (first, end, packed)

    def end_bulk_read(self, copy: object, packed: int) -> None:
        """The end of a copy's reads was seen by the column that `packed` names."""
        if copy in self.bulk_reads:
            first, end, _ = self.bulk_reads[copy]
            self.bulk_reads[copy] = (first, end, packed)

    def forget_bulk_reads(self, known: np.ndarray) -> None:
        """Drops those that all who can write know of; `known` int32 [views, columns]."""
        for copy, (_, _, packed) in list(self.bulk_reads.items()):
            if known[ORDERED, packed >> TIME_BITS & COLUMN] >= packed & TIME:
                del self.bulk_reads[copy]

    def begin_bulk_write(self, first: int, end: int, packed: int, access: Access) -> None:
        if self.read_only:
            raise self.fault("writes an operand that is only read", access, 0, first, end - first)
        self._before_bulk(first, end, access)
        at = np.arange(first, end)[None]
        self._after_reads(at, access)
        self._not_again(at, access)
        if self.atomics and self.is_atomic[first:end].any():
            self._after_atomics(at, access, of_reads=True)
        for copy, (lo, hi, _) in list(self.bulk_reads.items()):
            if first <= lo and hi <= end:
                del self.bulk_reads[copy]
        self.last_write[first:end] = packed

    def end_bulk_write(self, first: int, end: int, before: int, packed: int) -> None:
        part = self.last_write[first:end]
        part[part == before] = packed

    def _before_bulk(self, first: int, end: int, access: Access) -> None:
        """Earlier writes must be known, and ordinary ones visible to the asynchronous proxy."""
        before = np.unique(self.last_write[first:end])[None]
        known = self._known(before, access, ORDERED)
        if not known.all():
            raise self.fault("race", access, 0, first, end - first, int(before[~known][0]))
        seen = self._known(before, access, ASYNC[self.space]) | self.names.is_async[before >> SITE_SHIFT]
        if not seen.all():
            what = "race for want of fence.proxy.async"
            raise self.fault(what, access, 0, first, end - first, int(before[~seen][0]))
        if self.atomics and self.is_atomic[first:end].any():
            self._after_atomics(np.arange(first, end)[None], access, of_reads=False)


class Space:
    """Allocations far apart, found by the high bits of an address."""

    def __init__(self, name: str, shift: int):
        self.name, self.shift = name, shift
        self.found: dict[int, Allocation] = {}

    def place(self, allocation: Allocation, names: Names, jitter: int = 0) -> int:
        """Gives an allocation its address, in the middle of a range of its own."""
        number = len(self.found) + 1
        base = (number << self.shift) + (1 << (self.shift - 1)) + jitter * BULK_ALIGNMENT
        self.found[number] = allocation
        allocation.begin(base, names)
        return base

    def allocation(self, address: int, access: Access, lane: int) -> Allocation:
        found = self.found.get(address >> self.shift)
        if found is None:
            some = next(iter(self.found.values()))
            raise Fault(
                f"address {address:#x} lies in no {self.name} allocation: "
                f"{some.names.describe(int(access.packed[lane]))}"
            )
        return found
