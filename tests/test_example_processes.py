"""The example of trainer and rollouts in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("zmq", reason="needs pyzmq (the zmq extra)")

EXAMPLE = Path(__file__).parents[1] / "examples" / "processes.py"


def test_two_rollouts_answer_with_every_steps_weights() -> None:
    done = subprocess.run(
        [sys.executable, "-P", str(EXAMPLE)], env=os.environ | {"JAX_PLATFORMS": "cpu", "COLUMNS": "200"},
        capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Transport: zmq" in done.stdout
    for step in range(3):
        assert f"'rollout/0': {step + 1}" in done.stdout, done.stdout
        assert f"'rollout/1': {step + 1}" in done.stdout, done.stdout
    assert [f"step {step}" in done.stdout for step in range(3)] == [True] * 3
