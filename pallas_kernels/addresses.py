"""Raw device addresses in Mosaic GPU kernels: all PTX instructions with effects, and the way for those without.

Global addresses are 64-bit `Int`s, shared-memory addresses 32-bit ones. One warpgroup of `THREADS` threads runs the
code. Ordering: a release orders what its thread did, and what it knows of others by a barrier, before it; bulk copies
go through another proxy, and `fence_async` orders the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import llvm
from jax.experimental.mosaic.gpu import utils as mgpu_utils

from shardfly_jax.pallas_kernels.emit import Int, const, when

THREADS = 128


def ptx(text: str, constraints: str, *args: Int) -> None:
    """An instruction with effects and no result."""
    operands = [arg.value for arg in args]
    llvm.inline_asm(ir.Type.parse("!llvm.void"), operands, text, constraints, has_side_effects=True)


def ptx_value(
    text: str, constraints: str, *args: Int, bits: int = 32, pure: bool = False, convergent: bool = False
) -> Int:
    """An instruction with one result; a pure one may be moved, merged and dropped, a convergent one not split up."""
    result, operands = ir.IntegerType.get_signless(bits), [arg.value for arg in args]
    return Int(llvm.inline_asm(result, operands, text, constraints, has_side_effects=not pure, convergent=convergent))


def _four(text: str, constraints: str, at: Int) -> list[Int]:
    struct = llvm.StructType.get_literal([ir.IntegerType.get_signless(32)] * 4)
    loaded = llvm.inline_asm(struct, [at.value], text, constraints, has_side_effects=True)
    return [Int(llvm.extractvalue(ir.IntegerType.get_signless(32), loaded, [k])) for k in range(4)]


def address(ref: Any) -> Int:
    """Global address of a memref."""
    return Int(llvm.ptrtoint(ir.IntegerType.get_signless(64), mgpu_utils.memref_ptr(ref)))


def shared_address(ref: Any) -> Int:
    """Shared-memory address of a memref."""
    return Int(llvm.ptrtoint(ir.IntegerType.get_signless(32), mgpu_utils.memref_ptr(ref)))


def thread() -> Int:
    """Number of this thread in its warpgroup."""
    return Int(mgpu_utils.thread_idx()) % THREADS


def warpgroup() -> Int:
    """Number of this warpgroup in its block."""
    return Int(mgpu_utils.thread_idx()) // THREADS


def clock_ns() -> Int:
    """The GPU's clock, nanoseconds, 64 bits."""
    return ptx_value("mov.u64 $0, %globaltimer;", "=l", bits=64)


def sleep(nanoseconds: int) -> None:
    """Pauses this thread for about so long."""
    ptx(f"nanosleep.u32 {nanoseconds};", "")


# Global memory.


def load32(at: Int) -> Int:
    """Four bytes."""
    return ptx_value("ld.global.u32 $0, [$1];", "=r,l", at)


def load_word(at: Int, word: int) -> Int:
    """The `word`-th 32-bit word of a record."""
    return load32(at + 4 * word)


def load_pair(at: Int, word: int) -> Int:
    """Two words of a record as 64 bits, the low one first."""
    return load_word(at, word).wide() | load_word(at, word + 1).wide() << 32


def load_element(at: Int, nbytes: int) -> list[Int]:
    """1, 2, 4 or 8 bytes as 32-bit words, zero-extended."""
    if nbytes == 8:
        return [load32(at), load32(at + 4)]
    return [ptx_value(f"ld.global.u{8 * nbytes} $0, [$1];", "=r,l", at)]


def store_element(at: Int, words: Sequence[Int], nbytes: int) -> None:
    """Stores the low bytes of 32-bit words."""
    if nbytes == 8:
        store_element(at, words[:1], 4)
        store_element(at + 4, words[1:], 4)
        return
    ptx(f"st.global.u{8 * nbytes} [$0], $1;", "l,r", at, words[0])


def load_vector(at: Int) -> list[Int]:
    """16 aligned bytes that are read once, as four words."""
    return _four("ld.global.L1::no_allocate.v4.u32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,l", at)


def store_vector(at: Int, words: Sequence[Int]) -> None:
    """Four words to 16 aligned bytes that are not read soon."""
    ptx("st.global.cs.v4.u32 [$0], {$1, $2, $3, $4};", "l,r,r,r,r", at, *words)


# Shared memory.


def load_shared(at: Int) -> Int:
    """Four bytes."""
    return ptx_value("ld.shared.u32 $0, [$1];", "=r,r", at)


def store_shared(at: Int, word: Int) -> None:
    """Four bytes."""
    ptx("st.shared.u32 [$0], $1;", "r,r", at, word)


def load_shared_element(at: Int, nbytes: int) -> Int:
    """1, 2 or 4 bytes, zero-extended."""
    return ptx_value(f"ld.shared.u{8 * nbytes} $0, [$1];", "=r,r", at)


def store_shared_element(at: Int, word: Int, nbytes: int) -> None:
    """The low 1, 2 or 4 bytes of a word."""
    ptx(f"st.shared.u{8 * nbytes} [$0], $1;", "r,r", at, word)


def load_shared_vector(at: Int) -> list[Int]:
    """16 aligned bytes as four words."""
    return _four("ld.shared.v4.u32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,r", at)


def store_shared_vector(at: Int, words: Sequence[Int]) -> None:
    """Four words to 16 aligned bytes."""
    ptx("st.shared.v4.u32 [$0], {$1, $2, $3, $4};", "r,r,r,r,r", at, *words)


def max_shared(at: Int, word: Int) -> None:
    """Replaces a word that other threads change by the larger of both."""
    ptx("red.shared.max.u32 [$0], $1;", "r,r", at, word)


def permute_bytes(a: Int, b: Int, selector: int) -> Int:
    """Four of the eight bytes of `b:a`, one hexadecimal digit of the selector each, the lowest first."""
    return ptx_value(f"prmt.b32 $0, $1, $2, 0x{selector:04x};", "=r,r,r", a, b, pure=True)


def max_halves(a: Int, b: Int) -> Int:
    """The larger of the lower and of the upper halves."""
    return ptx_value("max.u16x2 $0, $1, $2;", "=r,r,r", a, b, pure=True)


def max_of_warp(word: Int) -> Int:
    """The largest word of a warp; all of its threads come here."""
    return ptx_value("redux.sync.max.u32 $0, $1, 0xffffffff;", "=r,r", word, convergent=True)


def unpack(words: Sequence[Int], nbytes: int) -> list[list[Int]]:
    """Words as elements of 1, 2, 4 or 8 bytes: each a list of words, zero-extended."""
    if nbytes == 8:
        return [list(words[k : k + 2]) for k in range(0, len(words), 2)]
    if nbytes == 4:
        return [[word] for word in words]
    mask = (1 << (8 * nbytes)) - 1
    return [
        [(word >> 8 * nbytes * k if k else word) & mask if k < 4 // nbytes - 1 else word >> 8 * nbytes * k]
        for word in words
        for k in range(4 // nbytes)
    ]


def pack(elements: Sequence[Sequence[Int]], nbytes: int) -> list[Int]:
    """What `unpack` took apart."""
    if nbytes >= 4:
        return [word for element in elements for word in element]
    per_word = 4 // nbytes
    words = []
    for start in range(0, len(elements), per_word):
        (word,) = elements[start]
        for k in range(1, per_word):
            word = word | elements[start + k][0] << 8 * nbytes * k
        words.append(word)
    return words


# Barriers and bulk copies.


def barrier() -> None:
    """Waits for all threads of the warpgroup."""
    mgpu_utils.warpgroup_barrier()


def block_barrier() -> None:
    """Waits for all threads of the block."""
    ptx("bar.sync 0;", "")


def init_barrier(at: Int) -> None:
    """A barrier of 8 bytes in shared memory that waits for one arrival."""
    with when(thread() == 0):
        ptx("mbarrier.init.shared::cta.b64 [$0], 1;", "r", at)
        ptx("fence.mbarrier_init.release.cluster;", "")
    barrier()


def expect_bytes(at: Int, nbytes: Int) -> None:
    """Arrives at a barrier, which then waits for `nbytes` of bulk loads."""
    ptx("mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", "r,r", at, nbytes)


def wait_barrier(at: Int, parity: Int) -> None:
    """Waits until a barrier has passed the phase of a parity."""
    text = "{ .reg .pred p; WAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1; @!p bra WAIT; }"
    ptx(text, "r,r", at, parity)


def bulk_load(shared: Int, at: Int, nbytes: Int, barrier_at: Int) -> None:
    """Global to shared memory; everything a multiple of 16."""
    text = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];"
    ptx(text, "r,l,r,r", shared, at, nbytes, barrier_at)


def bulk_store(at: Int, shared: Int, nbytes: Int) -> None:
    """Shared to global memory; everything a multiple of 16."""
    ptx("cp.async.bulk.global.shared::cta.bulk_group [$0], [$1], $2;", "l,r,r", at, shared, nbytes)


def commit_stores() -> None:
    """Closes this thread's group of bulk stores."""
    ptx("cp.async.bulk.commit_group;", "")


def wait_stores(*, read: bool) -> None:
    """Until this thread's bulk stores are finished, or (`read`) have at least read their source."""
    ptx(f"cp.async.bulk.wait_group{'.read' if read else ''} 0;", "")


def fence_async() -> None:
    """Orders ordinary accesses with bulk copies."""
    ptx("fence.proxy.async;", "")


# What other threads see, on this device ("gpu") or on all ("sys").


def atomic_add(at: Int, value: int, order: str, *, only: Int) -> Int:
    """Adds to a word where `only` holds, `relaxed` or ordered both ways (`acq_rel`); the old value, elsewhere 0."""
    add = f"@p atom.{order}.gpu.global.add.u32 $0, [$1], $2;"
    text = f"{{ .reg .pred p; setp.ne.u32 p, $3, 0; mov.u32 $0, 0; {add} }}"
    return ptx_value(text, "=&r,l,r,r", at, const(value), only.where(const(1), 0))


def raise_counter(at: Int, scope: str) -> None:
    """Adds one to a counter after everything this thread did before."""
    ptx(f"red.release.{scope}.global.add.u32 [$0], 1;", "l", at)


def read_counter(at: Int) -> Int:
    """A counter, before everything this thread does afterwards."""
    return ptx_value("ld.acquire.sys.global.u32 $0, [$1];", "=r,l", at)


def read_word(at: Int) -> Int:
    """A word that other threads change, without ordering."""
    return ptx_value("ld.relaxed.gpu.global.u32 $0, [$1];", "=r,l", at)


def set_if_zero(at: Int, value: Int) -> None:
    """Sets a word that is zero."""
    ptx("{ .reg .u32 old; atom.relaxed.gpu.global.cas.b32 old, [$0], 0, $1; }", "l,r", at, value)


def raise_word(at: Int, word: Int) -> None:
    """Replaces a word, perhaps of another device, by the larger of both, without ordering."""
    ptx("red.relaxed.sys.global.max.u32 [$0], $1;", "l,r", at, word)


def read_flag(at: Int) -> Int:
    """64 bits that another device may have written, before everything this thread does afterwards."""
    return ptx_value("ld.acquire.sys.global.u64 $0, [$1];", "=l,l", at, bits=64)


def write_flag(at: Int, value: Int) -> None:
    """64 bits for another device, after everything this thread did before."""
    ptx("st.release.sys.global.u64 [$0], $1;", "l,l", at, value)
