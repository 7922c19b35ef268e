"""From JAX trees to named layouts: leaf paths become names, shardings become boxes, devices become ranks."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Collection, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from shardfly_jax.sharding.errors import LanguageError, PlanError
from shardfly_jax.sharding.formats import dtype_name
from shardfly_jax.sharding.layouts import Box, Layout, LocalTensors


@dataclasses.dataclass(frozen=True)
class Local:
    """Trees of rank-local tensors, one per rank; see `local`."""

    trees: tuple[Any, ...]


def local(trees: Sequence[Any]) -> Local:
    """Describes a tree by what each rank holds, as tensor-parallel engines do.

    Args:
      trees: The tree of rank 0, of rank 1, and so on; leaves have a shape and a dtype. A rank may hold a subset of the
        names (pipeline stages).

    A target leaf as long as its mapped expression is replicated; one shorter axis that adds up in rank order is cut
    there; anything else needs a `Layout`. A source leaf is whole on every rank that holds it.
    """
    if not trees:
        raise PlanError("local: no trees. Give one tree per rank.")
    return Local(tuple(trees))


def leaf_names(tree: Any) -> tuple[list[str], list[Any], Any]:
    """Names, leaves and structure of a tree. `Layout` is a leaf; an `nnx.Module` stands for its `nnx.Param` state."""
    paths, structure = jax.tree_util.tree_flatten_with_path(params_of(tree))
    return [_name(path) for path, _ in paths], [leaf for _, leaf in paths], structure


Place = tuple[str, int | None]
"""What a leaf holds: a whole tensor (name, None), or one rank's part of it (name, rank of its tree)."""


def leaf_places(tree: Any, names: Collection[str]) -> tuple[list[Place], list[Any], Any]:
    """The tensors that the leaves of a tree of values hold.

    A rank-local value stands under its rank: `{rank: array}` in place of an `sf.Layout`, or one tree per rank in place
    of an `sf.local`.

    Args:
      tree: Values in the structure in which a plan was described.
      names: The planned tensor names; a leaf that is none of them stands under its own path.

    Returns:
      Place of each leaf, the leaves, and the structure.
    """
    if isinstance(tree, Local):
        tree = tree.trees
    paths, leaves, structure = leaf_names(tree)
    return [_place(path, names) for path in paths], leaves, structure


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _place(path: str, names: Collection[str]) -> Place:
    if path not in names:
        first, _, rest = path.partition(".")
        if _is_number(first) and rest in names:
            return rest, int(first)
        rest, _, last = path.rpartition(".")
        if _is_number(last) and rest in names:
            return rest, int(last)
    return path, None


def leaves_of(tree: Any) -> tuple[list[Any], Any]:
    """Leaves and structure of a tree, as `leaf_names` sees it."""
    return jax.tree_util.tree_flatten(params_of(tree.trees if isinstance(tree, Local) else tree))


def leaves_like(tree: Any, structure: Any) -> list[Any] | None:
    """What stands in a tree at the leaves of a structure, in half the time of `leaves_of`; None if it has another."""
    try:
        return list(structure.flatten_up_to(params_of(tree.trees if isinstance(tree, Local) else tree)))
    except (ValueError, TypeError, KeyError):
        return None


def is_module(tree: Any) -> bool:
    """Whether it is an `nnx.Module`; flax is not imported for the question."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(tree, nnx.Module)


def params_of(tree: Any) -> Any:
    """The params of an `nnx.Module`; any other tree as it is."""
    if is_module(tree):
        from flax import nnx

        return nnx.state(tree, nnx.Param)
    return tree


def _name(path: tuple[Any, ...]) -> str:
    parts = []
    for key in path:
        for field in ("key", "name", "idx"):
            if hasattr(key, field):
                parts.append(str(getattr(key, field)))
                break
    # nnx variables are nodes that hold their array as `value`
    if len(parts) > 1 and isinstance(path[-1], jax.tree_util.GetAttrKey) and parts[-1] == "value":
        parts.pop()
    return ".".join(parts)


@dataclasses.dataclass(frozen=True)
class Tree:
    """A tree of tensors with its ranks.

    Attributes:
      parts: Leaf names and structure, to put leaves back: of the tree, or of each rank's tree for a `Local`.
      is_local: Whether it was a `Local`.
      tensors: Layout of each name, in ranks counted from 0.
      shardings: Of the leaves that are global JAX arrays; None for rank-local ones.
      devices: Device of each rank; None where the mesh is abstract or the rank is not JAX's.
      replicas: Sets of ranks that hold everything independently: one per coordinate on mesh axes that no leaf uses.
    """

    parts: tuple[tuple[tuple[str, ...], Any], ...]
    is_local: bool
    tensors: dict[str, Layout | LocalTensors]
    shardings: dict[str, NamedSharding | SingleDeviceSharding | None]
    devices: tuple[jax.Device | None, ...]
    replicas: tuple[tuple[int, ...], ...]


def read_tree(tree: Any, what: str) -> Tree:
    """Reads a tree of arrays, `ShapeDtypeStruct`s with shardings or `Layout`s, or a `Local`.

    Args:
      tree: The tree; one that was read stays as it is.
      what: `source` or the name of the target, for messages.

    Raises:
      PlanError: A leaf without a usable sharding, a mesh that does not divide a shape, or two leaves of one name; all
        are listed.
    """
    if isinstance(tree, Tree):
        return tree
    if isinstance(tree, Local):
        return _read_local(tree)
    names, leaves, structure = leaf_names(tree)
    faults: list[str] = []
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        faults.append(
            f"tree: the names {twice} of {what} stand for several leaves. Rename the keys so that paths differ."
        )
    ranks = _Ranks()
    shardings: dict[str, NamedSharding | SingleDeviceSharding | None] = {}
    for name, leaf in zip(names, leaves, strict=True):
        shardings[name] = None
        if isinstance(leaf, Layout):
            continue
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding | SingleDeviceSharding):
            shardings[name] = sharding
            ranks.add(sharding)
        else:
            faults.append(
                f"tree: {name!r} of {what} is a {type(leaf).__name__} with sharding {sharding}, but a "
                "NamedSharding is needed. "
                "Put it on a mesh with jax.device_put, or give a ShapeDtypeStruct with sharding= or an sf.Layout."
            )
    tensors: dict[str, Layout | LocalTensors] = {}
    for name, leaf in zip(names, leaves, strict=True):
        sharding = shardings[name]
        if isinstance(leaf, Layout):
            tensors[name] = leaf
        elif sharding is not None:
            try:
                tensors[name] = ranks.layout(tuple(leaf.shape), dtype_name(leaf.dtype), sharding)
            except PlanError as error:
                faults.append(f"indivisible: {name!r} of {what} {error}")
            except LanguageError as error:
                faults.append(
                    f"dtype: {name!r} of {what}: {error} Leave it out, e.g. with nnx.state(model, nnx.Param)."
                )
    if faults:
        raise PlanError(faults)
    devices = list(ranks.devices)
    top = max((layout.ranks[-1] for layout in tensors.values() if isinstance(layout, Layout)), default=-1) + 1
    devices += [None] * (top - len(devices))
    return Tree(
        ((tuple(names), structure),), False, tensors, shardings, tuple(devices), ranks.replicas(shardings.values())
    )


def _read_local(tree: Local) -> Tree:
    shapes: dict[str, dict[int, tuple[int, ...]]] = {}
    dtypes: dict[str, set[str]] = {}
    devices: list[jax.Device | None] = []
    parts = []
    for rank, part in enumerate(tree.trees):
        names, leaves, structure = leaf_names(part)
        parts.append((tuple(names), structure))
        found = {device for leaf in leaves if isinstance(leaf, jax.Array) for device in leaf.devices()}
        devices.append(found.pop() if len(found) == 1 else None)
        for name, leaf in zip(names, leaves, strict=True):
            if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
                raise PlanError(f"local: {name!r} of rank {rank} is a {type(leaf).__name__} without shape and dtype.")
            shapes.setdefault(name, {})[rank] = tuple(leaf.shape)
            dtypes.setdefault(name, set()).add(dtype_name(leaf.dtype))
    if mixed := sorted(name for name, found_ in dtypes.items() if len(found_) > 1):
        raise PlanError(
            [
                f"local: {name!r} has dtypes {sorted(dtypes[name])} on different ranks, but one tensor has one."
                for name in mixed
            ]
        )
    tensors: dict[str, Layout | LocalTensors] = {
        name: LocalTensors(dtypes[name].pop(), held) for name, held in shapes.items()
    }
    return Tree(tuple(parts), True, tensors, dict.fromkeys(tensors), tuple(devices), ())


class _Ranks:
    """Numbers the devices of all meshes of a tree, in mesh order, meshes in order of appearance."""

    def __init__(self) -> None:
        self.devices: list[jax.Device | None] = []
        self._rank_of: dict[Any, int] = {}
        self._meshes: dict[Any, np.ndarray] = {}
        self._layouts: dict[Any, Layout] = {}

    def add(self, sharding: NamedSharding | SingleDeviceSharding) -> None:
        mesh = _mesh_of(sharding)
        if mesh in self._meshes:
            return
        if isinstance(mesh, AbstractMesh):
            keys: list[Any] = [("abstract", k) for k in range(mesh.size)]
            devices: list[jax.Device | None] = [None] * mesh.size
        else:
            keys = devices = list(mesh.devices.flat)
        for key, device in zip(keys, devices, strict=True):
            if key not in self._rank_of:
                self._rank_of[key] = len(self.devices)
                self.devices.append(device)
        shape = tuple(mesh.shape.values())
        self._meshes[mesh] = np.array([self._rank_of[key] for key in keys]).reshape(shape)

    def layout(self, shape: tuple[int, ...], dtype: str, sharding: NamedSharding | SingleDeviceSharding) -> Layout:
        key = (shape, dtype, sharding)
        if key in self._layouts:  # tensors of one kind share a layout, and what is computed from it
            return self._layouts[key]
        mesh = _mesh_of(sharding)
        spec = sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()
        bounds = mesh_bounds(tuple(mesh.shape.items()), spec, shape)
        layout = Layout.from_bounds(shape, dtype, self._meshes[mesh].ravel().tolist(), bounds)
        self._layouts[key] = layout
        return layout

    def replicas(self, shardings: Any) -> tuple[tuple[int, ...], ...]:
        if len(self._meshes) != 1:
            return ()
        ((mesh, ranks),) = self._meshes.items()
        used: set[str] = set()
        for sharding in shardings:
            if sharding is None:
                return ()
            if isinstance(sharding, NamedSharding):
                used |= {axis for entry in sharding.spec for axis in _axes(entry)}
        free = [k for k, name in enumerate(mesh.shape) if name not in used]
        by_replica = np.moveaxis(ranks, free, range(len(free)))
        return tuple(
            tuple(row) for row in by_replica.reshape(int(np.prod([ranks.shape[k] for k in free])), -1).tolist()
        )


def box_of(shape: tuple[int, ...], index: tuple[slice, ...]) -> Box:
    """The box that a shard's index, as JAX gives it, cuts out of a shape."""
    return tuple((cut.start, cut.stop) for cut in (range(n)[part] for n, part in zip(shape, index, strict=True)))


@functools.lru_cache(maxsize=4096)
def _single_mesh(device: jax.Device) -> Mesh:
    return Mesh(np.array([device]), ("_",))


def _mesh_of(sharding: NamedSharding | SingleDeviceSharding) -> Mesh | AbstractMesh:
    if isinstance(sharding, SingleDeviceSharding):
        (device,) = sharding.device_set
        return _single_mesh(device)
    return sharding.mesh


def _axes(entry: Any) -> tuple[str, ...]:
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


@functools.lru_cache(maxsize=4096)
def mesh_bounds(mesh: tuple[tuple[str, int], ...], spec: PartitionSpec, shape: tuple[int, ...]) -> np.ndarray:
    """Boxes of all mesh positions in row-major order: int64 [positions, axes, 2].

    Raises:
      PlanError: The mesh does not divide the shape, or the spec has more entries than the shape has axes.
    """
    sizes = [size for _, size in mesh]
    index = {name: k for k, (name, _) in enumerate(mesh)}
    coords = np.indices(sizes).reshape(len(sizes), -1) if sizes else np.zeros((0, 1), np.int64)
    positions = int(np.prod(sizes))
    bounds = np.zeros((positions, len(shape), 2), np.int64)
    bounds[:, :, 1] = shape
    if len(spec) > len(shape):
        raise PlanError(f"has shape {shape}, but its spec {spec} has {len(spec)} entries. Shorten the spec.")
    for axis, entry in enumerate(spec):
        part, parts = np.zeros(positions, np.int64), 1
        for name in _axes(entry):
            part, parts = part * sizes[index[name]] + coords[index[name]], parts * sizes[index[name]]
        if shape[axis] % parts:
            raise PlanError(
                f"has {shape[axis]} elements on axis {axis}, but {spec} cuts it into {parts} equal parts on the "
                f"mesh {dict(mesh)}. "
                "Choose a mesh that divides it, or give an sf.Layout with uneven boxes."
            )
        step = shape[axis] // parts
        bounds[:, axis, 0], bounds[:, axis, 1] = part * step, (part + 1) * step
    bounds.setflags(write=False)
    return bounds
