"""A process' part of a plan: the chunks that its ranks send, forward and receive.

Chunks are numbered per pair of ranks in the plan's order, so both sides of a pair know chunk `n` of it without a word
about addresses or shapes. A chunk travels as the contiguous array of its converted elements, axes in the order of the
target's strides.

Of a plan that quantizes, codes and scales travel, and the maxima of the blocks that no single rank holds: whoever holds
a part of such a block tells the rank that owns its slot, and the owner tells whoever encodes a part of it. The owner's
slots and what others hold of them lie in buffers of the same key, which begin every attempt as zeros.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from shardfly_jax.executors import host, hostcopy, hostquantize
from shardfly_jax.executors.memory import Shard
from shardfly_jax.sharding.errors import NotFinite
from shardfly_jax.sharding.finiteness import not_finite
from shardfly_jax.sharding.formats import Amax, Conversion, itemsize, np_dtype
from shardfly_jax.sharding.layouts import dense_strides
from shardfly_jax.sharding.moves import Key, Move, View, source_key, source_view, target_key, target_view
from shardfly_jax.sharding.plan import Plan, slot_key, staging_sizes
from shardfly_jax.sharding.quantized_rows import SLOT_DTYPE

Band = tuple[int, ...]
"""What must be here before it is read. A band in a buffer of this process: its number and the buffer's address; slots:
their key; what an owner told of its slots: their key, the rank that it told, and a number."""
Memory = Mapping[Key, np.ndarray]
"""The bytes of every buffer of this process: sources, targets and slots."""
SLOT_BITS = Conversion(SLOT_DTYPE, (), SLOT_DTYPE)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One chunk of one move.

    Attributes:
      pair: Source and target rank; the source of a fill is -1.
      number: Among the chunks of the pair.
      source, read: What is read: a buffer and a view of it.
      target, write: What is written.
      waits: What must be complete before it is read; None if it comes from a trainer's weights alone.
      fills: What it is a part of; None if that is nobody's concern here.
      within: Axes inside a block, of a conversion that quantizes.
      slots: The maxima of each element's block, a buffer and a view of it; None where they are not read.
      merges: Whether it is written into slots, which keep the larger of what they hold and what comes.
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
    within: tuple[int, ...] = ()
    slots: tuple[Key, View] | None = None
    merges: bool = False

    @property
    def nbytes(self) -> int:
        """Of its payload."""
        return math.prod(self.write.extents) * itemsize(self.conversion.target)


@dataclasses.dataclass(frozen=True, slots=True)
class Steps:
    """All chunks that concern the ranks of a process.

    Attributes:
      plan: That they are of.
      held: The ranks.
      ordered: All of them once, in the plan's order.
      outgoing: Those it sends or forwards, its own ranks' included, in the plan's order.
      incoming: Those it receives, from its own ranks and fills included.
      needed: How many of `incoming` make each band complete.
      slots: Elements of the slots that are written or read here.
    """

    plan: Plan
    held: frozenset[int]
    ordered: tuple[Step, ...]
    outgoing: tuple[Step, ...]
    incoming: tuple[Step, ...]
    needed: Counter[Band]
    slots: dict[Key, int]

    @property
    def chunk_nbytes(self) -> int:
        """Of the largest chunk that comes in."""
        return max((step.nbytes for step in self.incoming), default=0)

    @property
    def trainers_that_receive(self) -> list[int]:
        """Trainer ranks that other processes tell maxima of blocks."""
        pairs = {step.pair for step in self.incoming}
        return sorted({to for at, to in pairs if to < self.plan.source_ranks and at >= 0 and at not in self.held})

    def fresh_slots(self) -> dict[Key, np.ndarray]:
        """The bytes of slots as an attempt begins with them."""
        return {key: np.zeros(size, SLOT_DTYPE).view(np.uint8) for key, size in self.slots.items()}

    # What is done with a chunk

    def payload(self, step: Step, memory: Memory) -> np.ndarray:
        """A chunk that can be read now, as it travels.

        Raises:
          NotFinite: A block to be quantized holds NaN or infinity.
        """
        out = np.empty(step.write.extents, np_dtype(step.conversion.target))
        self._convert(step, memory, out)
        return out.reshape(-1).view(np.uint8)

    def place(self, step: Step, memory: Memory, payload: Any) -> None:
        """Writes a chunk that has come."""
        target = _target(step, memory)
        if step.merges:
            np.maximum(target, np.frombuffer(payload, SLOT_DTYPE).reshape(target.shape), out=target)
        else:
            hostcopy.place(target, payload)

    def copy(self, step: Step, memory: Memory) -> None:
        """Writes a chunk from this process to itself. Raises as `payload`."""
        if step.merges:
            self.place(step, memory, self.payload(step, memory))
        else:
            self._convert(step, memory, _target(step, memory))

    def _convert(self, step: Step, memory: Memory, out: np.ndarray) -> None:
        dtype = np_dtype(step.conversion.source)
        if step.pair[0] < 0:
            source = np.empty(step.read.extents, dtype)
        else:
            source = step.read.of(memory[step.source].view(dtype))
        bits = None if step.slots is None else step.slots[1].of(memory[step.slots[0]].view(SLOT_DTYPE))
        try:
            hostquantize.write(out, source, step.conversion, step.within, bits)
        except NotFinite:
            family, tensor, _ = step.target
            raise not_finite(self.plan.families[family], tensor) from None


def _target(step: Step, memory: Memory) -> np.ndarray:
    return step.write.of(memory[step.target].view(np_dtype(step.conversion.target)))


def steps_of(plan: Plan, held: frozenset[int], buffers: Mapping[Key, Shard]) -> Steps:
    """The chunks of the ranks that a process holds.

    Args:
      plan: The plan.
      held: Plan-wide ranks.
      buffers: Registered shards of the held ranks.
    """
    mine = np.isin(np.arange(-1, plan.ranks), sorted(held))
    owner, _ = plan.slot_reads
    rows, ks = plan.moves.expanded()
    concerned = (mine[plan.moves.source_rank + 1] | mine[plan.moves.target_rank + 1] | mine[owner + 1])[rows]
    moves: dict[int, Move] = {}
    cutter = _Cutter(plan, held, buffers)
    ordered: list[Step] = []
    for row, k in zip(rows[concerned].tolist(), ks[concerned].tolist(), strict=True):
        if row not in moves:
            moves[row] = plan.moves[row]
        ordered += cutter.steps(moves[row], k)
    outgoing = tuple(step for step in ordered if step.pair[0] in held)
    incoming = tuple(step for step in ordered if step.pair[1] in held)
    needed = Counter(step.fills for step in incoming if step.fills)
    return Steps(plan, held, tuple(ordered), outgoing, incoming, needed, cutter.slots)


class _Cutter:
    """Cuts expansions, in the plan's order, into chunks. What both sides number depends on nothing but the plan.

    Attributes:
      slots: Elements of the slots that were met.
    """

    def __init__(self, plan: Plan, held: frozenset[int], buffers: Mapping[Key, Shard]):
        self._plan, self._held, self._buffers = plan, held, buffers
        self._counts: Counter[tuple[int, int]] = Counter()
        self._staging = staging_sizes(plan)
        self._told: dict[tuple[Key, int, View], Band] = {}
        self.slots: dict[Key, int] = {}

    def steps(self, move: Move, k: int) -> Iterator[Step]:
        """The chunks of one expansion, after those of the maxima that it reads."""
        source, target, pair = source_key(move, k), target_key(move, k), (move.source_rank, move.target_rank)
        if move.hop and pair[0] == pair[1] and self._buffers[source].address == self._buffers[target].address:
            return  # an alias that shares its buffer
        read, write = source_view(move, k), target_view(move)
        order = sorted(range(len(write.extents)), key=lambda d: -abs(write.strides[d]))
        across = move.target_strides if move.block < 0 else self._plan.blocks[move.block].strides
        step = Step(
            pair, 0, source, _turned(read, order), target, _turned(write, order), self._plan.conversions[move.convert],
            self._waits(move, source), self._fills(move, target),
            within=tuple(axis for axis, d in enumerate(order) if not across[d]), merges=target in self._staging,
        )  # fmt: skip
        if move.block >= 0:
            block = self._plan.blocks[move.block]
            if block.family >= 0:
                view = _turned(View(block.offset, move.extents, block.strides), order)
                step = yield from self._with_slots(step, slot_key(self._plan, move, k), view)
            elif pair[0] >= 0 and _block_nbytes(step) > host.CHUNK_NBYTES:
                step = yield from self._with_slots_of_its_own(step)
        if not self._held.isdisjoint(pair):  # else only the maxima concern this process
            yield from self._cut(step)

    def _waits(self, move: Move, source: Key) -> Band | None:
        if move.source_rank not in self._held:
            return None
        if source in self._staging:
            return source
        return (move.band, self._buffers[source].address) if move.hop else None

    def _fills(self, move: Move, target: Key) -> Band | None:
        if move.target_rank not in self._held:
            return None
        if target in self._staging:
            self.slots[target] = self._staging[target]
            return target
        return (move.band, self._buffers[target].address) if move.band >= 0 else None

    def _with_slots(self, step: Step, slots: Key, view: View) -> Generator[Step, None, Step]:
        """A step that encodes with maxima from slots, after what their owner tells it of them.

        Whoever encodes several parts of the same blocks is told once.
        """
        owner, encoder = slots[2], step.pair[0] if step.pair[0] >= 0 else step.pair[1]
        step = dataclasses.replace(step, slots=(slots, view))
        if owner not in self._held and encoder not in self._held:
            return step
        self.slots[slots] = self._staging[slots]
        if owner in self._held and encoder in self._held:
            return dataclasses.replace(step, waits=slots)
        axes = sorted((d for d, stride in enumerate(view.strides) if stride), key=lambda d: -abs(view.strides[d]))
        part = _turned(view, axes)
        if (slots, encoder, part) not in self._told:
            band = self._told[slots, encoder, part] = (*slots, encoder, len(self._told))
            at, to = (slots, None) if owner in self._held else (None, band)
            yield from self._cut(
                Step((owner, encoder), 0, slots, part, slots, part, SLOT_BITS, waits=at, fills=to, merges=True)
            )
        return dataclasses.replace(step, waits=None if owner in self._held else self._told[slots, encoder, part])

    def _with_slots_of_its_own(self, step: Step) -> Generator[Step, None, Step]:
        """A step whose single blocks are larger than a chunk, after the step that finds their maxima."""
        shape = [1 if axis in step.within else n for axis, n in enumerate(step.read.extents)]
        strides = tuple(0 if n == 1 else stride for n, stride in zip(shape, dense_strides(shape), strict=True))
        slots, bits = (-1, len(self.slots), step.pair[0]), View(0, step.read.extents, strides)
        if step.pair[0] in self._held:
            self.slots[slots] = math.prod(shape)  # so the next key is another one
            conversion = Conversion(step.conversion.source, (*step.conversion.steps[:-1], Amax()), SLOT_DTYPE)
            yield from self._cut(
                dataclasses.replace(
                    step, pair=(step.pair[0], step.pair[0]), target=slots, write=View(0, tuple(shape), strides),
                    conversion=conversion, fills=slots, merges=True,
                )
            )  # fmt: skip
        return dataclasses.replace(step, slots=(slots, bits), waits=slots)

    def _cut(self, step: Step) -> Iterator[Step]:
        views = (step.read, step.write, *([step.slots[1]] if step.slots is not None else []))
        extents, parts = step.read.extents, iter([views])
        finds = step.conversion.reduces or (step.conversion.encodes is not None and step.slots is None)
        axes = [axis for axis, n in enumerate(extents) if n > 1 and not (finds and axis in step.within)]
        if step.pair[0] >= 0 and axes:  # blocks whose maxima are found here stay whole
            nbytes = math.prod(extents) * itemsize(step.conversion.source) if step.conversion.reduces else step.nbytes
            parts = host.chunks(views, nbytes, axes[0])
        for read, write, *bits in parts:
            slots = None if step.slots is None else (step.slots[0], bits[0])
            yield dataclasses.replace(step, number=self._counts[step.pair], read=read, write=write, slots=slots)
            self._counts[step.pair] += 1


def _block_nbytes(step: Step) -> int:
    """Codes of one block."""
    return math.prod(step.read.extents[axis] for axis in step.within) * itemsize(step.conversion.target)


def _turned(view: View, axes: Sequence[int]) -> View:
    """A view with some of its axes, in another order."""
    return View(view.offset, *(tuple(of[axis] for axis in axes) for of in view[1:]))
