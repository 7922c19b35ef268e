"""Bulk copies under way, and the barriers in shared memory that count what they bring.

A copy is noted in memory when it is issued, as an access whose end nobody knows. Its bytes are read and written at
random times later. Its end becomes known through the mbarrier of a load or `cp.async.bulk.wait_group` of a store; both
imply a proxy fence (PTX ISA, cp.async.bulk).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kernel_interpreter.lanes import Fault
from kernel_interpreter.memory import ORDERED, SITE_SHIFT, TIME_BITS, VIEWS, Access, Allocation

if TYPE_CHECKING:
    from kernel_interpreter.machine import Machine

TX_LIMIT = (1 << 20) - 1  # PTX ISA, mbarrier: range of the pending count of bytes


class Copy:
    """A bulk copy under way. `stage`: 0 nothing done, 1 source read, 2 written."""

    def __init__(self, machine: Machine, source: tuple[Allocation, int], target: tuple[Allocation, int],
                 nbytes: int, packed: int, access: Access, barrier: Mbarrier | None):  # fmt: skip
        self.machine, self.source, self.target = machine, source, target
        self.nbytes, self.packed, self.access, self.barrier, self.stage = nbytes, packed, access, barrier, 0
        self.seen = False  # whether someone has seen that shared memory is free again, or full
        first, at = source[1], target[1]
        source[0].begin_bulk_read(self, first, first + nbytes, packed, access)
        target[0].begin_bulk_write(at, at + nbytes, packed, access)
        machine.copies.append(self)

    def advance(self) -> None:
        self.stage += 1
        (source, first), (target, at) = self.source, self.target
        if self.stage == 1:
            if not source.written[first : first + self.nbytes].all():
                k = first + int((~source.written[first : first + self.nbytes]).argmax())
                raise source.fault("reads bytes never written", self.access, 0, k, 1)
            self.bytes = source.data[first : first + self.nbytes].copy()
        else:
            target.data[at : at + self.nbytes] = self.bytes
            target.written[at : at + self.nbytes] = True
            self.machine.copies.remove(self)
            if self.barrier is not None:
                self.barrier.copies.append(self)
                self.barrier.change(nbytes=-self.nbytes)
        self.machine.progress()

    def finish(self, stage: int) -> None:
        while self.stage < stage:
            self.advance()

    def note_read(self, packed: int) -> None:
        self.source[0].end_bulk_read(self, packed)

    def note_written(self, packed: int) -> None:
        at = self.target[1]
        self.target[0].end_bulk_write(at, at + self.nbytes, self.packed, packed)


class Mbarrier:
    """A barrier in shared memory."""

    def __init__(self, machine: Machine, count: int, column: int, access: Access):
        self.machine, self.count, self.column, self.phase = machine, count, column, 0
        self.missing, self.nbytes = count, 0
        self.initialised, self.visible = access, False
        self.arrived = np.zeros((VIEWS, machine.n_columns), np.int32)
        self.done = np.zeros((VIEWS, machine.n_columns), np.int32)  # what those who saw the last phase end know
        self.copies: list[Copy] = []

    def change(self, *, arrivals: int = 0, nbytes: int = 0) -> None:
        self.missing -= arrivals
        self.nbytes += nbytes
        if self.missing < 0:
            raise Fault(f"mbarrier: more than {self.count} arrivals in one phase, made by {self._name()}")
        if abs(self.nbytes) > TX_LIMIT:
            raise Fault(f"mbarrier: {self.nbytes} bytes pending, more than it can count, made by {self._name()}")
        if self.missing == 0 and self.nbytes == 0:
            self.phase += 1
            self.missing = self.count
            np.maximum(self.done, self.arrived, out=self.done)
            self.done[ORDERED, self.column] = self.phase
            for copy in self.copies:
                copy.seen = True
                seen = copy.packed >> SITE_SHIFT << SITE_SHIFT | self.column << TIME_BITS | self.phase
                copy.note_read(seen)
                copy.note_written(seen)
            self.copies = []
        self.machine.progress()

    def _name(self) -> str:
        return self.machine.names.describe(int(self.initialised.packed[0]))
