"""Values of a warp: what 32 threads hold in one register, and arithmetic on it.

A value that is equal in all lanes is a Python `int` or `bool`; others are arrays [32] of uint32, uint64 or bool. So
uniform code costs no NumPy. Integers are kept unsigned. Lanes that are switched off hold anything.

A *mask* says which lanes run: a bool array [32]; `ALL` itself, not a copy, where all do.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

LANES = 32
ALL = np.ones(LANES, bool)
M32, M64 = (1 << 32) - 1, (1 << 64) - 1
Value = Any
DTYPES = {1: np.bool_, 8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}


class Fault(Exception):
    """What the kernel did is undefined or wrong on a GPU; the message names the accesses."""


def both(mask: np.ndarray, condition: Value) -> np.ndarray | None:
    """Lanes of a mask where a condition holds; None if there are none."""
    if condition is True:
        return mask
    if condition is False:
        return None
    lanes = mask & condition
    count = np.count_nonzero(lanes)
    return None if count == 0 else ALL if count == LANES else lanes


def negate(condition: Value) -> Value:
    return not condition if type(condition) is bool else ~condition


def spread(value: Value, bits: int) -> np.ndarray:
    """A value as an array [32]."""
    return value if isinstance(value, np.ndarray) else np.full(LANES, value, DTYPES[bits])


def pick(condition: Value, a: Value, b: Value, bits: int) -> Value:
    """`condition ? a : b`."""
    if type(condition) is bool:
        return a if condition else b
    return np.where(condition, spread(a, bits), spread(b, bits))


def update(old: Value, new: Value, mask: np.ndarray, whole: np.ndarray, bits: int) -> Value:
    """`new` in the lanes of a mask, `old` in the others; what lanes outside `whole` get does not matter."""
    return new if mask is whole else np.where(mask, spread(new, bits), spread(old, bits))


def moved(old: list[Value], new: list[Value]) -> bool:
    """Whether the turn of a loop changed what it carries."""
    return any(a is not b and not np.array_equal(a, b) for a, b in zip(old, new, strict=True))


# Integers. A result of two uniform values is uniform.


def add(a: Value, b: Value, bits: int) -> Value:
    r = a + b
    return r & ((1 << bits) - 1) if type(r) is int else r


def sub(a: Value, b: Value, bits: int) -> Value:
    if type(a) is int and type(b) is int:
        return (a - b) & ((1 << bits) - 1)
    return a - b


def mul(a: Value, b: Value, bits: int) -> Value:
    r = a * b
    return r & ((1 << bits) - 1) if type(r) is int else r


def _divisor(b: Value, mask: np.ndarray) -> Value:
    if type(b) is int:
        zero = b == 0
    else:
        zero = bool((mask & (b == 0)).any())
        b = np.where(b == 0, np.ones_like(b), b)
    if zero:
        raise Fault("division by zero")
    return b


def divu(a: Value, b: Value, mask: np.ndarray) -> Value:
    return a // _divisor(b, mask)


def remu(a: Value, b: Value, mask: np.ndarray) -> Value:
    return a % _divisor(b, mask)


def _shifted(shift: Callable[[Value, Value], Value], a: Value, b: Value, bits: int) -> Value:
    """Shifting by the width or more gives LLVM's poison, that is anything, which a select may drop."""
    poison = 0xA5A5A5A5A5A5A5A5 >> (64 - bits)
    if type(b) is int:
        return poison if b >= bits else shift(a, b)
    return np.where(b >= bits, DTYPES[bits](poison), shift(spread(a, bits), b))


def shl(a: Value, b: Value, bits: int) -> Value:
    r = _shifted(operator.lshift, a, b, bits)
    return r & ((1 << bits) - 1) if type(r) is int else r


def shru(a: Value, b: Value, bits: int) -> Value:
    return _shifted(operator.rshift, a, b, bits)


def shrs(a: Value, b: Value, bits: int) -> Value:
    b = least(b, bits - 1)
    if type(a) is int and type(b) is int:
        return signed(a, bits) >> b & ((1 << bits) - 1)
    return unsigned(signed(spread(a, bits), bits) >> (b if type(b) is int else signed(b, bits)), bits)


def signed(a: Value, bits: int) -> Value:
    """As a signed number, for comparisons."""
    if type(a) is int:
        return a - (1 << bits) if a >> (bits - 1) else a
    return a.view(f"i{bits // 8}")


def unsigned(a: Value, bits: int) -> Value:
    return a & ((1 << bits) - 1) if type(a) is int else a.view(f"u{bits // 8}")


def least(a: Value, b: Value) -> Value:
    return min(a, b) if type(a) is int and type(b) is int else np.minimum(a, b)


def greatest(a: Value, b: Value) -> Value:
    return max(a, b) if type(a) is int and type(b) is int else np.maximum(a, b)


def resize(a: Value, bits: int) -> Value:
    """Truncated, or extended with zeros."""
    if type(a) is int:
        return a & ((1 << bits) - 1)
    if type(a) is bool:
        return int(a)
    return a.astype(DTYPES[bits])


def extend_signed(a: Value, bits: int, to: int) -> Value:
    if type(a) is int:
        return signed(a, bits) & ((1 << to) - 1)
    return signed(a, bits).astype(f"i{to // 8}").view(f"u{to // 8}")


def permute_bytes(a: Value, b: Value, selector: Value) -> Value:
    """`prmt.b32` in its default mode (PTX ISA, prmt): each nibble picks a byte of b:a, or spreads its sign bit."""
    a, b, selector = (spread(x, 32).astype(np.uint64) for x in (a, b, selector))
    both_words = a | b << np.uint64(32)
    out = np.zeros(LANES, np.uint64)
    for k in range(4):
        nibble = selector >> np.uint64(4 * k) & np.uint64(15)
        byte = both_words >> (nibble & np.uint64(7)) * np.uint64(8) & np.uint64(255)
        sign = np.where(byte >> np.uint64(7), np.uint64(255), np.uint64(0))
        out |= np.where(nibble >> np.uint64(3), sign, byte) << np.uint64(8 * k)
    return out.astype(np.uint32)


# Floats are kept as bits: of 32-bit registers as uint32, of 16-bit ones in the low half.

NAN = {"f32": 0x7FFFFFFF, "f16": 0x7FFF, "bf16": 0x7FFF}
"""What hardware makes of a NaN (PTX ISA: canonical NaN)."""
FLOATS = {"f32": np.dtype(np.float32), "f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}


def is_nan(a: Value) -> Value:
    """Whether float32 bits are a NaN."""
    return (a & 0x7FFFFFFF) > 0x7F800000


def decode(a: Value, kind: str) -> np.ndarray:
    dtype = FLOATS[kind]
    return spread(a, 32).astype(f"u{dtype.itemsize}").view(dtype).astype(np.float32)


def encode(x: np.ndarray, kind: str) -> np.ndarray:
    """Float32 rounded to nearest even."""
    dtype = FLOATS[kind]
    with np.errstate(over="ignore", invalid="ignore"):
        bits = x.astype(dtype).view(f"u{dtype.itemsize}").astype(np.uint32)
    return np.where(np.isnan(x), np.uint32(NAN[kind]), bits)


def encode_e4m3(x: np.ndarray) -> np.ndarray:
    """Float32 rounded to nearest even in e4m3; beyond its range the largest of its sign (PTX ISA, cvt: .satfinite)."""
    within = np.clip(x, np.float32(-448), np.float32(448)).astype(ml_dtypes.float8_e4m3fn)
    return np.where(np.isnan(x), np.uint32(0x7F), within.view(np.uint8).astype(np.uint32))


def to_integer(x: np.ndarray) -> np.ndarray:
    """Float32 rounded to the nearest 32-bit signed integer, ties to even; NaN gives 0 (PTX ISA, cvt)."""
    wide = np.nan_to_num(np.rint(x.astype(np.float64)), nan=0.0, posinf=2.0**31, neginf=-(2.0**31))
    return np.clip(wide, -(2.0**31), 2.0**31 - 1).astype(np.int64).astype(np.uint32)


def max_halves(a: Value, b: Value) -> np.ndarray:
    """`max.u16x2`."""
    a, b = spread(a, 32), spread(b, 32)
    return np.maximum(a >> np.uint32(16), b >> np.uint32(16)) << np.uint32(16) | np.maximum(a & 0xFFFF, b & 0xFFFF)


FLOAT_OPS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide,
    "min": np.fmin, "max": np.fmax,  # PTX ISA, min: of a number and NaN, the number
}  # fmt: skip


def float_op(op: str, a: Value, b: Value) -> np.ndarray:
    """One float32 operation, rounded to nearest even, subnormals kept."""
    with np.errstate(all="ignore"):
        return encode(FLOAT_OPS[op](decode(a, "f32"), decode(b, "f32")), "f32")
