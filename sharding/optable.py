"""The op table of a device: its moves as integer records that a kernel can follow.

One record stands for one move of one tensor. It is cut into *tiles*; tile `t` of the table belongs to the first record
whose `END_TILE` is larger. Blocks take tiles in rising order, so that the order of records is the plan's global order.
Offsets and strides count bytes; 64-bit fields take two words, the low one first.

Dimensions 0 to 2 are walked tile by tile, dimensions 3 and 4 are cut into pieces of `TILE_3` and `TILE_4`. In a `ROWS`
record dimension 4 counts bytes that lie one after the other on both sides, and all of its numbers are multiples of 16:
bulk copies do it. In an `ELEMENTS` record dimension 4 has the smallest target stride, so that neighbouring threads
store neighbours, and dimension 3 the smallest source stride of the rest, so that a thread can load several at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from shardfly_jax.sharding.formats import Fill, itemsize
from shardfly_jax.sharding.moves import Key, Move, source_key, target_key
from shardfly_jax.sharding.plan import Plan

ROWS, ELEMENTS = 1, 2
DIMS = 5
BULK_ALIGNMENT = 16
ROWS_TILE_NBYTES = 16 << 10
ELEMENTS_TILE_SIZE = 8192
ELEMENTS_TILE_4 = 128

# Words of a record.
(
    KIND,
    CONVERT,
    SOURCE,  # index of the buffer that is read, -1 for fills
    TARGET,  # index of the buffer that is written
    WAIT,  # counter that must have reached WAIT_COUNT, -1 for none
    WAIT_COUNT,
    SIGNAL,  # counter that every finished tile raises by one, -1 for none
    FIRST_TILE,
    END_TILE,
    TILE_3,
    TILE_4,
    TILES_3,
    TILES_4,
    EXTENT,
) = range(14)
SOURCE_OFFSET = EXTENT + DIMS
TARGET_OFFSET = SOURCE_OFFSET + 2
SOURCE_STRIDE = TARGET_OFFSET + 2
TARGET_STRIDE = SOURCE_STRIDE + 2 * DIMS
WORDS = 48
"""Length of a record, so that records start on multiples of 64 bytes."""


@dataclasses.dataclass(frozen=True, slots=True)
class OpTable:
    """Records in order.

    Attributes:
      words: int32 [records, WORDS].
      buffers: Keys of the buffers that `SOURCE` and `TARGET` name.
      n_tiles: Tiles of all records.
      n_counters: Counters that `WAIT` and `SIGNAL` name.
    """

    words: np.ndarray
    buffers: tuple[Key, ...]
    n_tiles: int
    n_counters: int


def make_table(plan: Plan, memory: Callable[[Key], object]) -> OpTable:
    """The table of all moves of a plan, for ranks that share a device.

    Args:
      plan: Its conversions are named by their index.
      memory: Equal for two target buffers that are one (aliases): copying between them is left out.
    """
    buffers: dict[Key, int] = {}
    counters: dict[tuple[int, object], int] = {}
    records: list[list[int]] = []
    tiles = 0
    for move, k in plan.moves.in_order():
        source, target = source_key(move, k), target_key(move, k)
        if move.hop and memory(source) == memory(target):
            continue
        record = _record(plan, move, k)
        record[SOURCE] = buffers.setdefault(source, len(buffers)) if move.source_rank >= 0 else -1
        record[TARGET] = buffers.setdefault(target, len(buffers))
        if move.band >= 0:
            record[SIGNAL] = counters.setdefault((move.band, memory(target)), len(counters))
        if move.hop:
            record[WAIT] = counters.setdefault((move.band, memory(source)), len(counters))
        record[FIRST_TILE] = tiles
        tiles += record[TILES_3] * record[TILES_4] * record[EXTENT] * record[EXTENT + 1] * record[EXTENT + 2]
        record[END_TILE] = tiles
        records.append(record)
    words = np.array(records, np.int64).reshape(len(records), WORDS)
    words[~np.isin(words[:, SIGNAL], words[:, WAIT]), SIGNAL] = -1  # nobody waits
    raised = np.zeros(len(counters) + 1, np.int64)
    np.add.at(raised, words[:, SIGNAL], words[:, END_TILE] - words[:, FIRST_TILE])
    words[:, WAIT_COUNT] = raised[words[:, WAIT]]
    return OpTable(words.astype(np.uint32).view(np.int32), tuple(buffers), tiles, len(counters))


def _record(plan: Plan, move: Move, k: int) -> list[int]:
    conversion = plan.conversions[move.convert]
    read, write = itemsize(conversion.source), itemsize(conversion.target)
    dims = [
        (n, s * read, t * write) for n, s, t in zip(move.extents, move.source_strides, move.target_strides, strict=True)
    ]
    offsets = ((move.source_offset + k * move.source_offset_step) * read, move.target_offset * write)
    if move.source_rank < 0:
        dims, offsets = [(n, 0, t) for n, _, t in dims], (0, offsets[1])
    run = next((d for d in dims if conversion.is_bits and d[1] == d[2] == read), None)
    if run is not None and _is_aligned(dims, run, offsets):
        kind = ROWS
        others = [d for d in dims if d is not run]
        inner = (run[0] * read, 1, 1)
        third = others.pop() if others else (1, 0, 0)
        tile_4 = min(inner[0], ROWS_TILE_NBYTES)
        tile_3 = min(third[0], ROWS_TILE_NBYTES // tile_4) if tile_4 == inner[0] else 1
    else:
        kind = ELEMENTS
        others = list(dims)
        inner = others.pop(min(range(len(others)), key=lambda j: others[j][2])) if others else (1, 0, 0)
        nearest = min(range(len(others)), key=lambda j: abs(others[j][1]) or 1 << 62) if others else None
        third = others.pop(nearest) if nearest is not None else (1, 0, 0)
        straight = inner[1] == read or third[0] == 1
        tile_4 = min(inner[0], ELEMENTS_TILE_SIZE if straight else ELEMENTS_TILE_4)
        tile_3 = min(third[0], max(ELEMENTS_TILE_SIZE // tile_4, 1))
    outer = [(1, 0, 0)] * (DIMS - 2 - len(others)) + others
    record = [0] * WORDS
    record[KIND], record[CONVERT], record[WAIT], record[SIGNAL] = kind, move.convert, -1, -1
    record[TILE_3], record[TILE_4] = tile_3, tile_4
    record[TILES_3], record[TILES_4] = -(-third[0] // tile_3), -(-inner[0] // tile_4)
    for d, (n, s, t) in enumerate([*outer, third, inner]):
        record[EXTENT + d] = n
        record[SOURCE_STRIDE + 2 * d : SOURCE_STRIDE + 2 * d + 2] = _words(s)
        record[TARGET_STRIDE + 2 * d : TARGET_STRIDE + 2 * d + 2] = _words(t)
    record[SOURCE_OFFSET : SOURCE_OFFSET + 2] = _words(offsets[0])
    record[TARGET_OFFSET : TARGET_OFFSET + 2] = _words(offsets[1])
    return record


def _is_aligned(dims: list[tuple[int, int, int]], run: tuple[int, int, int], offsets: tuple[int, int]) -> bool:
    numbers = [run[0] * run[1], *offsets, *(n for d in dims if d is not run for n in d[1:])]
    return all(n % BULK_ALIGNMENT == 0 for n in numbers)


def _words(value: int) -> list[int]:
    return [value & 0xFFFFFFFF, (value >> 32) & 0xFFFFFFFF]


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
