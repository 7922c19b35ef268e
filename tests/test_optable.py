"""Op tables: followed record by record in NumPy, they do what the plan says."""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, given, settings
from random_problems import Case, cases, expected_buffers, source_buffers

from shardfly_jax.sharding import optable as t
from shardfly_jax.sharding.formats import itemsize, np_dtype
from shardfly_jax.sharding.plan import Plan


def long(words: np.ndarray) -> int:
    low, high = (int(w) & 0xFFFFFFFF for w in words)
    value = low | high << 32
    return value - (1 << 64) if value >= 1 << 63 else value


def strided(flat: np.ndarray, offset: int, extents: list[int], strides: list[int], nbytes: int) -> np.ndarray:
    return np.ndarray(extents, f"V{nbytes}", flat.view(np.uint8), offset, strides)


def follow(table: t.OpTable, plan: Plan, memory: list[np.ndarray]) -> None:
    """Executes a table tile by tile, as a single block would."""
    counters = np.zeros(table.n_counters, int)
    for record in table.words:
        n, tile = record[t.EXTENT : t.EXTENT + 5].tolist(), {3: int(record[t.TILE_3]), 4: int(record[t.TILE_4])}
        strides = [
            [long(record[at + 2 * d : at + 2 * d + 2]) for d in range(5)] for at in (t.SOURCE_STRIDE, t.TARGET_STRIDE)
        ]
        offsets = [long(record[at : at + 2]) for at in (t.SOURCE_OFFSET, t.TARGET_OFFSET)]
        grid = [n[0], n[1], n[2], int(record[t.TILES_3]), int(record[t.TILES_4])]
        assert record[t.END_TILE] - record[t.FIRST_TILE] == np.prod(grid)
        if record[t.WAIT] >= 0:
            assert counters[record[t.WAIT]] == record[t.WAIT_COUNT], "waits for a later tile"
        conversion = plan.conversions[record[t.CONVERT]]
        rows = record[t.KIND] == t.ROWS
        read, write = (1, 1) if rows else (itemsize(conversion.source), itemsize(conversion.target))
        for index in np.ndindex(*grid):
            starts = [*index[:3], index[3] * tile[3], index[4] * tile[4]]
            count = [min(tile[d], n[d] - starts[d]) for d in (3, 4)]
            at = [o + int(np.dot(starts, s)) for o, s in zip(offsets, strides, strict=True)]
            target = strided(memory[record[t.TARGET]], at[1], count, strides[1][3:], write)
            if rows:
                assert all(x % 16 == 0 for x in (*at, count[1], strides[0][3], strides[1][3]))
            if record[t.SOURCE] < 0:
                value = conversion.apply(np.empty(count, np_dtype(conversion.source)))
            else:
                value = strided(memory[record[t.SOURCE]], at[0], count, strides[0][3:], read).copy()
                value = value if rows else conversion.apply(value.view(np_dtype(conversion.source)))
            target[...] = np.ascontiguousarray(value).view(f"V{write}")
            if record[t.SIGNAL] >= 0:
                counters[record[t.SIGNAL]] += 1


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases(max_depth=3))
def test_following_the_records_gives_what_the_mapping_means(case: Case) -> None:
    plan = case.plan()
    table = t.make_table(plan, lambda key: key)
    want, sources = expected_buffers(case, plan), source_buffers(case, plan)
    memory = []
    for key in table.buffers:
        memory.append(sources[key] if key in sources else np.full(want[key].nbytes, 0xA5, np.uint8))
    follow(table, plan, memory)
    for key, flat in want.items():
        assert memory[table.buffers.index(key)].tobytes() == flat.tobytes()
