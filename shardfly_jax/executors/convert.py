"""Conversions as XLA programs, equal bit for bit to their meaning in `sharding.formats`.

Floating-point bits are handled as integers wherever XLA's own choice could differ from backend to backend: float32 to
bfloat16 rounds in integers, subnormals are flushed by looking at the exponent, and a product and a sum are kept apart
by a barrier so that no backend fuses them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardfly_jax.sharding.formats import Cast, Conversion, Divide, Fill, MulAdd, np_dtype, number

EXACT = {"xla_allow_excess_precision": False}
"""Compiler options under which XLA keeps every rounding; it would drop one to float16 between two float32 steps."""

_UINTS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}


def bits_dtype(itemsize: int) -> jnp.dtype:
    """The unsigned integer dtype of a width in bytes."""
    return jnp.dtype(_UINTS[itemsize])


def as_bits(x: jax.Array) -> jax.Array:
    """The bits of an array, as unsigned integers of the same width."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint8)
    return lax.bitcast_convert_type(x, bits_dtype(x.dtype.itemsize))


def apply(conversion: Conversion, x: jax.Array) -> jax.Array:
    """Converts an array of the conversion's source dtype; returns the bits of the result. Traceable."""
    for step in conversion.steps:
        match step:
            case Cast(dtype):
                x = _cast(x, jnp.dtype(dtype))
            case MulAdd(factor, add):
                y = _flush(_flush(_cast(x, jnp.dtype("float32"))) * _opaque(factor, x.shape))
                if add:
                    y = _flush(lax.optimization_barrier(y) + jnp.float32(add))
                x = _cast(y, x.dtype)
            case Divide(divisor):
                x = _cast(_flush(_quotient(_flush(_cast(x, jnp.dtype("float32"))), divisor)), x.dtype)
            case Fill(value, dtype):
                x = jnp.full(x.shape, np.asarray(number(value)).astype(np_dtype(dtype)), dtype)
    return as_bits(x)


def _opaque(value: float, shape: tuple[int, ...]) -> jax.Array:
    """A constant that XLA cannot fold into what stands around it."""
    return lax.optimization_barrier(jnp.broadcast_to(jnp.float32(value), shape))


def _quotient(x: jax.Array, divisor: float) -> jax.Array:
    """The correctly rounded quotient of float32 numbers.

    XLA's own float32 division is off by one unit in the last place on GPUs. A float64 quotient rounded to float32 is
    right, since 53 >= 2 * 24 + 2 bits (Figueroa, "When is double rounding innocuous?").
    """
    with jax.enable_x64(True):
        wide = lax.convert_element_type(x, jnp.float64)
        by = lax.optimization_barrier(jnp.broadcast_to(jnp.float64(jnp.float32(divisor)), x.shape))
        return lax.convert_element_type(wide / by, jnp.float32)


def _flush(x: jax.Array) -> jax.Array:
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    subnormal = (bits & 0x7F800000) == 0
    return lax.bitcast_convert_type(jnp.where(subnormal, bits & jnp.uint32(0x80000000), bits), jnp.float32)


def _cast(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    if x.dtype == dtype:
        return x
    if x.dtype == jnp.float32 and dtype == jnp.bfloat16:
        bits = lax.bitcast_convert_type(x, jnp.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        quiet_nan = ((bits >> 16) & 0x8000) | 0x7FC0
        is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
        return lax.bitcast_convert_type(jnp.where(is_nan, quiet_nan, rounded).astype(jnp.uint16), jnp.bfloat16)
    if x.dtype == jnp.bfloat16:
        wide = lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) << 16, jnp.float32)
        return _cast(wide, dtype)
    if dtype == jnp.bfloat16:
        return _cast(x.astype(jnp.float32), dtype)
    return x.astype(dtype)
