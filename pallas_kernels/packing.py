"""Codes that share a byte as emitted code: a thread makes a whole byte of its two values, an element at a time.

The meaning is `sharding.quantization.Format`'s `encode` and `pack`. Hopper has no conversion to float4_e2m1fn, so
comparisons find a code; they clamp too.
"""

from __future__ import annotations

from shardfly_jax.pallas_kernels import addresses as m, scales
from shardfly_jax.pallas_kernels.blocks import Side
from shardfly_jax.pallas_kernels.conversions import fills, follow
from shardfly_jax.pallas_kernels.emit import Int, const
from shardfly_jax.pallas_kernels.floats import divide, flush, multiply, wide
from shardfly_jax.pallas_kernels.quantizing import values_of
from shardfly_jax.pallas_kernels.tiles import Place, Tile, each_element
from shardfly_jax.sharding.formats import NOT_FINITE, Amax, Conversion, itemsize
from shardfly_jax.sharding.quantization import FLOAT4_FIRST, Format


def packs(conversion: Conversion) -> bool:
    """Whether codes come out that share a byte."""
    return conversion.encodes is not None and conversion.encodes.per_byte > 1


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
        low, high = (_code(values, format, element, factor) for element in (first, second))
        m.store_element(place.write_at(row, column), [low | high << 4], 1)

    each_element(tile, conversion, encode)


def _code(conversion: Conversion, format: Format, element: list[Int], factor: Int) -> Int:
    """The code of one element, given as its words.

    Args:
      conversion: From `values_of`.
      factor: Of its block, from `scales.factor`.
    """
    value, dtype = follow(conversion.steps, element, conversion.source)
    x = flush(wide(value[0], dtype))
    divides = format.formula == "divide" and format.scale == "float32"
    x = divide(x, factor) if divides else multiply(x, factor)
    size, code = x & 0x7FFFFFFF, const(0)
    for first in FLOAT4_FIRST:
        code = code + (size > first - 1).where(const(1), 0)
    return (x >> 28 & 8) | code
