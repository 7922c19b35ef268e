"""Names with variables: `layers.{i}.w`, `layers.{i:3:}.w`, `layers.{2*i+1}.w`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from functools import lru_cache

from shardfly_jax.sharding.errors import LanguageError

FAMILY = "i"
"""The variable that counts along the virtual axis of a family; all other variables are enumerated."""


@dataclasses.dataclass(frozen=True, order=True)
class Affine:
    """`scale * variable + offset`; a plain number when `variable` is empty."""

    variable: str
    scale: int = 1
    offset: int = 0

    def at(self, value: int) -> int:
        """The value of the function."""
        return self.scale * value + self.offset

    def solve(self, number: int) -> int | None:
        """The variable's value for which the function is `number`; None if it is not a whole number."""
        value, rest = divmod(number - self.offset, self.scale)
        return None if rest else value

    def of(self, inner: Affine) -> Affine:
        """`self` of `inner`, a function of `inner`'s variable."""
        return Affine(inner.variable, self.scale * inner.scale, self.at(inner.offset))

    def __str__(self) -> str:
        head = self.variable if self.scale == 1 else f"{self.scale}*{self.variable}"
        return head + (f"{self.offset:+d}" if self.offset else "")


def parse_affine(text: str) -> Affine:
    """Reads `i`, `i-3`, `2*i+1`.

    Raises:
      LanguageError: Another form, or a factor of 0.
    """
    match = re.fullmatch(r"(?:(\d+)\s*\*\s*)?([A-Za-z_]\w*)\s*([+-]\s*\d+)?", text.strip())
    if not match:
        raise LanguageError(f"name: '{{{text}}}' is not of the form '{{i}}', '{{i+1}}' or '{{2*i+1}}'.")
    scale = int(match.group(1)) if match.group(1) else 1
    if scale == 0:
        raise LanguageError(f"name: '{{{text}}}' does not depend on its variable. Write the number.")
    return Affine(match.group(2), scale, int(match.group(3).replace(" ", "")) if match.group(3) else 0)


@dataclasses.dataclass(frozen=True)
class Hole:
    """A part in braces: the number `value` for `lo <= variable < hi`; no end where `hi` is None."""

    value: Affine
    lo: int
    hi: int | None

    def __str__(self) -> str:
        bounds = "" if (self.lo, self.hi) == (0, None) else f":{self.lo}:{'' if self.hi is None else self.hi}"
        return f"{{{self.value}{bounds}}}"


class NamePattern:
    """A name in which parts in braces stand for numbers.

    `{i}` matches a number, `{i:3:}` a number from 3 on, `{i:0:3}` 0, 1 or 2, `{2*i+1}` an odd number whose half is i.
    """

    def __init__(self, text: str):
        self.text = text
        pieces = re.split(r"\{([^{}]*)\}", text)
        if any(brace in piece for piece in pieces[::2] for brace in "{}"):
            raise LanguageError(f"name: the braces of {text!r} do not pair up.")
        self.literals = tuple(pieces[::2])
        self.holes = tuple(_parse_hole(piece, text) for piece in pieces[1::2])
        self.variables = tuple(dict.fromkeys(hole.value.variable for hole in self.holes))
        self.shape = name_shape("0".join(self.literals))
        regex = re.escape(self.literals[0])
        for literal in self.literals[1:]:
            regex += r"([0-9]+)" + re.escape(literal)
        self._regex = re.compile(regex)

    @property
    def is_literal(self) -> bool:
        """Whether the name has no variables."""
        return not self.holes

    def match(self, name: str) -> dict[str, int] | None:
        """The values of the variables for which this pattern is `name`; None if there are none."""
        found = self._regex.fullmatch(name)
        if not found:
            return None
        values: dict[str, int] = {}
        for hole, digits in zip(self.holes, found.groups(), strict=True):
            value = hole.value.solve(int(digits))
            if (
                value is None
                or value < hole.lo
                or (hole.hi is not None and value >= hole.hi)
                or str(int(digits)) != digits
            ):
                return None
            if values.setdefault(hole.value.variable, value) != value:
                return None
        return values

    def format(self, values: Mapping[str, int]) -> str:
        """The name for given values of the variables."""
        out = [self.literals[0]]
        for hole, literal in zip(self.holes, self.literals[1:], strict=True):
            out += [str(hole.value.at(values[hole.value.variable])), literal]
        return "".join(out)

    def bind(self, values: Mapping[str, int]) -> str:
        """The pattern's text with some variables replaced by their values, ranges left out."""
        out = [self.literals[0]]
        for hole, literal in zip(self.holes, self.literals[1:], strict=True):
            variable = hole.value.variable
            out += [str(hole.value.at(values[variable])) if variable in values else f"{{{hole.value}}}", literal]
        return "".join(out)

    def renumbered(self, at: Affine, lo: int = 0, hi: int | None = None) -> str:
        """The pattern's text with the family variable i replaced by `at(i)` for `lo <= i < hi`; its own range goes."""
        out, bounds = [self.literals[0]], (lo, hi)
        for hole, literal in zip(self.holes, self.literals[1:], strict=True):
            if hole.value.variable == FAMILY:
                hole, bounds = Hole(hole.value.of(at), *bounds), (0, None)
            out += [str(hole), literal]
        return "".join(out)


def _parse_hole(text: str, name: str) -> Hole:
    head, *bounds = text.split(":")
    if len(bounds) > 2 or any(bound.strip() and not bound.strip().isdigit() for bound in bounds):
        raise LanguageError(
            f"name: the range in '{{{text}}}' of {name!r} is not of the form '{{i:3:}}' or '{{i:0:3}}'."
        )
    lo = int(bounds[0]) if bounds and bounds[0].strip() else 0
    hi = int(bounds[1]) if len(bounds) > 1 and bounds[1].strip() else None
    return Hole(parse_affine(head), lo, hi)


def name_shape(name: str) -> str:
    """The name with every number replaced by `#`: names of one family share it."""
    return re.sub("[0-9]+", "#", name)


@lru_cache(maxsize=65536)
def name_pattern(text: str) -> NamePattern:
    """The pattern of a text, parsed once."""
    return NamePattern(text)
