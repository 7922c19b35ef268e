"""What each process of an MPI job does in the tests: two trainers, and two replicas of two ranks each.

Run as `mpirun -n 4 python mpi_program.py SCENARIO`. Every process prints one line for each check that it has passed.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable
from typing import Any

import pytest
from checks import poison_buffers
from mpi4py import MPI
from quantized_world import make_quantized_plan
from small_world import cut_small, make_plan, params_of, served, target_of

import shardfly_jax as sf

HELD = ([0], [1], [2, 3], [4, 5])


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")  # in one piece, also where Python does not buffer
    sys.stdout.flush()


class Process:
    """This one."""

    def __init__(self, deadline_secs: float, make: Callable[[], sf.Plan]):
        cut_small()
        plan = make()  # before the deadline counts
        self.transport = os.environ.get("SHARDFLY_TEST_TRANSPORT", "mpi")
        self.world: Any = sf.connect(transport=self.transport, deadline_secs=deadline_secs)
        self.number = self.world.process
        self.held = HELD[self.number]
        self.plan = sf.register(plan, world=self.world, ranks=self.held)

    def update(self, seed: int, spoiled: bool = False, **options: Any) -> Any:
        if self.number < 2:
            return sf.sync(params_of(seed, self.held, spoiled), self.plan, **options)
        return sf.receive(self.plan, **options)

    def serves(self, *seeds: int) -> str:
        return served(self.plan, list(seeds))

    def expect(self, error: type[BaseException], words: str, call: Callable[[], Any]) -> None:
        """A call raises an error of a type that contains some words."""
        with pytest.raises(error, match=re.escape(words)):
            call()


def good(me: Process) -> None:
    """Updates, refusals, failures that heal, updates in the background, other replicas."""
    addresses = {s.address for s in me.plan.registered().buffers.values()}
    for seed in (1, 2):
        poison_buffers(me.plan)
        me.update(seed)
        assert me.serves(seed) == (str(seed) if me.number >= 2 else "no rollout")
        assert set(me.plan.version.values()) == {seed}
        assert set(me.plan.staleness.values()) == {0}
    assert f"Transport: {me.transport}" in me.plan.explain()
    say("updates")

    wrong = params_of(3, me.held) if me.number < 2 else {}
    if me.number == 1:
        del wrong["norm"]
    me.expect(
        sf.ParamsMismatch if me.number == 1 else sf.UpdateRefused,
        "'norm' is missing",
        lambda: sf.sync(wrong, me.plan) if me.number < 2 else sf.receive(me.plan),
    )
    assert me.serves(2) == ("2" if me.number >= 2 else "no rollout")
    say("refusal")

    def break_off(_: int) -> None:
        raise ZeroDivisionError("a callback")

    me.expect(
        ZeroDivisionError if me.number == 2 else sf.TransferError,
        "a callback" if me.number == 2 else "rank 2 failed: ZeroDivisionError",
        lambda: me.update(4, **({"progress": break_off} if me.number == 2 else {})),
    )
    assert me.serves(2, 4) == ("poisoned" if me.number >= 2 else "no rollout")
    assert set(me.plan.staleness.values()) == {1}
    me.update(5)
    assert me.serves(5) == ("5" if me.number >= 2 else "no rollout")
    assert set(me.plan.version.values()) == {4}
    say("healed")

    if me.number < 2:
        handle = sf.sync(params_of(6, me.held), me.plan, wait=False)
        me.expect(sf.UpdateRefused, "pending", lambda: me.update(7))
        handle.result(60)
    else:
        me.update(6)
        assert me.serves(6) == "6"
    assert addresses == {s.address for s in me.plan.registered().buffers.values()}
    say("background")

    ranks = ([0], [1], [2], [3, 4])[me.number]
    me.plan = sf.rescale(me.plan, target_of(3, tp=1), ranks=ranks)
    assert me.plan.rescaled is not None
    assert me.plan.rescaled.serving == ()
    me.held = ranks
    me.update(8)
    assert me.serves(8) == ("8" if me.number >= 2 else "no rollout")
    assert set(me.plan.version.values()) == {6}
    say("rescaled")

    me.expect(
        sf.DigestMismatch,
        "hold the plans",
        lambda: sf.register(make_plan(2.0 if me.number == 3 else 1.0), world=me.world, ranks=HELD[me.number]),
    )
    me.expect(
        sf.RegistrationError,
        "each of 0 to 5 is needed",
        lambda: sf.register(make_plan(), world=me.world, ranks=HELD[2 if me.number == 3 else me.number]),
    )
    say("registrations")
    me.world.close()
    me.expect(sf.WorldLost, "closed", lambda: me.update(9))


def mistakes(me: Process) -> None:
    """What goes wrong in one process before it has told the others anything is told then: all go on in step."""
    me.update(1)
    first = me.plan

    def mistaken(who: int, error: type[BaseException], words: str, wrong: Callable[[], Any], right: Any = None) -> None:
        """One process does something wrong where the others do what is right."""
        is_update = right is None
        told = sf.UpdateRefused if is_update else sf.RegistrationError
        me.expect(*((error, words, wrong) if me.number == who else (told, words, right or (lambda: me.update(2)))))
        seed = mistaken.seed = mistaken.seed + 1  # type: ignore[attr-defined]
        poison_buffers(me.plan)
        me.update(seed)
        assert me.serves(seed) == (str(seed) if me.number >= 2 else "no rollout")
        say("mistake")

    mistaken.seed = 2  # type: ignore[attr-defined]
    params = params_of(2, me.held) if me.number < 2 else {}
    mistaken(1, sf.ParamsMismatch, "wait_secs is -1", lambda: sf.sync(params, me.plan, wait_secs=-1))
    mistaken(0, sf.ParamsMismatch, "progress is a int", lambda: sf.sync(params, me.plan, wait=False, progress=5))  # type: ignore[arg-type]
    mistaken(3, sf.ParamsMismatch, "wait_secs is 'x'", lambda: sf.receive(me.plan, wait_secs="x"))  # type: ignore[arg-type]
    mistaken(2, sf.NotRegistered, "holds no trainer ranks", lambda: sf.sync({}, me.plan))
    mistaken(0, sf.NotRegistered, "hold rollout ranks only", lambda: sf.receive(me.plan))

    def register(ranks: Any) -> None:
        me.plan = sf.register(make_plan(), world=me.world, ranks=ranks)

    mistaken(3, sf.RegistrationError, "ranks are 5", lambda: register(5), lambda: register(me.held))
    mistaken(
        1, sf.PlanError, "norm", lambda: sf.rescale(me.plan, {"norm": 3}, ranks=[1]),
        lambda: sf.rescale(me.plan, target_of(2), ranks=me.held),
    )  # fmt: skip
    register(me.held)
    me.expect(
        sf.WorldError if me.number == 1 else sf.UpdateRefused,
        "later registration took its place",
        lambda: sf.sync(params, first) if me.number == 1 else me.update(2),
    )
    me.expect(  # two at once: each has its own
        sf.ParamsMismatch if me.number in (0, 1) else sf.UpdateRefused,
        f"wait_secs is -{me.number + 1}" if me.number < 2 else "rank 0 refused",
        lambda: sf.sync(params, me.plan, wait_secs=-1 - me.number) if me.number < 2 else me.update(2),
    )
    me.update(20)
    assert me.serves(20) == ("20" if me.number >= 2 else "no rollout")
    me.expect(  # one updates where the others register
        sf.WorldError, "register and update together", lambda: register(me.held) if me.number else me.update(2)
    )
    me.update(21)
    assert me.serves(21) == ("21" if me.number >= 2 else "no rollout")


def interrupt(me: Process) -> None:
    """A process is interrupted at a vote: what others say there is not taken for what they say next."""
    me.update(1)
    say("updated")

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    if me.number == 2:
        signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        me.expect(KeyboardInterrupt, "", lambda: me.update(2))
        me.expect(sf.WorldLost, "KeyboardInterrupt came while this process waited for others", lambda: me.update(2))
        say("WorldLost")
        return
    MPI.COMM_WORLD.Barrier()  # which nobody leaves
    say("went on")


def quantized(me: Process) -> None:
    """Trainers share blocks; codes, scales and their maxima travel."""
    for seed in (1, 2):
        poison_buffers(me.plan)
        me.update(seed)
        assert me.serves(seed) == (str(seed) if me.number >= 2 else "no rollout")
    say("updates")

    me.expect(sf.NotFinite, "target 'h.1.", lambda: me.update(3, spoiled=True))
    assert me.serves(2, 3) == ("poisoned" if me.number >= 2 else "no rollout")
    say("refusal")
    me.update(4)
    assert me.serves(4) == ("4" if me.number >= 2 else "no rollout")
    say("healed")


def fault_among_maxima(signal_: int) -> Callable[[Process], None]:
    """A trainer gets a signal before it sends its second maxima."""

    def run(me: Process) -> None:
        me.update(1)
        say("updated")
        send, sent = me.world.send, []

        def send_or_end(payload: Any, process: int) -> None:
            sent.append(process)
            if sent.count(0) == 2:
                os.kill(os.getpid(), signal_)
            send(payload, process)

        if me.number == 1:
            me.world.send = send_or_end
        me.update(2)
        say("went on")

    return run


def fault(signal_: int, at: str) -> Callable[[Process], None]:
    """Process 2 gets a signal before an update, or in the midst of it."""

    def run(me: Process) -> None:
        me.update(1)
        say("updated")

        def progress(_: int) -> None:
            os.kill(os.getpid(), signal_)

        def transfer(*_: Any) -> None:
            os.kill(os.getpid(), signal_)
            signal.pause()

        if me.number == 2 and at == "vote":
            os.kill(os.getpid(), signal_)
        if me.number == 2 and me.transport == "nvshmem":  # where all of an update has moved at the first progress
            me.plan.registered().part._transfer = transfer
        try:
            me.update(2, **({"progress": progress} if me.number == 2 else {}))
        except sf.WorldLost as error:
            say(f"WorldLost: {error}")
            assert me.serves(1) == ("1" if me.number >= 2 else "no rollout")
            raise
        say("went on")

    return run


def miss(me: Process) -> None:
    """Process 2 is elsewhere: it never connects."""
    raise AssertionError("nobody can have connected")


SCENARIOS: dict[str, tuple[float, Callable[[Process], None]]] = {
    "good": (60.0, good),
    "quantized": (60.0, quantized),
    "mistakes": (60.0, mistakes),
    "interrupt": (60.0, interrupt),
    "miss": (3.0, miss),
    "kill-vote": (60.0, fault(signal.SIGKILL, "vote")),
    "kill-move": (60.0, fault(signal.SIGKILL, "move")),
    "kill-maxima": (60.0, fault_among_maxima(signal.SIGKILL)),
    "stop-maxima": (20.0, fault_among_maxima(signal.SIGSTOP)),  # its chunks have many sizes, each compiled once
    "stop-vote": (4.0, fault(signal.SIGSTOP, "vote")),
    "stop-move": (4.0, fault(signal.SIGSTOP, "move")),
}

if __name__ == "__main__":
    deadline_secs, scenario = SCENARIOS[sys.argv[1]]
    if scenario is miss and MPI.COMM_WORLD.rank == 2:
        signal.pause()
    with_blocks = sys.argv[1] == "quantized" or sys.argv[1].endswith("maxima")
    scenario(Process(deadline_secs, make_quantized_plan if with_blocks else make_plan))
    say("done")
