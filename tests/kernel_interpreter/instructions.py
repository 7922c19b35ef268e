"""The table of PTX instructions. What is not in it is refused, so that each is added on purpose.

A new instruction is one function under `@instruction(pattern)`. The pattern matches the whole opcode; the function gets
the match and the operands, and emits lines or new values of registers through `Asm`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from kernel_interpreter.memory import GLOBAL, SHARED
from kernel_interpreter.ptx import Asm, UnknownInstruction, instruction, split

SPACES = {"global": GLOBAL, "shared": SHARED, "shared::cta": SHARED}
ORDERS = {"weak", "relaxed", "acquire", "release", "acq_rel", "volatile"}
SCOPES = {"gpu", "sys"}  # of .cta and .cluster the machine knows nothing
CACHE = re.compile(r"ca|cg|cs|lu|cv|wb|wt|L1::(no_allocate|evict_\w+)|L2::(64|128|256)B")

CHANGES: dict[str, Callable[..., int]] = {
    "st": lambda old, new: new,
    "exch": lambda old, new: new,
    "add": lambda old, x: old + x,
    "min": min,
    "max": max,
    "and": lambda old, x: old & x,
    "or": lambda old, x: old | x,
    "xor": lambda old, x: old ^ x,
    "cas": lambda old, wanted, new: new if old == wanted else old,
}
"""What atomics make of a location, unsigned."""


def _elements(operand: str) -> list[str]:
    return split(operand[1:-1], ",") if operand.startswith("{") else [operand]


def _qualifiers(asm: Asm, opcode: str) -> dict[str, Any]:
    """The parts of the opcode of an access."""
    found: dict[str, Any] = {"order": "weak", "scope": "gpu", "count": 1, "constant": False}
    for part in opcode.split(".")[1:]:
        if part in SPACES:
            found["space"] = SPACES[part]
        elif part in ORDERS:
            found["order"] = "relaxed" if part == "volatile" else part
            if part == "volatile":
                found["scope"] = "sys"
        elif part in SCOPES:
            found["scope"] = part
        elif part in ("v2", "v4", "v8"):
            found["count"] = int(part[1:])
        elif part == "nc":
            found["constant"] = True
        elif part in CHANGES:
            found["change"] = part
        elif re.fullmatch(r"[bu](8|16|32|64)|f(32|64)", part):
            found["size"] = int(part[1:]) // 8
        elif not CACHE.fullmatch(part):
            raise UnknownInstruction(f"{part!r} in {opcode!r}")
    if not {"space", "size"} <= set(found):
        raise UnknownInstruction(f"{opcode!r} names no state space or no type")
    found["width"] = 32 if found["space"] == SHARED else 64
    return found


@instruction(r"ld\..*")
def _(asm: Asm, match: re.Match[str], operands: list[str]) -> None:
    q = _qualifiers(asm, match[0])
    where, names = asm.address(operands[1], q["width"]), _elements(operands[0])
    if len(names) != q["count"]:
        raise UnknownInstruction(f"{asm.statement!r} names {len(names)} registers")
    if q["order"] == "weak":
        values = asm.out.new("t")
        call = asm.effect(
            "load", repr(q["space"]), where, str(q["size"]), str(q["count"]), str(q["constant"]), point=False
        )
        asm.out.line(f"{values} = {call}")
        for k, name in enumerate(names):
            asm.write(name, f"{values}[{k}]")
    elif q["count"] == 1:
        order = (repr(q["order"]), repr(q["scope"]))
        asm.write(names[0], asm.effect("atomic", repr(q["space"]), where, str(q["size"]), *order, "None"))
    else:
        raise UnknownInstruction(f"{asm.statement!r}: atomic vectors are not known")


@instruction(r"st\..*")
def _(asm: Asm, match: re.Match[str], operands: list[str]) -> None:
    q = _qualifiers(asm, match[0])
    where, values = asm.address(operands[0], q["width"]), [asm.read(x) for x in _elements(operands[1])]
    if len(values) != q["count"]:
        raise UnknownInstruction(f"{asm.statement!r} names {len(values)} registers")
    if q["order"] == "weak":
        listed = f"[{', '.join(values)}]"
        asm.out.line(asm.effect("store", repr(q["space"]), where, str(q["size"]), listed, point=False))
    elif q["count"] == 1:
        rest = (repr(q["order"]), repr(q["scope"]), "CHANGES['st']", values[0], "reads=False")
        asm.out.line(asm.effect("atomic", repr(q["space"]), where, str(q["size"]), *rest))
    else:
        raise UnknownInstruction(f"{asm.statement!r}: atomic vectors are not known")


@instruction(r"(atom|red)\..*")
def _(asm: Asm, match: re.Match[str], operands: list[str]) -> None:
    q = _qualifiers(asm, match[0])
    target = operands.pop(0) if match[1] == "atom" else "_"
    order = "relaxed" if q["order"] == "weak" else q["order"]  # PTX ISA, atom: the default
    rest = (repr(order), repr(q["scope"]), f"CHANGES[{q['change']!r}]", *map(asm.read, operands[1:]))
    where = asm.address(operands[0], q["width"])
    polls = () if match[1] == "atom" else ("polls=False",)  # code cannot wait for what it does not read
    asm.write(target, asm.effect("atomic", repr(q["space"]), where, str(q["size"]), *rest, *polls))


@instruction(r"(?:fence\.(?:acq_rel|sc)|membar)\.(gpu|gl|sys)")
def _(asm: Asm, match: re.Match[str], operands: list[str]) -> None:
    asm.out.line(f"w.fence({asm.out.mask}, {'sys' if match[1] == 'sys' else 'gpu'!r})")


@instruction(r"fence\.proxy\.async(?:\.(global|shared::cta|shared::cluster))?")
def _(asm: Asm, match: re.Match[str], operands: list[str]) -> None:
    spaces = (GLOBAL, SHARED) if match[1] is None else (match[1].split("::")[0],)
    asm.out.line(f"w.fence_async({asm.out.mask}, {spaces!r})")


@instruction(r"fence\.mbarrier_init\.release\.cluster")
def _(asm: Asm, match: re.Match[str], operands: list[str]) -> None:
    asm.out.line(f"w.fence_mbarriers({asm.out.mask})")


@instruction(r"bar\.warp\.sync")
def _(asm: Asm, match: re.Match[str], operands: list[str]) -> None:
    asm.out.line(asm.effect("sync_warp", asm.read(operands[0])))


@instruction(r"(?:bar|barrier)(?:\.cta)?\.sync(?:\.aligned)?")
def _(asm: Asm, match: re.Match[str], operands: list[str]) -> None:
    count = asm.read(operands[1]) if len(operands) > 1 else "w.block.threads"
    asm.out.line(f"yield from {asm.effect('sync_block', asm.read(operands[0]), count)}")


@instruction(r"mbarrier\.init\.shared(?:::cta)?\.b64")
def _(asm: Asm, match: re.Match[str], operands: list[str]) -> None:
    asm.out.line(asm.effect("init_mbarrier", asm.address(operands[0], 32), asm.read(operands[1])))


@instruction(r"mbarrier\.arrive(\.expect_tx)?(?:\.release\.cta)?\.shared(?:::cta)?\.b64")
def _(asm: Asm, match: re.Match[str], operands: list[str]) -> None:
    given = asm.read(operands[2]) if len(operands) > 2 else None
    count, nbytes = ("1", given) if match[1] else (given or "1", "0")
    if operands[0] != "_" or nbytes is None:
        raise UnknownInstruction(f"{asm.statement!r}: tokens of arrivals are not known")
    asm.out.line(asm.effect("arrive", asm.address(operands[1], 32), count, nbytes))


@instruction(r"mbarrier\.(?:try|test)_wait\.parity(?:\.acquire\.cta)?\.shared(?:::cta)?\.b64")
def _(asm: Asm, match: re.Match[str], operands: list[str]) -> None:
    asm.write(operands[0], asm.effect("has_passed", asm.address(operands[1], 32), asm.read(operands[2])))


@instruction(r"cp\.async\.bulk\.shared::(?:cluster|cta)\.global\.mbarrier::complete_tx::bytes")
def _(asm: Asm, match: re.Match[str], operands: list[str]) -> None:
    shared, at, nbytes, barrier = operands
    where = (asm.address(shared, 32), asm.address(at, 64), asm.read(nbytes), asm.address(barrier, 32))
    asm.out.line(asm.effect("bulk_load", *where, is_async=True))


@instruction(r"cp\.async\.bulk\.global\.shared::cta\.bulk_group")
def _(asm: Asm, match: re.Match[str], operands: list[str]) -> None:
    at, shared, nbytes = operands
    where = (asm.address(at, 64), asm.address(shared, 32), asm.read(nbytes))
    asm.out.line(asm.effect("bulk_store", *where, is_async=True))


@instruction(r"cp\.async\.bulk\.commit_group")
def _(asm: Asm, match: re.Match[str], operands: list[str]) -> None:
    asm.out.line(f"w.commit({asm.out.mask})")


@instruction(r"cp\.async\.bulk\.wait_group(\.read)?")
def _(asm: Asm, match: re.Match[str], operands: list[str]) -> None:
    asm.out.line("yield")
    asm.out.line(f"w.wait_group({asm.out.mask}, {asm.read(operands[0])}, read={match[1] is not None})")


@instruction(r"nanosleep\.u32")
def _(asm: Asm, match: re.Match[str], operands: list[str]) -> None:
    asm.out.line("yield")


# Registers


@instruction(r"mov\.[bsuf](16|32|64)")
def _(asm: Asm, match: re.Match[str], operands: list[str]) -> None:
    to, source = operands
    width = int(match[1])
    if source == "%globaltimer":
        asm.write(to, "w.clock()")
    elif to.startswith("{"):
        parts = _elements(to)
        n = width // len(parts)
        for k, part in enumerate(parts):
            asm.write(part, f"resize(shru({asm.read(source)}, {n * k}, {width}) & {(1 << n) - 1}, {max(n, 32)})")
    elif source.startswith("{"):
        parts = _elements(source)
        n = width // len(parts)
        values = [f"shl(resize({asm.read(part)}, {width}), {n * k}, {width})" for k, part in enumerate(parts)]
        asm.write(to, " | ".join(values))
    else:
        asm.write(to, asm.read(source))


@instruction(r"prmt\.b32")
def _(asm: Asm, match: re.Match[str], operands: list[str]) -> None:
    asm.write(operands[0], f"permute_bytes({', '.join(map(asm.read, operands[1:]))})")


@instruction(r"(add|sub|mul|div)\.rn\.f32")
def _(asm: Asm, match: re.Match[str], operands: list[str]) -> None:
    asm.write(operands[0], f"float_op({match[1]!r}, {', '.join(map(asm.read, operands[1:]))})")


@instruction(r"(min|max)\.f32")
def _(asm: Asm, match: re.Match[str], operands: list[str]) -> None:
    asm.write(operands[0], f"float_op({match[1]!r}, {', '.join(map(asm.read, operands[1:]))})")


@instruction(r"abs\.f32")
def _(asm: Asm, match: re.Match[str], operands: list[str]) -> None:
    asm.write(operands[0], f"{asm.read(operands[1])} & 0x7FFFFFFF")


@instruction(r"max\.u16x2")
def _(asm: Asm, match: re.Match[str], operands: list[str]) -> None:
    asm.write(operands[0], f"max_halves({', '.join(map(asm.read, operands[1:]))})")


@instruction(r"redux\.sync\.max\.u32")
def _(asm: Asm, match: re.Match[str], operands: list[str]) -> None:
    asm.write(operands[0], asm.effect("max_of_lanes", *map(asm.read, operands[1:]), point=False))


@instruction(r"(add|sub)\.[us](32|64)")
def _(asm: Asm, match: re.Match[str], operands: list[str]) -> None:
    asm.write(operands[0], f"{match[1]}({', '.join(map(asm.read, operands[1:]))}, {match[2]})")


@instruction(r"(and|or|xor)\.(?:b32|b64|pred)")
def _(asm: Asm, match: re.Match[str], operands: list[str]) -> None:
    sign = {"and": "&", "or": "|", "xor": "^"}[match[1]]
    asm.write(operands[0], f" {sign} ".join(map(asm.read, operands[1:])))


@instruction(r"cvt\.u(16|32|64)\.u(16|32|64)")
def _(asm: Asm, match: re.Match[str], operands: list[str]) -> None:
    kept = min(int(match[1]), int(match[2]))
    value = f"{asm.read(operands[1])} & {(1 << kept) - 1}"
    asm.write(operands[0], f"resize({value}, {max(int(match[1]), 32)})")


@instruction(r"cvt\.rn\.(f16|bf16)\.f32")
def _(asm: Asm, match: re.Match[str], operands: list[str]) -> None:
    asm.write(operands[0], f"encode(decode({asm.read(operands[1])}, 'f32'), {match[1]!r})")


@instruction(r"cvt\.rn\.(f16|bf16)x2\.f32")
def _(asm: Asm, match: re.Match[str], operands: list[str]) -> None:
    high, low = (f"encode(decode({asm.read(x)}, 'f32'), {match[1]!r})" for x in operands[1:])  # PTX ISA, cvt: a is high
    asm.write(operands[0], f"{low} | {high} << 16")


@instruction(r"cvt\.rn\.satfinite\.e4m3x2\.f32")
def _(asm: Asm, match: re.Match[str], operands: list[str]) -> None:
    high, low = (f"encode_e4m3(decode({asm.read(x)}, 'f32'))" for x in operands[1:])  # PTX ISA, cvt: a is high
    asm.write(operands[0], f"{low} | {high} << 8")


@instruction(r"cvt\.rni\.s32\.f32")
def _(asm: Asm, match: re.Match[str], operands: list[str]) -> None:
    asm.write(operands[0], f"to_integer(decode({asm.read(operands[1])}, 'f32'))")


@instruction(r"cvt\.f32\.(f16|bf16)")
def _(asm: Asm, match: re.Match[str], operands: list[str]) -> None:
    asm.write(operands[0], f"encode(decode({asm.read(operands[1])}, {match[1]!r}), 'f32')")


COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
               "lo": "<", "ls": "<=", "hi": ">", "hs": ">="}  # fmt: skip


@instruction(rf"setp\.({'|'.join(COMPARISONS)})\.([bsu])(32|64)")
def _(asm: Asm, match: re.Match[str], operands: list[str]) -> None:
    a, b = map(asm.read, operands[1:])
    if match[2] == "s":
        a, b = f"signed({a}, {match[3]})", f"signed({b}, {match[3]})"
    asm.write(operands[0], f"({a}) {COMPARISONS[match[1]]} ({b})")


@instruction(r"setp\.(eq|lt|le|gt|ge)\.f32")
def _(asm: Asm, match: re.Match[str], operands: list[str]) -> None:
    a, b = (f"decode({asm.read(x)}, 'f32')" for x in operands[1:])
    asm.write(operands[0], f"{a} {COMPARISONS[match[1]]} {b}")


@instruction(r"setp\.(num|nan)\.f32")
def _(asm: Asm, match: re.Match[str], operands: list[str]) -> None:
    a, b = (f"is_nan({asm.read(x)})" for x in operands[1:])
    either = f"({a}) | ({b})"
    asm.write(operands[0], either if match[1] == "nan" else f"negate({either})")


@instruction(r"shl\.b32")
def _(asm: Asm, match: re.Match[str], operands: list[str]) -> None:
    a, b = map(asm.read, operands[1:])
    shifted = f"shl(resize({a}, 64), least({b}, 32), 64)"  # PTX ISA, shl: amounts are clamped to 32
    asm.write(operands[0], f"resize({shifted}, 32)")


@instruction(r"shr\.[bu]32")
def _(asm: Asm, match: re.Match[str], operands: list[str]) -> None:
    a, b = map(asm.read, operands[1:])
    shifted = f"shru(resize({a}, 64), least({b}, 32), 64)"  # PTX ISA, shr: amounts are clamped to 32
    asm.write(operands[0], f"resize({shifted}, 32)")


@instruction(r"selp\.[bsu](32|64)")
def _(asm: Asm, match: re.Match[str], operands: list[str]) -> None:
    a, b, condition = map(asm.read, operands[1:])
    asm.write(operands[0], f"pick({condition}, {a}, {b}, {match[1]})")
