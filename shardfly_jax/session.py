"""`Session`: what changes about a registered plan: buffers, versions, poison."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import jax

from shardfly_jax.buffers import check_memory
from shardfly_jax.executors.choice import Executor, make_executor, why_not_persistent
from shardfly_jax.executors.memory import Key, Occupied, Shard, overlaps, wait_for_readers
from shardfly_jax.layout import Tree
from shardfly_jax.owners import Owner
from shardfly_jax.pending import Pending
from shardfly_jax.planning import TARGET, Plan
from shardfly_jax.sharding.errors import NotRegistered, Poisoned, RegistrationError, ShardflyError, UpdateRefused

if TYPE_CHECKING:
    from shardfly_jax.rescaling import Rescaled
    from shardfly_jax.worlds.mpi_part import MpiPart
    from shardfly_jax.worlds.part import Part


class Session:
    """The mutable part of a registered plan: buffers, versions, poison. Made by `register`.

    Attributes:
      digest: Of the plan it belongs to.
      buffers: Every target shard by (family, tensor, plan-wide rank).
      occupied: Where they are.
      owners: One per target tree of which there are ranks here.
      held: Ranks that live in this process, trainers too.
      part: What this process does in a world; None if it holds all ranks itself.
      executor: None until the trainer's devices are known.
      choice: Which executor was asked for.
      binding: Names of the params tree that was synced last, resolved.
      sender: Of the update that `receiving` has begun; None when there is none.
      rescaled: What was kept of the plan before; None if there was none.
    """

    def __init__(
        self,
        plan: Plan,
        owners: dict[str, Owner],
        allocated: bool,
        choice: str = "auto",
        held: frozenset[int] | None = None,
    ):
        self.plan = dataclasses.replace(plan, session=None)
        self.digest = plan.digest
        self.owners = owners
        self.held = frozenset(range(plan.ranks)) if held is None else held
        self.part: Part | MpiPart | None = None
        self.buffers: dict[Key, Shard] = {}
        for owner in owners.values():
            self.buffers.update(owner.buffers)
        kept = {label: array for owner in owners.values() for label, array in owner.kept_arrays()}
        check_memory(self.plan, self.buffers, kept)
        self.occupied = Occupied(self.buffers)
        # what fills them now, perhaps a copy from the host, must not come after what the first update writes
        jax.block_until_ready([shard.array for shard in self.buffers.values()])
        self._lock = threading.Lock()
        self._inside: set[int] = set()
        self.executor: Executor | None = None
        self.choice = choice
        self.binding: Any = None
        self.sender: Any = None
        self.rescaled: Rescaled | None = None
        self._retired_by: str | None = None
        self._begun = 0  # number of the update that began last
        self._waits = False  # whether another one is to begin
        self._pending: Pending | None = None
        self._stepping: Any = None
        self._versions = {replica.name: 0 for replica in plan.replicas}
        empty = "its buffers have never been filled" if allocated else None
        self._poison: dict[str, str | None] = {replica.name: empty for replica in plan.replicas}

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """Held during an update; a thread that takes part in one cannot begin another.

        Raises:
          ShardflyError: This thread is inside an update already: a progress callback or an owner called `sync`.
          UpdateRefused: Another update is pending.
        """
        self._take()
        try:
            with self.inside():
                yield
        finally:
            self.unlock()

    def update_later(self, prepare: Callable[[], Callable[[], object]]) -> Pending:
        """Begins an update that goes on in the background.

        Args:
          prepare: Called at once, to check arguments; returns the rest.

        Raises:
          As `updating`; whatever `prepare` raises.
        """
        self._take()
        try:
            with self.inside():
                run = prepare()
            self._waits = True
            pending = Pending(self, run)
            pending.start()
        except BaseException:
            self.unlock()
            raise
        self._pending = pending
        return pending

    def _take(self) -> None:
        """Begins to hold the session; see `updating`."""
        if threading.get_ident() in self._inside:
            raise ShardflyError("sync: called from inside an update of the same plan. Call it after sync has returned.")
        self.check_idle()
        self._lock.acquire()

    def check_idle(self) -> None:
        """Raises:
        UpdateRefused: An update is pending.
        """
        if self._pending is not None and not self._pending.done():
            raise UpdateRefused(
                "plan: an update of it is pending, so that nothing else may begin; nothing was written. Wait for "
                "result() of its handle first."
            )

    def unlock(self) -> None:
        """Lets another update begin; called by any thread once one is over."""
        self._waits = False
        self._lock.release()

    def end_pending(self) -> None:
        """Waits until no update is pending."""
        if self._pending is not None:
            self._pending.join()

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """While this thread takes part in an update."""
        me = threading.get_ident()
        entered = me not in self._inside
        self._inside.add(me)
        try:
            yield
        finally:
            if entered:
                self._inside.discard(me)

    def guarded(self, progress: Callable[[int], None]) -> Callable[[int], None]:
        """A progress callback whose thread counts as inside the update."""

        def call(nbytes: int) -> None:
            with self.inside():
                progress(nbytes)

        return call

    @contextlib.contextmanager
    def attempting(self) -> Iterator[None]:
        """Held while replicas may hold a mixture: poisons them, and lifts it with a new version if all goes well."""
        self.begin(self._begun + 1, self._versions)
        try:
            yield
        except BaseException as error:
            self.poison(f"an update failed half way: {type(error).__name__}: {error}", self._versions)
            raise
        self.publish(self._versions, self._begun)

    @property
    def serves(self) -> bool:
        """Whether there are rollout ranks in this process."""
        return max(self.held) >= self.plan.source_ranks

    @property
    def versions(self) -> Mapping[str, int]:
        """Version of each replica, as far as this process knows."""
        others = {} if self.part is None else self.part.versions_of_others()
        return MappingProxyType({name: others.get(name, version) for name, version in self._versions.items()})

    @property
    def newest(self) -> int:
        """Number of the update that began last, or that a trainer waits with, as far as this process knows."""
        here = self._begun + self._waits
        return here if self.part is None else max(here, self.part.newest)

    def begin(self, number: int, replicas: Iterable[str]) -> None:
        """An update of this number begins: these replicas hold a mixture until it is published."""
        self._begun, self._waits = number, False
        self.poison("an update began and did not finish", replicas)

    def poison(self, reason: str, replicas: Iterable[str]) -> None:
        """Marks replicas as holding a mixture."""
        self._poison.update(dict.fromkeys(replicas, reason))

    def publish(self, replicas: Iterable[str], version: int) -> None:
        """Gives replicas a version, and lifts their poison."""
        for name in replicas:
            self._versions[name] = version
            self._poison[name] = None

    def common_version(self, replicas: Iterable[str | None]) -> int | None:
        """The version that all of some replicas hold; None if they differ or one may not be read."""
        versions = {self._versions[name] for name in replicas if name is not None and self._poison[name] is None}
        readable = all(name is not None and self._poison[name] is None for name in replicas)
        return versions.pop() if readable and len(versions) == 1 else None

    def continue_from(self, old: Session, serving: Mapping[str, int]) -> None:
        """Takes up where the session before ends.

        Args:
          old: That session.
          serving: Replicas of this process that hold a version whole; the others here wait for their first update.
        """
        self._begun = old._begun
        here = {replica.name for replica in self.plan.replicas if self.held & set(replica.ranks)}
        for name in self._versions:
            self._versions[name] = 0 if name in here else old._versions.get(name, 0)
        why = "it joined, its layout changed or an update had failed, and no complete one has reached it since"
        self.poison(why, here)
        for name, version in serving.items():
            self.publish([name], version)

    def resume(self, old: Session) -> None:
        """Takes up where an earlier registration of the same plan ended.

        Numbers of updates go on, and replicas whose buffers here are all where they were stay what they were, poisoned
        too. One that had no update yet was nobody's version, though its owner's buffers may have been read.
        """
        self._begun = max(old._begun, *old.versions.values())
        where = {key: shard.range for key, shard in old.buffers.items()}
        for replica in self.plan.replicas:
            here = {key: shard.range for key, shard in self.buffers.items() if key[2] in replica.ranks}
            if here and all(where.get(key) == at for key, at in here.items()):
                self._versions[replica.name] = old._versions[replica.name]
                if old._versions[replica.name] or old._poison[replica.name] is not None:
                    self._poison[replica.name] = old._poison[replica.name]

    def shares_memory_with(self, other: Session) -> bool:
        """Whether a buffer of another session overlaps one of this."""
        mine, theirs = ({shard.range for shard in session.buffers.values()} for session in (self, other))
        ranges = [*((where, self) for where in mine), *((where, other) for where in theirs)]
        return any(one is not two for (_, one), (_, two) in overlaps(ranges))

    def retire(self, by: str = "sf.rescale") -> None:
        """Lets go of the buffers: another session, made by this call, has taken its place."""
        self._retired_by = by
        self.buffers, self.owners, self.executor, self.part, self._stepping = {}, {}, None, None, None

    def check_in_force(self) -> None:
        """Raises:
        NotRegistered: Another plan has taken the place of this one.
        """
        if self._retired_by is not None:
            raise NotRegistered(
                f"plan {self.digest[:12]} was replaced by {self._retired_by}. Use the plan that it returned."
            )

    def check_readable(self) -> None:
        """Raises:
        NotRegistered: There is no replica in this process.
        Poisoned: Some replica in this process may not be read.
        """
        here = {replica.name for replica in self.plan.replicas if self.held & set(replica.ranks)}
        if not here:
            raise NotRegistered("params: this process holds no rollout ranks. Ask a process that does.")
        bad = {name: reason for name, reason in self._poison.items() if reason and name in here}
        if bad:
            name, reason = next(iter(bad.items()))
            more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
            raise Poisoned(
                f"replica: {name!r}{more} cannot be read: {reason.rstrip('.')}. A complete sf.sync(params, plan) "
                "heals it."
            )

    def check_buffers(self) -> None:
        """Raises:
        StaleBuffer: An owner's tensor is no longer where it was registered.
        """
        self.check_alive()
        for owner in self.owners.values():
            owner.check()

    def check_alive(self) -> None:
        """Raises:
        StaleBuffer: A buffer was deleted or donated.
        """
        for owner in self.owners.values():
            owner.check_alive()

    def wait_for_readers(self, sources: Iterable[jax.Device] = ()) -> bool:
        """Blocks until what was queued before and reads the buffers has ended, unless the update runs behind it.

        Args:
          sources: Devices of arrays that shall have been computed too.

        Returns:
          Whether everything on the devices of `sources` has been computed, without an error; False if that is unknown.
        """
        if self.executor is not None and self.executor.in_order:
            wait_for_readers(set())  # copies to the host are not among what it runs behind
            return False
        return wait_for_readers({shard.device for shard in self.buffers.values()}.union(sources))

    def make_executor(self, source_devices: Mapping[int, jax.Device]) -> None:
        """Prepares the plan for a trainer whose ranks are on these devices."""
        self.executor = make_executor(self.plan, self.buffers, source_devices, self.choice)

    def stepping(self, source: Tree | None) -> Any:
        """What makes senders for steps of the trainer whose tree is `source`.

        Raises:
          RegistrationError: The plan does not run on the persistent executor, or the trainer's tree does not say where
            its arrays are.
        """
        if self._stepping is None:
            if self.part is not None:
                raise RegistrationError(
                    "receiving: a jitted step cannot send to other processes yet. Call sf.sync(params, plan) after "
                    "the step."
                )
            placed = source is not None and all(device is not None for device in source.devices)
            if source is None or not placed or None in source.shardings.values():
                raise RegistrationError(
                    "receiving: the plan does not know the trainer's shardings. Make it from the trainer's jax.Arrays "
                    "or ShapeDtypeStructs on a mesh of devices, or call sf.sync(params, plan) after the step."
                )
            reasons = why_not_persistent(self.plan, self.buffers, [d for d in source.devices if d is not None])
            if reasons or self.choice == "portable":
                raise RegistrationError(
                    f"receiving: a jitted step can send only through the persistent kernel, but "
                    f"{'; '.join(reasons) or 'executor is portable'}. Call sf.sync(params, plan) after the step."
                )
            from shardfly_jax.executors.stepping import Stepping

            self._stepping = Stepping(self.executor, source.shardings)  # type: ignore[arg-type]  # as was just checked
        return self._stepping

    def handles(self) -> Any:
        """The rollouts' params: new arrays at the registered addresses, in their owners' structures."""
        built = {name: owner.handles() for name, owner in self.owners.items()}
        return built[TARGET] if list(built) == [TARGET] else built
