"""The plan's only data instruction, as a table of columns.

A row is a *template*: one record stands for all layers of a family. Its k-th expansion, `0 <= k < count`, copies

    for each step of `extents`:
      target family's tensor `target_tensor + k * target_tensor_step`, on `target_rank`, element
          `target_offset + sum(step * target_strides)`
      <- convert(source family's tensor `source_tensor + k * source_tensor_step`, on `source_rank`, element
          `source_offset + k * source_offset_step + sum(step * source_strides)`)

Offsets and strides count elements of local buffers, 64-bit. A row whose source rank is a rollout rank *forwards* bytes
that an earlier row brought there. A fill has no source (family and rank -1).

Dimensions with a target stride of 0 are reduced over: the conversion takes the largest absolute value of each block, or
puts codes that share a byte into one.
A row that writes a staging buffer replaces what is there by the larger of both; staging begins as zeros.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from shardfly_jax.sharding.lowering import MAX_DIMS


class Move(NamedTuple):
    """One row of `plan.moves`, in Python numbers: a template that stands for all layers of a family.

    Its k-th expansion, `0 <= k < count`, writes on one rank, for each step of `extents`, converted elements of another.
    Offsets and strides count elements of the ranks' own buffers. Dimensions with a target stride of 0 are reduced over.

    Attributes:
      source_family, target_family: Indices into `plan.families`; the source's is -1 for a fill.
      source_rank, target_rank: Plan-wide. A source that is a rollout rank forwards what an earlier row brought there.
      extents: Elements per dimension, without those of one.
      source_strides, target_strides: Of each dimension.
      source_offset, target_offset: Of the first element; the source's rises by `source_offset_step` with k.
      count: How many expansions there are.
      source_tensor, target_tensor: Which tensors of the families the first one is about; they rise by
        `source_tensor_step` and `target_tensor_step` with k.
      convert: Index into `plan.conversions`.
      band: Id of the part of a tensor that is forwarded as soon as all of it is there; -1 where nothing is.
      hop: 0 from a trainer, 1 from the first rollout that has the bytes, and so on.
      order, order_step, order_span: The k-th expansion has the order numbers from `order + k * order_step` on, its
        chunks spread evenly over `order_span`.
      block: Where the maxima of the blocks of an encoding row lie, an index into the plan's blocks; -1 elsewhere.
    """

    source_family: int
    source_rank: int
    target_family: int
    target_rank: int
    extents: tuple[int, ...]
    source_strides: tuple[int, ...]
    target_strides: tuple[int, ...]
    source_offset: int
    target_offset: int
    count: int  # type: ignore[assignment]  # the field's word, over tuple.count
    source_tensor: int
    source_tensor_step: int
    source_offset_step: int
    target_tensor: int
    target_tensor_step: int
    convert: int
    band: int
    hop: int
    order: int
    order_step: int
    order_span: int
    block: int


NARROW = ("source_family", "source_rank", "target_family", "target_rank", "count", "convert", "band", "hop",
          "source_tensor", "source_tensor_step", "target_tensor", "target_tensor_step", "block")  # fmt: skip
VECTORS = ("extents", "source_strides", "target_strides")


def column_dtype(name: str) -> type[np.signedinteger]:
    """int32 for ids and counts, int64 for everything that measures elements or order."""
    return np.int32 if name in NARROW else np.int64


@dataclasses.dataclass(frozen=True, slots=True)
class MoveTable:
    """Columns of equal length; vectors are [rows, MAX_DIMS], padded with extents 1 and strides 0.

    Besides the fields of the instruction:
      band: Id of the band a row fills, and from which forwards of that band are fed; -1 where nothing is forwarded.
      hop: 0 from a trainer, 1 from a root, and so on.
      order, order_step, order_span: The k-th expansion occupies the order numbers from `order + k * order_step`, its
        chunks spread evenly over `order_span`. Dependencies always point to smaller numbers.
      block: Where the maxima of the blocks of an encoding row lie, an index into the plan's blocks; -1 elsewhere.
    """

    columns: dict[str, np.ndarray]

    @classmethod
    def from_columns(cls, **columns: np.ndarray | int) -> MoveTable:
        """Builds a table; a plain number fills its column.

        Raises:
          ValueError: A column is missing or unknown.
        """
        if set(columns) != set(Move._fields):
            raise ValueError(f"columns differ by {sorted(set(columns) ^ set(Move._fields))}")
        rows = len(next(c for c in columns.values() if isinstance(c, np.ndarray)))
        table = {}
        for name in Move._fields:
            shape = (rows, MAX_DIMS) if name in VECTORS else (rows,)
            table[name] = np.array(np.broadcast_to(np.asarray(columns[name]), shape), column_dtype(name))
            table[name].setflags(write=False)
        return cls(table)

    @staticmethod
    def merged(tables: list[MoveTable]) -> MoveTable:
        """Rows of all tables in order, ties by target, then source rank. Consumes the tables: one copy at a time."""
        keys = [np.concatenate([t.columns[name] for t in tables]) for name in ("source_rank", "target_rank", "order")]
        order = np.lexsort(keys)
        del keys
        merged = {}
        for name in Move._fields:
            merged[name] = np.concatenate([t.columns.pop(name) for t in tables])[order]
            merged[name].setflags(write=False)
        return MoveTable(merged)

    def __getattr__(self, name: str) -> np.ndarray:
        if name == "columns":  # not set yet: being copied
            raise AttributeError(name)
        try:
            return self.columns[name]
        except KeyError:
            raise AttributeError(name) from None

    def __len__(self) -> int:
        return len(self.columns["count"])

    def __getitem__(self, row: int) -> Move:
        values: dict[str, Any] = {}
        for name, column in self.columns.items():
            values[name] = tuple(column[row].tolist()) if name in VECTORS else int(column[row])
        dims = [d for d in zip(*(values.pop(name) for name in VECTORS), strict=True) if d[0] != 1]
        extents, source_strides, target_strides = zip(*dims, strict=True) if dims else ((), (), ())
        return Move(**values, extents=extents, source_strides=source_strides, target_strides=target_strides)

    def __iter__(self) -> Iterator[Move]:
        return (self[row] for row in range(len(self)))

    @property
    def size(self) -> np.ndarray:
        """Elements of one expansion of each row."""
        return self.columns["extents"].prod(axis=1)

    @property
    def written(self) -> np.ndarray:
        """Elements that one expansion of each row writes: fewer than it reads where it reduces."""
        return np.where(self.columns["target_strides"] != 0, self.columns["extents"], 1).prod(axis=1)

    @property
    def nbytes(self) -> int:
        """Memory of the table itself."""
        return sum(column.nbytes for column in self.columns.values())

    def in_order(self) -> Iterator[tuple[Move, int]]:
        """Every expansion in global order, as its move and k."""
        moves = list(self)
        for row, k in zip(*(index.tolist() for index in self.expanded()), strict=True):
            yield moves[row], k

    def expanded(self) -> tuple[np.ndarray, np.ndarray]:
        """Row and k of every expansion, in global order.

        Returns:
          `rows`, `ks`: int64 [expansions].
        """
        count = self.columns["count"].astype(np.int64)
        rows = np.repeat(np.arange(len(self)), count)
        ks = np.arange(len(rows)) - np.repeat(np.cumsum(count) - count, count)
        order = self.columns["order"][rows] + ks * self.columns["order_step"][rows]
        sorted_ = np.argsort(order, kind="stable")
        return rows[sorted_], ks[sorted_]


def contiguous(
    extents: np.ndarray, strides: Sequence[np.ndarray], rounds: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Elements that follow each other without a gap in all buffers at once, and which dimensions remain outside.

    Args:
      extents: int64 [rows, dims].
      strides: The like, per buffer.
      rounds: Dimensions that are joined at most, innermost first; all by default.
    """
    run = np.ones(len(extents), np.int64)
    rest = extents > 1
    for _ in range(extents.shape[1] if rounds is None else rounds):
        joins = rest.copy()
        for steps in strides:
            joins &= steps == run[:, None]
        row = np.nonzero(joins.any(axis=1))[0]
        dim = joins[row].argmax(axis=1)
        run[row] *= extents[row, dim]
        rest[row, dim] = False
    return run, rest


Key = tuple[int, int, int]
"""A local buffer: (family, tensor, rank)."""


def source_key(move: Move, k: int) -> Key:
    """The buffer that expansion `k` of a move reads; of rank -1 for a fill."""
    return (move.source_family, move.source_tensor + k * move.source_tensor_step, move.source_rank)


def target_key(move: Move, k: int) -> Key:
    """The buffer that expansion `k` of a move writes."""
    return (move.target_family, move.target_tensor + k * move.target_tensor_step, move.target_rank)


class View(NamedTuple):
    """A strided region of a flat buffer: offset, extents and strides in elements, extents of 1 left out."""

    offset: int
    extents: tuple[int, ...]
    strides: tuple[int, ...]

    def of(self, flat: np.ndarray) -> np.ndarray:
        """The region of a flat array, without copying.

        Raises:
          IndexError: It reaches outside the array.
        """
        if 0 in self.extents:
            return np.empty(self.extents, flat.dtype)
        reach = [(n - 1) * step for n, step in zip(self.extents, self.strides, strict=True)]
        lo = self.offset + sum(r for r in reach if r < 0)
        hi = self.offset + sum(r for r in reach if r > 0)
        if lo < 0 or hi >= len(flat):
            raise IndexError(f"elements {lo} to {hi} of a buffer of {len(flat)}")
        # not as_strided: it refuses dtypes that are not NumPy's own
        size = flat.itemsize
        strides = [step * size for step in self.strides]
        return np.ndarray(self.extents, flat.dtype, flat.view(np.uint8), self.offset * size, strides)


def source_view(move: Move, k: int) -> View:
    """What expansion `k` of a move reads."""
    return View(move.source_offset + k * move.source_offset_step, move.extents, move.source_strides)


def target_view(move: Move) -> View:
    """What each expansion of a move writes; of extent 1 where it reduces."""
    extents = tuple(n if step else 1 for n, step in zip(move.extents, move.target_strides, strict=True))
    return View(move.target_offset, extents, move.target_strides)


def reduced_axes(move: Move) -> tuple[int, ...]:
    """The dimensions that a move reduces over."""
    return tuple(axis for axis, step in enumerate(move.target_strides) if not step)


def packed_axis(move: Move) -> int:
    """The dimension along which the codes of an encoding move share a byte; -1 if none do."""
    return next(iter(reduced_axes(move)), -1)


def move_size(move: Move) -> int:
    """Elements that one expansion writes."""
    return math.prod(target_view(move).extents)
