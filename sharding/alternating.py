"""Records of a table in an order that keeps links busy.

The plan's order has a tensor's move to another device beside one that stays, each of thousands of tiles. While all
blocks take tiles that stay, a link runs dry: what is under way to it is less than 16 MB. So records are cut into
chunks, and those that leave the device alternate with those that stay. A record still comes before all that may wait
for it.
"""

from __future__ import annotations

import itertools

import numpy as np

from shardfly_jax.sharding import records as r

CHUNK_TILES = 128
"""Tiles of a chunk, about: 4 MB."""
PLAIN = (r.ROWS, r.CAST, r.TRANSPOSE, r.TRANSPOSE_ELEMENTS, r.ELEMENTS)
"""Kinds that can be cut between any two tiles."""


def alternating(words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same moves; those to other devices lie evenly among the others between any two records that wait.

    Args:
      words: int64 [records, WORDS], in order and complete but for the numbers of their tiles.

    Returns:
      int64 [chunks, WORDS], and int64 [chunks]: the record of which each is a part.
    """
    waits = words[:, r.WAIT] >= 0
    edges = [0, *(np.flatnonzero(np.diff(waits)) + 1).tolist(), len(words)]
    runs = []
    for start, stop in itertools.pairwise(edges):
        run, numbers = words[start:stop], np.arange(start, stop)
        mixed = not waits[start] and np.ptp(run[:, r.REMOTE]) > 0
        runs.append(_spread(run, numbers) if mixed else (run, numbers))
    return np.concatenate([run for run, _ in runs]), np.concatenate([numbers for _, numbers in runs])


def _spread(words: np.ndarray, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    parts = [chunks(record) for record in words]
    words, numbers = np.concatenate(parts), np.repeat(numbers, [len(part) for part in parts])
    tiles, remote = r.n_tiles(words), words[:, r.REMOTE] > 0
    place = np.zeros(len(words))
    for side in (remote, ~remote):
        place[side] = (np.cumsum(tiles[side]) - tiles[side] / 2) / tiles[side].sum()
    order = np.argsort(place, kind="stable")
    return words[order], numbers[order]


def chunks(record: np.ndarray) -> np.ndarray:
    """Records that do what one does, in its order; of about `CHUNK_TILES` where its kind can be cut.

    Args:
      record: int64 [WORDS].

    Returns:
      int64 [chunks, WORDS].
    """
    tiles = int(r.n_tiles(record))
    if tiles <= CHUNK_TILES or record[r.KIND] not in PLAIN:
        return record[None]
    steps = [*record[r.EXTENT : r.EXTENT + 3].tolist(), int(record[r.TILES_3]), int(record[r.TILES_4])]
    axis = next(k for k, n in enumerate(steps) if n > 1)
    per_step, width = tiles // steps[axis], {3: int(record[r.TILE_3]), 4: int(record[r.TILE_4])}.get(axis, 1)
    parts = r.cut(record, axis, max(CHUNK_TILES // per_step, 1) * width)
    return parts if per_step <= CHUNK_TILES else np.concatenate([chunks(part) for part in parts])
