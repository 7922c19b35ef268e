"""Registration: where a plan's targets live, and who owns them."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from shardfly_jax.buffers import Wanted, allocate, zeros
from shardfly_jax.executors.choice import EXECUTORS, why_not_persistent as reasons_against
from shardfly_jax.owners import Owner
from shardfly_jax.planning import TARGET, Plan, Replicas
from shardfly_jax.session import Session
from shardfly_jax.sharding.errors import RegistrationError

if TYPE_CHECKING:
    from shardfly_jax.worlds.mpi import MpiWorld
    from shardfly_jax.worlds.world import World

_SESSIONS: weakref.WeakSet[Session] = weakref.WeakSet()
"""All that somebody still has a plan of."""
_REGISTERING = threading.Lock()
"""Held while they are looked at."""


def why_not_persistent(plan: Plan) -> tuple[str, ...]:
    """Why a registered plan cannot run as one persistent kernel on its devices; empty if it does.

    Raises:
      NotRegistered: The plan has no buffers yet.
    """
    session = plan.registered()
    source = plan.source.devices if plan.source is not None else ()
    reasons = reasons_against(session.plan, session.buffers, [device for device in source if device is not None])
    return ("it is registered with executor='portable'", *reasons) if session.choice == "portable" else reasons


def register(
    plan: Plan,
    owner: Any = None,
    *,
    placement: Mapping[int, jax.Device] | Callable[[int], jax.Device] | None = None,
    executor: str = "auto",
    world: World | MpiWorld | None = None,
    ranks: Iterable[int] | None = None,
) -> Plan:
    """Binds a plan to rollout buffers, once; every later `sync` writes into the same addresses.

    Args:
      plan: From `make_plan` or `load_plan`. In a world also one that was registered before, perhaps in a world that is
        lost: the numbers of its updates go on, replicas whose buffers are the same serve the version that they did, or
        stay `Poisoned`, and the registration before is void.
      owner: Holds the buffers: a tree of arrays in the target's structure, an `nnx.Module`, or a function that returns
        one; a dict of them for several replica trees. It is asked for its addresses before every update. Rank-local
        tensors stand as `{rank: array}`, where ranks count from 0 within their target tree (the plan-wide number less
        that of the tree's first rank, which is `plan.source_ranks` where there is one tree), or as a list of trees for
        `sf.local`. None allocates the buffers; where a process of a rendezvous had registered the plan with the same
        ranks before, they stay those that it had. In a world buffers that are given are `Poisoned` until their first
        complete update, unless the plan was registered before and they are known to hold a whole version of it.
      placement: Device of each rollout rank, counted from 0 through all target trees (the plan-wide number less
        `plan.source_ranks`), where the target's mesh does not say; several ranks may share one. By default ranks take
        this process' devices in turn; in a world of NVSHMEM its one GPU.
      executor: `persistent`, `portable`, or `auto`: the persistent kernel where it can run (see `why_not_persistent`).
        In a world `auto` takes the only one that there is: `persistent` between GPUs, else `portable`.
      world: From `connect`, where ranks of the plan live in other processes.
      ranks: Plan-wide numbers of the ranks that live in this process, e.g. `plan.replicas[0].ranks` for a rollout or
        `range(plan.source_ranks)` for the trainer; goes with `world`. The owner then holds the buffers of these ranks
        only, as arrays on a mesh of as many devices or under `{rank: array}`, keyed as above.

    Returns:
      The plan with its session. The handle that was given stays as it is, but for what is said of `plan` above.

    Raises:
      RegistrationError: Lists every buffer that is missing or does not fit, or that shares memory with another; or
        `executor` cannot run the plan.
      WorldError, WorldLost: The world refuses this process' ranks, or is gone.
      UpdateRefused: An update of the plan that was registered in the world before is pending.
    """
    with registering(world):
        if not isinstance(plan, Plan):
            raise RegistrationError(
                f"registration: a {type(plan).__name__} is given, but a plan is needed. Make one with "
                "sf.make_plan(source, target, mapping)."
            )
        if executor not in EXECUTORS:
            raise RegistrationError(f"registration: executor is {executor!r}, but one of {list(EXECUTORS)} is needed.")
        held = held_ranks(plan, world, ranks)
        trees = trees_here(plan, held)
        devices = placed(plan, trees, placement, held, devices_of(world))
        before = plan.session if world is not None else None
        if before is not None and before.digest != plan.digest:
            before = None
        allocated = owner is None
        if owner is not None:
            given = owners_of(owner, trees)
        elif before is not None and _can_stay(before, held, world):
            given = {name: one.given for name, one in before.owners.items()}
            allocated = all(one.private for one in before.owners.values())
        else:
            given = allocate(plan, trees, devices, held, new=allocator(world, devices))
        session = open_session(plan, given, devices, held, allocated=allocated, executor=executor)
        if world is not None and not allocated:
            why = "it has not been filled by a complete update since it was registered"
            session.poison(why, [replica.name for replica in plan.replicas])
        if before is None:
            return activated(session, plan, world)
        with before.updating():  # so that nothing else is
            session.resume(before)
            registered = activated(session, plan, world)
            before.retire("sf.register")
        return registered


def _can_stay(before: Session, held: frozenset[int], world: World | MpiWorld | None) -> bool:
    """Whether the buffers of an earlier registration can be those of the next one, though nobody gives them again."""
    if world is None or before.part is None or before.held != held:
        return False
    return world.keeps_buffers and before.part.world.keeps_buffers


def registering(world: World | MpiWorld | None) -> contextlib.AbstractContextManager[None]:
    """While this process registers a plan: where all processes of a world do so together, they hear if it fails.

    Raises:
      RegistrationError: The world is none.
      UpdateRefused: An update of the plan that was registered in it before is pending.
    """
    if world is None:
        return contextlib.nullcontext()
    if not hasattr(world, "registering"):
        raise RegistrationError(
            f"registration: world is a {type(world).__name__}, but what sf.connect returns is needed. Give that."
        )
    return world.registering()


def open_session(
    plan: Plan,
    given: Mapping[str, Any],
    devices: Mapping[str, Mapping[int, jax.Device]],
    held: frozenset[int],
    *,
    allocated: bool,
    executor: str,
) -> Session:
    """The session of a plan whose owners are known; nobody takes part in it yet.

    Args:
      given: Owner of each target tree that has ranks here.
      devices: Of each of these trees, by rank counted from 0.
      held: Ranks of this process.
      allocated: Whether the buffers were made for this.
      executor: One of `EXECUTORS`.

    Raises:
      RegistrationError: Lists every buffer that is missing or does not fit, or that shares memory with another.
    """
    plan = dataclasses.replace(plan, session=None)
    owners = {}
    for name in given:
        tree = plan.targets.get(name)
        planned = (
            set(tree.tensors)
            if tree
            else {m for i in plan.target_families if plan.families[i].tree == name for m in plan.families[i].names}
        )
        known = {k: d for k, d in enumerate(tree.devices) if d is not None} if tree and not allocated else devices[name]
        owners[name] = Owner(plan, name, given[name], planned, known if tree else {}, held, allocated)
    return Session(plan, owners, allocated, executor, held)


def activated(session: Session, plan: Plan, world: World | MpiWorld | None) -> Plan:
    """The plan with a session that takes part in updates from now on.

    Raises:
      RegistrationError, WorldError, WorldLost, UpdateRefused: As `register`.
    """
    if world is not None:
        session.part = world.part_of(session)
        with _REGISTERING:
            for other in [one for one in _SESSIONS if one.shares_memory_with(session)]:
                other.poison("its buffers were registered again since", other.versions)
    elif plan.source is not None and all(device is not None for device in plan.source.devices):
        session.make_executor({rank: device for rank, device in enumerate(plan.source.devices) if device is not None})
    with _REGISTERING:
        _SESSIONS.add(session)
    return dataclasses.replace(plan, session=session)


def allocator(
    world: World | MpiWorld | None, devices: Mapping[str, Mapping[int, jax.Device]]
) -> Callable[[Sequence[Wanted]], list[jax.Array]]:
    """What makes buffers on some devices, by tree and rank: where a world's other processes reach them, if it says."""
    if world is None:
        return zeros
    return world.allocator([device for ranks in devices.values() for device in ranks.values()])


def trees_here(plan: Plan, held: frozenset[int]) -> list[str]:
    """Names of the target trees that have ranks in this process."""
    return list(dict.fromkeys(replica.tree for replica in plan.replicas if held & set(replica.ranks)))


def held_ranks(plan: Plan, world: World | MpiWorld | None, ranks: Iterable[int] | None) -> frozenset[int]:
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
    try:
        given = list(ranks)
    except TypeError:
        given = []
    wrong = [r for r in given if isinstance(r, bool) or not isinstance(r, int | np.integer) or not 0 <= r < plan.ranks]
    if wrong or not given:
        raise RegistrationError(
            f"registration: ranks are {', '.join(map(repr, wrong)) or repr(ranks)}, but the plan has ranks 0 to "
            f"{plan.ranks - 1}. Give a list of those that live in this process, e.g. plan.replicas[0].ranks."
        )
    return frozenset(map(int, given))


def owners_of(owner: Any, trees: list[str]) -> dict[str, Any]:
    """The owner of each target tree.

    Raises:
      RegistrationError: They are not given for just these trees.
    """
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


def check_placement(placement: Any) -> None:
    """Raises:
    RegistrationError: It is none.
    """
    if placement is not None and not callable(placement) and not isinstance(placement, Mapping):
        raise RegistrationError(f"registration: placement is a {type(placement).__name__}. Give a dict or a function.")


def devices_of(world: World | MpiWorld | None) -> Sequence[jax.Device]:
    """What the ranks of this process may be on."""
    return jax.local_devices() if world is None else world.devices


def placed(
    plan: Plan, trees: list[str], placement: Any, held: frozenset[int], devices: Sequence[jax.Device]
) -> dict[str, dict[int, jax.Device]]:
    """Device of each rank of this process, per tree, by rank counted from the tree's first.

    Ranks of which neither the plan nor `placement` says so take `devices` in turn.

    Raises:
      RegistrationError: `placement` is no placement, or names no device for some rank.
    """
    check_placement(placement)
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
            out[name][rank] = device or devices[turn % len(devices)]
            turn += 1
    return out
