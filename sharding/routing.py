"""Who needs the same bytes, who receives them first, and who passes them on.

Ranks that need the same value of the same expression in the same box form a *group*. One of them, the *root*, gets it
from the trainers, converted once; the others are fed along a route (`routes`). Roots rotate from layer to layer and
band to band, so first-hop ingress spreads over the replicas; where hosts form trees, bands have a `pace`.

Members that trainers reach as well as other members do are groups of their own (`parting`).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence

import numpy as np

from shardfly_jax.sharding.groups import SMALLEST_BAND_NBYTES, Group, band_boxes, bands_of
from shardfly_jax.sharding.layouts import Box, box_shape
from shardfly_jax.sharding.pace import set_pace
from shardfly_jax.sharding.parting import parted
from shardfly_jax.sharding.problem import Problem
from shardfly_jax.sharding.routes import fill_hops, roots_of
from shardfly_jax.sharding.schedule import is_layered
from shardfly_jax.sharding.topology import Topology

BAND_NBYTES = 16 << 20
"""A forwarded unit is at most this large, unless one block is larger."""
MAX_ROOTS = 16
"""Members that are roots of one group at most: rows of forwards grow with roots times members."""
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
UNEVEN_BANDS = 4
"""Bands for each root from which on some may have one more than others."""
SMOOTH_ROWS = 1 << 18
"""Nor so that the forwards of one tensor on all ranks would be more rows than this."""
LATE_PERCENT = 25
"""The same for tensors outside the layers, which end before the last quarter of an update (see `schedule`)."""


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
    by_hosts = False
    if topology is not None:
        groups, by_hosts = parted(groups, problem, topology)
    held: dict[int, int] = {}
    for group in groups:
        for _, rank in group.members:
            held[rank] = held.get(rank, 0) + group.box_nbytes * group.n_layers
    largest = max(held.values(), default=1)
    for group in groups:
        _cut_bands(group, largest, len(held), topology is not None)
    if topology is not None:
        set_pace(groups, [is_layered(group, problem.families) for group in groups], topology)
    _choose_roots(groups)
    for group in groups:
        if by_hosts:  # what a trainer of the host sends and what comes from elsewhere lie in runs of bands
            number = np.arange(len(group.bands))
            group.turn = number % group.roots
            group.round = number // group.roots * group.rounds // -(-len(number) // group.roots)
        elif not group.is_paced:  # else they are set already
            runs = np.array_split(np.arange(len(group.bands)), group.roots)
            group.turn = np.repeat(np.arange(group.roots), [len(run) for run in runs])
            group.round = np.concatenate([(run - run[:1]) * group.rounds // len(runs[0]) for run in runs])
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
      group: With its members.
      rank_nbytes: What the fullest rank holds.
      ranks: How many ranks hold targets.
      known_hosts: Whether `sizes` are those of a topology's hosts.
    """
    size, members = math.prod(box_shape(group.box)), len(group.members)
    group.bands = bands_of(group, [group.box])
    nbytes = size * group.itemsize
    if members == 1:
        return
    if nbytes * group.n_layers * 100 > rank_nbytes * TINY_PERCENT:
        group.roots = min(members, MAX_ROOTS, group.n_layers)
    roots = min(members, MAX_ROOTS)
    most = nbytes // (SMALLEST_BAND_NBYTES * roots)
    if most == 0 or group.is_wide:
        return
    # a route takes as many times as long to fill as one round takes to pass on
    percent = FILL_PERCENT if group.n_layers > 1 else LATE_PERCENT
    rounds = min(-(-nbytes * fill_hops(members) * 100 // (rank_nbytes * percent)), most)
    if known_hosts:
        smooth = SMOOTH_LATE_ROUNDS if group.n_layers == 1 else SMOOTH_ROUNDS
        rounds = max(rounds, min(smooth, SMOOTH_ROWS // (ranks * roots), nbytes // (SMOOTH_BAND_NBYTES * roots)))
    per_root = max(-(-nbytes // (BAND_NBYTES * roots)), rounds)
    boxes = band_boxes(group, per_root * roots, roots)
    if len(boxes) % roots and len(boxes) < UNEVEN_BANDS * roots:  # blocks leave fewer edges than bands were wanted
        boxes = band_boxes(group, len(boxes) // roots * roots)
        if len(boxes) % roots:  # an axis too short to be cut evenly
            return
    group.bands, group.roots = bands_of(group, boxes), roots
    group.rounds = min(rounds, -(-len(boxes) // roots))


def _choose_roots(groups: list[Group]) -> None:
    """Sets every group's `start` so that its roots fall on the least loaded members, large groups first."""
    load = np.zeros(max((rank for group in groups for _, rank in group.members), default=0) + 1, np.int64)
    for group in sorted(groups, key=lambda g: -g.box_nbytes * g.n_layers):
        if group.is_paced:
            continue
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

    With a topology, holders on the receiver's own GPU come first, then those on its host.

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
    gpu_of = (topology.gpu(ranks) if topology else ranks * 0).tolist()
    host_of = (topology.host_of(ranks) if topology else ranks * 0).tolist()
    heaps: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for row in open_rows[np.argsort(-nbytes[open_rows], kind="stable")].tolist():
        shard, gpu, host = int(shard_of_row[row]), gpu_of[target_rank[row]], host_of[target_rank[row]]
        heap = heaps.get((shard, gpu))
        if heap is None:
            near = [rank for rank in holders[shard] if gpu_of[rank] == gpu]
            near = near or [rank for rank in holders[shard] if host_of[rank] == host] or list(holders[shard])
            heap = heaps[shard, gpu] = [(load[rank], rank) for rank in near]
            heapq.heapify(heap)
        while heap[0][0] != load[heap[0][1]]:  # loads only grow: refresh stale entries until the top is true
            heapq.heapreplace(heap, (load[heap[0][1]], heap[0][1]))
        rank = heap[0][1]
        out[row] = rank
        load[rank] += int(nbytes[row])
    return out
