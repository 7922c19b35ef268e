"""Where the shards of one tensor lie: boxes of a global index space, one per rank.

A *box* is a tuple of half-open ranges `((lo, hi), ...)`, one per axis, in the tensor's global coordinates, elements.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from shardfly_jax.sharding.errors import PlanError
from shardfly_jax.sharding.formats import dtype_name, itemsize

Box = tuple[tuple[int, int], ...]


def box_shape(box: Box) -> tuple[int, ...]:
    """The extents of a box."""
    return tuple(hi - lo for lo, hi in box)


def dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides in elements."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


class Layout:
    """Shape, dtype and the box of each rank of one tensor.

    Args:
      shape: Global shape.
      dtype: Anything NumPy or ml_dtypes takes as a dtype.
      boxes: The box each rank holds: `{rank: ((lo, hi), ...)}`. Boxes may be uneven and may overlap; several ranks may
        hold the same one.
      strides: Strides of the local buffers in elements, one tuple for all ranks or `{rank: strides}`. Row-major and
        dense when None.

    Immutable; compares and hashes by value.

    Raises:
      PlanError: No boxes; a box outside the shape or of another number of axes; strides that make two elements
        share a place.
    """

    __slots__ = ("__dict__", "bounds", "dtype", "ranks", "shape", "strides")

    shape: tuple[int, ...]
    dtype: str
    ranks: tuple[int, ...]
    bounds: np.ndarray  # int64 [ranks, axes, 2]
    strides: np.ndarray | None  # int64 [ranks, axes], elements

    def __init__(
        self,
        shape: Sequence[int],
        dtype: Any,
        boxes: Mapping[int, Sequence[tuple[int, int]]],
        strides: Sequence[int] | Mapping[int, Sequence[int]] | None = None,
    ):
        self.shape = tuple(int(n) for n in shape)
        self.dtype = dtype_name(dtype)
        if not boxes:
            raise PlanError(f"layout: boxes of a tensor of shape {self.shape} are empty, but some rank must hold it.")
        if not all(isinstance(rank, int | np.integer) for rank in boxes):
            raise PlanError(f"layout: ranks {list(boxes)} are not all integers. Number the ranks from 0.")
        self.ranks = tuple(sorted(int(rank) for rank in boxes))
        if self.ranks[0] < 0:
            raise PlanError(f"layout: rank {self.ranks[0]} is negative. Ranks count from 0.")
        axes = len(self.shape)
        for rank in self.ranks:
            box = tuple(boxes[rank])
            if len(box) != axes:
                raise PlanError(
                    f"layout: the box {box} of rank {rank} has {len(box)} axes, but the shape {self.shape} has {axes}."
                )
            if any(len(pair) != 2 or not 0 <= pair[0] <= pair[1] <= n for pair, n in zip(box, self.shape, strict=True)):
                raise PlanError(f"layout: the box {box} of rank {rank} is not inside the shape {self.shape}.")
        self.bounds = np.array([boxes[rank] for rank in self.ranks], np.int64).reshape(len(self.ranks), axes, 2)
        self.bounds.setflags(write=False)
        self.strides = self._checked_strides(strides)

    def _checked_strides(self, strides: Sequence[int] | Mapping[int, Sequence[int]] | None) -> np.ndarray | None:
        if strides is None:
            return None
        per_rank = strides if isinstance(strides, Mapping) else dict.fromkeys(self.ranks, strides)
        if set(per_rank) != set(self.ranks):
            raise PlanError(f"layout: strides name the ranks {sorted(per_rank)}, but boxes name {list(self.ranks)}.")
        table = np.array([per_rank[rank] for rank in self.ranks], np.int64)
        if table.shape != (len(self.ranks), len(self.shape)):
            raise PlanError(f"layout: strides {strides} do not give one number per axis of {self.shape}.")
        for rank, row, bounds in zip(self.ranks, table, self.bounds, strict=True):
            end = 1
            for step, extent in sorted(zip(row.tolist(), (bounds[:, 1] - bounds[:, 0]).tolist(), strict=True)):
                if extent > 1 and step < end:
                    raise PlanError(
                        f"layout: strides {row.tolist()} of rank {rank} make elements of {self.shape} overlap."
                    )
                end = max(end, step * (extent - 1) + end)
        if all(
            tuple(row) == dense_strides((bounds[:, 1] - bounds[:, 0]).tolist())
            for row, bounds in zip(table.tolist(), self.bounds, strict=True)
        ):
            return None
        table.setflags(write=False)
        return table

    @classmethod
    def from_bounds(cls, shape: Sequence[int], dtype: str, ranks: Sequence[int], bounds: np.ndarray) -> Layout:
        """A dense layout from an int64 array [ranks, axes, 2] that is known to be inside `shape`."""
        self = cls.__new__(cls)
        self.shape, self.dtype, self.strides = tuple(shape), dtype, None
        order = np.argsort(np.asarray(ranks), kind="stable")
        self.ranks = tuple(int(ranks[k]) for k in order)
        self.bounds = np.ascontiguousarray(bounds[order], np.int64)
        self.bounds.setflags(write=False)
        return self

    def shifted(self, offset: int) -> Layout:
        """The same layout with every rank number raised by `offset`."""
        moved = Layout.from_bounds(self.shape, self.dtype, self.ranks, self.bounds)
        moved.ranks = tuple(rank + offset for rank in self.ranks)
        moved.strides = self.strides
        return moved

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return itemsize(self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor, held once."""
        return math.prod(self.shape) * self.itemsize

    @cached_property
    def position(self) -> dict[int, int]:
        """Row of `bounds` of each rank."""
        return {rank: row for row, rank in enumerate(self.ranks)}

    def box(self, rank: int) -> Box:
        """The box of a rank."""
        return tuple((int(lo), int(hi)) for lo, hi in self.bounds[self.position[rank]])

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Extents of the box of a rank."""
        return box_shape(self.box(rank))

    def local_strides(self, rank: int) -> tuple[int, ...]:
        """Strides of the local buffer of a rank, elements."""
        if self.strides is None:
            return dense_strides(self.local_shape(rank))
        return tuple(self.strides[self.position[rank]].tolist())

    def buffer_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of the array that holds a rank's shard: of its box, or flat for a strided buffer."""
        return self.local_shape(rank) if self.strides is None else (self.local_size(rank),)

    def local_size(self, rank: int) -> int:
        """Elements from the first to the last of the local buffer, holes of strided ones included."""
        shape = self.local_shape(rank)
        if not all(shape):
            return 0
        return 1 + sum((n - 1) * step for n, step in zip(shape, self.local_strides(rank), strict=True))

    @cached_property
    def holders(self) -> tuple[tuple[tuple[Box, tuple[int, ...]], tuple[int, ...]], ...]:
        """Distinct ((box, local strides), ranks that hold it), in order of first rank; empty boxes left out."""
        held: dict[tuple[Box, tuple[int, ...]], list[int]] = {}
        for row, rank in enumerate(self.ranks):
            box = tuple((lo, hi) for lo, hi in self.bounds[row].tolist())
            if all(lo < hi for lo, hi in box):
                strides = dense_strides(box_shape(box)) if self.strides is None else tuple(self.strides[row].tolist())
                held.setdefault((box, strides), []).append(rank)
        return tuple((key, tuple(ranks)) for key, ranks in held.items())

    @cached_property
    def overlap(self) -> tuple[Box, Box] | None:
        """Two different boxes that share elements; None if all are disjoint."""
        bounds = np.array([box for (box, _), _ in self.holders], np.int64)
        bounds = bounds.reshape(len(self.holders), len(self.shape), 2)
        for k in range(len(bounds) - 1):
            meets = ((bounds[k + 1 :, :, 0] < bounds[k, :, 1]) & (bounds[k, :, 0] < bounds[k + 1 :, :, 1])).all(1)
            for other in np.nonzero(meets)[0].tolist():
                first, second = self.holders[k][0][0], self.holders[k + 1 + other][0][0]
                if first != second:
                    return first, second
        return None

    def cuts(self, axis: int) -> tuple[tuple[int, int], ...]:
        """The distinct ranges into which the boxes cut one axis, in order."""
        return tuple(sorted({box[axis] for (box, _), _ in self.holders}))

    def _key(self) -> tuple[Any, ...]:
        return (
            self.shape,
            self.dtype,
            self.ranks,
            self.bounds.tobytes(),
            None if self.strides is None else self.strides.tobytes(),
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and (self is other or self._key() == other._key())

    def __hash__(self) -> int:
        return hash((self.shape, self.dtype, self.ranks))

    def __repr__(self) -> str:
        return f"Layout({self.shape}, {self.dtype!r}, {len(self.ranks)} ranks, {len(self.holders)} distinct boxes)"


class LocalTensors:
    """A tensor described by what each rank holds; how it is cut follows once the whole shape is known.

    Args:
      dtype: Of all ranks.
      shapes: `{rank: local shape}`.
    """

    def __init__(self, dtype: Any, shapes: Mapping[int, Sequence[int]]):
        self.dtype = dtype_name(dtype)
        self.shapes = {int(rank): tuple(int(n) for n in shape) for rank, shape in sorted(shapes.items())}

    def whole(self, shape: Sequence[int]) -> Layout:
        """The layout inside a tensor of `shape`: replicated where a rank's tensor is whole, else cut along one axis.

        Raises:
          PlanError: The local shapes neither equal `shape` nor add up to it, in rank order, along exactly one axis.
        """
        shape = tuple(shape)
        if all(local == shape for local in self.shapes.values()):
            return Layout(shape, self.dtype, {rank: [(0, n) for n in shape] for rank in self.shapes})
        locals_ = list(self.shapes.values())
        if all(len(local) == len(shape) for local in locals_):
            cut = [a for a, n in enumerate(shape) if any(local[a] != n for local in locals_)]
            if len(cut) == 1 and sum(local[cut[0]] for local in locals_) == shape[cut[0]]:
                boxes, start = {}, 0
                for rank, local in self.shapes.items():
                    end = start + local[cut[0]]
                    boxes[rank] = [(start, end) if a == cut[0] else (0, n) for a, n in enumerate(shape)]
                    start = end
                return Layout(shape, self.dtype, boxes)
        raise PlanError(
            f"the local shapes {sorted(set(locals_))} of {len(locals_)} ranks neither equal the shape {shape} "
            "of the mapped "
            "expression nor add up to it along exactly one axis. Give an sf.Layout with the box of each rank"
        )
