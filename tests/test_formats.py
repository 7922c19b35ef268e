"""Quantized formats against float64 arithmetic and ml_dtypes' casts, for every class of values."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest
from random_quantized import Fp4Tensor

import shardfly_jax as sf
from shardfly_jax import formats
from shardfly_jax.sharding.format_checks import LARGEST
from shardfly_jax.sharding.formats import np_dtype
from shardfly_jax.sharding.grids import block_indices, grid_runs, grid_shape, quantize
from shardfly_jax.sharding.quantization import Format, MxBlock, format_class

E4M3 = ml_dtypes.float8_e4m3fn
FLOAT4 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
TINY = float(np.finfo(np.float32).tiny)
PRESETS = [
    formats.vllm_fp8_block(), formats.sglang_fp8_block(), formats.slime_fp8_block(), formats.nemo_fp8_block(),
    formats.deepgemm_ue8m0(), formats.vllm_fp8_channel(), formats.vllm_fp8_tensor(), formats.sglang_fp8_tensor(),
    formats.ocp_mxfp8(), formats.vllm_mxfp8(), formats.vllm_mxfp8_round_up(), formats.Int8Channel(),
    formats.Fp8Block(rows=3, columns=5, scale="e8m0"), formats.Fp8Channel(floor=1e-6), formats.Fp8Tensor(),
    formats.ocp_mxfp4(), formats.triton_mxfp4(), formats.compressed_tensors_mxfp4(), Fp4Tensor(),
    Fp4Tensor(formula="divide"), Fp4Tensor(formula="factor"),
]  # fmt: skip
NAMES = [f"{type(f).__name__}-{k}" for k, f in enumerate(PRESETS)]


def rounded(x: float) -> float:
    """One float32 rounding of an exact (or float64-exact enough) number, subnormals as zero."""
    y = float(np.float32(x))
    return 0.0 if abs(y) < TINY else y


def scale_by_hand(f: Format, amax: float) -> tuple[float, float]:
    """Stored scale and the number by which values are multiplied (or, negative, divided)."""
    a = max(0.0 if amax < TINY else amax, float(np.float32(f.floor)))
    if isinstance(f, MxBlock):
        a = max(a, TINY)
        if f.rounding == "ceil":
            a = rounded(a / f.divisor)
            if a == 0:
                return 0, 2.0**127
        # exactly: powers of two and comparisons of float64 numbers that hold float32 ones
        e = -200
        while 2.0 ** (e + 1) <= a:
            e += 1
        e += 1.75 * 2.0**e <= a if f.carry else 0
        e = e + (2.0**e < a) if f.rounding == "ceil" else e - f.shift
        e = min(max(e, -127), 126)
        return e + 127, 2.0**-e
    if f.formula == "factor":
        factor = rounded(f.divisor / a) if a and f.divisor / a < 3.4028235e38 else 1.0
        return (rounded(1 / factor), factor) if rounded(1 / factor) else (1.0, 1.0)
    s = rounded(a / f.divisor)
    if f.scale == "float32":
        s = s or 1.0
        return s, (-s if f.formula == "divide" else rounded(1 / s))
    if s == 0:
        return (127 if f.scale == "e8m0" else 1.0), 1.0
    e = -126
    while 2.0**e < s:
        e += 1
    return (e + 127 if f.scale == "e8m0" else 2.0**e), 2.0**-e


def code_by_hand(f: Format, x: float, by: float) -> object:
    if abs(x) < TINY:
        x = float(np.copysign(0, x))
    y = float(np.float32(x / -by if by < 0 else x * by))  # a float64 product of float32 numbers is exact
    y = min(max(y, -f.largest), f.largest)
    if f.codes == "int8":
        return np.int8(round(y))  # Python rounds ties to even
    if f.codes == "float4_e2m1fn":  # the nearest number, of two the one with the even code; then the sign
        k = min(range(8), key=lambda k: (abs(FLOAT4[k] - abs(y)), k % 2))
        return np.uint8(k + 8 * (np.copysign(1, y) < 0))
    return np.float64(y).astype(E4M3)


def check_block(f: Format, values: np.ndarray) -> None:
    """One block, given as a row, against arithmetic by hand."""
    amax = float(np.max(np.abs(values.astype(np.float64)), initial=0.0))
    scale, by = scale_by_hand(f, amax)
    array = np.float32([amax])
    have = f.scales(array)
    assert have.dtype == np_dtype(f.scale_dtype)
    assert float(have[0]) == scale, (amax, have, scale)
    codes = f.encode(values, array)
    assert codes.dtype == np_dtype(f.codes)
    want = np.array([code_by_hand(f, float(x), by) for x in values])
    wrong = np.flatnonzero(codes.view(np.uint8) != want.view(np.uint8))
    assert not len(wrong), (values[wrong[0]], codes[wrong[0]], want[wrong[0]], scale)
    assert np.isfinite(codes.astype(np.float32)).all()


VALUES = {
    "zeros": np.zeros(32, np.float32),
    "negative zeros": np.full(32, -0.0, np.float32),
    "float32 denormals": np.float32([1e-40, -1e-45, 3e-39, -0.0] * 8),
    "normal numbers next to denormals": np.float32([1.2e-38, -1.5e-38, 1e-39, 0] * 8),
    "bfloat16 denormals": np.float32([1e-40, -3e-39] * 16).astype(ml_dtypes.bfloat16),
    "float16 denormals": np.float32([6e-8, -1e-6, 3e-5, 0] * 8).astype(np.float16),
    "one huge value": np.float32([3e38, *[1.0, -2.0, 1e30] * 10, 5]),
    "one huge value of bfloat16": np.float32([3.3e38, *[1.0] * 31]).astype(ml_dtypes.bfloat16),
    "edges of e4m3": np.float32([448, -448, 447.9, -447.9, 464, -464, 432, 2**-9, 2**-10, -(2**-10), 2**-6, 0] * 2),
    "ties": np.float32([448, *np.arange(-15, 16) * 0.0625 + 0.03125]),
    "ties of e2m1": np.float32([6, *(np.arange(-15, 16) * 0.25)]),
    "ties of e2m1 that amax rounds up": np.float32([7, 3.5, -3.5, *(np.arange(-14, 15) * 0.5)]),
    "amax next to 1.75": np.float32([1.75, *[np.nextafter(np.float32(0.875), np.float32(0))] * 31]),
    "amax below 1.75": np.float32([np.nextafter(np.float32(1.75), np.float32(0)), *[-0.25, 0.125] * 15, -0.0]),
    "ties of int8": np.float32([127, *np.arange(-15, 16) + 0.5]),
    "a factor whose reciprocal is a denormal": np.float32([2e-36, *[-1.9e-36, 1e-37, 3e-37] * 10, 0]),
    "the largest factor of e4m3": np.float32([448 * 2.0**-126, *[-(2.0**-119), 2.0**-120] * 15, 0]),
    "a factor above the largest of e4m3": np.float32([448 * 2.0**-126 * (1 - 2.0**-23), *[2.0**-119] * 31]),
    "below every floor": np.float32([1e-13, -2e-14] * 16),
    "between the floors": np.float32([3e-5, -1e-6] * 16),
    "powers of two times 448": np.float32([448 * 2.0**-k for k in range(32)]),
    "the largest float32": np.float32([3.4028235e38, -3.4028235e38] * 16),
}


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("f", PRESETS, ids=NAMES)
def test_codes_and_scales_are_those_of_exact_arithmetic(f: Format, kind: str) -> None:
    check_block(f, VALUES[kind])


@pytest.mark.parametrize("f", PRESETS, ids=NAMES)
def test_codes_and_scales_of_random_blocks_are_those_of_exact_arithmetic(f: Format, rng: np.random.Generator) -> None:
    for _ in range(40):
        values = rng.standard_normal(32) * 10.0 ** rng.integers(-12, 6)
        check_block(f, values.astype(rng.choice(["float32", "bfloat16"])))


@pytest.mark.parametrize("formula", ["reciprocal", "divide", "factor"])
def test_a_million_codes_of_each_formula_are_those_of_float64_arithmetic(
    formula: str, rng: np.random.Generator
) -> None:
    x = (rng.standard_normal((8, 1 << 17)) * 0.02).astype(ml_dtypes.bfloat16)
    codes, scales = quantize(formats.Fp8Channel(formula=formula), x)
    wide = x.astype(np.float64)
    amax = np.abs(wide).max(1, keepdims=True)
    s = (amax / 448).astype(np.float32).astype(np.float64)
    y = wide / s
    if formula == "reciprocal":
        y = wide * (1 / s).astype(np.float32).astype(np.float64)
    elif formula == "factor":
        factor = (448 / amax).astype(np.float32).astype(np.float64)
        y, s = wide * factor, (1 / factor).astype(np.float32)
    want = np.clip(y.astype(np.float32), -448, 448).astype(np.float64).astype(E4M3)
    assert codes.tobytes() == want.tobytes()
    assert scales.tobytes() == s.astype(np.float32).tobytes()


def test_the_three_formulas_differ_in_some_codes_and_scales() -> None:
    x = (np.random.default_rng(0).standard_normal((1024, 1024)) * 0.02).astype(ml_dtypes.bfloat16)
    done = {name: quantize(formats.Fp8Block(formula=name), x) for name in ("reciprocal", "divide", "factor")}
    codes = {name: c.view(np.uint8) for name, (c, _) in done.items()}
    assert (codes["reciprocal"] != codes["divide"]).sum() == 95
    assert (done["reciprocal"][1] == done["divide"][1]).all()
    assert (done["reciprocal"][1] != done["factor"][1]).sum() == 24


def test_a_cast_without_clamping_would_give_nan() -> None:
    assert np.isnan(np.float32(465).astype(E4M3))
    codes = formats.MxFp8().encode(np.float32([511.0]), np.float32([511.0]))  # OCP's scale lets values saturate
    assert float(codes[0]) == 448


def test_decoded_values_are_near_what_was_encoded(rng: np.random.Generator) -> None:
    x = rng.standard_normal((256, 256), np.float32)
    for f, limit in ((formats.Fp8Block(), 0.028), (formats.deepgemm_ue8m0(), 0.028), (formats.MxFp8(), 0.035)):
        codes, scales = quantize(f, x)
        wide = scales
        for axis, index in enumerate(block_indices(f, x.shape, ((), ()))):
            wide = wide.take(index, axis)
        error = np.linalg.norm(f.decode(codes, wide) - x) / np.linalg.norm(x)
        assert 0.02 < error < limit


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_nan_and_infinity_are_refused_with_the_tensors_name(bad: float, dtype: str) -> None:
    x = np.ones((200, 300), np_dtype(dtype))
    x[150, 299] = bad
    with pytest.raises(sf.NotFinite, match=r"'h\.0\.w' hold NaN or infinity in 1 of 6 blocks"):
        quantize(formats.Fp8Block(), x, what="'h.0.w'")


@pytest.mark.parametrize("shape", [(1, 1), (127, 129), (128, 128), (300, 70), (3, 130, 257)])
def test_blocks_at_ragged_edges_are_quantized_as_if_padded_with_zeros(
    shape: tuple[int, ...], rng: np.random.Generator
) -> None:
    x = rng.standard_normal(shape, np.float32)
    rows, columns = (-n % 128 for n in shape[-2:])
    padded = np.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, rows), (0, columns)])
    codes, scales = quantize(formats.Fp8Block(), x)
    padded_codes, padded_scales = quantize(formats.Fp8Block(), padded)
    assert scales.shape == (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    assert scales.tobytes() == padded_scales.tobytes()
    inside = padded_codes[..., : shape[-2], : shape[-1]]
    assert codes.tobytes() == np.ascontiguousarray(inside).tobytes()
    for index in np.ndindex(scales.shape):  # and block by block
        cut = tuple(slice(i, i + 1) for i in index[:-2]) + tuple(slice(128 * i, 128 * i + 128) for i in index[-2:])
        assert scales[index] == np.float32(max(np.abs(x[cut]).max(), np.float32(1e-4)) / np.float32(448))


def test_scale_shapes_and_scopes() -> None:
    for f, scope, shape in (
        (formats.Fp8Block(), "block", (4, 2, 3)),
        (formats.Fp8Channel(), "row", (4, 256, 1)),
        (formats.Int8Channel(local=True), "rank", (4, 256, 1)),
        (formats.Fp8Tensor(), "tensor", (4, 1, 1)),
        (formats.MxFp8(), "block", (4, 256, 9)),
    ):
        assert f.scope == scope
        assert grid_shape(f, (4, 256, 280), ((), ())) == shape


def test_segments_share_a_scale_where_they_share_an_index(rng: np.random.Generator) -> None:
    x = rng.standard_normal((8, 6), np.float32)
    segments = ((0, 2, 0), (2, 3, 1), (3, 5, 0), (5, 8, 1))
    codes, scales = quantize(formats.Fp8Tensor(per="part"), x, (segments, ()))
    first, second = x[[0, 1, 3, 4]], x[[2, 5, 6, 7]]
    assert scales.shape == (2, 1)
    assert scales[:, 0].tolist() == [np.float32(np.abs(part).max() / np.float32(448)) for part in (first, second)]
    for rows, part in (([0, 1, 3, 4], first), ([2, 5, 6, 7], second)):
        assert codes[rows].tobytes() == quantize(formats.Fp8Tensor(), part)[0].tobytes()
    runs, _ = grid_runs(formats.Fp8Tensor(per="part"), (8, 6), (segments, ()))
    assert not any(run.whole for run in runs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OddBlocks(formats.MxFp4):
    """The middle byte of two blocks would be of both."""

    @property
    def block(self) -> tuple[int | None, int | None]:
        return 1, 5


def test_a_new_format_is_one_class(rng: np.random.Generator) -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class E5M2Rows(Format):
        codes = "float8_e5m2"
        largest = divisor = 57344.0

        @property
        def block(self) -> tuple[int | None, int | None]:
            return 1, None

    x = rng.standard_normal((3, 16), np.float32)
    codes, scales = quantize(E5M2Rows(), x)
    assert scales[:, 0].tolist() == (np.abs(x).max(1) / np.float32(57344)).tolist()
    want = np.clip(x * (np.float32(1) / scales), -57344, 57344).astype(ml_dtypes.float8_e5m2)
    assert codes.tobytes() == want.tobytes()
    assert format_class(E5M2Rows.full_name()) is E5M2Rows


def stating(**stated: object) -> Format:
    """A format whose class states something else."""
    return dataclasses.dataclass(frozen=True, kw_only=True)(type("Mine", (formats.Fp8Block,), stated))()


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"codes": "uint8"}, "codes of class 'Mine' is 'uint8', but codes are encoded in float8_e4m3fn,"),
        ({"codes": "int4"}, "is 'int4'"), ({"codes": "float6_e2m3fn"}, "is 'float6_e2m3fn'"),
        ({"codes": "float8_e8m0fnu"}, "is 'float8_e8m0fnu'"), ({"codes": np.int8}, "State one of these dtypes"),
        ({"largest": 449.0}, "largest of class 'Mine' is 449.0, but codes of float8_e4m3fn end at 448"),
        ({"codes": "int8", "largest": 128.0}, "codes of int8 end at 127"),
        ({"codes": "int8", "largest": 126.5}, "a whole number above 0"),
        ({"codes": "float8_e5m2", "largest": 57345.0}, "end at 57344"),
        ({"codes": "float4_e2m1fn", "largest": 7.0}, "end at 6"),
        ({"largest": 0.0}, "above 0"), ({"largest": float("nan")}, "finite"), ({"largest": "448"}, "finite"),
        ({"divisor": 3.9}, "divisor of class 'Mine' is 3.9, but a number of at least 4 that is finite in float32"),
        ({"divisor": float("inf")}, "finite"), ({"zero_exponent": 254}, "from 0 to 253"),
        ({"block": 128}, "block of class 'Mine' is 128, but it is a pair"), ({"block": (1, 2, 3)}, "a pair"),
        ({"block": (0, 128)}, "number of rows of a block is 0"), ({"block": (1, 32.0)}, "columns of a block is 32.0"),
        ({"rounding": "up"}, "rounding is 'up'"), ({"carry": 1 << 23}, "carry is 8388608"),
    ],
)  # fmt: skip
def test_a_class_that_states_what_cannot_be_is_refused_by_its_name(stated: dict[str, object], message: str) -> None:
    with pytest.raises(sf.LanguageError) as caught:
        stating(**stated)
    assert message in str(caught.value)


def test_a_format_without_a_block_is_refused() -> None:
    with pytest.raises(sf.LanguageError, match="class 'Format' states no block"):
        Format()


@pytest.mark.parametrize(("codes", "largest"), LARGEST.items())
def test_the_largest_number_of_each_dtype_of_codes_is_its_own(codes: str, largest: float) -> None:
    dtype = np_dtype(codes)
    info = ml_dtypes.iinfo(dtype) if codes == "int8" else ml_dtypes.finfo(dtype)
    assert largest == float(info.max)
    assert stating(codes=codes, largest=largest).largest == largest


def test_what_numpy_counts_with_is_kept_as_plain_numbers() -> None:
    block = formats.Fp8Block(rows=np.int64(8), columns=np.uint8(16), floor=np.float32(0.5))
    assert block == formats.Fp8Block(rows=8, columns=16, floor=0.5)
    assert [type(value) for value in (block.rows, block.columns, block.floor)] == [int, int, float]
    assert type(formats.Fp8Block(floor=0).floor) is float
    assert str(formats.Fp8Block(floor=-0.0).floor) == "0.0"  # its bits would be above those of any amax
    assert type(formats.Fp8Channel(local=np.True_).local) is bool
    assert type(formats.MxFp8(shift=np.int32(4)).shift) is int
    constants = stating(largest=np.float32(240), divisor=240).constants
    assert constants == stating(largest=240.0, divisor=240.0).constants
    assert {type(value) for value in constants.values()} == {str, float, int}


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: formats.Fp8Block(floor=-1.0), lambda: formats.Fp8Block(floor=float("nan")),
        lambda: formats.Fp8Block(floor=float("inf")), lambda: formats.Fp8Block(floor=1e39),
        lambda: formats.Fp8Block(floor="0"), lambda: formats.Fp8Block(floor=True), lambda: formats.Fp8Block(floor=1j),
        lambda: formats.Fp8Block(floor=None), lambda: formats.Fp8Block(rows=True), lambda: formats.Fp8Block(rows=None),
        lambda: formats.Fp8Block(rows=8.0),
        lambda: formats.Fp8Block(columns="128"), lambda: formats.Fp8Block(columns=1.5),
        lambda: formats.Fp8Channel(local=1), lambda: formats.Fp8Channel(local="no"), lambda: formats.Fp8Tensor(per=3),
        lambda: formats.Fp8Block(formula=["divide"]), lambda: formats.MxFp8(shift=8.0),
        lambda: formats.MxFp8(shift=True), lambda: formats.MxFp4(carry=False), lambda: formats.MxFp8(scale="float32"),
        lambda: formats.Fp8Block(rows=0), lambda: formats.Fp8Block(formula="fast"),
        lambda: formats.Fp8Block(scale="e8m0", formula="factor"), lambda: formats.Fp8Block(scale="e4m3"),
        lambda: formats.Fp8Tensor(per="row"), lambda: formats.MxFp8(rounding="up"), lambda: formats.MxFp8(shift=-1),
        lambda: formats.MxFp4(carry=1), lambda: formats.MxFp4(rounding="ceil", carry=1 << 21),
        lambda: OddBlocks(), lambda: quantize(formats.MxFp4(), np.ones((4, 33), np.float32)),
        lambda: quantize(formats.Fp8Block(), np.ones(4, np.float32)),
    ],
)  # fmt: skip
def test_formats_that_cannot_be_are_refused(wrong) -> None:
    with pytest.raises(sf.LanguageError):
        wrong()
