"""CPU devices in the place of GPUs: a driver whose memory is the host's, and the transfer kernel in NumPy.

Nothing else is replaced: the planner's tables, the launches' numbers, the pieces of memory, the descriptors that travel
between processes, flags, counters and the rendezvous are the library's. Memory is memfds, which other processes map at
other addresses. Each process has one device. Unlike a GPU's, its kernels stop when their process is stopped.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import itertools
import mmap
import os
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType, SimpleNamespace
from typing import Any

import jax
import numpy as np
from numpy_records import execute

from shardfly_jax.executors import launches, persistent
from shardfly_jax.pallas_kernels import launch_words as lw
from shardfly_jax.sharding import records as r
from shardfly_jax.sharding.errors import NotFinite
from shardfly_jax.transports import choice, vmm
from shardfly_jax.worlds import world

CORES = 20
UNIT = 64 << 10
"""Granularity of memory."""
NAME = "shardfly-host-gpu"
LOCK = os.path.join(tempfile.gettempdir(), f"{NAME}-{os.getuid()}")
POLL_SECS = 0.0005

# The driver

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
PROT_NONE, MAP_FIXED = 0, 0x10  # which Python does not name
NOTHING = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


class Names:
    """An enumeration whose members are their names."""

    def __getattr__(self, name: str) -> str:
        return name


class Driver:
    """The calls of the CUDA driver that `vmm` makes. It refuses what it does not know, and keeps books.

    Attributes:
      handles: Descriptor of each handle that was not released.
      reserved: Bytes at each reserved address.
      mapped: Which of these hold memory.
      access: Devices that reach it there.
      calls: How often each function was called.
      fails: Functions that fail at their n-th call from now on.
    """

    CUmemAllocationType = CUmemAllocationHandleType = CUmemLocationType = Names()
    CUmemAllocationGranularity_flags = CUmemAccess_flags = CUstream_flags = Names()

    def __init__(self) -> None:
        self.handles: dict[int, int] = {}
        self.reserved: dict[int, int] = {}
        self.mapped: set[int] = set()
        self.access: dict[int, set[int]] = {}
        self.calls: Counter[str] = Counter()
        self.fails: dict[str, int] = {}
        self._numbers = itertools.count(1)

    def __getattr__(self, name: str) -> Callable[..., tuple[Any, ...]]:
        function = FUNCTIONS[name]

        def call(*args: Any) -> tuple[Any, ...]:
            self.calls[name] += 1
            self.fails[name] = self.fails.get(name, 0) - 1
            if self.fails[name] == 0:
                return (SimpleNamespace(value=2, name="CUDA_ERROR_OUT_OF_MEMORY"),)
            return SimpleNamespace(value=0, name="CUDA_SUCCESS"), *function(self, *args)

        return call

    CUmemAllocationProp = CUmemAccessDesc = staticmethod(lambda: SimpleNamespace(location=SimpleNamespace()))

    def create(self, nbytes: int, properties: Any, flags: int) -> tuple[int]:
        assert nbytes % UNIT == 0
        descriptor = os.memfd_create(NAME)
        os.ftruncate(descriptor, nbytes)
        return (self._handle(descriptor),)

    def export(self, handle: int, kind: str, flags: int) -> tuple[int]:
        return (os.dup(self.handles[handle]),)

    def import_(self, descriptor: int, kind: str) -> tuple[int]:
        return (self._handle(os.dup(descriptor)),)

    def _handle(self, descriptor: int) -> int:
        handle = next(self._numbers)
        self.handles[handle] = descriptor
        return handle

    def release(self, handle: int) -> tuple[()]:
        os.close(self.handles.pop(handle))
        return ()

    def reserve(self, nbytes: int, alignment: int, address: int, flags: int) -> tuple[int]:
        at = libc.mmap(None, nbytes, PROT_NONE, NOTHING, -1, 0)
        self.reserved[at] = nbytes
        return (at,)

    def map(self, address: int, nbytes: int, offset: int, handle: int, flags: int) -> tuple[()]:
        descriptor = self.handles[handle]
        assert self.reserved[address] == nbytes == os.fstat(descriptor).st_size
        assert address not in self.mapped
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        assert libc.mmap(address, nbytes, protection, mmap.MAP_SHARED | MAP_FIXED, descriptor, offset) == address
        self.mapped.add(address)
        return ()

    def set_access(self, address: int, nbytes: int, access: Sequence[Any], count: int) -> tuple[()]:
        assert address in self.mapped
        assert count == len(access)
        self.access[address] = {one.location.id for one in access}
        return ()

    def unmap(self, address: int, nbytes: int) -> tuple[()]:
        assert self.reserved[address] == nbytes
        self.mapped.remove(address)
        assert libc.mmap(address, nbytes, PROT_NONE, NOTHING | MAP_FIXED, -1, 0) == address
        return ()

    def free(self, address: int, nbytes: int) -> tuple[()]:
        assert address not in self.mapped
        assert self.reserved.pop(address) == nbytes
        libc.munmap(address, nbytes)
        return ()

    def check_books(self) -> None:
        """All memory was given back, once nobody refers to it."""
        gc.collect()
        assert (self.handles, self.reserved, open_memfds()) == ({}, {}, 0)


def open_memfds() -> int:
    """How many descriptors of this driver's memory are open in this process."""
    links = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    return sum(NAME in link for link in links)


def library_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("shardfly-")}


def fill_bytes(driver: Driver, address: int, value: int, count: int) -> tuple[()]:
    ctypes.memset(address, value, count)
    return ()


def fill_words(driver: Driver, address: int, word: int, count: int, stream: Any) -> tuple[()]:
    words_at(address, count)[:] = word
    return ()


FUNCTIONS: Mapping[str, Callable[..., tuple[Any, ...]]] = {
    "cuMemCreate": Driver.create,
    "cuMemExportToShareableHandle": Driver.export,
    "cuMemImportFromShareableHandle": Driver.import_,
    "cuMemRelease": Driver.release,
    "cuMemAddressReserve": Driver.reserve,
    "cuMemMap": Driver.map,
    "cuMemSetAccess": Driver.set_access,
    "cuMemUnmap": Driver.unmap,
    "cuMemAddressFree": Driver.free,
    "cuMemGetAllocationGranularity": lambda *_: (UNIT,),
    "cuMemsetD8": fill_bytes,
    "cuMemsetD32Async": fill_words,
    **{f"cuCtx{what}Current": lambda *_: () for what in ("Push", "Pop")},
    **{f"cu{what}Synchronize": lambda *_: () for what in ("Ctx", "Stream")},
}


def words_at(address: int, count: int) -> np.ndarray:
    return np.frombuffer((ctypes.c_uint32 * count).from_address(address), np.uint32)


def memory_at(address: int) -> np.ndarray:
    """Bytes from an address on; how many, nobody knows."""
    return np.frombuffer((ctypes.c_uint8 * (1 << 40)).from_address(address), np.uint8)


def flag_at(address: int) -> ctypes.c_uint64:
    """Read and written as one."""
    assert address % 8 == 0
    return ctypes.c_uint64.from_address(address)


# The kernel


class Kernel:
    """One phase of a launch, by one block; `pallas_kernels.transfer` says what it does.

    Args:
      kernel: The arguments of `make_kernel`.
      table: The records.
      numbers: uint32 words of all phases of the launch.
    """

    def __init__(self, kernel: tuple[Any, ...], table: np.ndarray, numbers: np.ndarray):
        self.conversions, _, flags, _, _, at = kernel
        self.words, self.table = numbers[at:], table.reshape(-1, r.WORDS)
        self.tails_at, self.tells_at, self.bases_at, _ = lw.launch_size(flags, 0)
        self.inbox = self.base(self.words[lw.INBOX])
        self.counters = self.inbox + 4 * int(self.words[lw.COUNTERS])
        self.attempt = int(self.words[lw.SESSION]) | int(self.words[lw.EPOCH]) << 32
        self.error = self.refused = 0

    def base(self, place: int) -> int:
        low, high = self.words[self.bases_at + 2 * int(place) :][:2]
        return int(low) | int(high) << 32

    def run(self) -> tuple[int, int]:
        """Does it; the two words of its report."""
        self.started = time.monotonic()
        if count := int(self.words[lw.RESET]):
            words_at(self.counters, count)[:] = 0
            words_at(self.inbox, lw.POISONED + 1)[lw.POISONED] = 1
        for k in range(int(self.words[lw.N_HEADS])):
            self.await_flag(self.flag_of_other(k, lw.LISTS), lw.HEAD, k)
        done = k = 0
        while done < self.words[lw.N_TILES] and not self.error:
            self.do(k, self.table[k])
            done, k = self.table[k][r.END_TILE], k + 1
        if not self.error:
            for k in range(int(self.words[lw.N_TELLS])):
                flag_at(self.flag_of_other(k, self.tells_at)).value = self.attempt
            for k in range(int(self.words[lw.N_TAILS])):
                self.await_flag(self.inbox + 4 * int(self.words[self.tails_at + k]), lw.TAIL, k)
        if not self.error and self.words[lw.NEW_VERSION] != 0xFFFFFFFF:
            words = words_at(self.inbox, lw.POISONED + 1)
            words[lw.VERSION], words[lw.POISONED] = self.words[lw.NEW_VERSION], 0
        return self.error, self.refused

    def do(self, number: int, record: np.ndarray) -> None:
        if record[r.WAIT] >= 0:
            at = self.counter_at(record[r.WAIT_INBOX], record[r.WAIT])
            self.poll(lambda: words_at(at, 1)[0] < record[r.WAIT_COUNT], lw.COUNTER, number)
        if self.error:
            return
        with open(LOCK, "w") as lock:  # others raise the same slots and counters
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                execute(record, self.conversions[record[r.CONVERT]], lambda place: memory_at(self.base(place)))
            except NotFinite:
                self.refused = self.refused or number + 1
            for word, inbox in ((r.SIGNAL, r.SIGNAL_INBOX), (r.SIDE_SIGNAL, r.SIDE_INBOX)):
                if record[word] >= 0:
                    words_at(self.counter_at(record[inbox], record[word]), 1)[0] += r.n_tiles(record)

    def counter_at(self, inbox: int, counter: int) -> int:
        return self.base(inbox) + 4 * (int(self.words[lw.COUNTERS]) + int(counter))

    def flag_of_other(self, k: int, first: int) -> int:
        place, word = self.words[first + 2 * k :][:2]
        return self.base(place) + 4 * int(word)

    def await_flag(self, at: int, kind: int, which: int) -> None:
        def missing() -> bool:
            flag = flag_at(at).value
            ahead = ((flag >> 32) - (self.attempt >> 32)) & 0xFFFFFFFF
            if flag & 0xFFFFFFFF == self.attempt & 0xFFFFFFFF and 0 < ahead < 1 << 31:
                self.fail(lw.LATE, 0)
            return flag != self.attempt

        self.poll(missing, kind, which)

    def poll(self, missing: Callable[[], bool], kind: int, which: int) -> None:
        while missing() and not self.error:
            time.sleep(POLL_SECS)
            if (time.monotonic() - self.started) * 1000 > self.words[lw.DEADLINE_MS]:
                self.fail(kind, which)
            if flag_at(self.inbox + 4 * lw.ABORTED).value == self.attempt:
                self.fail(lw.GIVEN_UP, 0)

    def fail(self, kind: int, which: int) -> None:
        self.error = self.error or which | kind << lw.ERROR_SHIFT


class Report:
    """What a launch writes once it has ended, behind the launches before it.

    Args:
      inbox: Of its device.
      fetch: Its kernels, made of the numbers as they are when it begins, and the stamp.
      nbytes: Of what it writes.
    """

    lanes: dict[int, Report] = {}  # noqa: RUF012
    """The last launch of the device to which each inbox belongs."""

    def __init__(self, inbox: int, fetch: Callable[[], tuple[Sequence[Kernel], np.ndarray]], nbytes: int):
        self._fetch, self._before = fetch, self.lanes.get(inbox)
        self.nbytes, self._memory = nbytes, np.zeros(nbytes // 8, np.uint64)
        self._error: BaseException | None = None
        self.lanes[inbox] = self
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        before, self._before = self._before, None
        if before is not None:
            before._thread.join()
        try:
            kernels, stamp = self._fetch()
            self.numbers = kernels[0].words
            words = self._memory.view(np.uint32)
            words[: -launches.STAMP_SIZE] = [word for kernel in kernels for word in kernel.run()]
            words[-launches.STAMP_SIZE :] = stamp
        except BaseException as error:
            self._error = error

    def is_ready(self) -> bool:
        return not self._thread.is_alive()

    def block_until_ready(self) -> None:
        self._thread.join()
        if self._error is not None:
            raise self._error

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        self.block_until_ready()
        return self._memory.view(np.int32)

    def unsafe_buffer_pointer(self) -> int:
        return self._memory.ctypes.data


def jitted(kernels: tuple[tuple[Any, ...], ...], device: jax.Device) -> Callable[..., tuple[Report, Any]]:
    """As `launches._jitted`."""

    def launch(tables: list[jax.Array], given: jax.Array, state: Any) -> tuple[Report, Any]:
        def fetch() -> tuple[list[Kernel], np.ndarray]:
            words = words_at(given.unsafe_buffer_pointer(), given.size).copy()
            made = [Kernel(one, np.asarray(table), words) for one, table in zip(kernels, tables, strict=True)]
            return made, words[-launches.STAMP_SIZE :]

        nbytes = 4 * (len(kernels) * lw.REPORT_SIZE + launches.STAMP_SIZE)
        return Report(fetch()[0][0].inbox, fetch, nbytes), state

    return launch


def install(put: Callable[[Any, str, Any], None] = setattr) -> Driver:
    """Makes this process believe in its GPU.

    Args:
      put: Sets an attribute of an object; it may remember the old one.
    """
    driver, device = Driver(), jax.devices("cpu")[0]
    put(type(device), "core_count", CORES)
    put(jax, "local_devices", lambda *_, **__: [device])
    put(vmm, "_driver", lambda: driver)
    put(vmm, "_context", lambda ordinal: ordinal)
    put(vmm, "_side_stream", lambda ordinal: ordinal)
    put(launches, "_jitted", jitted)
    put(persistent, "SUPPORTED_CAPABILITY", "unknown")
    put(persistent, "can_reach", lambda one, other: True)
    put(choice, "PROBES", MappingProxyType({"ipc": lambda devices: None, "zmq": choice.why_not_zmq}))
    put(world, "why_not_ipc", lambda devices: None)
    return driver
