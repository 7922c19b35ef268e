"""Conversions as emitted code, on the bits of single elements; the meaning is `sharding.formats.Conversion.apply`'s."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardfly_jax.pallas_kernels import addresses as m
from shardfly_jax.pallas_kernels.emit import Int, const
from shardfly_jax.pallas_kernels.floats import flush, narrow, wide
from shardfly_jax.pallas_kernels.scales import scale
from shardfly_jax.sharding.formats import (
    Cast,
    Conversion,
    Divide,
    Fill,
    MulAdd,
    Step,
    ToScale,
    itemsize,
    np_dtype,
    number,
)


def fills(conversion: Conversion) -> bool:
    """Whether it reads nothing."""
    return bool(conversion.steps) and isinstance(conversion.steps[0], Fill)


def convert(conversion: Conversion, element: list[Int]) -> list[Int]:
    """The converted words of one element.

    Args:
      element: Its words, zero-extended; nothing for a fill.
    """
    return follow(conversion.steps, element, conversion.source)[0]


def convert_packed(conversion: Conversion, elements: Sequence[list[Int]]) -> list[Int]:
    """The converted elements as consecutive words; at least one word of them."""
    width = itemsize(conversion.target)
    if not conversion.steps or conversion.target != "bfloat16" or not isinstance(conversion.steps[-1], Cast):
        return m.pack([convert(conversion, element) for element in elements], width)
    before = [follow(conversion.steps[:-1], element, conversion.source) for element in elements]
    values = [wide(value[0], dtype) for value, dtype in before]
    return [_narrow_pair(low, high) for low, high in zip(values[::2], values[1::2], strict=True)]


def follow(steps: Sequence[Step], value: list[Int], dtype: str) -> tuple[list[Int], str]:
    """The words of an element after some steps, and its dtype then."""
    for step in steps:
        match step:
            case Fill(constant, dtype):
                value = [const(word) for word in fill_words(constant, dtype)]
            case Cast(target):
                value, dtype = [narrow(wide(value[0], dtype), target)], target
            case ToScale(format):
                value, dtype = [scale(format, value[0])], format.scale_dtype
            case _:
                value = [narrow(_compute(step, wide(value[0], dtype)), dtype)]
    return value, dtype


def fill_words(constant: str, dtype: str) -> list[int]:
    """The words of a constant."""
    bits = np.asarray(number(constant)).astype(np_dtype(dtype)).reshape(1).view(np.uint8)
    padded = np.concatenate([bits, np.zeros(-len(bits) % 4, np.uint8)]).view(np.uint32)
    return [int(word) for word in padded]


def _compute(step: Step, x: Int) -> Int:
    """A step of arithmetic on float32 bits."""
    match step:
        case MulAdd(factor, addend):
            x = flush(_arithmetic("mul", flush(x), factor))
            return flush(_arithmetic("add", x, addend)) if addend else x
        case Divide(divisor):
            return flush(_arithmetic("div", flush(x), divisor))
    raise TypeError(f"conversion step {step!r} has no code")


def _arithmetic(op: str, bits: Int, constant: float) -> Int:
    """One correctly rounded float32 operation with a constant, on bits."""
    text = f"0f{int(np.float32(constant).view(np.uint32)):08X}"
    code = f"{{ .reg .f32 x; mov.b32 x, $1; {op}.rn.f32 x, x, {text}; mov.b32 $0, x; }}"
    return m.ptx_value(code, "=r,r", bits, pure=True)


def _narrow_pair(low: Int, high: Int) -> Int:
    """Two float32 rounded to bfloat16, side by side, as `_narrow` does: two instructions unless there is a NaN."""
    code = (
        "{ .reg .f32 a, b; .reg .pred p; .reg .b32 s, n; mov.b32 a, $1; mov.b32 b, $2;"
        " cvt.rn.bf16x2.f32 $0, b, a; setp.num.f32 p, a, b; @p bra DONE;"
        " setp.nan.f32 p, a, a; shr.b32 s, $1, 16; and.b32 s, s, 0x8000; or.b32 s, s, 0x7fc0;"
        " prmt.b32 n, $0, s, 0x3254; @p mov.b32 $0, n;"
        " setp.nan.f32 p, b, b; shr.b32 s, $2, 16; and.b32 s, s, 0x8000; or.b32 s, s, 0x7fc0;"
        " prmt.b32 n, $0, s, 0x5410; @p mov.b32 $0, n; DONE: }"
    )
    return m.ptx_value(code, "=&r,r,r", low, high, pure=True)
