"""Which arrays of a params tree are a plan's source shards: resolved once for its structure, checked every time."""

from __future__ import annotations

import dataclasses
import math
import re
import time
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from shardfly_jax.executors.memory import Key, Sources, hold, memory_of, wait_for
from shardfly_jax.layout import Place, box_of, leaf_places, leaves_like, leaves_of, read_tree
from shardfly_jax.session import Session
from shardfly_jax.sharding.errors import ParamsMismatch, PlanError
from shardfly_jax.sharding.families import Family
from shardfly_jax.sharding.formats import dtype_name, itemsize
from shardfly_jax.sharding.layouts import Box, Layout


@dataclasses.dataclass(frozen=True)
class Expected:
    """What one leaf of the params must be, and which source shards it holds.

    Attributes:
      name: Of the tensor.
      label: The name, and the rank of a rank-local part, for messages.
      keys: (family, tensor, rank) and device of each shard that the plan reads.
    """

    name: str
    label: str
    shape: tuple[int, ...]
    dtype: Any
    sharding: jax.sharding.Sharding
    keys: tuple[tuple[Key, jax.Device], ...]


@dataclasses.dataclass(frozen=True)
class Binding:
    """Names of a params tree, resolved once for its structure.

    Attributes:
      structure: Trees of this structure need no name resolved.
      expected: Of each leaf that the plan reads, by its number.
      whole: Those among them that are on a single device, and so their own only shard.
      cut: The others, and which of their shards in this process are read.
      places: Of source shards among the arrays of `shards_of`.
      devices: Of each rank that holds a source shard.
      ranges: Per memory, the keys of the source shards in it, their places, and their sizes in bytes.
      seen: Abstract values and shardings of the leaves that it reads, as they were last checked in full.
    """

    structure: Any
    expected: dict[int, Expected]
    whole: tuple[int, ...]
    cut: tuple[tuple[int, tuple[int, ...]], ...]
    places: dict[Key, int]
    devices: dict[int, jax.Device]
    ranges: dict[str, tuple[list[Key], np.ndarray, np.ndarray]]
    seen: list[Any]


def shards_of(leaves: list[Any], binding: Binding) -> Sources:
    """The single-device array of every source shard."""
    arrays = [leaves[k] for k in binding.whole]
    for k, shards in binding.cut:
        leaf = leaves[k]
        if leaf.is_fully_replicated:  # `addressable_data` would return the first one for all
            arrays += [leaf.addressable_shards[shard].data for shard in shards]
        else:
            arrays += [leaf.addressable_data(shard) for shard in shards]
    return Sources(binding.places, arrays)


def ready_shards(
    leaves: list[Any], binding: Binding, *, computed: bool = False, keep: bool = False
) -> tuple[Sources, list[np.ndarray]]:
    """As `shards_of`, once they are computed.

    Args:
      computed: Whether they are known to be, unless they were deleted.
      keep: Whether their memory shall outlive a donation, on CPU devices.

    Returns:
      The arrays, and what keeps their memory: nothing unless asked for.

    Raises:
      ParamsMismatch: Some were deleted or donated.
    """
    try:
        arrays = shards_of(leaves, binding)
        if computed:
            _ = arrays.addresses  # which a deleted array does not tell
        else:
            wait_for([leaves[k] for k in binding.expected])  # fewer than their shards
        return arrays, hold(arrays.arrays) if keep else []
    except (RuntimeError, ValueError) as error:  # JAX's for a deleted array, and for one whose computation failed
        found, says_so = _deleted(leaves, binding), _DELETED.search(str(error))
        limit = time.monotonic() + DONATION_SECS
        while says_so and not found and time.monotonic() < limit:  # a donation half done: no array says so yet
            time.sleep(1e-3)
            found = _deleted(leaves, binding)
        if says_so or found:
            raise _mismatch([label + _GONE for label in found or ["an array"]]) from None
        raise


DONATION_SECS = 1.0
"""How long a donation that has begun may take until its arrays say that they are deleted."""
_DELETED = re.compile("deleted|donated")
_GONE = (
    " was deleted or donated. Pass the params that the train step returned, and donate none that an update reads "
    "before it is done"
)


def _deleted(leaves: list[Any], binding: Binding) -> list[str]:
    """Labels of the leaves that were deleted or donated."""
    return [want.label for k, want in binding.expected.items() if leaves[k].is_deleted()]


def check_not_donated(leaves: list[Any], binding: Binding) -> None:
    """Raises:
    ParamsMismatch: A source was donated since it was bound.
    """
    if gone := _deleted(leaves, binding):
        raise ParamsMismatch(
            f"params: {gone[0]} and {len(gone) - 1} more were deleted or donated before the update was done. Do not "
            "donate params that an update reads: ask for the result of its handle first."
        )


def bind(params_: Any, session: Session, *, read_next: bool = False) -> tuple[list[Any], Binding]:
    """The leaves of a params tree, and what they are to a plan.

    Args:
      params_: The tree.
      session: Of the plan.
      read_next: Whether the caller goes on with `ready_shards`, which tells of what was deleted.

    Raises:
      ParamsMismatch: They are not the planned ones.
    """
    if session.binding is not None and (leaves := _unchanged(params_, session.binding, read_next)) is not None:
        return leaves, session.binding
    leaves, structure = leaves_of(params_)
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        raise ParamsMismatch(
            "params: they are traced, as inside jax.jit, but an update needs arrays. Call it outside, or end the "
            "jitted step with sf.send(params, sender), as README shows under 'Inside a jitted step'."
        )
    if session.binding is None or session.binding.structure != structure:
        session.binding = _resolve(params_, session)
    faults = []
    for k, want in session.binding.expected.items():
        leaf = leaves[k]
        if not isinstance(leaf, jax.Array):
            faults.append(f"{want.label} is a {type(leaf).__name__}, but a jax.Array is needed")
        elif leaf.is_deleted():
            faults.append(want.label + _GONE)
        elif leaf.shape != want.shape:
            faults.append(f"{want.label} has shape {leaf.shape}, but the plan has {want.shape}")
        elif leaf.dtype != want.dtype:
            faults.append(f"{want.label} is {leaf.dtype}, but the plan has {want.dtype}")
        elif leaf.sharding != want.sharding and not leaf.sharding.is_equivalent_to(want.sharding, leaf.ndim):
            faults.append(
                f"{want.label} has sharding {_named(leaf.sharding)}, but the plan has {_named(want.sharding)}"
            )
    if faults:
        raise _mismatch(faults)
    read = [leaves[k] for k in session.binding.expected]
    session.binding.seen[:] = [leaf.aval for leaf in read], [leaf.sharding for leaf in read]
    return leaves, session.binding


def _unchanged(params_: Any, binding: Binding, deleted_too: bool) -> list[Any] | None:
    """The leaves of params which are, but for their values, those that were last checked in full; None if unsure.

    This is most of what an update asks of a train step's params, so it is made of few calls per leaf.
    """
    leaves = leaves_like(params_, binding.structure)
    if leaves is None:
        return None
    read = [leaves[k] for k in binding.expected]
    try:
        like = [[leaf.aval for leaf in read], [leaf.sharding for leaf in read]]
        same = like == binding.seen and (deleted_too or not any(leaf.is_deleted() for leaf in read))
        return leaves if same else None
    except AttributeError:  # something that is no array
        return None


def _named(sharding: jax.sharding.Sharding) -> str:
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        devices = [str(device) for device in sharding.mesh.devices.flat]  # whose order counts
    else:
        devices = sorted(map(str, sharding.device_set))
    return f"{sharding} on the devices {devices}"


def _mismatch(faults: list[str]) -> ParamsMismatch:
    return ParamsMismatch(
        f"params: {len(faults)} differ from the plan; nothing was written. Pass the planned params or make a "
        "new plan.\n" + "\n".join(f"  - {fault}." for fault in faults)
    )


def _needed(session: Session) -> dict[str, list[tuple[int, int]]]:
    """(family, tensor) pairs of each source name."""
    needed: dict[str, list[tuple[int, int]]] = {}
    for index in session.plan.source_families:
        for tensor, name in enumerate(session.plan.families[index].names):
            needed.setdefault(name, []).append((index, tensor))
    return needed


def _resolve(params_: Any, session: Session) -> Binding:
    needed = _needed(session)
    families = session.plan.families
    places, leaves, structure = leaf_places(params_, needed)
    held = session.held
    have = {name for name, _ in places}
    here = {
        name for name, members in needed.items() if any(held.intersection(families[i].layout.ranks) for i, _ in members)
    }
    if missing := [name for name in needed if name in here and name not in have]:
        raise _mismatch([f"{name!r} is missing" for name in missing])
    gone = [
        _label(name, rank) + _GONE
        for (name, rank), leaf in zip(places, leaves, strict=True)
        if name in here and isinstance(leaf, jax.Array) and leaf.is_deleted()
    ]
    if gone:  # which device it was on, it no longer says
        raise _mismatch(gone)
    ranks = _rank_devices(params_, session, places, leaves)
    expected: dict[int, Expected] = {}
    faults: list[str] = []
    for number, ((name, rank), leaf) in enumerate(zip(places, leaves, strict=True)):
        if name not in here or not isinstance(leaf, jax.Array):
            if name in here:
                faults.append(f"{name!r} is a {type(leaf).__name__}, but a jax.Array is needed")
            continue
        keys = []
        for index, tensor in needed[name]:
            layout = families[index].layout
            fault = _fault(leaf, layout, rank, ranks, held)
            if fault:
                faults.append(f"{name!r} {fault}")
                break
            if rank is None:
                keys += [((index, tensor, r), ranks[r]) for r in layout.ranks if r in held]
            else:
                keys.append(((index, tensor, rank), next(iter(leaf.devices()))))
        expected[number] = Expected(name, _label(name, rank), leaf.shape, leaf.dtype, leaf.sharding, tuple(keys))
    given = {key for want in expected.values() for key, _ in want.keys}
    if not faults:
        for name, members in needed.items():
            absent = {
                r for i, t in members for r in held.intersection(families[i].layout.ranks) if (i, t, r) not in given
            }
            if absent:
                faults.append(f"{name!r} lacks the shards of ranks {sorted(absent)}")
    if faults:
        raise _mismatch(faults)
    devices = {key[2]: device for want in expected.values() for key, device in want.keys}
    whole = [k for k, want in expected.items() if len(want.sharding.device_set) == 1]
    cut = [k for k, want in expected.items() if len(want.sharding.device_set) > 1]
    order = {k: [shard.device for shard in leaves[k].addressable_shards] for k in cut}
    at = {key: place for place, k in enumerate(whole) for key, _ in expected[k].keys}
    shards = (key for k in cut for key, _ in expected[k].keys)
    at |= {key: place for place, key in enumerate(shards, len(whole))}
    return Binding(
        structure=structure,
        expected=expected,
        whole=tuple(whole),
        cut=tuple((k, tuple(order[k].index(device) for _, device in expected[k].keys)) for k in cut),
        places=at,
        devices=devices,
        ranges=_ranges(expected, families, at),
        seen=[],
    )


def _label(name: str, rank: int | None) -> str:
    return repr(name) if rank is None else f"{name!r} of rank {rank}"


def _ranges(
    expected: dict[int, Expected], families: tuple[Family, ...], places: dict[Key, int]
) -> dict[str, tuple[list[Key], np.ndarray, np.ndarray]]:
    found: dict[str, list[tuple[Key, int]]] = {}
    for want in expected.values():
        for key, device in want.keys:
            layout = families[key[0]].layout
            nbytes = math.prod(layout.buffer_shape(key[2])) * itemsize(layout.dtype)
            found.setdefault(memory_of(device), []).append((key, nbytes))
    return {
        memory: (
            [key for key, _ in items],
            np.array([places[key] for key, _ in items]),
            np.array([n for _, n in items], np.int64),
        )
        for memory, items in found.items()
    }


def _rank_devices(params_: Any, session: Session, places: list[Place], leaves: list[Any]) -> dict[int, jax.Device]:
    """Device of each trainer rank: as planned, or in the mesh order of these params."""
    source = session.plan.source
    if source is not None and all(device is not None for device in source.devices):
        return {rank: device for rank, device in enumerate(source.devices) if device is not None}
    ranks = {
        rank: next(iter(leaf.devices()))
        for (_, rank), leaf in zip(places, leaves, strict=True)
        if rank is not None and isinstance(leaf, jax.Array)
    }
    if ranks:
        return ranks
    try:
        devices = read_tree(params_, "params").devices
    except PlanError as error:
        raise _mismatch([fault.rstrip(".") for fault in error.faults]) from None
    trainers = sorted(rank for rank in session.held if rank < session.plan.source_ranks)
    if len(devices) == len(trainers):  # a mesh of the ranks that live in this process
        return {rank: device for rank, device in zip(trainers, devices, strict=True) if device is not None}
    return {rank: device for rank, device in enumerate(devices) if device is not None}


def _fault(
    leaf: jax.Array, layout: Layout, rank: int | None, ranks: dict[int, jax.Device], held: frozenset[int]
) -> str | None:
    """Why an array is not the planned source; None if it is."""
    if dtype_name(leaf.dtype) != layout.dtype:
        return f"is {leaf.dtype}, but the plan has {layout.dtype}"
    if rank is not None:
        if rank not in layout.position or rank not in held:
            here = [r for r in layout.ranks if r in held]
            return f"is given for rank {rank}, but of its holders this process has the trainer ranks {here}"
        if leaf.shape != layout.buffer_shape(rank):
            return f"has shape {leaf.shape} on rank {rank}, but the plan has {layout.buffer_shape(rank)} there"
        if leaf.devices() != {ranks[rank]}:
            return f"lies on {leaf.devices()} for rank {rank}, but that rank is on {ranks[rank]}"
        return None
    if layout.strides is not None:
        return "is one array, but the plan has strided shards. Give one flat buffer per rank, {rank: array}"
    if leaf.shape != layout.shape:
        return f"has shape {leaf.shape}, but the plan has {layout.shape}"
    index = leaf.sharding.devices_indices_map(leaf.shape)
    for r in held.intersection(layout.ranks):
        device = ranks.get(r)
        if device not in index:
            return f"has sharding {_named(leaf.sharding)}, but its planned shard of rank {r} is on {device}"
        have, planned = box_of(leaf.shape, index[device]), layout.box(r)
        if have != planned:
            return (
                f"has sharding {_named(leaf.sharding)}, so {_box_text(have)} on {device}, but the planned shard of "
                f"rank {r} there is {_box_text(planned)}. Give it in the planned sharding, or as {{rank: array}}"
            )
    return None


def _box_text(box: Box) -> str:
    return f"[{', '.join(f'{lo}:{hi}' for lo, hi in box)}]"


def check_addresses(session: Session, binding: Binding, arrays: Sources) -> None:
    """Raises:
    ParamsMismatch: A source shard shares memory with a registered buffer, or is not aligned as the executor needs it.
    """
    alignment = 1 if session.executor is None else session.executor.alignment  # none where a world moves the bytes
    for memory, (keys, places, nbytes) in binding.ranges.items():
        addresses = arrays.addresses[places]
        crooked = addresses % alignment != 0
        if crooked.any():
            family, tensor, rank = keys[int(crooked.argmax())]
            label = f"{session.plan.families[family].name(tensor)!r} of rank {rank}"
            remedy = "Let JAX allocate it, or register with executor='portable'"
            raise _mismatch([f"{label} is not aligned to {alignment} bytes. {remedy}"])
        shared = session.occupied.first_overlap(memory, addresses, nbytes)
        if shared is None:
            continue
        source, target = (session.plan.families[key[0]].name(key[1]) for key in (keys[shared[0]], shared[1]))
        raise _mismatch(
            [
                f"{source!r} lies in the buffer registered for {target!r}. Give the rollout buffers of its own, "
                "e.g. sf.register(plan)"
            ]
        )
