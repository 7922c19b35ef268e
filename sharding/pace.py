"""The pace of groups of several hosts, which form a tree: in every tick all links carry alike.

In a binary tree half of the hosts send twice and half not at all. So such a group has twice as many trees as it has
members in a host, each member entry of two: inside of one and at the end of the other, as a host's places in them lie
half of the hosts apart. A *tick* passes on one band along each tree; every NIC receives two and sends two, and in each
host all GPUs pass on alike. A host with fewer members than others goes round them in more turns than a tick has. What a
host passes on in a tick left the trainers a tick per hop earlier, and all wait for whoever has the largest bands under
way. So all tensors have bands of about one size, one after the other without gaps, and those outside the layers come
before all layers. Where that cannot be had, as blocks of a quantized tensor are not cut, the size is one with which an
update is estimated to take least time (`_most_nbytes`). Tensors whose trees are not alike, as of experts that
fewer hosts share, take passes over the layers of their own: at each change hosts would wait for each other.

Two trees: Sanders, Speck, Träff, Two-tree algorithms for full bandwidth broadcast, reduction and scan (2009).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from shardfly_jax.sharding.groups import SMALLEST_BAND_NBYTES, Group, Pace, Pass, band_boxes, band_sizes, bands_of
from shardfly_jax.sharding.language import Expr
from shardfly_jax.sharding.layouts import box_shape
from shardfly_jax.sharding.schedule import SLOTS, reads_scales, scattered
from shardfly_jax.sharding.topology import Topology

MAX_FORWARDS = 5 << 18
"""Rows of forwards in a table, about: bands are at least as large as that takes. What is in layers has a quarter at
least, as a row stands for all of them."""
BAND_NBYTES = 2 << 20
"""Nor are they smaller than this, where an update has `SLOTS` ticks of them."""
UNEVEN_PERCENT = 10
"""How far from the mean the smallest and the largest band of a group may be."""
LARGE = 10
"""Kinds of less than such a part of the largest one have bands of another size."""
DISTANCE = 0.035
"""What bands of half the size that is wanted cost, as a part of an update: twice the rows."""
UNEVEN = 0.02
"""What it costs that some slots have two ticks, and others one."""
FILLING = 1.5
"""What each stage of a route costs until it is busy, ticks."""
WAITING = 0.4
"""Of the hosts that wait for whoever has the largest band under way, so many have nothing else to do."""
AHEAD_NBYTES, LONG = 8 << 20, 4.5
"""What a GPU's blocks hold, by which it can be ahead of others; bands of so many times that would double the time."""


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
    late = list(outside.values())
    tick, most = _tick_nbytes(kinds, late)
    rows = max(MAX_FORWARDS - _forwarded_nbytes(kinds) / tick, Fraction(MAX_FORWARDS, 8))
    late_tick = max(tick, _forwarded_nbytes(late) / rows)
    whole = [(group, group.bands, group.roots) for group in groups]
    pace = _passed(kinds, late, tick, most, late_tick)
    if _is_uneven(Fraction(pace.ticks, SLOTS)):  # with the ticks that are not full
        for group, bands, roots in whole:
            group.bands, group.roots, group.is_paced = bands, roots, False
        fits = Fraction(pace.ticks, SLOTS)
        pace = _passed(kinds, late, tick * fits, most and int(most * fits), late_tick * fits)
    for group in groups:
        group.pace = pace
        if group.is_paced:
            group.start = _start(group, topology)


def _passed(
    layer: Sequence[_Kind], outside: Sequence[_Kind], tick: Fraction, most: int | None, late_tick: Fraction
) -> Pace:
    """Cuts groups into bands, and lets kinds pass them on one after the other.

    Args:
      layer, outside: Kinds in layers, in order, and others.
      tick, late_tick: What a tick of each of them brings over each NIC, bytes.
      most: As for `_cut`, of kinds in layers.
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
        made.append(Pass(max(_in_turn(kinds, tick, most), 1), key[1]))
    front = 0
    for kind in outside:
        whole = kind.nic_nbytes / max(int(kind.nic_nbytes / late_tick), 1)  # each is whole ticks
        front += _in_turn([kind], whole, None, front)
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


def _forwarded_nbytes(kinds: Sequence[_Kind]) -> Fraction:
    """What groups of several hosts pass on in one layer, twice: over a tick it is the rows that this takes."""
    groups = (group for kind in kinds for group in kind.groups if group.is_wide)
    return Fraction(2 * sum(len(group.members) * group.box_nbytes for group in groups))


def _tick_nbytes(layer: Sequence[_Kind], outside: Sequence[_Kind]) -> tuple[Fraction, int | None]:
    """What a tick brings over each NIC, two bands, and what bands have at most, as for `_cut`.

    Args:
      layer, outside: Kinds in layers, the largest first, and others.
    """
    once = sum((kind.nic_nbytes for kind in layer), Fraction(0))
    total = sum((kind.nic_nbytes * (kind.layers[1] - kind.layers[0]) for kind in (*layer, *outside)), Fraction(0))
    least = Fraction(2 * SMALLEST_BAND_NBYTES)
    tick = max(min(Fraction(2 * BAND_NBYTES), total / SLOTS), least)
    rows = max(MAX_FORWARDS - _forwarded_nbytes(outside) / tick, Fraction(MAX_FORWARDS, 4))
    least = max(_forwarded_nbytes(layer) / rows, least)
    tick = max(tick, least)
    if tick < total / SLOTS < 2 * tick:  # a slot with two ticks would be followed by one with one
        tick = total / SLOTS
    large = [group for kind in layer if (group := kind.widest) is not None]
    large = [group for group in large if group.box_nbytes * LARGE > large[0].box_nbytes]
    if not large:
        return tick, None
    even = all(_cuts_evenly(group, max(round(2 * group.box_nbytes / tick), 1)) for group in large)
    if even and not _is_uneven(total / tick / SLOTS):
        return once / max(round(once / tick), 1), None  # a layer is whole ticks
    most = _most_nbytes(tick, least, large, once, total / once)
    return Fraction(2 * most), most


def _most_nbytes(tick: Fraction, least: Fraction, large: Sequence[Group], once: Fraction, layers: Fraction) -> int:
    """With which largest bands an update takes least time, about, where there are few ways to cut.

    Args:
      tick, least: What a tick should bring over each NIC, and at least; two bands.
      large: Groups of several hosts, in layers.
      once: What a layer brings over each NIC.
      layers: How many there are, as if what is outside of them were layers too.
    """
    each = sum((Fraction(group.box_nbytes, 2 * min(group.sizes)) for group in large), Fraction(0))
    unequal = any(len(set(group.sizes)) > 1 for group in large)
    depth = max(len(group.sizes) for group in large).bit_length() - 1
    long = LONG * max(AHEAD_NBYTES, float(2 * once * layers / SLOTS))  # a slot passes on as much as it brings
    filling = FILLING * (depth + 1 + max(max(group.sizes) for group in large))

    def cost(most: int) -> float:
        """Bytes over a NIC that take as long as a layer does; what it is made of follows what `simulate` finds."""
        cuts = [(group, *band_sizes(group, _least_bands(group, most))) for group in large]
        largest = max(size * group.itemsize for group, _, _, size in cuts)
        passed = sum((Fraction(number, 2 * min(group.sizes)) for group, number, _, _ in cuts), Fraction(0))
        ticks = Fraction(math.ceil(passed))
        if unequal:  # every kind goes round the members of each host from the first one on
            ticks = sum((Fraction(-(-number // min(group.sizes)), 2) for group, number, _, _ in cuts), Fraction(0))
        uneven = 1 + (UNEVEN if _is_uneven(ticks * layers / SLOTS) else 0)
        # the deeper trees are, and the fewer ticks or slots a layer has, the more wait for the largest band
        slots = min(float(ticks), float(SLOTS / layers))
        waiting = WAITING * depth / (depth + slots / 2)
        lasts = (1 - waiting) * float(each / passed) + waiting * largest
        late = 1 + filling / (slots * float(layers))
        distance = 1 + DISTANCE * max(math.log2(tick / 2 / most), 0)
        return float(ticks) * lasts * late * (1 + largest / long) * distance * uneven

    sizes = {
        band_sizes(group, count)[2] * group.itemsize
        for group in large
        for count in range(max(int(group.box_nbytes / tick) // 2, 1), int(6 * group.box_nbytes / tick) + 1)
    }
    # bands that suit are worth a quarter more rows
    return min(sorted(size for size in sizes if 5 * size >= 2 * least) or [max(sizes)], key=cost)


def _least_bands(group: Group, most: int) -> int:
    """Into how few bands a group's box can be cut so that none has more bytes than `most`, or nearly so."""

    def suits(count: int) -> bool:
        number, _, largest = band_sizes(group, count)
        return largest * group.itemsize <= most or number < count

    return next(filter(suits, itertools.count(-(-group.box_nbytes // most))))


def _in_turn(kinds: Sequence[_Kind], tick: Fraction, most: int | None, at: int = 0) -> int:
    """Lets kinds pass on one after the other, from a tick on; returns how many ticks that takes.

    Args:
      kinds: In order.
      tick: What a tick brings over each NIC, bytes.
      most: As for `_cut`.
      at: The first tick.
    """
    first, begin, turns, edge = at, 0, 1, Fraction(0)  # `begin` of the tick's `turns` are taken
    last: tuple[list[Group], int] = [], 0
    for kind in kinds:
        here, edge = edge, edge + kind.nic_nbytes / tick
        paced = _cut(kind, here, edge, most)
        mixed = len({group.trees for group in paced}) > 1  # hosts of unequal size: a tick has no one number of turns
        if paced and (mixed or paced[0].trees != turns):
            at, begin, turns = at + (begin > 0), 0, paced[0].trees
        ticks = max((-(-(begin + len(group.bands)) // group.trees) for group in paced), default=1)
        for group in kind.groups:
            group.first_tick, group.ticks = at, ticks
        for group in paced:
            _pass(group, begin)
        last = (paced, begin) if paced else last
        end = begin + max((len(group.bands) for group in paced), default=0)
        turns, end = (1, ticks) if mixed else (turns, end)
        at, begin = at + end // turns, end % turns
        if not paced:
            at += round(edge) - round(here)
    if most is not None and begin > 0:
        _fill(*last, turns - begin)
    return at + (begin > 0) - first


def _fill(paced: list[Group], begin: int, free: int) -> None:
    """Cuts groups further, so that the turns of their last tick are all taken, where they can be cut so often.

    Otherwise some NICs would have a band less than others, layer for layer.
    """
    for group in paced:
        count = len(group.bands) + free
        if band_sizes(group, count)[0] == count:
            group.bands = bands_of(group, band_boxes(group, count))
            _pass(group, begin)


def _cuts_evenly(group: Group, count: int) -> bool:
    """Whether a group's box can be cut into so many bands of about one size."""
    number, least, most = band_sizes(group, count)
    whole = math.prod(box_shape(group.box))
    return number == count and all(abs(n * count - whole) * 100 <= UNEVEN_PERCENT * whole for n in (least, most))


def _cut(kind: _Kind, begin: Fraction, end: Fraction, most: int | None) -> list[Group]:
    """Cuts groups of several hosts into about as many bands as pass on from one tick to another.

    Args:
      kind: Their groups.
      begin, end: Ticks.
      most: Bytes of the largest band, where there are few ways to cut; None where bands of about one size can be had.

    Returns:
      Those that have any. Others, of too few bytes, are passed on whole.
    """
    paced = []
    for group in kind.groups:
        wanted = round(end * group.trees) - round(begin * group.trees)
        wanted = min(wanted, group.box_nbytes // SMALLEST_BAND_NBYTES)
        if group.is_wide and wanted > 0:
            if most is None:
                near = sorted(range(wanted * 4 // 5, wanted * 5 // 4 + 1), key=lambda count: abs(count - wanted))
                evenly = next((count for count in near if count and _cuts_evenly(group, count)), 0)
                count = evenly or _least_bands(group, -(-group.box_nbytes * 5 // (wanted * 4)))
            else:
                count = _least_bands(group, most)
            group.bands = bands_of(group, band_boxes(group, count))
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
