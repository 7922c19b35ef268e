"""Inline PTX to Python: statements, registers, predicates, branches; what instructions mean is `instructions`.

A branch is conditional. It goes back to a label and makes a loop, or ahead to one and makes a part that lanes skip;
loops and skipped parts nest.

Emitted code refers to `w` (the `warp.Warp`), to the functions of `lanes`, and to `s`, the number of the program's first
site.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Protocol

WIDTHS = {"pred": 1}
LOOP, SKIP = "loop", "skip"
UNDEFINED = 0xA5A5A5A5A5A5A5A5
"""What registers hold before they are written: anything, but not a zero that code might count on."""
CONSTRAINTS = {"h": 16, "r": 32, "f": 32, "l": 64}


class UnknownInstruction(Exception):
    """The interpreter has no meaning for it yet."""


class Emitter(Protocol):
    """What `translate` gives: a writer of Python lines."""

    mask: str

    def line(self, text: str) -> None: ...
    def new(self, prefix: str) -> str: ...
    def site(self, text: str, *, is_async: bool) -> str: ...
    def indent(self, by: int) -> None: ...


def split(text: str, separator: str) -> list[str]:
    """Parts of a text, not cut inside brackets or braces."""
    parts, depth, start = [], 0, 0
    for k, letter in enumerate(text):
        depth += (letter in "[{") - (letter in "]}")
        if letter == separator and depth == 0:
            parts.append(text[start:k].strip())
            start = k + 1
    return [*parts, text[start:].strip()]


Handler = Callable[["Asm", "re.Match[str]", list[str]], None]
TABLE: list[tuple[re.Pattern[str], Handler]] = []


def instruction(pattern: str) -> Callable[[Handler], Handler]:
    def add(handler: Handler) -> Handler:
        TABLE.append((re.compile(pattern), handler))
        return handler

    return add


class Asm:
    """Translates one inline assembly text.

    Args:
      out: Where lines go.
      text: PTX, with `$k` for operands.
      constraints: As in LLVM.
      inputs: Python expressions.
    """

    def __init__(self, out: Emitter, text: str, constraints: str, inputs: list[str]):
        self.out, self.text, self.whole = out, text, out.mask
        kinds = constraints.split(",") if constraints else []
        n_outputs = sum(kind.startswith("=") for kind in kinds)
        if any(kind.lstrip("=&") not in CONSTRAINTS for kind in kinds):
            raise UnknownInstruction(f"constraints {constraints!r} of {text!r}")
        self.open: list[tuple[str, str, str]] = []  # loops and skipped parts: LOOP or SKIP, label, mask around it
        self.registers: dict[str, tuple[str, int]] = {}  # name and width of the Python variable
        for k, kind in enumerate(kinds[:n_outputs]):
            self._declare(f"${k}", CONSTRAINTS[kind.lstrip("=&")])
        self.outputs = [self.registers[f"${k}"][0] for k in range(n_outputs)]
        for k, value in enumerate(inputs):
            self.registers[f"${n_outputs + k}"] = (value, CONSTRAINTS[kinds[n_outputs + k]])

    def _declare(self, name: str, width: int) -> None:
        variable = self.out.new("r")
        self.out.line(f"{variable} = {False if width == 1 else UNDEFINED >> (64 - width)}")
        self.registers[name] = (variable, width)

    def run(self) -> list[str]:
        """Emits it all; the Python variables of the outputs."""
        body = re.sub(r"\s+", " ", self.text).strip()
        if body.startswith("{") and body.endswith("}"):
            body = body[1:-1]
        statements = [part for part in split(body, ";") if part]
        for statement in statements:
            while label := re.match(r"([A-Za-z_$][\w$]*)\s*:(?!:)\s*", statement):
                self._label(label[1])
                statement = statement[label.end() :]
            if statement:
                self._statement(statement)
        if self.open:
            raise UnknownInstruction(f"labels and branches that do not nest in {self.text!r}")
        return self.outputs

    def _label(self, label: str) -> None:
        if not self._is_open(SKIP, label):
            self._open(LOOP, label, self.out.mask)
        while self._is_open(SKIP, label):  # where lanes that branched ahead meet the others
            self._close()

    def _branch(self, label: str, condition: str | None) -> None:
        if condition is None:
            raise UnknownInstruction(f"a branch without a condition in {self.text!r}")
        if self._is_open(LOOP, label):
            self.out.line(f"{self.out.mask} = both({self.out.mask}, {condition})")
            self.out.line(f"if {self.out.mask} is None: break")
            self._close()
        else:
            self._open(SKIP, label, f"both({self.out.mask}, negate({condition}))")

    def _is_open(self, kind: str, label: str) -> bool:
        return bool(self.open) and self.open[-1][:2] == (kind, label)

    def _open(self, kind: str, label: str, mask: str) -> None:
        self.open.append((kind, label, self.out.mask))
        self.out.mask = self._mask_variable(mask)
        self.out.line("while True:" if kind == LOOP else f"if {self.out.mask} is not None:")
        self.out.indent(1)
        self.out.line("pass")

    def _close(self) -> None:
        _, _, self.out.mask = self.open.pop()
        self.out.indent(-1)

    def _mask_variable(self, value: str) -> str:
        name = self.out.new("m")
        self.out.line(f"{name} = {value}")
        return name

    def _statement(self, statement: str) -> None:
        if statement.startswith("."):
            declared = re.fullmatch(r"\.reg \.(pred|[bsuf](?:16|32|64)) (.*)", statement)
            if declared is None:
                raise UnknownInstruction(f"{statement!r} of {self.text!r}")
            for name in split(declared[2], ","):
                self._declare(name, WIDTHS.get(declared[1]) or int(declared[1][1:]))
            return
        guard = re.match(r"@(!?)(\S+) +", statement)
        condition = None
        if guard:
            statement = statement[guard.end() :]
            condition = f"negate({self.read(guard[2])})" if guard[1] else self.read(guard[2])
        opcode, _, rest = statement.partition(" ")
        operands = split(rest, ",") if rest.strip() else []
        if opcode == "bra":
            self._branch(rest, condition)
            return
        outer = self.out.mask
        if condition is not None:
            self.out.mask = self._mask_variable(f"both({outer}, {condition})")
            self.out.line(f"if {self.out.mask} is not None:")
            self.out.indent(1)
        self.statement = statement
        for pattern, handler in TABLE:
            match = pattern.fullmatch(opcode)
            if match:
                handler(self, match, operands)
                break
        else:
            raise UnknownInstruction(f"{statement!r} of {self.text!r}")
        if condition is not None:
            self.out.indent(-1)
            self.out.mask = outer

    # What handlers use

    def read(self, operand: str) -> str:
        """An operand's value as a Python expression."""
        if operand in self.registers:
            return self.registers[operand][0]
        if re.fullmatch(r"0[fF][0-9A-Fa-f]{8}", operand):
            return str(int(operand[2:], 16))
        if re.fullmatch(r"-?\d+|0x[0-9A-Fa-f]+", operand):
            return str(int(operand, 0))
        raise UnknownInstruction(f"operand {operand!r} of {self.text!r}")

    def write(self, operand: str, value: str) -> None:
        if operand == "_":
            self.out.line(value)
            return
        if operand not in self.registers:
            raise UnknownInstruction(f"operand {operand!r} of {self.text!r}")
        name, width = self.registers[operand]
        if self.out.mask != self.whole:
            value = f"update({name}, {value}, {self.out.mask}, {self.whole}, {width})"
        self.out.line(f"{name} = {value}")

    def address(self, operand: str, width: int) -> str:
        inside = re.fullmatch(r"\[\s*(\S+?)\s*(?:\+\s*(\d+)\s*)?\]", operand)
        if inside is None:
            raise UnknownInstruction(f"address {operand!r} of {self.text!r}")
        base = self.read(inside[1])
        return f"add({base}, {inside[2]}, {width})" if inside[2] else base

    def effect(self, call: str, *operands: str, point: bool = True, is_async: bool = False) -> str:
        """`w.call(site, mask, operands)`; `point`: after one at which others may run."""
        if point:
            self.out.line("yield")
        site = self.out.site(self.statement, is_async=is_async)
        return f"w.{call}({', '.join([site, self.out.mask, *operands])})"
