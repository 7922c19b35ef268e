"""Updates by the persistent kernel's own code on simulated devices (see `kernel_interpreter`)."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable

import numpy as np
from kernel_interpreter import Allocation, Launch, Machine, Program, compile_kernel
from random_problems import Case, expected_buffers, source_buffers

from shardfly_jax.executors.launches import Attempt, Outcome, Work, set_attempt
from shardfly_jax.executors.phases import Phases
from shardfly_jax.pallas_kernels import launch_words as lw, transfer
from shardfly_jax.pallas_kernels.emit import Int
from shardfly_jax.sharding import optable
from shardfly_jax.sharding.formats import Conversion
from shardfly_jax.sharding.moves import Key
from shardfly_jax.sharding.optable import Inbox, OpTables

SESSION = 0x89ABCDEF


def compile_transfer(
    conversions: tuple[Conversion, ...], blocks: int, flags: int, workers: int, operands: int = 0, buffers: int = 0
) -> Program:
    """The kernel's code; arguments as those of `transfer.make_kernel`, and how many operands there are."""

    def emit(*values: object) -> None:
        at = list(map(Int, values))
        fixed, given, shared = at[:4], at[4 : 4 + operands], at[4 + operands :]
        transfer.Worker(conversions, blocks * workers, flags, *fixed, *shared, buffers=buffers).run(given)

    own = zip(("tile", "barrier", "shared"), transfer.OWN_NBYTES, strict=True)
    scratch = {name: workers * nbytes for name, nbytes in own} | {"addresses": max(8 * buffers, 8)}
    return compile_kernel(emit, 4 + operands, scratch)


compiled = functools.cache(compile_transfer)


class Job:
    """A plan with its buffers: sources with data, targets never written; one update per `update`.

    Args:
      case: The problem.
      devices: How many; ranks take them in turn.
      blocks: Of each launch.
      workers: Of each block of a launch that moves tiles; by default as many as on a GPU.
      change: Breaks the tables.
    """

    def __init__(
        self,
        case: Case,
        *,
        devices: int = 1,
        blocks: int = 1,
        workers: int = transfer.WORKERS,
        change: Callable[[OpTables], OpTables] = lambda t: t,
    ):
        self.case, self.plan, self.blocks, self.workers = case, case.plan(), blocks, workers
        place = {rank: rank % devices for rank in range(self.plan.ranks)}
        self.tables = change(optable.make_tables(self.plan, place, lambda key: key))
        self.want, sources = expected_buffers(case, self.plan), source_buffers(case, self.plan)
        several = len(self.tables.devices) > 1
        self.sources = {key: Allocation(f"source {key}", flat, read_only=True) for key, flat in sources.items()}
        self.targets = {
            key: Allocation(f"target {key}", flat.nbytes, once=True, system=several) for key, flat in self.want.items()
        }
        self.inboxes = [
            Allocation(f"inbox {k}", np.zeros(self.tables.counters + max(n, 1), np.int32), system=several)
            for k, n in enumerate(self.tables.n_counters)
        ]
        self.epoch = 0

    def phases(self) -> Phases:
        """With the addresses that are known now."""
        fixed: dict[Key | Inbox, int] = {key: x.base for key, x in self.targets.items()}
        fixed |= {Inbox(k): x.base for k, x in enumerate(self.inboxes)}
        cores = types.SimpleNamespace(core_count=1)
        return Phases(self.plan, self.tables, [cores] * len(self.tables.devices), fixed)  # type: ignore[list-item]

    def run(
        self,
        names: tuple[str, ...],
        seed: int,
        *,
        epoch: int | None = None,
        in_step: bool = False,
        left_out: tuple[int, str] | None = None,
        compile_: Callable[..., Program] = compiled,
    ) -> dict[str, int]:
        """Runs phases of all devices at once.

        Args:
          names: Of the phases.
          seed: Of the schedule.
          epoch: Of the attempt, by default the current one.
          in_step: Whether *send* gets its sources as operands.
          left_out: A device and the name of a phase that it does not run.
          compile_: Makes the programs.

        Returns:
          By the name of the work, the error that its launch reports.

        Raises:
          Fault: The kernel did something wrong.
        """
        works = [
            (device, name, work)
            for name in names
            for device, work in getattr(self.phases(), name)().items()
            if (device, name) != left_out
        ]
        launches, filled = [], []
        for _, name, work in works:
            operands = {key: k for k, key in enumerate(work.moving)} if in_step and name == "send" else {}
            numbers, words, _ = work.numbers(operands, len(operands))
            blocks = 1 if name == "ready" else self.blocks
            room = (len(numbers) - lw.launch_size(work.flags, 0)[2]) // 2 if operands else 0
            workers = min(self.workers, work.workers)
            program = compile_(work.conversions, blocks, work.flags, workers, len(operands), room)
            launch = Allocation("launch", numbers.nbytes, read_only=True)
            state = Allocation("state", np.zeros(lw.STATE, np.int32))
            out = Allocation("out", 4 * lw.REPORT_SIZE)
            table = Allocation("table", words, read_only=True)
            given = [self.sources[key] for key in operands]
            fixed = (table, launch, state, out)
            launches.append(Launch(program=program, operands=(*fixed, *given), blocks=blocks, warpgroups=workers))
            filled.append((work, operands, launch, state, out))
        machine = Machine(launches, [*self.sources.values(), *self.targets.values(), *self.inboxes], seed)
        again = {(device, name): work for name in names for device, work in getattr(self.phases(), name)().items()}
        attempt = Attempt(SESSION, self.epoch if epoch is None else epoch, self.epoch, 1000)
        for (device, name, _), (_, operands, launch, _, _) in zip(works, filled, strict=True):
            launch.fill(self._numbers(again[device, name], operands, attempt))
        machine.run()
        for _, _, _, state, _ in filled:
            words = state.data.view(np.int32)
            assert not words[[lw.CLAIMED, lw.FINISHED, lw.ERROR]].any()
        outcomes = [Outcome.of(work, out.data.view(np.uint32)) for work, _, _, _, out in filled]
        self.refused = {key for work, _, word in outcomes if (key := work.refused(word))}
        return {work.name: error for work, error, _ in outcomes}

    def _numbers(self, work: Work, operands: dict[Key, int], attempt: Attempt) -> np.ndarray:
        numbers, _, words = work.numbers(operands, len(operands))
        set_attempt(numbers, attempt, work.publishes)
        for key in set(work.moving) - set(operands):
            base = self.sources[key].base
            numbers[words[key] : words[key] + 2] = base & 0xFFFFFFFF, base >> 32
        return numbers

    def update(self, seed: int, *, in_step: bool = False, compile_: Callable[..., Program] = compiled) -> set[Key]:
        """One whole update, without errors; the targets of values that are not finite."""
        self.epoch += 1
        for names in (("ready",), ("send", "finish")):
            errors = self.run(names, seed, in_step=in_step, compile_=compile_)
            assert not any(errors.values()), errors
        return self.refused

    def check(self) -> None:
        """Every byte of every target."""
        for key, want in self.want.items():
            assert self.targets[key].data.tobytes() == want.tobytes(), key
