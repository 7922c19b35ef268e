"""The pace of groups of several hosts, which form a tree: in every tick all links carry alike.

In a binary tree half of the hosts send twice and half not at all. So such a group has twice as many trees as it has
members in a host, each member entry of two: inside of one and at the end of the other, as a host's places in them lie
half of the hosts apart. A *tick* passes on one band along each tree; every NIC receives two and sends two, and in each
host all GPUs pass on alike. A host with fewer members than others goes round them in more turns than a tick has. What a
host passes on in a tick left the trainers a tick per hop earlier, and all wait for whoever has the largest bands under
way. So all tensors have bands of about one size, as far as blocks of a quantized one can be cut so, one after the other
without gaps, and those outside the layers come before all layers. Tensors whose trees are not alike, as of experts that
fewer hosts share, take passes over the layers of their own: at each change hosts would wait for each other.

Two trees: Sanders, Speck, Träff, Two-tree algorithms for full bandwidth broadcast, reduction and scan (2009).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from shardfly_jax.sharding.groups import SMALLEST_BAND_NBYTES, Group, Pace, Pass, band_boxes, band_sizes, bands_of
from shardfly_jax.sharding.language import Expr
from shardfly_jax.sharding.layouts import box_shape
from shardfly_jax.sharding.schedule import SLOTS, reads_scales, scattered
from shardfly_jax.sharding.topology import Topology

MAX_FORWARDS = 1 << 20
"""Rows of forwards in a table, about: bands are at least as large as that takes."""
BAND_NBYTES = 2 << 20
"""Nor are they smaller than this, where an update has `SLOTS` ticks of them."""
UNEVEN_PERCENT = 10
"""How far from the mean the smallest and the largest band of a group may be."""
MOST_IDLE = Fraction(1, 32)
"""How much of a layer's last tick may have nothing to pass on, as a part of the layer, if that can be had."""
MOST_LARGER = Fraction(5, 4)
"""How large bands of about one size may be, as a part of what is wanted."""
DISTANCE = 0.01
"""What half or twice as many bands count for, beside a largest band of half or twice the size that is wanted."""
LARGE, SMALL = 10, 100
"""Kinds of less than such a part of the largest one need not have bands of its size, or none."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Kind:
    """Groups that need parts of the same tensors.

    Attributes:
      groups: All of them.
    """

    groups: list[Group]

    @property
    def widest(self) -> Group | None:
        """The one with the largest box of those that have several hosts; None without such."""
        return max((group for group in self.groups if group.is_wide), key=lambda g: g.box_nbytes, default=None)

    @property
    def shape(self) -> tuple[int, int]:
        """Hosts, and members in each."""
        largest = max(self.groups, key=lambda group: group.box_nbytes)
        return len(largest.sizes), max(largest.sizes)

    @property
    def layers(self) -> tuple[int, int]:
        """First layer, and one past the last."""
        return min(group.layers[0] for group in self.groups), max(group.layers[1] for group in self.groups)

    @property
    def is_of_scales(self) -> bool:
        """Whether these come after all others of their layers."""
        return reads_scales(self.groups[0].expr)

    @property
    def nic_nbytes(self) -> Fraction:
        """What one layer brings over each NIC of a host."""
        return max(Fraction(group.box_nbytes, max(group.sizes)) for group in self.groups)


def set_pace(groups: Sequence[Group], layered: Sequence[bool], topology: Topology) -> None:
    """Sets the pace of a plan in which some group has several hosts, and bands, turns and rounds of such groups.

    Args:
      groups: With their members and bands.
      layered: Whether what each needs is in layers.
      topology: Where ranks are.
    """
    if not any(group.is_wide for group in groups):
        return
    inside: dict[Expr, _Kind] = {}
    outside: dict[Expr, _Kind] = {}
    for group, is_layered in zip(groups, layered, strict=True):
        if is_layered or (group.is_wide and not reads_scales(group.expr)):
            (inside if is_layered else outside).setdefault(group.expr, _Kind([])).groups.append(group)
    kinds = sorted(inside.values(), key=lambda kind: (kind.is_of_scales, -kind.nic_nbytes))
    rows = sum(len(group.members) * group.box_nbytes for group in groups if group.is_wide)
    tick = _tick_nbytes(rows, kinds, list(outside.values()))
    whole = [(group, group.bands, group.roots) for group in groups]
    pace = _passed(kinds, list(outside.values()), tick)
    if _is_uneven(Fraction(pace.ticks, SLOTS)):  # with the ticks that are not full
        for group, bands, roots in whole:
            group.bands, group.roots, group.is_paced = bands, roots, False
        pace = _passed(kinds, list(outside.values()), tick * Fraction(pace.ticks, SLOTS))
    for group in groups:
        group.pace = pace
        if group.is_paced:
            group.start = _start(group, topology)


def _passed(layer: Sequence[_Kind], outside: Sequence[_Kind], tick: Fraction) -> Pace:
    """Cuts groups into bands, and lets kinds pass them on one after the other.

    Args:
      layer, outside: Kinds in layers, in order, and others.
      tick: What a tick brings over each NIC, bytes.
    """
    passes: dict[tuple[bool, tuple[int, int], tuple[int, int]], list[_Kind]] = {}
    for kind in layer:
        key = (kind.is_of_scales, kind.layers, kind.shape)
        if round(2 * kind.shape[1] * kind.nic_nbytes / tick) == 0:  # too small for bands: with others of its layers
            key = next((other for other in passes if other[:2] == key[:2]), key)
        passes.setdefault(key, []).append(kind)
    made: list[Pass] = []
    for key, kinds in sorted(passes.items(), key=lambda item: item[0][0]):
        for group in (group for kind in kinds for group in kind.groups):
            group.pass_ = len(made)
        made.append(Pass(max(_in_turn(kinds, tick), 1), key[1]))
    front = 0
    for kind in outside:
        front += _in_turn([kind], tick, front)
    return Pace(front, tuple(made))


def _is_uneven(in_slot: Fraction) -> bool:
    """Whether slots with two ticks would be followed by some with one."""
    return Fraction(17, 16) < in_slot < Fraction(15, 8)


def _start(group: Group, topology: Topology) -> int:
    """The member that is the first root: trees that enter hosts by the same GPU lie alike for all groups.

    Else a host would pass on one tensor earlier than others, and the next one later.
    """
    gpu = int(topology.gpu(np.array([group.members[0][1]]))[0]) % topology.gpus_per_host
    return sum(group.sizes[: gpu * len(group.sizes) // (2 * topology.gpus_per_host)])


def _tick_nbytes(rows_nbytes: int, layer: Sequence[_Kind], outside: Sequence[_Kind]) -> Fraction:
    """What a tick brings over each NIC: two bands.

    Args:
      rows_nbytes: Bytes of one layer of all members of groups of several hosts.
      layer, outside: Kinds in layers, the largest first, and others.
    """
    once = sum((kind.nic_nbytes for kind in layer), Fraction(0))
    total = sum((kind.nic_nbytes * (kind.layers[1] - kind.layers[0]) for kind in (*layer, *outside)), Fraction(0))
    least = max(Fraction(2 * rows_nbytes, MAX_FORWARDS), Fraction(2 * SMALLEST_BAND_NBYTES))
    tick = max(min(Fraction(2 * BAND_NBYTES), total / SLOTS), least)
    if tick < total / SLOTS < 2 * tick:  # a slot with two ticks would be followed by one with one
        tick = total / SLOTS
    widest = [group for kind in layer if (group := kind.widest) is not None]
    if not widest:
        return tick
    first = widest[0].box_nbytes
    wanted = max(round(2 * first / tick), 1)

    def fits(count: int, idle: Fraction) -> bool:
        of_tick = Fraction(2 * first, count)
        in_slot = total / of_tick / SLOTS
        counts = [(group, round(2 * group.box_nbytes / of_tick)) for group in widest]
        ticks = sum((Fraction(n, group.trees) for group, n in counts), Fraction(0))
        return (
            not _is_uneven(in_slot)
            and math.ceil(ticks) <= (1 + idle) * ticks
            and all(n > 0 for group, n in counts if group.box_nbytes * SMALL > first)
            and all(_cuts_evenly(group, n) for group, n in counts if group.box_nbytes * LARGE > first)
        )

    if fits(wanted, Fraction(1)):
        return once / max(round(once / tick), 1)  # a layer is whole ticks
    # there are few ways to cut the largest kind evenly, and others follow it
    among = [*range(wanted, max(wanted // 2, 1) - 1, -1), *range(wanted + 1, int(2 * first / least) + 1)]
    found = [next((n for n in among if fits(n, idle)), 0) for idle in (MOST_IDLE, Fraction(1))]
    count = found[0] or found[1] or wanted
    return Fraction(2 * first, count)


def _in_turn(kinds: Sequence[_Kind], tick: Fraction, at: int = 0) -> int:
    """Lets kinds pass on one after the other, from a tick on; returns how many ticks that takes.

    Args:
      kinds: In order.
      tick: What a tick brings over each NIC, bytes.
      at: The first tick.
    """
    first, begin, turns, edge = at, 0, 1, Fraction(0)  # `begin` of the tick's `turns` are taken
    for kind in kinds:
        here, edge = edge, edge + kind.nic_nbytes / tick
        paced = _cut(kind, here, edge)
        mixed = len({group.trees for group in paced}) > 1  # hosts of unequal size: a tick has no one number of turns
        if paced and (mixed or paced[0].trees != turns):
            at, begin, turns = at + (begin > 0), 0, paced[0].trees
        ticks = max((-(-(begin + len(group.bands)) // group.trees) for group in paced), default=1)
        for group in kind.groups:
            group.first_tick, group.ticks = at, ticks
        for group in paced:
            _pass(group, begin)
        end = begin + max((len(group.bands) for group in paced), default=0)
        turns, end = (1, ticks) if mixed else (turns, end)
        at, begin = at + end // turns, end % turns
        if not paced:
            at += round(edge) - round(here)
    return at + (begin > 0) - first


def _cuts_evenly(group: Group, count: int) -> bool:
    """Whether a group's box can be cut into so many bands of about one size."""
    number, least, most = band_sizes(group, count)
    whole = math.prod(box_shape(group.box))
    return number == count and all(abs(n * count - whole) * 100 <= UNEVEN_PERCENT * whole for n in (least, most))


def _count(group: Group, wanted: int, exactly: Fraction) -> int:
    """About how many bands a group's box is to be cut into, if so many are wanted.

    Bands of about one size, if these are not much larger than is wanted. Else, as blocks may allow few ways to cut, the
    largest is as near to that as can be: all wait for it, and a tick with smaller ones brings less.
    """
    whole = math.prod(box_shape(group.box))
    even = next((count for count in range(wanted, wanted // 2, -1) if _cuts_evenly(group, count)), 0)
    if even and band_sizes(group, even)[2] * exactly <= MOST_LARGER * whole:
        return even
    least, best = math.inf, 0
    for count in range(max(wanted // 2, 1), 2 * wanted + 1):
        number, _, most = band_sizes(group, count)
        off = abs(math.log2(most * exactly / whole)) + DISTANCE * abs(math.log2(count / wanted))
        if number == count and off < least:
            least, best = off, count
    return best or next(count for count in range(wanted, 0, -1) if band_sizes(group, count)[0] == count)


def _cut(kind: _Kind, begin: Fraction, end: Fraction) -> list[Group]:
    """Cuts groups of several hosts into about as many bands as pass on from one tick to another.

    Returns:
      Those that have any. Others, of too few bytes, are passed on whole.
    """
    paced = []
    for group in kind.groups:
        wanted = round(end * group.trees) - round(begin * group.trees)
        wanted = min(wanted, group.box_nbytes // SMALLEST_BAND_NBYTES)
        if group.is_wide and wanted > 0:
            group.bands = bands_of(group, band_boxes(group, _count(group, wanted, (end - begin) * group.trees)))
            group.roots, group.is_paced = group.turns, True
            paced.append(group)
    return paced


def _pass(group: Group, begin: int) -> None:
    """Sets turns and rounds of a group's bands, of which the first one has the turn `begin` of its tick."""
    place = begin + _places(len(group.bands), group.trees)
    group.turn, group.round = place % group.roots, place // group.trees
    group.rounds = group.ticks


def _places(n: int, turns: int) -> np.ndarray:
    """When each of n bands is sent, int64 [n]: those of a tick lie evenly in the box, so that all trainers send.

    Of as many runs of bands as there are turns, each gives one band to every tick, beginning at another place of the
    run. The runs of a half or a quarter of a tick lie evenly too.
    """
    bits = (turns - 1).bit_length()
    reversed_ = [int(f"{k:0{bits}b}"[::-1], 2) for k in range(turns)]
    column = np.argsort(np.argsort(reversed_, kind="stable"), kind="stable")
    tick, column_of = np.zeros(n, np.int64), np.zeros(n, np.int64)
    for k, run in enumerate(np.array_split(np.arange(n), turns)):
        tick[run] = (np.arange(len(run)) + scattered(k, len(run))) % max(len(run), 1)
        column_of[run] = column[k]
    return np.argsort(np.lexsort((column_of, tick)), kind="stable")
