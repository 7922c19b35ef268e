"""The benchmark of how planning grows: its points, its exponent and its table."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from benchmark_modules import module

import shardfly_jax as sf

children, growth, tables = module("children"), module("growth"), module("tables")


@pytest.mark.parametrize("series", growth.SERIES)
def test_points_double_and_the_smallest_plans(series: str) -> None:
    inputs, counts = growth.SERIES[series]
    assert [b / a for a, b in itertools.pairwise(counts)] == [2.0] * (len(counts) - 1)
    assert len(counts) >= growth.FITTED
    source, target, mapping = inputs(counts[0])
    plan = sf.make_plan(source, target, mapping)
    assert {"trainers": plan.source_ranks, "replicas": len(plan.replicas)}.get(series, counts[0]) == counts[0]
    if series == "tensors":  # as many families as tensors: none stands for another
        assert len(plan.target_families) == counts[0]


def test_the_exponent_is_that_of_the_large_end() -> None:
    rows = [{"n": n, "secs": [9.0, 3.0 + n**1.5 if n < 8 else n**1.5, 0.0]} for n in (1, 2, 4, 8, 16, 32, 64, 128)]
    for row in rows:
        row["secs"][0] = row["secs"][1] * 2
    assert growth.exponent(rows) == pytest.approx(1.5)


def test_a_run_gives_a_row_per_point_and_the_table_a_line_per_doubling(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(words: list[str], **limits: Any) -> Any:
        n = int(words[3])
        yield {"series": words[2], "n": n, "secs": [n * 1e-3] * 3, "moves": 2 * n}

    monkeypatch.setattr(children, "rows", rows)
    found = growth.run(lambda _: None)
    assert len(found) == sum(len(counts) for _, counts in growth.SERIES.values())
    machine = {"python": "3", "jax": "0", "numpy": "2", "commit": "abc", "cores": 2, "cpu": "x"}
    text = tables.markdown("growth", {"machine": machine, "rows": found}).splitlines()
    assert text[0] == "| n | layers | tensors | trainers | replicas |"
    assert text[2] == "| 1 |  |  |  | 0.001 s, 2 moves |"
    assert "| exponent | 1.00 | 1.00 | 1.00 | 1.00 |" in text
