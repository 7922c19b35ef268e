"""Integers and control flow of emitted kernel code.

Everything here is called while a kernel body is being built, inside `plgpu.inline_mgpu`. An `Int` stands for a value
that each thread will have; operators emit the instruction that computes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, scf


class Int:
    """An unsigned integer of 1, 32 or 64 bits per thread.

    Arithmetic wraps. Python integers become constants of the other operand's width; a 32-bit operand beside a 64-bit
    one is zero-extended. Comparisons are unsigned and give 1 bit.
    """

    __hash__ = None  # type: ignore[assignment]  # == emits code
    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value

    @property
    def bits(self) -> int:
        """Width."""
        return int(ir.IntegerType(self.value.type).width)

    def wide(self) -> Int:
        """Zero-extended to 64 bits."""
        return self if self.bits == 64 else Int(arith.extui(_type(64), self.value))

    def low(self) -> Int:
        """The low 32 bits."""
        return self if self.bits == 32 else Int(arith.trunci(_type(32), self.value))

    def _with(self, other: Int | int) -> tuple[Any, Any]:
        if isinstance(other, int):
            return self.value, const(other, self.bits).value
        if self.bits == other.bits:
            return self.value, other.value
        return self.wide().value, other.wide().value

    def __add__(self, other: Int | int) -> Int:
        return Int(arith.addi(*self._with(other)))

    def __sub__(self, other: Int | int) -> Int:
        return Int(arith.subi(*self._with(other)))

    def __mul__(self, other: Int | int) -> Int:
        return Int(arith.muli(*self._with(other)))

    def __floordiv__(self, other: Int | int) -> Int:
        return Int(arith.divui(*self._with(other)))

    def __mod__(self, other: Int | int) -> Int:
        return Int(arith.remui(*self._with(other)))

    def __and__(self, other: Int | int) -> Int:
        return Int(arith.andi(*self._with(other)))

    def __or__(self, other: Int | int) -> Int:
        return Int(arith.ori(*self._with(other)))

    def __xor__(self, other: Int | int) -> Int:
        return Int(arith.xori(*self._with(other)))

    def __lshift__(self, other: Int | int) -> Int:
        return Int(arith.shli(*self._with(other)))

    def __rshift__(self, other: Int | int) -> Int:
        return Int(arith.shrui(*self._with(other)))

    def __lt__(self, other: Int | int) -> Int:
        return self._compare(arith.CmpIPredicate.ult, other)

    def __le__(self, other: Int | int) -> Int:
        return self._compare(arith.CmpIPredicate.ule, other)

    def __gt__(self, other: Int | int) -> Int:
        return self._compare(arith.CmpIPredicate.ugt, other)

    def __eq__(self, other: Int | int) -> Int:  # type: ignore[override]
        return self._compare(arith.CmpIPredicate.eq, other)

    def __ne__(self, other: Int | int) -> Int:  # type: ignore[override]
        return self._compare(arith.CmpIPredicate.ne, other)

    def _compare(self, predicate: Any, other: Int | int) -> Int:
        return Int(arith.cmpi(predicate, *self._with(other)))

    def at_most(self, other: Int | int) -> Int:
        """The smaller of two."""
        return Int(arith.minui(*self._with(other)))

    def at_least(self, other: Int | int) -> Int:
        """The larger of two signed values."""
        return Int(arith.maxsi(*self._with(other)))

    def where(self, one: Int, other: Int | int) -> Int:
        """`one` where this bit is set, else `other`."""
        return Int(arith.select(self.value, *one._with(other)))


def _type(bits: int) -> ir.Type:
    return ir.IntegerType.get_signless(bits)


def const(value: int, bits: int = 32) -> Int:
    """A constant; values of the upper half are the negative ones."""
    if bits > 1 and value >= 1 << (bits - 1):
        value -= 1 << bits
    return Int(arith.constant(_type(bits), value))  # type: ignore[arg-type,call-arg]  # stubs of the generated function


@contextmanager
def when(condition: Int) -> Iterator[None]:
    """Code that runs in threads where a condition holds."""
    op = scf.IfOp(condition.value)  # type: ignore[call-arg]  # the stubs are of the generated class
    with ir.InsertionPoint(op.then_block):
        yield
        scf.YieldOp([])


def if_else(condition: Int, then: Callable[[], Int], otherwise: Callable[[], Int], bits: int = 32) -> Int:
    """What `then` computes in threads where a condition holds, elsewhere what `otherwise` does."""
    op = scf.IfOp(condition.value, [_type(bits)], has_else=True)  # type: ignore[call-arg]
    for block, compute in ((op.then_block, then), (op.else_block, otherwise)):
        with ir.InsertionPoint(block):
            scf.YieldOp([compute().value])
    return Int(op.results[0])


def for_range(start: Int, stop: Int, step: int, body: Callable[[Int], None]) -> None:
    """`for k in range(start, stop, step)` over 32-bit integers."""
    loop = scf.ForOp(start.value, stop.value, const(step).value)  # type: ignore[call-arg]
    with ir.InsertionPoint(loop.body):
        body(Int(loop.induction_variable))
        scf.YieldOp([])


def while_loop(
    carry: Sequence[Int],
    condition: Callable[..., tuple[Int, list[Int]]],
    body: Callable[..., list[Int]],
    extra_bits: Sequence[int] = (),
) -> list[Int]:
    """A loop whose condition may compute values for its body.

    Args:
      carry: Initial values, passed to `condition`.
      condition: Returns whether to go on, and what `body` gets: as many values as `carry` has, then the extra ones.
      body: Returns the next carry.
      extra_bits: Widths of the extra values.

    Returns:
      What `condition` last returned for `body`.
    """
    types = [value.value.type for value in carry]
    loop = scf.WhileOp([*types, *map(_type, extra_bits)], [value.value for value in carry])
    before = loop.before.blocks.append(*types)
    with ir.InsertionPoint.at_block_begin(before):
        go_on, passed = condition(*map(Int, before.arguments))
        scf.condition(go_on.value, [value.value for value in passed])
    after = loop.after.blocks.append(*[value.value.type for value in passed])
    with ir.InsertionPoint.at_block_begin(after):
        scf.yield_([value.value for value in body(*map(Int, after.arguments))])
    return [Int(value) for value in loop.results]
