"""Codes that share a byte as emitted code: a thread makes a whole block's, or a byte of its two values.

The meaning is `sharding.quantization.Format`'s `encode` and `pack`. Hopper has no conversion to float4_e2m1fn, so
comparisons find a code; they clamp too.
"""

from __future__ import annotations

import functools

from shardfly_jax.pallas_kernels import addresses as m, scales
from shardfly_jax.pallas_kernels.blocks import Side
from shardfly_jax.pallas_kernels.conversions import fills
from shardfly_jax.pallas_kernels.emit import Int, const, for_range, when
from shardfly_jax.pallas_kernels.floats import divide, multiply
from shardfly_jax.pallas_kernels.quantizing import value_of, values_of
from shardfly_jax.pallas_kernels.tiles import Place, Tile, each_element, split
from shardfly_jax.sharding import quantized_records as q
from shardfly_jax.sharding.formats import NOT_FINITE, Amax, Conversion, itemsize
from shardfly_jax.sharding.quantization import FLOAT4_FIRST, Format


def packs(conversion: Conversion) -> bool:
    """Whether codes come out that share a byte."""
    return conversion.encodes is not None and conversion.encodes.per_byte > 1


def packs_blocks(conversion: Conversion) -> bool:
    """Whether there are `PACKED_BLOCKS` records of a conversion."""
    return not fills(conversion) and conversion.encodes is not None and q.packs_blocks(conversion.encodes)


def maxima(conversion: Conversion) -> Conversion:
    """What tiles of blocks do of a conversion: all, but only its maxima where codes share a byte."""
    if not packs(conversion):
        return conversion
    return Conversion(conversion.source, (*values_of(conversion).steps, Amax()), "uint32")


def encode_pairs(tile: Tile, place: Place, side: Side, step: Int, conversion: Conversion) -> None:
    """An `ENCODE_ELEMENTS` tile of codes that share a byte.

    Args:
      tile: Its elements are the first value of each byte.
      place: Where the bytes go.
      side: Holds the maximum of the block of both.
      step: Bytes from a value to the next one in its byte, 64 bits.
    """
    values, format = values_of(conversion), conversion.encodes
    assert format is not None

    def encode(row: Int, column: Int, first: list[Int]) -> None:
        amax = m.load32(side.word_at(row, column))
        side.refuse(amax > NOT_FINITE - 1)
        factor = scales.factor(format, amax)
        second = first
        if not fills(conversion):
            second = m.load_element(tile.read_at(row, column) + step, itemsize(conversion.source))
        low, high = (_code(format, value_of(values, element), factor) for element in (first, second))
        m.store_element(place.write_at(row, column), [low | high << 4], 1)

    each_element(tile, conversion, encode)


def pack_blocks(tile: Tile, place: Place, side: Side, steps: tuple[Int, Int], conversion: Conversion) -> None:
    """A `PACKED_BLOCKS` tile: a thread reads a whole block into registers and stores its codes, 16 bytes at a time.

    Args:
      tile: Its elements are the first values of blocks.
      place: Where the bytes go.
      side: Where the scales go, if the record stores them.
      steps: Bytes from a value to the next one of its byte, and from byte to byte, 64 bits.
    """
    values, format = values_of(conversion), conversion.encodes
    assert format is not None
    size, width = format.block[1], itemsize(conversion.source)
    assert size is not None

    def pack(item: Int) -> None:
        row, column = split(item, tile.columns)
        at, words = tile.read_at(row, column), []
        for _ in range(size // format.per_byte):
            words += [m.load_element(at, width), m.load_element(at + steps[0], width)]
            at = at + steps[1]
        elements = [value_of(values, element) for element in words]
        amax = functools.reduce(Int.at_least, [x & 0x7FFFFFFF for x in elements])
        side.refuse(amax > NOT_FINITE - 1)
        with when(side.has(q.STORES_SCALES)):
            scale = [scales.scale(format, amax)]
            m.store_element(side.word_at(row, column), scale, itemsize(format.scale_dtype))
        factor = scales.factor(format, amax)
        codes = [_code(format, x, factor) for x in elements]
        target = place.write_at(row, column)
        packed = [functools.reduce(_above, reversed(codes[k : k + 8])) for k in range(0, size, 8)]
        for k in range(0, len(packed), 4):
            m.store_vector(target + k * 4, packed[k : k + 4])

    for_range(tile.thread, tile.rows * tile.columns, m.THREADS, pack)


def _above(high: Int, low: Int) -> Int:
    """A code put in below others."""
    return high << 4 | low


def _code(format: Format, x: Int, factor: Int) -> Int:
    """The code of a value.

    Args:
      x: From `value_of`.
      factor: Of its block, from `scales.factor`.
    """
    x = divide(x, factor) if format.divides else multiply(x, factor)
    size, code = x & 0x7FFFFFFF, const(0)
    for first in FLOAT4_FIRST:
        code = code + (size > first - 1).where(const(1), 0)
    return (x >> 28 & 8) | code
