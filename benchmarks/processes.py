"""Trainer and rollouts as processes of their own on one GPU: time, memory, and what a joiner costs.

The processes write into each other's buffers (`ipc`). GPUs give processes turns, so kernels of two processes do not run
at once; the same update in one process is measured in the same run. Every target byte is compared with XLA's
conversion first.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any

import shardfly_jax as sf
from benchmarks.children import CHECKOUT, Died
from benchmarks.gpu_job import Save

MODEL = "Qwen3-0.6B"
RUNS = 21
PLATFORMS = "cuda,cpu"
"""Of the processes; the first one is used."""
PATIENCE_SECS = 90


class Process:
    """A worker that is watched: killed when it says nothing for too long."""

    def __init__(self, address: str, token: str, role: str):
        self.role = role
        self._complaints = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed by `end`
        env = os.environ | {"JAX_PLATFORMS": PLATFORMS, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        words = [sys.executable, "-m", "benchmarks.process_worker", MODEL, address, token, role]
        self._popen = subprocess.Popen(
            words, cwd=CHECKOUT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._complaints,
            text=True,
        )  # fmt: skip

    def ask(self, command: str, **arguments: Any) -> None:
        """Tells it to do something."""
        assert self._popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._popen.stdin.write(json.dumps([command, arguments]) + "\n")
            self._popen.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """What came of it.

        Raises:
          Died: It ended, or was killed because it said nothing.
        """
        assert self._popen.stdout is not None
        watch = threading.Timer(PATIENCE_SECS, self._popen.kill)
        watch.start()
        try:
            line = self._popen.stdout.readline()
        finally:
            watch.cancel()
        if not line:
            self._complaints.seek(0)
            said = self._complaints.read()[-1500:]
            raise Died(f"process {self.role} ended, or was killed after {PATIENCE_SECS} s of silence: {said}")
        return dict(json.loads(line))

    def end(self) -> None:
        """Ends it."""
        self._popen.kill()
        self._popen.wait()
        for pipe in (self._popen.stdin, self._popen.stdout, self._complaints):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


class Pool:
    """Processes that do the same thing at once."""

    def __init__(self, address: str, token: str):
        self._new = lambda role: Process(address, token, role)
        self.processes: dict[str, Process] = {}

    def start(self, *roles: str) -> None:
        """Starts more of them."""
        self.processes |= {role: self._new(role) for role in roles}

    def all(self, command: str, **arguments: Any) -> dict[str, dict[str, Any]]:
        """Lets every process do something; their answers."""
        for process in self.processes.values():
            process.ask(command, **arguments)
        return {role: process.answer() for role, process in self.processes.items()}

    def one(self, role: str, command: str, **arguments: Any) -> dict[str, Any]:
        """Lets one of them do something."""
        self.processes[role].ask(command, **arguments)
        return self.processes[role].answer()

    def update(self, seed: int) -> list[dict[str, Any]]:
        """Updates after one that is checked; the trainer's answers."""
        self.one("trainer", "fill", seed=seed)
        self.all("update")
        for role in self.processes:
            if role != "trainer":
                self.one(role, "check", seed=seed)
        return [self.all("update")["trainer"] for _ in range(RUNS)]

    def end(self) -> None:
        """Ends all of them."""
        for process in self.processes.values():
            process.end()


@contextlib.contextmanager
def pool() -> Iterator[Pool]:
    """With a rendezvous in this process."""
    token = secrets.token_hex(8)
    with sf.connect("tcp://127.0.0.1:0", token, serve=True, name="benchmark") as world:
        made = Pool(world.address, token)
        try:
            yield made
        finally:
            made.end()


def by_mpi(transport: str, processes: int) -> dict[str, Any]:
    """What a job under mpirun prints: see `process_worker`.

    Raises:
      Died: It failed or took too long.
    """
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]  # all share one GPU
    env = os.environ | {"JAX_PLATFORMS": PLATFORMS, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    env["CUDA_VISIBLE_DEVICES"] = first
    words = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", str(processes), sys.executable]
    words += ["-m", "benchmarks.process_worker", MODEL, transport, str(RUNS)]
    try:
        done = subprocess.run(
            words, cwd=CHECKOUT, env=env, capture_output=True, text=True, timeout=PATIENCE_SECS, check=False
        )
    except subprocess.TimeoutExpired:
        raise Died(f"the job was not done after {PATIENCE_SECS} s") from None
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise Died(f"the job ended with {done.returncode}: {done.stderr[-1500:]}")
    return dict(json.loads(lines[-1]))


def run(report: Callable[[str], None], save: Save) -> list[dict[str, Any]]:
    """One process against two, over ipc and over NVSHMEM, then two replicas that become three; saves the rows."""
    with pool() as of:
        of.start("alone")
        alone = of.one("alone", "join", replicas=1)
        of.one("alone", "fill", seed=1)
        gpu = of.one("alone", "update")["gpu"]
        checked = of.one("alone", "check", seed=1)["checked_nbytes"]
        alone_secs = [of.one("alone", "update")["secs"] for _ in range(RUNS)]
    with pool() as of:
        of.start("trainer", "0")
        of.one("trainer", "fill", seed=2)
        of.one("0", "join", replicas=1)
        before = of.one("trainer", "free")["free_nbytes"]
        of.one("trainer", "join", replicas=1)
        first = of.all("update")["trainer"]["secs"]
        grown = before - of.one("trainer", "free")["free_nbytes"]
        two_secs = [answer["secs"] for answer in of.update(seed=3)]
    rows: list[dict[str, Any]] = [
        {
            "case": f"{MODEL}, trainer and rollout in one process",
            "secs": alone_secs, "target_nbytes": alone["target_nbytes"], "checked_nbytes": checked,
            "gpu": gpu,
        },
        {
            "case": f"{MODEL}, a trainer and a rollout process (ipc)",
            "secs": two_secs, "first_secs": first, "grown_nbytes": grown, "checked_nbytes": checked,
            "wanted_secs": 1.2 * statistics.median(alone_secs) + 0.010, "gpu": gpu,
        },
    ]  # fmt: skip
    with pool() as of:
        of.start("trainer", "0", "1")
        of.all("join", replicas=2)
        of.update(seed=4)
        of.start("2")
        joined = of.one("2", "join", replicas=3)
        for role in ("trainer", "0", "1"):
            of.processes[role].ask("rescale", replicas=3)
        rescaled = {role: of.processes[role].answer()["rescale_secs"] for role in ("trainer", "0", "1")}
        of.one("trainer", "fill", seed=5)
        updated = of.all("update")
        for role in ("0", "1", "2"):
            of.one(role, "check", seed=5)
        later = [of.all("update")["trainer"]["secs"] for _ in range(RUNS)]
    rows.append(
        {
            "case": f"{MODEL}, 2 replicas become 3 (ipc)",
            "secs": later, "rescale_secs": max(rescaled.values()), "register_secs": joined["register_secs"],
            "first_secs": max(answer["secs"] for answer in updated.values()),
            "compiled": sum(updated[role]["compiled"] for role in ("trainer", "0", "1")),
            "compiled_by_joiner": updated["2"]["compiled"], "checked_nbytes": checked,
            "gpu": gpu,
        }
    )  # fmt: skip
    failed: list[dict[str, Any]] = []
    case = f"{MODEL}, a trainer and a rollout process (nvshmem)"
    try:
        job = by_mpi("nvshmem", 2)
        wanted = rows[1]["wanted_secs"]
        made = {key: job[key] for key in ("secs", "first_secs", "checked_nbytes", "gpu")}
        rows.insert(2, {"case": case, **made, "wanted_secs": wanted})
        rows[2]["of_wanted"] = wanted / statistics.median(job["secs"])
    except (Died, FileNotFoundError) as error:
        failed.append({"case": case, "error": str(error)})
    rows[1]["of_wanted"] = rows[1]["wanted_secs"] / statistics.median(two_secs)
    for row in rows:
        report(f"{row['case']}: {statistics.median(row['secs']) * 1e3:.2f} ms")
    save("processes", rows, failed)
    return rows
