"""Conversions as XLA programs, equal bit for bit to their meaning in `sharding.formats`.

Floating-point bits are handled as integers wherever XLA's own choice could differ from backend to backend: float32 to
bfloat16 rounds in integers, subnormals are flushed by looking at the exponent, and a product and a sum are kept apart
by a barrier so that no backend fuses them.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardfly_jax.sharding.formats import (
    Amax,
    Cast,
    Conversion,
    Divide,
    Encode,
    Fill,
    MulAdd,
    ToScale,
    np_dtype,
    number,
)
from shardfly_jax.sharding.quantization import BIAS, E8M0_LARGEST, FLOAT4_FIRST, LARGEST_FACTOR, Format

EXACT = {"xla_allow_excess_precision": False}
"""Compiler options under which XLA keeps every rounding; it would drop one to float16 between two float32 steps."""

Spread = Callable[[jax.Array], jax.Array]

_UINTS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}


def bits_dtype(itemsize: int) -> jnp.dtype:
    """The unsigned integer dtype of a width in bytes."""
    return jnp.dtype(_UINTS[itemsize])


def as_bits(x: jax.Array) -> jax.Array:
    """The bits of an array, as unsigned integers of the same width."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint8)
    return lax.bitcast_convert_type(x, bits_dtype(x.dtype.itemsize))


def apply(
    conversion: Conversion,
    x: jax.Array,
    within: tuple[int, ...] = (),
    amax: jax.Array | None = None,
    packed: int = -1,
    spread: Spread | None = None,
) -> jax.Array:
    """`Conversion.apply`; returns the bits of the result. Traceable.

    Args:
      spread: From one number per block to that of each element's block, where `amax` does not broadcast against `x`.
    """
    return apply_watched(conversion, x, within, amax, packed, spread)[0]


def apply_watched(
    conversion: Conversion,
    x: jax.Array,
    within: tuple[int, ...] = (),
    amax: jax.Array | None = None,
    packed: int = -1,
    spread: Spread | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`apply`, and the largest bits of `amax` that a scale was made of: at least `NOT_FINITE` where one was refused."""
    worst = jnp.uint32(0)
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
            case Amax():
                x = _amax(x, within)
            case ToScale(format):
                worst = jnp.maximum(worst, x.max(initial=0))
                x = _scales(format, x)
            case Encode(format):
                amax = _amax(x, within) if amax is None else amax
                worst = jnp.maximum(worst, amax.max(initial=0))
                x = _encoded(format, x, amax, packed, spread)
    return as_bits(x), worst


def _amax(x: jax.Array, within: tuple[int, ...]) -> jax.Array:
    """uint32 bits of the largest absolute values; the axes `within` a block come back with length 1."""
    bits = lax.bitcast_convert_type(_flush(_cast(x, jnp.dtype("float32"))), jnp.uint32) & 0x7FFFFFFF
    return bits.max(within, keepdims=True) if within else bits


def _exponents(format: Format, amax: jax.Array) -> jax.Array:
    """uint32 exponents of power-of-two scales plus 127; `Format.exponents`."""
    if format.rounding == "floor":
        exponent = jnp.maximum((amax + jnp.uint32(format.carry)) >> 23, 1).astype(jnp.int32) - format.shift
        return jnp.clip(exponent, 0, E8M0_LARGEST).astype(jnp.uint32)
    bits = lax.bitcast_convert_type(_quotients(format, amax), jnp.uint32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0)
    return jnp.where(bits == 0, jnp.uint32(format.zero_exponent), jnp.minimum(exponent, E8M0_LARGEST))


def _quotients(format: Format, amax: jax.Array) -> jax.Array:
    return _flush(_quotient(_floored(format, amax), format.divisor))


def _floored(format: Format, amax: jax.Array) -> jax.Array:
    # as bits: numbers that are not negative keep their order
    floor = np.float32(format.floor).view(np.uint32)
    return lax.bitcast_convert_type(jnp.maximum(amax, floor), jnp.float32)


def _steps(format: Format, amax: jax.Array) -> jax.Array:
    """Scales as float32 numbers."""
    if format.scale != "float32":
        return lax.bitcast_convert_type(_exponents(format, amax) << 23, jnp.float32)
    if format.formula == "factor":
        return _quotient(1.0, _factors(format, amax))
    found = _quotients(format, amax)
    return jnp.where(found == 0, jnp.float32(1), found)


def _factors(format: Format, amax: jax.Array) -> jax.Array:
    """What values are multiplied with; `Format.factors`."""
    if format.scale != "float32":
        return lax.bitcast_convert_type((2 * BIAS - _exponents(format, amax)) << 23, jnp.float32)
    if format.formula == "factor":
        found = _quotient(format.divisor, _floored(format, amax))
        return jnp.where(found <= LARGEST_FACTOR, found, jnp.float32(1))
    return _quotient(1.0, _steps(format, amax))


def _scales(format: Format, amax: jax.Array) -> jax.Array:
    if format.scale == "e8m0":
        return _exponents(format, amax).astype(jnp.uint8)
    return _steps(format, amax)


def _encoded(format: Format, x: jax.Array, amax: jax.Array, packed: int, spread: Spread | None) -> jax.Array:
    """Codes; what is divided is divided once for each number in `amax`."""

    def of_each(number: jax.Array) -> jax.Array:
        # behind a barrier, so that XLA does not make a division of each element of a product with a quotient
        number = lax.optimization_barrier(number)
        return jnp.broadcast_to(number, x.shape) if spread is None else spread(number)

    values = _flush(_cast(x, jnp.dtype("float32")))
    if format.divides:
        values = _times_reciprocal(values, _reciprocal(_steps(format, amax)), of_each)
    else:
        values = values * of_each(_factors(format, amax))
    values = jnp.clip(values, jnp.float32(-format.largest), jnp.float32(format.largest))
    if format.per_byte > 1:
        low, high = (lax.slice_in_dim(_float4(values), half, None, 2, packed) for half in (0, 1))
        return low | high << 4
    target = jnp.dtype(np_dtype(format.codes))
    return (jnp.round(values) if target.kind == "i" else values).astype(target)


def _float4(x: jax.Array) -> jax.Array:
    """Bits of float32 numbers rounded to float4_e2m1fn, uint8; by comparisons, which no backend does its own way."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    size = bits & 0x7FFFFFFF
    code = sum((size >= first).astype(jnp.uint8) for first in FLOAT4_FIRST)
    return (bits >> 31 << 3).astype(jnp.uint8) | code


def _opaque(value: float, shape: tuple[int, ...]) -> jax.Array:
    """A constant that XLA cannot fold into what stands around it."""
    return lax.optimization_barrier(jnp.broadcast_to(jnp.float32(value), shape))


def _quotient(x: jax.Array | float, by: jax.Array | float) -> jax.Array:
    """The correctly rounded quotient of float32 numbers; one of them is an array.

    XLA's own float32 division is off by one unit in the last place on GPUs. A float64 quotient rounded to float32 is
    right, since 53 >= 2 * 24 + 2 bits (Figueroa, "When is double rounding innocuous?").
    """
    shape = np.broadcast_shapes(np.shape(x), np.shape(by))
    with jax.enable_x64(True):
        wide, divisor = (
            lax.convert_element_type(n, jnp.float64) if isinstance(n, jax.Array) else jnp.float64(np.float32(n))
            for n in (x, by)
        )
        divisor = lax.optimization_barrier(jnp.broadcast_to(divisor, shape))
        return lax.convert_element_type(wide / divisor, jnp.float32)


def _reciprocal(by: jax.Array) -> jax.Array:
    """float64 reciprocals of float32 numbers."""
    with jax.enable_x64(True):
        return 1 / lax.convert_element_type(by, jnp.float64)


def _times_reciprocal(x: jax.Array, reciprocal: jax.Array, of_each: Spread) -> jax.Array:
    """Correctly rounded float32 quotients that are normal, by a float64 product with the divisor's reciprocal.

    A quotient of two numbers of 24 bits is at least 2^-49 of itself away from any midpoint of two such numbers, or it
    would be one, and a midpoint (25 bits) times a divisor does not fit into 24 bits. The product is off by less: two
    roundings of 2^-53 each.
    """
    with jax.enable_x64(True):
        return lax.convert_element_type(lax.convert_element_type(x, jnp.float64) * of_each(reciprocal), jnp.float32)


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
