"""`python -m benchmarks`: measures, writes JSON under `benchmarks/results/`, and renews the README's tables."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import check, tables

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """Where and with what the figures were made."""
    import jax
    import numpy as np

    cpu = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as file:
            cpu = next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    written = [":!benchmarks/results", ":!README.md"]  # by this program itself
    commit = _git("rev-parse", "--short", "HEAD")
    if commit and _git("status", "--porcelain", "--untracked-files=no", "--", ".", *written):
        commit += "-dirty"
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "numpy": np.__version__,
        # a machine that got the files without their history is told the commit
        "commit": os.environ.get("SHARDFLY_COMMIT") or commit or "unknown",
    }


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def main() -> None:
    """Runs the chosen parts."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "parts",
        nargs="*",
        metavar="PART",
        help="planning, models, growth, simulated, updating (all by default), on_gpu, quantizing, processes (need a "
        "GPU), on_gpus (needs two)",
    )
    parser.add_argument("--tables-only", action="store_true", help="only renew the README's tables from the JSON")
    parser.add_argument("--check", action="store_true", help="compare with the committed results; write nothing")
    options = parser.parse_args()
    outside = {"on_gpus", "processes"} & {*options.parts}
    if outside and len(options.parts) > 1 and not options.tables_only:
        parser.error(f"{' and '.join(sorted(outside))} goes alone: its programs need the memory of the GPUs")
    if outside:
        os.environ["JAX_PLATFORMS"] = "cpu"  # of this program; those that it starts take the GPUs
    os.environ.setdefault("JAX_PLATFORMS", "cuda,cpu" if {"on_gpu", "quantizing"} & {*options.parts} else "cpu")
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    from benchmarks import gpu_job, growth, models, on_gpu, planning, processes, simulated, updating

    console = Console()

    def report(text: str) -> None:
        console.print(f"  {text}")

    measured: dict[str, list[dict[str, Any]]] = {}

    def save(part: str, rows: list[dict[str, Any]], failed: list[dict[str, Any]] | None = None) -> None:
        measured[part] = rows
        if options.check:
            return
        result = {"machine": machine(), "rows": rows} | ({"failed": failed} if failed else {})
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{part}.json").write_text(json.dumps(result, indent=1) + "\n")

    runs: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "planning": lambda: planning.run(report),
        "models": lambda: models.run(report),
        "growth": lambda: growth.run(report),
        "simulated": lambda: simulated.run(console),
        "updating": lambda: updating.run(console),
        "on_gpu": lambda: on_gpu.run(report),
        "quantizing": lambda: on_gpu.run(report, quantizing=True),
        "processes": lambda: processes.run(report, save),
        "on_gpus": lambda: gpu_job.run(report, save),
    }
    chosen = [part for part in runs if part in options.parts] or [
        part for part in runs if part not in ("on_gpu", "quantizing", "processes", "on_gpus")
    ]
    if unknown := [part for part in options.parts if part not in runs]:
        parser.error(f"unknown parts {unknown}; choose from {', '.join(runs)}")
    if not options.tables_only:
        for part in chosen:
            console.print(f"[bold]{part}[/bold]")
            rows = runs[part]()
            if part not in ("on_gpus", "processes"):  # which save themselves
                save(part, rows)
    if options.check:
        faults = []
        for part, rows in measured.items():  # `peers` too, where `on_gpus` ran
            faults += check.regressions(part, json.loads((RESULTS / f"{part}.json").read_text())["rows"], rows)
        raise SystemExit("\n".join(faults) if faults else 0)
    tables.renew(RESULTS, Path(__file__).parents[1] / "README.md")
    for part in (*chosen, *(["peers"] if "on_gpus" in chosen else [])):
        if (path := RESULTS / f"{part}.json").exists():
            print(tables.markdown(part, json.loads(path.read_text())), end="\n\n")


if __name__ == "__main__":
    main()
