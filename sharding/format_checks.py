"""What a quantized format may state: each check takes a value; those of numbers return it as plans repeat it."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardfly_jax.sharding.errors import LanguageError

LARGEST = {
    "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "float8_e4m3fnuz": 240.0, "float8_e5m2fnuz": 57344.0,
    "int8": 127.0, "float4_e2m1fn": 6.0,
}  # fmt: skip
"""Dtypes of codes, and the largest number of each that has a negative."""
LARGEST_FLOAT32 = float(np.finfo(np.float32).max)
SMALLEST_NORMAL = float(np.finfo(np.float32).tiny)
LEAST_DIVISOR = 4.0
"""From here on the scale of the largest float32 has a reciprocal that is not subnormal."""


def choice(what: str, value: Any, known: Sequence[str]) -> None:
    """One of some words.

    Raises:
      LanguageError: It is none of them.
    """
    if not isinstance(value, str) or value not in known:
        raise LanguageError(f"format: {what} is {value!r}, but {', '.join(map(repr, known))} are known. Use one.")


def whole(what: str, value: Any, least: int, most: int | None = None) -> int:
    """A whole number of a range.

    Raises:
      LanguageError: It is of another type, or outside.
    """
    is_whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not is_whole or value < least or (most is not None and value > most):
        rule = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise LanguageError(f"format: {what} is {value!r}, but a whole number {rule} is needed.")
    return int(value)


def real(what: str, value: Any, least: float) -> float:
    """A number that is finite in float32.

    Raises:
      LanguageError: It is of another type, too small, or not finite.
    """
    is_real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_real or not least <= value or not value <= LARGEST_FLOAT32:
        raise LanguageError(
            f"format: {what} is {value!r}, but a number of at least {least:g} that is finite in float32 is needed."
        )
    return float(value) + 0.0  # no negative zero, whose bits are larger than those of any amax


def floor(value: Any, divisor: float, counts: bool) -> float:
    """The least amax that counts.

    Args:
      counts: Whether scales are made of the larger one of amax and the floor.

    Raises:
      LanguageError: It is no finite number of at least 0, or one that would change nothing.
    """
    kept = real("floor", value, 0)
    if kept and not counts:
        raise LanguageError(
            f"format: floor is {value!r}, but with rounding 'floor' a scale is the exponent of amax alone. Set it "
            "to 0, or choose the rounding 'ceil'."
        )
    least = divisor * SMALLEST_NORMAL
    if kept and float(np.float32(kept)) < least:
        raise LanguageError(
            f"format: floor is {value!r}, but less than {least!r} makes a scale that is subnormal and counts as zero. "
            "Set it to 0, or to more."
        )
    return kept


def of_floor(what: str, value: int, unused: int) -> None:
    """A number that only the rounding `floor` uses, of a format with another one.

    Args:
      unused: What it is where nobody has given it.

    Raises:
      LanguageError: It was given.
    """
    if value != unused:
        raise LanguageError(
            f"format: {what} is {value!r}, but rounding 'ceil' has none. Leave it out, or choose the rounding 'floor'."
        )


def flag(what: str, value: Any) -> bool:
    """True or False.

    Raises:
      LanguageError: It is neither.
    """
    if not isinstance(value, bool | np.bool_):
        raise LanguageError(f"format: {what} is {value!r}, but it is True or False.")
    return bool(value)


def codes(format: str, dtype: Any, largest: Any) -> None:
    """What a format's class states of its codes.

    Args:
      format: Name of the class.

    Raises:
      LanguageError: Codes of a dtype that nothing encodes, or a largest one that they do not hold.
    """
    if not isinstance(dtype, str) or dtype not in LARGEST:
        raise LanguageError(
            f"format: codes of class {format!r} is {dtype!r}, but codes are encoded in {', '.join(LARGEST)}. State one "
            "of these dtypes in the class."
        )
    stated, most = real(f"largest of class {format!r}", largest, 0), LARGEST[dtype]
    if not 0 < stated <= most or (dtype == "int8" and not stated.is_integer()):
        raise LanguageError(
            f"format: largest of class {format!r} is {largest!r}, but codes of {dtype} end at {most:g}. State a "
            f"{'whole number' if dtype == 'int8' else 'number'} above 0 and up to that in the class."
        )


def block(format: str, value: Any, per_byte: int) -> None:
    """Rows and columns of a format's blocks.

    Args:
      format: Name of the class.
      value: What its property `block` gives.
      per_byte: Codes that share a byte.

    Raises:
      LanguageError: No pair of positive whole numbers or None, or columns that end inside a byte.
    """
    if not isinstance(value, tuple) or len(value) != 2:
        raise LanguageError(
            f"format: block of class {format!r} is {value!r}, but it is a pair of rows and columns. Return a tuple of "
            "two whole numbers, or None for a whole axis."
        )
    for what, n in zip(("rows", "columns"), value, strict=True):
        if n is not None:
            whole(f"the number of {what} of a block", n, 1)
    columns = value[1]
    if columns is not None and columns % per_byte:
        raise LanguageError(
            f"format: a block has {columns} columns, but {per_byte} codes share a byte. Give it an even number."
        )
