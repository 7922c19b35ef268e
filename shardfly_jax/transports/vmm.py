"""GPU memory that several processes of one host map: passed on as a file descriptor, mapped where it is used.

The CUDA driver counts who has it mapped: memory whose process has died stays valid for those who write there. Source:
CUDA driver API, "Virtual Memory Management".
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from shardfly_jax.sharding.errors import ParamsMismatch, RegistrationError


def _driver() -> Any:
    from cuda.bindings import driver

    return driver


def call(name: str, *args: Any, wants: str = "") -> Any:
    """Calls a function of the driver; returns what it returns besides its error.

    Args:
      name, args: Of the function.
      wants: What it is called for, for its error.

    Raises:
      RegistrationError: The error.
    """
    error, *rest = getattr(_driver(), name)(*args)
    if error.value:
        remedy = "Is the GPU free, and does its driver run?"
        if error.name == "CUDA_ERROR_OUT_OF_MEMORY":
            remedy = "JAX takes most of it at its start: set XLA_PYTHON_CLIENT_MEM_FRACTION, so that it leaves enough."
        why = f"{name} says {error.name}. {remedy}"
        raise RegistrationError(f"GPU memory: {wants}, but {why}" if wants else f"GPU memory: {why}")
    return rest[0] if rest else None


@functools.cache
def _context(ordinal: int) -> Any:
    """The context that JAX uses too."""
    call("cuInit", 0)
    return call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", ordinal))


@contextlib.contextmanager
def on(ordinal: int) -> Iterator[None]:
    """While this thread calls the driver for a device."""
    call("cuCtxPushCurrent", _context(ordinal))
    try:
        yield
    finally:
        call("cuCtxPopCurrent")


def _properties(ordinal: int) -> Any:
    driver = _driver()
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.requestedHandleTypes = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = ordinal
    return properties


def _access(ordinal: int) -> Any:
    driver = _driver()
    access = driver.CUmemAccessDesc()
    access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = ordinal
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return access


_exiting: list[bool] = []
atexit.register(_exiting.append, True)


class Mapping:
    """Memory at an address of this process, until it is closed or collected.

    Args:
      handle: The driver's, of the memory; given up.
      nbytes: A multiple of the granularity.
      ordinals: Devices that reach it.

    Attributes:
      address: Where it starts; 0 before it is mapped and once it is closed.
    """

    address = 0

    def __init__(self, handle: Any, nbytes: int, ordinals: Iterable[int]):
        self.nbytes = nbytes
        try:
            with contextlib.ExitStack() as undo:
                address = call("cuMemAddressReserve", nbytes, 0, 0, 0)
                undo.callback(call, "cuMemAddressFree", address, nbytes)
                call("cuMemMap", address, nbytes, 0, handle, 0)
                undo.callback(call, "cuMemUnmap", address, nbytes)
                access = [_access(ordinal) for ordinal in ordinals]
                call("cuMemSetAccess", address, nbytes, access, len(access))
                undo.pop_all()
        finally:
            call("cuMemRelease", handle)  # the mapping keeps the memory
        self.address = int(address)

    def close(self) -> None:
        """Gives it back. Nobody may use the address any more."""
        address, self.address = self.address, 0
        if address:
            call("cuMemUnmap", address, self.nbytes)
            call("cuMemAddressFree", address, self.nbytes)

    def __del__(self, exiting: list[bool] = _exiting) -> None:  # bound, as names go before the last arrays do
        if not exiting:  # then the driver frees everything, and may be gone
            self.close()


class SharedMemory(Mapping):
    """New zeroed memory of a device.

    Args:
      ordinal: Of the device among those that are visible.
      nbytes: At least so many.
      peers: Other devices of this process that reach it.
    """

    def __init__(self, ordinal: int, nbytes: int, peers: Sequence[int] = ()):
        with on(ordinal):
            properties = _properties(ordinal)
            least = _driver().CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
            unit = call("cuMemGetAllocationGranularity", properties, least)
            size = -(-max(nbytes, 1) // unit) * unit
            wants = f"{size:,} bytes are wanted on GPU {ordinal}"
            handle = call("cuMemCreate", size, properties, 0, wants=wants)
            kind = _driver().CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
            try:
                self.descriptor = int(call("cuMemExportToShareableHandle", handle, kind, 0))
            except BaseException:
                call("cuMemRelease", handle)
                raise
            try:
                super().__init__(handle, size, (ordinal, *(peer for peer in peers if peer != ordinal)))
            except BaseException:
                os.close(self.descriptor)
                raise
            call("cuMemsetD8", self.address, 0, size)
            call("cuCtxSynchronize")

    def close(self) -> None:
        """Gives it back; who has mapped it keeps it."""
        if self.address:
            os.close(self.descriptor)
        super().close()


def attach(descriptor: int, nbytes: int, ordinals: Sequence[int]) -> Mapping:
    """Maps the memory of another process for devices of this one.

    Args:
      descriptor: Of the memory; stays open.
      nbytes: Its size.
      ordinals: Of the devices that are to reach it.
    """
    with on(ordinals[0]):
        kind = _driver().CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        handle = call("cuMemImportFromShareableHandle", descriptor, kind)
        return Mapping(handle, nbytes, ordinals)


def write(ordinal: int, address: int, words: Sequence[int]) -> None:
    """Writes 32-bit words into a device's memory while its kernels run."""
    with on(ordinal):
        stream = _side_stream(ordinal)
        for k, word in enumerate(words):
            call("cuMemsetD32Async", address + 4 * k, word, 1, stream)
        call("cuStreamSynchronize", stream)


@functools.cache
def _side_stream(ordinal: int) -> Any:
    return call("cuStreamCreate", _driver().CUstream_flags.CU_STREAM_NON_BLOCKING)


def stream_number(stream: Any) -> int:
    """The driver's number of a stream.

    Args:
      stream: That number, or a `torch.cuda.Stream`.

    Raises:
      ParamsMismatch: It is neither.
    """
    number = getattr(stream, "cuda_stream", stream)
    if not isinstance(number, int):
        raise ParamsMismatch(
            f"receive: stream is a {type(stream).__name__}, but a torch.cuda.Stream or the number of a CUDA stream is "
            "needed."
        )
    return number


def wait_for_stream(ordinal: int, stream: int) -> None:
    """Blocks until all that was queued on a stream of a device has run."""
    with on(ordinal):
        call("cuStreamSynchronize", stream)
