"""A mapping: for each target name, the expression that gives its value."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Iterator, Mapping as AbstractMapping
from typing import NamedTuple

from shardfly_jax.sharding.errors import LanguageError
from shardfly_jax.sharding.language import Alias, Expr, FamilyIndex, Index, Quantize, ScaleOf, Src, Stack
from shardfly_jax.sharding.patterns import FAMILY, NamePattern, name_pattern, name_shape
from shardfly_jax.sharding.walks import nodes, outer_fuse, quantized, rewrite


class Mapping(AbstractMapping[str, Expr]):
    """Target name patterns and their expressions.

    A literal name beats a pattern. Two patterns that match one name are a fault, found when the plan is made.

    Raises:
      LanguageError: An entry is not an expression, uses a variable that its name does not bind, or nests fuse or alias.
    """

    def __init__(self, entries: AbstractMapping[str, Expr]):
        self._entries = dict(entries)
        self._literals: set[str] = set()
        self._by_shape: dict[str, list[NamePattern]] = {}
        for text, expr in self._entries.items():
            if not isinstance(text, str):
                raise LanguageError(f"mapping: the name {text!r} is a {type(text).__name__}, but a string is needed.")
            if not isinstance(expr, Expr):
                raise LanguageError(
                    f"mapping: {text!r} is {expr!r}, but an expression such as sf.src('name') is needed."
                )
            pattern = name_pattern(text)
            try:
                outer_fuse(expr)
                if quantized(expr) is not None and not isinstance(expr, Quantize):
                    raise LanguageError("quantize: astype follows, but codes keep their dtype. Cast before.")
            except LanguageError as error:
                raise LanguageError(f"mapping: {text!r}: {error}") from None
            if unbound := sorted(_variables(expr) - set(pattern.variables)):
                raise LanguageError(f"mapping: {text!r} uses the variables {unbound}, but its name does not bind them.")
            if pattern.is_literal:
                self._literals.add(text)
            else:
                self._by_shape.setdefault(pattern.shape, []).append(pattern)

    def __getitem__(self, text: str) -> Expr:
        return self._entries[text]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def candidates(self, name: str) -> list[tuple[str, dict[str, int]]]:
        """Entries that match a target name, with the values of their variables; a literal one stands alone."""
        if name in self._literals:
            return [(name, {})]
        found = []
        for pattern in self._by_shape.get(name_shape(name), ()):
            values = pattern.match(name)
            if values is not None:
                found.append((pattern.text, values))
        return found

    @classmethod
    def identity(cls, names: AbstractMapping[str, object]) -> Mapping:
        """Every target is the source of the same name; the first number of a name counts along its family."""
        entries: dict[str, Expr] = {}
        for name in sorted(names):
            if "{" in name or "}" in name:
                continue  # reported with the target's other faults
            head, *rest = _split_first_number(name)
            text = head + "{" + FAMILY + "}" + rest[0] if rest else head
            entries[text] = Src(text)
        return cls(entries)


def _split_first_number(name: str) -> list[str]:
    parts = name.split(".")
    for k, part in enumerate(parts):
        if re.fullmatch("0|[1-9][0-9]*", part):
            before, after = ".".join(parts[:k]), ".".join(parts[k + 1 :])
            return [before + "." if before else "", "." + after if after else ""]
    return [name]


def _variables(expr: Expr) -> set[str]:
    found: set[str] = set()
    for node in nodes(expr):
        if isinstance(node, Src | Alias | ScaleOf):
            found |= set(name_pattern(node.name).variables)
        if isinstance(node, Index):
            found |= {item.value.variable for item in node.items if isinstance(item, FamilyIndex)}
    return found


class Bound(NamedTuple):
    """An entry with every variable but the family's replaced by its value."""

    pattern: str
    expr: Expr


def bind(text: str, expr: Expr, values: AbstractMapping[str, int]) -> Bound:
    """Replaces enumerated variables; `{i}` stays."""
    values = {name: value for name, value in values.items() if name != FAMILY}
    pattern = name_pattern(text).bind(values)
    if not values:
        return Bound(pattern, expr)

    def leaf(node: Expr) -> Expr | None:
        if isinstance(node, Src | Alias | ScaleOf):
            return type(node)(name_pattern(node.name).bind(values))
        if isinstance(node, Index):
            items = tuple(bound_item(item, values) for item in node.items)
            picked = _part_of_stack(node.value, items)
            if picked is not None:
                part = rewrite(picked, leaf)
                return Index(part, items[1:]) if items[1:] else part
            return Index(rewrite(node.value, leaf), items)
        return None

    return Bound(pattern, rewrite(expr, leaf))


def _part_of_stack(value: Expr, items: tuple[int | slice | FamilyIndex, ...]) -> Expr | None:
    """The part that an index takes out of a stack; without it, each of n experts would be cut out of a stack of n."""
    if not (isinstance(value, Stack) and value.axis == 0 and items and isinstance(items[0], int)):
        return None
    return value.parts[items[0]] if -len(value.parts) <= items[0] < len(value.parts) else None


def bound_item(item: int | slice | FamilyIndex, values: AbstractMapping[str, int]) -> int | slice | FamilyIndex:
    """An index with its variable replaced by its value, if that is given."""
    if isinstance(item, FamilyIndex) and item.value.variable in values:
        index = item.value.at(values[item.value.variable])
        if index < 0:
            raise LanguageError(f"index: {{{item.value}}} is {index}, which is before the first element")
        return index
    return item


def resolve_other(mapping: Mapping, node: Alias | ScaleOf, names: AbstractMapping[int, str]) -> Expr:
    """The expression of the target that an alias or `scale_of` names, in terms of the reader's own family variable.

    Args:
      names: The reader's members.

    Raises:
      LanguageError: There is no such expression.
    """
    what = "the alias' target" if isinstance(node, Alias) else "the quantized target"
    first = min(names)
    member = name_pattern(node.name).format({FAMILY: first})
    found = mapping.candidates(member)
    if not found:
        near = difflib.get_close_matches(node.name, mapping, 1)
        hint = f"; the nearest name is {near[0]!r}" if near else ""
        raise LanguageError(f"{what} {member!r} is not in the mapping. Name a target that is{hint}")
    if len(found) > 1:
        raise LanguageError(f"{what} {member!r} is mapped {len(found)} times, but it must be mapped once")
    text, values = found[0]
    literal = name_pattern(node.name).is_literal
    for i in () if literal else names:
        other = name_pattern(node.name).format({FAMILY: i})
        if [entry for entry, _ in mapping.candidates(other)] != [text]:
            raise LanguageError(f"{what} {other!r} has another entry than {member!r}. Write one for each entry")
    if not literal and values.get(FAMILY) != first:
        raise LanguageError(f"{what} {member!r} counts layers differently. Write its expression again")
    if literal:
        expr = bind(text, mapping[text], {k: v for k, v in values.items() if k != FAMILY}).expr
        if FAMILY in values:
            raise LanguageError(f"{what} {member!r} is one layer of {text!r}. Write its expression again")
    else:
        expr = bind(text, mapping[text], values).expr
    if isinstance(expr, Alias):
        raise LanguageError(f"{what} {member!r} is itself an alias")
    return expr


def matches(name: str, patterns: tuple[str, ...]) -> str | None:
    """The first of some patterns that matches a name: `{i}` patterns, or shell-style `*` and `?`."""
    for text in patterns:
        if "{" in text:
            if name_pattern(text).match(name) is not None:
                return text
        elif fnmatch.fnmatchcase(name, text):
            return text
    return None
