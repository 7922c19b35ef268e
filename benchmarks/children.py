"""Programs that measure one case after the other, watched from outside: a case that hangs or dies costs only itself.

A program prints a row as a line `ROW {json}`. It is killed, with all that it started, when it says nothing for too
long.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

MARK = "ROW "
CHECKOUT = Path(__file__).parents[1]


class Died(Exception):
    """A program ended badly or was killed; says how, with the end of what it wrote to stderr."""


def emit(row: Mapping[str, Any]) -> None:
    """Hands a row to the program that watches this one."""
    print(MARK + json.dumps(row), flush=True)


def rows(
    words: Sequence[str], *, silence_secs: float, deadline: float, env: Mapping[str, str] | None = None
) -> Iterator[dict[str, Any]]:
    """Runs `python words ...`, and yields its rows as they come.

    Args:
      words: Such as `-m` and the name of a module.
      silence_secs: How long it may take from row to row.
      deadline: When it must have ended, in `time.monotonic()`.
      env: Set in addition to this program's environment.

    Raises:
      Died: It ended with an error, was silent for too long, or was not done at the deadline.
    """
    with tempfile.TemporaryFile("w+") as complaints:
        child = subprocess.Popen(
            [sys.executable, *words],
            cwd=CHECKOUT,
            env=os.environ | dict(env or {}),
            stdout=subprocess.PIPE,
            stderr=complaints,
            text=True,
            start_new_session=True,
        )
        lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=_read, args=(child, lines), daemon=True).start()
        try:
            while True:
                patience = min(silence_secs, deadline - time.monotonic())
                try:
                    line = lines.get(timeout=max(patience, 0.0))
                except queue.Empty:
                    late = "was not ready when the time for all cases was over"
                    why = late if time.monotonic() >= deadline else f"said nothing for {patience:.0f} s"
                    raise Died(f"{why}{_end_of(complaints)}") from None
                if line is None:
                    break
                if line.startswith(MARK):
                    yield json.loads(line.removeprefix(MARK))
            try:
                status = child.wait(timeout=10)
            except subprocess.TimeoutExpired:
                raise Died(f"did not end after its last line{_end_of(complaints)}") from None
            if status:
                raise Died(f"ended with {status}{_end_of(complaints)}")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def measured(module: str, *words: str, limit_secs: float) -> dict[str, Any]:
    """The only row of a module of the benchmarks that measures one point as a program. Raises as `rows`."""
    program = ["-m", f"benchmarks.{module}", *words]
    (row,) = rows(program, silence_secs=limit_secs, deadline=time.monotonic() + limit_secs)
    return row


def _read(child: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert child.stdout is not None
    with child.stdout as stdout:
        for line in stdout:
            lines.put(line)
    lines.put(None)


def _end_of(complaints: Any, count: int = 1500) -> str:
    complaints.seek(0)
    text = complaints.read().strip()
    return f":\n{text[-count:]}" if text else ""


def each(
    names: Sequence[str],
    run: Callable[[Sequence[str]], Iterator[dict[str, Any]]],
    *,
    key: str = "case",
) -> Iterator[dict[str, Any]]:
    """The rows of all cases in order, by as many programs as it takes.

    Args:
      names: Of the cases.
      run: Starts a program for the cases that it is given, which yields one row each in their order.
      key: Under which a row has its case's name.

    Yields:
      A row per case; one with `error` where a program died, after which another one goes on with the next case.
    """
    left = list(names)
    while left:
        try:
            for row in run(left):
                if row[key] != left[0]:
                    raise Died(f"measured {row[key]!r} where {left[0]!r} was due")
                left.pop(0)
                yield row
                if "error" in row:
                    break  # who knows in what state it has left its devices
            else:
                if left:
                    raise Died("ended too soon")
        except Died as error:
            if not left:
                return
            yield {key: left.pop(0), "error": str(error)}
