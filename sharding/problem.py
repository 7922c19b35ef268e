"""From trees and mappings to families and units of work, with every fault found on the way."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping as AbstractMapping

from shardfly_jax.sharding.errors import LanguageError, PlanError
from shardfly_jax.sharding.families import Family, TargetTree, Unit
from shardfly_jax.sharding.formats import FLOAT_TO_INT, is_float, is_narrowing
from shardfly_jax.sharding.inference import TensorType, infer
from shardfly_jax.sharding.language import Alias, Astype, Expr, Quantize, ScaleOf, Scales
from shardfly_jax.sharding.layouts import Layout, LocalTensors
from shardfly_jax.sharding.mapping import Mapping, bind, matches, resolve_other
from shardfly_jax.sharding.patterns import FAMILY, name_pattern
from shardfly_jax.sharding.quantized_targets import bound_quantize, scales
from shardfly_jax.sharding.walks import nodes, outer_fuse, rewrite, sources


class Problem:
    """What must be moved: families, units, and for each unit its sources.

    Args:
      tensors: Source layouts by name, in trainer ranks.
      source_ranks: How many trainer ranks there are.
      targets: The target trees; their ranks follow the trainers', tree after tree.
      allow_cast: Target names that may be narrowed, e.g. `("*",)`.
      keep: Target names that are never touched.
      unused: Source names that no target needs.

    Raises:
      PlanError: Lists every fault.
    """

    def __init__(
        self,
        tensors: AbstractMapping[str, Layout],
        source_ranks: int,
        targets: Iterable[TargetTree],
        *,
        allow_cast: tuple[str, ...] = (),
        keep: tuple[str, ...] = (),
        unused: tuple[str, ...] = (),
    ):
        self.tensors, self.source_ranks, self.targets = tensors, source_ranks, list(targets)
        self.allow_cast, self.keep, self.unused = allow_cast, keep, unused
        self.faults: list[str] = []
        self.families: list[Family] = []
        self.units: list[Unit] = []
        self._used: set[str] = set()
        self._kept: set[str] = set()
        self._types: dict[tuple[str, int], TensorType] = {}
        self.source_families: dict[str, list[int]] = {}
        base = source_ranks
        for tree in self.targets:
            self._add_tree(tree, base)
            base += tree.ranks
        self.target_ranks = base - source_ranks
        self._check_leftovers()
        if not self.faults:
            self._make_units()
        if not self.faults and not self.units:
            self.faults.append("empty: no target would be written. Check that the mapping's patterns name the targets.")
        if not self.faults:
            self._add_source_families()
        if self.faults:
            raise PlanError(self.faults)

    # --- targets: names to families

    def _add_tree(self, tree: TargetTree, base: int) -> None:
        mapping = Mapping.identity(tree.tensors) if tree.mapping is None else tree.mapping
        members: dict[tuple[int, tuple[tuple[str, int], ...]], dict[int, str]] = {}
        position = {text: k for k, text in enumerate(mapping)}
        reached: set[int] = set()
        for name in tree.tensors:
            if kept := matches(name, self.keep):
                self._kept.add(kept)
                continue
            if "{" in name or "}" in name:
                self._fault("name", tree, name, "has braces, which stand for variables in patterns. Rename the key")
                continue
            found = mapping.candidates(name)
            reached |= {position[text] for text, _ in found}
            if not found:
                self._fault("unmapped", tree, name, "matches no pattern of the mapping. Map it, or list it in keep=")
            elif len(found) > 1:
                texts = ", ".join(repr(text) for text, _ in found)
                self._fault(
                    "doubly mapped", tree, name, f"matches the patterns {texts}. Narrow one, e.g. with a range {{i:3:}}"
                )
            else:
                text, values = found[0]
                others = tuple(sorted((key, value) for key, value in values.items() if key != FAMILY))
                members.setdefault((position[text], others), {})[values.get(FAMILY, 0)] = name
        texts_ = list(mapping)
        for text, k in position.items():
            if k not in reached and not isinstance(mapping[text], Alias) and not self._only_kept(text, tree):
                self.faults.append(
                    f"unmatched: the pattern {text!r} matches no target of {tree.name!r}. Remove it, or mend the name."
                )
        for (k, others), names in sorted(members.items()):
            self._add_entry(tree, base, mapping, texts_[k], dict(others), names)

    def _only_kept(self, text: str, tree: TargetTree) -> bool:
        pattern = name_pattern(text)
        return any(matches(name, self.keep) and pattern.match(name) is not None for name in tree.tensors)

    def _fault(self, kind: str, tree: TargetTree, name: str, message: str) -> None:
        self.faults.append(f"{kind}: target {name!r} of {tree.name!r} {message}.")

    def _add_entry(
        self, tree: TargetTree, base: int, mapping: Mapping, text: str, others: dict[str, int], names: dict[int, str]
    ) -> None:
        try:
            bound = bind(text, mapping[text], others)
        except LanguageError as error:
            self._fault("misshapen", tree, next(iter(names.values())), f"cannot be built: {str(error).rstrip('.')}")
            return
        pattern, expr, alias_of = bound.pattern, bound.expr, None
        if isinstance(expr, Alias):
            alias_of = expr.name
            try:
                expr = resolve_other(mapping, expr, names)
            except LanguageError as error:
                self._fault("alias", tree, next(iter(names.values())), f"cannot be built: {str(error).rstrip('.')}")
                return
        meant: dict[int, tuple[Layout, Expr]] = {}
        shifted: dict[int, tuple[Layout, Layout]] = {}  # by identity: many names share one layout
        has_scales = any(isinstance(node, ScaleOf) for node in nodes(expr))
        for i in sorted(names):
            try:
                own = self._with_scales(tree, mapping, expr, names, i) if has_scales else expr
            except (LanguageError, PlanError) as error:
                self._fault("scale_of", tree, names[i], f"cannot be built: {str(error).rstrip('.')}")
                continue
            layout = self._checked_layout(tree, names[i], own, i)
            if layout is None:
                continue
            if (
                has_scales
                and layout.dtype != "uint8"
                and any(isinstance(node, Scales) and node.format.scale == "e8m0" for node in nodes(own))
            ):
                self._fault(
                    "dtype", tree, names[i], f"holds E8M0 bytes, but its dtype is {layout.dtype}. Register uint8, and "
                    "view it as float8_e8m0fnu where it is read",
                )  # fmt: skip
                continue
            if isinstance(own, Quantize):
                try:
                    own = self._bound(own, layout, i)
                    if alias_of is not None:
                        self._check_alias(tree, alias_of, expr, own, i)
                except LanguageError as error:
                    self._fault("indivisible", tree, names[i], f"cannot be quantized: {str(error).rstrip('.')}")
                    continue
            if id(layout) not in shifted:
                shifted[id(layout)] = (layout, layout.shifted(base))
            meant[i] = shifted[id(layout)][1], own
        for first, stop in runs(list(meant.items())):
            layout, own = meant[first]
            self.families.append(Family(tree.name, pattern, first, stop - first, layout, own, alias_of))

    def _bound(self, expr: Quantize, layout: Layout, i: int) -> Quantize:
        fused = outer_fuse(expr)
        types = [infer(part, self._lookup, range(i, i + 1)) for part in fused.parts] if fused else []
        return bound_quantize(expr, layout, [t.shape[fused.axis] for t in types] if fused else [])

    def _check_alias(self, tree: TargetTree, other: str, expr: Expr, own: Quantize, i: int) -> None:
        """Raises:
        LanguageError: An alias is cut so that its blocks are others than those of its target, whose scales it has.
        """
        member = name_pattern(other).format({FAMILY: i})
        given = tree.tensors.get(member)
        if isinstance(given, LocalTensors):
            given = given.whole(infer(expr, self._lookup, range(i, i + 1)).shape)
        if given is not None and isinstance(expr, Quantize) and self._bound(expr, given, i).segments != own.segments:
            raise LanguageError(
                f"it is an alias of {member!r}, but cut otherwise, so that its scales would be others. Cut both alike"
            )

    def _with_scales(
        self, tree: TargetTree, mapping: Mapping, expr: Expr, names: AbstractMapping[int, str], i: int
    ) -> Expr:
        """The expression with each `scale_of` replaced by what it means for layer `i`."""

        def leaf(node: Expr) -> Expr | None:
            if not isinstance(node, ScaleOf):
                return None
            payload = resolve_other(mapping, node, names)
            member = name_pattern(node.name).format({FAMILY: i})
            given = tree.tensors.get(member)
            if not isinstance(payload, Quantize) or given is None:
                what = "mapped without .quantize(...)" if given is not None else "no target here"
                raise LanguageError(f"scale_of: {member!r} is {what}, but only a quantized target has scales")
            layout = given
            if isinstance(given, LocalTensors):
                layout = given.whole(infer(payload, self._lookup, range(i, i + 1)).shape)
            assert isinstance(layout, Layout)
            return scales(self._bound(payload, layout, i), layout)

        return rewrite(expr, leaf)

    def _checked_layout(self, tree: TargetTree, name: str, expr: Expr, i: int) -> Layout | None:
        try:
            shape, dtype = infer(expr, self._lookup, range(i, i + 1))
        except LanguageError as error:
            missing = isinstance(error, _MissingSource)
            self._fault("missing" if missing else "misshapen", tree, name, f"cannot be built: {str(error).rstrip('.')}")
            return None
        given = tree.tensors[name]
        try:
            layout = given.whole(shape) if isinstance(given, LocalTensors) else given
        except PlanError as error:
            self._fault("misshapen", tree, name, str(error))
            return None
        if layout.shape != shape:
            self._fault(
                "misshapen",
                tree,
                name,
                f"has shape {layout.shape}, but its mapping gives {shape}. Mend the mapping or the target",
            )
            return None
        if layout.ranks[-1] >= tree.ranks:
            self._fault(
                "misshapen", tree, name, f"has a box for rank {layout.ranks[-1]}, but the tree has {tree.ranks} ranks"
            )
            return None
        if 0 in shape:
            self._fault(
                "zero-size",
                tree,
                name,
                f"has shape {shape}, which holds nothing. Leave it out of the target or list it in keep=",
            )
            return None
        if isinstance(expr, Quantize) and layout.dtype != dtype:
            self._fault(
                "misshapen", tree, name, f"is {layout.dtype}, but its mapping quantizes to {dtype}. Give it that dtype"
            )
            return None
        if is_float(dtype) and not is_float(layout.dtype):
            self._fault("misshapen", tree, name, f"is {layout.dtype}, but its source is {dtype}, and {FLOAT_TO_INT}")
            return None
        if is_narrowing(dtype, layout.dtype) and not matches(name, self.allow_cast):
            self._fault(
                "narrowing", tree, name, f"is {layout.dtype}, but its source is {dtype} and values would be rounded. "
                f"List it in allow_cast=, or write .astype({layout.dtype!r}) in the mapping",
            )  # fmt: skip
            return None
        return layout

    def _lookup(self, name: str, layers: range) -> TensorType:
        pattern = name_pattern(name)
        types = {self._type_of(name, 0 if pattern.is_literal else i) for i in layers}
        if len(types) > 1:
            raise LanguageError(f"source {name!r} differs from layer to layer: {sorted(types)}")
        return types.pop()

    def _type_of(self, name: str, i: int) -> TensorType:
        key = (name, i)
        if key not in self._types:
            member = name_pattern(name).format({FAMILY: i})
            layout = self.tensors.get(member)
            if layout is None:
                raise _MissingSource(f"source {member!r} does not exist")
            self._used.add(member)
            self._types[key] = TensorType(layout.shape, layout.dtype)
        return self._types[key]

    def _check_leftovers(self) -> None:
        for pattern in self.keep:
            if pattern not in self._kept:
                self.faults.append(
                    f"unmatched: keep= has {pattern!r}, which matches no target. Remove it, or mend the name."
                )
        idle = [name for name in self.tensors if name not in self._used]
        for pattern in self.allow_cast:
            if not any(matches(name, (pattern,)) for tree in self.targets for name in tree.tensors):
                self.faults.append(
                    f"unmatched: allow_cast= has {pattern!r}, which matches no target. Remove it, or mend the name."
                )
        for pattern in self.unused:
            if not any(matches(name, (pattern,)) for name in idle):
                self.faults.append(
                    f"unmatched: unused= has {pattern!r}, which matches no idle source. Remove it, or mend the name."
                )
        for name in idle:
            if not matches(name, self.unused):
                self.faults.append(f"unused: source {name!r} reaches no target. Map it, or list it in unused=.")

    # --- families to units

    def _make_units(self) -> None:
        edges: dict[tuple[Expr, str], set[int]] = {}
        for family in self.families:
            assert family.expr is not None
            found = edges.setdefault((family.expr, family.layout.dtype), set())
            found |= {family.first, family.first + family.count}
            for name in sources(family.expr):
                if not name_pattern(name).is_literal:
                    typed = [(i, self._type_of(name, i)) for i in range(family.first, family.first + family.count)]
                    found |= {edge for run in runs(typed) for edge in run}
        for index, family in enumerate(self.families):
            assert family.expr is not None
            inside = sorted(
                e for e in edges[family.expr, family.layout.dtype] if family.first <= e <= family.first + family.count
            )
            try:
                cuts = self._fuse_cuts(family)
            except LanguageError as error:
                self.faults.append(f"misshapen: target {family.name(0)!r} of {family.tree!r}: {error}")
                continue
            expr = Astype(family.expr, family.layout.dtype)
            self.units += [Unit(index, expr, layers, cuts) for layers in itertools.pairwise(inside)]

    def _fuse_cuts(self, family: Family) -> tuple[tuple[int, int], ...]:
        assert family.expr is not None
        fused = outer_fuse(family.expr)
        if fused is None:
            return ()
        shape, cuts = family.layout.shape, family.cuts
        edges = [lo for lo, _ in cuts] + [shape[fused.axis]]
        if cuts[0][0] != 0 or [hi for _, hi in cuts] != edges[1:]:
            raise LanguageError(
                f"fuse: the ranks cut axis {fused.axis} into {list(cuts)}, which does not tile it. Give boxes that do."
            )
        return cuts

    def _add_source_families(self) -> None:
        ranges: dict[str, tuple[int, int]] = {}
        for unit in self.units:
            for name in sources(unit.expr):
                lo, hi = (0, 1) if name_pattern(name).is_literal else unit.layers
                old = ranges.get(name, (lo, hi))
                ranges[name] = (min(lo, old[0]), max(hi, old[1]))
        for name, (lo, hi) in ranges.items():
            pattern = name_pattern(name)
            known = [
                (i, self.tensors[member])
                for i in range(lo, hi)
                if (member := pattern.format({FAMILY: i})) in self.tensors
            ]
            layouts = dict(known)
            for first, stop in runs(known):
                overlap = layouts[first].overlap
                if overlap is not None:
                    one, two = overlap
                    self.faults.append(
                        f"overlap: the boxes {one} and {two} of source {pattern.format({FAMILY: first})!r} share "
                        "elements, so that two ranks would send them. Give boxes that tile the tensor."
                    )
                self.source_families.setdefault(name, []).append(len(self.families))
                self.families.append(Family("", name, first, stop - first, layouts[first]))


class _MissingSource(LanguageError):
    pass


def runs[T](items: list[tuple[int, T]]) -> list[tuple[int, int]]:
    """Half-open ranges of consecutive keys with equal values; `items` are in rising order of key."""
    found: list[tuple[int, int]] = []
    last: T | None = None
    for key, value in items:
        if found and found[-1][1] == key and value == last:
            found[-1] = (found[-1][0], key + 1)
        else:
            found.append((key, key + 1))
        last = value
    return found
