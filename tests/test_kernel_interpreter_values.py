"""The interpreter of kernels: what instructions compute, against NumPy."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, scf
from kernel_interpreter import Allocation, UnknownInstruction
from small_kernels import compiled, computed, element, first_thread, put, read, run, words

from shardfly_jax.pallas_kernels import addresses as m, conversions, tiles
from shardfly_jax.pallas_kernels.emit import Int, const, for_range, if_else, when, while_loop
from shardfly_jax.sharding.formats import Cast, Conversion, itemsize, np_dtype

integer = ir.IntegerType.get_signless


# Integers

OPERATORS: dict[str, Callable] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "&": operator.and_,
    "|": operator.or_,
    "^": operator.xor,
    "//": lambda a, b: a // (b | 1),
    "%": lambda a, b: a % (b | 1),
    "<<": lambda a, b: a << (b & 31),
    ">>": lambda a, b: a >> (b & 31),
    "+ constant": lambda a, b: a + 0xFFFFFFFF,
}
"""The same for `Int` and arrays."""


def signed(x: np.ndarray) -> np.ndarray:
    return x.view(np.int32)


BINARY: dict[str, tuple[Callable[[Int, Int], Int], Callable[[np.ndarray, np.ndarray], np.ndarray]]] = {
    **{name: (operation, operation) for name, operation in OPERATORS.items()},
    "at_most": (Int.at_most, np.minimum),
    "at_least": (Int.at_least, lambda a, b: np.maximum(signed(a), signed(b))),
    "maxui": (lambda a, b: Int(arith.maxui(a.value, b.value)), np.maximum),
    "minsi": (lambda a, b: Int(arith.minsi(a.value, b.value)), lambda a, b: np.minimum(signed(a), signed(b))),
    "shrsi": (
        lambda a, b: Int(arith.shrsi(a.value, (b & 31).value)),
        lambda a, b: signed(a) >> signed(b & 31),
    ),
    "wide": (lambda a, b: (a.wide() * b >> 32).low(), lambda a, b: a.astype(np.uint64) * b >> 32),
    "where": (lambda a, b: (a % 3 == 1).where(a, b), lambda a, b: np.where(a % 3 == 1, a, b)),
}


def check(have: np.ndarray, want: np.ndarray, uniform: bool) -> None:
    np.testing.assert_array_equal(have, np.broadcast_to(want[:1] if uniform else want, 128))


@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize("name", BINARY)
def test_integers_are_computed_as_numpy_does(name: str, uniform: bool, rng: np.random.Generator) -> None:
    a, b = rng.integers(0, 2**32, (2, 128), np.uint32)
    emit, want = BINARY[name]
    check(computed(emit, a, b, uniform=uniform), want(a, b).astype(np.uint32), uniform)


COMPARISONS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, "==": operator.eq, "!=": operator.ne}
"""Those of `Int`."""


@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize("name", [*COMPARISONS, "slt", "sle", "sgt", "sge", "uge"])
def test_integers_are_compared_as_numpy_does(name: str, uniform: bool, rng: np.random.Generator) -> None:
    a, b = rng.integers(0, 2**32, (2, 128), np.uint32)
    b[::3] = a[::3]

    def emit(x: Int, y: Int) -> Int:
        if name in COMPARISONS:
            return COMPARISONS[name](x, y).where(const(1), 0)
        predicate = getattr(arith.CmpIPredicate, name)
        return Int(arith.extui(integer(32), arith.cmpi(predicate, x.value, y.value)))

    compare = COMPARISONS[name] if name in COMPARISONS else getattr(operator, name[1:])
    want = compare(signed(a), signed(b)) if name.startswith("s") else compare(a, b)
    check(computed(emit, a, b, uniform=uniform), want, uniform)


WIDTHS: dict[str, tuple[Callable[[Int], Int], Callable[[np.ndarray], np.ndarray]]] = {
    "extsi(i1)": (lambda x: Int(arith.extsi(integer(32), (x % 2 == 1).value)), lambda x: -(x & 1)),
    "extui(i1)": (lambda x: Int(arith.extui(integer(32), (x % 2 == 1).value)), lambda x: x & 1),
    "trunci(i1)": (
        lambda x: Int(arith.extui(integer(32), arith.trunci(integer(1), x.value))),
        lambda x: x & 1,
    ),
    "extsi(i64)": (
        lambda x: (Int(arith.extsi(integer(64), x.value)) >> 31).low(),
        lambda x: signed(x).astype(np.int64) >> 31,
    ),
    "extui(i64)": (lambda x: (x.wide() >> 31).low(), lambda x: x >> 31),
    "trunci(i32)": (lambda x: (x.wide() << 7).low(), lambda x: x << 7),
    "index": (
        lambda x: Int(arith.index_cast(integer(32), arith.index_cast(ir.IndexType.get(), x.value))),
        lambda x: x,
    ),
}


@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize("name", WIDTHS)
def test_integers_change_width_as_numpy_does(name: str, uniform: bool, rng: np.random.Generator) -> None:
    x = rng.integers(0, 2**32, 128, np.uint32)
    emit, want = WIDTHS[name]
    check(computed(emit, x, uniform=uniform), want(x).astype(np.uint32), uniform)


# Loops


def test_loops_over_a_range_carry_values() -> None:
    def emit(out: Int) -> None:
        me, one = m.thread(), const(1)
        loop = scf.ForOp(const(0).value, (me % 5).value, one.value, [me.value, one.value])
        with ir.InsertionPoint(loop.body):
            total, power = map(Int, loop.inner_iter_args)
            scf.YieldOp([(total + Int(loop.induction_variable)).value, (power << 1).value])
        total, power = map(Int, loop.results)
        put(element(out, me), total + power)

    (out,) = run(emit, lambda: [Allocation("out", 512)])
    assert read(out).tolist() == [t + sum(range(t % 5)) + 2 ** (t % 5) for t in range(128)]


def test_loops_of_different_length_end_lane_by_lane() -> None:
    def emit(out: Int) -> None:
        me = m.thread()

        def body(k: Int, total: Int) -> list[Int]:
            return [k + 1, total + if_else(k % 2 == 1, lambda: k, lambda: const(1000))]

        _, total = while_loop([const(0), const(0)], lambda k, total: (k < me, [k, total]), body)
        for_range(const(0), me, 1, lambda k: put(element(out, me), total + k))
        with when(first_thread()):
            put(out, total)

    (out,) = run(emit, lambda: [Allocation("out", 512)])
    sums = [sum(k if k % 2 else 1000 for k in range(t)) + max(t - 1, 0) for t in range(128)]
    assert read(out).tolist() == sums


# Instructions on registers


def as_float(x: np.ndarray) -> np.ndarray:
    return x.view(np.float32)


def halves(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Float32 bits rounded to bfloat16, two in a word."""
    with np.errstate(invalid="ignore"):  # signaling NaN
        a, b = (as_float(v).astype(ml_dtypes.bfloat16).view(np.uint16).astype(np.uint32) for v in (low, high))
    return a | b << 16


FLOAT = "{{ .reg .f32 x, y; mov.b32 x, $1; mov.b32 y, $2; {}.rn.f32 x, x, y; mov.b32 $0, x; }}"
REGISTERS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "add.u32 $0, $1, $2;": lambda x, y: x + y,
    "sub.s32 $0, $1, $2;": lambda x, y: x - y,
    "and.b32 $0, $1, $2;": lambda x, y: x & y,
    "or.b32 $0, $1, 0xFF;": lambda x, y: x | 255,
    "xor.b32 $0, $1, $2;": lambda x, y: x ^ y,
    "shr.b32 $0, $1, 16;": lambda x, y: x >> 16,
    "{ .reg .u32 n; and.b32 n, $2, 31; shr.u32 $0, $1, n; }": lambda x, y: x >> (y & 31),
    "{ .reg .u32 n; and.b32 n, $2, 63; shr.u32 $0, $1, n; }": lambda x, y: x.astype(np.uint64) >> (y & 63),
    "{ .reg .b16 l, h; mov.b32 {l, h}, $1; mov.b32 $0, {h, l}; }": lambda x, y: x >> 16 | x << 16,
    "{ .reg .b64 d; .reg .b32 l; mov.b64 d, {$1, $2}; mov.b64 {l, $0}, d; }": lambda x, y: y,
    "{ .reg .b16 h; cvt.u16.u32 h, $1; cvt.u32.u16 $0, h; }": lambda x, y: x & 0xFFFF,
    "{ .reg .pred p; setp.lo.u32 p, $1, $2; selp.b32 $0, $1, $2, p; }": np.minimum,
    "{ .reg .pred p; setp.gt.s32 p, $1, $2; selp.b32 $0, $1, $2, p; }": lambda x, y: np.maximum(signed(x), signed(y)),
    "{ .reg .pred p; setp.hs.u32 p, $1, $2; mov.b32 $0, $1; @!p mov.b32 $0, $2; }": np.maximum,
    FLOAT.format("add"): lambda x, y: (as_float(x) + as_float(y)).view(np.uint32),
    FLOAT.format("mul"): lambda x, y: (as_float(x) * as_float(y)).view(np.uint32),
    FLOAT.format("div"): lambda x, y: (as_float(x) / as_float(y)).view(np.uint32),
    "cvt.rn.bf16x2.f32 $0, $2, $1;": halves,
}


@pytest.mark.parametrize("text", REGISTERS)
def test_instructions_on_registers_do_what_numpy_does(text: str, rng: np.random.Generator) -> None:
    if "f32" in text:
        scales = 10.0 ** rng.integers(-9, 9, (2, 128))
        x, y = (rng.standard_normal((2, 128)) * scales).astype(np.float32).view(np.uint32)
    else:
        x, y = rng.integers(0, 2**32, (2, 128), np.uint32)
    want = REGISTERS[text](x, y).astype(np.uint32)
    for uniform in (False, True):
        have = computed(lambda a, b: m.ptx_value(text, "=&r,r,r", a, b), x, y, uniform=uniform)
        check(have, want, uniform)


KINDS = [0x00000000, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFBFFFFF,
         0x00000001, 0x807FFFFF, 0x7F7FFFFF, 0x3F808000, 0xBF818000]  # fmt: skip
"""Float32 bits: zeros, infinities, quiet and signaling NaNs, subnormals, one too large for bfloat16, two ties."""


def pairs_of_kinds() -> list[np.ndarray]:
    """All pairs, in words for 128 threads: warps of NaN only, of none, and of both."""
    pairs = np.array(list(itertools.product(KINDS, KINDS)), np.uint32)
    pairs = pairs[np.argsort(np.isnan(as_float(pairs)).sum(1))]
    pairs = np.concatenate([pairs, pairs[: -len(pairs) % 128]])
    return [np.ascontiguousarray(part.T) for part in np.split(pairs, len(pairs) // 128)]


@pytest.mark.parametrize(("x", "y"), pairs_of_kinds())
@pytest.mark.parametrize("kind", ["num", "nan"])
def test_numbers_and_nan_are_told_apart(kind: str, x: np.ndarray, y: np.ndarray) -> None:
    text = f"{{ .reg .pred p; setp.{kind}.f32 p, $1, $2; selp.b32 $0, 1, 0, p; }}"
    nan = np.isnan(as_float(x)) | np.isnan(as_float(y))
    have = computed(lambda a, b: m.ptx_value(text, "=r,r,r", a, b), x, y)
    np.testing.assert_array_equal(have, nan if kind == "nan" else ~nan)


@pytest.mark.parametrize(("x", "y"), pairs_of_kinds())
def test_pairs_are_rounded_to_bfloat16_as_ml_dtypes_does(x: np.ndarray, y: np.ndarray) -> None:
    np.testing.assert_array_equal(computed(conversions._narrow_pair, x, y), halves(x, y))


@pytest.mark.parametrize("pair", list(itertools.product([0x3F808000, 0x7F800001, 0xFFC12345], repeat=2)))
def test_pairs_alike_in_all_lanes_are_rounded_too(pair: tuple[int, int]) -> None:
    x, y = np.array(pair, np.uint32)[:, None]
    check(computed(conversions._narrow_pair, x, y, uniform=True), halves(x, y), True)


@pytest.mark.parametrize(("kind", "dtype"), [("f16", np.float16), ("bf16", ml_dtypes.bfloat16)])
def test_floats_are_rounded_as_numpy_does(kind: str, dtype: type, rng: np.random.Generator) -> None:
    x = (rng.standard_normal(128) * 10.0 ** rng.integers(-8, 9, 128)).astype(np.float32)
    x[:6] = [np.inf, -np.inf, np.nan, -0.0, 65520.0, 2.0**-25]
    text = f"{{ .reg .b16 h; cvt.rn.{kind}.f32 h, $1; cvt.f32.{kind} $0, h; }}"
    have = as_float(computed(lambda bits: m.ptx_value(text, "=r,r", bits), x))
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(have, x.astype(dtype).astype(np.float32))
    assert (np.signbit(have) == np.signbit(x))[~np.isnan(x)].all()


# Branches inside one text

SKIP = (
    "{ .reg .pred p; mov.u32 $0, 1; setp.lo.u32 p, $1, $2; @p bra DONE;"
    " mov.u32 $0, 2; add.u32 $0, $0, $1; DONE: add.u32 $0, $0, 1000; }"
)


@pytest.mark.parametrize("bound", [0, 1, 40, 64, 127, 128])
def test_lanes_that_branch_ahead_skip_what_the_others_do(bound: int) -> None:
    x = np.arange(128, dtype=np.uint32)
    have = computed(lambda a: m.ptx_value(SKIP, "=&r,r,r", a, const(bound)), x)
    np.testing.assert_array_equal(have, np.where(x < bound, 1, 2 + x) + 1000)


@pytest.mark.parametrize("bound", [5, 6])
def test_a_branch_ahead_that_all_lanes_decide_alike(bound: int) -> None:
    x = np.array([5], np.uint32)
    have = computed(lambda a: m.ptx_value(SKIP, "=&r,r,r", a, const(bound)), x, uniform=True)
    assert (have == (1001 if bound > 5 else 1007)).all()


def test_lanes_that_branch_ahead_access_no_memory() -> None:
    def emit(out: Int) -> None:
        text = "{ .reg .pred p; setp.hs.u32 p, $1, 40; @p bra DONE; st.global.u32 [$0], $1; DONE: }"
        m.ptx(text, "l,r", element(out, m.thread()), m.thread())

    (out,) = run(emit, lambda: [Allocation("out", 160)])
    np.testing.assert_array_equal(read(out), np.arange(40))


def test_branches_ahead_may_meet_and_enclose_loops() -> None:
    """Adds x up to 50 or more, but not where it is 0, and then 1000 where it is even."""
    text = (
        "{ .reg .pred p; .reg .b32 odd; mov.u32 $0, 0; setp.eq.u32 p, $1, 0; @p bra DONE;"
        " LOOP: add.u32 $0, $0, $1; setp.lo.u32 p, $0, 50; @p bra LOOP;"
        " and.b32 odd, $1, 1; setp.eq.u32 p, odd, 1; @p bra DONE; add.u32 $0, $0, 1000; DONE: }"
    )
    x = np.arange(128, dtype=np.uint32) % 60
    have = computed(lambda a: m.ptx_value(text, "=&r,r", a), x)
    assert have.tolist() == [-(-50 // k) * k + (0 if k % 2 else 1000) if k else 0 for k in x.tolist()]


@pytest.mark.parametrize(
    "branches",
    [
        "bra DONE; DONE:",
        "@p bra NOWHERE;",
        "LOOP: add.u32 $0, $0, 1;",
        "@p bra DONE; LOOP: DONE: @p bra LOOP;",
        "LOOP: @p bra DONE; @p bra LOOP; DONE:",
    ],
)
def test_a_branch_that_is_neither_a_loop_nor_a_skip_is_refused(branches: str) -> None:
    text = f"{{ .reg .pred p; setp.eq.u32 p, $1, 0; mov.u32 $0, 0; {branches} }}"
    with pytest.raises(UnknownInstruction, match="branch"):
        compiled(lambda at: m.ptx_value(text, "=&r,r", at.low()), 1)


# Memory

ATOMICS = {
    "atom.global.add.u32 $0, [$1], $2;": 100 + 128 * 127 // 2,
    "atom.global.max.u32 $0, [$1], $2;": 127,
    "atom.global.min.u32 $0, [$1], $2;": 0,
    "atom.global.or.b32 $0, [$1], $2;": 127,
    "atom.global.cas.b32 $0, [$1], 100, 7;": 7,
    "{ .reg .pred p; setp.eq.u32 p, $2, 64; @p atom.global.exch.b32 $0, [$1], $2; }": 64,
}


@pytest.mark.parametrize("text", ATOMICS)
def test_atomics_change_a_word_one_lane_after_the_other(text: str) -> None:
    def emit(word: Int, out: Int) -> None:
        put(element(out, m.thread()), m.ptx_value(text, "=r,l,r", word, m.thread()))

    word, out = run(emit, lambda: [words("word", 100), Allocation("out", 512)])
    assert read(word)[0] == ATOMICS[text]
    assert (read(out) == 100).any()  # one of them found it as it was


def test_lanes_may_use_different_allocations_in_one_instruction() -> None:
    def emit(left: Int, right: Int) -> None:
        at = element((m.thread() % 2 == 1).where(left, right), m.thread() // 2)
        put(at, m.thread())
        put(at, m.load32(at) + 1)

    left, right = run(emit, lambda: [Allocation("left", 256), Allocation("right", 256)])
    np.testing.assert_array_equal(read(left), np.arange(1, 128, 2) + 1)
    np.testing.assert_array_equal(read(right), np.arange(0, 128, 2) + 1)


# Bytes in registers


def test_bytes_are_permuted_as_the_manual_says(rng: np.random.Generator) -> None:
    a, b, selector = rng.integers(0, 2**32, (3, 128), np.uint32)
    want = []
    for x, y, z in zip(a.tolist(), b.tolist(), selector.tolist(), strict=True):
        source = x.to_bytes(4, "little") + y.to_bytes(4, "little")
        nibbles = [z >> 4 * k & 15 for k in range(4)]
        picked = [source[n & 7] if n < 8 else 255 * (source[n & 7] >> 7) for n in nibbles]
        want.append(int.from_bytes(bytes(picked), "little"))
    have = computed(lambda x, y, z: m.ptx_value("prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", x, y, z), a, b, selector)
    np.testing.assert_array_equal(have, np.array(want, np.uint32))


@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize("selector", [0x5410, 0x7632, 0x5140, 0x7362, 0x0123])
def test_a_constant_selector_picks_bytes_the_lowest_first(
    selector: int, uniform: bool, rng: np.random.Generator
) -> None:
    a, b = rng.integers(0, 2**32, (2, 128), np.uint32)
    source = np.stack([a, b], 1).view(np.uint8)
    picked = source[:, [selector >> 4 * k & 7 for k in range(4)]]
    have = computed(lambda x, y: m.permute_bytes(x, y, selector), a, b, uniform=uniform)
    check(have, np.ascontiguousarray(picked).view(np.uint32)[:, 0], uniform)


@pytest.mark.parametrize(
    "conversion",
    [
        *(Conversion(dtype, (), dtype) for dtype in ("uint8", "bfloat16", "float32", "int64")),
        Conversion("float32", (Cast("bfloat16"),), "bfloat16"),
        Conversion("bfloat16", (Cast("float32"),), "float32"),
    ],
    ids=Conversion.describe,
)
def test_blocks_are_transposed_in_registers(conversion: Conversion, rng: np.random.Generator) -> None:
    """A block per thread: pieces of 16 bytes are its columns in the source and its rows in the target."""
    rows, columns = 16 // itemsize(conversion.source), 16 // itemsize(conversion.target)

    def emit(data: Int, out: Int) -> None:
        source, target = element(data, m.thread(), 16 * columns), element(out, m.thread(), 16 * rows)
        vectors = [m.load_vector(source + 16 * k) for k in range(columns)]
        for k, row in enumerate(tiles._transposed(conversion, vectors)):
            m.store_vector(target + 16 * k, row)

    x = rng.integers(0, 256, 128 * columns * 16, np.uint8)
    blocks = x.view(np_dtype(conversion.source)).reshape(128, columns, rows)
    _, out = run(emit, lambda: [Allocation("data", x, read_only=True), Allocation("out", 2048 * rows, once=True)])
    want = conversion.apply(blocks.transpose(0, 2, 1))
    assert out.data.tobytes() == want.tobytes()


def test_a_swizzled_transpose_through_shared_memory(rng: np.random.Generator) -> None:
    """32 x 32 words, stored and loaded 16 bytes at a time, as tiles of wide elements are."""

    def swizzled(tile: Int, row: Int, chunk: Int) -> Int:
        return element(tile + row * 128, chunk ^ ((row >> 2) & 7), 16)

    def emit(data: Int, out: Int, tile: Int) -> None:
        for half in range(2):
            k = m.thread() + 128 * half
            m.store_shared_vector(swizzled(tile, k // 8, k % 8), m.load_vector(element(data, k, 16)))
        m.barrier()
        for half in range(2):
            k = m.thread() + 128 * half
            column, first = k // 8, k % 8 * 4
            picked = [m.load_shared(element(swizzled(tile, first + r, column // 4), column % 4)) for r in range(4)]
            m.store_vector(element(out, k, 16), picked)

    x = rng.integers(0, 2**32, (32, 32), np.uint32)
    make = lambda: [Allocation("data", x, read_only=True), Allocation("out", x.nbytes, once=True)]  # noqa: E731
    _, out = run(emit, make, scratch={"tile": x.nbytes})
    np.testing.assert_array_equal(read(out).reshape(32, 32), x.T)
