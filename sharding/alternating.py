"""Records of a table in an order that keeps links busy.

The plan's order has a tensor's move to another device beside one that stays, each of thousands of tiles. While all
blocks take tiles that stay, a link runs dry: what is under way to it is less than 16 MB. So records are cut into
chunks, and those that leave the device alternate with those that stay. A record still comes before all that may wait
for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import numpy as np

from shardfly_jax.sharding import records as r

CHUNK_TILES = 128
"""Tiles of a chunk, about: 4 MB."""
PLAIN = (r.ROWS, r.CAST, r.TRANSPOSE, r.ELEMENTS)
"""Kinds that can be cut between any two tiles."""

type Row = tuple[np.ndarray, tuple[int, int]]
"""A record with its source and target rank."""


def alternating(rows: Iterable[Row]) -> Iterator[Row]:
    """The same moves; those to other devices lie evenly among the others between any two records that wait.

    Args:
      rows: Complete records in order.
    """
    for waits, run in itertools.groupby(rows, lambda row: row[0][r.WAIT] >= 0):
        members = list(run)
        if waits or len({int(record[r.REMOTE]) for record, _ in members}) == 1:
            yield from members
        else:
            yield from _spread([(chunk, ranks) for record, ranks in members for chunk in chunks(record)])


def _spread(rows: list[Row]) -> list[Row]:
    tiles = np.array([r.n_tiles(record) for record, _ in rows])
    remote = np.array([bool(record[r.REMOTE]) for record, _ in rows])
    place = np.zeros(len(rows))
    for side in (remote, ~remote):
        place[side] = (np.cumsum(tiles[side]) - tiles[side] / 2) / tiles[side].sum()
    return [rows[k] for k in np.argsort(place, kind="stable")]


def chunks(record: np.ndarray) -> Iterator[np.ndarray]:
    """Records that do what one does, in its order; of about `CHUNK_TILES` where its kind can be cut."""
    tiles = r.n_tiles(record)
    steps = [*record[r.EXTENT : r.EXTENT + 3].tolist(), int(record[r.TILES_3]), int(record[r.TILES_4])]
    axis = next((k for k, n in enumerate(steps) if n > 1), None)
    if axis is None or tiles <= CHUNK_TILES or record[r.KIND] not in PLAIN:
        yield record
        return
    per_step, width = tiles // steps[axis], {3: int(record[r.TILE_3]), 4: int(record[r.TILE_4])}.get(axis, 1)
    each = max(CHUNK_TILES // per_step, 1)
    for first in range(0, steps[axis], each):
        yield from chunks(r.part(record, axis, first * width, (first + each) * width))
