"""Records: a move of one tensor as integers that a kernel can follow, cut where alignment changes.

A record covers a strided region of up to five dimensions and is cut into *tiles*. Offsets and strides count bytes;
64-bit fields take two words, the low one first. Dimensions 0 to 2 are walked tile by tile, dimensions 3 and 4 are cut
into pieces of `TILE_3` and `TILE_4`. There are five kinds of plain ones (`quantized_records` has those that quantize):

* `ROWS`: bits whose runs lie one after the other on both sides. Dimension 4 counts pieces of 16 bytes.
* `CAST`: the same with a conversion. Dimension 4 counts groups of the fewest elements that are whole pieces of 16 bytes
  on both sides.
* `TRANSPOSE`: dimension 3 is the one that is contiguous in the source, dimension 4 the one that is contiguous in the
  target. Both are multiples of a piece of 16 bytes on their side.
* `TRANSPOSE_ELEMENTS`: a transpose of any widths and addresses, an element at a time on both sides.
* `ELEMENTS`: anything else, an element at a time; dimension 4 has the smallest target stride.

All addresses of the first three are multiples of 16 bytes, given that buffers are. A move that is aligned only inside,
or whose length is odd, gives one record of them for its inside and `ELEMENTS` for its edges.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator

import numpy as np

from shardfly_jax.sharding.formats import Conversion, ToScale, itemsize

(
    ROWS,
    CAST,
    TRANSPOSE,
    TRANSPOSE_ELEMENTS,
    ELEMENTS,
    BLOCK_ROWS,
    BLOCK_TRANSPOSE,
    REDUCE_ELEMENTS,
    ENCODE_ELEMENTS,
    PACKED_BLOCKS,
) = range(1, 11)
DIMS = 5
PIECE_NBYTES = 16
"""Bytes of a vector load or store."""
TILE_NBYTES = 32 << 10
"""Most bytes of a tile on either side; what a block keeps in shared memory."""
TRANSPOSE_ROWS = 128
"""Elements of dimension 3 in a tile of a transpose: rows of the target."""
TRANSPOSE_ROW_NBYTES = 256
"""Bytes of dimension 4 in a tile of a transpose: what is stored contiguously."""
LEAST_TRANSPOSED = 32
"""Elements of both dimensions from which on a transpose an element at a time goes through shared memory."""
ELEMENTS_TILE_SIZE = 8192
ELEMENTS_TILE_4 = 128

# Words of a record.
(
    KIND,
    CONVERT,
    SOURCE,  # index of the buffer that is read, -1 for fills
    TARGET,  # index of the buffer that is written
    REMOTE,  # 1 if the target is in another device's memory
    WAIT,  # counter that must have reached WAIT_COUNT, -1 for none
    WAIT_COUNT,
    SIGNAL,  # counter that every finished tile raises by one, -1 for none
    SIGNAL_INBOX,  # index of the buffer that holds that counter
    WAIT_INBOX,  # index of the buffer that holds the counter of WAIT
    SIDE,  # index of the buffer that holds slots or scales, -1 for none
    SIDE_SIGNAL,  # counter for what SIDE gets, beside SIGNAL; -1 for none
    SIDE_INBOX,  # index of the buffer that holds that counter
    ROLE,  # what is read and written beside elements: see `quantized_records`
    BLOCK_3,  # elements of a block along dimensions 3 and 4
    BLOCK_4,
    FIRST_TILE,
    END_TILE,  # tile t of a table belongs to the first record whose END_TILE is larger
    TILE_3,
    TILE_4,
    TILES_3,
    TILES_4,
    EXTENT,
) = range(23)
BUFFERS = (SOURCE, TARGET, SIDE, SIGNAL_INBOX, SIDE_INBOX, WAIT_INBOX)
"""Words that name a buffer, or none."""
SOURCE_OFFSET = EXTENT + DIMS
TARGET_OFFSET = SOURCE_OFFSET + 2
SOURCE_STRIDE = TARGET_OFFSET + 2
TARGET_STRIDE = SOURCE_STRIDE + 2 * DIMS
SIDE_OFFSET = TARGET_STRIDE + 2 * DIMS
SIDE_STRIDE = SIDE_OFFSET + 2
"""Bytes from block to block."""
WORDS = 64
"""Length of a record, so that records start on multiples of 64 bytes."""


@dataclasses.dataclass(frozen=True, slots=True)
class Dim:
    """One dimension of a region: its extent, and bytes between neighbours on both sides."""

    extent: int
    read: int
    write: int


@dataclasses.dataclass(frozen=True, slots=True)
class Region:
    """A strided region on both sides of a move.

    Attributes:
      dims: At most `DIMS`.
      read, write: Offsets of its first element, bytes.
    """

    dims: tuple[Dim, ...]
    read: int
    write: int

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(dim.extent for dim in self.dims)

    def cut(self, axis: int, start: int, stop: int) -> Region:
        """The part between two indices of a dimension."""
        dim = self.dims[axis]
        dims = (*self.dims[:axis], dataclasses.replace(dim, extent=stop - start), *self.dims[axis + 1 :])
        return Region(dims, self.read + start * dim.read, self.write + start * dim.write)


def pieces(conversion: Conversion) -> tuple[int, int]:
    """Pieces of 16 bytes read and written by one step of dimension 4 of a `CAST` record."""
    read, write = itemsize(conversion.source), itemsize(conversion.target)
    return read // min(read, write), write // min(read, write)


def transposes_elements(conversion: Conversion) -> bool:
    """Whether elements are at most four bytes on both sides, so that `TRANSPOSE_ELEMENTS` records can hold them."""
    return max(itemsize(conversion.source), itemsize(conversion.target)) <= 4


def records_of(region: Region, conversion: Conversion, fills: bool) -> Iterator[np.ndarray]:
    """The records of a move, in any order: they cover its region once.

    Args:
      region: Of the whole move.
      conversion: What happens to its elements.
      fills: It reads nothing.

    Yields:
      int64 [WORDS], its kind, tiles per dimension and region filled in.
    """
    read, write = itemsize(conversion.source), itemsize(conversion.target)
    if not fills and not any(isinstance(step, ToScale) for step in conversion.steps):
        straight = _find(region, lambda dim: dim.read == read and dim.write == write)
        if straight is not None and _others_aligned(region, straight, straight):
            group = PIECE_NBYTES // min(read, write)
            inside = _aligned(region, straight, group, (read, write))
            if inside is not None:
                yield from _around(
                    region, {straight: inside}, read, lambda inner: _straight(inner, straight, conversion)
                )
                return
        n = _find(region, lambda dim: dim.read == read and dim.extent > 1)
        k = _find(region, lambda dim: dim.write == write and dim.extent > 1)
        if straight is None and n is not None and k is not None:
            ranges = {
                n: _aligned(region, n, PIECE_NBYTES // read, (read, 0)),
                k: _aligned(region, k, PIECE_NBYTES // write, (0, write)),
            }
            whole = {axis: inside for axis, inside in ranges.items() if inside is not None}
            if len(whole) == 2 and _others_aligned(region, n, k):
                yield from _around(region, whole, read, lambda inner: _transpose(inner, n, k, write))
                return
            if transposes_elements(conversion) and min(region.dims[a].extent for a in (n, k)) >= LEAST_TRANSPOSED:
                yield _transpose(region, n, k, write, TRANSPOSE_ELEMENTS)
                return
    yield _elements(region, read)


def _find(region: Region, fits: Callable[[Dim], bool]) -> int | None:
    return next((axis for axis, dim in enumerate(region.dims) if fits(dim)), None)


def _others_aligned(region: Region, read_axis: int, write_axis: int) -> bool:
    """Whether all strides but those of the contiguous dimensions are multiples of 16 bytes."""
    return not any(
        (axis != read_axis and dim.read % PIECE_NBYTES) or (axis != write_axis and dim.write % PIECE_NBYTES)
        for axis, dim in enumerate(region.dims)
    )


def _aligned(region: Region, axis: int, group: int, steps: tuple[int, int]) -> tuple[int, int] | None:
    """The longest range of a dimension that starts aligned and is a multiple of `group`; None if there is none.

    Args:
      steps: Bytes per step on the sides that this dimension must align, 0 for a side that another one aligns.
    """
    extent = region.dims[axis].extent
    for start in range(min(group, extent)):
        offsets = [o + start * s for o, s in zip((region.read, region.write), steps, strict=True) if s]
        if not any(offset % PIECE_NBYTES for offset in offsets):
            stop = start + (extent - start) // group * group
            return (start, stop) if stop > start else None
    return None


def _around(
    region: Region, inside: dict[int, tuple[int, int]], read: int, record: Callable[[Region], np.ndarray]
) -> Iterator[np.ndarray]:
    """A record of the inside, and element-wise ones of what is left around it."""
    edges = []
    for axis, (start, stop) in inside.items():
        extent = region.dims[axis].extent
        edges += [region.cut(axis, 0, start)] if start else []
        edges += [region.cut(axis, stop, extent)] if stop < extent else []
        region = region.cut(axis, start, stop)
    yield record(region)
    yield from (_elements(edge, read) for edge in edges)


def _straight(region: Region, axis: int, conversion: Conversion) -> np.ndarray:
    run, others = region.dims[axis], [dim for other, dim in enumerate(region.dims) if other != axis]
    reads, writes = pieces(conversion)
    group = PIECE_NBYTES // min(run.read, run.write)
    inner = Dim(run.extent // group, PIECE_NBYTES * reads, PIECE_NBYTES * writes)
    third = others.pop() if others else Dim(1, 0, 0)
    most = TILE_NBYTES // (PIECE_NBYTES * max(reads, writes))
    tile_4 = min(inner.extent, most)
    tile_3 = min(third.extent, most // tile_4) if tile_4 == inner.extent else 1
    kind = ROWS if conversion.is_bits else CAST
    return record(kind, region, [*others, third, inner], (tile_3, tile_4))


def _transpose(region: Region, n: int, k: int, write: int, kind: int = TRANSPOSE) -> np.ndarray:
    others = [dim for axis, dim in enumerate(region.dims) if axis not in (n, k)]
    tiles = (TRANSPOSE_ROWS, TRANSPOSE_ROW_NBYTES // write)
    return record(kind, region, [*others, region.dims[n], region.dims[k]], tiles)


def _elements(region: Region, read: int) -> np.ndarray:
    others = list(region.dims)
    inner = others.pop(min(range(len(others)), key=lambda j: others[j].write)) if others else Dim(1, 0, 0)
    nearest = min(range(len(others)), key=lambda j: abs(others[j].read) or 1 << 62) if others else None
    third = others.pop(nearest) if nearest is not None else Dim(1, 0, 0)
    straight = inner.read == read or third.extent == 1
    tile_4 = min(inner.extent, ELEMENTS_TILE_SIZE if straight else ELEMENTS_TILE_4)
    tile_3 = min(third.extent, max(ELEMENTS_TILE_SIZE // tile_4, 1))
    return record(ELEMENTS, region, [*others, third, inner], (tile_3, tile_4))


def record(kind: int, region: Region, dims: list[Dim], tiles: tuple[int, int]) -> np.ndarray:
    """A record with its kind, tiles and region filled in.

    Args:
      kind: One of the kinds.
      region: Gives the offsets.
      dims: Of the region, in the record's order; at most `DIMS`.
      tiles: Extents of dimensions 3 and 4 of a tile.
    """
    dims = [Dim(1, 0, 0)] * (DIMS - len(dims)) + dims
    out = np.zeros(WORDS, np.int64)
    out[[KIND, SOURCE, WAIT, WAIT_INBOX, SIGNAL, SIGNAL_INBOX, SIDE, SIDE_SIGNAL, SIDE_INBOX]] = kind, *(-1,) * 8
    out[[BLOCK_3, BLOCK_4]] = 1
    out[TILE_3], out[TILE_4] = tiles
    out[TILES_3], out[TILES_4] = -(-dims[3].extent // tiles[0]), -(-dims[4].extent // tiles[1])
    for d, dim in enumerate(dims):
        out[EXTENT + d] = dim.extent
        out[SOURCE_STRIDE + 2 * d : SOURCE_STRIDE + 2 * d + 2] = words(dim.read)
        out[TARGET_STRIDE + 2 * d : TARGET_STRIDE + 2 * d + 2] = words(dim.write)
    out[SOURCE_OFFSET : SOURCE_OFFSET + 2] = words(region.read)
    out[TARGET_OFFSET : TARGET_OFFSET + 2] = words(region.write)
    return out


def cut(record: np.ndarray, axis: int, length: int) -> np.ndarray:
    """A record of a plain kind, cut along a dimension.

    Args:
      record: int64 [WORDS].
      axis: Of the five dimensions.
      length: Of each part but the last one: whole tiles.

    Returns:
      int64 [parts, WORDS], in order.
    """
    starts = np.arange(0, record[EXTENT + axis], length)
    out = np.repeat(record[None], len(starts), axis=0)
    out[:, EXTENT + axis] = np.minimum(length, record[EXTENT + axis] - starts)
    if axis >= 3:
        tile, tiles = ((TILE_3, TILES_3), (TILE_4, TILES_4))[axis - 3]
        out[:, tiles] = -(-out[:, EXTENT + axis] // record[tile])
    for offset, stride in ((SOURCE_OFFSET, SOURCE_STRIDE), (TARGET_OFFSET, TARGET_STRIDE)):
        at = _value(record, offset) + starts * _value(record, stride + 2 * axis)
        out[:, offset : offset + 2] = np.stack(words(at), axis=1)
    return out


def n_tiles(record: np.ndarray) -> np.ndarray:
    """Tiles of a record, or int64 [...] of records [..., WORDS]."""
    return record[..., TILES_3] * record[..., TILES_4] * record[..., EXTENT : EXTENT + 3].prod(-1)


def source_offset(record: np.ndarray) -> int:
    """Bytes from the start of its source buffer to a record's first element."""
    return _value(record, SOURCE_OFFSET)


def set_source_offset(record: np.ndarray, nbytes: int) -> None:
    """Changes what `source_offset` gives."""
    record[SOURCE_OFFSET : SOURCE_OFFSET + 2] = words(nbytes)


def _value(record: np.ndarray, word: int) -> int:
    return int(record[word] | record[word + 1] << 32)  # int64, so that a negative stride is one again


def words[T: (int, np.ndarray)](value: T) -> list[T]:
    """64-bit numbers as two words, the low one first."""
    return [value & 0xFFFFFFFF, (value >> 32) & 0xFFFFFFFF]
