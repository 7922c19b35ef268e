"""Rows of quantized targets and of their scales: slots are settled once all targets are known, then read and filled."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shardfly_jax.sharding.block_parts import Part, Slots
from shardfly_jax.sharding.blocking import STAGING, Blocks
from shardfly_jax.sharding.denotation import Value
from shardfly_jax.sharding.families import Family
from shardfly_jax.sharding.formats import Encode
from shardfly_jax.sharding.groups import Group
from shardfly_jax.sharding.language import Expr, Fuse, Quantize, Scales
from shardfly_jax.sharding.layouts import Layout
from shardfly_jax.sharding.lowering import MAX_DIMS, BlockView, SourceShards, Template
from shardfly_jax.sharding.moves import MoveTable
from shardfly_jax.sharding.schedule import LAG, Place
from shardfly_jax.sharding.template_rows import (
    BAND,
    BLOCK,
    EXTENTS,
    SOURCE_STRIDES,
    TARGET_STRIDES,
    cut_at_bands,
)
from shardfly_jax.sharding.walks import nodes, rewrite

if TYPE_CHECKING:
    from shardfly_jax.sharding.rows import Rows

SLOT_DTYPE = "uint32"
"""Slots hold the bits of float32 numbers."""


def scales_in(expr: Expr) -> list[Scales]:
    """The scales that an expression reads."""
    return [node for node in nodes(expr) if isinstance(node, Scales)]


class Waiting(NamedTuple):
    """Parts of a group that are encoded once slots are settled, each with the number of its band.

    Attributes:
      whole: The parts are those of the whole box, still to be cut at bands; their numbers are 0.
    """

    blocks: Blocks
    index: int  # type: ignore[assignment]  # the field's word, over tuple.index
    group: Group
    expr: Quantize
    parts: list[tuple[int, Part]]
    whole: bool


class QuantizedRows:
    """The quantized part of `Rows`.

    Attributes:
      scale_groups: Groups that wait until slots are settled.
      views: What the `block` column names, by index.
      slots: In order of their families, which follow the problem's.
      users: Groups that read each of them.
    """

    def __init__(self, rows: Rows):
        self._rows = rows
        self._blocks: dict[tuple[object, ...], Blocks] = {}
        self._waiting: list[Waiting] = []
        self._base = len(rows.problem.families)
        self.scale_groups: list[tuple[int, Group]] = []
        self.views: dict[BlockView, int] = {}
        self.slots: list[Slots] = []
        self.families: list[Family] = []
        self.users: list[set[int]] = []
        self._reductions: list[list[Template]] = []

    def _blocks_of(self, value: Expr, expr: Quantize | Scales, layers: tuple[int, int]) -> Blocks:
        key = (value, expr.format, expr.segments, layers)
        if key not in self._blocks:
            rows = self._rows
            self._blocks[key] = Blocks(*key, rows.problem._lookup, rows.shards)
        return self._blocks[key]

    def lower(self, index: int, group: Group, expr: Quantize) -> np.ndarray:
        """The rows of a group whose blocks need no slots; the others wait.

        Raises:
          LanguageError: Its elements are not written exactly once, or codes that share a byte come from apart.
        """

        def leaf(node: Expr) -> Expr | None:
            return dataclasses.replace(node, cuts=group.cuts) if isinstance(node, Fuse) else None

        blocks = self._blocks_of(rewrite(expr.value, leaf), expr, group.layers)
        start = tuple(lo for lo, _ in blocks.unpacked(group.box))
        for whole in (True, False) if group.in_ranges else (False,):
            waiting = Waiting(blocks, index, group, expr, [], whole)
            made = []
            parts = list(_parts(blocks, group, whole))
            self._rows.check_tiled(
                sum(part.size for _, part in parts),
                sum(b.size for b in group.bands) * group.n_layers * expr.format.per_byte,
            )
            for number, part in parts:
                encoded = blocks.encoded(part, start, group.strides)
                if encoded is None:
                    waiting.parts.append((number, part))
                else:
                    made.append((number, encoded))
            rows = self._stacked(waiting, made)
            if rows is not None and (len(group.bands) == 1 or all(part.is_solid for _, part in waiting.parts)):
                break
        for _, part in waiting.parts:
            blocks.need(part)
        if waiting.parts:
            self._waiting.append(waiting)
        assert rows is not None
        return rows

    def _stacked(self, of: Waiting, made: Sequence[tuple[int, list[Template]]]) -> np.ndarray | None:
        """Encoding templates of a group as rows of integers, by band; None if they have to be lowered band by band.

        Args:
          of: Their group, and whether they are still to be cut at bands.
          made: The number of its band, and the templates, of each part.
        """
        cuts = of.whole and len(of.group.bands) > 1
        if cuts and any(len(templates) > 1 for _, templates in made):
            return None
        rows, views = [], []
        for number, templates in made:
            for t in templates:
                assert t.block is not None
                encoding = t._replace(steps=(*t.steps, Encode(of.expr.format)), block=None)
                rows.append(self._rows.flat(of.index, number, encoding, of.expr.format.stored))
                pad = (0,) * (MAX_DIMS - len(t.dims))
                views.append((t.block.family, t.block.rank, t.block.offset, *t.block.strides, *pad))
        table = self._rows.stacked(rows)
        view = np.array(views, np.int64).reshape(len(rows), 3 + MAX_DIMS)
        if cuts:
            cut = cut_at_bands(table, [band.offset for band in of.group.bands[1:]])
            if cut is None:
                return None
            order = np.argsort(cut.rows[:, BAND], kind="stable")
            table, view, first = cut.rows[order], view[cut.template[order]], cut.first[order]
            view[:, 2] += np.where(view[:, 0] >= 0, first * view[:, 3], 0)
            single = table[:, EXTENTS.start] == 1
            for columns in (table[:, EXTENTS], table[:, SOURCE_STRIDES], table[:, TARGET_STRIDES], view[:, 3:]):
                columns[single] = np.roll(columns[single], -1, axis=1)
            for columns in (table[:, SOURCE_STRIDES], table[:, TARGET_STRIDES], view[:, 3:]):
                columns[single, -1] = 0
        table[:, BLOCK] = self._numbered(view, (table[:, EXTENTS] > 1).sum(axis=1))
        return table

    def _numbered(self, views: np.ndarray, dims: np.ndarray) -> np.ndarray:
        """Indices of views, for the `block` column, in the order in which they appear.

        Args:
          views: int64 [rows, 3 + MAX_DIMS], family, rank, offset and strides.
          dims: int64 [rows], of each view.
        """
        distinct, first, which = np.unique(
            np.column_stack([dims, views]), axis=0, return_index=True, return_inverse=True
        )
        numbers = np.empty(len(distinct), np.int64)
        for k in np.argsort(first, kind="stable").tolist():
            n, family, rank, offset, *strides = distinct[k].tolist()
            view = BlockView(family, rank, offset, tuple(strides[:n]))
            numbers[k] = self.views.setdefault(view, len(self.views))
        return numbers[which]

    # Slots

    def settle(self) -> None:
        """Fixes the slots and their owners, and adds the rows that waited for them."""
        read: dict[Blocks, None] = {}
        for _, group in self.scale_groups:
            for node in reversed(scales_in(group.expr)):
                read[self._blocks_of(node.value, node, group.layers)] = None
        for blocks in read:
            blocks.need_split()
        load: dict[int, int] = {}
        for number, blocks in enumerate(self._blocks.values()):
            fixed = []
            for k, box in enumerate(blocks.slot_boxes()):
                family = self._base + len(self.slots)
                slots = Slots(box, family, f"amax-{number}-{k}.{{i}}", -1)
                self._reductions.append(list(blocks.reductions(slots)))
                read_from = {(t.family, t.shard) for t in self._reductions[-1]}
                holders = {rank for held in read_from for rank in self._rows.holders_of(*held)}
                slots.owner = min(holders or {0}, key=lambda rank: (load.get(rank, 0), rank))
                fixed.append(slots)
                self.slots.append(slots)
                self.users.append(set())
                (lo, hi), *grid = box
                layout = Layout(blocks.grid, SLOT_DTYPE, {slots.owner: grid})
                self.families.append(Family(STAGING, slots.name, lo, hi - lo, layout))
                load[slots.owner] = load.get(slots.owner, 0) + layout.local_size(slots.owner) * (hi - lo)
            blocks.fix(fixed)
        ready = [self._ready(waiting) for waiting in self._waiting]
        self._rows.templates += ready
        self._waiting.clear()

    def _ready(self, waiting: Waiting) -> np.ndarray:
        """The rows that encode the parts of a group that waited."""
        blocks, index, group, *_ = waiting
        start = tuple(lo for lo, _ in blocks.unpacked(group.box))
        made = []
        for number, part in waiting.parts:
            for slots in blocks.slots_of(part):
                for inside in blocks.in_slots(part, slots):
                    self.users[slots.family - self._base].add(index)
                    made.append((number, blocks.encoded_with_slots(inside, slots, start, group.strides)))
        rows = self._stacked(waiting, made)
        if rows is None:
            parts = [
                (number, part)
                for number, part in _parts(blocks, group, False)
                if blocks.encoded(part, start, group.strides) is None
            ]
            return self._ready(waiting._replace(parts=parts, whole=False))
        return rows

    def slot_shards(self, name: str) -> list[SourceShards] | None:
        """What holds the slots that a piece reads; None if it reads a source."""
        for slots in self.slots:
            if slots.name == name:
                family = self.families[slots.family - self._base]
                bounds = np.array([slots.box[1:]], np.int64)
                held = [(slots.box[1:], slots.strides)]
                return [SourceShards(slots.family, family.first, slots.box[0], bounds, held)]
        return None

    def scales_of(self, expr: Scales, layers: tuple[int, int]) -> Value:
        """The stored scales of a quantized value, as a value."""
        return self._blocks_of(expr.value, expr, layers).scales()

    def note_readers(self, index: int, made: Sequence[Template]) -> None:
        """Remembers which slots a group of scales reads."""
        for t in made:
            if t.family >= self._base:
                self.users[t.family - self._base].add(index)

    # The table

    def placed(self, where: Sequence[Place], at_a_pace: bool) -> list[Place]:
        """Places of groups; those that read slots begin after these are full, and so do all if they have one pace."""
        late = set().union(*self.users)
        if late and at_a_pace:  # or the ticks that they fill together would come apart
            late = set(range(len(where)))
        return [p._replace(order=p.order + LAG) if index in late else p for index, p in enumerate(where)]

    def read_families(self) -> list[Family]:
        """The families of slots; those that nobody reads hold no tensors."""
        pairs = zip(self.families, self.users, strict=True)
        return [family if users else dataclasses.replace(family, count=0) for family, users in pairs]

    def reductions(
        self, groups: Sequence[Group], where: Sequence[Place], served: dict[tuple[int, int], int]
    ) -> MoveTable:
        """The rows that fill the slots.

        Args:
          where: Places before `placed`.
          served: By (slots' family, shard), the rank that encodes from them: it reduces too.
        """
        rows, columns = self._rows, []
        for blocks in self._blocks.values():
            for slots in blocks.slots:
                users = [(groups[g], where[g]) for g in self.users[slots.family - self._base]]
                if not users:
                    continue
                first = slots.box[0][0]
                step = min(place.layer_step for _, place in users)
                order = min(place.order + (first - group.layers[0]) * place.layer_step for group, place in users)
                for t in self._reductions[slots.family - self._base]:
                    rank = -1
                    if t.family >= 0:
                        holders = rows.holders_of(t.family, t.shard)
                        rank = served.get((slots.family, rows.first_holder[t.family] + t.shard), holders[0])
                    pad = (0,) * (MAX_DIMS - len(t.dims))
                    extents, source, target = zip(*t.dims, strict=True) if t.dims else ((), (), ())
                    spread = (slots.owner - rank) % (rows.problem.source_ranks + rows.problem.target_ranks)
                    columns.append({
                        "source_family": t.family, "source_rank": rank, "target_family": slots.family,
                        "target_rank": slots.owner, "extents": (*extents, *(n + 1 for n in pad)),
                        "source_strides": (*source, *pad), "target_strides": (*target, *pad),
                        "source_offset": t.source_offset, "target_offset": t.target_offset, "count": t.count,
                        "source_tensor": t.source_tensor, "source_tensor_step": t.source_tensor_step,
                        "source_offset_step": t.source_offset_step, "target_tensor": t.layer - first,
                        "target_tensor_step": t.layer_step, "convert": rows.convert_of(t, SLOT_DTYPE), "band": -1,
                        "hop": 0, "order": order + (t.layer - first) * step + spread, "order_step": t.layer_step * step,
                        "order_span": 0, "block": -1,
                    })  # fmt: skip
        names = columns[0] if columns else {}
        return MoveTable.from_columns(**{name: np.array([row[name] for row in columns]) for name in names})


def _parts(blocks: Blocks, group: Group, whole: bool) -> Iterator[tuple[int, Part]]:
    """The parts of a group, of its whole box or band by band, with the number of the band."""
    for number, box in enumerate([group.box] if whole else [band.box for band in group.bands]):
        for part in blocks.parts(blocks.unpacked(box), group.layers):
            yield number, part
