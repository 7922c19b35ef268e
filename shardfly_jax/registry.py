"""Registration: where a plan's targets live, who owns them, and which version they hold."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from shardfly_jax.executors.memory import Key, Shard
from shardfly_jax.executors.portable import Executor, make_executor
from shardfly_jax.layout import Local, Place, Tree, box_of, is_module, leaf_places, leaves_of
from shardfly_jax.planning import TARGET, Plan, Replicas
from shardfly_jax.sharding.errors import Poisoned, RegistrationError, StaleBuffer
from shardfly_jax.sharding.formats import dtype_name, np_dtype
from shardfly_jax.sharding.layouts import Layout
from shardfly_jax.sharding.patterns import FAMILY, name_pattern

ALIGNMENT = 256
"""Of registered allocations, bytes."""


class Session:
    """The mutable part of a registered plan: buffers, versions, poison. Made by `register`.

    Attributes:
      digest: Of the plan it belongs to.
      buffers: Every target shard by (family, tensor, plan-wide rank).
      owners: One per target tree.
      executor: None until the trainer's devices are known.
      lock: Held during an update.
    """

    def __init__(self, plan: Plan, owners: dict[str, Owner], allocated: bool):
        self.plan = dataclasses.replace(plan, session=None)
        self.digest = plan.digest
        self.owners = owners
        self.buffers: dict[Key, Shard] = {}
        for owner in owners.values():
            self.buffers.update(owner.buffers)
        _check_memory(self.plan, self.buffers)
        self.lock = threading.Lock()
        self.executor: Executor | None = None
        self.binding: Any = None
        self._versions = {replica.name: 0 for replica in plan.replicas}
        empty = "its buffers have never been filled" if allocated else None
        self._poison: dict[str, str | None] = {replica.name: empty for replica in plan.replicas}

    @property
    def versions(self) -> Mapping[str, int]:
        """Version of each replica."""
        return MappingProxyType(dict(self._versions))

    def poison(self, reason: str) -> None:
        """Marks every replica as holding a mixture."""
        self._poison = dict.fromkeys(self._poison, reason)

    def publish(self) -> None:
        """Raises every version by one and lifts the poison."""
        for name in self._versions:
            self._versions[name] += 1
            self._poison[name] = None

    def check_readable(self) -> None:
        """Raises:
        Poisoned: Some replica may not be read.
        """
        bad = {name: reason for name, reason in self._poison.items() if reason}
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
        for owner in self.owners.values():
            owner.check()

    def make_executor(self, source_devices: Mapping[int, jax.Device]) -> None:
        """Prepares the plan for a trainer on these devices, by rank."""
        self.executor = make_executor(self.plan, self.buffers, set(source_devices.values()))

    def handles(self) -> Any:
        """The rollouts' params: new arrays at the registered addresses, in their owners' structures."""
        built = {name: owner.handles() for name, owner in self.owners.items()}
        return built[TARGET] if list(built) == [TARGET] else built


def _buffer_shape(layout: Layout, rank: int) -> tuple[int, ...]:
    return layout.local_shape(rank) if layout.strides is None else (layout.local_size(rank),)


class Owner:
    """One target tree's values: asked for their buffers before every update, given new handles after it.

    Args:
      plan: The plan.
      name: Of the target tree.
      given: A tree of arrays, an `nnx.Module`, or a function that returns one of them.
      planned: Names of all tensors of the tree, kept ones included.
      devices: Device of each rank of the tree, where known from planning.

    Raises:
      RegistrationError: Lists every tensor that does not fit the plan.
    """

    def __init__(self, plan: Plan, name: str, given: Any, planned: set[str], devices: Mapping[int, jax.Device]):
        self.name, self.given, self.planned = name, given, planned
        self.base = min(
            (replica.ranks[0] for replica in plan.replicas if replica.tree == name), default=plan.source_ranks
        )
        self.tensors = {
            member: (index, k)
            for index in plan.target_families
            if plan.families[index].tree == name
            for k, member in enumerate(plan.families[index].names)
        }
        self.families = plan.families
        self.places, leaves, self.structure = leaf_places(self._value(), planned)
        self.buffers: dict[Key, Shard] = {}
        self.known = leaves
        self.current = leaves
        faults = self._bind(leaves, devices)
        if faults:
            raise RegistrationError(
                f"registration: {len(faults)} faults:\n" + "\n".join(f"  - {fault}" for fault in faults)
            )

    def _value(self) -> Any:
        return self.given() if callable(self.given) and not is_module(self.given) else self.given

    def _bind(self, leaves: list[Any], devices: Mapping[int, jax.Device]) -> list[str]:
        faults = []
        found: set[str] = set()
        for (name, rank), leaf in zip(self.places, leaves, strict=True):
            if name not in self.tensors:
                if name not in self.planned:
                    faults.append(
                        f"{name!r} is not a target of the plan. Remove it, or plan for it (keep= leaves it untouched)."
                    )
                continue
            found.add(name)
            fault = self._bind_leaf(name, rank, leaf, devices)
            if fault:
                faults.append(f"{name!r} {fault}")
        for name, (index, k) in self.tensors.items():
            if name not in found:
                faults.append(f"{name!r} is missing. Give a buffer for it.")
                continue
            layout = self.families[index].layout
            absent = [rank - self.base for rank in layout.ranks if (index, k, rank) not in self.buffers]
            if absent and not any(fault.startswith(repr(name)) for fault in faults):
                faults.append(f"{name!r} has no buffer for the ranks {absent}. Give one for each rank of the plan.")
        return faults

    def _bind_leaf(self, name: str, rank: int | None, leaf: Any, devices: Mapping[int, jax.Device]) -> str | None:
        index, k = self.tensors[name]
        layout = self.families[index].layout
        if not isinstance(leaf, jax.Array):
            return (
                f"is a {type(leaf).__name__}, but a jax.Array is needed. Allocate it with jax, or call "
                "sf.register(plan) to let it be allocated."
            )
        if dtype_name(leaf.dtype) != layout.dtype:
            return f"is {leaf.dtype}, but the plan has {layout.dtype}. Allocate it in the planned dtype, or plan anew."
        if rank is not None:
            full = self.base + rank
            if full not in layout.position:
                return f"has a buffer for rank {rank}, which holds nothing of it in the plan. Remove it."
            shape = _buffer_shape(layout, full)
            if leaf.shape != shape or len(leaf.devices()) != 1:
                return (
                    f"has shape {leaf.shape} on rank {rank}, but the plan has {shape} on one device. "
                    "Allocate it so, or plan anew."
                )
            self.buffers[index, k, full] = Shard.of(leaf)
            return None
        if leaf.shape != layout.shape:
            return f"has shape {leaf.shape}, but the plan has {layout.shape}. Allocate it so, or plan anew."
        by_device = {shard.device: shard for shard in leaf.addressable_shards}
        for full, device in self._device_of(leaf, layout, devices).items():
            shard = by_device.get(device)
            if shard is None or box_of(layout.shape, shard.index) != layout.box(full):
                return (
                    f"is cut by {leaf.sharding}, which is not how the plan cuts it. Put it on the planned "
                    "mesh and spec, or plan anew."
                )
            self.buffers[index, k, full] = Shard.of(shard.data)
        return None

    def _device_of(self, leaf: jax.Array, layout: Layout, devices: Mapping[int, jax.Device]) -> dict[int, jax.Device]:
        if all(rank - self.base in devices for rank in layout.ranks):
            return {rank: devices[rank - self.base] for rank in layout.ranks}
        mesh = getattr(leaf.sharding, "mesh", None)
        order = list(mesh.devices.flat) if isinstance(mesh, Mesh) else sorted(leaf.devices(), key=lambda d: d.id)
        return dict(zip(layout.ranks, order, strict=False))

    def check(self) -> None:
        """Raises:
        StaleBuffer: A tensor was rebound, deleted or donated since registration.
        """
        leaves, structure = leaves_of(self._value())
        if structure != self.structure:
            raise StaleBuffer(
                f"owner: the tree of {self.name!r} has changed its structure since it was registered. Register "
                "it again."
            )
        for place, leaf, known, current in zip(self.places, leaves, self.known, self.current, strict=True):
            if place[0] in self.tensors and leaf is not current and leaf is not known:
                self._check_leaf(place, leaf)
        for (index, k, rank), shard in self.buffers.items():
            if shard.array.is_deleted():
                raise StaleBuffer(
                    f"buffer: {self.families[index].name(k)!r} of rank {rank} was deleted or donated since it "
                    "was registered. "
                    "Do not donate rollout params to jitted functions; register again."
                )

    def _check_leaf(self, place: Place, leaf: Any) -> None:
        name, rank = place
        index, k = self.tensors[name]
        if not isinstance(leaf, jax.Array) or leaf.is_deleted():
            raise StaleBuffer(f"buffer: {name!r} of {self.name!r} is no longer a live array. Register the new one.")
        pointers = {shard.device: shard.data.unsafe_buffer_pointer() for shard in leaf.addressable_shards}
        for (i, t, r), shard in self.buffers.items():
            if (i, t) == (index, k) and rank in (None, r - self.base) and pointers.get(shard.device) != shard.address:
                raise StaleBuffer(
                    f"buffer: {name!r} of rank {r} was at {shard.address:#x} when registered, but its owner now "
                    "holds another one. "
                    "Write into the registered buffer instead of rebinding it, or register again."
                )

    def handles(self) -> Any:
        """New arrays at the registered addresses, in the owner's structure; an `nnx.Module` is given them too."""
        out = []
        for (name, rank), leaf in zip(self.places, self.current, strict=True):
            if name not in self.tensors:
                out.append(leaf)
                continue
            index, k = self.tensors[name]
            ranks = self.families[index].layout.ranks if rank is None else (self.base + rank,)
            arrays = [self.buffers[index, k, r].array for r in ranks]
            out.append(jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, arrays))
        self.current = out
        built = jax.tree_util.tree_unflatten(self.structure, out)
        if is_module(self.given):
            from flax import nnx

            nnx.update(self.given, built)
        return list(built) if isinstance(built, tuple) and isinstance(self.given, Local) else built


def register(
    plan: Plan, owner: Any = None, *, placement: Mapping[int, jax.Device] | Callable[[int], jax.Device] | None = None
) -> Plan:
    """Binds a plan to rollout buffers, once; every later `sync` writes into the same addresses.

    Args:
      plan: From `make_plan` or `load_plan`.
      owner: Holds the buffers: a tree of arrays in the target's structure, an `nnx.Module`, or a function that returns
        one; a dict of them for several replica trees. It is asked for its addresses before every update. Rank-local
        tensors stand as `{rank: array}`, or as a list of trees for `sf.local`. None allocates the buffers.
      placement: Device of each rollout rank, counted from 0, where the target's mesh does not say; several ranks may
        share one. By default ranks take this process' devices in turn.

    Returns:
      The plan with its session. Its older handles stay unregistered.

    Raises:
      RegistrationError: Lists every buffer that is missing or does not fit, or that shares memory with another.
    """
    plan = dataclasses.replace(plan, session=None)
    trees = list(dict.fromkeys(replica.tree for replica in plan.replicas))
    devices = _placed(plan, trees, placement)
    allocated = owner is None
    given = _allocate(plan, trees, devices) if allocated else _owners(owner, trees)
    owners = {}
    for name in trees:
        tree = plan.targets.get(name)
        planned = (
            set(tree.tensors)
            if tree
            else {m for i in plan.target_families if plan.families[i].tree == name for m in plan.families[i].names}
        )
        known = {k: d for k, d in enumerate(tree.devices) if d is not None} if tree and not allocated else devices[name]
        owners[name] = Owner(plan, name, given[name], planned, known if tree else {})
    session = Session(plan, owners, allocated)
    if plan.source is not None and all(device is not None for device in plan.source.devices):
        session.make_executor({rank: device for rank, device in enumerate(plan.source.devices) if device is not None})
    return dataclasses.replace(plan, session=session)


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


def _placed(plan: Plan, trees: list[str], placement: Any) -> dict[str, dict[int, jax.Device]]:
    local = jax.local_devices()
    out: dict[str, dict[int, jax.Device]] = {}
    number = 0
    for name in trees:
        tree = plan.targets.get(name)
        count = len(tree.devices) if tree else sum(len(r.ranks) for r in plan.replicas if r.tree == name)
        out[name] = {}
        for rank in range(count):
            device = tree.devices[rank] if tree else None
            if device is None and placement is not None:
                device = placement(number) if callable(placement) else placement.get(number)
                if device is None:
                    raise RegistrationError(
                        f"registration: placement names no device for rollout rank {number}. Name one for every rank."
                    )
            out[name][rank] = device or local[number % len(local)]
            number += 1
    return out


def _allocate(plan: Plan, trees: list[str], devices: Mapping[str, Mapping[int, jax.Device]]) -> dict[str, Any]:
    if plan.keep:
        raise RegistrationError(
            "registration: the plan keeps some targets untouched, but there is no owner that has them. Give the "
            "rollout's params."
        )
    given: dict[str, Any] = {}
    for name in trees:
        base = min(replica.ranks[0] for replica in plan.replicas if replica.tree == name)
        local: dict[str, dict[int, jax.Array]] = {}
        for index in plan.target_families:
            family = plan.families[index]
            if family.tree != name:
                continue
            for member in family.names:
                local[member] = {}
                for rank in family.layout.ranks:
                    zeros = _aligned_zeros(_buffer_shape(family.layout, rank), np_dtype(family.layout.dtype))
                    local[member][rank - base] = jax.device_put(zeros, devices[name][rank - base])
        _share_aliases(plan, name, local)
        given[name] = _in_structure(plan.targets.get(name), local)
    return given


def _aligned_zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """Zeros at an address that JAX on a CPU adopts instead of copying; other platforms copy anyway."""
    nbytes = int(np.prod(shape)) * dtype.itemsize
    memory = np.zeros(nbytes + ALIGNMENT, np.uint8)
    skip = -memory.ctypes.data % ALIGNMENT
    return memory[skip : skip + nbytes].view(dtype).reshape(shape)


def _share_aliases(plan: Plan, tree: str, local: dict[str, dict[int, jax.Array]]) -> None:
    for index in plan.target_families:
        family = plan.families[index]
        if family.tree == tree and family.alias_of is not None:
            for k, member in enumerate(family.names):
                other = local[name_pattern(family.alias_of).format({FAMILY: family.first + k})]
                for rank, array in local[member].items():
                    if rank in other and other[rank].shape == array.shape and other[rank].dtype == array.dtype:
                        local[member][rank] = other[rank]


def _in_structure(tree: Tree | None, local: Mapping[str, Mapping[int, jax.Array]]) -> Any:
    if tree is None:
        return dict(local)
    if tree.is_local:
        return [
            jax.tree_util.tree_unflatten(structure, [local[name][rank] for name in names])
            for rank, (names, structure) in enumerate(tree.parts)
        ]
    ((names, structure),) = tree.parts
    leaves: list[Any] = []
    for name in names:
        sharding = tree.shardings[name]
        if sharding is None or any(device is None for device in tree.devices):
            leaves.append(dict(local[name]))
        else:
            layout = tree.tensors[name]
            leaves.append(jax.make_array_from_single_device_arrays(layout.shape, sharding, list(local[name].values())))  # type: ignore[union-attr]
    return jax.tree_util.tree_unflatten(structure, leaves)


def _check_memory(plan: Plan, buffers: Mapping[Key, Shard]) -> None:
    """Raises:
    RegistrationError: Two targets share memory without being aliases, or host memory cannot be written.
    """
    ranges: dict[tuple[jax.Device | str, int, int], list[Key]] = {}
    for key, shard in buffers.items():
        where = "host" if shard.device.platform == "cpu" else shard.device
        ranges.setdefault((where, shard.address, shard.address + shard.nbytes), []).append(key)

    def name(key: Key) -> str:
        return f"{plan.families[key[0]].name(key[1])!r} of rank {key[2]}"

    faults = []
    for keys in ranges.values():
        if len(keys) > 1 and sum(plan.families[family].alias_of is None for family, _, _ in keys) > 1:
            faults.append(
                f"{name(keys[0])} and {name(keys[1])} share one buffer. Declare one as sf.alias of the other, "
                "or give each its own."
            )
    ordered = sorted(((str(where), lo, hi, keys[0]) for (where, lo, hi), keys in ranges.items()), key=lambda r: r[:3])
    for (where, _, hi, key), (next_where, lo, _, next_key) in itertools.pairwise(ordered):
        if where == next_where and lo < hi:
            faults.append(f"{name(key)} and {name(next_key)} overlap in memory. Give each its own buffer.")
    read_only = _read_only_ranges() if any(where == "host" for where, _, _ in ranges) else []
    for where, lo, hi, key in ordered:
        if where == "host" and any(a < hi and lo < b for a, b in read_only):
            faults.append(f"{name(key)} lies in read-only memory. Copy it first, e.g. jnp.array(x, copy=True).")
    if faults:
        raise RegistrationError(
            f"registration: {len(faults)} faults:\n" + "\n".join(f"  - {fault}" for fault in faults)
        )


def _read_only_ranges() -> list[tuple[int, int]]:
    try:
        with open("/proc/self/maps") as file:
            lines = file.readlines()
    except OSError:  # not Linux
        return []
    out = []
    for line in lines:
        span, flags, *_ = line.split()
        if "w" not in flags:
            lo, hi = (int(part, 16) for part in span.split("-"))
            out.append((lo, hi))
    return out
