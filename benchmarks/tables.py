"""The README's tables, made from the committed JSON and from nothing else."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def markdown(part: str, result: dict[str, Any]) -> str:
    """One part's results as a markdown table, with the machine underneath."""
    header, lines = MAKERS[part](result["rows"])
    rows = [header, ["---"] + ["---:"] * (len(header) - 1), *lines]
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    m = result["machine"]
    setup = f"Python {m['python']}, JAX {m['jax']}, NumPy {m['numpy']}, commit {m['commit']}"
    gpus = {row["gpu"] for row in result["rows"] if "gpu" in row}
    where = f"Measured on {', '.join(gpus) or f'{m["cores"]} cores of {m["cpu"]}'}, {setup}."
    if part == "on_gpus" and result["rows"]:
        where = f"{_rates(result['rows'][0]['rates'])} {where}"
    if "failed" in result:
        names = [row.get("case") or f"{row['what']} ({row['trainer_dtype']})" for row in result["failed"]]
        where = f"{where} Not measured: {'; '.join(names)}; the JSON says why."
    if part == "beyond":
        far = [row for row in result["rows"] if row["ratio"] > BEYOND]
        left = sum(_launches(row) + row["stores_bound_secs"] / row["bound_secs"] > BEYOND for row in far)
        where = (
            f"With a perfect order {left} of these {len(far)} cells would still be beyond 1.1. "
            f"Computed, not measured, at commit {m['commit']}."
        )
    if part == "simulated":
        within = [sum(row[f] <= BEYOND for row in result["rows"]) for f in ("ratio", "schedule_ratio")]
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
            f"{row['memory_nbytes'] / 1e6:.1f} MB",
            f"{row['moves']:,} ({row['moves_with_layers']:,})",
            f"{row['saved_nbytes'] / 1e6:.2f} MB",
        ]
        for row in rows
    ]
    return header, lines


def _models(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    scales = list(dict.fromkeys(row["ranks"] for row in rows))
    header = ["model", *(f"{n} -> {n}: seconds, memory, moves, file" for n in scales)]
    header += [f"tables for {scales[0]} -> {scales[0]}: seconds, size", "records, tiles of the device with most"]
    lines = []
    for model in dict.fromkeys(row["model"] for row in rows):
        of = {row["ranks"]: row for row in rows if row["model"] == model}
        first = of[scales[0]]
        lines.append(
            [
                f"{model}, {first['trainer'].partition(' ')[0]}",
                *(
                    f"{statistics.median(row['secs']):.3f} s, {row['memory_nbytes'] / 1e6:.1f} MB, {row['moves']:,}, "
                    f"{row['saved_nbytes'] / 1e6:.2f} MB"
                    for row in (of[n] for n in scales)
                ),
                f"{first['tables_secs']:.2f} s, {first['tables_nbytes'] / 1e6:.1f} MB",
                f"{first['records']:,}, {first['tiles']:,}",
            ]
        )
    return header, lines


def _processes(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    header = ["update", "median (min to max)", "first one", "GPU memory grew"]
    header += ["rescale of who stays, kernels compiled", "register of who joins, kernels compiled"]
    lines = [
        [
            row["case"],
            "{:.2f} ms ({:.2f} to {:.2f})".format(*(1e3 * of(row["secs"]) for of in (statistics.median, min, max))),
            f"{row['first_secs']:.2f} s" if "first_secs" in row else "",
            f"{row['grown_nbytes'] / 1e6:.0f} MB" if "grown_nbytes" in row else "",
            f"{row['rescale_secs']:.2f} s, {row['compiled']}" if "rescale_secs" in row else "",
            f"{row['register_secs']:.2f} s, {row['compiled_by_joiner']}" if "register_secs" in row else "",
        ]
        for row in rows
    ]
    return header, lines


def _growth(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    series = list(dict.fromkeys(row["series"] for row in rows))
    at = {(row["series"], row["n"]): row for row in rows}
    exponents = {row["series"]: row["exponent"] for row in rows}

    def cell(name: str, n: int) -> str:
        row = at.get((name, n))
        return f"{statistics.median(row['secs']):.3f} s, {row['moves']:,} moves" if row else ""

    lines = [[f"{n:,}", *(cell(name, n) for name in series)] for n in sorted({row["n"] for row in rows})]
    return ["n", *series], [*lines, ["exponent", *(f"{exponents[name]:.2f}" for name in series)]]


def _simulated(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    header = ["model", "cells", "time", "/ bound: median, worst", "/ bound at the kernel's rates: median, worst"]
    header += ["gather + broadcast / ours: least, median, most", "shard to shard / ours: least, median, most"]
    lines = []
    kinds = dict.fromkeys((row["model"], row["quantization"]) for row in rows)
    for model, quantization in sorted(kinds, key=lambda kind: bool(kind[1])):  # else in the order of the rows
        of = [row for row in rows if (row["model"], row["quantization"]) == (model, quantization)]
        secs = [row["secs"] for row in of]
        ratios, schedule = [row["ratio"] for row in of], [row["schedule_ratio"] for row in of]
        lines.append(
            [
                f"{model}, {quantization}" if quantization else model,
                str(len(of)),
                f"{min(secs):.3f} to {max(secs):.2f} s",
                f"{statistics.median(ratios):.3f}, {max(ratios):.3f}",
                f"{statistics.median(schedule):.3f}, {max(schedule):.3f}",
                _range([row["gather_broadcast_secs"] / row["secs"] for row in of]),
                _range([row["shard_to_shard_secs"] / row["secs"] for row in of]),
            ]
        )
    return header, lines


def _beyond(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Cells beyond 1.1 of the bound, by what is special about them; how far the kernel's rates explain it."""
    header = ["beyond 1.1 of the bound", "cells", "/ bound", "bound at the kernel's rates / bound", "launches / bound"]
    header += ["/ bound at the kernel's rates"]
    groups: dict[str, list[dict[str, Any]]] = {}
    order = sorted(
        rows, key=lambda row: (bool(row["quantization"]), row["rollouts"] == 1024, row["hosts"], row["ranks"])
    )
    for row in order:
        if row["ratio"] > BEYOND:
            groups.setdefault(_special(row), []).append(row)
    lines = []
    for what, of in groups.items():
        lines.append(
            [
                what,
                str(len(of)),
                _least_and_most([row["ratio"] for row in of]),
                _least_and_most([row["stores_bound_secs"] / row["bound_secs"] for row in of]),
                _least_and_most([_launches(row) for row in of]),
                _least_and_most([row["schedule_ratio"] for row in of]),
            ]
        )
    return header, lines


def _launches(row: dict[str, Any]) -> float:
    """Of the bound."""
    return (row["secs"] - row["schedule_ratio"] * row["stores_bound_secs"]) / row["bound_secs"]


def _special(row: dict[str, Any]) -> str:
    ranks = f"{'EP' if row['expert_parallel'] else 'TP'} {row['ranks']}"
    if row["quantization"]:
        return f"{row['quantization']}, {'1,024 rollouts' if row['rollouts'] == 1024 else 'fewer rollouts'}"
    if row["hosts"] == 1:
        return f"trainers and rollouts in one host, {ranks}"
    if row["rollouts"] == 1024:
        return f"1,024 rollouts, {ranks}"
    return "other hosts, TP 1: each GPU needs everything" if row["ranks"] == 1 else "other hosts, TP 2 and more"


def _least_and_most(values: list[float]) -> str:
    return f"{min(values):.3f} to {max(values):.3f}" if len(values) > 1 else f"{values[0]:.3f}"


def _range(values: list[float]) -> str:
    return f"{min(values):.2f}x, {statistics.median(values):.1f}x, {max(values):.0f}x"


def _updating(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    header = ["update", "payload", "first", "sync, warm: best (median, worst)"]
    header += ["jit + device_put: best (median, worst)", "best / best", "peak memory"]
    header += ["the same arrays in tiny shapes: median"]
    lines = [
        [
            f"{row['model']}, {row['trainer']} -> {row['rollout']}",
            f"{row['payload_nbytes'] / 1e9:.2f} GB",
            f"{row['first_secs']:.2f} s",
            _spread(row["sync_secs"]),
            _spread(row["today_secs"]),
            f"{row['speedup_of_bests']:.2f}x",
            f"{row['peak_nbytes'] / 1e9:.1f} GB",
            f"{_ms(row['host_secs'])} for {row['arrays']} arrays" if "host_secs" in row else "",
        ]
        for row in rows
    ]
    return header, lines


def _on_gpu(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    header = [
        "update",
        "moved",
        "kernels (of the bound)",
        "launches with host (of the bound)",
        "jitted XLA (/ launches)",
    ]
    header += ["sync", "portable sync", "host until the last launch", "launches", "first jitted step"]
    header += ["memory in use, grown by updates"]
    lines = [
        [
            f"{row['case']}, {row['trainer_dtype']} -> {_codes(row['case'])}",
            f"{row['moved_nbytes'] / 1e9:.2f} GB",
            f"{_ms(secs['whole'] for secs in row['phase_secs'])} ({row['of_bound']:.2f})",
            f"{_ms(row['launched_secs'])} ({row['of_bound_with_host']:.2f})",
            f"{_ms(row['xla_secs'])} ({row['faster_than_xla']:.2f}x)",
            _ms(row["sync_secs"]),
            _ms(row["portable_secs"]) if "portable_secs" in row else "",
            f"{_ms(row['host_secs'])} for {row['arrays']} arrays",
            str(row.get("launches", "")),
            f"{row['step_secs'][0]:.2f} s" if "step_secs" in row else "",
            (f"{row['in_use_nbytes'] / 1e9:.2f} GB, " if "in_use_nbytes" in row else "")
            + f"{row['grown_nbytes'][0]} B, {row['grown_nbytes'][1] / 1e6:.2f} MB for a moment",
        ]
        for row in rows
    ]
    return header, lines


def _codes(case: str) -> str:
    return next((codes for codes in ("mxfp8", "mxfp4", "fp8", "int8") if codes in case), "bfloat16")


def _ms(secs: Iterable[float]) -> str:
    """The median in milliseconds."""
    return f"{statistics.median(secs) * 1e3:.2f} ms"


def _on_gpus(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    header = ["update", "over the links", "bound", "kernels", "of the bound", "launches, median (best)", "of the bound"]
    header += ["sync, median (best)", "of the bound", "until the last launch", "jit + device_put, median", "/ sync"]
    lines = [
        [
            f"{row['model']}, {row['case']}",
            " and ".join(f"{n / 1e9:.2f}" for n in _crossing(row["needed_nbytes"])) + " GB",
            f"{row['bound_secs'] * 1e3:.2f} ms",
            _ms(row["gpu_secs"]) if "gpu_secs" in row else "",
            f"{row['gpu_of_bound']:.3f}" if "gpu_secs" in row else "",
            _median_and_best(row["kernel_secs"]),
            f"{row['of_bound']:.3f}",
            _median_and_best(row["sync_secs"]),
            f"{row['sync_of_bound']:.3f}",
            f"{_ms(row['host_secs'])} for {row['arrays']} arrays",
            f"{min(statistics.median(row[key]) for key in ('today_secs', 'jit_secs') if row[key]) * 1e3:.2f} ms",
            f"{row['faster_than_today']:.2f}x",
        ]
        for row in rows
    ]
    return header, lines


def _crossing(needed: list[list[int]]) -> list[int]:
    """What each GPU needs of the others, but for those that need nothing."""
    into = [sum(row[gpu] for k, row in enumerate(needed) if k != gpu) for gpu in range(len(needed))]
    return [n for n in into if n] or [0]


def _rates(rates: dict[str, float]) -> str:
    one, both = rates["one_way"] / 1e9, rates["both_ways"] / 1e9
    return f"`cudaMemcpyPeer` in the same run: {one:.1f} GB/s one way, {both:.1f} each way both ways at once."


def _peers(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    header = ["way", "GPUs", "trainer", "median (best)", "payload", "our sync", "/ ours"]
    lines = [
        [
            row["what"],
            " to ".join(map(str, row["gpus"])),
            row["trainer_dtype"],
            _median_and_best(row["secs"]),
            f"{row['payload_nbytes'] / statistics.median(row['secs']) / 1e9:.1f} GB/s",
            f"{row['our_secs'] * 1e3:.2f} ms" if "our_secs" in row else "",
            f"{row['over_ours']:.2f}x" if "over_ours" in row else "",
        ]
        for row in rows
    ]
    return header, lines


def _median_and_best(secs: list[float]) -> str:
    return f"{statistics.median(secs) * 1e3:.2f} ms ({min(secs) * 1e3:.2f})"


def _spread(secs: list[float]) -> str:
    ordered = sorted(secs)
    return f"{ordered[0]:.2f} s ({ordered[len(ordered) // 2]:.2f}, {ordered[-1]:.2f})"


BEYOND = 1.1
"""Of the bound: predictions beyond it are explained."""
OF_PART = {"beyond": "simulated"}
"""Tables of another part's results."""
MAKERS = {
    "planning": _planning,
    "models": _models,
    "growth": _growth,
    "simulated": _simulated,
    "beyond": _beyond,
    "updating": _updating,
    "on_gpu": _on_gpu,
    "quantizing": _on_gpu,
    "on_gpus": _on_gpus,
    "peers": _peers,
    "processes": _processes,
}
"""The table of each part."""


def renew(results: Path, readme: Path) -> None:
    """Replaces what stands between `<!-- table: PART -->` and `<!-- end -->` in the README."""
    text = readme.read_text()

    def table(match: re.Match[str]) -> str:
        part = match.group(1)
        return f"<!-- table: {part} -->\n{shown(results, part)}\n<!-- end -->"

    readme.write_text(re.sub(r"<!-- table: (\w+) -->.*?<!-- end -->", table, text, flags=re.DOTALL))


def shown(results: Path, part: str) -> str:
    """What the README shows of a part."""
    path = results / f"{OF_PART.get(part, part)}.json"
    return markdown(part, json.loads(path.read_text())) if path.exists() else "(not measured yet)"
