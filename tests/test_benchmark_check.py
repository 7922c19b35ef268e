"""The guard over the committed benchmark results."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
LATER = [part for part in ("models", "growth", "quantizing", "on_gpus") if (RESULTS / f"{part}.json").exists()]
PARTS = ("planning", "simulated", "updating", "on_gpu", *LATER)


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import check

    return check


def committed(part: str) -> list[dict[str, Any]]:
    return json.loads((RESULTS / f"{part}.json").read_text())["rows"]


@pytest.mark.parametrize("part", PARTS)
def test_committed_results_are_not_worse_than_themselves_and_have_a_name_each(check: Any, part: str) -> None:
    rows = committed(part)
    guard = check.GUARDS[part]
    assert len({tuple(row.get(key) for key in guard.keys) for row in rows}) == len(rows)
    assert all(figure.name in row for row in rows for figure in guard.figures)
    assert check.regressions(part, rows, rows) == []


@pytest.mark.parametrize("part", PARTS)
def test_a_figure_past_its_margin_is_named(check: Any, part: str) -> None:
    rows = committed(part)
    for figure in check.GUARDS[part].figures:
        for times, faults in ((0.9, 0), (1.1, 1)):
            new = copy.deepcopy(rows)
            sign = -1 if figure.more_is_better else 1
            new[-1][figure.name] *= 1 + sign * times * figure.margin
            found = check.regressions(part, rows, new)
            assert len(found) == faults
            assert all(figure.name in line for line in found)


def test_a_row_that_is_gone_is_a_regression_and_a_new_one_is_not(check: Any) -> None:
    rows = committed("planning")
    assert check.regressions("planning", rows, rows[1:]) == [f"planning: {rows[0]['case']}: is gone"]
    assert check.regressions("planning", rows[1:], rows) == []


@pytest.mark.parametrize("value", [float("nan"), None])
def test_a_figure_that_is_no_number_any_more_is_a_regression(check: Any, value: float | None) -> None:
    rows = committed("on_gpu")
    new = copy.deepcopy(rows)
    if value is None:
        del new[0]["of_bound"]
    else:
        new[0]["of_bound"] = value
    (fault,) = check.regressions("on_gpu", rows, new)
    assert "of_bound was" in fault
    assert "is nan" in fault


def test_planning_may_take_as_long_as_is_wanted_and_not_longer(check: Any) -> None:
    rows = [{"case": "a plan", "of_wanted": 1.0}]
    assert check.regressions("planning", rows, [{"case": "a plan", "of_wanted": 0.95}]) == []
    assert len(check.regressions("planning", rows, [{"case": "a plan", "of_wanted": 0.5}])) == 1


def test_other_systems_that_have_caught_up_are_named(check: Any) -> None:
    rows = committed("peers")
    assert check.regressions("peers", rows, rows) == []
    new = copy.deepcopy(rows)
    new[1]["over_ours"] *= 0.7
    (fault,) = check.regressions("peers", rows, new)
    assert new[1]["what"] in fault
