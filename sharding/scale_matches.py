"""Which moves write the scales of just the blocks that others encode, so that one pass can do both.

Codes and scales of a tensor have routes of their own: other roots, other bands, other holders of the same source shard.
So an expansion that writes scales may go with several that encode, each with a part of its blocks, and to other ranks.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

from shardfly_jax.sharding.formats import Amax, Encode, Step, ToScale
from shardfly_jax.sharding.moves import Move, source_key, target_key
from shardfly_jax.sharding.plan import Plan
from shardfly_jax.sharding.quantization import Format


class Expansion(NamedTuple):
    """An expansion of a move."""

    move: Move
    k: int


class Match(NamedTuple):
    """Where the scales go of what an expansion encodes.

    Attributes:
      scales: That writes them in the plan.
      offset: Of the first one in its target, elements.
      steps: For each dimension of the encoding move; 0 within blocks.
      box: Of the blocks that `scales` writes; its dimensions by falling source stride.
    """

    scales: Expansion
    offset: int
    steps: tuple[int, ...]
    box: tuple[tuple[int, int], ...]


def matches(plan: Plan) -> dict[Expansion, Match]:
    """By encoding expansion. The ones that match an expansion of scales cover just its blocks."""
    shards = _Shards(plan)
    scales: dict[Hashable, list[Expansion]] = {}
    encoding: list[tuple[Hashable, Expansion]] = []
    for move in plan.moves:
        steps = plan.conversions[move.convert].steps
        if move.source_rank < 0 or not steps:
            continue
        last, before = steps[-1], steps[:-1]
        if isinstance(last, ToScale) and before and isinstance(before[-1], Amax):
            for k in range(move.count):
                key = shards.blocks(move, k, before[:-1], last.format, move.target_strides)
                scales.setdefault(key, []).append(Expansion(move, k))
        elif isinstance(last, Encode) and plan.blocks[move.block].family < 0:
            across = plan.blocks[move.block].strides
            encoding += [
                (shards.blocks(move, k, before, last.format, across), Expansion(move, k)) for k in range(move.count)
            ]
    found: dict[Expansion, dict[Expansion, Match]] = {}
    for key, expansion in encoding:
        for candidate in scales.get(key, ()):
            match = _match(expansion, candidate, plan.blocks[expansion.move.block].strides)
            if match is not None:
                found.setdefault(candidate, {})[expansion] = match
                break
    return {
        expansion: match
        for candidate, parts in found.items()
        if _tile(candidate.move, [match.box for match in parts.values()])
        for expansion, match in parts.items()
    }


class _Shards:
    """Names of source shards: ranks that hold the same one share it."""

    def __init__(self, plan: Plan):
        self.plan = plan
        self._first = {
            (index, rank): ranks[0]
            for index in plan.source_families
            for _, ranks in plan.families[index].layout.holders
            for rank in ranks
        }

    def blocks(self, move: Move, k: int, before: tuple[Step, ...], format: Format, across: Sequence[int]) -> Hashable:
        """What an expansion that encodes blocks has in common with the one that writes their scales."""
        family, tensor, rank = source_key(move, k)
        within: list[tuple[int, int]] = []
        dims = zip(move.extents, move.source_strides, across, strict=True)
        for n, read in sorted(((n, read) for n, read, step in dims if not step), key=lambda dim: dim[1]):
            if within and read == within[-1][0] * within[-1][1]:
                within[-1] = (within[-1][0] * n, within[-1][1])
            else:
                within.append((n, read))
        written, layer, _ = target_key(move, k)
        target = self.plan.families[written]
        shard = family, tensor, self._first[family, rank]
        return shard, target.tree, target.first + layer, before, format, tuple(within)


def _match(encoding: Expansion, scales: Expansion, across: Sequence[int]) -> Match | None:
    """Where the blocks of one expansion lie among those of another; None if not all of them do."""
    move, other = encoding.move, scales.move
    written = {
        read: (n, step)
        for n, read, step in zip(other.extents, other.source_strides, other.target_strides, strict=True)
        if step
    }
    counts = {read: n for n, read, step in zip(move.extents, move.source_strides, across, strict=True) if step}
    wide = sum(step != 0 for step in across), sum(step != 0 for step in other.target_strides)
    if (len(counts), len(written)) != wide or not counts.keys() <= written.keys() or min(written, default=1) < 1:
        return None
    rest = _start(encoding) - _start(scales)
    offset, box = other.target_offset, []
    for read in sorted(written, reverse=True):
        n, step = written[read]
        index, rest = divmod(rest, read)
        if not 0 <= index <= n - counts.get(read, 1):
            return None
        offset += index * step
        box.append((index, index + counts.get(read, 1)))
    steps = [written[read][1] if step else 0 for read, step in zip(move.source_strides, across, strict=True)]
    return None if rest else Match(scales, offset, tuple(steps), tuple(box))


def _start(expansion: Expansion) -> int:
    return expansion.move.source_offset + expansion.k * expansion.move.source_offset_step


def _tile(scales: Move, boxes: Sequence[tuple[tuple[int, int], ...]]) -> bool:
    """Whether boxes of blocks hold each block that a move writes the scale of, and none twice (copies may repeat)."""
    dims = zip(scales.extents, scales.source_strides, scales.target_strides, strict=True)
    counts = [n for n, read, step in sorted(dims, key=lambda dim: -dim[1]) if step]
    if sum(math.prod(hi - lo for lo, hi in box) for box in boxes) != math.prod(counts):
        return False
    if len(boxes) == 1:
        return True
    held = np.zeros(counts, bool)
    for box in boxes:
        held[tuple(slice(lo, hi) for lo, hi in box)] = True
    return bool(held.all())
