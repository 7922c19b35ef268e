"""Registration: where a plan's targets live, who owns them, and which version they hold."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from shardfly_jax.buffers import allocate, check_memory
from shardfly_jax.executors.choice import EXECUTORS, Executor, make_executor, why_not_persistent as reasons_against
from shardfly_jax.executors.memory import Key, Occupied, Shard
from shardfly_jax.layout import Tree
from shardfly_jax.owners import Owner
from shardfly_jax.pending import Pending
from shardfly_jax.planning import TARGET, Plan, Replicas
from shardfly_jax.sharding.errors import NotRegistered, Poisoned, RegistrationError, ShardflyError, UpdateRefused

if TYPE_CHECKING:
    from shardfly_jax.worlds.part import Part
    from shardfly_jax.worlds.world import World


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
        self.part: Part | None = None
        self.buffers: dict[Key, Shard] = {}
        for owner in owners.values():
            self.buffers.update(owner.buffers)
        kept = {label: array for owner in owners.values() for label, array in owner.kept_arrays()}
        check_memory(self.plan, self.buffers, kept)
        self.occupied = Occupied(self.buffers)
        self._lock = threading.Lock()
        self._inside: set[int] = set()
        self.executor: Executor | None = None
        self.choice = choice
        self.binding: Any = None
        self.sender: Any = None
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
        except BaseException:
            self.unlock()
            raise
        self._waits = True
        pending = Pending(self, run)
        pending.start()
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
                f"replica: {name!r}{more} cannot be read: {reason}. A complete sf.sync(params, plan) heals it."
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
            reasons = reasons_against(self.plan, self.buffers, [d for d in source.devices if d is not None])
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


def why_not_persistent(plan: Plan) -> tuple[str, ...]:
    """Why a registered plan cannot run as one persistent kernel on its devices; empty if it does.

    Raises:
      NotRegistered: The plan has no buffers yet.
    """
    session = plan.registered()
    source = plan.source.devices if plan.source is not None else ()
    return reasons_against(session.plan, session.buffers, [device for device in source if device is not None])


def register(
    plan: Plan,
    owner: Any = None,
    *,
    placement: Mapping[int, jax.Device] | Callable[[int], jax.Device] | None = None,
    executor: str = "auto",
    world: World | None = None,
    ranks: Iterable[int] | None = None,
) -> Plan:
    """Binds a plan to rollout buffers, once; every later `sync` writes into the same addresses.

    Args:
      plan: From `make_plan` or `load_plan`.
      owner: Holds the buffers: a tree of arrays in the target's structure, an `nnx.Module`, or a function that returns
        one; a dict of them for several replica trees. It is asked for its addresses before every update. Rank-local
        tensors stand as `{rank: array}`, or as a list of trees for `sf.local`. None allocates the buffers.
      placement: Device of each rollout rank, counted from 0, where the target's mesh does not say; several ranks may
        share one. By default ranks take this process' devices in turn.
      executor: `persistent`, `portable`, or `auto`: the persistent kernel where it can run (see `why_not_persistent`).
      world: From `connect`, where ranks of the plan live in other processes.
      ranks: Plan-wide numbers of the ranks that live in this process, e.g. `plan.replicas[0].ranks` for a rollout or
        `range(plan.source_ranks)` for the trainer; goes with `world`. The owner then holds the buffers of these ranks
        only, as arrays on a mesh of as many devices or under `{rank: array}`.

    Returns:
      The plan with its session. Its older handles stay unregistered.

    Raises:
      RegistrationError: Lists every buffer that is missing or does not fit, or that shares memory with another.
      WorldError, WorldLost: The world refuses this process' ranks, or is gone.
    """
    if executor not in EXECUTORS:
        raise RegistrationError(f"registration: executor is {executor!r}, but one of {list(EXECUTORS)} is needed.")
    plan = dataclasses.replace(plan, session=None)
    held = _held(plan, world, ranks)
    trees = list(dict.fromkeys(replica.tree for replica in plan.replicas if held & set(replica.ranks)))
    devices = _placed(plan, trees, placement, held)
    allocated = owner is None
    given = allocate(plan, trees, devices, held) if allocated else _owners(owner, trees)
    owners = {}
    for name in trees:
        tree = plan.targets.get(name)
        planned = (
            set(tree.tensors)
            if tree
            else {m for i in plan.target_families if plan.families[i].tree == name for m in plan.families[i].names}
        )
        known = {k: d for k, d in enumerate(tree.devices) if d is not None} if tree and not allocated else devices[name]
        owners[name] = Owner(plan, name, given[name], planned, known if tree else {}, held)
    session = Session(plan, owners, allocated, executor, held)
    if world is not None:
        from shardfly_jax.worlds.part import Part

        session.part = Part(session, world)
    elif plan.source is not None and all(device is not None for device in plan.source.devices):
        session.make_executor({rank: device for rank, device in enumerate(plan.source.devices) if device is not None})
    return dataclasses.replace(plan, session=session)


def _held(plan: Plan, world: World | None, ranks: Iterable[int] | None) -> frozenset[int]:
    """The ranks of this process.

    Raises:
      RegistrationError: They are none of the plan's, or are not said where they must be.
    """
    if (world is None) != (ranks is None):
        raise RegistrationError(
            "registration: world and ranks go together. Give both, e.g. ranks=plan.replicas[0].ranks, or neither."
        )
    if ranks is None:
        return frozenset(range(plan.ranks))
    held = frozenset(ranks)
    wrong = sorted(map(repr, (r for r in held if not isinstance(r, int | np.integer) or not 0 <= r < plan.ranks)))
    if wrong or not held:
        raise RegistrationError(
            f"registration: ranks are {', '.join(wrong) or 'empty'}, but the plan has ranks 0 to {plan.ranks - 1}. "
            "Give those that live in this process."
        )
    return frozenset(int(rank) for rank in held)


def _owners(owner: Any, trees: list[str]) -> dict[str, Any]:
    if isinstance(owner, Replicas):
        owner = dict(owner.trees)
    if trees == [TARGET]:
        return {TARGET: owner}
    if not isinstance(owner, dict) or set(owner) != set(trees):
        keys = sorted(owner) if isinstance(owner, dict) else type(owner).__name__
        raise RegistrationError(
            f"registration: owners are given for {keys}, but the plan has the targets {trees}. Give a dict with "
            "one owner for each."
        )
    return owner


def _placed(plan: Plan, trees: list[str], placement: Any, held: frozenset[int]) -> dict[str, dict[int, jax.Device]]:
    """Device of each rank of this process, per tree, by rank counted from the tree's first."""
    local = jax.local_devices()
    if placement is not None and not callable(placement) and not isinstance(placement, Mapping):
        raise RegistrationError(f"registration: placement is a {type(placement).__name__}. Give a dict or a function.")
    out: dict[str, dict[int, jax.Device]] = {}
    turn = 0
    for name in trees:
        tree = plan.targets.get(name)
        ranks = sorted(rank for replica in plan.replicas if replica.tree == name for rank in replica.ranks)
        count = len(tree.devices) if tree else len(ranks)
        out[name] = {}
        for rank in range(count):
            if ranks[0] + rank not in held:
                continue
            number = ranks[0] + rank - plan.source_ranks
            device = tree.devices[rank] if tree else None
            if device is None and placement is not None:
                device = placement(number) if callable(placement) else placement.get(number)
                if not isinstance(device, jax.Device):
                    raise RegistrationError(
                        f"registration: placement names no device for rollout rank {number}. Name one for every rank."
                    )
            out[name][rank] = device or local[turn % len(local)]
            turn += 1
    return out
