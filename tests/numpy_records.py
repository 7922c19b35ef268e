"""What a record of an op table means: executed in NumPy, whatever its tiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from shardfly_jax.sharding import quantized_records as q, records as r
from shardfly_jax.sharding.formats import Amax, Conversion, Encode, ToScale, check_finite, itemsize, np_dtype

QUANTIZING = (r.BLOCK_ROWS, r.BLOCK_TRANSPOSE, r.REDUCE_ELEMENTS, r.ENCODE_ELEMENTS, r.PACKED_BLOCKS)


def long(words: np.ndarray) -> int:
    low, high = (int(w) & 0xFFFFFFFF for w in words)
    value = low | high << 32
    return value - (1 << 64) if value >= 1 << 63 else value


def offsets(record: np.ndarray, at: int, steps: int, blocks: tuple[int, int] = (1, 1)) -> np.ndarray:
    """Bytes from the start of a buffer to each element of a record's region, or to its block."""
    out = np.full((1,) * r.DIMS, long(record[at : at + 2]))
    for d, n in enumerate(record[r.EXTENT : r.EXTENT + r.DIMS].tolist()):
        index = np.arange(n) // (1, 1, 1, *blocks)[d]
        step = long(record[steps + 2 * d : steps + 2 * d + 2])
        out = out + (index * step).reshape([n if a == d else 1 for a in range(r.DIMS)])
    return out.reshape(-1)


def tiles_of(record: np.ndarray) -> Iterator[tuple[list[int], list[list[int]], list[int]]]:
    """Offsets, strides and counts of dimensions 3 and 4 of each tile, in order."""
    n, tile = record[r.EXTENT : r.EXTENT + 5].tolist(), {3: int(record[r.TILE_3]), 4: int(record[r.TILE_4])}
    strides = [
        [long(record[at + 2 * d : at + 2 * d + 2]) for d in range(5)] for at in (r.SOURCE_STRIDE, r.TARGET_STRIDE)
    ]
    offsets = [long(record[at : at + 2]) for at in (r.SOURCE_OFFSET, r.TARGET_OFFSET)]
    for index in np.ndindex(*n[:3], int(record[r.TILES_3]), int(record[r.TILES_4])):
        starts = [*index[:3], index[3] * tile[3], index[4] * tile[4]]
        count = [min(tile[d], n[d] - starts[d]) for d in (3, 4)]
        at = [o + int(np.dot(starts, s)) for o, s in zip(offsets, strides, strict=True)]
        yield at, [s[3:] for s in strides], count


def gathered(flat: np.ndarray, at: np.ndarray, dtype: str) -> np.ndarray:
    """Elements at byte offsets."""
    width, raw = itemsize(dtype), flat.view(np.uint8)
    assert at.min() >= 0
    assert at.max() + width <= raw.size
    return raw[at[:, None] + np.arange(width)].reshape(-1).view(np_dtype(dtype))


def scattered(flat: np.ndarray, at: np.ndarray, values: np.ndarray) -> None:
    """Puts elements at byte offsets."""
    raw, width = flat.view(np.uint8), values.dtype.itemsize
    raw[at[:, None] + np.arange(width)] = np.ascontiguousarray(values).view(np.uint8).reshape(-1, width)


def execute(record: np.ndarray, rule: Conversion, memory: Callable[[int], np.ndarray]) -> None:
    """What a record does, whatever its tiles.

    Args:
      record: Its words.
      rule: Its conversion.
      memory: The buffer that a word of the record names.

    Raises:
      NotFinite: A block to be encoded holds NaN or infinity.
    """
    source, target, side = (
        memory(int(record[word])) if record[word] >= 0 else np.zeros(0, np.uint8)
        for word in (r.SOURCE, r.TARGET, r.SIDE)
    )
    size, role = int(record[r.EXTENT : r.EXTENT + r.DIMS].prod()), int(record[r.ROLE])
    if record[r.KIND] in (r.ROWS, r.CAST):  # pieces; dimension 4 counts groups of them
        group = r.PIECE_NBYTES // min(itemsize(rule.source), itemsize(rule.target))
        record = record.copy()
        for word, dtype in ((r.SOURCE_STRIDE, rule.source), (r.TARGET_STRIDE, rule.target)):
            record[word + 8 : word + 10] = r.words(itemsize(dtype))
        record[r.EXTENT + 4] *= group
        size *= group
    read, write = (
        offsets(record, *words) for words in ((r.SOURCE_OFFSET, r.SOURCE_STRIDE), (r.TARGET_OFFSET, r.TARGET_STRIDE))
    )
    if record[r.KIND] == r.PACKED_BLOCKS:
        pack_blocks(record, rule, (source, target, side), (read, write))
        return
    x = np.empty(size, np_dtype(rule.source)) if record[r.SOURCE] < 0 else gathered(source, read, rule.source)
    if record[r.KIND] not in QUANTIZING:
        scattered(target, write, rule.apply(x))
        return
    values = rule.values(x)
    at = offsets(record, r.SIDE_OFFSET, r.SIDE_STRIDE, (int(record[r.BLOCK_3]), int(record[r.BLOCK_4])))
    if role & q.READS_AMAX:
        amax = gathered(side, at, "uint32")
    else:
        block, of = np.unique(at, return_inverse=True)
        if record[r.KIND] in (r.BLOCK_ROWS, r.BLOCK_TRANSPOSE) and not role & (q.RAISES_AMAX | q.STORES_SCALES):
            of = np.unique(blocks_of(record), return_inverse=True)[1]  # codes alone have no side
        largest = np.zeros(of.max() + 1, np.uint32)
        np.maximum.at(largest, of, Amax().apply(values, ()))
        amax = largest[of]
        if role & q.RAISES_AMAX:
            scattered(side, block, np.maximum(gathered(side, block, "uint32"), largest))
        if role & q.STORES_SCALES:
            format = next(step.format for step in rule.steps if isinstance(step, Encode | ToScale))
            scattered(side, block, format.scales(largest.view(np.float32)))
    if role & q.WRITES_CODES:
        check_finite(amax)
        format = rule.encodes
        assert format is not None
        codes = [format.encode(values, amax.view(np.float32))]
        if format.per_byte > 1:  # elements are the first values of bytes
            step = long(record[r.SOURCE_STRIDE : r.SOURCE_STRIDE + 2])
            x = x if record[r.SOURCE] < 0 else gathered(source, read + step, rule.source)
            codes.append(format.encode(rule.values(x), amax.view(np.float32)))
        scattered(target, write, codes[0] if len(codes) == 1 else format.pack(np.stack(codes), 0)[0])


def pack_blocks(
    record: np.ndarray, rule: Conversion, memory: tuple[np.ndarray, ...], at: tuple[np.ndarray, np.ndarray]
) -> None:
    """A record whose elements are blocks; `at` has the offsets of their first values and of their codes."""
    source, target, side = memory
    format = rule.encodes
    assert format is not None
    assert format.block[1] is not None
    within = [long(record[r.SOURCE_STRIDE + 2 * d : r.SOURCE_STRIDE + 2 * d + 2]) for d in (1, 0)]
    index = np.indices((format.block[1] // format.per_byte, format.per_byte)).reshape(2, -1)
    values = rule.values(gathered(source, (at[0][:, None] + within @ index).reshape(-1), rule.source))
    values = values.reshape(len(at[0]), -1)
    bits = Amax().apply(values, (1,))
    check_finite(bits)
    codes = format.pack(format.encode(values, bits.view(np.float32)))
    scattered(target, (at[1][:, None] + np.arange(codes.shape[1])).reshape(-1), codes.reshape(-1))
    if record[r.ROLE] & q.STORES_SCALES:
        scales = format.scales(bits.view(np.float32)).reshape(-1)
        scattered(side, offsets(record, r.SIDE_OFFSET, r.SIDE_STRIDE), scales)


def blocks_of(record: np.ndarray) -> np.ndarray:
    """A number for the block of each element: one for each index of the outer dimensions, and of blocks within."""
    n = record[r.EXTENT : r.EXTENT + r.DIMS].tolist()
    index = [np.arange(k) // b for k, b in zip(n, (1, 1, 1, *record[[r.BLOCK_3, r.BLOCK_4]].tolist()), strict=True)]
    grid = np.meshgrid(*index, indexing="ij")
    return np.ravel_multi_index([g.reshape(-1) for g in grid], n)
