"""Float arithmetic of emitted code, on bits of float32."""

from __future__ import annotations

from shardfly_jax.pallas_kernels import addresses as m
from shardfly_jax.pallas_kernels.emit import Int


def divide(a: Int, b: Int) -> Int:
    """The correctly rounded quotient of float32 bits."""
    code = "{ .reg .f32 x, y; mov.b32 x, $1; mov.b32 y, $2; div.rn.f32 x, x, y; mov.b32 $0, x; }"
    return m.ptx_value(code, "=r,r,r", a, b, pure=True)


def multiply(a: Int, b: Int) -> Int:
    """The correctly rounded product of float32 bits."""
    code = "{ .reg .f32 x, y; mov.b32 x, $1; mov.b32 y, $2; mul.rn.f32 x, x, y; mov.b32 $0, x; }"
    return m.ptx_value(code, "=r,r,r", a, b, pure=True)


def flush(bits: Int) -> Int:
    """Float32 bits with subnormals replaced by zero of their sign."""
    return ((bits & 0x7F800000) == 0).where(bits & 0x80000000, bits)


def wide(bits: Int, dtype: str) -> Int:
    """Bits of a float as bits of the same float32."""
    if dtype == "bfloat16":
        return bits << 16
    if dtype == "float16":
        code = "{ .reg .b16 h; .reg .f32 x; cvt.u16.u32 h, $1; cvt.f32.f16 x, h; mov.b32 $0, x; }"
        return m.ptx_value(code, "=r,r", bits, pure=True)
    return bits


def narrow(bits: Int, dtype: str) -> Int:
    """Float32 bits rounded to a dtype, to nearest even."""
    if dtype == "bfloat16":
        rounded = (bits + ((bits >> 16 & 1) + 0x7FFF)) >> 16
        nan = (bits >> 16 & 0x8000) | 0x7FC0
        return ((bits & 0x7FFFFFFF) > 0x7F800000).where(nan, rounded)
    if dtype == "float16":
        code = "{ .reg .b16 h; .reg .f32 x; mov.b32 x, $1; cvt.rn.f16.f32 h, x; cvt.u32.u16 $0, h; }"
        return m.ptx_value(code, "=r,r", bits, pure=True)
    return bits
