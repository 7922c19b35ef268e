"""`rescale`: another plan for a pool whose rollouts come, go or change; buffers and kernels that fit are kept."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from shardfly_jax.buffers import allocate
from shardfly_jax.executors.memory import Key
from shardfly_jax.layout import is_module
from shardfly_jax.owners import Owner
from shardfly_jax.planning import Plan, replanned
from shardfly_jax.registry import (
    activated,
    allocator,
    check_placement,
    devices_of,
    held_ranks,
    open_session,
    owners_of,
    placed,
    registering,
    trees_here,
)
from shardfly_jax.session import Session
from shardfly_jax.sharding.errors import RegistrationError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rescaled:
    """What a rescale kept, and what it made; of this process.

    Attributes:
      serving: Replicas that go on serving the version they hold.
      joined: Replicas that cannot be read before their next complete update: new ones, those whose layout changed, and
        those that a failed update had spoilt.
      kept: Registered buffers that are where they were.
      allocated: Those that are not.
      freed: Buffers that the plan before had and this one has not.
      kept_nbytes, allocated_nbytes, freed_nbytes: Of these.
      kernels: Kernels that were compiled before, by any plan of this process, and are used again.
      compiled: Those that had to be compiled. Both are 0 where there is no persistent kernel, or none yet because the
        trainer's devices show with the first update.
    """

    serving: tuple[str, ...]
    joined: tuple[str, ...]
    kept: int
    allocated: int
    freed: int
    kept_nbytes: int
    allocated_nbytes: int
    freed_nbytes: int
    kernels: int
    compiled: int


def rescale(
    plan: Plan,
    target: Any,
    owner: Any = None,
    *,
    placement: Mapping[int, jax.Device] | Callable[[int], jax.Device] | None = None,
    ranks: Iterable[int] | None = None,
) -> Plan:
    """Replaces a registered plan, between updates, because rollouts join, leave or change their layout.

    A rank keeps its device and its buffers, at the same addresses, where it held the same tensors in the same local
    shapes: it takes those of the rank of its tree that was on its device, or where no device is known, of the next in
    order. The rest is allocated or freed. A replica that holds all that it held goes on serving its version; one that
    joined or changed is `Poisoned` until its first complete update, and its version is 0 until then. Numbers of updates
    go on, so the next one is newer than all before.

    In a world every process that stays calls this with the same target; whoever joins makes the same plan and calls
    `register`, whoever leaves closes its world. Processes that still have the plan before get `DigestMismatch`, before
    anything is written, from an update that others enter with the new one. A restarted trainer takes its ranks back
    with `register`; the others need no rescale for it.

    Args:
      plan: Registered. It is void afterwards; if this raises, it stays in force, except that in a world a rank which
        another process holds, or an address at which it can no longer listen, leaves this process without registration.
      target: The rollouts' new tree or `sf.replicas`, as for `make_plan`, which is called with the source, mapping and
        options of `plan`; or the new plan itself, where these change too or `plan` was loaded from a file.
      owner: As for `register`, of all target trees. By default every tree keeps the owner it has, or, where its layout
        has changed or its buffers were allocated, is built anew from the buffers that fit and newly allocated ones.
      placement: As for `register`. By default a rank stays where it is, and others take the devices with the fewest.
      ranks: In a world, the ranks of the new plan that live in this process.

    Returns:
      The new plan, registered. `plan.rescaled` counts what was kept.

    Raises:
      NotRegistered: `plan` has no buffers.
      PlanError: As `make_plan`.
      RegistrationError: As `register`; or a tree whose owner is a module or a function has changed, and `owner` is not
        given; or the plan keeps targets untouched that only an owner has.
      UpdateRefused: An update is pending.
      WorldError, WorldLost: As `register`.
    """
    old = plan.registered()
    world = old.part.world if old.part is not None else None
    if (world is None) != (ranks is None):
        raise RegistrationError(
            "rescale: this plan is registered in a world, so say which ranks of the new one live in this process, e.g. "
            "ranks=plan.replicas[0].ranks of a plan made for the new target."
            if ranks is None
            else "rescale: this plan is not registered in a world, so all ranks live in this process. Leave ranks= out."
        )
    with old.updating(), registering(world):
        new = target if isinstance(target, Plan) else replanned(plan, target)
        new = dataclasses.replace(new, session=None)
        check_placement(placement)
        held = held_ranks(new, world, ranks)
        pairs = _pairs(old, new, held, placement)
        local = devices_of(world)
        devices = placed(new, trees_here(new, held), _places(old, new, held, pairs, placement, local), held, local)
        estate = _Estate(old, new, pairs)
        if owner is None:
            kept = {name: _owner(estate, name, held) for name in devices}
            anew = [name for name, owner_ in kept.items() if owner_ is None]
            fitting = {key: array for name in anew for key, array in estate.fitting(name, held).items()}
            given = kept | allocate(new, anew, devices, held, fitting, allocator(world, devices))
        else:
            given = owners_of(owner, list(devices))
        session = open_session(new, given, devices, held, allocated=False, executor=old.choice)
        serving = estate.hand_over(session)
        registered = activated(session, new, world)
        rescaled = _counted(old, session, serving)
        session.rescaled = rescaled
        old.retire()
    return registered


def _rollouts(session: Session) -> dict[int, str]:
    """The target tree of each rollout rank of a process, in rank order."""
    return _tree_of(session.plan, session.held)


def _tree_of(plan: Any, held: Iterable[int]) -> dict[int, str]:
    trees = {rank: replica.tree for replica in plan.replicas for rank in replica.ranks}
    return {rank: trees[rank] for rank in sorted(held) if rank in trees}


def _device_of(session: Session) -> dict[int, jax.Device]:
    return {rank: shard.device for (_, _, rank), shard in session.buffers.items()}


def _wanted(new: Plan, rank: int, tree: str, placement: Any) -> jax.Device | None:
    """The device that the new target, or the caller, names for a rank."""
    known = new.targets.get(tree)
    base = min(replica.ranks[0] for replica in new.replicas if replica.tree == tree)
    device = known.devices[rank - base] if known is not None else None
    if device is None and placement is not None:
        number = rank - new.source_ranks
        device = placement(number) if callable(placement) else placement.get(number)
    return device


def _pairs(old: Session, new: Plan, held: frozenset[int], placement: Any) -> dict[int, int]:
    """For each rollout rank of the new plan, the old rank that it was; of this process."""
    free, device_of = _rollouts(old), _device_of(old)
    pairs = {}
    for rank, tree in _tree_of(new, held).items():
        wanted = _wanted(new, rank, tree, placement)
        fits = [r for r, of in free.items() if of == tree and (wanted is None or device_of.get(r, wanted) == wanted)]
        if fits:
            pairs[rank] = fits[0]
            del free[fits[0]]
    return pairs


def _places(
    old: Session,
    new: Plan,
    held: frozenset[int],
    pairs: Mapping[int, int],
    placement: Any,
    devices: Sequence[jax.Device],
) -> dict[int, jax.Device]:
    """A device for each rollout rank of this process, by rank counted from the first rollout: one of `devices` where
    neither `placement` nor the old session says one."""
    device_of = _device_of(old)
    places: dict[int, jax.Device | None] = {}
    for rank, tree in _tree_of(new, held).items():
        wanted = _wanted(new, rank, tree, placement)
        places[rank] = wanted if wanted is not None else device_of.get(pairs.get(rank, -1))
    busy = Counter(places.values())
    for rank, device in places.items():
        if device is None:
            places[rank] = min(devices, key=lambda d: busy[d])
            busy[places[rank]] += 1
    return {rank - new.source_ranks: device for rank, device in places.items() if device is not None}


class _Estate:
    """What an old session leaves to a new one.

    Args:
      old: The session.
      new: The new plan.
      pairs: Old rank of each new rank of this process.
    """

    def __init__(self, old: Session, new: Plan, pairs: Mapping[int, int]):
        self.old, self.new, self.pairs = old, new, pairs
        self._named = {
            (family.tree, name): (index, k)
            for index in old.plan.target_families
            for family in (old.plan.families[index],)
            for k, name in enumerate(family.names)
        }

    def key_before(self, key: Key) -> Key | None:
        """The old shard of the same tensor and rank; None if there was none."""
        family = self.new.families[key[0]]
        named = self._named.get((family.tree, family.name(key[1])))
        if named is None or key[2] not in self.pairs:
            return None
        before = (*named, self.pairs[key[2]])
        return before if before in self.old.buffers else None

    def keys(self, tree: str, held: frozenset[int]) -> list[Key]:
        """The shards of a target tree that this process is to hold."""
        return [
            (index, k, rank)
            for index in self.new.target_families
            for family in (self.new.families[index],)
            if family.tree == tree
            for k in range(family.count)
            for rank in family.layout.ranks
            if rank in held
        ]

    def fitting(self, tree: str, held: frozenset[int]) -> dict[Key, jax.Array]:
        """Old buffers that can hold a tree's shards, each for one of them: aliases that share will share again."""
        found: dict[Key, jax.Array] = {}
        taken: set[int] = set()
        for key in self.keys(tree, held):
            before = self.key_before(key)
            if before is None:
                continue
            shard, layout = self.old.buffers[before], self.new.families[key[0]].layout
            was = self.old.plan.families[before[0]].layout
            same = (was.dtype, was.buffer_shape(before[2])) == (layout.dtype, layout.buffer_shape(key[2]))
            if same and shard.address not in taken:
                found[key] = shard.array
                taken.add(shard.address)
        return found

    def is_unchanged(self, tree: str, held: frozenset[int]) -> bool:
        """Whether a tree's owner can be asked for the new plan's shards as it was for the old one's."""
        owner = self.old.owners.get(tree)
        if owner is None:
            return False
        ranks = [rank for rank, of in _tree_of(self.new, held).items() if of == tree]
        pairs = [self.pairs.get(rank, -1) for rank in ranks]
        if pairs != [rank for rank, of in _rollouts(self.old).items() if of == tree]:
            return False
        base = min(replica.ranks[0] for replica in self.new.replicas if replica.tree == tree)
        numbered = any(place is not None for _, place in owner.places)  # by rank of the tree
        if numbered and any(pair - owner.base != rank - base for rank, pair in zip(ranks, pairs, strict=True)):
            return False
        keys = self.keys(tree, held)
        if {self.key_before(key) for key in keys} != {k for k in self.old.buffers if k[2] in pairs}:
            return False
        return all(self._layouts_agree(key) for key in keys)

    def _layouts_agree(self, key: Key) -> bool:
        before = self.key_before(key)
        if before is None:
            return False
        was, now = self.old.plan.families[before[0]], self.new.families[key[0]]
        agree = _shard_of(was.layout, before[2]) == _shard_of(now.layout, key[2])
        return agree and was.alias_of == now.alias_of

    def hand_over(self, session: Session) -> tuple[str, ...]:
        """Tells a new session what its buffers hold; the names of the replicas that hold a whole version."""
        before: dict[tuple[jax.Device, int], list[Key]] = {}
        for key, shard in self.old.buffers.items():
            before.setdefault((shard.device, shard.address), []).append(key)
        of_rank = {rank: replica.name for replica in self.old.plan.replicas for rank in replica.ranks}
        serving: dict[str, int] = {}
        for replica in session.plan.replicas:
            keys = [key for key in session.buffers if key[2] in replica.ranks]
            holders: set[str | None] = set()
            for key in keys:
                shard = session.buffers[key]
                same = [k for k in before.get((shard.device, shard.address), ()) if self._means_the_same(k, key)]
                holders |= {of_rank[k[2]] for k in same} if same else {None}
            if keys and None not in holders and (version := self.old.common_version(holders)) is not None:
                serving[replica.name] = version
        session.continue_from(self.old, serving)
        return tuple(serving)

    def _means_the_same(self, before: Key, key: Key) -> bool:
        """Whether what an old shard holds is what a new one is to hold, after the same update."""
        was, now = self.old.plan.families[before[0]], self.new.families[key[0]]
        return (
            (was.pattern, was.name(before[1]), was.expr, was.cuts)
            == (now.pattern, now.name(key[1]), now.expr, now.cuts)
        ) and _shard_of(was.layout, before[2]) == _shard_of(now.layout, key[2])  # fmt: skip


def _shard_of(layout: Any, rank: int) -> tuple[Any, ...]:
    """What a shard is, whatever its rank is called."""
    return layout.shape, layout.dtype, layout.box(rank), layout.local_strides(rank)


def _owner(estate: _Estate, tree: str, held: frozenset[int]) -> Any:
    """Who holds a tree's buffers from now on, where the caller does not say; None if they are to be allocated."""
    owner: Owner | None = estate.old.owners.get(tree)
    if owner is None:
        return None
    lives = callable(owner.given) or is_module(owner.given)
    if estate.is_unchanged(tree, held):
        return owner.given if lives else owner.handles()
    if lives:
        kind = type(owner.given).__name__
        raise RegistrationError(
            f"rescale: the buffers of {tree!r} are owned by a {kind}, but its layout has changed. Change its buffers "
            "and give it again as owner, or give a tree."
        )
    return None


def _counted(old: Session, new: Session, serving: tuple[str, ...]) -> Rescaled:
    before = {shard.range: shard.nbytes for shard in old.buffers.values()}
    after = {shard.range: shard.nbytes for shard in new.buffers.values()}
    kept, made = after.keys() & before.keys(), after.keys() - before.keys()
    gone = before.keys() - after.keys()
    here = [replica.name for replica in new.plan.replicas if new.held & set(replica.ranks)]
    executor = new.executor
    return Rescaled(
        serving=serving,
        joined=tuple(name for name in here if name not in serving),
        kept=len(kept),
        allocated=len(made),
        freed=len(gone),
        kept_nbytes=sum(after[at] for at in kept),
        allocated_nbytes=sum(after[at] for at in made),
        freed_nbytes=sum(before[at] for at in gone),
        kernels=0 if executor is None else executor.kernels - executor.compiled,
        compiled=0 if executor is None else executor.compiled,
    )
