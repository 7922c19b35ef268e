"""`sync`, `params`, `verify`: one update of the weights, in one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from shardfly_jax.executors.memory import Key, Shard, host_bytes, overlaps, wait_for_readers
from shardfly_jax.layout import Place, box_of, leaf_places, leaves_of, read_tree
from shardfly_jax.planning import Plan
from shardfly_jax.registry import Session
from shardfly_jax.sharding.errors import NotRegistered, ParamsMismatch, PlanError, VerificationError
from shardfly_jax.sharding.evaluate import evaluate
from shardfly_jax.sharding.formats import dtype_name, np_dtype
from shardfly_jax.sharding.layouts import Box, Layout
from shardfly_jax.sharding.moves import View
from shardfly_jax.sharding.patterns import FAMILY, name_pattern


@dataclasses.dataclass(frozen=True)
class _Expected:
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
class _Binding:
    """Names of a params tree, resolved once for its structure.

    Attributes:
      structure: Trees of this structure need no name resolved.
      expected: Per leaf; None for leaves that the plan does not read.
      devices: All that hold a source shard.
    """

    structure: Any
    expected: tuple[_Expected | None, ...]
    devices: set[jax.Device]


def sync(params: Any, plan: Plan, *, progress: Callable[[int], None] | None = None) -> Any:
    """Brings every rollout to the trainer's current weights.

    Blocks until the update's outcome is known. Computations on rollout params that were queued before see the old
    weights; what runs after it returns sees the new ones.

    Args:
      params: The trainer's tree as it was planned: same names, shapes, dtypes and shardings.
      plan: A registered plan.
      progress: Called with bytes written as they are, from several threads.

    Returns:
      The rollout's params: new arrays at the registered addresses, in the structure of their owner; a dict of trees for
      several replica trees. Arrays returned earlier are invalid from now on.

    Raises:
      NotRegistered, DigestMismatch: The plan has no buffers, or another plan's.
      ParamsMismatch: `params` are not the planned ones. Nothing was written, the old version is still served.
      StaleBuffer: An owner rebound, deleted or donated a buffer. Nothing was written.
      Any error in between: replicas are poisoned until the next complete update.
    """
    if not isinstance(plan, Plan):
        raise NotRegistered(f"sync: its second argument is a {type(plan).__name__}, but a registered plan is needed.")
    if progress is not None and not callable(progress):
        raise ParamsMismatch(f"sync: progress is a {type(progress).__name__}, but a function of bytes is needed.")
    session = plan.registered()
    with session.updating():
        leaves, binding = _bound(params, session)
        session.check_buffers()
        if session.executor is None:
            session.make_executor(binding.devices)
        assert session.executor is not None
        jax.block_until_ready([leaf for leaf, want in zip(leaves, binding.expected, strict=True) if want is not None])
        arrays = _shards(leaves, binding)
        _check_overlap(session, arrays)
        wait_for_readers({shard.device for shard in session.buffers.values()})
        session.poison("an update began and did not finish")
        try:
            guarded = None if progress is None else session.guarded(progress)
            session.executor.run(lambda *key: arrays[key], guarded)
        except BaseException as error:
            session.poison(f"an update failed half way: {type(error).__name__}: {error}")
            raise
        session.publish()
        return session.handles()


def params(plan: Plan) -> Any:
    """The rollout's current params, as `sync` returned them last.

    Raises:
      NotRegistered: The plan has no buffers.
      Poisoned: An update failed half way, or allocated buffers have never been filled.
    """
    session = plan.registered()
    session.check_readable()
    session.check_alive()
    return session.handles()


def bound_sources(params_: Any, plan: Plan) -> dict[Key, jax.Array]:
    """The single-device array of every source shard that a registered plan reads, by (family, tensor, rank).

    Raises:
      ParamsMismatch: `params_` are not the planned ones.
    """
    return _shards(*_bound(params_, plan.registered()))


def _shards(leaves: list[Any], binding: _Binding) -> dict[Key, jax.Array]:
    arrays: dict[Key, jax.Array] = {}
    for leaf, want in zip(leaves, binding.expected, strict=True):
        if want is not None:
            by_device = {shard.device: shard.data for shard in leaf.addressable_shards}
            arrays.update({key: by_device[device] for key, device in want.keys})
    return arrays


def _bound(params_: Any, session: Session) -> tuple[list[Any], _Binding]:
    leaves, structure = leaves_of(params_)
    if session.binding is None or session.binding.structure != structure:
        session.binding = _resolve(params_, session)
    faults = []
    for leaf, want in zip(leaves, session.binding.expected, strict=True):
        if want is None:
            continue
        if not isinstance(leaf, jax.Array):
            faults.append(f"{want.label} is a {type(leaf).__name__}, but a jax.Array is needed")
        elif leaf.is_deleted():
            faults.append(f"{want.label} was deleted or donated. Pass the params that the train step returned")
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
    return leaves, session.binding


def _named(sharding: jax.sharding.Sharding) -> str:
    return f"{sharding} on the devices {sorted(map(str, sharding.device_set))}"


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


def _resolve(params_: Any, session: Session) -> _Binding:
    needed = _needed(session)
    families = session.plan.families
    places, leaves, structure = leaf_places(params_, needed)
    have = {name for name, _ in places}
    if missing := [name for name in needed if name not in have]:
        raise _mismatch([f"{name!r} is missing" for name in missing])
    ranks = _rank_devices(params_, session, places, leaves)
    expected: list[_Expected | None] = []
    faults: list[str] = []
    for (name, rank), leaf in zip(places, leaves, strict=True):
        if name not in needed or not isinstance(leaf, jax.Array):
            if name in needed:
                faults.append(f"{name!r} is a {type(leaf).__name__}, but a jax.Array is needed")
            expected.append(None)
            continue
        keys = []
        for index, tensor in needed[name]:
            layout = families[index].layout
            fault = _fault(leaf, layout, rank, ranks)
            if fault:
                faults.append(f"{name!r} {fault}")
                break
            if rank is None:
                keys += [((index, tensor, r), ranks[r]) for r in layout.ranks]
            else:
                keys.append(((index, tensor, rank), next(iter(leaf.devices()))))
        label = repr(name) if rank is None else f"{name!r} of rank {rank}"
        expected.append(_Expected(name, label, leaf.shape, leaf.dtype, leaf.sharding, tuple(keys)))
    given = {key for want in expected if want is not None for key, _ in want.keys}
    if not faults:
        for name, members in needed.items():
            absent = {r for i, t in members for r in families[i].layout.ranks if (i, t, r) not in given}
            if absent:
                faults.append(f"{name!r} lacks the shards of ranks {sorted(absent)}")
    if faults:
        raise _mismatch(faults)
    devices = {device for want in expected if want is not None for _, device in want.keys}
    return _Binding(structure, tuple(expected), devices)


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
    return {rank: device for rank, device in enumerate(devices) if device is not None}


def _fault(leaf: jax.Array, layout: Layout, rank: int | None, ranks: dict[int, jax.Device]) -> str | None:
    """Why an array is not the planned source; None if it is."""
    if dtype_name(leaf.dtype) != layout.dtype:
        return f"is {leaf.dtype}, but the plan has {layout.dtype}"
    if rank is not None:
        if rank not in layout.position or leaf.shape != layout.buffer_shape(rank):
            want = layout.buffer_shape(rank) if rank in layout.position else "nothing"
            return f"has shape {leaf.shape} on rank {rank}, but the plan has {want} there"
        if leaf.devices() != {ranks[rank]}:
            return f"lies on {leaf.devices()} for rank {rank}, but that rank is on {ranks[rank]}"
        return None
    if layout.strides is not None:
        return "is one array, but the plan has strided shards. Give one flat buffer per rank, {rank: array}"
    if leaf.shape != layout.shape:
        return f"has shape {leaf.shape}, but the plan has {layout.shape}"
    index = leaf.sharding.devices_indices_map(leaf.shape)
    for r in layout.ranks:
        device = ranks.get(r)
        if device not in index or box_of(leaf.shape, index[device]) != layout.box(r):
            return f"has sharding {_named(leaf.sharding)}, but its planned shard of rank {r} is on {device}"
    return None


def _check_overlap(session: Session, arrays: dict[Key, jax.Array]) -> None:
    """Raises:
    ParamsMismatch: A source shard shares memory with a registered buffer.
    """
    sources = ((Shard.of(array).range, (key, False)) for key, array in arrays.items())
    targets = ((shard.range, (key, True)) for key, shard in session.buffers.items())
    for (_, first), (_, second) in overlaps([*sources, *targets]):
        if first[1] != second[1]:
            (source, _), (target, _) = sorted((first, second), key=lambda item: item[1])
            names = [session.plan.families[key[0]].name(key[1]) for key in (source, target)]
            raise _mismatch(
                [
                    f"{names[0]!r} lies in the buffer registered for {names[1]!r}. Give the rollout buffers "
                    "of its own, e.g. sf.register(plan)"
                ]
            )


def verify(params_: Any, plan: Plan, *, progress: Callable[[int], None] | None = None) -> int:
    """Compares every byte of every target shard with what the mapping says it should be.

    Args:
      params_: The params that were synced last.
      plan: A registered plan.
      progress: Called with bytes compared.

    Returns:
      Bytes compared.

    Raises:
      VerificationError: Names the tensors and ranks that differ, and how many elements.
      Poisoned, NotRegistered, ParamsMismatch: As for `params` and `sync`.
    """
    session = plan.registered()
    session.check_readable()
    leaves, binding = _bound(params_, session)
    session.check_alive()
    arrays = _shards(leaves, binding)
    parts: dict[str, list[tuple[Key, jax.Array]]] = {}
    for expect in binding.expected:
        if expect is not None:
            parts.setdefault(expect.name, []).extend((key, arrays[key]) for key, _ in expect.keys)

    def source(name: str, i: int) -> np.ndarray:
        return _whole(parts[name_pattern(name).format({FAMILY: i})], session)

    wrong: list[str] = []
    checked = 0
    for family_index, tensor, whole in _meanings(session, source):
        family = session.plan.families[family_index]
        for rank in family.layout.ranks:
            meant = whole[tuple(slice(lo, hi) for lo, hi in family.layout.box(rank))]
            have = _read(session, (family_index, tensor, rank))
            differing = int(np.count_nonzero(_bytes_of(meant) != _bytes_of(have)))
            if differing:
                wrong.append(f"{family.name(tensor)!r} of rank {rank}: {differing} of {meant.nbytes} bytes")
            checked += meant.nbytes
            if progress is not None:
                progress(meant.nbytes)
    if wrong:
        shown = "\n".join(f"  - {line}" for line in wrong[:20])
        raise VerificationError(f"verify: {len(wrong)} target shards differ from their mapping:\n{shown}")
    return checked


def _whole(parts: list[tuple[Key, jax.Array]], session: Session) -> np.ndarray:
    """The whole of a source, from its shards; not cached by them, as `np.asarray` of a whole array would be."""
    layout = session.plan.families[parts[0][0][0]].layout
    out = np.zeros(layout.shape, np_dtype(layout.dtype))  # plans read no part that no rank holds
    filled: set[Box] = set()
    for (family, _, rank), array in parts:
        layout = session.plan.families[family].layout
        box = layout.box(rank)
        if box not in filled:
            filled.add(box)
            view = View(0, layout.local_shape(rank), layout.local_strides(rank))
            out[tuple(slice(lo, hi) for lo, hi in box)] = view.of(np.asarray(array).reshape(-1))
    return out


def _meanings(session: Session, source: Callable[[str, int], np.ndarray]) -> Iterator[tuple[int, int, np.ndarray]]:
    """Family, tensor and whole value of every target."""
    for index in session.plan.target_families:
        family = session.plan.families[index]
        assert family.expr is not None
        expr = family.expr.astype(family.layout.dtype)
        for tensor in range(family.count):
            yield index, tensor, evaluate(expr, source, family.first + tensor, family.cuts)


def _read(session: Session, key: Key) -> np.ndarray:
    """A copy of what a registered buffer holds, in the order of its box's axes."""
    shard, layout = session.buffers[key], session.plan.families[key[0]].layout
    if shard.device.platform == "cpu":
        flat = host_bytes(shard.address, shard.nbytes).view(np_dtype(layout.dtype))
    else:  # through a new handle: the registered one would keep the host copy of its first reading
        array = shard.array
        fresh = jax.make_array_from_single_device_arrays(array.shape, array.sharding, [array])
        flat = np.asarray(fresh).reshape(-1)
    return View(0, layout.local_shape(key[2]), layout.local_strides(key[2])).of(flat)


def _bytes_of(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)
