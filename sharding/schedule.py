"""Order numbers: where in an update each move belongs.

The order line has `LENGTH` numbers. Layer after layer takes an equal part of it; inside a layer the tensors follow each
other by size, largest first, each over a part proportional to its bytes. Tensors outside the layers ride along over the
first three quarters of the line, so that there is time to pass them on. All ranks that receive the same kind of tensor
do so at the same place, bands of all roots together; a sender's chunks to them interleave, so no receiver is ever hit
by all at once. A forward follows what it forwards by `LAG` per hop. Every dependency points to a smaller number: the
order is a linear extension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shardfly_jax.sharding.patterns import FAMILY, name_pattern
from shardfly_jax.sharding.problem import Family
from shardfly_jax.sharding.routing import Group

LENGTH = 1 << 40
LAG = LENGTH >> 10
"""Distance between a band's last arrival and its forward, per hop."""
CHUNK_NBYTES = 4 << 20
"""Executors cut long runs into chunks of about this size and interleave them."""


class Place(NamedTuple):
    """Where the bands of a group lie on the order line.

    Attributes:
      order: Of the first band of the group's first layer.
      layer_step: From one layer to the next.
      span: Room of one layer, shared by its rounds in turn.
    """

    order: int
    layer_step: int
    span: int


def places(groups: Sequence[Group], families: Sequence[Family]) -> list[Place]:
    """A place for every group, in the same order."""

    def is_layered(group: Group) -> bool:
        return FAMILY in name_pattern(families[group.members[0][0]].pattern).variables

    kinds: dict[object, int] = {}
    first, last = 1 << 62, -1
    for group in groups:
        if is_layered(group):
            first, last = min(first, group.layers[0]), max(last, group.layers[1])
            kinds[group.expr] = max(kinds.get(group.expr, 0), group.box_nbytes)
    total = max(sum(kinds.values()), 1)
    start, starts = 0, {}
    for expr, nbytes in sorted(kinds.items(), key=lambda kind: -kind[1]):
        starts[expr] = (start, nbytes)
        start += nbytes
    layer = LENGTH // max(last - first, 1)
    out = []
    for group in groups:
        if not is_layered(group):
            out.append(Place(0, LENGTH, LENGTH * 3 // 4))
            continue
        before, nbytes = starts[group.expr]
        out.append(Place((group.layers[0] - first) * layer + layer * before // total, layer, layer * nbytes // total))
    return out
