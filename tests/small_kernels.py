"""Small kernels for tests of the interpreter itself: how to run them, and what their code shares."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, gpu
from kernel_interpreter import Allocation, Launch, Machine, Program, compile_kernel

from shardfly_jax.pallas_kernels import addresses as m
from shardfly_jax.pallas_kernels.emit import Int, const, while_loop

SEEDS = range(6)


def compiled(emit: Callable[..., object], n_operands: int, scratch: dict[str, int] | None = None) -> Program:
    """Code that takes addresses as `Int`s; see `compile_kernel`."""
    return compile_kernel(lambda *values: emit(*map(Int, values)), n_operands, scratch or {})


def run(
    emit: Callable[..., object],
    make: Callable[[], list[Allocation]],
    *,
    blocks: int = 1,
    scratch: dict[str, int] | None = None,
) -> list[Allocation]:
    """Runs a kernel on fresh operands under several schedules; the operands of the last."""
    program = compiled(emit, len(make()), scratch)
    for seed in SEEDS:
        operands = make()
        Machine([Launch(program=program, operands=tuple(operands), blocks=blocks)], [], seed).run()
    return operands


def words(name: str, *values: int, **flags: bool) -> Allocation:
    return Allocation(name, np.array(values, np.uint32), **flags)


def read(allocation: Allocation) -> np.ndarray:
    """Its words."""
    return allocation.data.view(np.uint32)


def computed(emit: Callable[..., Int], *inputs: np.ndarray, uniform: bool = False) -> np.ndarray:
    """Applies emitted code to 128 words, one per thread, or (`uniform`) to the first ones in all threads."""

    def code(out: Int, *data: Int) -> None:
        at = const(0) if uniform else m.thread()
        m.store_element(element(out, m.thread()), [emit(*(m.load32(element(x, at)) for x in data))], 4)

    return read(run(code, lambda: [Allocation("out", 512), *(Allocation("in", x, read_only=True) for x in inputs)])[0])


def block() -> Int:
    """Number of this block."""
    return Int(arith.index_cast(ir.IntegerType.get_signless(32), gpu.block_id(gpu.Dimension.x)))


def element(at: Int, index: Int, nbytes: int = 4) -> Int:
    """Address of an element."""
    return at + index * const(nbytes, at.bits)


def put(at: Int, value: Int) -> None:
    """Stores a word to global memory."""
    m.store_element(at, [value], 4)


def first_thread() -> Int:
    return m.thread() == 0


def spin(while_: Callable[[], Int]) -> None:
    """Does nothing while a condition holds."""
    while_loop([], lambda: (while_(), []), list)


def first_of(number: int) -> Int:
    """Whether this is the first thread of a block."""
    return first_thread() & (block() == number)
