"""Records of moves that quantize: tiles of whole blocks where alignment allows, single elements elsewhere.

Beside what it reads and writes, such a record has a *side*: one word or scale for each block, at strides of its own.
Its `ROLE` says what happens there:

* `STORES_SCALES`: each block lies in one tile, which finds the maximum and writes the stored scale to the side.
* `RAISES_AMAX`: the side holds slots, which become the larger of what they hold and what the tile finds.
* `READS_AMAX`: the side holds slots, which give the maxima.
* `WRITES_CODES`: values are encoded into the target.

There are five kinds:

* `BLOCK_ROWS`: dimension 4 is contiguous in the source.
* `BLOCK_TRANSPOSE`: dimension 3 is the one that is contiguous in the source. In both, dimension 4 is contiguous in the
  target, if codes are written, and blocks along it are multiples of `STRIP` elements, of which no two blocks share one.
* `REDUCE_ELEMENTS`, `ENCODE_ELEMENTS`: anything else, an element at a time, with slots at the side. Where two codes
  share a byte, an element is the first value of each byte. Dimension 0 then has the extent 1, and its source stride
  leads to the second value.
* `PACKED_BLOCKS`: whole blocks whose codes share bytes and are contiguous, `PIECE_NBYTES` of them or a multiple. An
  element is a block. Dimensions 0 and 1 have the extent 1; their source strides lead from a value to the next one of
  its byte, and from byte to byte.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from shardfly_jax.sharding import records as r
from shardfly_jax.sharding.formats import Conversion, itemsize
from shardfly_jax.sharding.quantization import Format

STORES_SCALES, RAISES_AMAX, READS_AMAX, WRITES_CODES = (1 << k for k in range(4))
STRIP = 16
"""Elements of dimension 4 that a thread handles together: as many codes as a piece has bytes."""
TILE = 128
"""Most elements of dimensions 3 and 4 in a tile of blocks."""
PACKED_TILE_SIZE = 512
"""Most blocks in a tile of `PACKED_BLOCKS`: four for each thread."""


@dataclasses.dataclass(frozen=True, slots=True)
class SideDim:
    """One dimension of a region that is quantized.

    Attributes:
      extent: Elements.
      read, write: Bytes between neighbours.
      side: Bytes between neighbouring blocks at the side.
      block: Elements of a block: the extent where it lies within one, 1 where it goes from block to block, or between.
    """

    extent: int
    read: int
    write: int
    side: int
    block: int

    @property
    def is_within(self) -> bool:
        """Whether neighbours share a block."""
        return self.block > 1


@dataclasses.dataclass(frozen=True, slots=True)
class SideRegion:
    """What a record covers.

    Attributes:
      dims: At most `records.DIMS`, each within blocks or across them.
      read, write, side: Offsets of the first element and of its block, bytes.
    """

    dims: tuple[SideDim, ...]
    read: int
    write: int
    side: int

    def cut(self, axis: int, start: int, stop: int) -> SideRegion:
        """The part between two indices of a dimension that goes from block to block."""
        dim = self.dims[axis]
        dims = (*self.dims[:axis], dataclasses.replace(dim, extent=stop - start), *self.dims[axis + 1 :])
        read, write, side = (
            at + start * step
            for at, step in zip((self.read, self.write, self.side), (dim.read, dim.write, dim.side), strict=True)
        )
        return SideRegion(dims, read, write, side)


def block_record(region: SideRegion, conversion: Conversion, role: int) -> np.ndarray | None:
    """The record that does a whole region in tiles of blocks; None if its strides do not allow that.

    Args:
      region: To be quantized.
      conversion: What happens to elements before they are reduced or encoded.
      role: What the record does. Without slots, a block must fit into one tile.
    """
    width = itemsize(conversion.source)
    encodes, single = bool(role & WRITES_CODES), not role & (RAISES_AMAX | READS_AMAX)
    if width not in (2, 4) or (encodes and conversion.encodes is not None and conversion.encodes.per_byte > 1):
        return None
    dims = _joined([dim for dim in region.dims if dim.extent > 1], encodes)
    near = next((dim for dim, _ in dims if dim.read == width), None)
    across = _strips(dims, near, encodes)
    if near is None or across is None:
        return None
    turned = across is not near
    others = [(dim, parts) for dim, parts in dims if dim is not near and dim is not across]
    if turned:
        rows, columns = near, across
        if rows.extent % (r.PIECE_NBYTES // width):
            return None
    else:
        rows, columns, others = _straight(across, others, single)
    dims_out = [part for _, parts in others for part in parts]
    if len(dims_out) > r.DIMS - 2 or (single and (any(d.is_within for d in dims_out) or _exceeds(rows, columns))):
        return None
    tiles = (TILE // rows.block * rows.block, TILE // columns.block * columns.block) if single else (TILE, TILE)
    if turned and tiles[0] % (r.PIECE_NBYTES // width):
        return None
    steps = [step for dim in dims_out for step in (dim.read, dim.write if encodes else 0)]
    steps += [columns.read if turned else rows.read, rows.write if encodes else 0]
    if any(n % r.PIECE_NBYTES for n in (region.read, region.write if encodes else 0, *steps)):
        return None
    kind = r.BLOCK_TRANSPOSE if turned else r.BLOCK_ROWS
    return _record(kind, region, [*dims_out, rows, columns], tiles, role, (rows.block, columns.block))


def packs_blocks(format: Format) -> bool:
    """Whether the codes of a block are whole pieces of bytes that they share."""
    rows, columns = format.block
    return format.per_byte > 1 and rows == 1 and columns is not None and columns % (2 * r.PIECE_NBYTES) == 0


def packed_record(region: SideRegion, conversion: Conversion, role: int) -> np.ndarray | None:
    """The record that encodes whole blocks whose codes share bytes; None if its strides do not allow that.

    Args:
      region: Its blocks lie in it.
      conversion: Ends in `Encode`.
      role: What the record does, without slots.
    """
    format = conversion.encodes
    if format is None or not packs_blocks(format):
        return None
    within = sorted((dim for dim in region.dims if dim.is_within), key=lambda dim: dim.write)
    blocks = [dim for dim in region.dims if not dim.is_within and dim.extent > 1]
    if len(within) != 2 or len(blocks) > r.DIMS - 2:
        return None
    of_byte, nbytes = within
    if (of_byte.write, nbytes.write, nbytes.extent * of_byte.extent) != (0, 1, format.block[1]):
        return None
    if any(n % r.PIECE_NBYTES for n in (region.write, *(dim.write for dim in blocks))):
        return None
    blocks.sort(key=lambda dim: -abs(dim.read))  # neighbouring threads read what is near
    blocks = [SideDim(1, 0, 0, 0, 1)] * (r.DIMS - 2 - len(blocks)) + blocks
    strides = [SideDim(1, dim.read, 0, 0, 1) for dim in (of_byte, nbytes)]
    tile_4 = min(blocks[-1].extent, TILE)
    tiles = (min(blocks[-2].extent, PACKED_TILE_SIZE // tile_4), tile_4)
    return _record(r.PACKED_BLOCKS, region, [*strides, *blocks], tiles, role, (1, 1))


def element_record(region: SideRegion, role: int) -> np.ndarray:
    """The record that reduces a region into slots, or encodes it from them, an element at a time."""
    shared = [dim for dim in region.dims if role & WRITES_CODES and dim.extent > 1 and not dim.write]
    dims = [dim for dim in region.dims if dim.extent > 1 and dim not in shared]
    dims.sort(key=lambda dim: (-abs(dim.write), -abs(dim.read)))
    dims = [SideDim(1, 0, 0, 0, 1)] * (r.DIMS - len(dims)) + dims
    if shared:  # values of one byte
        dims[0] = SideDim(1, shared[0].read, 0, 0, 1)
    tile_4 = min(dims[4].extent, r.ELEMENTS_TILE_4)
    tiles = (min(dims[3].extent, r.ELEMENTS_TILE_SIZE // tile_4), tile_4)
    kind = r.ENCODE_ELEMENTS if role & WRITES_CODES else r.REDUCE_ELEMENTS
    return _record(kind, region, dims, tiles, role, (1, 1))


def _joined(dims: Sequence[SideDim], encodes: bool) -> list[tuple[SideDim, list[SideDim]]]:
    """Dimensions within blocks joined with the ones that go on from block to block, each with what it was made of."""
    out = [(dim, [dim]) for dim in dims if dim.is_within]
    for dim in (dim for dim in dims if not dim.is_within):
        for k, (inner, parts) in enumerate(out):
            follows = dim.read == inner.extent * inner.read and (not encodes or dim.write == inner.extent * inner.write)
            if len(parts) == 1 and inner.is_within and follows:
                joined = dataclasses.replace(inner, extent=inner.extent * dim.extent, side=dim.side)
                out[k] = joined, [inner, dim]
                break
        else:
            out.append((dim, [dim]))
    return out


def _strips(dims: Sequence[tuple[SideDim, list[SideDim]]], near: SideDim | None, encodes: bool) -> SideDim | None:
    """The dimension that becomes dimension 4: the target's contiguous one, else the source's, else the longest."""
    fits = [dim for dim, _ in dims if dim.block % STRIP == 0 and dim.extent % STRIP == 0]
    if encodes:
        return next((dim for dim in fits if dim.write == 1), None)
    if any(dim is near for dim in fits):
        return near
    return max(fits, key=lambda dim: dim.extent, default=None)


def _straight(
    columns: SideDim, others: list[tuple[SideDim, list[SideDim]]], single: bool
) -> tuple[SideDim, SideDim, list[tuple[SideDim, list[SideDim]]]]:
    """Rows and columns of tiles where one dimension is contiguous on both sides: long rows are cut to make columns."""
    best = max(others, key=lambda of: (of[0].is_within, of[0].extent), default=None)
    block = columns.block
    cuttable = columns.extent > TILE and columns.extent % TILE == 0 and (block % TILE == 0 or TILE % block == 0)
    if cuttable and (best is None or (best[0].extent < TILE and not (single and best[0].is_within))):
        rows = SideDim(
            columns.extent // TILE, columns.read * TILE, columns.write * TILE, columns.side * max(TILE // block, 1),
            max(block // TILE, 1),
        )  # fmt: skip
        return rows, dataclasses.replace(columns, extent=TILE, block=min(block, TILE)), others
    if best is None:
        return SideDim(1, 0, 0, 0, 1), columns, others
    return best[0], columns, [of for of in others if of is not best]


def _exceeds(rows: SideDim, columns: SideDim) -> bool:
    return rows.block > TILE or columns.block > TILE


def _record(
    kind: int, region: SideRegion, dims: Sequence[SideDim], tiles: tuple[int, int], role: int, blocks: tuple[int, int]
) -> np.ndarray:
    plain = r.Region(tuple(r.Dim(dim.extent, dim.read, dim.write) for dim in dims), region.read, region.write)
    record = r.record(kind, plain, list(plain.dims), tiles)
    record[r.ROLE], record[r.BLOCK_3], record[r.BLOCK_4] = role, *blocks
    record[r.SIDE_OFFSET : r.SIDE_OFFSET + 2] = r.words(region.side)
    padded = [0] * (r.DIMS - len(dims)) + [dim.side for dim in dims]
    for d, step in enumerate(padded):
        record[r.SIDE_STRIDE + 2 * d : r.SIDE_STRIDE + 2 * d + 2] = r.words(step)
    return record
