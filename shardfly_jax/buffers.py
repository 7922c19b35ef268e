"""Buffers that registration allocates, and checks of the memory in which any of them lie."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np

from shardfly_jax.executors.memory import HOST, Key, MemoryRange, Shard, overlaps
from shardfly_jax.layout import Tree
from shardfly_jax.planning import Plan
from shardfly_jax.sharding.errors import RegistrationError
from shardfly_jax.sharding.formats import np_dtype
from shardfly_jax.sharding.patterns import FAMILY, name_pattern

ALIGNMENT = 256
"""Of registered allocations, bytes."""


class Wanted(NamedTuple):
    """A buffer that is to be allocated."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    device: jax.Device

    @property
    def nbytes(self) -> int:
        """Of it."""
        return math.prod(self.shape) * self.dtype.itemsize


def zeros(wanted: Sequence[Wanted]) -> list[jax.Array]:
    """Zeroed arrays, each by itself."""
    return [jax.device_put(_aligned_zeros(one.shape, one.dtype), one.device) for one in wanted]


def allocate(
    plan: Plan,
    trees: list[str],
    devices: Mapping[str, Mapping[int, jax.Device]],
    held: frozenset[int],
    fitting: Mapping[Key, jax.Array] = MappingProxyType({}),
    new: Callable[[Sequence[Wanted]], list[jax.Array]] = zeros,
) -> dict[str, Any]:
    """Zeroed buffers for every target, aliases sharing one: per tree, in its structure.

    Args:
      devices: Of each tree, by rank counted from 0.
      held: Plan-wide ranks to allocate for; those of a part of a tree stand as `{rank: array}`.
      fitting: Buffers that are there already.
      new: Makes the others.

    Raises:
      RegistrationError: The plan keeps targets that only an owner has.
    """
    if plan.keep and trees:
        raise RegistrationError(
            "registration: the plan keeps some targets untouched, but there is no owner that has them. Give the "
            "rollout's params."
        )
    shared = _shared(plan, trees, held)
    keys = [
        (index, k, rank)
        for index in plan.target_families
        if plan.families[index].tree in trees
        for k in range(plan.families[index].count)
        for rank in sorted(held.intersection(plan.families[index].layout.ranks))
    ]
    base = {name: min(replica.ranks[0] for replica in plan.replicas if replica.tree == name) for name in trees}
    absent = [key for key in keys if key not in shared and key not in fitting]
    made = new([_wanted(plan, key, devices, base) for key in absent])
    found = dict(fitting) | dict(zip(absent, made, strict=True))
    given: dict[str, Any] = {}
    for name in trees:
        families = [index for index in plan.target_families if plan.families[index].tree == name]
        local: dict[str, dict[int, jax.Array]] = {m: {} for index in families for m in plan.families[index].names}
        for key in keys:
            if key[0] in families:
                owner = key
                while owner in shared:
                    owner = shared[owner]
                local[plan.families[key[0]].name(key[1])][key[2] - base[name]] = found[owner]
        is_whole = all(held.issuperset(replica.ranks) for replica in plan.replicas if replica.tree == name)
        given[name] = _in_structure(plan.targets.get(name) if is_whole else None, local)
    return given


def _wanted(plan: Plan, key: Key, devices: Mapping[str, Mapping[int, jax.Device]], base: Mapping[str, int]) -> Wanted:
    family, rank = plan.families[key[0]], key[2]
    layout = family.layout
    return Wanted(layout.buffer_shape(rank), np_dtype(layout.dtype), devices[family.tree][rank - base[family.tree]])


def _shared(plan: Plan, trees: list[str], held: frozenset[int]) -> dict[Key, Key]:
    """Of every alias whose shards can be those of what it is an alias of, these."""
    out: dict[Key, Key] = {}
    for name in trees:
        families = [index for index in plan.target_families if plan.families[index].tree == name]
        named = {member: (index, k) for index in families for k, member in enumerate(plan.families[index].names)}
        for index in families:
            family = plan.families[index]
            if family.alias_of is None:
                continue
            for k in range(family.count):
                other = named[name_pattern(family.alias_of).format({FAMILY: family.first + k})]
                theirs = plan.families[other[0]].layout
                for rank in held.intersection(family.layout.ranks, theirs.ranks):
                    mine = family.layout.dtype, family.layout.buffer_shape(rank)
                    if mine == (theirs.dtype, theirs.buffer_shape(rank)):
                        out[index, k, rank] = (*other, rank)
    return out


def _aligned_zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """Zeros at an address that JAX on a CPU adopts instead of copying; other platforms copy anyway."""
    nbytes = int(np.prod(shape)) * dtype.itemsize
    memory = np.zeros(nbytes + ALIGNMENT, np.uint8)
    skip = -memory.ctypes.data % ALIGNMENT
    return memory[skip : skip + nbytes].view(dtype).reshape(shape)


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


def check_memory(plan: Plan, buffers: Mapping[Key, Shard], kept: Mapping[str, jax.Array]) -> None:
    """Raises:
    RegistrationError: Two targets share memory without being aliases, a target shares it with a kept one, or host
      memory cannot be written.
    """
    at: dict[MemoryRange, list[Key]] = {}
    for key, shard in buffers.items():
        at.setdefault(shard.range, []).append(key)

    def name(key: Key) -> str:
        return f"{plan.families[key[0]].name(key[1])!r} of rank {key[2]}"

    faults = []
    for keys in at.values():
        if len(keys) > 1 and len({key[:2] for key in keys}) < len(keys):
            faults.append(
                f"{name(keys[0])} and {name(keys[1])} share one buffer. Copy it, to give each its own: "
                "jnp.array(x, copy=True)."
            )
        elif len(keys) > 1 and sum(plan.families[family].alias_of is None for family, _, _ in keys) > 1:
            faults.append(
                f"{name(keys[0])} and {name(keys[1])} share one buffer. Declare one as sf.alias of the other, or "
                "give each its own."
            )
    targets = [(where, name(keys[0])) for where, keys in at.items()]
    others = [(Shard.of(array).range, text) for text, array in kept.items()]
    for (_, first), (_, second) in overlaps(targets + others):
        if not (first.startswith("the kept") and second.startswith("the kept")):
            faults.append(f"{first} and {second} overlap in memory, they would share bytes. Give each its own buffer.")
    read_only = _read_only_ranges() if any(where.memory == HOST for where in at) else []
    for where, text in targets:
        if where.memory == HOST and any(lo < where.stop and where.start < hi for lo, hi in read_only):
            faults.append(f"{text} lies in read-only memory. Copy it first, e.g. jnp.array(x, copy=True).")
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
