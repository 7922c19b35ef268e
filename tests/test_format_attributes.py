"""Whatever a format states has a meaning: another value changes codes or scales, or is refused."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import shardfly_jax as sf
from shardfly_jax import formats
from shardfly_jax.sharding.quantization import Format

CLASSES = (
    formats.Fp8Block, formats.Fp8Channel, formats.Int8Channel, formats.Fp8Tensor, formats.MxFp8, formats.MxFp4,
)  # fmt: skip
FIELDS: dict[str, tuple[Any, ...]] = {
    "floor": (0.0, 2.0, 1e-4, 1e-10, 1e-37, 1e-40),
    "formula": ("reciprocal", "divide", "factor"),
    "scale": ("float32", "power_of_two", "e8m0"),
    "rounding": ("ceil", "floor"),
    "shift": (0, 1, 2, 8, 15),
    "carry": (0, 1 << 21),
    "rows": (128, 1, 64),
    "columns": (128, 2, 64),
    "local": (False, True),
    "per": ("tensor", "part", "rank"),
}
"""Values of every field of a format."""
CONSTANTS: dict[str, Any] = {
    "codes": "float8_e5m2", "largest": 5.0, "divisor": 5.0, "rounding": "floor", "shift": 3, "carry": 1 << 21,
    "zero_exponent": 100,
}  # fmt: skip
"""What no class states, by constant."""


def names_of(of: type[Format]) -> list[str]:
    return [field.name for field in dataclasses.fields(of)]


def made(of: type[Format], **stated: Any) -> Format | None:
    """A format; None where it is refused."""
    try:
        return of(**stated)
    except sf.LanguageError:
        return None


def settings_of(of: type[Format]) -> Iterator[dict[str, Any]]:
    """What instances of a class may be told, but for the fields that say nothing of numbers."""
    names = [name for name in names_of(of) if name in ("floor", "formula", "scale", "rounding", "shift", "carry")]
    for values in itertools.product(*({*FIELDS[name][:3], getattr(of, name)} for name in names)):
        stated = dict(zip(names, values, strict=True))
        if made(of, **stated) is not None:
            yield stated


@functools.cache
def probe() -> tuple[np.ndarray, np.ndarray]:
    """Blocks of values [blocks, 64] and their maxima [blocks, 1]: zeros, and all magnitudes that float32 has."""
    rng = np.random.default_rng(0)
    amax = np.float32(np.exp2(np.concatenate([rng.uniform(-128, 127.9, 6000), rng.uniform(-40, 20, 6000)])))
    amax[:2] = 0, 1e-42
    x = (rng.uniform(-1, 1, (len(amax), 64)).astype(np.float32) * amax[:, None]).astype(ml_dtypes.bfloat16)
    x[2:, 0] = amax[2:]
    return x, np.abs(x.astype(np.float32)).max(1, keepdims=True)


@functools.lru_cache(maxsize=200)
def meaning(f: Format) -> tuple[Any, ...]:
    """All that an executor makes of a format."""
    x, amax = probe()
    scales = f.scales(amax)
    return f.scope, f.block, scales.dtype, scales.tobytes(), f.stored, f.encode(x, amax).tobytes()


@pytest.mark.parametrize("of", CLASSES)
def test_another_value_of_a_field_changes_the_meaning_or_is_refused(of: type[Format]) -> None:
    for stated in settings_of(of):
        base = of(**stated)
        for name in names_of(of):
            for value in FIELDS[name]:
                other = made(of, **{**stated, name: value})
                if value == getattr(base, name) or other is None:
                    continue
                if name == "formula" and base.scale != "float32":
                    assert meaning(other) == meaning(base), "a quotient by a power of two is a product"
                else:
                    assert meaning(other) != meaning(base), (base, other)


@pytest.mark.parametrize("constant", CONSTANTS)
@pytest.mark.parametrize("of", CLASSES)
def test_a_constant_that_no_instance_of_a_class_uses_is_refused(of: type[Format], constant: str) -> None:
    """Of a class for which it is a constant. Instances may leave it unused that another field makes use of."""
    if constant in names_of(of):
        return
    mine = type("Mine", (of,), {constant: CONSTANTS[constant]})
    both = [(made(mine, **stated), of(**stated)) for stated in settings_of(of)]
    pairs = [(other, base) for other, base in both if other is not None]
    assert not pairs or any(meaning(other) != meaning(base) for other, base in pairs)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: formats.MxFp8(floor=1e-4), r"floor is 0.0001, but with rounding 'floor' .* Set it to 0, or"),
        (lambda: formats.MxFp4(floor=1e-30), "floor is 1e-30"),
        (lambda: formats.MxFp8(rounding="ceil", shift=4), "shift is 4, but rounding 'ceil' has none. Leave it out, or"),
        (lambda: formats.MxFp4(rounding="ceil", shift=0), "shift is 0, but rounding 'ceil'"),
        (lambda: formats.MxFp4(rounding="ceil", carry=1 << 21), "carry is 2097152, but rounding 'ceil'"),
        (
            lambda: formats.Fp8Block(floor=1e-37),
            r"floor is 1e-37, but less than 5.26\d*e-36 .* Set it to 0, or to more",
        ),
        (lambda: formats.Fp8Channel(floor=1e-45, formula="factor"), "floor is 1e-45, but"),
    ],
)
def test_what_a_formula_would_ignore_is_refused_with_the_reason(wrong: Any, message: str) -> None:
    with pytest.raises(sf.LanguageError, match=message):
        wrong()


def test_the_least_floor_counts() -> None:
    least = 448 * 2.0**-126
    zero = np.zeros(1, np.float32)
    assert formats.Fp8Block(floor=least).scales(zero) == 2.0**-126
    assert formats.Fp8Block(floor=least, formula="factor").scales(zero) == 2.0**-126
    assert made(formats.Fp8Block, floor=float(np.nextafter(np.float32(least), np.float32(0)))) is None
