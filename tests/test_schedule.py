"""Order numbers: scattered numbers lie evenly, and roots begin where trainers have time."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

import shardfly_jax as sf
from shardfly_jax.sharding.groups import Band, Group, _cut, _sizes
from shardfly_jax.sharding.layouts import box_shape
from shardfly_jax.sharding.schedule import begin_roots, scattered


@pytest.mark.parametrize("stride", [1, 2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("first", [-3, 0, 1000, 1 << 30])
def test_every_stretch_of_numbers_is_scattered_over_all_the_room(first: int, stride: int) -> None:
    found = np.sort(scattered(first + stride * np.arange(64), 1 << 40)) / (1 << 40)
    assert found[0] >= 0
    assert found[-1] < 1
    assert np.diff(found, prepend=found[-1] - 1).max() < 4 / 64


def group_of(roots: int, per_root: int, rounds: int) -> Group:
    n_bands = roots * per_root
    members = [(0, rank) for rank in range(roots)]
    band = np.arange(n_bands)
    return Group(
        expr=sf.src("w"), layers=(0, 1), cuts=(), box=((0, n_bands),), strides=(1,), itemsize=2, members=members,
        bands=[Band(((k, k + 1),), k, ()) for k in range(n_bands)], roots=roots, rounds=rounds,
        turn=band // per_root, round=band % per_root * rounds // per_root,
    )  # fmt: skip


@pytest.mark.parametrize(("boxes", "roots", "trainers"), [(2, 2, 4), (4, 2, 8), (4, 1, 4), (2, 4, 8), (8, 2, 8)])
def test_roots_that_read_from_the_same_trainers_do_so_one_after_the_other(
    boxes: int, roots: int, trainers: int
) -> None:
    """Every box's bands lie on all trainers, a stretch on each: at any time all of them serve alike."""
    rounds = 16
    groups = [group_of(roots, rounds, rounds) for _ in range(boxes)]
    root = np.repeat(np.arange(boxes * roots), rounds)
    band = np.tile(np.arange(roots * rounds), boxes)
    source = band * trainers // (roots * rounds)
    begin_roots(groups, root, band, source, np.full(len(root), 1 << 20))
    served = np.zeros((rounds, trainers), int)
    np.add.at(served, (np.concatenate([group.round for group in groups]), source), 1)
    assert served.max() <= max(boxes * roots / trainers, 1)


@given(st.data())
def test_sizes_of_bands_are_those_of_their_boxes(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 300), min_size=1, max_size=3).map(tuple))
    axes = tuple(data.draw(st.permutations(range(len(shape)))))
    grains = tuple(data.draw(st.sampled_from([1, 1, 2, 16])) for _ in shape)
    count = data.draw(st.integers(1, 64))
    boxes = _cut(tuple((5, 5 + n) for n in shape), axes, count, grains)
    sizes = [math.prod(box_shape(box)) for box in boxes]
    assert _sizes(shape, axes, count, grains) == (len(sizes), min(sizes), max(sizes))
    assert sum(sizes) == math.prod(shape)


@given(st.data())
def test_bands_of_a_root_stay_in_their_order_and_fill_all_rounds_alike(data: st.DataObject) -> None:
    size = st.tuples(st.integers(1, 4), st.integers(1, 6), st.integers(1, 8))
    sizes = data.draw(st.lists(size, min_size=1, max_size=5))
    rows = [
        (root, band)
        for first, (roots, per_root, _) in zip(np.cumsum([0, *(s[0] for s in sizes)]), sizes, strict=False)
        for band in range(roots * per_root)
        for root in [first + band // per_root]
        if data.draw(st.booleans())  # others are fills
    ]
    root, band = np.array(rows, np.int64).reshape(-1, 2).T

    def each(values: st.SearchStrategy[int]) -> np.ndarray:
        return np.array(data.draw(st.lists(values, min_size=len(rows), max_size=len(rows))), np.int64)

    source, nbytes = each(st.integers(0, 3)), each(st.integers(1, 1 << 40))
    found = []
    for order in (slice(None), slice(None, None, -1)):
        groups = [group_of(roots, per_root, min(rounds, per_root)) for roots, per_root, rounds in sizes]
        before = [group.round for group in groups]
        begin_roots(groups, root[order], band[order], source[order], nbytes[order])
        for group, was in zip(groups, before, strict=True):
            turned = ((group.round - was) % group.rounds).reshape(group.roots, -1)
            assert (turned == turned[:, :1]).all()
            assert ((group.round >= 0) & (group.round < group.rounds)).all()
        found.append([group.round.tolist() for group in groups])
    assert found[0] == found[1]


@pytest.mark.parametrize(("bands", "first"), [(32, 0), (37, 3), (5, 1), (3, 2)])
def test_at_a_pace_runs_are_turned_through_their_whole_ticks_and_every_place_stays_taken_once(
    bands: int, first: int
) -> None:
    """Four trees; bands lie on four trainers, a stretch on each, and eight groups need the same."""
    trees, places = 4, first + np.arange(bands)
    groups = []
    for _ in range(8):
        group = group_of(1, bands, 1)
        group.sizes, group.roots, group.is_paced = (2, 2), trees, True
        group.turn, group.round = places % trees, places // trees
        group.rounds = int(group.round.max()) + 1
        groups.append(group)
    band = np.tile(np.arange(bands), 8)
    root = np.repeat(np.arange(8) * trees, bands) + np.tile(places % trees, 8)
    source = band * 4 // bands
    begin_roots(groups, root, band, source, np.full(len(band), 1 << 20))
    rounds = np.stack([group.round for group in groups])
    for of_group in rounds:
        taken = sorted(zip(of_group.tolist(), (places % trees).tolist(), strict=True))
        assert taken == sorted(zip((places // trees).tolist(), (places % trees).tolist(), strict=True))
    if bands == 32:  # whole ticks alone
        served = np.zeros((8, 4), int)
        np.add.at(served, (rounds.reshape(-1), source), 1)
        assert (served == 8).all()
