"""The order and the bands in which a device sends: links stay busy, tiles are whole, and the same is moved."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numpy_records import tiles_of
from random_problems import Case, cases
from test_optable import check_followed

import shardfly_jax as sf
from shardfly_jax.sharding import alternating, optable, records as r
from shardfly_jax.sharding.groups import LEAST_ROUNDS, Group, band_boxes
from shardfly_jax.sharding.optable import Phase
from shardfly_jax.sharding.topology import preset


@st.composite
def records(draw: Any) -> np.ndarray:
    """A record of a plain kind, with strides of both signs and beyond 32 bits, and tiles that do not divide it."""
    stride = st.integers(-(1 << 40), 1 << 40)
    dims = [r.Dim(draw(st.integers(1, 5)), draw(stride), draw(stride)) for _ in range(r.DIMS)]
    offsets = draw(st.integers(0, 1 << 45)), draw(st.integers(0, 1 << 45))
    tiles = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    return r.record(draw(st.sampled_from(alternating.PLAIN)), r.Region(tuple(dims), *offsets), dims, tiles)


@given(record=records(), most=st.integers(1, 40))
def test_chunks_have_the_tiles_of_their_record(record: np.ndarray, most: int) -> None:
    before = record.copy()
    with mock.patch.object(alternating, "CHUNK_TILES", most):
        chunks = list(alternating.chunks(record))
    assert max(map(r.n_tiles, chunks)) <= most
    assert [tile for chunk in chunks for tile in tiles_of(chunk)] == list(tiles_of(record))
    words = {r.EXTENT + d for d in range(r.DIMS)} | {r.TILES_3, r.TILES_4}
    words |= {at + k for at in (r.SOURCE_OFFSET, r.TARGET_OFFSET) for k in range(2)}
    others = [word for word in range(r.WORDS) if word not in words]
    assert all(np.array_equal(chunk[others], record[others]) for chunk in chunks)
    assert np.array_equal(record, before)


@pytest.mark.parametrize("kind", [r.BLOCK_ROWS, r.REDUCE_ELEMENTS, r.PACKED_BLOCKS])
def test_what_quantizes_is_not_cut(kind: int) -> None:
    dims = [r.Dim(4, 64, 64)] * r.DIMS
    record = r.record(kind, r.Region(tuple(dims), 0, 0), dims, (1, 1))
    (same,) = alternating.chunks(record)
    assert np.array_equal(same, record)
    assert r.n_tiles(record) > alternating.CHUNK_TILES


@settings(max_examples=150)
@given(case=cases(max_depth=3), devices=st.integers(2, 3))
def test_a_table_in_small_chunks_does_what_the_mapping_means(case: Case, devices: int) -> None:
    plan = case.plan()
    with mock.patch.object(alternating, "CHUNK_TILES", 1), mock.patch.object(r, "ELEMENTS_TILE_SIZE", 4):
        tables = optable.make_tables(plan, {rank: rank % devices for rank in range(plan.ranks)}, lambda key: key)
    check_followed(case, plan, tables)


def sent(*gpus: int, nbytes: int = 100 << 20) -> np.ndarray:
    """Records by which GPU 0 sends matrices, transposed, to a replica on each of some GPUs."""
    shape = (4096, nbytes // 8192)

    def tree(*shape: int) -> dict[str, sf.Layout]:
        return {f"w{k}": sf.Layout(shape, "bfloat16", {0: [(0, n) for n in shape]}) for k in range(3)}

    mapping = sf.Mapping({name: sf.src(name).rearrange("a b -> b a") for name in tree(1, 1)})
    places = (0, *gpus)
    topology = preset("h200", gpus_per_host=2, gpu_of_rank=places)
    target = sf.replicas({f"r{k}": tree(*shape[::-1]) for k in range(len(gpus))})
    plan = sf.make_plan(tree(*shape), target, mapping, topology=topology)
    return optable.make_tables(plan, dict(enumerate(places)), lambda key: key).tables[0, Phase.SEND].words


def test_what_stays_lies_between_what_leaves() -> None:
    """From one chunk that leaves to the next one there are never more than a few MB of others."""
    words = sent(0, 1)
    remote = words[:, r.REMOTE] == 1
    tiles = np.diff(words[:, r.END_TILE], prepend=0)
    assert tiles[remote].sum() == tiles[~remote].sum() == 3 * 3200
    before = np.cumsum(np.where(remote, 0, tiles))[remote]
    assert np.diff(before, prepend=0).max() <= 2 * alternating.CHUNK_TILES
    assert len(words) <= 2 * 3 * 3200 / alternating.CHUNK_TILES + 12


def test_what_all_leaves_or_all_stays_is_as_the_plan_has_it() -> None:
    assert len(sent(1)) == 3
    assert len(sent(0)) == 3


def test_bands_are_whole_tiles_of_a_transpose() -> None:
    """What passes on to a second replica on GPU 1, where 100 MB would give 128 bands, of 32 rows each here."""
    words = sent(1, 1)
    rows, columns = (words[:, r.EXTENT + d] for d in (3, 4))
    assert set(words[:, r.KIND].tolist()) == {r.TRANSPOSE}
    assert not (rows % r.TRANSPOSE_ROWS).any()
    assert not (columns % (r.TRANSPOSE_ROW_NBYTES // 2)).any()
    assert words[-1, r.END_TILE] == 3 * 3200
    assert len(words) >= 3 * 32


@given(
    rows=st.integers(1, 60_000),
    count=st.integers(1, 500),
    roots=st.integers(1, 16),
    pattern=st.sampled_from(["a b -> b a", "(h d) b -> b h d", "a b -> a b", "(h d) b -> h d b"]),
)
def test_bands_of_what_is_transposed_are_whole_tiles_if_each_root_has_enough(
    rows: int, count: int, roots: int, pattern: str
) -> None:
    expr = sf.src("w").rearrange(pattern, **({"d": 4} if "d" in pattern else {}))
    group = Group(expr, (0, 1), (), ((0, 1), (5, 5 + rows), (0, 3)), (3 * rows, 3, 1), 2, [(0, 0)])
    edges = [box[1] for box in band_boxes(group, count, roots)]
    assert edges[0][0] == 5
    assert edges[-1][1] == 5 + rows
    assert all(one[1] == two[0] or one == two for one, two in itertools.pairwise(edges))
    enough = rows // r.TRANSPOSE_ROWS >= LEAST_ROUNDS * roots
    if enough and pattern.endswith(("b a", "h d")):
        assert not any((lo - 5) % r.TRANSPOSE_ROWS for lo, _ in edges)
        assert len(edges) == min(count, -(-rows // r.TRANSPOSE_ROWS))
    else:
        assert band_boxes(group, count, roots) == band_boxes(group, count)
