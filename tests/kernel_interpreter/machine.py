"""Launches on a simulated GPU: which warp goes on when, when bulk copies land, and what time it is.

A warp is a Python generator (see `translate`) that yields before every instruction by which threads can tell how far
others are (atomics, barriers, bulk copies) and at the turn of a while loop. Ordinary accesses need no such point: where
they do not race, no order of them can be told from another. Lanes of a warp run in step, but the race check knows only
what orders them.

The schedule is random: every warp has a speed, speeds differ up to a hundredfold between blocks and change now and
then, so that whole blocks are left behind; bulk copies land soon or late.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator

from kernel_interpreter.bulk import Copy
from kernel_interpreter.lanes import LANES, Fault
from kernel_interpreter.memory import GLOBAL, TIME_BITS, Allocation, Names, Space
from kernel_interpreter.translate import Program
from kernel_interpreter.warp import MBARRIERS, THREADS, Block, Warp

LEAP_NS = 1 << 52
"""Added to the clock, once, when nothing but time can help: more than any deadline in milliseconds of 32 bits."""
PATIENCE = 20
"""When each warp has come to so many points and nothing has changed, nothing but time can help."""
POINTS_LIMIT = 3_000_000
"""So many points, all warps together, are taken for a launch that never ends though things change."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A launch of a kernel.

    Attributes:
      program: The kernel.
      operands: As many as the program wants, in order.
      blocks: All run at once.
      warpgroups: Of a block.
    """

    program: Program
    operands: tuple[Allocation, ...]
    blocks: int
    warpgroups: int = 1


class Machine:
    """Runs launches at once, to their end.

    Args:
      launches: Their operands, and `reachable`, are all of global memory.
      reachable: Allocations whose addresses are data: their `base`, once the machine is made.
      seed: Of the schedule.
    """

    def __init__(self, launches: list[Launch], reachable: list[Allocation], seed: int):
        self.launches, self.random = launches, random.Random(seed)
        self.now = self.random.randrange(1 << 40)
        self.copies: list[Copy] = []
        self.all_copies: list[Copy] = []
        self.issued, self.points = 0, 0
        self.changes, self.patient, self.leapt = 0, 0, False
        sizes = [launch.warpgroups * THREADS for launch in launches for _ in range(launch.blocks)]
        self.n_blocks = blocks = len(sizes)
        self.n_columns = sum(sizes) + blocks * MBARRIERS + 1
        self.unknown = (self.n_columns - 1) << TIME_BITS
        columns = [f"block {k} thread {thread}" for k, size in enumerate(sizes) for thread in range(size)]
        columns += [f"a bulk copy of block {k // MBARRIERS}" for k in range(blocks * MBARRIERS)]
        self.names = Names([*columns, "a bulk copy whose end was not waited for"])
        self.memory = Space(GLOBAL, 40)
        for allocation in {id(a): a for a in (*reachable, *(a for x in launches for a in x.operands))}.values():
            self.memory.place(allocation, self.names, self.random.randrange(1 << 16))

    def progress(self) -> None:
        """Something changed that others may wait for."""
        self.changes += 1
        self.patient, self.leapt = 0, False

    def run(self) -> None:
        """Runs everything.

        Raises:
          Fault: Something is undefined or wrong on a GPU.
        """
        live: list[tuple[Warp, Iterator[bool | None]]] = []
        speeds: list[float] = []
        number = column = 0
        for launch in self.launches:
            first_site = len(self.names.sites)
            self.names.add(launch.program.sites)
            for index in range(launch.blocks):
                threads = launch.warpgroups * THREADS
                block = Block(self, number, index, launch.blocks, column, threads, launch.program.scratch)
                arguments = [a.base for a in launch.operands] + block.scratch
                for k in range(threads // LANES):
                    warp = Warp(block, k)
                    live.append((warp, launch.program.run(warp, first_site, *arguments)))
                number, column = number + 1, column + threads
        while live:
            if self.random.random() < 0.1 or len(speeds) != len(live):
                speeds = self._speeds([warp for warp, _ in live])
            k = self.random.choices(range(len(live)), cum_weights=speeds)[0]
            warp, code = live[k]
            for _ in range(self.random.choice((1, 2, 8, 32))):
                try:
                    moved = next(code)
                except StopIteration:
                    del live[k]
                    self.progress()
                    warp.block.running -= 1
                    if not warp.block.running:
                        warp.block.end()
                    break
                self.step(warp, len(live), waits=not moved)
        for copy in list(self.copies):
            copy.finish(2)

    def _speeds(self, warps: list[Warp]) -> list[float]:
        """Random weights of warps, summed up; and how soon bulk copies land."""
        self.landing = self.random.choice((0.02, 0.3, 1.0))
        of_block = {warp.block: 10 ** -self.random.uniform(0, 2) for warp in warps}
        return list(itertools.accumulate(of_block[warp.block] * self.random.uniform(0.1, 1) for warp in warps))

    def step(self, warp: Warp, live: int, *, waits: bool) -> None:
        """Time passes after a warp came to a point, where perhaps it waits for something."""
        self.now += self.random.randrange(1000)
        self.points += 1
        if self.points == POINTS_LIMIT:
            raise Fault(f"hang: no end after {POINTS_LIMIT} steps")
        if self.copies:
            if self.random.random() < self.landing:
                self.random.choice(self.copies).advance()
            return
        if not waits:
            return
        if warp.since != self.changes:
            warp.since, warp.points = self.changes, 0
        warp.points += 1
        self.patient += warp.points == PATIENCE
        if self.patient == live:
            if self.leapt:
                raise Fault("hang: nothing changes any more, and no deadline ends it")
            self.progress()
            self.now += LEAP_NS
            self.leapt = True
