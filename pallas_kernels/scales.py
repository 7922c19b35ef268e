"""Scales as emitted code, from the bits of the maxima of blocks; the meaning is `sharding.quantization.Format`'s."""

from __future__ import annotations

import numpy as np

from shardfly_jax.pallas_kernels.emit import Int, const
from shardfly_jax.pallas_kernels.floats import divide, flush
from shardfly_jax.sharding.quantization import BIAS, E8M0_LARGEST, LARGEST_FACTOR, Format

ONE = 0x3F800000
"""Bits of 1."""
LARGEST_FACTOR_BITS = int(np.float32(LARGEST_FACTOR).view(np.uint32))
"""Bits of the largest factor."""


def scale(format: Format, amax: Int) -> Int:
    """The stored scale of a block."""
    return _exponent(format, amax) if format.scale == "e8m0" else _step(format, amax)


def factor(format: Format, amax: Int) -> Int:
    """What the values of a block are multiplied with, or divided by."""
    if format.scale != "float32":
        return (const(2 * BIAS) - _exponent(format, amax)) << 23
    if format.formula == "divide":
        return _step(format, amax)
    return _factor(format, amax)


def _factor(format: Format, amax: Int) -> Int:
    if format.formula == "factor":
        found = divide(_bits(format.divisor), _floored(format, amax))
        return ((found & 0x7FFFFFFF) < LARGEST_FACTOR_BITS + 1).where(found, ONE)
    return divide(const(ONE), _step(format, amax))


def _step(format: Format, amax: Int) -> Int:
    """The scale as a float32."""
    if format.scale != "float32":
        return _exponent(format, amax) << 23
    if format.formula == "factor":
        return divide(const(ONE), _factor(format, amax))
    quotient = _quotient(format, amax)
    return (quotient == 0).where(const(ONE), quotient)


def _exponent(format: Format, amax: Int) -> Int:
    """The exponent of a power-of-two scale, plus 127."""
    if format.rounding == "floor":
        return ((amax + format.carry >> 23).at_least(1) - format.shift).at_least(0).at_most(E8M0_LARGEST)
    quotient = _quotient(format, amax)
    up = ((quotient & 0x7FFFFF) != 0).where(const(1), 0)
    return (quotient == 0).where(const(format.zero_exponent), ((quotient >> 23) + up).at_most(E8M0_LARGEST))


def _quotient(format: Format, amax: Int) -> Int:
    return flush(divide(_floored(format, amax), _bits(format.divisor)))


def _floored(format: Format, amax: Int) -> Int:
    return amax.at_least(_bits(format.floor)) if format.floor else amax


def _bits(value: float) -> Int:
    return const(int(np.float32(value).view(np.uint32)))
