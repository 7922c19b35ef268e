"""The README's tables, made from the committed JSON and from nothing else."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any


def markdown(part: str, result: dict[str, Any]) -> str:
    """One part's results as a markdown table, with the machine underneath."""
    header, lines = {"planning": _planning, "simulated": _simulated, "updating": _updating, "on_gpu": _on_gpu}[part](
        result["rows"]
    )
    rows = [header, ["---"] + ["---:"] * (len(header) - 1), *lines]
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    m = result["machine"]
    setup = f"Python {m['python']}, JAX {m['jax']}, NumPy {m['numpy']}, commit {m['commit']}"
    gpus = {row["gpu"] for row in result["rows"] if "gpu" in row}
    where = f"Measured on {', '.join(gpus) or f'{m["cores"]} cores of {m["cpu"]}'}, {setup}."
    if part == "simulated":
        within = [sum(row[f] <= 1.1 for row in result["rows"]) for f in ("ratio", "schedule_ratio")]
        where = (
            f"Of {len(result['rows'])} cells {within[0]} are within 1.1 of the bound, "
            f"{within[1]} at the kernel's rates. "
            f"Computed, not measured, at commit {m['commit']}."
        )
    return f"{table}\n\n{where}"


def _planning(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    header = ["plan", "seconds (median; min to max of 3)", "wanted", "memory", "moves (with layers)", "file"]
    lines = [
        [
            row["case"],
            f"{row['secs']:.3f} ({row['secs_min']:.3f} to {row['secs_max']:.3f})",
            f"{row['wanted_secs']:g} s",
            f"{row['memory_nbytes'] / 1e6:.0f} MB",
            f"{row['moves']:,} ({row['moves_with_layers']:,})",
            f"{row['saved_nbytes'] / 1e6:.2f} MB",
        ]
        for row in rows
    ]
    return header, lines


def _simulated(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    header = ["model", "cells", "time", "/ bound: median, worst", "/ bound at the kernel's rates: median, worst"]
    header += ["gather + broadcast / ours: least, median, most", "shard to shard / ours: least, median, most"]
    lines = []
    for model in dict.fromkeys(row["model"] for row in rows):
        of = [row for row in rows if row["model"] == model]
        secs = [row["secs"] for row in of]
        ratios, schedule = [row["ratio"] for row in of], [row["schedule_ratio"] for row in of]
        lines.append(
            [
                model,
                str(len(of)),
                f"{min(secs):.3f} to {max(secs):.2f} s",
                f"{statistics.median(ratios):.3f}, {max(ratios):.3f}",
                f"{statistics.median(schedule):.3f}, {max(schedule):.3f}",
                _range([row["gather_broadcast_secs"] / row["secs"] for row in of]),
                _range([row["shard_to_shard_secs"] / row["secs"] for row in of]),
            ]
        )
    return header, lines


def _range(values: list[float]) -> str:
    return f"{min(values):.2f}x, {statistics.median(values):.1f}x, {max(values):.0f}x"


def _updating(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    header = ["update", "payload", "first", "sync, warm: best (median, worst)"]
    header += ["jit + device_put: best (median, worst)", "best / best", "peak memory"]
    lines = [
        [
            f"{row['model']}, {row['trainer']} -> {row['rollout']}",
            f"{row['payload_nbytes'] / 1e9:.2f} GB",
            f"{row['first_secs']:.2f} s",
            _spread(row["sync_secs"]),
            _spread(row["today_secs"]),
            f"{row['speedup_of_bests']:.2f}x",
            f"{row['peak_nbytes'] / 1e9:.1f} GB",
        ]
        for row in rows
    ]
    return header, lines


def _on_gpu(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    header = ["update", "moved", "launches, median", "of the bound", "of an elementwise kernel", "jitted XLA, median"]
    header += ["XLA / launches", "sync, median", "until the last launch", "first", "grown"]
    lines = [
        [
            f"{row['case']}, {row['trainer_dtype']} -> {'fp8' if 'fp8' in row['case'] else 'bfloat16'}",
            f"{row['moved_nbytes'] / 1e9:.2f} GB",
            f"{statistics.median(row['kernel_secs']) * 1e3:.2f} ms",
            f"{row['of_bound']:.3f}",
            f"{row['of_elementwise']:.3f}",
            f"{statistics.median(row['xla_secs']) * 1e3:.2f} ms",
            f"{row['faster_than_xla']:.2f}x",
            f"{statistics.median(row['sync_secs']) * 1e3:.2f} ms",
            _until_last_launch(row),
            f"{row['first_secs']:.2f} s",
            f"{max(row['grown_nbytes'])} B",
        ]
        for row in rows
    ]
    return header, lines


def _until_last_launch(row: dict[str, Any]) -> str:
    if "host_secs" not in row:
        return "not measured"
    return f"{statistics.median(row['host_secs']) * 1e3:.2f} ms for {row['arrays']} arrays"


def _spread(secs: list[float]) -> str:
    ordered = sorted(secs)
    return f"{ordered[0]:.2f} s ({ordered[len(ordered) // 2]:.2f}, {ordered[-1]:.2f})"


def renew(results: Path, readme: Path) -> None:
    """Replaces what stands between `<!-- table: PART -->` and `<!-- end -->` in the README."""
    text = readme.read_text()

    def table(match: re.Match[str]) -> str:
        part = match.group(1)
        path = results / f"{part}.json"
        body = markdown(part, json.loads(path.read_text())) if path.exists() else "(not measured yet)"
        return f"<!-- table: {part} -->\n{body}\n<!-- end -->"

    readme.write_text(re.sub(r"<!-- table: (\w+) -->.*?<!-- end -->", table, text, flags=re.DOTALL))
