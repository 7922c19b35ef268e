"""How a group's bytes get from its root to all members: from host to host, and within each host from GPU to GPU.

In each host one member, the *entry*, receives over the NIC; the bytes cross between hosts once per host and pass on
inside over NVLink. A group takes several *turns*, each for a part of its bytes: roots and entries rotate, so that every
NIC of a host carries its part and every host is at the end of the route as often as at its beginning.

Hosts form a binary tree; the members of a host a chain, or a tree where that would be long. In a tree half of the hosts
send twice and half not at all; over the turns of evenly spaced roots that evens out.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

LONGEST_CHAIN = 16
"""More members of a host form a tree."""


class Route(NamedTuple):
    """Routes of all turns of a group; members are numbered as in the group.

    Attributes:
      order: int64 [turns, members]; the members in the order of the route, its root first.
      giver: int64 [turns, members]; from whom each *member* receives; itself if it is the root.
      depth: int64 [turns, members]; hops from the root to each *member*.
    """

    order: np.ndarray
    giver: np.ndarray
    depth: np.ndarray


def fill_hops(members: int) -> int:
    """Parts that are under way in a host before its last member gets the first one, second sends of trees included."""
    return members - 1 if members <= LONGEST_CHAIN else 2 * (members - 1).bit_length()


def roots_of(sizes: Sequence[int], start: np.ndarray, turns: int, cycle: int | None = None) -> np.ndarray:
    """The root of each turn.

    Args:
      sizes: Members per host.
      start: Member that is the first root; of any shape that broadcasts with [turns].
      turns: How many roots there are.
      cycle: In how many turns they go round the hosts; in all of them unless given.
    """
    first = np.concatenate([[0], np.cumsum(sizes)])
    host = np.searchsorted(first, start, side="right") - 1
    turn = np.arange(turns)
    at = (host + _hosts_on(turn, len(sizes), cycle or turns)) % len(sizes)
    return first[at] + _entry(np.array(sizes)[at], start - first[host], turn, turns)


def _hosts_on(turn: np.ndarray, hosts: int, cycle: int) -> np.ndarray:
    """How many hosts after the first root's the one of a turn is."""
    return turn % cycle * hosts // cycle


def _entry(size: np.ndarray, start: np.ndarray, turn: np.ndarray, turns: int) -> np.ndarray:
    """Which of a host's `size` members is its entry in a turn."""
    return (start + np.where(turns >= size, turn, turn * size // turns)) % size


@functools.lru_cache(maxsize=4096)
def route(sizes: tuple[int, ...], start: int, turns: int, shallow: bool, cycle: int | None = None) -> Route:
    """The routes of a group.

    Args:
      sizes: Members per host.
      start: Member that is the first root.
      turns: How many roots there are.
      shallow: Trees in hosts even where chains are short: for bytes so few that latency counts more than links.
      cycle: As in `roots_of`.
    """
    n, m = len(sizes), sum(sizes)
    longest = 2 if shallow else LONGEST_CHAIN
    first = np.concatenate([[0], np.cumsum(sizes)])[:-1]
    size = np.array(sizes)
    turn = np.arange(turns)[:, None]
    start_host = int(np.searchsorted(first, start, side="right")) - 1
    root_host = start_host + _hosts_on(turn, n, cycle or turns)
    host_place = (np.arange(n) - root_host) % n
    entry = first + _entry(size, np.array(start - first[start_host]), turn, turns)
    host_before, host_depth = _before(host_place, is_chain=False)
    before_host = (host_before + root_host) % n
    host = np.repeat(np.arange(n), size)
    place = (np.arange(m) - entry[:, host]) % size[host]
    before, depth = _before(place, is_chain=bool(size.max() <= longest))
    within = first[host] + (before + entry[:, host] - first[host]) % size[host]
    across = np.take_along_axis(entry, before_host, axis=1)[:, host]
    giver = np.where(place == 0, across, within)
    depth = depth + host_depth[:, host]
    order = np.argsort(host_place[:, host] * m + place, axis=1, kind="stable")
    for array in (order, giver, depth):
        array.setflags(write=False)
    return Route(order, giver, depth)


def _before(place: np.ndarray, *, is_chain: bool) -> tuple[np.ndarray, np.ndarray]:
    """The place that feeds each place, 0 for 0, and the hops from 0, along a chain or a binary tree."""
    if is_chain:
        return np.maximum(place - 1, 0), place
    depth = np.frexp((place + 1).astype(float))[1].astype(np.int64) - 1  # exact: floor(log2)
    return np.maximum(place - 1, 0) // 2, depth
