"""A world of MPI whose payload kernels write straight into other processes' GPU memory, by NVSHMEM's symmetric heap.

MPI starts the processes and is the control channel; what lies on the heap has an address in every process, which
nvshmem4py says and kernels take as data. All processes allocate together, so buffers, flags and maxima of a process lie
in pieces that all processes have; a piece is never freed. The world is fixed: a lost process ends the job.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from shardfly_jax.binding import Binding, check_addresses, ready_shards
from shardfly_jax.buffers import ALIGNMENT, Wanted
from shardfly_jax.executors.choice import check_executor
from shardfly_jax.executors.foreign import array_at
from shardfly_jax.executors.launches import Attempt
from shardfly_jax.executors.memory import Key, Sources
from shardfly_jax.executors.persistent import Others, PersistentExecutor, why_not
from shardfly_jax.sharding.errors import ParamsMismatch, RegistrationError, SyncTimeout, WorldError
from shardfly_jax.sharding.optable import Inbox
from shardfly_jax.transports import vmm
from shardfly_jax.worlds.mpi import MpiWorld, Words
from shardfly_jax.worlds.mpi_part import MpiPart
from shardfly_jax.worlds.part import trainer_devices

if TYPE_CHECKING:
    from shardfly_jax.session import Session

PATIENCE_SECS = 10.0
"""How much later than kernels this process gives up."""


class Piece(NamedTuple):
    """Memory of the symmetric heap.

    Attributes:
      buffer: nvshmem4py's.
      address, nbytes: Where it is here.
    """

    buffer: Any
    address: int
    nbytes: int


class Peer(NamedTuple):
    """The GPU of another process.

    Attributes:
      process: Its number.
    """

    process: int

    def __str__(self) -> str:
        return f"the GPU of process {self.process}"


class NvshmemWorld(MpiWorld):
    """All processes of an MPI job, each with one GPU, several perhaps with the same one. Made by `connect`.

    Attributes:
      gpu: Of this process: the first that JAX sees.
      session: A random number that all processes know.
    """

    def __init__(self, deadline_secs: float):
        import nvshmem.core as nv
        from cuda.core import Device

        super().__init__(deadline_secs)
        self.gpu = jax.local_devices(backend="gpu")[0]
        self._pieces: list[Piece] = []
        mine = Device(self.gpu.local_hardware_id)
        mine.set_current()
        uid = nv.get_unique_id(empty=self.process != 0)
        told = np.asarray(uid._data).tobytes().hex() if self.process == 0 else ""
        said = self.exchange({"op": "nvshmem", "uid": told, "session": secrets.randbits(32)}, deadline_secs)
        self.session = said[0]["session"]
        uid._data[:] = np.frombuffer(bytes.fromhex(said[0]["uid"]), dtype=uid._data.dtype)
        with self.bounded("starting NVSHMEM"):
            nv.init(device=mine, uid=uid, rank=self.process, nranks=self.processes, initializer_method="uid")

    def bounded(self, what: str) -> Any:
        """Held during a call that waits for all processes; if it takes too long, the job ends."""
        return _Bounded(self, what)

    def _new_part(self, session: Session) -> MpiPart:
        return NvshmemPart(session, self)

    @property
    def devices(self) -> Sequence[jax.Device]:
        """The one GPU."""
        return (self.gpu,)

    def allocator(self, devices: Sequence[jax.Device]) -> Callable[[Sequence[Wanted]], list[jax.Array]]:
        """What makes the buffers of a plan: on the symmetric heap."""
        if other := sorted({str(device) for device in devices if device != self.gpu}):
            raise RegistrationError(
                f"registration: ranks are to be on {', '.join(other)}, but this process' part of the symmetric heap is "
                f"on {self.gpu}. Start a process for each GPU (CUDA_VISIBLE_DEVICES)."
            )
        return self.allocate

    def allocate(self, wanted: Sequence[Wanted]) -> list[jax.Array]:
        """Zeroed arrays; all processes call this together, each for its own.

        Raises:
          RegistrationError: The symmetric heap has no room for what the process that needs most needs.
        """
        starts = np.cumsum([0, *(-(-one.nbytes // ALIGNMENT) * ALIGNMENT for one in wanted)]).tolist()
        said = self.exchange({"op": "allocate", "nbytes": starts[-1]}, self.deadline_secs)
        nbytes = max(words["nbytes"] for words in said) + ALIGNMENT
        with self.bounded(f"allocating {nbytes / 1e9:.2f} GB of the symmetric heap"):
            buffer = self._new_buffer(nbytes)
        first = -(-int(buffer.handle) // ALIGNMENT) * ALIGNMENT
        with vmm.on(self.gpu.local_hardware_id):
            vmm.call("cuMemsetD8", first, 0, nbytes - ALIGNMENT)
            vmm.call("cuCtxSynchronize")
        self._pieces.append(Piece(buffer, int(buffer.handle), nbytes))
        return [
            array_at(first + start, one.shape, one.dtype, self.gpu, buffer)
            for one, start in zip(wanted, starts[:-1], strict=True)
        ]

    def _new_buffer(self, nbytes: int) -> Any:
        """Of nvshmem4py; all processes call this together with the same size."""
        import nvshmem.core as nv

        try:
            return nv.buffer(nbytes, except_on_del=False)
        except Exception as error:  # of nvshmem4py, which has no common base for them
            held = sum(piece.nbytes for piece in self._pieces)
            raise RegistrationError(
                f"registration: {nbytes:,} bytes of NVSHMEM's symmetric heap are wanted, besides {held:,} that are in "
                f"use, but NVSHMEM says: {error}. Start the job with NVSHMEM_SYMMETRIC_SIZE of more than both in every "
                "process, and where the heap grows as it is needed (CUDA VMM, NVSHMEM's default) let JAX leave so much "
                "of the GPU: XLA_PYTHON_CLIENT_MEM_FRACTION."
            ) from error

    def words(self, device: jax.Device, count: int) -> jax.Array:
        """Zeroed int32 words; all processes call this together."""
        return self.allocate([Wanted((count,), np.dtype(np.int32), device)])[0]

    def locate(self, address: int) -> list[int] | None:
        """Piece and offset of an address; None if it is not on the heap."""
        found = ([k, address - p.address] for k, p in enumerate(self._pieces) if 0 <= address - p.address < p.nbytes)
        return next(found, None)

    def address(self, process: int, piece: int, offset: int) -> int:
        """Where this process finds what another one has at an offset of a piece.

        Raises:
          WorldError: Its GPU is not reached from here.
        """
        import nvshmem.core as nv

        try:
            return int(nv.get_peer_buffer(self._pieces[piece].buffer, process).handle) + offset
        except Exception as error:
            raise WorldError(
                f"world: NVSHMEM gives no address for the memory of process {process}: {error}. Are all GPUs joined by "
                "NVLink?"
            ) from None


class _Bounded:
    """See `NvshmemWorld.bounded`."""

    def __init__(self, world: NvshmemWorld, what: str):
        self._timer = world.deadline(lambda: f"{what} had not ended in process {world.process}")

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()


class NvshmemPart(MpiPart):
    """See `MpiPart`."""

    transport = "nvshmem"
    world: NvshmemWorld

    def _open(self) -> None:
        session, world = self.session, self.world
        check_executor(session.choice, self.transport, "persistent")
        addresses = {key: shard.address for key, shard in session.buffers.items() if shard.nbytes}
        self._rows = {key: world.locate(address) for key, address in addresses.items()}
        if None in self._rows.values():
            raise RegistrationError(
                "registration: the buffers are an owner's, but others reach only the symmetric heap. Let "
                "sf.register(plan, world=...) allocate them."
            )
        self._sources_at = trainer_devices(session)
        devices = {*self._sources_at.values()} | {shard.device for shard in session.buffers.values()}
        reasons = list(why_not(session.plan, devices, addresses))
        reasons += [f"{device} is not this process' {world.gpu}" for device in devices - {world.gpu}]
        if reasons:
            raise RegistrationError(f"registration: the persistent kernel cannot run this plan: {'; '.join(reasons)}.")

    def _offer(self) -> Words:
        return {"buffers": [[*key, *(place or ())] for key, place in self._rows.items()]}

    def _meet(self, said: Sequence[Words]) -> None:
        """Learns where everything is, and prepares the kernels."""
        at: dict[Key, tuple[int, int, int]] = {
            (family, tensor, rank): (process, piece, offset)
            for process, words in enumerate(said)
            for family, tensor, rank, piece, offset in words["buffers"]
        }
        places = {rank: Peer(process) for rank, process in self._process_of.items() if process != self.world.process}
        others = Others(places, at.__getitem__, self.world.words)
        self._executor = PersistentExecutor(self.session.plan, self.session.buffers, self._sources_at, others)
        (inbox,) = self._executor.inboxes.values()
        place = self.world.locate(inbox.unsafe_buffer_pointer())
        assert place is not None
        told = self.world.exchange({"op": "inbox", "place": place}, self.world.deadline_secs)
        self._addresses: dict[Key | Inbox, int] = {}
        for key in self._executor.moving:
            if isinstance(key, Inbox):
                process = self._executor.devices[key.device].process
                self._addresses[key] = self.world.address(process, *told[process]["place"])
            elif key[2] not in self.held:
                self._addresses[key] = self.world.address(*at[key])
        self.session.executor = self._executor

    def _check_stream(self, stream: Any) -> None:
        if stream is not None:
            vmm.stream_number(stream)

    def _sources(self, leaves: list[Any], binding: Binding) -> tuple[Any, list[Any]]:
        arrays, _ = ready_shards(leaves, binding)
        if other := sorted({str(device) for device in binding.devices.values() if device != self.world.gpu}):
            raise ParamsMismatch(f"params: they are on {', '.join(other)}, but this process' GPU is {self.world.gpu}.")
        check_addresses(self.session, binding, arrays)
        return arrays, [arrays]

    def _move(self, sources: Any, number: int, progress: Callable[[int], None] | None, stream: Any) -> None:
        """Launches the phases, each once all processes are through the one before; then hears how they fared.

        Raises:
          TransferError, SyncTimeout: A launch failed, here or in another process. Every replica is poisoned.
          NotFinite: A tensor to be quantized holds NaN or infinity; the like.
        """
        session, world = self.session, self.world
        self.newest = number
        session.begin(number, self.own)
        attempt = Attempt(world.session, number, number, int(world.deadline_secs * 1000))
        addresses: dict[Any, int] = dict(self._addresses)
        if isinstance(sources, Sources):
            addresses |= {key: sources.address(key) for key in sources}
        error: BaseException | None = None
        timer = world.deadline(lambda: f"kernels of rank {min(self.held)} had not ended", PATIENCE_SECS)
        timer.start()
        try:
            try:
                if stream is not None:
                    vmm.wait_for_stream(world.gpu.local_hardware_id, vmm.stream_number(stream))
                session.wait_for_readers()
                self._executor.ready(attempt).outcomes()
            except BaseException as new:
                error = new
            ready = world.exchange({"op": "ready", "is": error is None}, world.deadline_secs + PATIENCE_SECS)
            if all(words["is"] for words in ready):
                try:
                    self._transfer(attempt, addresses)
                    if progress is not None and self.own:
                        progress(sum(shard.nbytes for shard in session.buffers.values()))
                except BaseException as new:
                    error = new
            self._outcome(error, number)
        finally:
            timer.cancel()

    def _transfer(self, attempt: Attempt, addresses: Mapping[Any, int]) -> None:
        for outcome in self._executor.transfer(attempt, addresses).outcomes():
            if why := outcome.work.fault(outcome.error):
                raise SyncTimeout(f"update: {why}, within {attempt.deadline_ms / 1000:g} s.")
            self._executor.check_finite(outcome)
