"""Ops of moves that quantize: codes and scales in one pass where each block fits in a tile, else by way of slots.

A plan has slots for blocks that several moves share. Here a block that one move holds gets a slot too, beside its
source, if no tile can hold it. Slots are words of an inbox, which *ready* zeroes with the counters; the ops that read
them wait for the counter of those that fill them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from shardfly_jax.sharding import quantized_records as q, records as r
from shardfly_jax.sharding.formats import Amax, Conversion, Encode, ToScale, itemsize
from shardfly_jax.sharding.layouts import dense_strides
from shardfly_jax.sharding.moves import Key, Move, source_key, target_key
from shardfly_jax.sharding.ops import Counter, Inbox, InboxWords, Op, Phase
from shardfly_jax.sharding.plan import Plan, slot_key, staging_sizes
from shardfly_jax.sharding.scale_matches import Expansion, Match, matches
from shardfly_jax.sharding.slot_chunks import READ_LAG, chunks

SLOT_NBYTES = 4


def quantizes(conversion: Conversion) -> bool:
    """Whether some step reduces, encodes or makes scales."""
    return any(isinstance(step, Amax | Encode | ToScale) for step in conversion.steps)


def quantizes_elements(conversion: Conversion) -> bool:
    """Whether some step looks at elements, not only at maxima."""
    return any(isinstance(step, Amax | Encode) for step in conversion.steps)


class QuantizedOps:
    """Makes the ops of a plan's moves that quantize.

    Args:
      plan: The plan.
      device_of: Device number of each rank.
      words: Of the inboxes.
      convert: Index of a conversion, for the `CONVERT` word.
      memory: As for `optable.make_tables`.
    """

    def __init__(
        self,
        plan: Plan,
        device_of: Mapping[int, int],
        words: InboxWords,
        convert: Callable[[Conversion], int],
        memory: Callable[[Key], object],
    ):
        self.plan, self.device_of, self.words, self.convert, self.memory = plan, device_of, words, convert, memory
        self._staging = staging_sizes(plan)
        self._matches = matches(plan)
        self._joined = {match.scales for match in self._matches.values()}
        self._users: dict[Key, list[Expansion]] = {}
        for move, k in plan.moves.in_order() if self._staging else ():
            key = self._slots_of(move, k)
            if key is not None:
                self._users.setdefault(key, []).append(Expansion(move, k))

    def ops(self, move: Move, k: int) -> list[Op]:
        """The ops of one expansion, each after those that it waits for.

        What fills or reads the same slots of the plan comes all at once, with the first of them.
        """
        if Expansion(move, k) in self._joined:
            return []
        key = self._slots_of(move, k)
        if key is not None:
            users = self._users.pop(key, None)
            return self._through_slots(key, users) if users else []
        conversion = self.plan.conversions[move.convert]
        if conversion.encodes is None:
            return self._scales_of_blocks(move, k)
        return self._encode_blocks(move, k, self.plan.blocks[move.block].strides)

    # Slots of the plan

    def _slots_of(self, move: Move, k: int) -> Key | None:
        """The slots of the plan that an expansion fills or reads."""
        if target_key(move, k) in self._staging:
            return target_key(move, k)
        if move.source_rank >= 0 and source_key(move, k) in self._staging:
            return source_key(move, k)
        if move.block >= 0 and self.plan.blocks[move.block].family >= 0:
            return slot_key(self.plan, move, k)
        return None

    def _through_slots(self, key: Key, users: Sequence[Expansion]) -> list[Op]:
        """The ops of all expansions that fill or read some slots."""
        owner = self.device_of[key[2]]
        first = self.words.slots(owner, key, self._staging[key])
        parts = []
        for move, k in users:
            if target_key(move, k) == key:
                side = _Side(first + SLOT_NBYTES * move.target_offset, _slot_steps(move.target_strides))
                at = owner if move.source_rank < 0 else self.device_of[move.source_rank]
                parts.append(self._reducing(move, k, at, Phase.SEND, side))
            elif move.source_rank >= 0 and source_key(move, k) == key:
                at_slot = move.source_offset + k * move.source_offset_step
                side = _Side(first + SLOT_NBYTES * at_slot, _slot_steps(move.source_strides))
                written = self._scales_written(move)
                parts.append(self._scaling(Expansion(move, k), owner, Phase.SEND, move.extents, side, written))
            else:
                view = self.plan.blocks[move.block]
                side = _Side(first + SLOT_NBYTES * view.offset, _slot_steps(view.strides))
                parts.append(self._encoding(move, k, side))
        return _pipelined(parts, owner, key, first)

    # Of blocks that one expansion holds

    def _encode_blocks(self, move: Move, k: int, across: Sequence[int]) -> list[Op]:
        match = self._matches.get(Expansion(move, k))
        written = self._scale_side(match) if match else _Side(0, (0,) * len(across))
        if move.source_rank >= 0:
            conversion = self.plan.conversions[move.convert]
            role = q.WRITES_CODES | (q.STORES_SCALES if match else 0)
            region = self._region(move, k, across, written)
            record = q.block_record(region, conversion, role)
            if record is None:
                record = q.packed_record(region, conversion, role)
            if record is not None:
                scales = target_key(*match.scales) if match else None
                also = self._signal(*match.scales) if match else None
                return [self._op(move, k, record, side=scales, signal=self._signal(move, k), side_signal=also)]
        at, phase, side = self._own_slots(move, k, across)
        parts = [self._reducing(move, k, at, phase, side), self._encoding(move, k, side)]
        if match:
            parts.append(self._scaling(match.scales, at, phase, move.extents, side, written))
        return _pipelined(parts, at, (move, k), side.offset)

    def _scales_of_blocks(self, move: Move, k: int) -> list[Op]:
        """Scales that no encoding expansion goes with."""
        conversion, across = self.plan.conversions[move.convert], move.target_strides
        written = self._scales_written(move)
        if move.source_rank >= 0 and isinstance(conversion.steps[-1], ToScale):
            record = q.block_record(self._region(move, k, across, written), conversion, q.STORES_SCALES)
            if record is not None:
                return [self._op(move, k, record, side=target_key(move, k), side_signal=self._signal(move, k))]
        at, phase, side = self._own_slots(move, k, across)
        scaling = self._scaling(Expansion(move, k), at, phase, move.extents, side, written)
        return _pipelined([self._reducing(move, k, at, phase, side), scaling], at, (move, k), side.offset)

    def _own_slots(self, move: Move, k: int, across: Sequence[int]) -> tuple[int, Phase, _Side]:
        """Device, phase and place of slots for the blocks of one expansion."""
        extents = [n if step else 1 for n, step in zip(move.extents, across, strict=True)]
        steps = [SLOT_NBYTES * step if wide else 0 for step, wide in zip(dense_strides(extents), across, strict=True)]
        at, phase = self._where(move)
        return at, phase, _Side(self.words.slots(at, (move, k), math.prod(extents)), tuple(steps))

    def _scale_side(self, match: Match) -> _Side:
        """Where an encoding expansion writes the scales of its blocks."""
        width = itemsize(self.plan.conversions[match.scales.move.convert].target)
        return _Side(match.offset * width, tuple(step * width for step in match.steps))

    def _scales_written(self, move: Move) -> _Side:
        """Where an expansion writes scales."""
        width = itemsize(self.plan.conversions[move.convert].target)
        return _Side(move.target_offset * width, tuple(step * width for step in move.target_strides))

    # Parts of work on slots

    def _reducing(self, move: Move, k: int, at: int, phase: Phase, slots: _Side) -> _Part:
        conversion = self.plan.conversions[move.convert]

        def make(region: q.SideRegion, done: Counter) -> Op:
            record = self._record(move, region, q.RAISES_AMAX)
            source = source_key(move, k) if move.source_rank >= 0 else None
            ranks = (move.source_rank, move.target_rank)
            slots_at = Inbox(done.device)
            return Op(at=at, phase=phase, record=record, ranks=ranks, source=source, side=slots_at, signal=done)

        region = _whole_blocks(self._region(move, k, slots.steps, slots, writes=False))
        nbytes = math.prod(move.extents) * itemsize(conversion.source) if move.source_rank >= 0 else 0
        return _Part(True, at, nbytes, region, make)

    def _encoding(self, move: Move, k: int, slots: _Side) -> _Part:
        def make(region: q.SideRegion, after: Counter) -> Op:
            record = self._record(move, region, q.READS_AMAX | q.WRITES_CODES)
            return self._op(move, k, record, side=Inbox(after.device), signal=self._signal(move, k), wait=after)

        at, _ = self._where(move)
        return _Part(False, at, 0, self._region(move, k, slots.steps, slots), make)

    def _scaling(
        self, expansion: Expansion, at: int, phase: Phase, extents: Sequence[int], slots: _Side, written: _Side
    ) -> _Part:
        """Scales that an expansion should write: of all its blocks, or of what `extents` covers."""
        move, k = expansion
        steps = self.plan.conversions[move.convert].steps
        last = max(n for n, step in enumerate(steps) if isinstance(step, ToScale))
        made = Conversion("uint32", steps[last:], self.plan.conversions[move.convert].target)

        def make(region: q.SideRegion, after: Counter) -> Op:
            dims = tuple(r.Dim(dim.extent, dim.side, dim.write) for dim in region.dims)
            (record,) = r.records_of(r.Region(dims, region.side, region.write), made, fills=False)
            record[r.CONVERT] = self.convert(made)
            return Op(
                at=at, phase=phase, record=record, ranks=(move.source_rank, move.target_rank), source=Inbox(at),
                target=target_key(move, k), wait=after, signal=self._signal(move, k),
            )  # fmt: skip

        sides = zip(extents, slots.steps, written.steps, strict=True)
        dims = tuple(q.SideDim(n, 0, write, side, 1) for n, side, write in sides if write)
        return _Part(False, at, 0, q.SideRegion(dims, 0, written.offset, slots.offset), make)

    def _record(self, move: Move, region: q.SideRegion, role: int) -> np.ndarray:
        """In tiles of blocks if that is possible."""
        record = None
        if move.source_rank >= 0:
            record = q.block_record(region, self.plan.conversions[move.convert], role)
        if record is None:
            record = q.element_record(region, role)
        record[r.CONVERT] = self.convert(self.plan.conversions[move.convert])
        return record

    def _op(self, move: Move, k: int, record: np.ndarray, **rest: Any) -> Op:
        at, phase = self._where(move)
        record[r.CONVERT] = self.convert(self.plan.conversions[move.convert])
        record[r.REMOTE] = at != self.device_of[move.target_rank]
        source = source_key(move, k) if move.source_rank >= 0 else None
        ranks = (move.source_rank, move.target_rank)
        return Op(at=at, phase=phase, record=record, ranks=ranks, source=source, target=target_key(move, k), **rest)

    def _where(self, move: Move) -> tuple[int, Phase]:
        """Device and phase of an expansion that writes a rollout's buffer."""
        if move.source_rank < 0:
            return self.device_of[move.target_rank], Phase.FINISH
        return self.device_of[move.source_rank], Phase.SEND

    def _signal(self, move: Move, k: int) -> Counter | None:
        if move.band < 0:
            return None
        return Counter(self.device_of[move.target_rank], (move.band, self.memory(target_key(move, k))))

    def _region(self, move: Move, k: int, across: Sequence[int], side: _Side, *, writes: bool = True) -> q.SideRegion:
        """What an expansion covers; dimensions where `across` is 0 lie within blocks."""
        conversion = self.plan.conversions[move.convert]
        read, write = itemsize(conversion.source), itemsize(conversion.target) * writes
        sources = move.source_strides if move.source_rank >= 0 else (0,) * len(move.extents)
        dims = tuple(
            q.SideDim(n, s * read, t * write, step, 1 if wide else n)
            for n, s, t, step, wide in zip(move.extents, sources, move.target_strides, side.steps, across, strict=True)
        )
        first = (move.source_offset + k * move.source_offset_step) * read if move.source_rank >= 0 else 0
        return q.SideRegion(dims, first, move.target_offset * write, side.offset)


class _Part(NamedTuple):
    """Work that fills or reads slots.

    Attributes:
      fills: Whether it fills them.
      at: Device number.
      nbytes: That it is the first to read.
      region: Its side are the slots.
      make: Its op, of a part of the region; the counter is that of what fills the slots of that part.
    """

    fills: bool
    at: int
    nbytes: int
    region: q.SideRegion
    make: Callable[[q.SideRegion, Counter], Op]


def _pipelined(parts: Sequence[_Part], owner: int, key: Hashable, base: int) -> list[Op]:
    """The ops of some parts, chunk by chunk: a chunk's slots are read `READ_LAG` chunks after they are filled."""
    nbytes: dict[int, int] = {}
    for part in parts:
        nbytes[part.at] = nbytes.get(part.at, 0) + part.nbytes
    fills: list[list[Op]] = []
    reads: list[list[Op]] = [[] for _ in range(READ_LAG)]
    for number, chunk in enumerate(chunks([part.region for part in parts], base, max(nbytes.values()))):
        done = Counter(owner, (key, number))
        made = [(part.fills, part.make(region, done)) for part, region in zip(parts, chunk, strict=True) if region]
        fills.append([op for fill, op in made if fill])
        reads.append([op for fill, op in made if not fill])
    fills += [[] for _ in range(READ_LAG)]
    return [op for pair in zip(fills, reads, strict=True) for ops in pair for op in ops]


def _whole_blocks(region: q.SideRegion) -> q.SideRegion:
    """A region that is only read, with dimensions within blocks joined: those of codes that share a byte, say."""
    out: list[q.SideDim] = []
    for dim in sorted(region.dims, key=lambda dim: dim.read):
        inner = out[-1] if out else None
        if inner is not None and inner.is_within and dim.is_within and dim.read == inner.extent * inner.read:
            extent = inner.extent * dim.extent
            out[-1] = dataclasses.replace(inner, extent=extent, block=extent)
        else:
            out.append(dim)
    return dataclasses.replace(region, dims=tuple(reversed(out)))


class _Side(NamedTuple):
    """Words or scales of blocks: offset of the first, and steps for each dimension of a move, bytes."""

    offset: int
    steps: tuple[int, ...]


def _slot_steps(strides: Sequence[int]) -> tuple[int, ...]:
    return tuple(SLOT_NBYTES * step for step in strides)
