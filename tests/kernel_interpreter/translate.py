"""A kernel's emitted MLIR to a Python generator that runs one warp.

Each operation becomes a line or two; values are those of `lanes`. Control flow keeps its form: where a condition
differs between lanes, both sides run, each under a mask. The generator yields where other warps may run (see
`machine`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax._src.interpreters import mlir
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import func

from kernel_interpreter import instructions, lanes, ptx
from kernel_interpreter.memory import Site
from kernel_interpreter.ptx import UnknownInstruction

ARCH = (9, 0)  # Hopper
PREDICATES = ("==", "!=", "<", "<=", ">", ">=", "<", "<=", ">", ">=")  # arith.cmpi, by number; 2 to 5 are signed
BINARY = {
    "arith.addi": "add({}, {}, {bits})",
    "arith.subi": "sub({}, {}, {bits})",
    "arith.muli": "mul({}, {}, {bits})",
    "arith.divui": "divu({}, {}, {mask})",
    "arith.remui": "remu({}, {}, {mask})",
    "arith.andi": "{} & {}",
    "arith.ori": "{} | {}",
    "arith.xori": "{} ^ {}",
    "arith.shli": "shl({}, {}, {bits})",
    "arith.shrui": "shru({}, {}, {bits})",
    "arith.shrsi": "shrs({}, {}, {bits})",
    "arith.minui": "least({}, {})",
    "arith.maxui": "greatest({}, {})",
    "arith.minsi": "unsigned(least(signed({}, {bits}), signed({}, {bits})), {bits})",
    "arith.maxsi": "unsigned(greatest(signed({}, {bits}), signed({}, {bits})), {bits})",
}
GPU = {"gpu.thread_id": "w.threads", "gpu.block_dim": "w.block.threads", "gpu.block_id": "w.block.index",
       "gpu.grid_dim": "w.block.of"}  # of x; y and z have one  # fmt: skip


class Program:
    """A translated kernel.

    Attributes:
      scratch: Bytes of each shared allocation of a block, by name.
      sites: Instructions with effects, in the order of their numbers.
      source: The Python text, for debugging.
    """

    def __init__(self, source: str, sites: list[Site], scratch: dict[str, int]):
        self.source, self.sites, self.scratch = source, sites, scratch
        names = vars(lanes) | {"CHANGES": instructions.CHANGES}
        exec(compile(source, "<kernel>", "exec"), names)
        self.run: Callable[..., Iterator[None]] = names["kernel"]


def compile_kernel(emit: Callable[..., None], n_operands: int, scratch: dict[str, int]) -> Program:
    """Emits a kernel's code and translates it.

    Args:
      emit: Called inside an MLIR function with the addresses of the operands in global memory (i64) and of the shared
        allocations (i32); emits the code of a block.
      n_operands: How many operands there are.
      scratch: Bytes of each shared allocation, by name.
    """
    with mlir.make_ir_context(), ir.Location.unknown(), ir.loc_tracebacks(max_depth=12):
        i32, i64 = (ir.IntegerType.get_signless(n) for n in (32, 64))
        module = ir.Module.create()
        for name, value in zip(("mosaic_gpu.arch_major", "mosaic_gpu.arch_minor"), ARCH, strict=True):
            module.operation.attributes[name] = ir.IntegerAttr.get(i32, value)
        with ir.InsertionPoint(module.body):
            function = func.FuncOp("kernel", ([i64] * n_operands + [i32] * len(scratch), []))
            with ir.InsertionPoint(function.add_entry_block()):
                emit(*function.arguments)
                func.ReturnOp([])
        module.operation.verify()
        out = _Translator()
        out.function(function)
        return Program("\n".join(out.lines), out.sites, scratch)


def _bits(kind: ir.Type) -> int:
    if isinstance(kind, ir.IntegerType):
        return kind.width
    if isinstance(kind, ir.IndexType):
        return 64
    if isinstance(kind, ir.F32Type):
        return 32
    raise UnknownInstruction(f"values of type {kind}")


class _Translator:
    """Writes the lines; see `ptx.Emitter`."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.sites: list[Site] = []
        self.names: dict[ir.Value, str] = {}
        self.depth, self.count, self.mask = 0, 0, "m0"

    def line(self, text: str) -> None:
        self.lines.append(" " * self.depth + text)

    def indent(self, by: int) -> None:
        self.depth += by

    def new(self, prefix: str) -> str:
        self.count += 1
        return f"{prefix}{self.count}"

    def site(self, text: str, *, is_async: bool) -> str:
        frames = re.findall(r'"([^"]+)"\("([^"]+)":(\d+)', str(self.location))
        names = [name for name, _, _ in frames]
        frames = frames[: names.index(compile_kernel.__name__) if compile_kernel.__name__ in names else 4]
        where = " < ".join(f"{name.rsplit('.', 1)[-1]} {file.rsplit('/', 1)[-1]}:{line}" for name, file, line in frames)
        self.sites.append(Site(text, where, is_async))
        return f"s + {len(self.sites) - 1}"

    def function(self, function: func.FuncOp) -> None:
        block = function.entry_block
        names = self._bind(block.arguments, "a")
        self.line(f"def kernel(w, s, {', '.join(names)}):")
        self.indent(1)
        self.line("m0 = ALL")
        self._block(block)
        self.line("return")
        self.line("yield")  # a generator even if nothing yields
        self.indent(-1)

    def _bind(self, values: Sequence[ir.Value], prefix: str) -> list[str]:
        for value in values:
            self.names[value] = self.new(prefix)
        return [self.names[value] for value in values]

    def _assign(self, names: Sequence[str], values: Sequence[str]) -> None:
        if names:
            self.line(f"{', '.join(names)}, = {', '.join(values)},")

    def _block(self, block: ir.Block) -> list[str]:
        """Emits a block's operations; what its terminator passes on."""
        for op in block.operations:
            operation = op.operation
            values = [self.names[value] for value in operation.operands]
            if operation.name in ("scf.yield", "scf.condition", "func.return"):
                return values
            self.location = operation.location
            self._operation(operation, values)
        return []

    def _operation(self, op: ir.Operation, values: list[str]) -> None:
        name = op.name
        if name in STRUCTURED:
            STRUCTURED[name](self, op, values)
            return
        if name == "llvm.inline_asm":
            text, constraints = (ir.StringAttr(op.attributes[key]).value for key in ("asm_string", "constraints"))
            outputs = ptx.Asm(self, text, constraints, values).run()
            if outputs:
                self.names[op.result] = f"({', '.join(outputs)},)" if len(outputs) > 1 else outputs[0]
            return
        (result,) = self._bind(op.results, "v")
        bits = 0 if name == "llvm.extractvalue" else _bits(op.result.type)
        if name == "arith.constant":
            value = ir.IntegerAttr(op.attributes["value"]).value
            self.names[op.result] = str(bool(value)) if bits == 1 else str(value & ((1 << bits) - 1))
            return
        self.line(f"{result} = {self._expression(op, name, values, bits)}")

    def _expression(self, op: ir.Operation, name: str, values: list[str], bits: int) -> str:
        if name in BINARY:
            return BINARY[name].format(*values, bits=bits, mask=self.mask)
        if name == "arith.cmpi":
            number, width = ir.IntegerAttr(op.attributes["predicate"]).value, _bits(op.operands[0].type)
            a, b = (f"signed({x}, {width})" for x in values) if 2 <= number < 6 else values
            return f"{a} {PREDICATES[number]} {b}"
        if name == "arith.select":
            return f"pick({', '.join(values)}, {bits})"
        if name == "arith.trunci" and bits == 1:
            return f"({values[0]} & 1) == 1"
        if name in ("arith.extui", "arith.trunci", "arith.index_cast", "arith.index_castui"):
            signed = name == "arith.index_cast" and bits == 64
            return f"extend_signed({values[0]}, 32, 64)" if signed else f"resize({values[0]}, {bits})"
        if name == "arith.extsi":
            if _bits(op.operands[0].type) == 1:
                return f"pick({values[0]}, {(1 << bits) - 1}, 0, {bits})"
            return f"extend_signed({values[0]}, {_bits(op.operands[0].type)}, {bits})"
        if name == "arith.bitcast":
            return values[0]
        if name == "llvm.extractvalue":
            (position,) = ir.DenseI64ArrayAttr(op.attributes["position"])
            return f"{values[0]}[{position}]"
        if name in GPU:
            dimension = re.search(r"dim<(\w)>", str(op.attributes["dimension"]))[1]
            return GPU[name] if dimension == "x" else "1" if name.endswith("_dim") else "0"
        raise UnknownInstruction(f"operation {name}")

    # Control flow

    def _if(self, op: ir.Operation, values: list[str]) -> None:
        results, outer, ends = self._bind(op.results, "v"), self.mask, []
        for k, region in enumerate(op.regions):
            if not len(region.blocks):
                continue
            ended = [self.new("e") for _ in results]
            self._assign(ended, ["0"] * len(ended))
            self.mask = self.new("m")
            self.line(f"{self.mask} = both({outer}, {f'negate({values[0]})' if k else values[0]})")
            self.line(f"if {self.mask} is not None:")
            self.indent(1)
            self.line("pass")
            self._assign(ended, self._block(region.blocks[0]))
            self.indent(-1)
            self.mask = outer
            ends.append(ended)
        for result, value, a, b in zip(results, op.results, *ends, strict=True) if results else ():
            self.line(f"{result} = pick({values[0]}, {a}, {b}, {_bits(value.type)})")

    def _while(self, op: ir.Operation, values: list[str]) -> None:
        before, after = (region.blocks[0] for region in op.regions)
        results, outer = self._bind(op.results, "v"), self.mask
        self._assign(results, ["0"] * len(results))
        self._assign(self._bind(before.arguments, "c"), values)
        self.mask = self.new("m")
        self.line(f"{self.mask} = {outer}")
        self.line("while True:")
        self.indent(1)
        condition, *passed = self._block(before)
        widths = [_bits(value.type) for value in op.results]
        self._update(results, passed, widths, outer)
        self._assign(self._bind(after.arguments, "p"), passed)
        self.line(f"{self.mask} = both({self.mask}, {condition})")
        self.line(f"if {self.mask} is None: break")
        carried, ended = [self.names[value] for value in before.arguments], self._block(after)
        self.line(f"yield moved([{', '.join(carried)}], [{', '.join(ended)}])")  # if not, it waits for others
        self._assign(carried, ended)
        self.indent(-1)
        self.mask = outer

    def _update(self, names: list[str], values: list[str], widths: list[int], outer: str) -> None:
        merged = [
            f"update({name}, {value}, {self.mask}, {outer}, {bits})"
            for name, value, bits in zip(names, values, widths, strict=True)
        ]
        self._assign(names, merged)

    def _for(self, op: ir.Operation, values: list[str]) -> None:
        start, stop, step, *initial = values
        block = op.regions[0].blocks[0]
        results, outer = self._bind(op.results, "v"), self.mask
        counter, *carried = self._bind(block.arguments, "c")
        bits = _bits(block.arguments[0].type)
        self._assign(results, initial)
        self._assign([counter, *carried], [start, *initial])
        below = f"signed({counter}, {bits}) < signed({stop}, {bits})"
        self.mask = self.new("m")
        self.line(f"{self.mask} = both({outer}, {below})")
        self.line(f"while {self.mask} is not None:")
        self.indent(1)
        passed = self._block(block)
        self._update(results, passed, [_bits(value.type) for value in op.results], outer)
        self._assign([counter, *carried], [f"add({counter}, {step}, {bits})", *passed])
        self.line(f"{self.mask} = both({self.mask}, {below})")
        self.indent(-1)
        self.mask = outer


STRUCTURED: dict[str, Callable[[_Translator, Any, list[str]], None]] = {
    "scf.if": _Translator._if,
    "scf.while": _Translator._while,
    "scf.for": _Translator._for,
}
