"""How values are encoded and converted: dtypes, conversion steps, and their meaning in NumPy.

A *conversion* is what happens to the elements of a move between being read and being written: a chain of steps over
plain dtypes. Each step has one meaning, written here in NumPy, which every executor must match bit for bit:

* `Cast`: round to nearest even.
* NaN that is cast or computed with is NaN for every executor, but of a sign and payload that the hardware chooses:
  there, and only there, executors may differ in bits.
* `MulAdd`, `Divide`: computed in float32, each operation rounded by itself (never fused), float32 subnormals of inputs
  and results taken as signed zero (XLA flushes them on CPU), the result rounded back to the dtype it came from.
* `Fill`: a constant; what follows in the chain applies to it as to data.
* `Amax`, `ToScale`, `Encode`: quantization, see `quantization`. They look at blocks of a move.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from shardfly_jax.sharding.errors import LanguageError, NotFinite

if TYPE_CHECKING:
    from shardfly_jax.sharding.quantization import Format

_TINY = np.finfo(np.float32).tiny


def dtype_name(dtype: Any) -> str:
    """The canonical name of anything NumPy or ml_dtypes takes as a dtype, e.g. `bfloat16`.

    Raises:
      LanguageError: It is not a dtype of fixed size, or a complex or structured one.
    """
    try:
        if dtype is None:
            raise TypeError("NumPy takes None for float64")
        resolved = np.dtype(
            getattr(ml_dtypes, dtype) if isinstance(dtype, str) and hasattr(ml_dtypes, dtype) else dtype
        )
    except TypeError as error:
        raise LanguageError(f"dtype: {dtype!r} is not a dtype. Use a name such as 'bfloat16' or 'float32'.") from error
    if resolved.kind not in "biufV" or resolved.itemsize == 0 or resolved.type is np.void:
        raise LanguageError(f"dtype: {dtype!r} is neither a real, an integer nor a boolean dtype.")
    if _bits(resolved) < 8:
        raise LanguageError(
            f"dtype: {dtype!r} has less than a byte per element, which is not supported. Pack it into uint8."
        )
    return resolved.name


def _bits(dtype: np.dtype[Any]) -> int:
    if dtype.kind == "b":
        return 8
    return int((ml_dtypes.finfo if _is_float(dtype) else ml_dtypes.iinfo)(dtype).bits)


def np_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype of a canonical name."""
    return np.dtype(getattr(ml_dtypes, name, name))


def itemsize(name: str) -> int:
    """Bytes per element of a canonical dtype name."""
    return np_dtype(name).itemsize


@functools.cache
def is_narrowing(source: str, target: str) -> bool:
    """Whether some finite value of `source` cannot be represented in `target`."""
    if source == target:
        return False
    a, b = np_dtype(source), np_dtype(target)
    if _is_float(a) and _is_float(b):
        fa, fb = ml_dtypes.finfo(a), ml_dtypes.finfo(b)
        return bool(fb.nmant < fa.nmant or fb.maxexp < fa.maxexp or fb.minexp - fb.nmant > fa.minexp - fa.nmant)
    if _is_float(a):
        return True
    if _is_float(b):
        bits = 1 if a.kind == "b" else ml_dtypes.iinfo(a).bits - (ml_dtypes.iinfo(a).min < 0)
        return bool(bits > ml_dtypes.finfo(b).nmant + 1)
    return not np.can_cast(a, b)


FLOAT_TO_INT = "what a float outside an integer's range becomes is not defined. Keep it a float, or convert it in jax"


def number_text(value: float) -> str:
    """A number as text that keeps the sign of zero and every digit of integers."""
    if not isinstance(value, int | float | np.number | np.bool_ | ml_dtypes.bfloat16):
        raise LanguageError(f"pad: the value {value!r} is a {type(value).__name__}, but a number is needed.")
    whole = isinstance(value, int | np.integer | np.bool_)
    return repr(int(value)) if whole else repr(float(value))


def number(text: str) -> float:
    """The number that `number_text` wrote."""
    return int(text) if text.lstrip("-").isdigit() else float(text)


def holds(dtype: str, value: float) -> bool:
    """Whether a constant keeps its value in a dtype, but for rounding of floats."""
    resolved = np_dtype(dtype)
    if _is_float(resolved):
        return True
    if resolved.kind == "b":
        return value in (0, 1)
    if isinstance(value, float) and not value.is_integer():  # nan and inf are none
        return False
    info = ml_dtypes.iinfo(resolved)
    return bool(info.min <= value <= info.max)


def _is_float(dtype: np.dtype[Any]) -> bool:
    try:
        ml_dtypes.finfo(dtype)
    except ValueError:
        return False
    return True


def is_float(name: str) -> bool:
    """Whether a canonical dtype name is a floating-point one."""
    return _is_float(np_dtype(name))


@dataclasses.dataclass(frozen=True, slots=True)
class Cast:
    """Round to `dtype`."""

    dtype: str

    def result_dtype(self, dtype: str) -> str:
        return self.dtype

    def apply(self, x: np.ndarray) -> np.ndarray:
        target = np_dtype(self.dtype)
        if x.dtype == target:
            return x
        with np.errstate(over="ignore", invalid="ignore"):
            return x.astype(target)


@dataclasses.dataclass(frozen=True, slots=True)
class MulAdd:
    """`x * factor + add` in float32, two roundings."""

    factor: float
    add: float

    def result_dtype(self, dtype: str) -> str:
        return dtype

    def apply(self, x: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore", invalid="ignore"):
            y = flush(flush(x.astype(np.float32)) * np.float32(self.factor))
            if self.add:
                y = flush(y + np.float32(self.add))
            return y.astype(x.dtype)


@dataclasses.dataclass(frozen=True, slots=True)
class Divide:
    """`x / divisor` in float32: a true division, not a product with the reciprocal."""

    divisor: float

    def result_dtype(self, dtype: str) -> str:
        return dtype

    def apply(self, x: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore", invalid="ignore"):
            return flush(flush(x.astype(np.float32)) / np.float32(self.divisor)).astype(x.dtype)


@dataclasses.dataclass(frozen=True, slots=True)
class Fill:
    """A constant of `dtype`, as text; always the first step of a chain that reads no source."""

    value: str
    dtype: str

    def result_dtype(self, dtype: str) -> str:
        return self.dtype

    def apply(self, x: np.ndarray) -> np.ndarray:
        return np.full(x.shape, number(self.value), np_dtype(self.dtype))


@dataclasses.dataclass(frozen=True, slots=True)
class Amax:
    """The largest absolute value of each block, as the bits of a float32: those of NaN and infinity are largest."""

    def result_dtype(self, dtype: str) -> str:
        return "uint32"

    def apply(self, x: np.ndarray, within: tuple[int, ...]) -> np.ndarray:
        """Of values, [...]; the axes `within` a block come back with length 1."""
        return flush(np.abs(x.astype(np.float32))).view(np.uint32).max(axis=within, keepdims=True)


NOT_FINITE = 0x7F800000
"""Bits of infinity: those of finite absolute values are smaller, those of NaN larger."""


def check_finite(amax: np.ndarray) -> None:
    """Raises:
    NotFinite: Some block's `amax` bits are those of NaN or infinity.
    """
    if (amax >= NOT_FINITE).any():
        raise NotFinite("quantize: the values hold NaN or infinity, but a scale needs finite values.")


@dataclasses.dataclass(frozen=True, slots=True)
class ToScale:
    """From the bits of `amax` to the stored scale of a format."""

    format: Format

    def result_dtype(self, dtype: str) -> str:
        return self.format.scale_dtype

    def apply(self, x: np.ndarray) -> np.ndarray:
        check_finite(x)
        return self.format.scales(x.view(np.float32))


@dataclasses.dataclass(frozen=True, slots=True)
class Encode:
    """From values to codes of a format; always the last step of its chain."""

    format: Format

    def result_dtype(self, dtype: str) -> str:
        return self.format.stored

    def apply(self, x: np.ndarray, amax: np.ndarray, packed: int = -1) -> np.ndarray:
        """Codes of values, [...]; `amax` holds the bits for each element, or broadcasts against them.

        Where codes share a byte, they are those of neighbours on the axis `packed`, which becomes shorter.
        """
        check_finite(amax)
        return self.format.pack(self.format.encode(x, amax.view(np.float32)), packed)


Step = Cast | MulAdd | Divide | Fill | Amax | ToScale | Encode


def flush(x: np.ndarray) -> np.ndarray:
    """float32 values with subnormals as zeros of their sign."""
    subnormal = (np.abs(x) < _TINY) & (x != 0)
    return np.where(subnormal, np.copysign(np.float32(0), x), x) if subnormal.any() else x


@dataclasses.dataclass(frozen=True, slots=True)
class Conversion:
    """What happens to the elements of one move: a chain of steps from `source` dtype to `target` dtype.

    An empty chain moves bits. Chains with `Amax` or `Encode` look at blocks: what a block is, the move says.
    """

    source: str
    steps: tuple[Step, ...]
    target: str

    @property
    def is_bits(self) -> bool:
        """Whether the elements are copied unchanged."""
        return not self.steps

    @property
    def reduces(self) -> bool:
        """Whether one element is written for each block that is read."""
        return any(isinstance(step, Amax) for step in self.steps)

    @property
    def encodes(self) -> Format | None:
        """The format of the codes that come out; None if none do."""
        last = self.steps[-1] if self.steps else None
        return last.format if isinstance(last, Encode) else None

    def values(self, x: np.ndarray) -> np.ndarray:
        """What is quantized: the steps before `Amax` or `Encode`."""
        for step in self.steps:
            if isinstance(step, Amax | Encode):
                break
            x = step.apply(x)
        return x

    def apply(
        self, x: np.ndarray, within: tuple[int, ...] = (), amax: np.ndarray | None = None, packed: int = -1
    ) -> np.ndarray:
        """Converts an array.

        Args:
          x: Of dtype `source` and any shape; only the shape counts for a fill.
          within: Axes inside a block.
          amax: Bits for each element, where the maxima of its blocks are known; else they are those of `x`.
          packed: Axis along which codes share a byte, if they do.

        Raises:
          NotFinite: A block to be quantized holds NaN or infinity.
        """
        for step in self.steps:
            match step:
                case Amax():
                    x = step.apply(x, within)
                case Encode():
                    x = step.apply(x, Amax().apply(x, within) if amax is None else amax, packed)
                case _:
                    x = step.apply(x)
        return x

    def describe(self) -> str:
        """For people: `bits`, or the steps in order."""
        if self.is_bits:
            return f"bits({self.target})"
        return " -> ".join([self.source, *(_describe(step) for step in self.steps)])


def _describe(step: Step) -> str:
    match step:
        case Cast(dtype):
            return dtype
        case MulAdd(factor, add):
            return f"*{factor:g}{f'{add:+g}' if add else ''}"
        case Divide(divisor):
            return f"/{divisor:g}"
        case Fill(value, dtype):
            return f"fill({value}, {dtype})"
        case Amax():
            return "amax"
        case ToScale(format):
            return f"scale of {type(format).__name__}"
        case Encode(format):
            return type(format).__name__


@functools.lru_cache(maxsize=4096)
def conversion(source: str, steps: tuple[Step, ...], target: str) -> Conversion:
    """The chain `steps` on data of dtype `source`, ending in dtype `target`; casts that change nothing are left out."""
    kept: list[Step] = []
    dtype = source
    for step in (*steps, Cast(target)):
        if isinstance(step, Cast) and step.dtype == dtype:
            continue
        kept.append(step)
        dtype = step.result_dtype(dtype)
    return Conversion(source, tuple(kept), target)
