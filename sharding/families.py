"""What a problem consists of: trees of targets, families of tensors, units of work.

A *family* is the run of tensors that one target pattern names and that share one layout. A *unit* is a family, or the
part of one, over which the expression, the source types and the target boxes do not change: lowered once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping as AbstractMapping

from shardfly_jax.sharding.language import Expr
from shardfly_jax.sharding.layouts import Layout, LocalTensors
from shardfly_jax.sharding.mapping import Mapping
from shardfly_jax.sharding.patterns import FAMILY, name_pattern
from shardfly_jax.sharding.walks import outer_fuse


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """Tensors `pattern.format(i)` for `first <= i < first + count` that share one layout, in plan-wide rank numbers.

    Attributes:
      tree: Name of the target tree, or "" for sources.
      pattern: Name, with `{i}` unless there is just one tensor of a literal name.
      expr: The bound expression; None for sources.
      alias_of: Pattern of the target in the same tree whose buffer this may share.
    """

    tree: str
    pattern: str
    first: int
    count: int
    layout: Layout
    expr: Expr | None = None
    alias_of: str | None = None

    def name(self, tensor: int) -> str:
        """Name of the `tensor`-th member, counted from 0."""
        return name_pattern(self.pattern).format({FAMILY: self.first + tensor})

    @property
    def cuts(self) -> tuple[tuple[int, int], ...]:
        """Ranges into which the ranks cut the axis of an outer fuse, in order; empty without one."""
        fused = outer_fuse(self.expr) if self.expr is not None else None
        return self.layout.cuts(fused.axis % len(self.layout.shape)) if fused else ()

    @property
    def names(self) -> list[str]:
        """Names of all members."""
        return [self.name(k) for k in range(self.count)]


@dataclasses.dataclass(frozen=True, slots=True)
class Unit:
    """Layers `[layers[0], layers[1])` of a target family, lowered together.

    Attributes:
      cuts: Ranges into which the target is cut along the axis of its fuse; empty without one.
    """

    family: int
    expr: Expr
    layers: tuple[int, int]
    cuts: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class TargetTree:
    """One tree of targets.

    Attributes:
      name: Of the tree, unique.
      tensors: Layouts by name, in ranks counted from 0 within this tree.
      mapping: None for same names and shapes.
      ranks: How many ranks the tree has.
      replicas: Sets of those ranks that serve together, by replica name; empty for one replica of all ranks.
    """

    name: str
    tensors: AbstractMapping[str, Layout | LocalTensors]
    mapping: Mapping | None
    ranks: int
    replicas: AbstractMapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
