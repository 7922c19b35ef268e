"""Order numbers: where in an update each move belongs.

The order line has `LENGTH` numbers. Layer after layer takes an equal part of it; inside a layer the tensors follow each
other by size, largest first and scales last, each over a part proportional to its bytes. Tensors outside the layers
ride along over the first three quarters of the line, so that there is time to pass them on; large ones of wide groups
come first instead (`_fronts`). All ranks that receive the
same kind of tensor do so at the same place, bands of all roots together. Where in its run of bands a root begins, and
when in a round a trainer sends to it, is scattered: no receiver is hit by all at once, and no trainer waits while
others send. A forward follows what it forwards by a lag per hop. Every dependency points to a smaller number: the order
is a linear extension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from shardfly_jax.sharding.language import Expr, Scales, nodes
from shardfly_jax.sharding.patterns import FAMILY, name_pattern
from shardfly_jax.sharding.problem import Family
from shardfly_jax.sharding.routing import Group

LENGTH = 1 << 40
LAG = LENGTH >> 10
"""Distance between a band's last arrival and its forward, per hop."""
WIDE_LAG = 3 * LAG
"""The same of wide groups (`Group.is_wide`). There a round takes about four `LAG` (`routing.WIDE_ROUNDS`), its first
hops use NICs and its last ones NVLink: three apart, hops of rounds that follow each other share all places alike."""
FRONT_ROUND = 8 * LAG
"""Most that rounds of `_fronts` may lie apart: one crosses between hosts while the one before is passed on within."""
CHUNK_NBYTES = 4 << 20
"""Executors cut long runs into chunks of about this size and interleave them."""


def scattered(number: np.ndarray | int, room: np.ndarray | int) -> np.ndarray:
    """Places in `[0, room)` that lie evenly for every stretch of numbers, and for every second to eighth of them.

    Multiples of the golden ratio, as 16 bits (Knuth, The Art of Computer Programming 3, 6.4).
    """
    return np.asarray(number) * 40503 % (1 << 16) * room >> 16


def times(
    number: np.ndarray | int,
    band: np.ndarray,
    per_root: np.ndarray | int,
    rounds: np.ndarray | int,
    span: np.ndarray | int,
) -> tuple[np.ndarray, np.ndarray]:
    """When each band of a layer is sent: how far into the layer's span its round begins, and how long that is.

    Equal places of the roots' runs of bands often lie in the shards of the same few trainers, so every root begins at
    another place of its run.

    Args:
      number: Of the band's root among all.
      band: Number within its group.
      per_root, rounds, span: See `Group.bands_per_root`, `Group.rounds` and `Place.span`.
    """
    round_ = (band % per_root * rounds // per_root + scattered(number, rounds)) % rounds
    return span * round_ // rounds, np.asarray(span // rounds)


class Place(NamedTuple):
    """Where the bands of a group lie on the order line.

    Attributes:
      order: Of the first band of the group's first layer.
      layer_step: From one layer to the next.
      span: Room of one layer, shared by its rounds in turn.
      lag: From a band's last arrival to its forward, per hop.
    """

    order: int
    layer_step: int
    span: int
    lag: int


def places(groups: Sequence[Group], families: Sequence[Family]) -> list[Place]:
    """A place for every group, in the same order."""

    def is_layered(group: Group) -> bool:
        return FAMILY in name_pattern(families[group.members[0][0]].pattern).variables

    kinds: dict[Expr, int] = {}
    first, last = 1 << 62, -1
    for group in groups:
        if is_layered(group):
            first, last = min(first, group.layers[0]), max(last, group.layers[1])
            kinds[group.expr] = max(kinds.get(group.expr, 0), group.box_nbytes)
    total = max(sum(kinds.values()), 1)
    start, starts = 0, {}
    for expr, nbytes in sorted(kinds.items(), key=lambda kind: (_reads_scales(kind[0]), -kind[1])):
        starts[expr] = (start, nbytes)
        start += nbytes
    fronts = _fronts([group for group in groups if not is_layered(group)], sum(kinds.values()) * (last - first))
    front = sum(span for _, span in fronts.values())
    layer = (LENGTH - front) // max(last - first, 1)
    out = []
    for group in groups:
        lag = WIDE_LAG if group.is_wide else LAG
        if is_layered(group):
            before, nbytes = starts[group.expr]
            order = front + (group.layers[0] - first) * layer + layer * before // total
            out.append(Place(order, layer, layer * nbytes // total, lag))
        elif group.expr in fronts:
            order, span = fronts[group.expr]
            out.append(Place(order, LENGTH, span, lag))
        else:
            late = LENGTH * 3 // 4
            order, span = (late, LENGTH // 16) if _reads_scales(group.expr) else (0, late)
            out.append(Place(order, LENGTH, span, lag))
    return out


def _fronts(groups: Sequence[Group], layers_nbytes: int) -> dict[Expr, tuple[int, int]]:
    """Order and span of large tensors of wide groups, which come before all layers.

    They have few rounds, since each band of theirs is a row for every member. Those would be bursts among the layers,
    in which either the NICs or NVLink have nothing to do; close together, each fills what the one before leaves idle.

    Args:
      groups: Outside the layers.
      layers_nbytes: Of all layers of one rank.
    """
    large = [group for group in groups if group.is_wide and len(group.bands) > 1 and not _reads_scales(group.expr)]
    nbytes: dict[Expr, int] = {}
    rounds: dict[Expr, int] = {}
    for group in large:
        nbytes[group.expr] = max(nbytes.get(group.expr, 0), group.box_nbytes)
        rounds[group.expr] = max(rounds.get(group.expr, 0), group.rounds)
    total = layers_nbytes + sum(nbytes.values())
    out, start = {}, 0
    for expr, size in nbytes.items():
        span = min(LENGTH * size // total, rounds[expr] * FRONT_ROUND)
        out[expr] = (start, span)
        start += span
    return out


def _reads_scales(expr: Expr) -> bool:
    """Whether these are scales: what encodes may write them too, so they are passed on after all of that."""
    return any(isinstance(node, Scales) for node in nodes(expr))
