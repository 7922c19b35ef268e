"""What XLA makes of a conversion that quantizes: nothing is divided element by element."""

from __future__ import annotations

import re

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

import shardfly_jax as sf
from shardfly_jax import formats
from shardfly_jax.executors import convert
from shardfly_jax.sharding.formats import Encode, conversion
from shardfly_jax.sharding.grids import PLAIN, grid_shape
from shardfly_jax.today import make_conversion

SHAPE = (256, 384)
FORMATS = [
    formats.vllm_fp8_block(), formats.Fp8Block(formula="divide", rows=100), formats.Fp8Channel(),
    formats.vllm_fp8_tensor(), formats.sglang_fp8_tensor(), formats.Int8Channel(), formats.nemo_fp8_block(),
    formats.vllm_mxfp8_round_up(),
]  # fmt: skip


def divided(program: jax.stages.Compiled) -> list[int]:
    """How often an optimized program divides, for each of its divisions, the most last.

    A loop fusion computes what it holds once for each element of its result, so that counts, too.
    """
    found, result = [], 0
    for line in program.as_text().splitlines():
        if fusion := re.match(r"%?\S+ \(.*\) -> \w+\[([\d,]*)\]\S* {", line):
            result = elements(fusion[1])
        elif line.startswith("ENTRY"):
            result = 0
        elif division := re.search(r"= f\d\d\[([\d,]*)\]\S* divide\(", line):
            found.append(max(elements(division[1]), result))
    return sorted(found)


def elements(shape: str) -> int:
    """Of a shape as HLO writes it."""
    return int(np.prod([int(n) for n in shape.split(",") if n]))


@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f"{type(f).__name__}-{f.formula}-{f.scale}")
def test_a_jitted_conversion_divides_once_per_block(format: formats.Format) -> None:
    place = SingleDeviceSharding(jax.devices()[0])
    shape = SHAPE[::-1]
    n_blocks = int(np.prod(grid_shape(format, shape, PLAIN)))
    params = {"w": jax.ShapeDtypeStruct(SHAPE, "bfloat16", sharding=place)}
    targets = {
        "w": jax.ShapeDtypeStruct(format.stored_shape(shape), format.stored, sharding=place),
        "s": jax.ShapeDtypeStruct(grid_shape(format, shape, PLAIN), format.scale_dtype, sharding=place),
    }
    mapping = sf.Mapping({"w": sf.src("w").rearrange("i o -> o i").quantize(format), "s": sf.scale_of("w")})
    convert_all, _ = make_conversion(sf.make_plan(params, targets, mapping))
    found = divided(jax.jit(convert_all).lower(params).compile())
    assert found
    assert found[-1] <= n_blocks


@pytest.mark.parametrize("given", [False, True], ids=["own", "given"])
@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f"{type(f).__name__}-{f.formula}-{f.scale}")
def test_the_portable_executors_program_divides_once_per_block(format: formats.Format, given: bool) -> None:
    """Of blocks [16, 8] with 128 values each, whose maxima are its own or given, one for each block."""
    rule = conversion("bfloat16", (Encode(format),), format.stored)
    x = jax.ShapeDtypeStruct((16, 8, 128), "bfloat16")
    amax = jax.ShapeDtypeStruct((16, 8, 1), "uint32") if given else None

    def encoded(x: jax.Array, amax: jax.Array | None) -> jax.Array:
        return convert.apply(rule, x, (2,), amax)

    found = divided(jax.jit(encoded, compiler_options=convert.EXACT).lower(x, amax).compile())
    assert found
    assert found[-1] <= 16 * 8


def test_quotients_next_to_midpoints_are_rounded_as_numpy_divides(rng: np.random.Generator) -> None:
    """Of two numbers of 24 bits, as near to 25 bits as they come: where a product that is off by little would show."""
    divisors = rng.integers(1 << 23, 1 << 24, 1 << 18).astype(np.float64)
    middles = rng.integers(1 << 24, 1 << 25, 1 << 18) | 1
    near = np.rint(middles * divisors / 2**25) + rng.integers(-1, 2, 1 << 18)
    fits = near < 1 << 24
    assert fits.sum() > 1 << 16
    x, by = near[fits].astype(np.float32), divisors[fits].astype(np.float32)
    have = jax.jit(lambda x, by: convert._times_reciprocal(x, convert._reciprocal(by), lambda n: n))(x, by)
    assert np.asarray(have).tobytes() == (x / by).tobytes()
