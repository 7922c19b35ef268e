"""A process' part in a registered plan: its votes and its attempts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import jax
import numpy as np

from shardfly_jax.binding import Binding, bind, check_addresses, ready_shards
from shardfly_jax.executors.choice import check_executor
from shardfly_jax.executors.memory import Key, host_bytes
from shardfly_jax.sharding.errors import ParamsMismatch, RegistrationError, ShardflyError, SyncTimeout, WorldError
from shardfly_jax.transports.sockets import Incoming, Outgoing
from shardfly_jax.worlds.attempt import Run, failure
from shardfly_jax.worlds.closing import close_all
from shardfly_jax.worlds.rendezvous import GRACE_SECS
from shardfly_jax.worlds.steps import steps_of
from shardfly_jax.worlds.wire import Header, is_secs

if TYPE_CHECKING:
    from shardfly_jax.session import Session
    from shardfly_jax.worlds.world import World


def trainer_devices(session: Session) -> dict[int, jax.Device]:
    """Devices of the trainer ranks of this process: as planned, or else in turn."""
    plan, local = session.plan, jax.local_devices()
    ranks = [rank for rank in sorted(session.held) if rank < plan.source_ranks]
    known = plan.source.devices if plan.source is not None else [None] * plan.source_ranks
    return {rank: known[rank] or local[turn % len(local)] for turn, rank in enumerate(ranks)}


class Moving(Protocol):
    """One attempt in this process.

    Attributes:
      complete: The replicas that hold all of the update, as the rendezvous said.
    """

    complete: set[str]

    def run(self) -> None:
        """Goes on until the outcome is known."""


class Part:
    """What a process does for the ranks of a plan that it holds. Made by `register`.

    Args:
      session: With the buffers of its rollout ranks.
      world: Where the other ranks are found.
      transport, passed_over: See below.

    Raises:
      RegistrationError: The world listens nowhere for payload.
      WorldError: Another living process holds one of its ranks, or where the world listens it can not.

    Attributes:
      transport: How payload travels.
      passed_over: Why the faster transports are not used, by name.
    """

    _confirms = False
    """See `Registration`."""

    def __init__(self, session: Session, world: World, transport: str, passed_over: Mapping[str, str]):
        self.session, self.world, self.held = session, world, session.held
        self.transport, self.passed_over = transport, passed_over
        plan = session.plan
        self.sends = min(self.held) < plan.source_ranks
        self.own = frozenset(replica.name for replica in plan.replicas if self.held & set(replica.ranks))
        self._entry = 0
        # the last attempt that ended well here, and when it must be over for all
        self._through: tuple[int, float] | None = None
        self._open()
        try:
            world.hold(self)
        except BaseException:
            self._close()
            raise
        try:
            self._listen()  # now that the plan before does not, perhaps at the same address
            self._register()
        except BaseException:
            world.release(self)
            raise

    def _open(self) -> None:
        """Prepares to carry payload."""
        session, world, plan = self.session, self.world, self.session.plan
        check_executor(session.choice, self.transport, "portable")
        self._steps = steps_of(plan, self.held, session.buffers)
        self._targets = {key: host_bytes(shard.address, shard.nbytes) for key, shard in session.buffers.items()}
        self._outgoing = Outgoing(world.context, world.seal)
        self._incoming: Incoming | None = None
        receiving, what = sorted(rank for rank in self.held if rank >= plan.source_ranks), "weights"
        if not receiving:
            receiving, what = self._steps.trainers_that_receive, "the maxima of blocks that they share with others"
        self._receives = bool(receiving)
        if receiving and world.listen is None:
            raise RegistrationError(
                f"registration: the ranks {receiving} receive {what}, but this process listens nowhere. Say where: "
                "sf.connect(..., listen='tcp://127.0.0.1:0')."
            )

    def _listen(self) -> None:
        """Begins to take payload."""
        world = self.world
        if self._receives and world.listen is not None:
            self._incoming = Incoming(world.context, world.listen, world.seal, self._steps.chunk_nbytes)

    def settle(self) -> None:
        """Waits until the attempt that this process is through with is over for the others too.

        Until then what it forwarded may be on its way, and its leaving would be a loss to them.
        """
        if self._through is not None:
            epoch, until = self._through
            self.world.link.wait_for_end(epoch, until - time.monotonic())

    def close(self) -> None:
        """The plan cannot be updated any more. An update that is pending ends first."""
        close_all(self.settle, self.session.end_pending, self._close)

    def _close(self) -> None:
        close_all(self._outgoing.reset, *([self._incoming.close] if self._incoming is not None else ()))

    @property
    def _endpoint(self) -> str:
        """Where others find what this process takes; empty if it takes nothing."""
        return self._incoming.endpoint if self._incoming is not None else ""

    def _register(self) -> None:
        plan, link = self.session.plan, self.world.link
        link.say(
            "register",
            digest=plan.digest,
            source_ranks=plan.source_ranks,
            target_ranks=plan.target_ranks,
            held=sorted(self.held),
            replicas={replica.name: list(replica.ranks) for replica in plan.replicas},
            endpoint=self._endpoint,
            versions={name: self.session.versions[name] for name in sorted(self.own)},
            newest=self.session.newest,
            confirms=self._confirms,
        )
        answer = self._next({"registered", "refused"}, link.deadline_secs + 2 * link.lost_secs)
        if answer is None:
            raise WorldError("registration: the rendezvous did not answer in time. Connect anew.")
        if answer["op"] == "refused":
            raise WorldError(f"registration: {answer['why']}.")

    def _next(self, ops: set[str], secs: float) -> Header | None:
        """The next message of some kinds; others are of the past and dropped. None if none comes."""
        until = time.monotonic() + secs
        while True:
            header = self.world.link.wait(max(0.0, until - time.monotonic()))
            if header is None:
                return None
            if header["op"] in ops:
                return header

    @property
    def _news(self) -> Header | None:
        """What the rendezvous has said last about this plan."""
        news = self.world.link.news
        return news if news is not None and news["digest"] == self.session.digest else None

    @property
    def newest(self) -> int:
        """Number of the update that began last or is waited with."""
        return 0 if self._news is None else self._news["newest"]

    def versions_of_others(self) -> dict[str, int]:
        """Of replicas that other processes hold; of its own only an attempt in progress may publish."""
        news = self._news
        return {} if news is None else {name: n for name, n in news["versions"].items() if name not in self.own}

    # An update

    def prepare(
        self,
        check: Callable[[], None],
        params: Any,
        wait_secs: float | None,
        progress: Callable[[int], None] | None,
        stream: Any = None,
    ) -> Callable[[], None]:
        """Checks the arguments of one update; within `Session.updating`. Where they are wrong the others are told.

        Args:
          check: Raises if the call itself is wrong.
          params: The trainer's; None on a process without trainer ranks.
          wait_secs: How long to wait for everybody else to take part; None for the world's deadline.
          progress: Called with bytes written to this process' buffers.
          stream: See `receive`.

        Returns:
          Takes part in it.
        """
        session, link = self.session, self.world.link
        patience = wait_secs if wait_secs is not None and is_secs(wait_secs) else link.deadline_secs
        self.world.check(self)
        self._entry += 1

        def refuse(error: Exception) -> None:
            why = f"{type(error).__name__}: {error}"[:2000]
            link.say("enter", entry=self._entry, wait_secs=patience, refusal=why)

        try:
            check()
            session.check_buffers()
            leaves, binding = bind(params, session) if self.sends else ([], None)
        except Exception as error:
            refuse(error)
            raise

        def take_part() -> None:
            try:
                memory, kept = self._sources(leaves, binding) if binding is not None else ({}, [])
            except Exception as error:
                session.binding = None  # it may be where these params are that was wrong
                refuse(error)
                raise
            finally:
                leaves.clear()  # an error that is kept would keep them
            self._take_part(memory, patience, None if progress is None else session.guarded(progress), stream)
            kept.clear()  # not before

        return take_part

    def _sources(self, leaves: list[Any], binding: Binding) -> tuple[dict[Key, np.ndarray], list[Any]]:
        """The bytes of this process' source shards, once they are computed, and what keeps them."""
        arrays, kept = ready_shards(leaves, binding, keep=True)
        if other := sorted({str(d) for array in arrays.values() for d in array.devices() if d.platform != "cpu"}):
            raise ParamsMismatch(
                f"params: they lie on {', '.join(other)}, but zmq reads host memory only. Copy them to a CPU device."
            )
        check_addresses(self.session, binding, arrays)
        memory = {key: host_bytes(arrays.address(key), array.nbytes) for key, array in arrays.items()}
        return memory, [arrays, kept]

    def _take_part(
        self,
        sources: dict[Key, np.ndarray],
        wait_secs: float,
        progress: Callable[[int], None] | None,
        stream: Any,
    ) -> None:
        session, link = self.session, self.world.link
        begin = self._enter(wait_secs)
        until = time.monotonic() + link.deadline_secs + 2 * (GRACE_SECS + link.lost_secs)
        run = self._run_of(begin, sources, progress if self.own else None)
        if self.own:
            try:
                if stream is not None:
                    self._wait_for_stream(stream)
                session.wait_for_readers()
            except BaseException as error:
                self._withdraw(f"{type(error).__name__} while it waited for readers")
                raise
        session.begin(begin["number"], self.own)
        try:
            run.run()
            self._through = begin["epoch"], until
        except BaseException as error:
            session.poison(f"an update failed half way: {type(error).__name__}: {error}", self.own)
            raise
        finally:
            session.publish(self.own & run.complete, begin["number"])

    def _wait_for_stream(self, stream: Any) -> None:
        raise ParamsMismatch("receive: stream is given, but the buffers are on CPU devices. Leave it out.")

    def _withdraw(self, why: str) -> None:
        self.world.link.say("withdraw", entry=self._entry, why=why)

    def _enter(self, wait_secs: float) -> Header:
        """Votes for an update and waits until it begins.

        Raises:
          SyncTimeout, RankLost, UpdateRefused, DigestMismatch: It does not; nothing was written.
          WorldLost: The rendezvous is gone.
        """
        link = self.world.link
        link.say("enter", entry=self._entry, wait_secs=wait_secs, refusal=None)
        until = time.monotonic() + wait_secs + GRACE_SECS + link.lost_secs
        try:
            while True:
                header = self._next({"begin", "failed", "refused"}, until - time.monotonic())
                if header is None:
                    self._withdraw("it waited too long for an answer")
                    raise SyncTimeout(
                        f"update: rank {min(self.held)} waited more than {wait_secs:g} s for an answer of the "
                        "rendezvous, before anything was written. Every replica is as it was."
                    )
                if header["op"] == "refused":
                    raise WorldError(f"update: {header['why']}. Register the plan first.")
                if header["entry"] == self._entry:
                    if header["op"] == "failed":
                        raise failure(header)
                    return header
        except BaseException as error:
            if not isinstance(error, ShardflyError):
                self._withdraw(f"{type(error).__name__} while it waited for others")
            raise

    def _run_of(self, begin: Header, sources: dict[Key, np.ndarray], progress: Callable[[int], None] | None) -> Moving:
        return Run(
            self._steps,
            begin,
            {**self._targets, **sources},
            link=self.world.link,
            incoming=self._incoming,
            outgoing=self._outgoing,
            own=self.own,
            held=self.held,
            source_ranks=self.session.plan.source_ranks,
            progress=progress,
        )
