"""Worlds of MPI: four processes under mpirun update every byte; who is lost ends the job, and nobody hangs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

import shardfly_jax as sf
from shardfly_jax.transports import choice

HERE = Path(__file__).parent
PROCESSES = 4
PATIENCE_SECS = 120.0
CHECKS = ["updates", "refusal", "healed", "background", "rescaled", "registrations", "done"]
QUANTIZED_CHECKS = ["updates", "refusal", "healed", "done"]


def run(scenario: str) -> tuple[subprocess.CompletedProcess[str], float]:
    """Runs the program of the tests in four processes; what came of it, and the seconds that it took."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    flags = "--xla_force_host_platform_device_count=2"
    found = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    platforms = os.environ.get("SHARDFLY_TEST_PLATFORMS", "cpu")
    env = {**os.environ, "PATH": path, "PYTHONPATH": found, "JAX_PLATFORMS": platforms, "XLA_FLAGS": flags}
    program = [sys.executable, "-P", str(HERE / "mpi_program.py"), scenario]
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe"]
    if "cuda" in platforms:  # each process has a GPU of its own where there are several
        gpus = len(jax.local_devices(backend="gpu"))
        for number in range(PROCESSES):
            command += [*([":"] if number else []), "-n", "1", "env", f"CUDA_VISIBLE_DEVICES={number % gpus}", *program]
    else:
        command += ["-n", str(PROCESSES), *program]
    start = time.monotonic()
    with subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
    ) as job:  # fmt: skip
        try:
            out, complaint = job.communicate(timeout=PATIENCE_SECS)
        except subprocess.TimeoutExpired:
            job.terminate()  # so that it ends its processes
            out, complaint = job.communicate(timeout=PATIENCE_SECS)
            pytest.fail(f"the job hangs: {out}{complaint}")
    return subprocess.CompletedProcess(job.args, job.returncode, out, complaint), time.monotonic() - start


def check_passed(scenario: str, checks: list[str]) -> None:
    """Every process passes every check of a scenario."""
    done, _ = run(scenario)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.split()
    assert {check: lines.count(check) for check in checks} == dict.fromkeys(checks, PROCESSES), done.stderr


def check_ended(scenario: str) -> tuple[subprocess.CompletedProcess[str], float]:
    """A scenario in which a process is lost ends the job, and nobody goes on; as `run`."""
    done, secs = run(scenario)
    assert done.returncode != 0
    assert done.stdout.split().count("updated") == PROCESSES, done.stderr
    assert "went on" not in done.stdout
    assert "AssertionError" not in done.stderr, done.stderr
    return done, secs


@pytest.mark.mpi
def test_four_processes_update_refuse_heal_and_rescale() -> None:
    check_passed("good", CHECKS)


@pytest.mark.mpi
def test_four_processes_quantize_what_two_trainers_share_and_refuse_what_is_not_finite() -> None:
    check_passed("quantized", QUANTIZED_CHECKS)


@pytest.mark.mpi
def test_what_one_process_does_wrong_is_told_to_all_and_the_next_calls_meet() -> None:
    check_passed("mistakes", ["done"])


@pytest.mark.mpi
def test_a_process_that_is_interrupted_at_a_vote_loses_the_world_and_the_job_ends() -> None:
    done, _ = check_ended("interrupt")
    assert done.stdout.split().count("WorldLost") == 1, done.stderr


@pytest.mark.mpi
@pytest.mark.parametrize("at", ["vote", "move", "maxima"])
@pytest.mark.parametrize("action", ["kill", "stop"])
def test_a_lost_rank_ends_the_job_and_nobody_goes_on(action: str, at: str) -> None:
    done, secs = check_ended(f"{action}-{at}")
    if (action, at) == ("stop", "vote"):
        assert "WorldLost: world: process 2 (ranks [2, 3]) did not come to 'update' within 4 s" in done.stdout
    elif action == "stop":
        assert f"SyncTimeout: after {20 if at == 'maxima' else 4} s rank" in done.stderr, done.stderr
    else:  # the launcher notices at once, long before the deadline of 60 s
        assert secs < 50


@pytest.mark.mpi
def test_a_process_that_does_not_connect_is_not_waited_for_without_end() -> None:
    done, _ = run("miss")
    assert done.returncode != 0
    assert "WorldLost: world: some process did not connect within 3 s" in done.stderr


def test_mpi_is_refused_with_a_reason_where_it_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in choice.STARTED_BY_MPI:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(sf.WorldError, match=r"cannot be imported \(make setup-mpi|not started by mpirun"):
        sf.connect(transport="mpi")
    with pytest.raises(sf.WorldError, match="not for mpi"):
        sf.connect("tcp://127.0.0.1:0", "token", transport="mpi")
    with pytest.raises(sf.WorldError, match="transport is 'carrier pigeon'"):
        sf.connect("tcp://127.0.0.1:0", "token", transport="carrier pigeon")
    with pytest.raises(sf.WorldError, match="address is None"):
        sf.connect(token="token")
