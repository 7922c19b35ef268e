"""What the rendezvous knows of processes and of the attempt they are in."""

from __future__ import annotations

import dataclasses

MAX_VERSION = (1 << 31) - 1
"""Larger than any number that an update can have."""
ENDPOINTS = ("tcp://", "ipc://", "{")
"""How endpoints begin: those of sockets, and those of processes with GPUs, which are JSON."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Registration:
    """What a process said about its part in a plan.

    Attributes:
      held: Plan-wide ranks.
      replicas: All replicas of the plan: their ranks.
      endpoint: Where it takes payload; empty if it takes none.
      versions: Of the replicas it holds a part of; rise as they become complete.
      newest: The largest number of an update that it knows, of another rendezvous perhaps.
      confirms: Whether it says *arrived* once what it sends is known to be right, and nothing is complete before: its
        kernels write into others' memory themselves.
    """

    digest: str
    source_ranks: int
    target_ranks: int
    held: frozenset[int]
    replicas: dict[str, list[int]]
    endpoint: str
    versions: dict[str, int]
    newest: int
    confirms: bool

    @property
    def count(self) -> int:
        """How many ranks its plan has, as it says."""
        return self.source_ranks + self.target_ranks

    def fault(self) -> str | None:
        """Why no plan can be so; None if one can."""
        dealt = sorted(rank for ranks in self.replicas.values() for rank in ranks)
        if len(dealt) != self.target_ranks or dealt != list(range(self.source_ranks, self.count)):
            return f"its replicas hold {len(dealt)} ranks, but each of {self.target_ranks} rollout ranks is needed once"
        if max(self.held) >= self.count:
            return f"it holds rank {max(self.held)}, but its plan has the ranks 0 to {self.count - 1}"
        for name in self.versions:
            if self.held.isdisjoint(self.replicas.get(name, ())):
                return f"it has a version of replica {name!r}, of which it holds no rank"
        if (most := max(self.newest, *self.versions.values(), 0)) > MAX_VERSION:
            return f"it knows of update {most}, but no pool has had so many"
        if self.endpoint and not (self.endpoint.startswith(ENDPOINTS) and self.endpoint.isprintable()):
            return f"it takes payload at {self.endpoint!r}, which no transport reaches"
        return None

    def is_of_plan_of(self, other: Registration) -> bool:
        """Whether both say the same of one plan."""
        mine, theirs = ((r.source_ranks, r.target_ranks, r.replicas) for r in (self, other))
        return mine == theirs

    @property
    def is_source(self) -> bool:
        """Whether it holds a trainer rank."""
        return any(rank < self.source_ranks for rank in self.held)

    @property
    def is_target(self) -> bool:
        """Whether it holds a rollout rank."""
        return any(rank >= self.source_ranks for rank in self.held)


@dataclasses.dataclass(slots=True, kw_only=True)
class Entry:
    """A process waits for an attempt to begin.

    Attributes:
      number: The process' own count of its entries; comes back in *begin* and *failed*.
      wait_secs, until: How long it waits, and when it gives up, seconds.
    """

    number: int
    wait_secs: float
    until: float


@dataclasses.dataclass(slots=True)
class Member:
    """A process.

    Attributes:
      heard: When it said something last, seconds.
      cut_off: Since when it has no connection; None while it has one.
      registration: None before it has registered.
      claim: A registration that waits for ranks which another process holds, and until when.
      entry: None when it does not wait for an attempt.
      gave_up: Its last entry came to nothing: it waited too long for others.
      refusal: Why it voted no last, until it enters again.
      told: Who has been told of that refusal.
      mismatch: The other plan that its last entry met, until it enters or registers again, and who has been told.
      news: What it has been told last about updates and versions.
    """

    name: str
    heard: float
    cut_off: float | None = None
    registration: Registration | None = None
    claim: tuple[Registration, float] | None = None
    entry: Entry | None = None
    gave_up: bool = False
    refusal: str | None = None
    told: set[bytes] = dataclasses.field(default_factory=set)
    mismatch: tuple[Registration, set[bytes]] | None = None
    news: tuple[str, int, dict[str, int]] | None = None


@dataclasses.dataclass(slots=True, kw_only=True)
class Attempt:
    """One try at an update.

    Attributes:
      entries: Entry number of each process that takes part.
      registrations: What they were when it began.
      until: When the rendezvous ends it, seconds.
      ready, arrived: Processes that said so.
      complete: Replicas that hold all of it.
      has_gone: Whether the trainers were told to send.
      reports: For whom processes still waited at the deadline: phase, rank and reason.
      sure: Processes that reported a rank which needed nobody for what it did not send.
    """

    epoch: int
    number: int
    entries: dict[bytes, int]
    registrations: dict[bytes, Registration]
    until: float
    ready: set[bytes] = dataclasses.field(default_factory=set)
    arrived: set[bytes] = dataclasses.field(default_factory=set)
    complete: set[str] = dataclasses.field(default_factory=set)
    has_gone: bool = False
    reports: dict[bytes, tuple[str, int, str]] = dataclasses.field(default_factory=dict)
    sure: set[bytes] = dataclasses.field(default_factory=set)

    @property
    def targets(self) -> set[bytes]:
        """Processes that hold rollout ranks."""
        return {who for who, registration in self.registrations.items() if registration.is_target}

    @property
    def replicas(self) -> dict[str, list[int]]:
        """Ranks of each replica."""
        return next(iter(self.registrations.values())).replicas

    def holders(self, replica: str) -> set[bytes]:
        """Processes that hold a rank of a replica."""
        ranks = set(self.replicas[replica])
        return {who for who, registration in self.registrations.items() if registration.held & ranks}
