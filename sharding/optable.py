"""Op tables: what each device does in each phase of an update, as records in the plan's order.

Two phases hold records. *send* reads trainer shards: it holds the moves of the trainer ranks on its device. *finish*
holds the forwards of the rollout ranks on its device, and the fills of its own buffers. Every device has an *inbox*:
words at a fixed address, which other devices write into:

    0 .. INBOX_FLAGS          the version its buffers hold, and whether they are poisoned: written by itself
    flag(kind, device)        two words: the attempt that `device` has got so far with, see `Flag`
    counters                  how many tiles of a band have arrived, for the forwards that wait for it

Blocks take tiles in rising order, and records stand in the plan's order, so a record waits only for smaller ones.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Hashable, Mapping

import numpy as np

from shardfly_jax.sharding import records as r
from shardfly_jax.sharding.formats import Fill, itemsize
from shardfly_jax.sharding.moves import Key, Move, source_key, target_key
from shardfly_jax.sharding.plan import Plan

INBOX_FLAGS = 16
"""Words of an inbox before its flags."""


class Phase(enum.Enum):
    """A phase with records."""

    SEND = "send"
    FINISH = "finish"


class Flag(enum.IntEnum):
    """What a device tells another one, with the attempt it speaks of."""

    READY = 0
    SENT = 1
    FORWARDED = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Inbox:
    """The inbox of a device, as a buffer that a record can name."""

    device: int


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
      n_counters: Of each device.
    """

    devices: tuple[Hashable, ...]
    tables: dict[tuple[int, Phase], OpTable]
    device_of: dict[int, int]
    n_counters: tuple[int, ...]

    def flag(self, kind: Flag, device: int) -> int:
        """Word of an inbox in which `device` speaks."""
        return INBOX_FLAGS + 2 * (kind * len(self.devices) + device)

    @property
    def counters(self) -> int:
        """First counter of an inbox."""
        return INBOX_FLAGS + 2 * len(Flag) * len(self.devices)

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
                raises = (table.words[:, r.SIGNAL] == counter) & (table.words[:, r.SIGNAL_INBOX] == inbox)
                found |= {at if at >= 0 else to for (at, to), yes in zip(table.moves, raises, strict=True) if yes}
        return sorted(found)

    def targets(self, device: int, phase: Phase) -> list[int]:
        """Devices whose buffers a device writes in a phase."""
        table = self.tables.get((device, phase))
        return sorted({self.device_of[rank] for _, rank in table.moves}) if table else []

    def writers(self, device: int, phase: Phase) -> list[int]:
        """Devices that write a device's buffers in a phase."""
        return [d for d in range(len(self.devices)) if device in self.targets(d, phase)]


def make_tables(plan: Plan, place: Mapping[int, Hashable], memory: Callable[[Key], object]) -> OpTables:
    """The tables of all moves of a plan.

    Args:
      plan: Its conversions are named by their index.
      place: The device of every rank that moves anything.
      memory: Equal for two target buffers that are one (aliases): copying between them is left out.
    """
    devices: dict[Hashable, int] = {}
    device_of = {rank: devices.setdefault(place[rank], len(devices)) for rank in sorted(place)}
    counters: list[dict[Hashable, int]] = [{} for _ in devices]  # per device: (band, memory) -> number
    builders: dict[tuple[int, Phase], _Builder] = {}
    templates = _Templates(plan)
    waiting: dict[tuple[int, int], list[np.ndarray]] = {}
    signalling: dict[tuple[int, int], list[np.ndarray]] = {}
    for move, k in plan.moves.in_order():
        source, target = source_key(move, k), target_key(move, k)
        if move.hop and memory(source) == memory(target):
            continue
        to = device_of[move.target_rank]
        at = to if move.source_rank < 0 else device_of[move.source_rank]
        phase = Phase.FINISH if move.hop or move.source_rank < 0 else Phase.SEND
        builder = builders.setdefault((at, phase), _Builder())
        for record in templates.records(move, k):
            record[r.SOURCE] = builder.buffer(source) if move.source_rank >= 0 else -1
            record[r.TARGET] = builder.buffer(target)
            record[r.REMOTE] = at != to
            if move.band >= 0:
                number = counters[to].setdefault((move.band, memory(target)), len(counters[to]))
                record[r.SIGNAL], record[r.SIGNAL_INBOX] = number, builder.buffer(Inbox(to))
                signalling.setdefault((to, number), []).append(record)
            if move.hop:
                number = counters[at].setdefault((move.band, memory(source)), len(counters[at]))
                record[r.WAIT] = number
                waiting.setdefault((at, number), []).append(record)
            builder.add(record, (move.source_rank, move.target_rank))
    for key, members in signalling.items():
        arrive = sum(r.n_tiles(record) for record in members)
        for record in waiting.get(key, []):
            record[r.WAIT_COUNT] = arrive
        if key not in waiting:
            for record in members:
                record[r.SIGNAL] = -1
    return OpTables(
        tuple(devices),
        {key: builder.table() for key, builder in builders.items()},
        device_of,
        tuple(len(of) for of in counters),
    )


class _Builder:
    """Collects the records of one table."""

    def __init__(self) -> None:
        self.buffers: dict[Key | Inbox, int] = {}
        self.records: list[np.ndarray] = []
        self.moves: list[tuple[int, int]] = []
        self.tiles = 0

    def buffer(self, key: Key | Inbox) -> int:
        return self.buffers.setdefault(key, len(self.buffers))

    def add(self, record: np.ndarray, ranks: tuple[int, int]) -> None:
        record[r.FIRST_TILE] = self.tiles
        self.tiles += r.n_tiles(record)
        record[r.END_TILE] = self.tiles
        self.records.append(record)
        self.moves.append(ranks)

    def table(self) -> OpTable:
        words = np.stack(self.records).astype(np.uint32).view(np.int32)
        return OpTable(words, tuple(self.buffers), self.tiles, tuple(self.moves))


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
            record[r.CONVERT] = move.convert
            r.set_source_offset(record, offset + shift - residue)
            out.append(record)
        return out


def why_unsupported(plan: Plan) -> str | None:
    """Why the kernel cannot do some conversion of a plan; None if it can do all."""
    if any(conversion.reduces or conversion.encodes is not None for conversion in plan.conversions):
        return "the plan quantizes, which the kernel does not do yet"
    floats = {"float32", "bfloat16", "float16"}
    for conversion in plan.conversions:
        plain = conversion.is_bits or (isinstance(conversion.steps[0], Fill) and len(conversion.steps) == 1)
        if not plain and not {conversion.source, conversion.target} <= floats:
            return f"conversion {conversion.describe()} is not between float32, bfloat16 and float16"
    return None
