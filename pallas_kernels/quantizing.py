"""Maxima and codes of elements as emitted code; the meaning is `Amax` and `sharding.quantization.Format.encode`."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from shardfly_jax.pallas_kernels import addresses as m
from shardfly_jax.pallas_kernels.conversions import follow
from shardfly_jax.pallas_kernels.emit import Int
from shardfly_jax.pallas_kernels.floats import flush, wide
from shardfly_jax.sharding.formats import Amax, Conversion, Encode, Step, ToScale
from shardfly_jax.sharding.quantization import BIAS, Format

E4M3_LARGEST = 448.0


def values_of(conversion: Conversion) -> Conversion:
    """From elements to what is quantized: the steps before."""
    steps: list[Step] = []
    dtype = conversion.source
    for step in conversion.steps:
        if isinstance(step, Amax | Encode):
            break
        steps.append(step)
        dtype = step.result_dtype(dtype)
    return Conversion(conversion.source, tuple(steps), dtype)


def format_of(conversion: Conversion) -> Format | None:
    """Of what comes out; None for bare maxima."""
    return next((step.format for step in conversion.steps if isinstance(step, ToScale | Encode)), None)


def largest(conversion: Conversion, words: Sequence[Int]) -> Int:
    """Bits of the largest absolute value of some elements; those of subnormals are zero.

    Args:
      conversion: From `values_of`.
      words: The elements, packed.
    """
    if conversion.is_bits and conversion.source == "bfloat16":  # two at once: their order is that of their bits
        found = words[0] & 0x7FFF7FFF
        for word in words[1:]:
            found = m.max_halves(found, word & 0x7FFF7FFF)
        return flush((found & 0xFFFF0000).at_least(found << 16))
    return flush(functools.reduce(Int.at_least, [value & 0x7FFFFFFF for value in _values(conversion, words)]))


def codes(conversion: Conversion, format: Format, words: Sequence[Int], factor: Int, flushes: bool) -> list[Int]:
    """The codes of some elements, packed; at least four.

    Args:
      conversion: From `values_of`.
      words: The elements, packed.
      factor: Of their block, from `scales.factor`.
      flushes: Whether subnormal values become zeros of their sign; only where `shows_subnormals` must it be so.
    """
    values = _values(conversion, words)
    if flushes:
        values = [flush(value) for value in values]
    return [_codes_of_four(format, values[k : k + 4], factor) for k in range(0, len(values), 4)]


def code(conversion: Conversion, format: Format, element: list[Int], factor: Int) -> Int:
    """The code of one element, given as its words."""
    return _codes_of_four(format, [value_of(conversion, element)] * 4, factor) & 0xFF


def largest_of(conversion: Conversion, element: list[Int]) -> Int:
    """`largest` of one element, given as its words; nothing for a fill."""
    return flush(_value(conversion, element) & 0x7FFFFFFF)


def _values(conversion: Conversion, words: Sequence[Int]) -> list[Int]:
    """Elements as float32 bits."""
    width = 2 if conversion.source in ("bfloat16", "float16") else 4
    if conversion.is_bits and conversion.source == "bfloat16":
        return [half for word in words for half in (word << 16, word & 0xFFFF0000)]
    return [_value(conversion, element) for element in m.unpack(words, width)]


def value_of(conversion: Conversion, element: list[Int]) -> Int:
    """One element, given as its words, as float32 bits; a subnormal one is a zero of its sign."""
    return flush(_value(conversion, element))


def _value(conversion: Conversion, element: list[Int]) -> Int:
    value, dtype = follow(conversion.steps, element, conversion.source)
    return wide(value[0], dtype)


def shows_subnormals(format: Format, factor: Int) -> Int:
    """Whether a subnormal value could have another code than a zero of its sign: only if it becomes 2^-26 or more."""
    if format.divides:
        return factor < (BIAS - 100) << 23
    return factor > (BIAS + 100) << 23


def _codes_of_four(format: Format, values: Sequence[Int], factor: Int) -> Int:
    """The codes of four values, the first one in the lowest byte; a subnormal value must not matter.

    Values are clamped before the cast, so that no finite one becomes NaN or wraps. The conversion to e4m3 does that by
    itself: beyond the largest finite value it gives that one (PTX ISA, cvt: .satfinite).
    """
    op, limit = "div" if format.divides else "mul", int(np.float32(format.largest).view(np.uint32))
    saturates = format.codes == "float8_e4m3fn" and format.largest == E4M3_LARGEST
    steps = ["mov.b32 f, $5;"]
    for k, x in enumerate("abcd"):
        steps.append(f"mov.b32 {x}, ${k + 1}; {op}.rn.f32 {x}, {x}, f;")
        if not saturates:
            steps.append(f"max.f32 {x}, {x}, 0f{limit | 1 << 31:08X}; min.f32 {x}, {x}, 0f{limit:08X};")
    if format.codes == "int8":
        steps += [f"cvt.rni.s32.f32 {i}, {x};" for i, x in zip("ijkl", "abcd", strict=True)]
        steps += ["prmt.b32 i, i, j, 0x0040; prmt.b32 k, k, l, 0x0040; prmt.b32 $0, i, k, 0x5410;"]
    else:
        steps += ["cvt.rn.satfinite.e4m3x2.f32 g, b, a; cvt.rn.satfinite.e4m3x2.f32 h, d, c; mov.b32 $0, {g, h};"]
    registers = ".reg .f32 a, b, c, d, f; .reg .b16 g, h; .reg .b32 i, j, k, l;"
    return m.ptx_value(f"{{ {registers} {' '.join(steps)} }}", "=r,r,r,r,r,r", *values, factor, pure=True)
