"""Order numbers: where in an update each move belongs.

The order line has `LENGTH` numbers. Layer after layer takes an equal part of it; inside a layer the tensors follow each
other by size, largest first and scales last, each over a part proportional to its bytes. Tensors outside the layers
ride along over the first three quarters of the line, so that there is time to pass them on. All ranks that receive the
same kind of tensor do so at the same place, bands of all roots together. Each root begins its run of bands where no
trainer waits while others send (`begin_roots`), and when in a round a trainer sends to it is scattered: no receiver is
hit by all at once. A forward follows what it forwards by a lag per hop. Every dependency points to a smaller number:
the order is a linear extension.

Where replicas fill several hosts, tensors take ticks instead, and those outside the layers come first: see `pace`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from shardfly_jax.sharding.families import Family
from shardfly_jax.sharding.groups import Group, Pace
from shardfly_jax.sharding.language import Expr, Scales
from shardfly_jax.sharding.patterns import FAMILY, name_pattern
from shardfly_jax.sharding.walks import nodes

LENGTH = 1 << 40
LAG = LENGTH >> 10
"""Distance between a band's last arrival and its forward, per hop."""
SLOTS = LENGTH // LAG
"""Lags in an update."""
EDGE = LAG >> 12
"""At a plan's pace (`pace`), ticks begin a little behind multiples of `LAG`, so that none lies on both sides of one."""
CLOSE = LAG >> 13
"""Within a tick trainers send almost at once, in a scattered order: ticks follow each other closely enough."""
MOST_BEGINS = 64
"""Rounds that are tried for the beginning of a run of bands."""
CHUNK_NBYTES = 4 << 20
"""Executors cut long runs into chunks of about this size and interleave them."""


def scattered(number: np.ndarray | int, room: np.ndarray | int) -> np.ndarray:
    """Places in `[0, room)` that lie evenly for every stretch of numbers, and for every second to eighth of them.

    Multiples of the golden ratio, as 16 bits (Knuth, The Art of Computer Programming 3, 6.4).
    """
    return np.asarray(number) * 40503 % (1 << 16) * room >> 16


def begin_roots(
    groups: Sequence[Group], root: np.ndarray, band: np.ndarray, source: np.ndarray, nbytes: np.ndarray
) -> None:
    """Turns runs of bands: they begin in another round and go round.

    Equal places of runs often lie in the shards of the same few trainers. So each root's run begins where the trainers
    that it reads from serve those before it the least; where that is all the same, runs are scattered. At a plan's pace
    the runs of all roots of a group are turned together, through the rounds in which each of them has a band.

    Args:
      groups: All; their `round` is set.
      root: Of each row that reads from a trainer, its root, counted over all groups.
      band: Of each row, its number within its group.
      source, nbytes: Trainer rank and bytes of each row.
    """
    kinds: dict[tuple[object, ...], list[tuple[int, Group]]] = {}
    first = 0
    for group in groups:
        kinds.setdefault((group.expr, group.layers, group.cuts, group.rounds), []).append((first, group))
        first += group.roots
    rows = np.argsort(root, kind="stable")
    edges = np.searchsorted(root[rows], np.arange(first + 1))
    trainers = int(source.max(initial=0)) + 1
    for members in kinds.values():
        served = np.zeros((members[0][1].rounds, trainers), np.int64)
        for start, group in members:
            free = np.arange(group.rounds)
            if group.is_paced:
                free = free[np.bincount(group.round, minlength=group.rounds) == group.trees]
            if len(free) < 2:
                continue
            at = np.searchsorted(free, group.round).clip(max=len(free) - 1)
            turned = free[at] == group.round
            begins, together = np.zeros(group.roots, np.int64), group.roots if group.is_paced else 1
            for turn in range(0, group.roots, together):
                of_run = rows[edges[start + turn] : edges[start + turn + together]]
                of_run = of_run[turned[band[of_run]]]
                begins[turn : turn + together] = _begin_run(
                    served, free, at[band[of_run]], source[of_run], nbytes[of_run], start + turn
                )
            group.round = np.where(turned, free[(at + begins[group.turn]) % len(free)], group.round)


def _begin_run(
    served: np.ndarray, free: np.ndarray, at: np.ndarray, source: np.ndarray, nbytes: np.ndarray, number: int
) -> int:
    """Where in `free` a run begins, from which on it counts in `served`.

    Args:
      served: int64 [rounds, trainers]; KiB that each trainer sends in each round.
      free: Rounds that the run goes through.
      at: Of each of its rows, the place in `free` without a turn.
      source, nbytes: Of each of its rows.
      number: Of its root.
    """
    n, trainers = len(free), served.shape[1]
    place, index = np.unique(at * trainers + source, return_inverse=True)
    kib = np.bincount(index, nbytes >> 10).astype(np.int64)
    at, trainer = place // trainers, place % trainers
    choices = np.arange(0, n, -(-n // MOST_BEGINS)) + scattered(number, n)
    cost = served[free[(at + choices[:, None]) % n], trainer] @ kib
    snug = np.roll(cost, 1) + np.roll(cost, -1)  # of places that cost the same, the one without gaps
    begin = int(choices[np.lexsort((-snug, cost))[0]])
    served[free[(at + begin) % n], trainer] += kib
    return begin


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


def is_layered(group: Group, families: Sequence[Family]) -> bool:
    """Whether what a group needs is in layers."""
    return FAMILY in name_pattern(families[group.members[0][0]].pattern).variables


def places(groups: Sequence[Group], families: Sequence[Family]) -> list[Place]:
    """A place for every group, in the same order."""
    kinds: dict[Expr, int] = {}
    first, last = 1 << 62, -1
    for group in groups:
        if is_layered(group, families):
            first, last = min(first, group.layers[0]), max(last, group.layers[1])
            kinds[group.expr] = max(kinds.get(group.expr, 0), group.box_nbytes)
    total = max(sum(kinds.values()), 1)
    start, starts = 0, {}
    for expr, nbytes in sorted(kinds.items(), key=lambda kind: (reads_scales(kind[0]), -kind[1])):
        starts[expr] = (start, nbytes)
        start += nbytes
    layer = LENGTH // max(last - first, 1)
    pace = next((group.pace for group in groups if group.pace is not None), None)  # that of the plan
    tick, steps = (0, []) if pace is None else _lengths(pace)
    out = []
    for group in groups:
        if pace is not None and group.ticks:
            lag = tick * -(-LAG // tick) if group.is_paced else LAG
            order, step = EDGE + group.first_tick * tick, LENGTH
            if is_layered(group, families):
                passes, step = pace.passes, steps[group.pass_]
                order += pace.front * tick + (group.layers[0] - passes[group.pass_].layers[0]) * step
                order += sum((p.layers[1] - p.layers[0]) * steps[k] for k, p in enumerate(passes[: group.pass_]))
            out.append(Place(order, step, group.ticks * tick, lag))
        elif is_layered(group, families):
            before, nbytes = starts[group.expr]
            order = (group.layers[0] - first) * layer + layer * before // total
            out.append(Place(order, layer, layer * nbytes // total, LAG))
        else:
            late = LENGTH * 3 // 4
            order, span = (late, LENGTH // 16) if reads_scales(group.expr) else (0, late)
            out.append(Place(order, LENGTH, span, LAG))
    return out


def _lengths(pace: Pace) -> tuple[int, list[int]]:
    """Lengths of a tick, and of a layer in each pass, on the order line.

    A layer is whole `LAG`s and a `LAG` whole ticks, where that is possible: ticks lie alike in all layers.
    """
    parts = -(-(pace.ticks + 1) // SLOTS)
    if parts > 1:
        tick = LAG // parts
        steps = [-(-p.per_layer // parts) * LAG if p.per_layer >= parts else p.per_layer * tick for p in pace.passes]
        layers = sum((p.layers[1] - p.layers[0]) * step for p, step in zip(pace.passes, steps, strict=True))
        if (pace.front + 1) * tick + layers <= LENGTH:
            return tick, steps
    tick = LENGTH // (pace.ticks + 1)
    if pace.passes and (step := tick * pace.passes[0].per_layer) >= LAG:
        tick = step // LAG * LAG // pace.passes[0].per_layer
    steps = [p.per_layer * tick for p in pace.passes]
    if steps and -steps[0] % LAG < pace.passes[0].per_layer:  # but for what is lost to rounding
        steps[0] += -steps[0] % LAG
    return tick, steps


def reads_scales(expr: Expr) -> bool:
    """Whether these are scales: what encodes may write them too, so they are passed on after all of that."""
    return any(isinstance(node, Scales) for node in nodes(expr))
