"""Memory that processes share: nothing of it is lost where the driver fails; who may reach it."""

from __future__ import annotations

import types
from typing import Any

import jax
import pytest
from host_gpu import UNIT, Driver, words_at

from shardfly_jax.sharding.errors import RegistrationError
from shardfly_jax.transports import heap, vmm
from shardfly_jax.transports.heap import Heap
from shardfly_jax.transports.vmm import SharedMemory, attach

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="needs CPU devices, as host memory is written")
MAKING = (
    "cuMemCreate", "cuMemExportToShareableHandle", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess", "cuMemsetD8",
    "cuCtxSynchronize",
)  # fmt: skip
MAPPING = "cuMemImportFromShareableHandle", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"


@pytest.mark.parametrize("name", MAKING)
def test_memory_that_cannot_be_made_leaves_nothing(driver: Driver, name: str) -> None:
    driver.fails[name] = 1
    with pytest.raises(RegistrationError, match=f"{name} says CUDA_ERROR_OUT_OF_MEMORY. JAX takes most of it"):
        SharedMemory(0, 1000)
    driver.check_books()


def test_a_full_gpu_is_told_with_how_much_was_wanted(driver: Driver) -> None:
    driver.fails["cuMemCreate"] = 1
    wanted = f"{2 * UNIT:,} bytes are wanted on GPU 0, but cuMemCreate says CUDA_ERROR_OUT_OF_MEMORY"
    with pytest.raises(RegistrationError, match=wanted):
        SharedMemory(0, UNIT + 1)


@pytest.mark.parametrize("name", MAPPING)
def test_memory_that_cannot_be_mapped_leaves_nothing(driver: Driver, name: str) -> None:
    memory = SharedMemory(0, 1000)
    before = dict(driver.reserved)
    driver.fails[name] = 1
    with pytest.raises(RegistrationError, match=name):
        attach(memory.descriptor, memory.nbytes, [0])
    assert (driver.reserved, driver.handles) == (before, {})
    memory.close()


def test_mapped_memory_is_the_same_at_another_address_and_outlives_its_owner(driver: Driver) -> None:
    memory = SharedMemory(0, 1000)
    other = attach(memory.descriptor, memory.nbytes, [0])
    assert other.address != memory.address
    vmm.write(0, memory.address + 8, [7, 9])
    memory.close()
    assert words_at(other.address + 8, 2).tolist() == [7, 9]
    other.close()


def test_all_devices_of_the_process_that_can_reach_what_it_shares_may(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel on one of its GPUs forwards to a rank on another one, whose buffers and inbox are shared memory."""
    (device,) = jax.local_devices()
    others = [types.SimpleNamespace(local_hardware_id=k) for k in (3, 4)]
    monkeypatch.setattr(jax, "local_devices", lambda *_, **__: [device, *others])
    monkeypatch.setattr(heap, "can_reach", lambda one, other: (one, other) == (3, device.local_hardware_id))
    words: Any = Heap().words(device, 4)
    assert list(driver.access.values()) == [{device.local_hardware_id, 3}]
    del words
