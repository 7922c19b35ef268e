"""A process' part of a plan: the chunks that its ranks send, forward and receive.

Chunks are numbered per pair of ranks in the plan's order, so both sides of a pair know chunk `n` of it without a word
about addresses or shapes. A chunk travels as the contiguous array of its converted elements, axes in the order of the
target's strides.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping

import numpy as np

from shardfly_jax.executors.host import chunks
from shardfly_jax.executors.memory import Shard
from shardfly_jax.sharding.formats import Cast, Conversion, Divide, Fill, MulAdd, np_dtype
from shardfly_jax.sharding.moves import Key, Move, View, move_size, source_key, source_view, target_key, target_view
from shardfly_jax.sharding.plan import Plan

Band = tuple[int, int]
"""A band in a buffer of this process: its number and the buffer's address. What arrives there is counted."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One chunk of one move.

    Attributes:
      pair: Source and target rank; the source of a fill is -1.
      number: Among the chunks of the pair.
      source, read: What is read: a buffer and a view of it.
      target, write: What is written.
      waits: The band that must be complete before it is forwarded; None if it comes from a trainer.
      fills: The band that it is a part of; None if that is nobody's concern here.
    """

    pair: tuple[int, int]
    number: int
    source: Key
    read: View
    target: Key
    write: View
    conversion: Conversion
    waits: Band | None
    fills: Band | None

    @property
    def nbytes(self) -> int:
        """Of its payload."""
        return int(np.prod(self.write.extents, dtype=np.int64)) * np_dtype(self.conversion.target).itemsize


@dataclasses.dataclass(frozen=True, slots=True)
class Steps:
    """All chunks that concern the ranks of a process.

    Attributes:
      ordered: All of them once, in the plan's order.
      outgoing: Those it sends or forwards, its own ranks' included, in the plan's order.
      incoming: Those it receives, from its own ranks and fills included.
      needed: How many of `incoming` make each band complete.
    """

    ordered: tuple[Step, ...]
    outgoing: tuple[Step, ...]
    incoming: tuple[Step, ...]
    needed: Counter[Band]

    @property
    def chunk_nbytes(self) -> int:
        """Of the largest chunk that comes in."""
        return max((step.nbytes for step in self.incoming), default=0)


ELEMENTWISE = (Cast, MulAdd, Divide, Fill)
"""Steps of conversions that treat every element by itself, so that a chunk can be converted without its neighbours."""


def why_not_carried(plan: Plan) -> str | None:
    """Why the chunks of a plan cannot be converted one by one; None if they can."""
    for conversion in plan.conversions:
        if not all(isinstance(step, ELEMENTWISE) for step in conversion.steps):
            return f"the conversion {conversion.describe()} needs more than one element at a time"
    return None


def steps_of(plan: Plan, held: frozenset[int], buffers: Mapping[Key, Shard]) -> Steps:
    """The chunks of the ranks that a process holds.

    Args:
      plan: The plan.
      held: Plan-wide ranks.
      buffers: Registered shards of the held ranks.
    """
    mine = np.isin(np.arange(-1, plan.ranks), sorted(held))
    rows, ks = plan.moves.expanded()
    concerned = (mine[plan.moves.source_rank + 1] | mine[plan.moves.target_rank + 1])[rows]
    moves: dict[int, Move] = {}
    counts: Counter[tuple[int, int]] = Counter()
    ordered, outgoing, incoming = [], [], []
    for row, k in zip(rows[concerned].tolist(), ks[concerned].tolist(), strict=True):
        move = moves.setdefault(row, plan.moves[row])
        for step in _steps(plan, move, k, held, buffers, counts):
            ordered.append(step)
            if move.source_rank in held:
                outgoing.append(step)
            if move.target_rank in held:
                incoming.append(step)
    needed = Counter(step.fills for step in incoming if step.fills)
    return Steps(tuple(ordered), tuple(outgoing), tuple(incoming), needed)


def _steps(
    plan: Plan,
    move: Move,
    k: int,
    held: frozenset[int],
    buffers: Mapping[Key, Shard],
    counts: Counter[tuple[int, int]],
) -> Iterator[Step]:
    source, target, pair = source_key(move, k), target_key(move, k), (move.source_rank, move.target_rank)
    if move.hop and pair[0] == pair[1] and buffers[source].address == buffers[target].address:
        return  # an alias that shares its buffer
    conversion = plan.conversions[move.convert]
    read, write = source_view(move, k), target_view(move)
    order = sorted(range(len(write.extents)), key=lambda d: -abs(write.strides[d]))
    if move.source_rank >= 0:
        read = View(read.offset, *(tuple(of[d] for d in order) for of in read[1:]))
    write = View(write.offset, *(tuple(of[d] for d in order) for of in write[1:]))
    waits = (move.band, buffers[source].address) if move.hop and move.source_rank in held else None
    fills = (move.band, buffers[target].address) if move.band >= 0 and move.target_rank in held else None
    whole = move_size(move) * np_dtype(conversion.target).itemsize
    for first, second in [(read, write)] if move.source_rank < 0 else chunks(read, write, whole):
        yield Step(pair, counts[pair], source, first, target, second, conversion, waits, fills)
        counts[pair] += 1
