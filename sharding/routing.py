"""Who needs the same bytes, who receives them first, and who passes them on.

Ranks that need the same value of the same expression in the same box form a *group*. One of them, the *root*, gets it
from the trainers, converted once; the others are fed along a route (`routes`). Roots rotate from layer to layer and
band to band, so first-hop ingress spreads over the replicas.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections.abc import Sequence

import numpy as np

from shardfly_jax.sharding.language import Expr, quantized
from shardfly_jax.sharding.layouts import Box, box_shape
from shardfly_jax.sharding.problem import Problem
from shardfly_jax.sharding.routes import LONGEST_CHAIN, Route, fill_hops, roots_of, route
from shardfly_jax.sharding.topology import Topology

BAND_NBYTES = 16 << 20
"""A forwarded unit is at most this large, unless one block is larger."""
SMALLEST_BAND_NBYTES = 64 << 10
"""Boxes are cut so that several members are roots at once, down to bands of this size."""
MAX_ROOTS = 16
"""Members that are roots of one group at most: rows of forwards grow with roots times members."""
MAX_WIDE_ROOTS = 128
"""The same where hosts form a tree. A host sends twice or not at all there, so links are busy alike only while every
host is inside of the tree for some roots and at its end for as many others."""
WIDE_ROUNDS = 256
"""Rounds of all layers together there: for as many rows, roots are worth more than rounds."""
SPARE_TRAINERS = 2
"""Trainers per GPU of a host from which on that is done. Fewer must all send all the time, which takes many rounds."""
TINY_PERCENT = 1
"""A group with at most this part of a rank's bytes keeps one root for all its layers."""
FILL_PERCENT = 4
"""What filling a group's chain may add to an update: more members or more bytes per layer make more rounds."""
SMOOTH_ROUNDS = 64
"""Rounds at most so that bands are passed on while the next ones arrive; in bursts they would leave links idle."""
SMOOTH_LATE_ROUNDS = 256
"""The same for tensors outside the layers, which are large and spread over most of an update."""
SMOOTH_BAND_NBYTES = 256 << 10
"""Bands are not cut below this to that end."""
SMOOTH_ROWS = 1 << 18
"""Nor so that the forwards of one tensor on all ranks would be more rows than this."""
LATE_PERCENT = 25
"""The same for tensors outside the layers, which end before the last quarter of an update (see `schedule`)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Band:
    """A part of a box whose bytes are contiguous in the local buffer.

    Attributes:
      box: Global coordinates.
      offset, size: First element and number of elements in the local buffer.
    """

    box: Box
    offset: int
    size: int


@dataclasses.dataclass(slots=True)
class Group:
    """Ranks that need the same bytes.

    Attributes:
      expr, layers, cuts, box, strides, itemsize: What they need, and how their buffers hold it.
      members: (target family, rank), one per rank, in the order in which bytes are passed on.
      twins: (index of a member, another family of its rank that needs the same), copied within the rank.
      bands: Parts that are forwarded separately; the whole box if nothing is.
      sizes: How many of the members each host has, in their order.
      roots: How many members are roots, evenly spaced. Of several bands each is root of an equal run; of one band they
        are root in turn, layer by layer.
      start: Member that is the first root.
      rounds: How many parts of a layer's span the bands are spread over; each holds bands of every root.
      is_wide: Whether it may have many roots and few rounds: hosts form a tree, and trainers have time to spare.
    """

    expr: Expr
    layers: tuple[int, int]
    cuts: tuple[tuple[int, int], ...]
    box: Box
    strides: tuple[int, ...]
    itemsize: int
    members: list[tuple[int, int]]
    sizes: tuple[int, ...] = ()
    twins: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    bands: list[Band] = dataclasses.field(default_factory=list)
    roots: int = 1
    start: int = 0
    rounds: int = 1
    is_wide: bool = False

    @property
    def n_layers(self) -> int:
        """Tensors that the group's bytes are spread over."""
        return self.layers[1] - self.layers[0]

    @property
    def box_nbytes(self) -> int:
        """Bytes of one layer of one member."""
        return math.prod(box_shape(self.box)) * self.itemsize

    @property
    def is_forwarded(self) -> bool:
        """Whether anything is passed on."""
        return len(self.members) > 1 or bool(self.twins)

    @property
    def bands_per_root(self) -> int:
        """Length of the run of bands that share a root."""
        return max(len(self.bands) // self.roots, 1)

    @property
    def takes_turns(self) -> bool:
        """Whether the root changes from layer to layer."""
        return len(self.bands) == 1 and self.roots > 1

    @property
    def route(self) -> Route:
        """Who passes on to whom, turn by turn."""
        tiny = max(band.size for band in self.bands) * self.itemsize <= SMALLEST_BAND_NBYTES
        return route(self.sizes, self.start, self.roots, tiny)


def make_groups(problem: Problem, topology: Topology | None) -> list[Group]:
    """The groups of a problem, banded, with roots chosen; deterministic."""
    found: dict[tuple[object, ...], Group] = {}
    for unit in problem.units:
        family = problem.families[unit.family]
        for (box, strides), ranks in family.layout.holders:
            dense = _is_dense(box, strides)
            for rank in ranks:
                key = (unit.expr, unit.layers, unit.cuts, box, strides, None if dense else (unit.family, rank))
                group = found.get(key)
                if group is None:
                    group = Group(unit.expr, unit.layers, unit.cuts, box, strides, family.layout.itemsize, [])
                    found[key] = group
                group.members.append((unit.family, rank))
    groups = list(found.values())
    for group in groups:
        hosts = (
            topology.host_of(np.array([rank for _, rank in group.members])).tolist()
            if topology
            else [0] * len(group.members)
        )
        ordered = sorted(zip(hosts, group.members, strict=True), key=lambda hm: (hm[0], hm[1][1], hm[1][0]))
        group.members, host_of_member = [], []
        for host, (family_index, rank) in ordered:
            if group.members and group.members[-1][1] == rank:
                group.twins.append((len(group.members) - 1, family_index))
            else:
                group.members.append((family_index, rank))
                host_of_member.append(host)
        group.sizes = tuple(len(list(same)) for _, same in itertools.groupby(host_of_member))
    held: dict[int, int] = {}
    for group in groups:
        for _, rank in group.members:
            held[rank] = held.get(rank, 0) + group.box_nbytes * group.n_layers
    largest = max(held.values(), default=1)
    spare = topology is not None and problem.source_ranks >= SPARE_TRAINERS * topology.gpus_per_host
    for group in groups:
        group.is_wide = spare and len(group.sizes) > LONGEST_CHAIN
        _cut_bands(group, largest, len(held), topology is not None)
    _choose_roots(groups)
    return groups


def _is_dense(box: Box, strides: Sequence[int]) -> bool:
    """Whether the elements of a local buffer fill it without holes, in some order of the axes."""
    step = 1
    for stride, extent in sorted((s, n) for s, n in zip(strides, box_shape(box), strict=True) if n > 1):
        if stride != step:
            return False
        step *= extent
    return True


def _cut_bands(group: Group, rank_nbytes: int, ranks: int, known_hosts: bool) -> None:
    """Sets a group's bands and rounds.

    Args:
      group: With its members, and `is_wide` set.
      rank_nbytes: What the fullest rank holds.
      ranks: How many ranks hold targets.
      known_hosts: Whether `sizes` are those of a topology's hosts.
    """
    size, members = math.prod(box_shape(group.box)), len(group.members)
    group.bands = [Band(group.box, 0, size)]
    nbytes = size * group.itemsize
    if members == 1:
        return
    if nbytes * group.n_layers * 100 > rank_nbytes * TINY_PERCENT:
        group.roots = min(members, MAX_ROOTS, group.n_layers)
    roots = min(members, MAX_ROOTS)
    most = nbytes // (SMALLEST_BAND_NBYTES * roots)
    if most == 0:
        return
    # a route takes as many times as long to fill as one round takes to pass on
    percent = FILL_PERCENT if group.n_layers > 1 else LATE_PERCENT
    rounds = min(-(-nbytes * fill_hops(group.sizes) * 100 // (rank_nbytes * percent)), most)
    if group.is_wide:
        while 2 * roots <= min(members, MAX_WIDE_ROOTS) and most > 1:
            roots, most = 2 * roots, most // 2
        wanted = (nbytes * WIDE_ROUNDS + rank_nbytes // 2) // rank_nbytes
        few = SMOOTH_ROWS // (ranks * roots) if group.n_layers == 1 else WIDE_ROUNDS
        rounds = max(min(wanted, most, few), 1)
    elif known_hosts:
        smooth = SMOOTH_LATE_ROUNDS if group.n_layers == 1 else SMOOTH_ROUNDS
        rounds = max(rounds, min(smooth, SMOOTH_ROWS // (ranks * roots), nbytes // (SMOOTH_BAND_NBYTES * roots)))
    per_root = max(-(-nbytes // (BAND_NBYTES * roots)), rounds)
    axes = sorted(range(len(group.box)), key=lambda a: (-group.strides[a], a))
    boxes = _cut(group.box, axes, per_root * roots, _grains(group))
    if len(boxes) > roots and len(boxes) % roots:  # blocks leave fewer edges than bands were wanted
        boxes = _cut(group.box, axes, len(boxes) // roots * roots, _grains(group))
    if len(boxes) % roots:  # an axis too short to be cut evenly
        return
    group.bands, group.roots = [], roots
    for box in boxes:
        offset = sum(
            (lo - start) * step for (lo, _), (start, _), step in zip(box, group.box, group.strides, strict=True)
        )
        group.bands.append(Band(box, offset, math.prod(box_shape(box))))
    group.rounds = min(rounds, group.bands_per_root)


def _grains(group: Group) -> tuple[int, ...]:
    """What bands are multiples of, per axis: the blocks of a quantized group, which are encoded in one piece."""
    expr = quantized(group.expr)
    if expr is None:
        return (1,) * len(group.box)
    rows, columns = expr.format.block
    columns = columns if columns is None else columns // expr.format.per_byte
    sizes = zip((rows, columns), expr.segments, group.box[-2:], strict=True)
    return (
        *(1,) * (len(group.box) - 2),
        # a box that begins inside a block has no edge of a block at a multiple of its size
        *(hi - lo if block is None or cut or lo % block else block for block, cut, (lo, hi) in sizes),
    )


def _cut(box: Box, axes: Sequence[int], count: int, grains: Sequence[int]) -> list[Box]:
    """About `count` contiguous parts of a box: along its outermost axis, and further in where that one is too short."""

    def units(axis: int) -> int:
        return -(-(box[axis][1] - box[axis][0]) // grains[axis])

    while axes and box[axes[0]][1] - box[axes[0]][0] == 1:
        axes = axes[1:]
    if count <= 1 or not axes or units(axes[0]) == 1:
        return [box]
    axis, (lo, hi) = axes[0], box[axes[0]]
    n, least = units(axis), grains[axis]
    parts = min(count, n)
    # edges on multiples of a power of two keep runs aligned on the other side of a transpose; 16 bytes are worth uneven
    # bands, because less is moved an element at a time
    grain = next(g for g in (128, 64, 32, 16, 8, 4, 2, 1) if g == 1 or n // parts >= (16 if g > 8 else 2) * g)
    edges = [lo + k * n // parts // grain * grain * least for k in range(parts)] + [hi]
    cut = [(*box[:axis], edge, *box[axis + 1 :]) for edge in itertools.pairwise(edges)]
    if parts == count or least > 1:  # several rows of a block are contiguous only as whole rows
        return cut
    return [inner for part in cut for inner in _cut(part, axes[1:], -(-count // parts), grains)]


def _choose_roots(groups: list[Group]) -> None:
    """Sets every group's `start` so that its roots fall on the least loaded members, large groups first."""
    load = np.zeros(max((rank for group in groups for _, rank in group.members), default=0) + 1, np.int64)
    for group in sorted(groups, key=lambda g: -g.box_nbytes * g.n_layers):
        ranks = np.array([rank for _, rank in group.members])
        turn = np.arange(group.roots)
        at = roots_of(group.sizes, np.arange(len(ranks))[:, None], group.roots)
        share = np.full(group.roots, group.box_nbytes * group.n_layers // group.roots)
        if group.takes_turns:
            share = group.box_nbytes * (group.n_layers // group.roots + (turn < group.n_layers % group.roots))
        # whole KiB: the product of two loads must stay below 2^63
        group.start = int(((load[ranks[at]] >> 10) * ((share >> 10) + 1)).sum(axis=1).argmin())
        load[ranks[at[group.start]]] += share


def choose_sources(
    shard_of_row: np.ndarray,
    holders: list[tuple[int, ...]],
    nbytes: np.ndarray,
    target_rank: np.ndarray,
    topology: Topology | None,
) -> np.ndarray:
    """Picks the trainer rank that serves each row: the least loaded holder, the lowest among equals.

    With a topology, holders on the receiver's own host come first.

    Args:
      shard_of_row: Index into `holders`; -1 for fills.
      holders: Ranks that hold each shard.
      nbytes: Payload of each row.
      target_rank: Receiver of each row.

    Returns:
      int64 [rows]; -1 for fills.
    """
    first = np.array([ranks[0] for ranks in holders] or [0])
    out = np.where(shard_of_row >= 0, first[shard_of_row], -1)
    several = np.array([len(ranks) > 1 for ranks in holders] or [False])
    open_rows = np.nonzero((shard_of_row >= 0) & several[shard_of_row])[0]
    fixed = (shard_of_row >= 0) & ~several[shard_of_row]
    top = max((max(ranks) for ranks in holders), default=0) + 1
    load = np.bincount(out[fixed], nbytes[fixed], minlength=top).astype(np.int64).tolist()
    ranks = np.arange(max(top, int(target_rank.max(initial=0)) + 1))
    host_of = (topology.host_of(ranks) if topology else ranks * 0).tolist()
    heaps: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for row in open_rows[np.argsort(-nbytes[open_rows], kind="stable")].tolist():
        shard, host = int(shard_of_row[row]), host_of[target_rank[row]]
        heap = heaps.get((shard, host))
        if heap is None:
            near = [rank for rank in holders[shard] if host_of[rank] == host] or list(holders[shard])
            heap = heaps[shard, host] = [(load[rank], rank) for rank in near]
            heapq.heapify(heap)
        while heap[0][0] != load[heap[0][1]]:  # loads only grow: refresh stale entries until the top is true
            heapq.heapreplace(heap, (load[heap[0][1]], heap[0][1]))
        rank = heap[0][1]
        out[row] = rank
        load[rank] += int(nbytes[row])
    return out
