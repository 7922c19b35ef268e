"""Quantized formats: how a block of values becomes codes and a scale, and over which elements a scale is shared.

A format is a value: what it states is all that any executor knows of it. Its numbers follow one scheme, so that a new
format is one class that states its own:

    amax   the largest absolute value of a block, in float32
    scale  what a code is multiplied with to decode it, from `max(amax, floor)`
    code   `x / scale`, by one of three formulas that differ in the last bit, clamped to the largest code, then cast

Float32 subnormals count as signed zeros, of values and of scales (XLA flushes them on CPU). A block whose scale would
be zero or not finite has the scale 1. Values are clamped before the cast: no finite value becomes NaN. NaN and infinity
in a block are refused: their bits are larger than those of any finite number, so `amax` shows them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np

from shardfly_jax.sharding import format_checks
from shardfly_jax.sharding.errors import LanguageError
from shardfly_jax.sharding.formats import flush, np_dtype

Formula = Literal["reciprocal", "divide", "factor"]
Rounding = Literal["ceil", "floor"]
ScaleKind = Literal["float32", "power_of_two", "e8m0"]
Scope = Literal["block", "row", "part", "rank", "tensor"]

BIAS = 127
"""Of the exponent of float32, and of E8M0."""
FLOAT4 = "float4_e2m1fn"
"""The dtype of codes that take half a byte: 0, 0.5, 1, 1.5, 2, 3, 4 and 6, and their negatives."""
FLOAT4_FIRST = tuple(
    int(np.float32(middle).view(np.uint32)) + (k % 2 == 0)
    for k, middle in enumerate((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5))
)
"""Bits of the least float32 that rounds to each of its numbers but zero: ties go to even codes."""
E8M0_LARGEST = 2 * BIAS - 1
"""The largest byte that is used, so that the reciprocal of a scale is never subnormal."""
LARGEST_FACTOR = 2.0 ** (E8M0_LARGEST - BIAS)
"""The largest number whose reciprocal is not subnormal, so that the scale of a factor is never zero."""

ROUNDS_AT_1_75 = 1 << 21
"""Added to the bits of a float32, a quarter of its leading digit: from 1.75 on, its exponent rises by one."""

_REGISTERED: dict[str, type[Format]] = {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
    """Base of all formats. A subclass states the rest.

    Attributes:
      codes: Dtype of the codes, one of `format_checks.LARGEST`; two of `float4_e2m1fn` share a byte (see `pack`).
      largest: The largest code.
      divisor: `scale = max(amax, floor) / divisor`; at least 4, so that no reciprocal of a scale is subnormal.
      floor: The least `amax` that counts; 0 for none. The rounding `floor` of powers of two has none.
      formula: `reciprocal`: `x * (1 / scale)`; `divide`: `x / scale`, the same where scales are powers of two;
        `factor`: `x * (divisor / amax)`, and the scale is the reciprocal of that factor; both are 1 where that is
        subnormal. Every operation is rounded to float32 by itself.
      scale: `float32`; `power_of_two`: a power of two, kept as float32; `e8m0`: the same as a byte, its exponent plus
        127.
      rounding, shift, carry: How a scale becomes a power of two: `ceil`, up from `max(amax, floor) / divisor`; `floor`,
        the exponent of amax less `shift`, once `carry` has been added to the bits of amax. With `ceil` neither shift
        nor carry may be given, as nothing would come of them.
      zero_exponent: Plus 127, of a block whose scale is zero before it is rounded up.
    """

    codes: ClassVar[str] = "float8_e4m3fn"
    largest: ClassVar[float] = 448.0
    divisor: ClassVar[float] = 448.0
    rounding: ClassVar[Rounding] = "ceil"
    shift: ClassVar[int] = 0
    carry: ClassVar[int] = 0
    zero_exponent: ClassVar[int] = BIAS
    floor: float = 0.0
    formula: Formula = "reciprocal"
    scale: ScaleKind = "float32"

    def __init_subclass__(cls) -> None:
        _REGISTERED[cls.full_name()] = cls

    @classmethod
    def full_name(cls) -> str:
        """By which plan files name the class."""
        return f"{cls.__module__}.{cls.__qualname__}"

    @property
    def constants(self) -> dict[str, str | float]:
        """What its class states, and plan files repeat, so that nobody runs a plan with another class of its name."""
        kinds = {
            "codes": str, "largest": float, "divisor": float, "rounding": str, "shift": int, "carry": int,
            "zero_exponent": int,
        }  # fmt: skip
        return {name: kind(getattr(self, name)) for name, kind in kinds.items()}

    def __post_init__(self) -> None:
        name = type(self).__name__
        format_checks.codes(name, self.codes, self.largest)
        format_checks.block(name, self.block, self.per_byte)
        format_checks.real(f"divisor of class {name!r}", self.divisor, format_checks.LEAST_DIVISOR)
        format_checks.whole(f"zero_exponent of class {name!r}", self.zero_exponent, 0, E8M0_LARGEST)
        format_checks.choice("rounding", self.rounding, ("ceil", "floor"))
        format_checks.choice("formula", self.formula, ("reciprocal", "divide", "factor"))
        format_checks.choice("scale", self.scale, ("float32", "power_of_two", "e8m0"))
        format_checks.whole("shift", self.shift, 0, 15)
        format_checks.whole("carry", self.carry, 0, (1 << 23) - 1)
        rounds_down = self.scale != "float32" and self.rounding == "floor"
        self._keep("floor", format_checks.floor(self.floor, self.divisor, not rounds_down))
        fields = {field.name for field in dataclasses.fields(self)}
        for name in ("shift", "carry") if self.rounding == "ceil" else ():
            unused = getattr(type(self) if name in fields else Format, name)  # the default, or what a class states
            format_checks.of_floor(name, getattr(self, name), unused)
        if self.scale != "float32" and self.formula == "factor":
            raise LanguageError("format: a factor is no power of two. Use the formula 'reciprocal'.")

    def _keep(self, field: str, value: float) -> None:
        """Sets a field to the plain value that a check has made of what was given."""
        object.__setattr__(self, field, value)

    @property
    def scope(self) -> Scope:
        """Which elements share a scale: a `block` or `row` of the tensor, one `part` of a fused tensor on all ranks
        together, what one `rank` holds, or the whole `tensor`."""
        return "block"

    @property
    def block(self) -> tuple[int | None, int | None]:
        """Rows and columns of a block, on the last two axes; None is the whole axis (cut by the scope).

        Raises:
          LanguageError: The class does not say.
        """
        raise LanguageError(
            f"format: class {type(self).__name__!r} states no block. Give it a property `block`: rows and columns."
        )

    @property
    def scale_dtype(self) -> str:
        """Dtype of the stored scales."""
        return "uint8" if self.scale == "e8m0" else "float32"

    @property
    def per_byte(self) -> int:
        """Neighbours on the last axis whose codes share a stored element; 1 where each has its own."""
        return 2 if self.codes == FLOAT4 else 1

    @property
    def stored(self) -> str:
        """Dtype of the targets that hold the codes."""
        return "uint8" if self.per_byte > 1 else self.codes

    def stored_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the stored codes of values of a shape.

        Raises:
          LanguageError: The last axis ends inside a byte.
        """
        if self.per_byte > 1 and shape[-1] % self.per_byte:
            raise LanguageError(
                f"quantize: the last axis has {shape[-1]} columns, but {type(self).__name__} puts {self.per_byte} "
                "codes into each byte. Pad it to an even number."
            )
        return (*shape[:-1], shape[-1] // self.per_byte)

    # The meaning, in NumPy

    def scales(self, amax: np.ndarray) -> np.ndarray:
        """The stored scales of blocks.

        Args:
          amax: float32, finite, not negative.
        """
        if self.scale == "e8m0":
            return self.exponents(amax).astype(np.uint8)
        return self._steps(amax)

    def exponents(self, amax: np.ndarray) -> np.ndarray:
        """The exponents of power-of-two scales plus 127, int32."""
        if self.rounding == "floor":
            bits = np.maximum(np.asarray(amax, np.float32), np.finfo(np.float32).tiny).view(np.uint32)
            bits = bits + np.uint32(self.carry)
            return np.clip((bits >> 23).astype(np.int32) - self.shift, 0, E8M0_LARGEST)
        bits = self._quotient(amax).view(np.uint32)
        exponent = (bits >> 23).astype(np.int32) + ((bits & 0x7FFFFF) != 0)
        return np.where(bits == 0, self.zero_exponent, np.minimum(exponent, E8M0_LARGEST)).astype(np.int32)

    def _quotient(self, amax: np.ndarray) -> np.ndarray:
        floored = np.maximum(np.asarray(amax, np.float32), np.float32(self.floor))
        return flush(floored / np.float32(self.divisor))

    def _steps(self, amax: np.ndarray) -> np.ndarray:
        """Scales as float32 numbers."""
        one = np.float32(1)
        if self.scale != "float32":
            return (self.exponents(amax).astype(np.uint32) << 23).view(np.float32)
        if self.formula == "factor":
            return one / self.factors(amax)
        quotient = self._quotient(amax)
        return np.where(quotient == 0, one, quotient)

    def factors(self, amax: np.ndarray) -> np.ndarray:
        """What values are multiplied with, float32; not used by the formula `divide` of float32 scales."""
        one = np.float32(1)
        if self.scale != "float32":  # exact, also where the scale is subnormal
            return ((2 * BIAS - self.exponents(amax)).astype(np.uint32) << 23).view(np.float32)
        if self.formula == "factor":
            floored = np.maximum(flush(np.asarray(amax, np.float32)), np.float32(self.floor))
            with np.errstate(divide="ignore", over="ignore"):
                factor = np.float32(self.divisor) / floored
            return np.where(factor <= LARGEST_FACTOR, factor, one)
        return one / self._steps(amax)

    @property
    def divides(self) -> bool:
        """Whether values are divided by the scale of their block, instead of multiplied with its factor."""
        return self.formula == "divide" and self.scale == "float32"

    def encode(self, x: np.ndarray, amax: np.ndarray) -> np.ndarray:
        """Codes, one for each value; `pack` makes of them what is stored.

        Args:
          x: Finite values of a dtype that float32 holds.
          amax: float32, of each element's block; broadcasts against `x`.
        """
        values = flush(x.astype(np.float32))
        values = values / self._steps(amax) if self.divides else values * self.factors(amax)
        values = np.clip(values, np.float32(-self.largest), np.float32(self.largest))
        target = np_dtype(self.codes)
        return (np.rint(values) if target.kind == "i" else values).astype(target)

    def pack(self, codes: np.ndarray, axis: int = -1) -> np.ndarray:
        """Codes as they are stored: of two neighbours on an axis, the first one in the low half of a byte."""
        if self.per_byte == 1:
            return codes
        bits = codes.view(np.uint8)
        low, high = (bits.take(range(half, bits.shape[axis], 2), axis) for half in (0, 1))
        return low | high << 4

    def unpack(self, stored: np.ndarray) -> np.ndarray:
        """The inverse of `pack` on the last axis."""
        if self.per_byte == 1:
            return stored
        halves = np.stack([stored & 15, stored >> 4], axis=-1)
        return halves.reshape(*stored.shape[:-1], -1).view(np_dtype(self.codes))

    def decode(self, codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
        """float32 values of codes.

        Args:
          codes: As `encode` and `unpack` give them.
          scales: The stored ones of their blocks; broadcast against `codes`.
        """
        if self.scale == "e8m0":
            steps = np.ldexp(np.float32(1), scales.astype(np.int32) - BIAS)
        else:
            steps = scales.astype(np.float32)
        return codes.astype(np.float32) * steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fp8Block(Format):
    """e4m3 codes in blocks of rows x columns (DeepSeek-V3, Qwen3-FP8); edge blocks are what is left of them.

    Scales: [..., ceil(rows / n), ceil(columns / m)]; leading axes (experts) have a grid of their own each. Padding with
    zeros, as engines do, changes no scale. A block of zeros has the scale `floor / 448`.
    """

    rows: int = 128
    columns: int = 128
    floor: float = 1e-4

    def __post_init__(self) -> None:
        Format.__post_init__(self)
        self._keep("rows", format_checks.whole("rows", self.rows, 1))
        self._keep("columns", format_checks.whole("columns", self.columns, 1))

    @property
    def block(self) -> tuple[int | None, int | None]:
        return self.rows, self.columns


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fp8Channel(Format):
    """e4m3 codes with a scale per output channel, a row: [..., N, 1].

    `local` takes the maximum over what one rank holds of a row, as engines do that quantize after loading, and gives
    [..., N, cuts of the columns]; without it the whole row counts, as in a checkpoint that was quantized before.
    A row of zeros has the scale `floor / 448`, or 1 without a floor.
    """

    local: bool = False

    def __post_init__(self) -> None:
        Format.__post_init__(self)
        self._keep("local", format_checks.flag("local", self.local))

    @property
    def scope(self) -> Scope:
        return "rank" if self.local else "row"

    @property
    def block(self) -> tuple[int | None, int | None]:
        return 1, None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Int8Channel(Fp8Channel):
    """int8 codes from -127 to 127 with a scale per output channel, a row, `amax / 127`: [..., N, 1].

    Rounded to the nearest, ties to even. A row of zeros has the scale 1. vLLM's online int8 experts use this formula
    (`online/int8.py`), but in the weights' own dtype; here it is computed in float32.
    """

    codes: ClassVar[str] = "int8"
    largest: ClassVar[float] = 127.0
    divisor: ClassVar[float] = 127.0
    formula: Formula = "divide"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fp8Tensor(Format):
    """e4m3 codes with one scale for many rows and columns; leading axes (experts) have scales of their own.

    Attributes:
      per: `tensor`: one scale, [..., 1, 1]. `part`: one for each part of a fused tensor, on all ranks together,
        [..., parts, 1] if rows are fused. `rank`: one for what each rank holds, [..., cuts of rows, cuts of columns]:
        it changes with the number of ranks. Without a floor, zeros have the scale 1.
    """

    per: Literal["tensor", "part", "rank"] = "tensor"

    def __post_init__(self) -> None:
        Format.__post_init__(self)
        format_checks.choice("per", self.per, ("tensor", "part", "rank"))

    @property
    def scope(self) -> Scope:
        return self.per

    @property
    def block(self) -> tuple[int | None, int | None]:
        return None, None


@dataclasses.dataclass(frozen=True, kw_only=True)
class MxBlock(Format):
    """Codes in blocks of 1 x 32 with E8M0 scales, a byte each: [..., N, ceil(K / 32)].

    Attributes:
      rounding: `floor`: the scale is `2^(floor(log2(amax)) - shift)`; `ceil`: `amax / divisor`, up to a power of two.
      shift: Of `floor`.

    A block of zeros has the byte of the smallest normal float32: 0, or 1 with `floor` and no shift.
    """

    zero_exponent: ClassVar[int] = 0
    rounding: Rounding = "floor"  # type: ignore[misc]
    shift: int = 0  # type: ignore[misc]
    scale: ScaleKind = "e8m0"

    def __post_init__(self) -> None:
        Format.__post_init__(self)
        format_checks.choice("scale of MX blocks", self.scale, ("e8m0",))
        self._keep("shift", int(self.shift))

    @property
    def block(self) -> tuple[int | None, int | None]:
        return 1, 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class MxFp8(MxBlock):
    """e4m3 codes in blocks of 1 x 32 with E8M0 scales.

    Attributes:
      shift: 8 as OCP's "Microscaling Formats (MX) 1.0", 6.3, has it for e4m3; 0 puts the largest value into [1, 2).
    """

    shift: int = 8  # type: ignore[misc]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MxFp4(MxBlock):
    """e2m1 codes in blocks of 1 x 32 with E8M0 scales; two codes share a byte: uint8 [..., N, K / 2].

    The value with the even column is in the low half of its byte, as gpt-oss' checkpoints, triton_kernels
    (`numerics_details/mxfp_details/_downcast_to_mxfp.py`) and compressed-tensors (`pack_fp4_to_uint8`) have it. Rounded
    to the nearest, ties to even, clamped to 6; zeros and what rounds to them keep their sign.

    Attributes:
      shift: 2 as OCP's "Microscaling Formats (MX) 1.0", 6.3, has it for e2m1.
      carry: 0, or 2^21, so that an amax of 1.75 times a power of two or more counts as the next one.
    """

    codes: ClassVar[str] = FLOAT4
    largest: ClassVar[float] = 6.0
    divisor: ClassVar[float] = 6.0
    shift: int = 2  # type: ignore[misc]
    carry: int = 0  # type: ignore[misc]

    def __post_init__(self) -> None:
        MxBlock.__post_init__(self)
        if self.carry not in (0, ROUNDS_AT_1_75):
            raise LanguageError(f"format: carry is {self.carry}, but 0 and 2^21 are known. Use one.")
        self._keep("carry", int(self.carry))


def format_class(name: str) -> type[Format]:
    """The format class of a name, for reading plans.

    Raises:
      KeyError: No module that was imported defines it.
    """
    return _REGISTERED[name]
