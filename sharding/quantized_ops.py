"""Ops of moves that quantize: codes and scales in one pass where each block fits in a tile, else by way of slots.

A plan has slots for blocks that several moves share. Here a block that one move holds gets a slot too, beside its
source, if no tile can hold it. Slots are words of an inbox, which *ready* zeroes with the counters; the ops that read
them wait for the counter of those that fill them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from shardfly_jax.sharding import quantized_records as q, records as r
from shardfly_jax.sharding.formats import Amax, Conversion, Encode, ToScale, itemsize
from shardfly_jax.sharding.layouts import dense_strides
from shardfly_jax.sharding.moves import Key, Move, source_key, target_key
from shardfly_jax.sharding.ops import Counter, Inbox, InboxWords, Op, Phase
from shardfly_jax.sharding.plan import Plan, slot_key, staging_sizes
from shardfly_jax.sharding.scale_matches import Expansion, Match, matches

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

    def ops(self, move: Move, k: int) -> list[Op]:
        """The ops of one expansion, each after those that it waits for."""
        conversion = self.plan.conversions[move.convert]
        if Expansion(move, k) in self._joined:
            return []
        if target_key(move, k) in self._staging:
            key = target_key(move, k)
            owner, slots = self._slots(key)
            at = owner if move.source_rank < 0 else self.device_of[move.source_rank]
            side = _Side(slots + SLOT_NBYTES * move.target_offset, _slot_steps(move.target_strides))
            return [self._reduce(move, k, at, Phase.SEND, side, Counter(owner, key))]
        if move.source_rank >= 0 and source_key(move, k) in self._staging:
            key = source_key(move, k)
            owner, slots = self._slots(key)
            first = slots + SLOT_NBYTES * (move.source_offset + k * move.source_offset_step)
            side = _Side(first, _slot_steps(move.source_strides))
            written = self._scales_written(move)
            done = Counter(owner, key)
            return [self._scales(Expansion(move, k), owner, Phase.SEND, move.extents, side, written, done)]
        if conversion.encodes is None:
            return self._scales_of_blocks(move, k)
        view = self.plan.blocks[move.block]
        if view.family < 0:
            return self._encode_blocks(move, k, view.strides)
        key = slot_key(self.plan, move, k)
        owner, slots = self._slots(key)
        side = _Side(slots + SLOT_NBYTES * view.offset, _slot_steps(view.strides))
        return [self._encode(move, k, side, Counter(owner, key))]

    def _slots(self, key: Key) -> tuple[int, int]:
        """Device and offset of some slots of the plan."""
        owner = self.device_of[key[2]]
        return owner, self.words.slots(owner, key, self._staging[key])

    # Of blocks that one move holds

    def _encode_blocks(self, move: Move, k: int, across: Sequence[int]) -> list[Op]:
        match = self._matches.get(Expansion(move, k))
        written = self._scale_side(match) if match else _Side(0, (0,) * len(across))
        if move.source_rank >= 0:
            conversion = self.plan.conversions[move.convert]
            role = q.WRITES_CODES | (q.STORES_SCALES if match else 0)
            record = q.block_record(self._region(move, k, across, written), conversion, role)
            if record is not None:
                scales = target_key(*match.scales) if match else None
                also = self._signal(*match.scales) if match else None
                return [self._op(move, k, record, side=scales, signal=self._signal(move, k), side_signal=also)]
        at, phase, side, done = self._own_slots(move, k, across)
        out = [self._reduce(move, k, at, phase, side, done), self._encode(move, k, side, done)]
        if match:
            out.append(self._scales(match.scales, at, phase, move.extents, side, written, done))
        return out

    def _scales_of_blocks(self, move: Move, k: int) -> list[Op]:
        """Scales that no encoding expansion goes with."""
        conversion, across = self.plan.conversions[move.convert], move.target_strides
        written = self._scales_written(move)
        if move.source_rank >= 0 and isinstance(conversion.steps[-1], ToScale):
            record = q.block_record(self._region(move, k, across, written), conversion, q.STORES_SCALES)
            if record is not None:
                return [self._op(move, k, record, side=target_key(move, k), side_signal=self._signal(move, k))]
        at, phase, side, done = self._own_slots(move, k, across)
        scales = self._scales(Expansion(move, k), at, phase, move.extents, side, written, done)
        return [self._reduce(move, k, at, phase, side, done), scales]

    def _own_slots(self, move: Move, k: int, across: Sequence[int]) -> tuple[int, Phase, _Side, Counter]:
        """Device, phase, place and counter of slots for the blocks of one expansion."""
        extents = [n if step else 1 for n, step in zip(move.extents, across, strict=True)]
        steps = [SLOT_NBYTES * step if wide else 0 for step, wide in zip(dense_strides(extents), across, strict=True)]
        at, phase = self._where(move)
        slots = self.words.slots(at, (move, k), math.prod(extents))
        return at, phase, _Side(slots, tuple(steps)), Counter(at, (move, k))

    def _scale_side(self, match: Match) -> _Side:
        """Where an encoding expansion writes the scales of its blocks."""
        width = itemsize(self.plan.conversions[match.scales.move.convert].target)
        return _Side(match.offset * width, tuple(step * width for step in match.steps))

    def _scales_written(self, move: Move) -> _Side:
        """Where an expansion writes scales."""
        width = itemsize(self.plan.conversions[move.convert].target)
        return _Side(move.target_offset * width, tuple(step * width for step in move.target_strides))

    # Ops

    def _reduce(self, move: Move, k: int, at: int, phase: Phase, side: _Side, done: Counter) -> Op:
        region = self._region(move, k, side.steps, side, writes=False)
        record = None
        if move.source_rank >= 0:
            record = q.block_record(region, self.plan.conversions[move.convert], q.RAISES_AMAX)
        if record is None:
            record = q.element_record(region, q.RAISES_AMAX)
        record[r.CONVERT] = self.convert(self.plan.conversions[move.convert])
        source = source_key(move, k) if move.source_rank >= 0 else None
        ranks = (move.source_rank, move.target_rank)
        return Op(
            at=at, phase=phase, record=record, ranks=ranks, source=source, side=Inbox(done.device), signal=done
        )  # fmt: skip

    def _encode(self, move: Move, k: int, side: _Side, after: Counter) -> Op:
        role = q.READS_AMAX | q.WRITES_CODES
        region = self._region(move, k, side.steps, side)
        record = None
        if move.source_rank >= 0:
            record = q.block_record(region, self.plan.conversions[move.convert], role)
        if record is None:
            record = q.element_record(region, role)
        return self._op(move, k, record, side=Inbox(after.device), signal=self._signal(move, k), wait=after)

    def _scales(
        self,
        expansion: Expansion,
        at: int,
        phase: Phase,
        extents: Sequence[int],
        slots: _Side,
        written: _Side,
        after: Counter,
    ) -> Op:
        """Scales that an expansion should write, from slots: of all its blocks, or of what `extents` covers."""
        move, k = expansion
        steps = self.plan.conversions[move.convert].steps
        last = max(n for n, step in enumerate(steps) if isinstance(step, ToScale))
        made = Conversion("uint32", steps[last:], self.plan.conversions[move.convert].target)
        sides = zip(extents, slots.steps, written.steps, strict=True)
        dims = tuple(r.Dim(n, read, write) for n, read, write in sides if write)
        (record,) = r.records_of(r.Region(dims, slots.offset, written.offset), made, fills=False)
        record[r.CONVERT] = self.convert(made)
        return Op(
            at=at, phase=phase, record=record, ranks=(move.source_rank, move.target_rank), source=Inbox(at),
            target=target_key(move, k), wait=after, signal=self._signal(move, k),
        )  # fmt: skip

    def _op(self, move: Move, k: int, record: np.ndarray, **rest: Any) -> Op:
        record[r.CONVERT] = self.convert(self.plan.conversions[move.convert])
        at, phase = self._where(move)
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


class _Side(NamedTuple):
    """Words or scales of blocks: offset of the first, and steps for each dimension of a move, bytes."""

    offset: int
    steps: tuple[int, ...]


def _slot_steps(strides: Sequence[int]) -> tuple[int, ...]:
    return tuple(SLOT_NBYTES * step for step in strides)
