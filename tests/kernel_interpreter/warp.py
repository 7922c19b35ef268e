"""A block's threads: what they know of each other, and the instructions that are more than arithmetic.

Clocks: a column stands for each thread, counting its releases, and for each mbarrier, counting its phases. A thread's
row says how far it knows each column; all that orders threads is a maximum of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from kernel_interpreter.bulk import Copy, Mbarrier
from kernel_interpreter.lanes import ALL, LANES, Fault
from kernel_interpreter.memory import (
    ASYNC,
    BULK_ALIGNMENT,
    GLOBAL,
    ORDERED,
    SHARED,
    SITE_SHIFT,
    TIME,
    TIME_BITS,
    VIEWS,
    Access,
    Allocation,
    Space,
)

if TYPE_CHECKING:
    from kernel_interpreter.machine import Machine

THREADS = 4 * LANES
"""Of a warpgroup."""
MBARRIERS = 8
"""At most so many per block."""


def _at(value: object, part: slice | np.ndarray) -> int:
    """A value in the first of some lanes."""
    return value if type(value) is int else int(value[part][0])


class Block:
    """A block, its shared memory and barriers.

    Args:
      machine: What it runs on.
      number: Among the blocks of all launches.
      index, of: In its launch.
      first, threads: Columns of its threads.
      scratch: Bytes of each shared allocation, by name.
    """

    def __init__(
        self, machine: Machine, number: int, index: int, of: int, first: int, threads: int, scratch: dict[str, int]
    ):
        self.machine, self.number, self.index, self.of = machine, number, index, of
        self.first, self.threads = first, threads
        self.clocks = np.zeros((threads, VIEWS, machine.n_columns), np.int32)
        self.clocks[np.arange(threads), ORDERED, first + np.arange(threads)] = 1
        self.shared = Space(SHARED, 24)
        self.scratch = [self.shared.place(Allocation(f"shared {name} of block {number}", nbytes, space=SHARED),
                                          machine.names) for name, nbytes in scratch.items()]  # fmt: skip
        self.mbarriers: dict[int, Mbarrier] = {}
        self.mbarrier_column = machine.n_columns - 1 - MBARRIERS * (machine.n_blocks - number)
        self.waiting: dict[int, list[Warp]] = {}  # at bar.sync, by number of the barrier
        self.passed: dict[int, int] = {}
        self.running = threads // LANES

    def end(self) -> None:
        """The last warp ended: its shared memory belongs to others now."""
        for copy in self.machine.all_copies:
            if 0 <= copy.access.columns[0] - self.first < self.threads and not copy.seen:
                name = self.machine.names.describe(copy.packed & ~0xFFFFFFFFFF | int(copy.access.stamps[0]))
                raise Fault(f"block {self.number} ends while a bulk copy uses its shared memory: {name}")


class Warp:
    """A warp: what its lanes know, and the instructions that are more than arithmetic."""

    def __init__(self, block: Block, index: int):
        self.block, self.index, self.machine = block, index, block.machine
        self.threads = np.arange(index * LANES, (index + 1) * LANES, dtype=np.uint64)
        self.columns = block.first + self.threads.astype(np.int64)
        self.clocks = block.clocks[index * LANES : (index + 1) * LANES]
        self.spaces = {GLOBAL: self.machine.memory, SHARED: block.shared}
        # By whether it concerns allocations that other devices use too:
        self.fenced: dict[bool, np.ndarray] = {}  # what relaxed writes hand on, because of the last fence
        self.fetched: dict[bool, np.ndarray] = {}  # what a fence would make known, because of relaxed reads before
        self.since, self.points = -1, 0  # points since the machine's change of that number
        self.open: list[list[Copy]] = [[] for _ in range(LANES)]  # bulk stores not committed, by lane
        self.groups: list[list[list[Copy]]] = [[] for _ in range(LANES)]
        self.tick()

    def tick(self) -> None:
        """A new time for all lanes, after what they did was handed on."""
        self.clocks[np.arange(LANES), ORDERED, self.columns] += 1
        self.stamps = self.columns << TIME_BITS | self.clocks[np.arange(LANES), ORDERED, self.columns]

    def access(self, site: int, mask: np.ndarray) -> Access:
        """The lanes of a mask, for checks."""
        if mask is ALL:
            return Access(site, self.clocks, self.columns, self.stamps)
        return Access(site, self.clocks[mask], self.columns[mask], self.stamps[mask])

    def _lanes(self, site: int, mask: np.ndarray) -> Iterator[tuple[slice, Access]]:
        for lane in np.nonzero(mask)[0].tolist():
            part = slice(lane, lane + 1)
            yield part, Access(site, self.clocks[part], self.columns[part], self.stamps[part])

    def clock(self) -> int:
        """Nanoseconds."""
        return self.machine.now

    # Ordinary loads and stores of `count` elements of `size` bytes.

    def load(
        self, site: int, mask: np.ndarray, space: str, address: object, size: int, count: int, constant: bool = False
    ) -> list[object]:
        """Values, zero-extended; `constant` is for `ld.global.nc`, which must not see bytes written in the launch."""
        total = size * count
        if type(address) is int:
            access = self.access(site, mask)
            allocation = self.spaces[space].allocation(address, access, 0)
            offset = allocation.offset(address, total, total, access, 0)
            if not (allocation.read_only and allocation.full):
                allocation.read(np.full(len(access.stamps), offset), total, access, constant)
            words = allocation.words[size]
            return [words[offset // size + k] for k in range(count)]
        out = np.zeros((count, LANES), np.uint64 if size == 8 else np.uint32)
        for allocation, part in self._allocations(site, mask, space, address):
            access = self.access(site, part)
            offsets = allocation.offsets(address[part], total, access)
            allocation.read(offsets, total, access, constant)
            out[:, part] = allocation.views[size][(offsets // size)[:, None] + np.arange(count)].T
        return list(out)

    def store(self, site: int, mask: np.ndarray, space: str, address: object, size: int, values: list[object]) -> None:
        total = size * len(values)
        if type(address) is int:
            address = np.full(LANES, address, np.uint64)
        for allocation, part in self._allocations(site, mask, space, address):
            access = self.access(site, part)
            offsets = allocation.offsets(address[part], total, access)
            allocation.write(offsets, total, access)
            view = allocation.views[size]
            for k, value in enumerate(values):
                value = value & ((1 << 8 * size) - 1)
                view[offsets // size + k] = value if type(value) is int else value[part]
        self.machine.progress()

    def _allocations(
        self, site: int, mask: np.ndarray, space: str, address: np.ndarray
    ) -> list[tuple[Allocation, np.ndarray]]:
        """The allocations that lanes use, each with its lanes."""
        memory = self.spaces[space]
        numbers = address >> memory.shift
        first = int(numbers[mask.argmax()])
        others = mask & (numbers != first)
        access = self.access(site, mask)
        if not others.any():
            return [(memory.allocation(first << memory.shift, access, 0), mask)]
        return [
            (memory.allocation(int(number) << memory.shift, access, 0), mask & (numbers == number))
            for number in np.unique(numbers[mask])
        ]

    # Atomics and fences

    def atomic(
        self, site: int, mask: np.ndarray, space: str, address: object, size: int, order: str, scope: str,
        change: Callable[..., int] | None, *operands: object, reads: bool = True, polls: bool = True,
    ) -> object:  # fmt: skip
        """A load (`change` is None), a store (`reads` is False) or a read-modify-write, lane by lane; the old value."""
        if not polls:
            self.machine.progress()
        old = np.zeros(LANES, np.uint64 if size == 8 else np.uint32)
        alike = type(address) is int and change is None
        parts = [(mask, self.access(site, mask))] if alike else list(self._lanes(site, mask))
        for part, access in parts:
            where = _at(address, part)
            allocation = self.spaces[space].allocation(where, access, 0)
            offset = allocation.offset(where, size, size, access, 0)
            system = allocation.system
            if system and scope != "sys":
                raise allocation.fault("needs .sys scope, as other devices use it", access, 0, offset, size)
            found = allocation.atomic(offset, size, access, reads=reads, writes=change is not None)
            words = allocation.words[size]
            value = words[offset // size]
            if reads and found.released is not None:
                if order in ("acquire", "acq_rel"):
                    self.clocks[part] = np.maximum(self.clocks[part], found.released)
                else:
                    known = self.fetched.setdefault(system, np.zeros_like(self.clocks))
                    known[part] = np.maximum(known[part], found.released)
            if alike:
                return value
            old[part] = value
            if change is not None:
                source = self.clocks if order in ("release", "acq_rel") else self.fenced.get(system)
                gives = None if source is None else source[part][0]
                if not reads or found.released is None:
                    found.released = None if gives is None else gives.copy()
                elif gives is not None:
                    np.maximum(found.released, gives, out=found.released)
                new = change(value, *(_at(x, part) for x in operands)) & ((1 << 8 * size) - 1)
                if new != value:
                    words[offset // size] = new
                    self.machine.progress()
        if change is not None:
            self.tick()
        return old

    def fence(self, mask: np.ndarray, scope: str) -> None:
        """`fence.acq_rel` or stronger."""
        for system in (False, True) if scope == "sys" else (False,):
            if system in self.fetched:
                self.clocks[mask] = np.maximum(self.clocks[mask], self.fetched[system][mask])
        for system in (False, True) if scope == "sys" else (False,):
            known = self.fenced.setdefault(system, np.zeros_like(self.clocks))
            known[mask] = self.clocks[mask]
        self.tick()

    def fence_async(self, mask: np.ndarray, spaces: tuple[str, ...]) -> None:
        """`fence.proxy.async`: what the lanes know of becomes visible to bulk copies."""
        for space in spaces:
            view = ASYNC[space]
            self.clocks[mask, view] = np.maximum(self.clocks[mask, view], self.clocks[mask, ORDERED])
        self._show_mbarriers(mask)
        self.tick()

    def fence_mbarriers(self, mask: np.ndarray) -> None:
        """`fence.mbarrier_init`."""
        self._show_mbarriers(mask)

    def _show_mbarriers(self, mask: np.ndarray) -> None:
        for barrier in self.block.mbarriers.values():
            barrier.visible |= bool((self.columns[mask] == barrier.initialised.columns[0]).any())

    # Barriers of threads

    def sync_warp(self, site: int, mask: np.ndarray, members: object) -> None:
        who = _at(members, mask)
        wanted = np.array([bool(who >> k & 1) for k in range(LANES)])
        if (wanted & ~mask).any():
            raise self._misused(site, mask, "is not reached by all of its lanes")
        self.clocks[wanted] = self.clocks[wanted].max(0)
        self.tick()

    def max_of_lanes(self, site: int, mask: np.ndarray, value: object, members: object) -> int:
        """`redux.sync.max.u32`; it orders nothing."""
        who = _at(members, mask)
        wanted = np.array([bool(who >> k & 1) for k in range(LANES)])
        if not wanted[mask].all() or (wanted & ~mask).any():
            raise self._misused(site, mask, "is not reached by just its lanes")
        return value if type(value) is int else int(value[wanted].max())

    def sync_block(self, site: int, mask: np.ndarray, number: object, threads: object) -> Iterator[None]:
        if mask is not ALL:
            raise self._misused(site, mask, "is reached by some lanes of a warp only")
        number, count, block = _at(number, mask), _at(threads, mask), self.block
        waiting = block.waiting.setdefault(number, [])
        waiting.append(self)
        self.machine.progress()
        turn = block.passed.setdefault(number, 0)
        if len(waiting) * LANES < count:
            while block.passed[number] == turn:
                yield
            return
        rows = np.concatenate([warp.columns - block.first for warp in waiting])
        known = block.clocks[rows].max(0)
        block.clocks[rows] = known
        for warp in waiting:
            warp.tick()
        for allocation in block.shared.found.values():
            allocation.forget_bulk_reads(known)
        block.passed[number] += 1
        block.waiting[number] = []

    def _misused(self, site: int, mask: np.ndarray, what: str) -> Fault:
        return Fault(f"{self.machine.names.describe(int(self.access(site, mask).packed[0]))} {what}")

    # Barriers in shared memory

    def init_mbarrier(self, site: int, mask: np.ndarray, address: object, count: object) -> None:
        for part, access in self._lanes(site, mask):
            where = _at(address, part)
            allocation = self.block.shared.allocation(where, access, 0)
            offset = allocation.offset(where, 8, 8, access, 0)
            allocation.write(np.array([offset]), 8, access)
            # No ordinary access is allowed from now on.
            allocation.last_write[offset : offset + 8] = site << SITE_SHIFT | self.machine.unknown | 1
            used = len(self.block.mbarriers)
            if where in self.block.mbarriers or used == MBARRIERS:
                raise allocation.fault(f"mbarrier made twice, or more than {MBARRIERS}", access, 0, offset, 8)
            column = self.block.mbarrier_column + used
            self.block.mbarriers[where] = Mbarrier(self.machine, _at(count, part), column, access)

    def mbarrier(self, address: int, access: Access) -> Mbarrier:
        found = self.block.mbarriers.get(address)
        if found is None:
            raise Fault(f"no mbarrier at {address:#x}: {self.machine.names.describe(int(access.packed[0]))}")
        made = found.initialised
        if access.clocks[:, ORDERED, made.columns[0]].min() < int(made.stamps[0]) & TIME:
            names = self.machine.names
            raise Fault(
                f"race: mbarrier used, {names.describe(int(access.packed[0]))}; and made, "
                f"{names.describe(int(made.packed[0]))}"
            )
        return found

    def arrive(self, site: int, mask: np.ndarray, address: object, count: object, nbytes: object) -> None:
        for part, access in self._lanes(site, mask):
            barrier = self.mbarrier(_at(address, part), access)
            np.maximum(barrier.arrived, access.clocks[0], out=barrier.arrived)
            barrier.change(nbytes=_at(nbytes, part))
            barrier.change(arrivals=_at(count, part))
        self.tick()

    def has_passed(self, site: int, mask: np.ndarray, address: object, parity: object) -> object:
        """Whether the phase of a parity has ended: bool, or bool [32]."""
        out = np.zeros(LANES, bool)
        alike = type(address) is int and type(parity) is int
        parts = [(mask, self.access(site, mask))] if alike else list(self._lanes(site, mask))
        for part, access in parts:
            barrier = self.mbarrier(_at(address, part), access)
            passed = barrier.phase % 2 != _at(parity, part) % 2
            if passed:
                self.clocks[part] = np.maximum(self.clocks[part], barrier.done)
            out[part] = passed
        return passed if alike else out

    # Bulk copies

    def bulk_load(
        self, site: int, mask: np.ndarray, shared: object, address: object, nbytes: object, barrier: object
    ) -> None:
        for part, access in self._lanes(site, mask):
            found = self.mbarrier(_at(barrier, part), access)
            if not found.visible:
                raise self._misused(site, mask, "uses an mbarrier that no fence has made visible to it")
            self._copy(part, access, (GLOBAL, address), (SHARED, shared), nbytes, found)

    def bulk_store(self, site: int, mask: np.ndarray, address: object, shared: object, nbytes: object) -> None:
        for part, access in self._lanes(site, mask):
            self.open[part.start].append(self._copy(part, access, (SHARED, shared), (GLOBAL, address), nbytes, None))

    def _copy(self, part: slice, access: Access, source: tuple[str, object], target: tuple[str, object], nbytes: object,
              barrier: Mbarrier | None) -> Copy:  # fmt: skip
        n = _at(nbytes, part)
        ends = []
        for space, address in (source, target):
            where = _at(address, part)
            allocation = self.spaces[space].allocation(where, access, 0)
            offset = allocation.offset(where, n, BULK_ALIGNMENT, access, 0)
            if n % BULK_ALIGNMENT:
                raise allocation.fault(f"not a multiple of {BULK_ALIGNMENT} bytes", access, 0, offset, n)
            ends.append((allocation, offset))
        self.machine.issued += 1
        packed = access.site << SITE_SHIFT | self.machine.unknown | self.machine.issued
        copy = Copy(self.machine, ends[0], ends[1], n, packed, access, barrier)
        self.machine.all_copies.append(copy)
        self.machine.progress()
        return copy

    def commit(self, mask: np.ndarray) -> None:
        for lane in np.nonzero(mask)[0].tolist():
            self.groups[lane].append(self.open[lane])
            self.open[lane] = []

    def wait_group(self, mask: np.ndarray, pending: int, *, read: bool) -> None:
        """Until all but the last `pending` groups of each lane are done, or have read their source."""
        ended = [(lane, group) for lane in np.nonzero(mask)[0].tolist()
                 for group in self.groups[lane][: max(len(self.groups[lane]) - pending, 0)]]  # fmt: skip
        for _, group in ended:
            for copy in group:
                copy.finish(1 if read else 2)
        self.tick()
        for lane, group in ended:
            for copy in group:
                seen = copy.packed >> SITE_SHIFT << SITE_SHIFT | int(self.stamps[lane])
                if not copy.seen:
                    copy.seen = True
                    copy.note_read(seen)
                if not read:
                    copy.note_written(seen)
        if not read:
            for lane in np.nonzero(mask)[0].tolist():
                del self.groups[lane][: max(len(self.groups[lane]) - pending, 0)]
