"""Worlds of NVSHMEM: four processes under mpirun on one GPU; the program and its checks are those of `test_mpi`."""

from __future__ import annotations

import importlib.util
import shutil

import pytest
from test_mpi import CHECKS, QUANTIZED_CHECKS, check_ended, check_passed

import shardfly_jax as sf
from shardfly_jax.transports import choice

MISSING = [name for name in ("nvshmem", "mpi4py") if importlib.util.find_spec(name) is None]
MISSING += [] if shutil.which("mpirun") else ["mpirun"]
needs_all = pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}")


@pytest.fixture
def on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the processes get."""
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    monkeypatch.setenv("SHARDFLY_TEST_TRANSPORT", "nvshmem")
    monkeypatch.setenv("SHARDFLY_TEST_PLATFORMS", "cuda,cpu")


@needs_all
@pytest.mark.gpu
@pytest.mark.usefixtures("on_gpus")
def test_four_processes_update_refuse_heal_and_rescale() -> None:
    check_passed("good", CHECKS)


@needs_all
@pytest.mark.gpu
@pytest.mark.usefixtures("on_gpus")
def test_four_processes_quantize_what_two_trainers_share_and_refuse_what_is_not_finite() -> None:
    check_passed("quantized", QUANTIZED_CHECKS)


@needs_all
@pytest.mark.gpu
@pytest.mark.usefixtures("on_gpus")
@pytest.mark.parametrize("at", ["vote", "move"])
@pytest.mark.parametrize("action", ["kill", "stop"])
def test_a_lost_rank_ends_the_job_and_nobody_goes_on(action: str, at: str) -> None:
    check_ended(f"{action}-{at}")


def test_nvshmem_is_refused_with_a_reason_where_it_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in choice.STARTED_BY_MPI:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(sf.WorldError, match=r"cannot be imported \(pip install|not started by mpirun"):
        sf.connect(transport="nvshmem")
    with pytest.raises(sf.WorldError, match="not for nvshmem"):
        sf.connect("tcp://127.0.0.1:0", "token", transport="nvshmem")
