"""Op tables: what each device does in each phase of an update, as records in the plan's order.

Two phases hold records. *send* reads trainer shards: it holds the moves of the trainer ranks on its device, and the
forwards of what it has itself written to rollout ranks there. *finish* holds the other forwards of the rollout ranks on
its device, and the fills of its own buffers. Every device has an *inbox*:
words at a fixed address, which other devices write into:

    0 .. INBOX_FLAGS          the version its buffers hold, and whether they are poisoned: written by itself
    flag(kind, device)        two words: the attempt that `device` has got so far with, see `Flag`
    counters                  how many tiles of a band have arrived, for the forwards that wait for it, or how many have
                              been reduced; and slots, the maxima of blocks

Blocks take tiles in rising order, and records stand in the plan's order, so a record waits only for smaller ones.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Hashable, Iterator, Mapping

import numpy as np

from shardfly_jax.sharding import records as r
from shardfly_jax.sharding.alternating import alternating
from shardfly_jax.sharding.formats import Amax, Conversion, Encode, Fill, ToScale, itemsize
from shardfly_jax.sharding.moves import Key, Move, source_key, target_key
from shardfly_jax.sharding.ops import Counter, Inbox as Inbox, InboxWords, Op, Phase as Phase
from shardfly_jax.sharding.plan import Plan, staging_sizes
from shardfly_jax.sharding.quantized_ops import QuantizedOps, quantizes

INBOX_FLAGS = 16
"""Words of an inbox before its flags."""
SIGNALS = ((r.SIGNAL, r.SIGNAL_INBOX), (r.SIDE_SIGNAL, r.SIDE_INBOX))
"""Words of a record that name a counter, and its buffer."""


class Flag(enum.IntEnum):
    """What a device tells another one, with the attempt it speaks of."""

    READY = 0
    SENT = 1
    FORWARDED = 2


@dataclasses.dataclass(frozen=True, slots=True)
class OpTable:
    """What one device does in one phase.

    Attributes:
      words: int32 [records, `records.WORDS`].
      buffers: What `SOURCE`, `TARGET` and `SIGNAL_INBOX` name.
      n_tiles: Tiles of all records.
      moves: Of each record: source rank, target rank.
    """

    words: np.ndarray
    buffers: tuple[Key | Inbox, ...]
    n_tiles: int
    moves: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class OpTables:
    """The tables of all devices.

    Attributes:
      devices: In the order in which flags and inboxes number them.
      tables: By device number and phase; devices without records in a phase have none.
      device_of: Device number of each rank.
      n_counters: Of each device, slots among them.
      conversions: What the records name.
    """

    devices: tuple[Hashable, ...]
    tables: dict[tuple[int, Phase], OpTable]
    device_of: dict[int, int]
    n_counters: tuple[int, ...]
    conversions: tuple[Conversion, ...]

    def flag(self, kind: Flag, device: int) -> int:
        """Word of an inbox in which `device` speaks."""
        return INBOX_FLAGS + 2 * (kind * len(self.devices) + device)

    @property
    def counters(self) -> int:
        """First counter of an inbox."""
        return first_counter(len(self.devices))

    def ranks_on(self, device: int, phase: Phase | None = None) -> list[int]:
        """Ranks of a device that read in a phase, or (None) whose buffers are written."""
        if phase is None:
            moves = (ranks for table in self.tables.values() for ranks in table.moves)
            return sorted({to for _, to in moves if self.device_of[to] == device})
        table = self.tables.get((device, phase))
        return sorted({at for at, _ in table.moves if at >= 0}) if table else []

    def ranks_that_raise(self, device: int, counter: int) -> list[int]:
        """Ranks whose moves raise a counter of a device; a fill counts as its target's."""
        found = set()
        for table in self.tables.values():
            if Inbox(device) in table.buffers:
                inbox = table.buffers.index(Inbox(device))
                raises = np.zeros(len(table.words), bool)
                for signal, at in SIGNALS:
                    raises |= (table.words[:, signal] == counter) & (table.words[:, at] == inbox)
                found |= {at if at >= 0 else to for (at, to), yes in zip(table.moves, raises, strict=True) if yes}
        return sorted(found)

    def targets(self, device: int, phase: Phase) -> list[int]:
        """Devices whose buffers or inboxes a device uses in a phase."""
        table = self.tables.get((device, phase))
        if table is None:
            return []
        named = {k for word in (r.TARGET, r.SIDE, r.SIGNAL_INBOX, r.SIDE_INBOX) for k in table.words[:, word].tolist()}
        used = {table.buffers[k] for k in named if k >= 0}
        waited = {table.buffers[k] for k in table.words[:, r.WAIT_INBOX].tolist() if k >= 0} - {Inbox(device)}
        return sorted({key.device if isinstance(key, Inbox) else self.device_of[key[2]] for key in used | waited})

    def writers(self, device: int, phase: Phase) -> list[int]:
        """Devices that use a device's buffers or inbox in a phase."""
        return [d for d in range(len(self.devices)) if device in self.targets(d, phase)]


def make_tables(plan: Plan, place: Mapping[int, Hashable], memory: Callable[[Key], object]) -> OpTables:
    """The tables of all moves of a plan.

    Args:
      plan: The plan.
      place: The device of every rank that moves anything.
      memory: Equal for two target buffers that are one (aliases): copying between them is left out.
    """
    devices: dict[Hashable, int] = {}
    device_of = {rank: devices.setdefault(place[rank], len(devices)) for rank in sorted(place)}
    for _, _, owner in staging_sizes(plan):
        device_of.setdefault(owner, 0)  # a rank that holds slots and nothing else: any device will do
    conversions: dict[Conversion, int] = {}
    words = InboxWords(len(devices), first_counter(len(devices)))
    builders: dict[tuple[int, Phase], _Builder] = {}
    waiting: dict[Counter, list[np.ndarray]] = {}
    signalling: dict[Counter, list[tuple[np.ndarray, int]]] = {}
    ops = _ops(plan, device_of, words, lambda c: conversions.setdefault(c, len(conversions)), memory)
    for op in _forwarded_early(ops):
        builder, record = builders.setdefault((op.at, op.phase), _Builder()), op.record
        for word, buffer in ((r.SOURCE, op.source), (r.TARGET, op.target), (r.SIDE, op.side)):
            record[word] = -1 if buffer is None else builder.buffer(buffer)
        for (word, inbox), signal in zip(SIGNALS, (op.signal, op.side_signal), strict=True):
            if signal is not None:
                record[word], record[inbox] = words.counter(signal), builder.buffer(Inbox(signal.device))
                signalling.setdefault(signal, []).append((record, word))
        if op.wait is not None:
            record[r.WAIT], record[r.WAIT_INBOX] = words.counter(op.wait), builder.buffer(Inbox(op.wait.device))
            waiting.setdefault(op.wait, []).append(record)
        builder.add(record, op.ranks)
    for counter, members in signalling.items():
        arrive = sum(int(r.n_tiles(record)) for record, _ in members)
        for record in waiting.get(counter, []):
            record[r.WAIT_COUNT] = arrive
        if counter not in waiting:
            for record, word in members:
                record[word] = -1
    return OpTables(
        tuple(devices),
        {key: builder.table() for key, builder in builders.items()},
        device_of,
        tuple(words.counts),
        tuple(conversions),
    )


def first_counter(devices: int) -> int:
    """Words of an inbox before its counters."""
    return INBOX_FLAGS + 2 * len(Flag) * devices


def _ops(
    plan: Plan,
    device_of: Mapping[int, int],
    words: InboxWords,
    convert: Callable[[Conversion], int],
    memory: Callable[[Key], object],
) -> Iterator[Op]:
    """The ops of all expansions, in order."""
    templates, quantized = _Templates(plan), QuantizedOps(plan, device_of, words, convert, memory)
    for move, k in plan.moves.in_order():
        source, target, conversion = source_key(move, k), target_key(move, k), plan.conversions[move.convert]
        if move.hop and memory(source) == memory(target):
            continue
        if quantizes(conversion):
            yield from quantized.ops(move, k)
            continue
        fills = move.source_rank < 0
        to = device_of[move.target_rank]
        at = to if fills else device_of[move.source_rank]
        for record in templates.records(move, k):
            record[r.CONVERT], record[r.REMOTE] = convert(conversion), at != to
            yield Op(
                at=at,
                phase=Phase.FINISH if move.hop or fills else Phase.SEND,
                record=record,
                ranks=(move.source_rank, move.target_rank),
                source=None if fills else source,
                target=target,
                wait=Counter(at, (move.band, memory(source))) if move.hop else None,
                signal=Counter(to, (move.band, memory(target))) if move.band >= 0 else None,
            )


def _forwarded_early(ops: Iterator[Op]) -> Iterator[Op]:
    """The same ops; those that forward what only *send* of their own device writes are a part of it.

    In *finish*, which a device begins when its *send* has ended, they would leave its links idle until then.
    """
    writers: dict[Counter, set[tuple[int, Phase]]] = {}
    for op in ops:
        if op.wait is not None and writers.get(op.wait) == {(op.at, Phase.SEND)}:
            op = dataclasses.replace(op, phase=Phase.SEND)
        for signal in (op.signal, op.side_signal):
            if signal is not None:
                writers.setdefault(signal, set()).add((op.at, op.phase))
        yield op


class _Builder:
    """Collects the records of one table."""

    def __init__(self) -> None:
        self.buffers: dict[Key | Inbox, int] = {}
        self.records: list[np.ndarray] = []
        self.moves: list[tuple[int, int]] = []

    def buffer(self, key: Key | Inbox) -> int:
        return self.buffers.setdefault(key, len(self.buffers))

    def add(self, record: np.ndarray, ranks: tuple[int, int]) -> None:
        self.records.append(record)
        self.moves.append(ranks)

    def table(self) -> OpTable:
        words, numbers = alternating(np.stack(self.records))
        words[:, r.END_TILE] = ends = np.cumsum(r.n_tiles(words))
        words[1:, r.FIRST_TILE] = ends[:-1]
        moves = tuple(self.moves[number] for number in numbers)
        return OpTable(words.astype(np.uint32).view(np.int32), tuple(self.buffers), int(ends[-1]), moves)


class _Templates:
    """Records of moves; expansions whose offsets are aligned alike share them."""

    def __init__(self, plan: Plan):
        self.plan = plan
        self.known: dict[tuple[Move, int], list[tuple[np.ndarray, int]]] = {}

    def records(self, move: Move, k: int) -> list[np.ndarray]:
        """Fresh records of one expansion."""
        conversion = self.plan.conversions[move.convert]
        read, write = itemsize(conversion.source), itemsize(conversion.target)
        fills = move.source_rank < 0
        shift = 0 if fills else k * move.source_offset_step * read
        residue = shift % r.PIECE_NBYTES
        if (move, residue) not in self.known:
            dims = tuple(
                r.Dim(n, 0 if fills else s * read, t * write)
                for n, s, t in zip(move.extents, move.source_strides, move.target_strides, strict=True)
            )
            region = r.Region(dims, 0 if fills else move.source_offset * read + residue, move.target_offset * write)
            self.known[move, residue] = [
                (record, r.source_offset(record)) for record in r.records_of(region, conversion, fills)
            ]
        out = []
        for template, offset in self.known[move, residue]:
            record = template.copy()
            r.set_source_offset(record, offset + shift - residue)
            out.append(record)
        return out


FLOATS = ("float32", "bfloat16", "float16")
CODES = ("float8_e4m3fn", "int8", "float4_e2m1fn")


def why_unsupported(plan: Plan) -> str | None:
    """Why the kernel cannot do some conversion or move of a plan; None if it can do all."""
    for conversion in plan.conversions:
        values, target = conversion.steps, conversion.target
        for at, step in enumerate(conversion.steps):
            if isinstance(step, Encode) and step.format.codes not in CODES:
                return f"codes of dtype {step.format.codes} are not among {', '.join(CODES)}"
            if isinstance(step, Amax | Encode | ToScale):
                values, target = conversion.steps[:at], "float32"
                break
        plain = not values or (isinstance(values[0], Fill) and len(values) == 1)
        if not values and quantizes(conversion):
            plain = conversion.source in (*FLOATS, "uint32")
        if not plain and not {conversion.source, target} <= set(FLOATS):
            return f"conversion {conversion.describe()} is not between float32, bfloat16 and float16"
    return _too_long(plan)


EXTENT_LIMIT = 1 << 31
"""Extents of records are smaller: the kernel counts in 32 bits, here and there with a sign."""


def _too_long(plan: Plan) -> str | None:
    """The first tensor that makes an extent which the kernel cannot count; None if there is none."""
    templates = _Templates(plan)
    # records that quantize may join two dimensions, others none
    largest = np.sort(plan.moves.extents, axis=1)[:, -2:].prod(axis=1)
    for row in np.nonzero(largest >= EXTENT_LIMIT)[0].tolist():
        move = plan.moves[row]
        extent = int(largest[row])
        if not quantizes(plan.conversions[move.convert]):
            found = (record for k in range(move.count) for record in templates.records(move, k))
            extent = max(int(record[r.EXTENT : r.EXTENT + r.DIMS].max()) for record in found)
        if extent >= EXTENT_LIMIT:
            name = plan.families[move.target_family].name(move.target_tensor)
            return (
                f"a move to {name!r} of rank {move.target_rank} has a dimension of {extent:,} elements, but the kernel "
                f"counts to {EXTENT_LIMIT - 1:,}"
            )
    return None
