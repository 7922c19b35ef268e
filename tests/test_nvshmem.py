"""Worlds of NVSHMEM: four processes under mpirun on one GPU; the program and its checks are those of `test_mpi`."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import shutil
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from host_gpu import UNIT, Driver
from test_mpi import CHECKS, QUANTIZED_CHECKS, check_ended, check_passed

import shardfly_jax as sf
from shardfly_jax import registry
from shardfly_jax.buffers import Wanted
from shardfly_jax.transports import choice, vmm

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


class SymmetricHeap:
    """As `nvshmem.core` of one process: buffers, as far as they fit."""

    def __init__(self, nbytes: int):
        self.left = nbytes

    def buffer(self, nbytes: int, except_on_del: bool) -> Any:
        if nbytes > self.left:
            raise LookupError(f"Failed to allocate memory of bytes {nbytes}")
        self.left -= nbytes
        memory = vmm.SharedMemory(0, nbytes)
        return SimpleNamespace(handle=memory.address + 1, memory=memory)


@pytest.fixture
def world(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Of one process, whose symmetric heap has 4 units; neither MPI nor NVSHMEM has to be installed."""
    heap = SymmetricHeap(4 * UNIT)
    stubs: dict[str, Any] = {
        "mpi4py": SimpleNamespace(MPI=None), "nvshmem": SimpleNamespace(core=heap), "nvshmem.core": heap,
    }  # fmt: skip
    before = set(sys.modules)
    for name, stub in stubs.items():
        monkeypatch.setitem(sys.modules, name, stub)
    made: Any = object.__new__(importlib.import_module("shardfly_jax.worlds.nvshmem").NvshmemWorld)
    made.gpu, made._pieces, made.deadline_secs, made.process = jax.devices("cpu")[0], [], 60.0, 0
    made.exchange = lambda words, wait_secs: [words]
    made.bounded = lambda what: contextlib.nullcontext()
    yield made
    made._pieces.clear()
    for name in set(sys.modules) - before:
        if name.startswith("shardfly_jax.worlds."):  # they know the stubs
            del sys.modules[name]


@pytest.mark.skipif(len(jax.devices("cpu")) < 2, reason="needs two devices")
def test_ranks_are_on_the_process_one_gpu_unless_placed_elsewhere(world: Any) -> None:
    tree = {"w": sf.Layout((4,), "float32", {rank: [(0, 4)] for rank in range(3)})}
    plan = sf.make_plan({"w": sf.Layout((4,), "float32", {0: [(0, 4)]})}, tree)
    places = registry.placed(plan, ["rollout"], None, frozenset(range(1, 4)), registry.devices_of(world))
    assert places == {"rollout": dict.fromkeys(range(3), world.gpu)}
    spread = registry.placed(plan, ["rollout"], None, frozenset(range(1, 4)), jax.devices("cpu")[:2])
    assert len(set(spread["rollout"].values())) == 2


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="needs CPU devices, as host memory is written")
def test_a_full_symmetric_heap_is_told_with_what_is_wanted_and_what_to_set(world: Any) -> None:
    wanted = Wanted((UNIT,), np.dtype(np.uint8), world.gpu)
    (array,) = world.allocate([wanted])
    assert array.unsafe_buffer_pointer() % 256 == 0
    assert not np.asarray(array).any()
    with pytest.raises(sf.RegistrationError) as caught:
        world.allocate([wanted] * 4)
    assert f"{4 * UNIT + 256:,} bytes of NVSHMEM's symmetric heap are wanted, besides {UNIT + 256:,}" in str(
        caught.value
    )
    assert "Failed to allocate memory" in str(caught.value)
    assert "NVSHMEM_SYMMETRIC_SIZE of more than both" in str(caught.value)
    world.allocate([wanted])  # which still fits


@pytest.mark.parametrize(
    ("part", "choice", "runs"), [("MpiPart", "persistent", "portable"), ("NvshmemPart", "portable", "persistent")]
)
def test_another_executor_than_the_only_one_is_refused(world: Any, part: str, choice: str, runs: str) -> None:
    name = {"MpiPart": "mpi_part", "NvshmemPart": "nvshmem"}[part]
    made: Any = object.__new__(getattr(importlib.import_module(f"shardfly_jax.worlds.{name}"), part))
    made.session, made.world = SimpleNamespace(choice=choice), world
    with pytest.raises(sf.RegistrationError, match=f"executor is {choice!r}, but .* there is only {runs!r}"):
        made._open()
