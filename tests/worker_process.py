"""A worker process of the tests of worlds, as its parent sees it."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from small_world import HOST_GPU, PROGRAM

PATIENCE_SECS = 45.0
"""Beyond every deadline; who has not answered by then hangs."""


class Process:
    """A worker process: commands in, answers out.

    Args:
      platforms: That JAX has there.
      gpu: Number of the only GPU that it sees, if it is to see one.
      host_gpu: Whether it takes its CPU for a GPU, see `host_gpu`.
    """

    def __init__(self, platforms: str = "cpu", gpu: int | None = None, host_gpu: bool = False) -> None:
        flags = "--xla_force_host_platform_device_count=2"
        path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        env = {**os.environ, "JAX_PLATFORMS": platforms, "XLA_FLAGS": flags, "PYTHONPATH": path}
        env |= {HOST_GPU: "1"} if host_gpu else {}
        if gpu is not None:
            seen = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
            env["CUDA_VISIBLE_DEVICES"] = seen[gpu] if seen else str(gpu)
        self.popen = subprocess.Popen(
            [sys.executable, "-P", "-W", "ignore", "-c", PROGRAM],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True,
        )  # fmt: skip
        self._answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        self.has_started = False

    def _read(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            self._answers.put(json.loads(line))
        self._answers.put({"outcome": "died"})

    def ask(self, command: str, **arguments: Any) -> None:
        assert self.popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.popen.stdin.write(json.dumps([command, arguments]) + "\n")
            self.popen.stdin.flush()

    def answer(self) -> dict[str, Any]:
        if not self.has_started:
            assert self._answers.get(timeout=PATIENCE_SECS)["outcome"] == "started"
            self.has_started = True
        try:
            return self._answers.get(timeout=PATIENCE_SECS)
        except queue.Empty:
            pytest.fail(f"process {self.popen.pid} hangs")

    def call(self, command: str, **arguments: Any) -> dict[str, Any]:
        self.ask(command, **arguments)
        return self.answer()

    def wait_until_stopped(self) -> None:
        """Returns once the process has stopped itself; leaves it waitable."""
        os.waitid(os.P_PID, self.popen.pid, os.WSTOPPED | os.WNOWAIT)

    def end(self) -> None:
        self.popen.kill()
        self.popen.wait(timeout=30)
        for pipe in (self.popen.stdin, self.popen.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
