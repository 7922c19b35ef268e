"""Which of the ranks that need the same bytes get them from the trainers, instead of from each other.

To pass bytes on spares the trainers, and costs links of those who pass them on. Where trainers can send to all without
any GPU sending more than another one has to receive, there is nothing to spare:

- within one host, over NVLink, to every member;
- where trainers and rollouts share hosts, over their NICs, to one member of every host, which passes on within it. What
  trainers of a host hold need not enter it.

Maxima of blocks that trainers tell each other are left out of these sums: a word for each block and member.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from shardfly_jax.sharding.groups import Group
from shardfly_jax.sharding.layouts import box_shape
from shardfly_jax.sharding.problem import Problem
from shardfly_jax.sharding.topology import Topology

ROUNDING = 1e-9
"""Sums that are equal but for this are equal."""


def parted(groups: list[Group], problem: Problem, topology: Topology) -> tuple[list[Group], bool]:
    """The groups, or parts of them that trainers send to; and whether these are those of hosts."""
    gpu = topology.gpu(np.arange(problem.source_ranks + problem.target_ranks))
    host = gpu // topology.gpus_per_host
    if (host == host[0]).all():
        if not _send_no_more(groups, problem, gpu, gpu, to_each=True):
            return groups, False
        rank = np.arange(len(gpu))
        return [part for group in groups for part in _parts(group, rank)], False
    shared = np.isin(host[: problem.source_ranks], host[problem.source_ranks :]).any()
    if not shared or not _send_no_more(groups, problem, gpu, host, to_each=False):
        return groups, False
    return [part for group in groups for part in _parts(group, host)], True


def _send_no_more(
    groups: Sequence[Group], problem: Problem, gpu: np.ndarray, place: np.ndarray, *, to_each: bool
) -> bool:
    """Whether no GPU has to send more to other places than some GPU receives from them.

    Args:
      groups: All.
      problem: Whose they are.
      gpu: Of each rank.
      place: Of each rank, between which it counts what is sent: GPUs, or hosts.
      to_each: Whether each member of a group in a place is sent the bytes, or one for all.
    """
    gpus, places = int(gpu.max()) + 1, int(place.max()) + 1
    place_of = np.zeros(gpus, np.int64)
    place_of[gpu] = place
    share, held = _holdings(problem, gpu, place)
    # of what a place lacks, each GPU elsewhere sends as much as it has of what is elsewhere
    own = np.bincount(place_of, share, minlength=places)
    lacks = np.divide(1 - held, 1 - own, out=np.zeros(places), where=own < 1 - ROUNDING)
    sent, received = np.zeros(gpus), np.zeros(gpus)
    for group in groups:
        ranks = np.array([rank for _, rank in group.members])
        nbytes = group.box_nbytes * group.n_layers
        to = np.bincount(place[ranks], minlength=places)
        to = (to if to_each else to > 0) * lacks
        sent += nbytes * share * (to.sum() - to[place_of])
        inside = np.unique(gpu[ranks])
        beside = np.bincount(place_of[inside], minlength=places)
        received[inside] += nbytes * (1 - held[place_of[inside]]) / beside[place_of[inside]]
    return bool(sent.max() <= received.max() * (1 + ROUNDING))


def _holdings(problem: Problem, gpu: np.ndarray, place: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which part of the trainers' bytes each GPU sends if holders take turns, and which part each place holds."""
    share, held = np.zeros(int(gpu.max()) + 1), np.zeros(int(place.max()) + 1)
    for index in {index for indices in problem.source_families.values() for index in indices}:
        family = problem.families[index]
        for (box, _), ranks in family.layout.holders:
            nbytes = math.prod(box_shape(box)) * family.layout.itemsize * family.count
            at = list(ranks)
            np.add.at(share, gpu[at], nbytes / len(at))
            held[np.unique(place[at])] += nbytes
    total = max(float(share.sum()), 1.0)
    return share / total, held / total


def _parts(group: Group, place: np.ndarray) -> list[Group]:
    """A group of its own for the members in each place, with their twins."""
    where = place[[rank for _, rank in group.members]]
    out = []
    for one in dict.fromkeys(where.tolist()):
        numbers = np.nonzero(where == one)[0].tolist()
        number_of = {number: k for k, number in enumerate(numbers)}
        members = [group.members[number] for number in numbers]
        twins = [(number_of[number], family) for number, family in group.twins if number in number_of]
        out.append(dataclasses.replace(group, members=members, sizes=(len(members),), twins=twins))
    return out
