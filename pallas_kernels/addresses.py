"""Raw device addresses in Mosaic GPU kernels: the only place with inline MLIR and PTX.

Everything here is called while a kernel body is being built, inside `plgpu.inline_mgpu`. Values are MLIR values; `i32`
and `i64` in names are their types. One warpgroup of 128 threads runs the code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, llvm, scf
from jax.experimental.mosaic.gpu import utils as mgpu_utils

THREADS = 128
Value = Any


def i32() -> ir.Type:
    """The 32-bit integer type."""
    return ir.IntegerType.get_signless(32)


def i64() -> ir.Type:
    """The 64-bit integer type."""
    return ir.IntegerType.get_signless(64)


def _constant(dtype: ir.Type, value: int) -> Value:
    return arith.constant(dtype, value)  # type: ignore[arg-type,call-arg]  # the stubs are of the generated function


def const32(value: int) -> Value:
    """A 32-bit constant; values from 2^31 on wrap to negative ones."""
    return _constant(i32(), value - (1 << 32) if value >= 1 << 31 else value)


def const64(value: int) -> Value:
    """A 64-bit constant."""
    return _constant(i64(), value)


def ptx(text: str, constraints: str, *args: Value) -> None:
    """An instruction with effects and no result."""
    llvm.inline_asm(ir.Type.parse("!llvm.void"), list(args), text, constraints, has_side_effects=True)


def ptx32(text: str, constraints: str, *args: Value) -> Value:
    """An instruction with one 32-bit result."""
    return llvm.inline_asm(i32(), list(args), text, constraints, has_side_effects=True)


def ptx64(text: str, constraints: str, *args: Value) -> Value:
    """An instruction with one 64-bit result."""
    return llvm.inline_asm(i64(), list(args), text, constraints, has_side_effects=True)


def address(ref: Value) -> Value:
    """Global address of a memref, i64."""
    return llvm.ptrtoint(i64(), mgpu_utils.memref_ptr(ref))


def shared_address(ref: Value) -> Value:
    """Shared-memory address of a memref, i32."""
    return llvm.ptrtoint(i32(), mgpu_utils.memref_ptr(ref))


def thread() -> Value:
    """Number of this thread in its warpgroup, i32."""
    return arith.remui(mgpu_utils.thread_idx(), const32(THREADS))


def barrier() -> None:
    """Waits for all threads of the warpgroup."""
    mgpu_utils.warpgroup_barrier()


def widen(value: Value) -> Value:
    """Unsigned i32 to i64."""
    return arith.extui(i64(), value)


def add(*values: Value) -> Value:
    """Sum of two or more."""
    total = values[0]
    for value in values[1:]:
        total = arith.addi(total, value)
    return total


def times(a: Value, b: Value) -> Value:
    """An unsigned i32 times an i64."""
    return arith.muli(widen(a), b)


def less(a: Value, b: Value) -> Value:
    """Unsigned comparison."""
    return arith.cmpi(arith.CmpIPredicate.ult, a, b)


def equal(a: Value, b: Value) -> Value:
    """Equality."""
    return arith.cmpi(arith.CmpIPredicate.eq, a, b)


@contextmanager
def when(condition: Value) -> Iterator[None]:
    """Code that runs where a condition holds."""
    op = scf.IfOp(condition)  # type: ignore[call-arg]  # the stubs are of the generated class
    with ir.InsertionPoint(op.then_block):
        yield
        scf.YieldOp([])


def for_range(start: Value, stop: Value, step: Value, body: Callable[[Value], None]) -> None:
    """`for k in range(start, stop, step)` over i32."""
    loop = scf.ForOp(start, stop, step)  # type: ignore[call-arg]
    with ir.InsertionPoint(loop.body):
        body(loop.induction_variable)
        scf.YieldOp([])


def while_loop(
    carry: Sequence[Value],
    condition: Callable[..., tuple[Value, list[Value]]],
    body: Callable[..., list[Value]],
    extra: Sequence[ir.Type] = (),
) -> list[Value]:
    """A loop whose condition may compute values for its body.

    Args:
      carry: Initial values, passed to `condition`.
      condition: Returns whether to go on, and what `body` gets: as many values as `carry` has, then the extra ones.
      body: Returns the next carry.
      extra: Types of the extra values.

    Returns:
      What `condition` last returned for `body`.
    """
    types = [value.type for value in carry]
    loop = scf.WhileOp([*types, *extra], list(carry))
    before = loop.before.blocks.append(*types)
    with ir.InsertionPoint.at_block_begin(before):
        go_on, passed = condition(*before.arguments)
        scf.condition(go_on, passed)
    after = loop.after.blocks.append(*[value.type for value in passed])
    with ir.InsertionPoint.at_block_begin(after):
        scf.yield_(body(*after.arguments))
    return list(loop.results)


def load32(at: Value) -> Value:
    """Four bytes of global memory."""
    return ptx32("ld.global.u32 $0, [$1];", "=r,l", at)


def load_word(at: Value, word: int) -> Value:
    """The `word`-th i32 of a record."""
    return load32(arith.addi(at, const64(4 * word)))


def load_pair(at: Value, word: int) -> Value:
    """Two words of a record as i64, the low one first."""
    return _pair(load_word(at, word), load_word(at, word + 1))


def _pair(low: Value, high: Value) -> Value:
    return arith.ori(arith.shli(widen(high), const64(32)), widen(low))


def load_element(at: Value, nbytes: int) -> list[Value]:
    """1, 2, 4 or 8 bytes as i32 words, zero-extended."""
    if nbytes == 8:
        return [load32(at), load32(arith.addi(at, const64(4)))]
    return [ptx32(f"ld.global.u{8 * nbytes} $0, [$1];", "=r,l", at)]


def load_words(at: Value) -> list[Value]:
    """16 aligned bytes of global memory as four words."""
    struct = llvm.StructType.get_literal([i32()] * 4)
    loaded = llvm.inline_asm(
        struct, [at], "ld.global.v4.u32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,l", has_side_effects=True
    )
    return [llvm.extractvalue(i32(), loaded, [k]) for k in range(4)]


def unpack(words: Sequence[Value], nbytes: int) -> list[Value]:
    """Words as elements of 1, 2 or 4 bytes, zero-extended."""
    if nbytes == 4:
        return list(words)
    mask = const32((1 << (8 * nbytes)) - 1)
    return [
        arith.andi(arith.shrui(word, const32(8 * nbytes * k)) if k else word, mask)
        for word in words
        for k in range(4 // nbytes)
    ]


def pack(elements: Sequence[Value], nbytes: int) -> list[Value]:
    """Elements of 1, 2 or 4 bytes, zero-extended, as words."""
    per_word = 4 // nbytes
    words = []
    for start in range(0, len(elements), per_word):
        word = elements[start]
        for k in range(1, per_word):
            word = arith.ori(word, arith.shli(elements[start + k], const32(8 * nbytes * k)))
        words.append(word)
    return words


def store_words(at: Value, words: Sequence[Value]) -> None:
    """Words to global memory, as many at a time as their number allows; the address is aligned to that."""
    size = next(n for n in (4, 2, 1) if len(words) % n == 0)
    for start in range(0, len(words), size):
        names = ", ".join(f"${k + 1}" for k in range(size))
        value = f"{{{names}}}" if size > 1 else names
        suffix = f".v{size}" if size > 1 else ""
        to = arith.addi(at, const64(4 * start))
        ptx(f"st.global{suffix}.u32 [$0], {value};", ",".join(["l"] + ["r"] * size), to, *words[start : start + size])


def all_of(*conditions: Value) -> Value:
    """Conjunction."""
    result = conditions[0]
    for condition in conditions[1:]:
        result = arith.andi(result, condition)
    return result


def is_multiple(of: int, *values: Value) -> Value:
    """Whether all i64 values are multiples of a power of two."""
    bits = values[0]
    for value in values[1:]:
        bits = arith.ori(bits, value)
    return equal(arith.andi(bits, const64(of - 1)), const64(0))


def store_element(at: Value, words: Sequence[Value], nbytes: int) -> None:
    """Stores the low bytes of i32 words."""
    if nbytes == 8:
        store_element(at, words[:1], 4)
        store_element(arith.addi(at, const64(4)), words[1:], 4)
        return
    ptx(f"st.global.u{8 * nbytes} [$0], $1;", "l,r", at, words[0])


def init_barriers(at: Value, count: int) -> None:
    """Barriers in shared memory that wait for one arrival each, 8 bytes apart."""
    with when(equal(thread(), const32(0))):
        for k in range(count):
            ptx("mbarrier.init.shared::cta.b64 [$0], 1;", "r", arith.addi(at, const32(8 * k)))
        ptx("fence.mbarrier_init.release.cluster;", "")
    barrier()


def expect_bytes(at: Value, nbytes: Value) -> None:
    """Arrives at a barrier, which then waits for `nbytes` of bulk loads."""
    ptx("mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", "r,r", at, nbytes)


def wait_barrier(at: Value, parity: Value) -> None:
    """Waits until a barrier has passed the phase of a parity."""
    ptx(
        "{ .reg .pred p; WAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1; @!p bra WAIT; }", "r,r", at, parity
    )


def bulk_load(shared: Value, at: Value, nbytes: Value, barrier_at: Value) -> None:
    """Global to shared memory; everything a multiple of 16."""
    ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];",
        "r,l,r,r",
        shared,
        at,
        nbytes,
        barrier_at,
    )


def bulk_store(at: Value, shared: Value, nbytes: Value) -> None:
    """Shared to global memory; everything a multiple of 16."""
    ptx("cp.async.bulk.global.shared::cta.bulk_group [$0], [$1], $2;", "l,r,r", at, shared, nbytes)


def commit_stores() -> None:
    """Closes this thread's group of bulk stores."""
    ptx("cp.async.bulk.commit_group;", "")


def wait_stores(pending: int, *, read: bool) -> None:
    """Until at most `pending` of this thread's groups are unfinished, or (`read`) have not read their source."""
    ptx(f"cp.async.bulk.wait_group{'.read' if read else ''} {pending};", "")


def sync_warp() -> None:
    """Waits for the threads of the warp."""
    ptx("bar.warp.sync 0xffffffff;", "")


def fence_async() -> None:
    """Orders ordinary accesses of global memory with bulk copies."""
    ptx("fence.proxy.async;", "")


def atomic_add(at: Value, value: Value) -> Value:
    """Adds to a word of global memory, without ordering; the old value."""
    return ptx32("atom.relaxed.gpu.global.add.u32 $0, [$1], $2;", "=r,l,r", at, value)


def raise_counter(at: Value) -> None:
    """Adds one to a counter after everything this thread did before."""
    ptx("fence.acq_rel.gpu; red.release.gpu.global.add.u32 [$0], 1;", "l", at)


def read_counter(at: Value) -> Value:
    """A counter, before everything this thread does afterwards."""
    return ptx32("ld.acquire.gpu.global.u32 $0, [$1];", "=r,l", at)


def clock_ns() -> Value:
    """The GPU's clock, nanoseconds, i64."""
    return ptx64("mov.u64 $0, %globaltimer;", "=l")
