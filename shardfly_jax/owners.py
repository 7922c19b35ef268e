"""Owners of rollout buffers: asked for their arrays, checked, and given new handles."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from shardfly_jax.executors.memory import Key, Shard, fresh_handle
from shardfly_jax.layout import Local, Place, box_of, is_module, leaf_places, leaves_of
from shardfly_jax.planning import Plan
from shardfly_jax.sharding.errors import RegistrationError, StaleBuffer
from shardfly_jax.sharding.formats import dtype_name
from shardfly_jax.sharding.layouts import Layout


class Owner:
    """One target tree's values: asked for their buffers before every update, given new handles after it.

    Args:
      plan: The plan.
      name: Of the target tree.
      given: A tree of arrays, an `nnx.Module`, or a function that returns one of them.
      planned: Names of all tensors of the tree, kept ones included.
      devices: Device of each rank of the tree, where known from planning.
      held: Plan-wide ranks that live in this process.
      private: Whether nobody else has the tree, so that nothing in it is ever rebound.

    Raises:
      RegistrationError: Lists every tensor that does not fit the plan.
    """

    def __init__(
        self,
        plan: Plan,
        name: str,
        given: Any,
        planned: set[str],
        devices: Mapping[int, jax.Device],
        held: frozenset[int],
        private: bool,
    ):
        self.private = private
        self.name, self.given, self.planned = name, given, planned
        self.base = min(
            (replica.ranks[0] for replica in plan.replicas if replica.tree == name), default=plan.source_ranks
        )
        self.tensors = {
            member: (index, k)
            for index in plan.target_families
            if plan.families[index].tree == name
            for k, member in enumerate(plan.families[index].names)
            if not held.isdisjoint(plan.families[index].layout.ranks)
        }
        self.held = held
        self.families = plan.families
        self.places, leaves, self.structure = leaf_places(self._value(), planned)
        self.buffers: dict[Key, Shard] = {}
        # never handed out, so that nobody deletes or caches them; what is private is not, and need not be made again:
        # an update on several GPUs waits for every live array
        self._whole: dict[Place, jax.Array] = dict(zip(self.places, leaves, strict=True)) if private else {}
        self.known = leaves
        self.current = leaves
        faults = self._bind(leaves, devices)
        if faults:
            raise RegistrationError(
                f"registration: {len(faults)} faults:\n" + "\n".join(f"  - {fault}" for fault in faults)
            )

    def kept_arrays(self) -> Iterator[tuple[str, jax.Array]]:
        """Single-device arrays of the leaves that the plan never touches."""
        for (name, _), leaf in zip(self.places, self.current, strict=True):
            if name not in self.tensors and isinstance(leaf, jax.Array) and not leaf.is_deleted():
                yield from ((f"the kept {name!r} ({shard.device})", shard.data) for shard in leaf.addressable_shards)

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
            here = self._ranks(self.families[index].layout)
            absent = [rank - self.base for rank in here if (index, k, rank) not in self.buffers]
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
        if leaf.is_deleted():
            return "was deleted or donated. Give a live array."
        if dtype_name(leaf.dtype) != layout.dtype:
            return f"is {leaf.dtype}, but the plan has {layout.dtype}. Allocate it in the planned dtype, or plan anew."
        if rank is not None:
            full = self.base + rank
            if full not in layout.position or full not in self.held:
                here = self._ranks(layout)
                return (
                    f"has a buffer for rank {rank}, but of its holders this process has the ranks "
                    f"{[r - self.base for r in here]}, counted from 0 within {self.name!r} (plan-wide {here}). Key its "
                    "buffers by these."
                )
            shape = layout.buffer_shape(full)
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

    def _ranks(self, layout: Layout) -> list[int]:
        """The ranks of a layout that live in this process."""
        return [rank for rank in layout.ranks if rank in self.held]

    def _device_of(self, leaf: jax.Array, layout: Layout, devices: Mapping[int, jax.Device]) -> dict[int, jax.Device]:
        here = self._ranks(layout)
        if all(rank - self.base in devices for rank in here):
            return {rank: devices[rank - self.base] for rank in here}
        mesh = getattr(leaf.sharding, "mesh", None)
        order = list(mesh.devices.flat) if isinstance(mesh, Mesh) else sorted(leaf.devices(), key=lambda d: d.id)
        return dict(zip(here, order, strict=False))

    def check(self) -> None:
        """Raises:
        StaleBuffer: A tensor was rebound, deleted or donated since registration.
        """
        if self.private:
            return
        leaves, structure = leaves_of(self._value())
        if structure != self.structure:
            raise StaleBuffer(
                f"owner: the tree of {self.name!r} has changed its structure since it was registered. Register "
                "it again."
            )
        for place, leaf, known, current in zip(self.places, leaves, self.known, self.current, strict=True):
            if place[0] in self.tensors and leaf is not current and leaf is not known:
                self._check_leaf(place, leaf)

    def check_alive(self) -> None:
        """Raises:
        StaleBuffer: A buffer was deleted or donated.
        """
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
        for place, leaf in zip(self.places, self.current, strict=True):
            name, rank = place
            if name not in self.tensors:
                out.append(leaf)
                continue
            if place not in self._whole or self._whole[place].is_deleted():  # as executors that donate leave it
                index, k = self.tensors[name]
                ranks = self._ranks(self.families[index].layout) if rank is None else [self.base + rank]
                parts = [self.buffers[index, k, r].array for r in ranks]
                self._whole[place] = jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, parts)
            out.append(fresh_handle(self._whole[place]))
        self.current = out
        built = jax.tree_util.tree_unflatten(self.structure, out)
        if is_module(self.given):
            from flax import nnx

            nnx.update(self.given, built)
        return list(built) if isinstance(built, tuple) and isinstance(self.given, Local) else built
