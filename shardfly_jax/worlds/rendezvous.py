"""The rendezvous as a state machine: messages and the time in, messages out. No sockets, no threads, no clock.

It knows who holds which rank, forms attempts when every rank has entered, and alone decides how each of them ends. See
`docs/design/worlds.md`.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging

from shardfly_jax.worlds.members import Attempt, Entry, Member, Registration
from shardfly_jax.worlds.wire import PROTOCOL, Header

log = logging.getLogger("shardfly_jax.worlds")

GONE_SECS = 1.0
"""For how long a process may be without connection before it counts as dead; connections are renewed within it."""
GRACE_SECS = 1.0
"""How long after the deadline it waits for somebody to report whom he waits for, before it decides by itself."""

Out = list[tuple[bytes, Header]]
"""Messages to send, with the address of their receiver."""


class Rendezvous:
    """Forms attempts and decides their ends.

    Args:
      session: Random; tells this rendezvous from every other.
      deadline_secs: From *begin* until an attempt's processes give up.
      lost_secs: Silence after which a process is lost.
    """

    def __init__(self, *, session: int, deadline_secs: float, lost_secs: float):
        self.session, self.deadline_secs, self.lost_secs = session, deadline_secs, lost_secs
        self.members: dict[bytes, Member] = {}
        self.attempt: Attempt | None = None
        self._epoch = 0
        self._newest = 0  # number of the update that began last, or that some replica holds
        self._out: Out = []

    def handle(self, who: bytes, header: Header, now: float) -> Out:
        """Acts on a checked message of `who` at time `now`, in seconds; returns what to send."""
        op = header["op"]
        member = self.members.get(who)
        if op == "hello":
            self._hello(who, header, now)
        elif header["session"] != self.session:
            self._say(who, "expelled", why="its messages are of another session")
        elif member is None:
            if op != "leave":
                self._say(who, "expelled", why="it was lost: silent or without connection for too long")
        else:
            member.heard = now
            if op == "register":
                self._register(who, member, header, now)
            elif op == "enter":
                self._enter(who, member, header, now)
            elif op == "withdraw":
                self._withdraw(who, member, header["entry"], header["why"])
            elif op == "leave":
                self._drop(who, "left")
            elif op != "beat":
                self._during(who, header)
        self._begin_if_all_entered(now)
        return self._taken()

    def reach(self, who: bytes, is_connected: bool, now: float) -> None:
        """Notes whether there is a connection to a process."""
        member = self.members.get(who)
        if member is not None:
            member.cut_off = None if is_connected else (now if member.cut_off is None else member.cut_off)

    def pardon(self, now: float) -> None:
        """Lets nobody count as silent or cut off until now: the rendezvous itself did not listen."""
        for member in self.members.values():
            member.heard = now
            member.cut_off = None if member.cut_off is None else now

    def tick(self, now: float) -> Out:
        """Looks for silence and deadlines; returns what to send."""
        for who, member in list(self.members.items()):
            if now - member.heard > self.lost_secs:
                self._drop(who, f"is lost: nothing was heard of it for {self.lost_secs:g} s")
            elif member.cut_off is not None and now - member.cut_off > min(GONE_SECS, self.lost_secs):
                self._drop(who, "is lost: its connection has ended")
        for who, member in list(self.members.items()):
            if member.claim is not None and now > member.claim[1]:
                self._refuse_claim(who, member)
            if member.entry is not None and now > member.entry.until and member.registration is not None:
                rank = self._awaited(member.registration)
                member.gave_up = True
                why = f"{self._describe(rank)} did not take part within {member.entry.wait_secs:g} s"
                is_held = any(m.registration and rank in m.registration.held for m in self.members.values())
                self._fail_entry(who, member, "timeout" if is_held else "absent", rank, why)
        attempt = self.attempt
        if attempt is not None and now > attempt.until:
            self._time_out(attempt)
        return self._taken()

    def _time_out(self, attempt: Attempt) -> None:
        """Ends an attempt at its deadline, naming who held it up: others may have waited for who waited for them.

        Some may have waited for each other, and some say of themselves that they are late.
        """
        culprit = None
        seen: dict[bytes, str] = {}
        who = next(iter(attempt.reports), None)
        while who in attempt.reports:
            if who in seen:
                whys = list(seen.values())[list(seen).index(who) :]
                assert culprit is not None
                if len(whys) > 1:  # else it says so of itself
                    culprit = (*culprit[:2], f"{', and '.join(whys)}: they waited for each other")
                break
            culprit = attempt.reports[who]
            seen[who] = culprit[2]
            if who in attempt.sure:  # that rank may wait in turn, for what it would be told once it had sent
                break
            who = next((w for w, r in attempt.registrations.items() if culprit[1] in r.held), b"")
        if culprit is not None:
            self._end("timeout", *culprit)
        else:
            waiting = attempt.targets - (attempt.arrived if attempt.has_gone else attempt.ready)
            rank = min((min(attempt.registrations[who].held) for who in waiting), default=0)
            phase = "finish" if attempt.has_gone else "ready"
            self._end("timeout", phase, rank, f"{self._describe(rank)} did not get through {phase}")

    # What processes say

    def _hello(self, who: bytes, header: Header, now: float) -> None:
        if header["protocol"] != PROTOCOL:
            self._say(who, "refused", why=f"it speaks protocol {header['protocol']}, but the rendezvous {PROTOCOL}")
            return
        self.members[who] = Member(header["name"], now)
        self._say(who, "welcome", deadline_secs=self.deadline_secs, lost_secs=self.lost_secs)

    def _register(self, who: bytes, member: Member, header: Header, now: float) -> None:
        names = [field.name for field in dataclasses.fields(Registration)]
        given = {name: header[name] for name in names} | {"held": frozenset(header["held"])}
        member.registration = None
        member.entry = None
        member.mismatch = None
        wanted = Registration(**given)
        if (fault := wanted.fault() or self._contradiction(who, wanted)) is not None:
            log.warning("process %r registers nonsense: %s; refused", member.name, fault)
            self._say(who, "refused", why=f"process {member.name!r} is refused: {fault}. Run the same "
                      "version of this library in every process")  # fmt: skip
            return
        member.claim = (wanted, now + self.deadline_secs + self.lost_secs)
        self._settle_claims()

    def _contradiction(self, who: bytes, wanted: Registration) -> str | None:
        """How a registration contradicts what another process says of the same plan; None if it does not."""
        for other, member in self.members.items():
            theirs = member.registration
            if other != who and theirs is not None and theirs.digest == wanted.digest:
                return None if wanted.is_of_plan_of(theirs) else f"process {member.name!r} has other ranks for its plan"
        return None

    def _enter(self, who: bytes, member: Member, header: Header, now: float) -> None:
        member.mismatch = None
        if member.registration is None:
            self._say(who, "refused", why="it entered an update before it had registered")
            return
        if header["refusal"] is not None:
            self._withdraw(who, member, header["entry"], header["refusal"])
            member.refusal, member.told = header["refusal"], set()
        else:
            member.entry = Entry(number=header["entry"], wait_secs=header["wait_secs"], until=now + header["wait_secs"])
            member.refusal, member.gave_up = None, False
        self._vote()

    def _withdraw(self, who: bytes, member: Member, entry: int, why: str) -> None:
        """A process no longer waits for an attempt; one that has begun with it ends."""
        member.entry = None
        if self.attempt is not None and self.attempt.entries.get(who) == entry and member.registration is not None:
            rank = min(member.registration.held)
            self._end("refused", "ready", rank, f"rank {rank} refused: {why}")

    def _during(self, who: bytes, header: Header) -> None:
        attempt = self.attempt
        if attempt is None or header["epoch"] != attempt.epoch or who not in attempt.entries:
            return  # of an attempt that is over
        match header["op"]:
            case "ready":
                attempt.ready.add(who)
                if not attempt.has_gone and attempt.ready >= attempt.targets:
                    attempt.has_gone = True
                    self._tell_all(attempt, "go", epoch=attempt.epoch)
            case "arrived" if attempt.has_gone:
                attempt.arrived.add(who)
                self._complete(attempt)
            case "fail" if header["kind"] in ("timeout", "withheld"):
                attempt.reports[who] = (header["phase"], header["rank"], header["why"])
                if header["kind"] == "withheld":
                    attempt.sure.add(who)
            case "fail":
                self._end(header["kind"], header["phase"], header["rank"], header["why"])

    def _complete(self, attempt: Attempt) -> None:
        if any(r.confirms and who not in attempt.arrived for who, r in attempt.registrations.items()):
            return
        new = sorted(
            name
            for name in attempt.replicas
            if name not in attempt.complete and attempt.holders(name) <= attempt.arrived
        )
        if not new:
            return
        attempt.complete |= set(new)
        for who, registration in attempt.registrations.items():
            registration.versions.update({name: attempt.number for name in new if who in attempt.holders(name)})
        self._tell_all(attempt, "complete", epoch=attempt.epoch, number=attempt.number, replicas=new)
        if attempt.complete >= set(attempt.replicas):
            self._tell_all(attempt, "done", epoch=attempt.epoch)
            self.attempt = None

    # Forming an attempt

    def _settle_claims(self) -> None:
        """Registers every process whose ranks nobody else holds in the same plan."""
        for who, member in self.members.items():
            if member.claim is None:
                continue
            registration, _ = member.claim
            if self._rival(who, registration) is None:
                member.registration, member.claim = registration, None
                self._newest = max(self._newest, registration.newest, *registration.versions.values())
                self._say(who, "registered")

    def _rival(self, who: bytes, wanted: Registration) -> tuple[int, Member] | None:
        for other, member in self.members.items():
            if other != who and member.registration is not None and member.registration.digest == wanted.digest:
                shared = member.registration.held & wanted.held
                if shared:
                    return min(shared), member
        return None

    def _refuse_claim(self, who: bytes, member: Member) -> None:
        assert member.claim is not None
        rival = self._rival(who, member.claim[0])
        member.claim = None
        if rival is not None:
            rank, other = rival
            self._say(who, "refused", why=f"rank {rank} is held by process {other.name!r}, which is alive. Give each "
                      "rank to one process, or end that process first")  # fmt: skip

    def _vote(self) -> None:
        """Ends the gathering for those who have entered, where somebody refuses or plans differ."""
        for other in self.members.values():
            if other.refusal is None or other.registration is None:
                continue
            for who, member in self.members.items():
                if self._waits_in(member, other.registration.digest) and who not in other.told:
                    other.told.add(who)
                    rank = min(other.registration.held)
                    self._fail_entry(who, member, "refused", rank, f"rank {rank} refused: {other.refusal}")
        plans = {
            w: m.registration for w, m in self.members.items() if m.entry is not None and m.registration is not None
        }
        told = set(plans)
        for who, mine in plans.items():
            member = self.members[who]
            theirs = next((plan for plan in plans.values() if plan.digest != mine.digest), None)
            if theirs is not None:
                member.mismatch = theirs, told
                self._fail_of_other_plan(who, member, mine, theirs)
            else:
                self._tell_of_mismatch(who, member, mine)

    def _tell_of_mismatch(self, who: bytes, member: Member, mine: Registration) -> None:
        """Ends the wait of who comes after two plans have met, one of them its own and the other still registered."""
        living = {m.registration.digest: m.registration for m in self.members.values() if m.registration is not None}
        for other in self.members.values():
            if other.mismatch is None or other.registration is None:
                continue
            (theirs, told), plan = other.mismatch, other.registration
            if mine.digest == theirs.digest:
                theirs, plan = plan, theirs
            if mine.digest == plan.digest and theirs.digest in living and who not in told:
                told.add(who)
                self._fail_of_other_plan(who, member, mine, living[theirs.digest])
                return

    def _fail_of_other_plan(self, who: bytes, member: Member, mine: Registration, theirs: Registration) -> None:
        rank = min(theirs.held)
        why = f"rank {rank} holds plan {theirs.digest[:12]}, but this process plan {mine.digest[:12]}"
        self._fail_entry(who, member, "digest", rank, why)

    @staticmethod
    def _waits_in(member: Member, digest: str) -> bool:
        return member.entry is not None and member.registration is not None and member.registration.digest == digest

    def _entered_ranks(self, digest: str) -> set[int]:
        return {
            rank
            for member in self.members.values()
            if self._waits_in(member, digest) and member.registration is not None
            for rank in member.registration.held
        }

    def _awaited(self, registration: Registration) -> int:
        """The first rank of a plan that has not entered; one that has waited for others in vain only if all have."""
        entered = self._entered_ranks(registration.digest)
        patient = {r for m in self.members.values() if m.gave_up and m.registration for r in m.registration.held}
        absent = (rank for rank in range(registration.count) if rank not in entered)  # of a count that may be nonsense
        first = next(absent)
        return next((rank for rank in itertools.chain([first], absent) if rank not in patient), first)

    def _begin_if_all_entered(self, now: float) -> None:
        entered = {w: m for w, m in self.members.items() if m.entry is not None and m.registration is not None}
        first = next(iter(entered.values()), None)
        if first is None or first.registration is None or len({m.registration.digest for m in entered.values()}) > 1:  # type: ignore[union-attr]
            return
        if len(self._entered_ranks(first.registration.digest)) < first.registration.count:
            return
        if self.attempt is not None:  # all of its processes have given it up
            self._end("timeout", "finish", 0, "its processes have begun another update")
        self._epoch += 1
        self._newest += 1
        attempt = Attempt(
            epoch=self._epoch,
            number=self._newest,
            entries={who: member.entry.number for who, member in entered.items() if member.entry},
            registrations={who: member.registration for who, member in entered.items() if member.registration},
            until=now + self.deadline_secs + GRACE_SECS,
        )
        self.attempt = attempt
        endpoints = {str(rank): r.endpoint for r in attempt.registrations.values() for rank in sorted(r.held)}
        for who, member in entered.items():
            member.entry = None
            self._say(
                who, "begin", epoch=attempt.epoch, number=attempt.number, entry=attempt.entries[who],
                endpoints=endpoints,
            )  # fmt: skip

    # Ends

    def _drop(self, who: bytes, why: str) -> None:
        """Forgets a process; what cannot go on without it ends."""
        member = self.members.pop(who)
        log.log(logging.INFO if why == "left" else logging.WARNING, "process %r %s", member.name, why)
        registration = member.registration
        if registration is not None and registration.held:
            rank = min(registration.held)
            text = f"rank {rank} (process {member.name!r}) {why}"
            attempt = self.attempt
            if attempt is not None and who in attempt.entries:
                phase = ("finish" if registration.is_target else "send") if attempt.has_gone else "ready"
                self._end("lost", phase, rank, text)
            for other, waiting in self.members.items():
                if self._waits_in(waiting, registration.digest):  # a process of another plan is nobody's loss
                    self._fail_entry(other, waiting, "lost", rank, text)
        self._settle_claims()

    def _fail_entry(self, who: bytes, member: Member, kind: str, rank: int, why: str) -> None:
        assert member.entry is not None
        number, member.entry = member.entry.number, None
        self._say(who, "failed", epoch=0, entry=number, kind=kind, phase="ready", rank=rank, why=why)

    def _end(self, kind: str, phase: str, rank: int, why: str) -> None:
        """Ends the attempt as failed; replicas that are complete stay so."""
        attempt, self.attempt = self.attempt, None
        assert attempt is not None
        for who, number in attempt.entries.items():
            self._say(who, "failed", epoch=attempt.epoch, entry=number, kind=kind, phase=phase, rank=rank, why=why)

    def _describe(self, rank: int) -> str:
        for member in self.members.values():
            if member.registration is not None and rank in member.registration.held:
                return f"rank {rank} (process {member.name!r})"
        return f"rank {rank}, which no living process holds,"

    def _tell_all(self, attempt: Attempt, op: str, **fields: object) -> None:
        for who in attempt.entries:
            self._say(who, op, **fields)

    def _say(self, who: bytes, op: str, **fields: object) -> None:
        self._out.append((who, {"op": op, "session": self.session, **fields}))

    def _news(self, digest: str) -> tuple[str, int, dict[str, int]]:
        """About a plan: its digest, the number of the newest update and the replicas' versions.

        An update counts as soon as a trainer waits with it, so that a rollout can see that and come.
        """
        members = [m for m in self.members.values() if m.registration is not None and m.registration.digest == digest]
        offered = any(m.entry is not None and m.registration is not None and m.registration.is_source for m in members)
        versions: dict[str, int] = {}
        for member in members:
            for name, version in member.registration.versions.items() if member.registration is not None else ():
                versions[name] = min(version, versions.get(name, version))
        return digest, self._newest + offered, versions

    def _taken(self) -> Out:
        """What to send; news go first, so that whoever hears of an outcome knows the versions already."""
        out, self._out = self._out, []
        news = {
            digest: self._news(digest)
            for digest in {m.registration.digest for m in self.members.values() if m.registration}
        }
        for who, member in self.members.items():
            if member.registration is not None and member.news != news[member.registration.digest]:
                member.news = digest, newest, versions = news[member.registration.digest]
                self._say(who, "news", digest=digest, newest=newest, versions=versions)
        out, self._out = self._out + out, []
        return out
