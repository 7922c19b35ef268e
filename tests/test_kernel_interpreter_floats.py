"""The interpreter of kernels: what the instructions that quantize compute, against NumPy and the manual."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
from kernel_interpreter import Allocation, Fault
from small_kernels import computed, element, put, read, run, words

from shardfly_jax.pallas_kernels import addresses as m
from shardfly_jax.pallas_kernels.emit import Int, const, when
from shardfly_jax.pallas_kernels.floats import divide

AWKWARD = np.array(
    [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-39, -1e-39, 448, -448, 464, 464.1, -464.1, 1e30, 2.0**-9, 2.0**-10, 3e-3]
)


def floats(rng: np.random.Generator) -> np.ndarray:
    """128 float32: awkward ones, and others of every magnitude that matters to e4m3."""
    x = (rng.standard_normal(128) * 2.0 ** rng.integers(-12, 12, 128)).astype(np.float32)
    x[: len(AWKWARD)] = AWKWARD
    return x


def nearest_e4m3(x: np.ndarray) -> np.ndarray:
    """Codes by search among all finite values, ties to the even code; beyond the largest value that one."""
    codes = np.arange(0x7F, dtype=np.uint8)
    values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    out = []
    for value in x.astype(np.float64).tolist():
        distance = np.abs(values - min(abs(value), 448.0))
        best = codes[distance == distance.min()]
        out.append(0x7F if np.isnan(value) else int(best[best % 2 == 0][0] if len(best) > 1 else best[0]))
    return np.array(out, np.uint32) | np.where(np.signbit(x) & ~np.isnan(x), np.uint32(0x80), np.uint32(0))


def test_pairs_become_codes_of_e4m3_the_second_operand_in_the_low_byte(rng: np.random.Generator) -> None:
    x, y = floats(rng), floats(rng)[::-1].copy()
    text = "{ .reg .b16 h; cvt.rn.satfinite.e4m3x2.f32 h, $1, $2; cvt.u32.u16 $0, h; }"
    have = computed(lambda a, b: m.ptx_value(text, "=r,r,r", a, b), x, y)
    np.testing.assert_array_equal(have, nearest_e4m3(y) | nearest_e4m3(x) << 8)


def test_ties_between_all_neighbouring_codes_go_to_the_even_one() -> None:
    codes = np.arange(0x7E, dtype=np.uint8)
    values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    ties = np.concatenate([(values[1:] + values[:-1]) / 2, values[:3]])
    text = "{ .reg .b16 h; cvt.rn.satfinite.e4m3x2.f32 h, $1, $1; cvt.u32.u16 $0, h; }"
    have = computed(lambda a: m.ptx_value(text, "=r,r", a), ties[:128]) & 0xFF
    assert (have[:125] % 2 == 0).all()
    np.testing.assert_array_equal(have, nearest_e4m3(ties))


def test_floats_become_the_nearest_integers(rng: np.random.Generator) -> None:
    x = floats(rng)
    x[20:24] = [0.5, 1.5, -2.5, 126.5]
    have = computed(lambda a: m.ptx_value("cvt.rni.s32.f32 $0, $1;", "=r,r", a), x).view(np.int32)
    want = [0 if np.isnan(v) else round(max(min(float(v), 2.0**31 - 1), -(2.0**31))) for v in x.tolist()]
    np.testing.assert_array_equal(have, want)


PAIRS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {"min": np.fmin, "max": np.fmax}


@pytest.mark.parametrize("name", PAIRS)
def test_the_smaller_and_the_larger_float_are_found_and_numbers_win_over_nan(
    name: str, rng: np.random.Generator
) -> None:
    x, y = floats(rng), rng.permutation(floats(rng))
    both = (x == 0) & (y == 0)  # which zero it is is not defined here
    have = computed(lambda a, b: m.ptx_value(f"{name}.f32 $0, $1, $2;", "=r,r,r", a, b), x, y).view(np.float32)
    np.testing.assert_array_equal(have[~both], PAIRS[name](x, y)[~both])


@pytest.mark.parametrize("name", ["eq", "lt", "le", "gt", "ge"])
def test_floats_are_compared_as_numpy_does(name: str, rng: np.random.Generator) -> None:
    x, y = floats(rng), rng.permutation(floats(rng))
    text = f"{{ .reg .pred p; setp.{name}.f32 p, $1, $2; selp.b32 $0, 1, 0, p; }}"
    compare = {"eq": np.equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}[name]
    np.testing.assert_array_equal(computed(lambda a, b: m.ptx_value(text, "=r,r,r", a, b), x, y), compare(x, y))


def test_signs_are_dropped_and_words_shifted(rng: np.random.Generator) -> None:
    x, shift = floats(rng), rng.integers(0, 40, 128).astype(np.uint32)
    have = computed(lambda a: m.ptx_value("abs.f32 $0, $1;", "=r,r", a), x)
    np.testing.assert_array_equal(have, np.abs(x).view(np.uint32))
    have = computed(lambda a, b: m.ptx_value("shl.b32 $0, $1, $2;", "=r,r,r", a, b), x, shift)
    want = x.view(np.uint32).astype(np.uint64) << np.minimum(shift, 32)
    np.testing.assert_array_equal(have, want.astype(np.uint32))


@pytest.mark.parametrize("uniform", [False, True])
def test_the_larger_halves_of_words_are_found(uniform: bool, rng: np.random.Generator) -> None:
    a, b = rng.integers(0, 2**32, (2, 128), np.uint32)
    want = np.maximum(a.view(np.uint16), b.view(np.uint16)).view(np.uint32)
    have = computed(m.max_halves, a, b, uniform=uniform)
    np.testing.assert_array_equal(have, np.broadcast_to(want[:1], 128) if uniform else want)


def test_the_largest_word_of_each_warp_is_found(rng: np.random.Generator) -> None:
    x = rng.integers(0, 2**32, 128, np.uint32)
    np.testing.assert_array_equal(computed(m.max_of_warp, x), x.reshape(4, 32).max(1).repeat(32))


def test_a_reduction_that_lanes_of_its_warp_do_not_reach_is_reported() -> None:
    def emit(out: Int) -> None:
        with when(m.thread() != 5):
            put(element(out, m.thread()), m.max_of_warp(m.thread()))

    with pytest.raises(Fault, match="not reached by just its lanes"):
        run(emit, lambda: [Allocation("out", 512)])


@pytest.mark.parametrize("where", ["shared", "global"])
def test_words_become_the_largest_of_what_threads_bring(where: str, rng: np.random.Generator) -> None:
    x = rng.integers(0, 2**32, 128, np.uint32)

    def emit(data: Int, word: Int, out: Int, shared: Int) -> None:
        value = m.load32(element(data, m.thread()))
        if where == "global":
            m.raise_word(word, value)
            return
        with when(m.thread() == 0):
            m.store_shared(shared, const(0))
        m.barrier()
        m.max_shared(shared, value)
        m.barrier()
        put(element(out, m.thread()), m.load_shared(shared))

    make = lambda: [words("data", *x.tolist()), words("word", 0), Allocation("out", 512)]  # noqa: E731
    _, word, out = run(emit, make, scratch={"shared": 16})
    assert (read(word) if where == "global" else read(out)).tolist() == [x.max()] * (1 if where == "global" else 128)


def test_divisions_are_rounded_to_nearest_with_subnormals(rng: np.random.Generator) -> None:
    """Against float64, whose quotient rounded again is the right one."""
    x, y = (floats(rng) * np.float32(2.0 ** int(rng.integers(-126, -100))) for _ in range(2))
    x, y = x.copy(), np.where(y == 0, np.float32(3), y)
    with np.errstate(all="ignore"):
        want = (x.astype(np.float64) / y.astype(np.float64)).astype(np.float32)
    have = computed(divide, x, y).view(np.float32)
    np.testing.assert_array_equal(have, want)
    assert np.isfinite(have).sum() > 64
