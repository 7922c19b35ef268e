"""The rendezvous as a state machine: processes that come, go, repeat and fall silent, on a clock of the test's own."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

from shardfly_jax.worlds.rendezvous import GONE_SECS, GRACE_SECS, Rendezvous
from shardfly_jax.worlds.wire import FROM_RENDEZVOUS, PROTOCOL, TO_RENDEZVOUS, Header, Refused, Seal

SESSION = 7
DEADLINE_SECS, LOST_SECS = 5.0, 3.0
REPLICAS = {"a": [1, 2], "b": [3]}
HELD = {"t": [0], "a1": [1], "a2": [2], "b": [3]}


class World:
    """A rendezvous, and what each process has heard from it."""

    def __init__(self) -> None:
        self.rendezvous = Rendezvous(session=SESSION, deadline_secs=DEADLINE_SECS, lost_secs=LOST_SECS)
        self.now = 0.0
        self.heard: dict[str, list[Header]] = {}
        self.news: dict[str, Header] = {}

    def say(self, who: str, op: str, **fields: Any) -> None:
        header = {"op": op, "session": SESSION, "seq": 1, **fields}
        assert Seal("x").open(Seal("x").close(header), TO_RENDEZVOUS) == header, "what real processes could say"
        self._deliver(self.rendezvous.handle(who.encode(), header, self.now))

    def pass_time(self, secs: float) -> None:
        self.now += secs
        self._deliver(self.rendezvous.tick(self.now))

    def _deliver(self, out: list[tuple[bytes, Header]]) -> None:
        for who, header in out:
            assert Seal("x").open(Seal("x").close({**header, "seq": 1}), FROM_RENDEZVOUS)
            if header["op"] == "news":
                self.news[who.decode()] = header
            else:
                self.heard.setdefault(who.decode(), []).append(header)

    def join(
        self,
        who: str,
        role: str | None = None,
        digest: str = "d",
        confirms: bool = False,
        newest: int = 0,
        **versions: int,
    ) -> None:
        self.say(who, "hello", protocol=PROTOCOL, name=who)
        self.say(
            who, "register", digest=digest, source_ranks=1, target_ranks=3, held=HELD[role or who], replicas=REPLICAS,
            endpoint="tcp://x", versions=versions, newest=newest, confirms=confirms,
        )  # fmt: skip

    def enter(self, who: str, entry: int = 1, refusal: str | None = None, wait_secs: float = 60.0) -> None:
        self.say(who, "enter", entry=entry, wait_secs=wait_secs, refusal=refusal)

    def last(self, who: str) -> Header:
        return self.heard[who][-1]

    def ops(self, who: str) -> list[str]:
        return [header["op"] for header in self.heard[who]]

    def started(self) -> int:
        """All join and enter; the epoch that begins."""
        for who in HELD:
            self.join(who)
        for who in HELD:
            self.enter(who)
        return self.last("t")["epoch"]

    def at_the_deadline(self) -> int:
        """All are ready, and alive when the deadline comes; the epoch."""
        epoch = self.started()
        for who in ("a1", "a2", "b"):
            self.say(who, "ready", epoch=epoch)
        self.now += DEADLINE_SECS
        for who in HELD:
            self.say(who, "beat")
        return epoch


def test_an_update_goes_through_its_steps() -> None:
    world = World()
    epoch = world.started()
    assert world.last("t")["endpoints"]["3"] == "tcp://x"
    for who in ("a1", "a2"):
        world.say(who, "ready", epoch=epoch)
    assert "go" not in world.ops("t")
    world.say("b", "ready", epoch=epoch)
    world.say("b", "arrived", epoch=epoch)
    assert world.last("t") == {**world.last("t"), "op": "complete", "replicas": ["b"], "number": 1}
    world.say("a1", "arrived", epoch=epoch)
    world.say("a1", "arrived", epoch=epoch)
    assert world.ops("t").count("complete") == 1, "half of a replica is none"
    world.say("a2", "arrived", epoch=epoch)
    assert world.ops("t")[-2:] == ["complete", "done"]


def test_nobody_arrives_before_all_were_told_to_go() -> None:
    world = World()
    epoch = world.started()
    for who in ("a1", "a2", "b"):
        world.say(who, "arrived", epoch=epoch)
    assert "complete" not in world.ops("t")


@pytest.mark.parametrize("epoch", [0, 2, 1 << 40])
def test_words_of_another_attempt_change_nothing(epoch: int) -> None:
    world = World()
    assert world.started() == 1
    for who in ("a1", "a2", "b"):
        world.say(who, "ready", epoch=epoch)
    world.say("t", "fail", epoch=epoch, kind="error", phase="send", rank=0, why="late")
    assert world.ops("t")[-1] == "begin"


def test_numbers_rise_past_versions_from_before_a_restart() -> None:
    world = World()
    world.join("a1", a=41)
    for who in ("t", "a2", "b"):
        world.join(who)
    for who in HELD:
        world.enter(who)
    assert world.last("t")["number"] == 42


def test_numbers_rise_past_those_of_another_rendezvous() -> None:
    world = World()
    for who in HELD:
        world.join(who, newest=41 if who == "b" else 7)
    for who in HELD:
        world.enter(who)
    assert world.last("t")["number"] == 42


def test_nothing_is_complete_before_a_trainer_whose_kernels_write_says_that_they_were_right() -> None:
    world = World()
    for who in HELD:
        world.join(who, confirms=who == "t")
    for who in HELD:
        world.enter(who)
    epoch = world.last("t")["epoch"]
    for op in ("ready", "arrived"):
        for who in ("a1", "a2", "b"):
            world.say(who, op, epoch=epoch)
    assert "complete" not in world.ops("b")
    world.say("t", "arrived", epoch=epoch)
    assert world.ops("b")[-2:] == ["complete", "done"]
    for who in HELD:
        world.enter(who, entry=2)
    for op in ("ready", "arrived"):
        for who in ("a1", "a2", "b"):
            world.say(who, op, epoch=epoch + 1)
    world.say("t", "fail", epoch=epoch + 1, kind="not finite", phase="send", rank=0, why="target 'w' holds NaN")
    assert world.ops("b")[-1] == "failed"
    assert world.last("b")["kind"] == "not finite"


def test_news_tell_of_updates_that_wait_begin_and_become_complete() -> None:
    world = World()

    def told() -> tuple[int, dict[str, int]]:
        assert len({(n["newest"], *sorted(n["versions"].items())) for n in world.news.values()}) == 1
        return world.news["t"]["newest"], world.news["t"]["versions"]

    for who in HELD:
        world.join(who)
    assert told() == (0, {})
    world.join("a1", a=3)
    world.join("a2", a=2)
    world.join("b", b=3)
    assert told() == (3, {"a": 2, "b": 3}), "half of replica a was behind"
    world.enter("b")
    assert told()[0] == 3, "a rollout that waits is no update"
    world.enter("t")
    assert told()[0] == 4
    world.say("t", "withdraw", entry=1, why="it changed its mind")
    assert told()[0] == 3
    for who in ("t", "a1", "a2"):
        world.enter(who)
    assert told() == (4, {"a": 2, "b": 3})
    epoch = world.last("t")["epoch"]
    for who in ("a1", "a2", "b"):
        world.say(who, "ready", epoch=epoch)
    world.say("b", "arrived", epoch=epoch)
    assert told() == (4, {"a": 2, "b": 4})
    world.say("t", "fail", epoch=epoch, kind="error", phase="send", rank=0, why="broken")
    for who in HELD:
        world.enter(who, 2)
    assert told() == (5, {"a": 2, "b": 4})
    assert world.last("t")["number"] == 5, "a number is never used twice"


def test_processes_of_another_plan_are_nobodys_loss() -> None:
    world = World()
    world.join("old", "b", digest="old")
    world.join("older", "a2", digest="old")
    for who in HELD:
        world.join(who)
        if who != "b":
            world.enter(who)
    world.enter("old", refusal="its owner rebound a buffer")
    world.say("older", "leave")
    assert [world.last(who)["op"] for who in ("t", "a1", "a2")] == ["registered"] * 3
    world.enter("b")
    assert world.last("t")["op"] == "begin"


def test_a_silent_process_is_lost_and_named() -> None:
    world = World()
    world.started()
    for _ in range(4):
        for who in ("t", "a1", "b"):
            world.say(who, "beat")
        world.pass_time(LOST_SECS / 3)
    for who in ("t", "a1", "b"):
        assert world.last(who) == {**world.last(who), "op": "failed", "kind": "lost", "rank": 2}
    world.say("a2", "beat")
    assert world.last("a2")["op"] == "expelled"


def test_a_process_without_connection_is_lost_unless_it_returns() -> None:
    world = World()
    world.started()
    world.rendezvous.reach(b"b", False, world.now)
    world.pass_time(GONE_SECS / 2)
    world.rendezvous.reach(b"b", True, world.now)
    world.rendezvous.reach(b"a1", False, world.now)
    world.pass_time(GONE_SECS * 0.9)
    assert world.last("t")["op"] == "begin"
    world.rendezvous.reach(b"a1", False, world.now)
    world.pass_time(GONE_SECS * 0.2)
    assert (world.last("t")["kind"], world.last("t")["rank"]) == ("lost", 1)


def test_at_the_deadline_the_rank_that_held_up_the_others_is_named() -> None:
    """b waits for a1, a1 waits for the trainer; the trainer is silent but for its beats."""
    world = World()
    epoch = world.at_the_deadline()
    world.say("b", "fail", epoch=epoch, kind="timeout", phase="finish", rank=1, why="rank 3 waited for rank 1")
    world.say("a1", "fail", epoch=epoch, kind="timeout", phase="send", rank=0, why="rank 1 waited for rank 0")
    assert world.ops("t")[-1] == "go"
    world.pass_time(GRACE_SECS * 1.1)
    assert {world.last(who)["why"] for who in HELD} == {"rank 1 waited for rank 0"}


@pytest.mark.parametrize("first", ["t", "a1"])
def test_who_waits_for_whom_is_said_of_both_where_two_wait_for_each_other(first: str) -> None:
    """A receiver that is slow: its sender cannot send, and it waits for what its sender has."""
    world = World()
    epoch = world.at_the_deadline()
    reports = {"t": ("send", 1, "rank 1 did not take 2 chunks"), "a1": ("send", 0, "rank 1 waited for rank 0")}
    world.say("b", "fail", epoch=epoch, kind="timeout", phase="finish", rank=1, why="rank 3 waited for rank 1")
    for who in sorted(reports, key=lambda who: who != first):
        phase, rank, why = reports[who]
        world.say(who, "fail", epoch=epoch, kind="timeout", phase=phase, rank=rank, why=why)
    world.pass_time(GRACE_SECS + 0.1)
    failed = world.last("a2")
    assert sorted(failed["why"].removesuffix(": they waited for each other").split(", and ")) == [
        "rank 1 did not take 2 chunks", "rank 1 waited for rank 0",
    ]  # fmt: skip
    assert failed["why"].endswith(": they waited for each other")


def test_who_says_that_it_is_late_itself_is_named() -> None:
    world = World()
    epoch = world.at_the_deadline()
    world.say("t", "fail", epoch=epoch, kind="timeout", phase="send", rank=1, why="rank 1 did not take 2 chunks")
    world.say("a1", "fail", epoch=epoch, kind="timeout", phase="finish", rank=1, why="rank 1 has not taken them yet")
    world.pass_time(GRACE_SECS + 0.1)
    assert world.last("a2")["why"] == "rank 1 has not taken them yet"


def test_reports_in_a_circle_end_too() -> None:
    world = World()
    epoch = world.at_the_deadline()
    world.say("b", "fail", epoch=epoch, kind="timeout", phase="finish", rank=1, why="3 waits for 1")
    world.say("a1", "fail", epoch=epoch, kind="timeout", phase="finish", rank=3, why="1 waits for 3")
    world.pass_time(GRACE_SECS * 1.1)
    assert world.last("t")["kind"] == "timeout"


@pytest.mark.parametrize("order", [("t", "a1"), ("a1", "t")], ids=str)
def test_a_circle_is_cut_at_the_rank_that_needed_nobody(order: tuple[str, str]) -> None:
    """The trainer misses maxima that a1 found by itself, and cannot tell a1 what it waits for."""
    world = World()
    epoch = world.at_the_deadline()
    reports = {"t": ("withheld", 1, "rank 0 waited for rank 1"), "a1": ("timeout", 0, "rank 1 waited for rank 0")}
    for who in order:
        kind, rank, why = reports[who]
        world.say(who, "fail", epoch=epoch, kind=kind, phase="send", rank=rank, why=why)
    world.pass_time(GRACE_SECS * 1.1)
    assert {world.last(who)["why"] for who in HELD} == {"rank 0 waited for rank 1"}


def test_a_replacement_waits_until_its_rank_is_free() -> None:
    world = World()
    world.started()
    world.join("new", "b")
    assert "registered" not in world.ops("new")
    world.say("b", "leave")
    assert world.last("new")["op"] == "registered"
    assert (world.last("t")["kind"], world.last("t")["rank"]) == ("lost", 3)


def test_a_refusal_is_told_once_to_everybody_who_enters() -> None:
    world = World()
    for who in HELD:
        world.join(who)
    world.enter("a1")
    world.enter("t", refusal="no")
    world.enter("b")
    assert [world.last(who)["op"] for who in ("a1", "b")] == ["failed", "failed"]
    for who in HELD:
        world.enter(who, entry=2)
    assert {world.last(who)["op"] for who in HELD} == {"begin"}


@pytest.mark.parametrize("again", [None, "a1", "t"], ids=str)
def test_two_plans_are_told_once_to_everybody_who_enters_later(again: str | None) -> None:
    """Also where one of those who were told first waits again."""
    world = World()
    for who in HELD:
        world.join(who, digest="other" if who == "t" else "d")
    world.enter("t")
    world.enter("a1")
    assert [(world.last(who)["kind"], world.last(who)["rank"]) for who in ("t", "a1")] == [("digest", 1), ("digest", 0)]
    if again == "a1":
        world.enter("a1", entry=2)
    elif again == "t":
        world.enter("t", entry=2)
    world.enter("b")
    assert (world.last("b")["kind"], world.last("b")["rank"]) == ("digest", 0)
    world.join("t")
    for who in HELD:
        world.enter(who, entry=3)
    assert {world.last(who)["op"] for who in HELD} == {"begin"}


def test_a_plan_that_nobody_holds_any_more_fails_nobody() -> None:
    world = World()
    for who in HELD:
        world.join(who, digest="other" if who == "t" else "d")
    world.enter("t")
    world.enter("a1")
    world.join("t")
    for who in HELD:
        world.enter(who, entry=2)
    assert world.ops("b") == ["welcome", "registered", "begin"]


def test_who_withdraws_ends_an_attempt_that_has_begun_and_no_later_one() -> None:
    world = World()
    assert world.started() == 1
    world.say("b", "withdraw", entry=1, why="interrupted")
    assert {world.last(who)["kind"] for who in HELD} == {"refused"}
    for who in HELD:
        world.enter(who, entry=2)
    world.say("b", "withdraw", entry=1, why="late")
    assert {world.last(who)["op"] for who in HELD} == {"begin"}


@dataclasses.dataclass
class Program:
    """What a process believes, in the random test."""

    entry: int = 0
    waits: bool = False
    epoch: int = 0
    number: int = 0
    version: int = 0


@pytest.mark.parametrize("seed", range(60))
def test_random_schedules_keep_the_promises(seed: int) -> None:
    """Whatever is lost, repeated or delayed: a replica completes an epoch only if all its ranks arrived in it, epochs
    are never used twice, numbers rise, and every process that waits is answered in bounded time."""
    rng = random.Random(seed)
    world = World()
    programs = {who: Program() for who in HELD}
    arrived: dict[int, set[str]] = {}
    begun: list[tuple[int, int]] = []
    taken = dict.fromkeys(HELD, 0)
    for who in HELD:
        world.join(who)
    for _ in range(400):
        who = rng.choice(list(HELD))
        me = programs[who]
        for header in world.heard[who][taken[who] :]:
            if header["op"] == "begin" and (header["epoch"], header["number"]) not in begun:
                begun.append((header["epoch"], header["number"]))
            if rng.random() < 0.05:
                continue  # lost
            if header["op"] == "begin" and header["entry"] == me.entry and me.waits:
                me.epoch, me.number, me.waits = header["epoch"], header["number"], False
            elif header["op"] == "failed" and header["entry"] == me.entry:
                me.epoch, me.waits = 0, False
            elif header["op"] == "complete":
                for replica in header["replicas"]:
                    holders = {name for name, ranks in HELD.items() if set(ranks) & set(REPLICAS[replica])}
                    assert holders <= arrived[header["epoch"]]
                    if header["epoch"] == me.epoch and who in holders:
                        assert header["number"] == me.number > me.version
                        me.version, me.epoch = me.number, 0
            elif header["op"] == "expelled":
                world.join(who)
                me.epoch, me.waits = 0, False
            elif header["op"] == "done":
                me.epoch = 0
        taken[who] = len(world.heard[who])
        match rng.choice(["enter", "enter", "enter", "say", "say", "say", "time", "old", "fail", "beat"]):
            case "enter" if not me.waits and not me.epoch:
                me.entry, me.waits = me.entry + 1, True
                world.enter(who, me.entry, wait_secs=4.0)
            case "say" if me.epoch:
                op = rng.choice(["ready", "arrived"]) if who != "t" else "ready"
                if op == "arrived":
                    arrived.setdefault(me.epoch, set()).add(who)
                world.say(who, op, epoch=me.epoch)
            case "old" if begun:
                world.say(who, "ready", epoch=rng.choice(begun)[0] - 1)
            case "fail" if me.epoch and rng.random() < 0.1:
                world.say(who, "fail", epoch=me.epoch, kind="error", phase="send", rank=0, why="x")
            case "beat":
                world.say(who, "beat")
            case "time":
                world.pass_time(rng.choice([0.01, 0.1, 0.1, 1.0]))
    world.pass_time(DEADLINE_SECS + GRACE_SECS + LOST_SECS)
    world.pass_time(0.1)
    assert world.rendezvous.attempt is None
    assert not any(member.entry for member in world.rendezvous.members.values())
    assert begun, "a schedule without an update shows nothing"
    assert len({epoch for epoch, _ in begun}) == len(begun), "an epoch is never used twice"
    numbers = [number for _, number in sorted(begun)]
    assert numbers == sorted(numbers)


def test_headers_that_are_not_what_they_should_be_are_refused() -> None:
    seal = Seal("x")
    good = {"op": "beat", "session": 1, "seq": 1}
    assert seal.open(seal.close(good), TO_RENDEZVOUS) == good
    for change in (
        {"session": True},
        {"session": 1.5},
        {"session": -1},
        {"session": 1 << 63},
        {"seq": None},
        {"op": 3},
    ):
        with pytest.raises(Refused):
            seal.open(seal.close({**good, **change}), TO_RENDEZVOUS)
    frames = seal.close(good)
    for frame, flip in ((0, 0), (0, 15), (1, 0), (1, -1)):
        broken = [bytearray(f) for f in frames]
        broken[frame][flip] ^= 1
        with pytest.raises(Refused) as refused:
            seal.open(broken, TO_RENDEZVOUS)
        assert refused.value.is_foreign
    with pytest.raises(Refused) as refused:
        Seal("y").open(frames, TO_RENDEZVOUS)
    assert refused.value.is_foreign
