"""Order numbers: scattered numbers lie evenly, and every root is served once in every round."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from shardfly_jax.sharding.schedule import rounds_of, scattered


@pytest.mark.parametrize("stride", [1, 2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("first", [-3, 0, 1000, 1 << 30])
def test_every_stretch_of_numbers_is_scattered_over_all_the_room(first: int, stride: int) -> None:
    found = np.sort(scattered(first + stride * np.arange(64), 1 << 40)) / (1 << 40)
    assert found[0] >= 0
    assert found[-1] < 1
    assert np.diff(found, prepend=found[-1] - 1).max() < 4 / 64


@given(st.integers(0, 10**6), st.integers(1, 16), st.integers(1, 40), st.integers(1, 64))
def test_bands_of_a_root_fill_all_rounds_alike(number: int, roots: int, per_root: int, rounds: int) -> None:
    rounds = min(rounds, per_root)
    band = np.arange(roots * per_root)
    found = rounds_of(number + band // per_root, band, per_root, rounds)
    for of_root in found.reshape(roots, per_root):
        taken, bands = np.unique(of_root, return_counts=True)
        assert taken.tolist() == list(range(rounds))
        assert bands.max() - bands.min() <= 1
