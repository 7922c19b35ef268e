"""A process' part in a plan whose ranks are on GPUs: kernels write straight into other processes' buffers."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import secrets
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from shardfly_jax.binding import Binding, check_addresses, ready_shards
from shardfly_jax.executors.choice import check_executor
from shardfly_jax.executors.memory import Key, Sources
from shardfly_jax.executors.persistent import Others, PersistentExecutor, why_not
from shardfly_jax.sharding.errors import ParamsMismatch, RegistrationError, SyncTimeout, TransferError, UnknownOutcome
from shardfly_jax.sharding.optable import Inbox
from shardfly_jax.transports.exports import Exports, Neighbour, Offered
from shardfly_jax.transports.vmm import Mapping as MappedMemory, SharedMemory, attach, stream_number, wait_for_stream
from shardfly_jax.worlds.attempt import failure
from shardfly_jax.worlds.closing import close_all
from shardfly_jax.worlds.endpoints import Endpoint, Place, Spot, buffers_offered, inbox_offered, parsed
from shardfly_jax.worlds.gpu_run import GpuRun
from shardfly_jax.worlds.part import Part, trainer_devices
from shardfly_jax.worlds.rendezvous import GONE_SECS
from shardfly_jax.worlds.wire import Header


class Doubt(NamedTuple):
    """A process that may still write into memory which it has mapped.

    Attributes:
      until: When its kernels have ended at the latest, as `time.monotonic` counts.
      exports: Which know whether it has gone.
    """

    until: float
    exports: Exports


_DOUBTS: weakref.WeakKeyDictionary[SharedMemory, dict[str, Doubt]] = weakref.WeakKeyDictionary()
"""By name, of each piece of memory in which there are buffers: these may be another plan's by then."""


class GpuPart(Part):
    """See `Part`. What others write into is handed to them when the first attempt with them begins."""

    _confirms = True

    def _open(self) -> None:
        session, plan = self.session, self.session.plan
        check_executor(session.choice, self.transport, "persistent")
        self.process = secrets.token_hex(8)
        self._devices = {rank: shard.device for (_, _, rank), shard in session.buffers.items()}
        self._sources_at = trainer_devices(session)
        self._devices |= self._sources_at
        addresses = {key: shard.address for key, shard in session.buffers.items() if shard.nbytes}
        if reasons := why_not(plan, set(self._devices.values()), addresses):
            raise RegistrationError(
                f"registration: the persistent kernel cannot run this plan: {'; '.join(reasons)}. Hold its ranks on "
                "CPU devices, to which weights travel over sockets."
            )
        self._neighbours: dict[str, Neighbour] = {}
        self._met: Mapping[str, str] | None = None  # whose memory is mapped
        self._prepared: Mapping[str, str] | None = None  # for whom the kernels are
        self._executor: PersistentExecutor | None = None
        self._addresses: dict[Key | Inbox, int] = {}
        self._mapped: list[MappedMemory] = []
        self._pieces, _ = self.world.heap.located(list(addresses.values()))
        self._offer(f"buffers {self.process}", addresses)

    def _listen(self) -> None:
        """Others ask at `World.exports`."""

    def _offer(self, what: str, addresses: Mapping[Any, int]) -> None:
        """Lets others map what lies at some addresses: by (family, tensor, rank), or device number."""
        pieces, places = self.world.heap.located(list(addresses.values()))
        rows = [
            [*(key if isinstance(key, tuple) else (key,)), *place] for key, place in zip(addresses, places, strict=True)
        ]
        self.world.exports.offer(what, [p.nbytes for p in pieces], [p.descriptor for p in pieces], rows)

    @property
    def _endpoint(self) -> str:
        numbers = {rank: device.local_hardware_id for rank, device in sorted(self._devices.items())}
        return str(Endpoint(self.world.exports.path, self.process, numbers))

    def _close(self) -> None:
        neighbours, self._neighbours = self._neighbours, {}
        withdrawals = [
            functools.partial(self.world.exports.withdraw, f"{what} {self.process}") for what in ("buffers", "inboxes")
        ]
        self._pieces = []
        close_all(*withdrawals, self._unmap, *(neighbour.close for neighbour in neighbours.values()))

    def _unmap(self) -> None:
        """Lets go of what others have, before they are told that nothing is written there any more."""
        self._met = self._prepared = self._executor = None
        self._addresses, self._mapped = {}, []

    # Who else there is

    def _meet(self, endpoints: Mapping[str, str], epoch: int, until: float) -> None:
        """Maps what others have, and prepares the kernels.

        Args:
          endpoints: Of every rank.
          epoch: Of the attempt that begins with them.
          until: When to give up.

        Raises:
          TransferError: Some process is not on a GPU of this host, or has ended.
        """
        self._met, self._addresses, self._mapped = None, {}, []
        by_rank = parsed(endpoints, self.process, self.held)
        processes = {one.process: one for one in by_rank.values() if one.process != self.process}
        for gone in self._neighbours.keys() - processes.keys():
            self._neighbours.pop(gone).close()
        for name, one in processes.items():
            if name not in self._neighbours:
                self._neighbours[name] = Neighbour(one.path, self.world.seal, self.process)
        agreed = hashlib.sha256(json.dumps(endpoints, sort_keys=True).encode()).hexdigest()[:16]
        with contextlib.ExitStack() as stack:
            ask = functools.partial(self._ask, stack, epoch, until)
            offered = {name: ask(name, f"buffers {name}") for name in processes}
            at = buffers_offered(self.session.plan, by_rank, offered)
            executor = self._prepare(endpoints, by_rank, at, agreed)
            mapped: dict[tuple[str, str, int], MappedMemory] = {}
            ordinals = sorted({device.local_hardware_id for device in self._devices.values()})

            def reach(kind: str, name: str, found: Offered, piece: int, offset: int) -> int:
                sizes, descriptors, _ = found
                if (kind, name, piece) not in mapped:
                    mapped[kind, name, piece] = self._map(descriptors[piece], sizes[piece], ordinals, name)
                return mapped[kind, name, piece].address + offset

            inboxes: dict[str, Offered] = {}
            addresses: dict[Key | Inbox, int] = {}
            for key in executor.moving:
                if isinstance(key, Inbox):
                    name = executor.devices[key.device].process
                    if name not in inboxes:
                        inboxes[name] = ask(name, f"inboxes {name} {agreed}")
                    ranks = sorted(rank for rank, one in by_rank.items() if one.process == name)
                    words = executor.inbox_words(key.device)
                    piece, offset = inbox_offered(inboxes[name], key.device, 4 * words, name, ranks)
                    addresses[key] = reach("inbox", name, inboxes[name], piece, offset)
                elif key[2] not in self.held:
                    name, piece, offset = at[key]
                    addresses[key] = reach("buffers", name, offered[name], piece, offset)
        self._mapped, self._addresses, self._met = list(mapped.values()), addresses, dict(endpoints)

    def _map(self, descriptor: int, nbytes: int, ordinals: Sequence[int], name: str) -> MappedMemory:
        """A piece of a neighbour's memory.

        Raises:
          TransferError: The driver maps no such memory.
        """
        try:
            return attach(descriptor, nbytes, ordinals)
        except RegistrationError as error:
            raise TransferError(
                f"update: {nbytes} bytes that process {name[:6]} offers cannot be mapped: {error} Nothing was written "
                "there."
            ) from None

    def _prepare(
        self,
        endpoints: Mapping[str, str],
        by_rank: Mapping[int, Endpoint],
        at: Mapping[Key, Spot],
        agreed: str,
    ) -> PersistentExecutor:
        """The kernels for those who take part, and this process' inboxes, which it offers to the others.

        They stay while the endpoints do: where this process could not meet all of the others in time, some of these may
        have met it, and will not ask for its inboxes again.

        Args:
          endpoints: Of every rank.
          by_rank: The same.
          at: Where the others' buffers are: process, piece of its memory, offset.
          agreed: Names these endpoints.
        """
        if self._executor is not None and self._prepared == endpoints:
            return self._executor
        self._executor = self.session.executor = self._prepared = None
        places = {
            rank: Place(one.process, one.devices[rank]) for rank, one in by_rank.items() if one.process != self.process
        }
        others = Others(places, at.__getitem__, self.world.heap.words)
        executor = PersistentExecutor(self.session.plan, self.session.buffers, self._sources_at, others)
        mine = {number: array.unsafe_buffer_pointer() for number, array in executor.inboxes.items()}
        self.world.exports.withdraw(f"inboxes {self.process}")
        self._offer(f"inboxes {self.process} {agreed}", mine)
        self._executor, self._prepared = executor, dict(endpoints)
        self.session.executor = executor
        return executor

    def _ask(self, stack: contextlib.ExitStack, epoch: int, until: float, name: str, what: str) -> Offered:
        """What a neighbour has; its descriptors are closed with the stack.

        Raises:
          SyncTimeout: It has not come by then.
          TransferError: The neighbour has gone.
          Whatever ends the attempt meanwhile.
        """
        link = self.world.link

        def look(secs: float = 0.0) -> None:
            if (failed := link.failed(epoch, secs)) is not None:
                raise failure(failed) from None

        try:
            found = self._neighbours[name].ask(what, until, look)
        except TransferError:
            look(2 * GONE_SECS + 1)  # the rendezvous knows whom this process has lost
            raise
        if found is not None:
            for descriptor in found[1]:
                stack.callback(os.close, descriptor)
            return found
        raise SyncTimeout(
            f"update: process {name[:6]} did not offer its GPU memory in time: it compiles its kernels, or is stopped. "
            "Nothing was written. Update again, or give sf.connect(..., serve=True, deadline_secs=...) more."
        )

    # An update

    def _sources(self, leaves: list[Any], binding: Binding) -> tuple[Any, list[Any]]:
        """This process' source shards, once they are computed."""
        arrays, _ = ready_shards(leaves, binding)
        for rank, device in binding.devices.items():
            if device != self._sources_at[rank]:
                raise ParamsMismatch(
                    f"params: those of rank {rank} are on {device}, but it was registered on {self._sources_at[rank]}. "
                    "Make the plan from the trainer's jax.Arrays, or ShapeDtypeStructs on a mesh of devices."
                )
        check_addresses(self.session, binding, arrays)
        return arrays, [arrays]

    def _run_of(self, begin: Header, sources: Any, progress: Callable[[int], None] | None) -> GpuRun:
        link = self.world.link
        until = time.monotonic() + link.deadline_secs
        try:
            self._check_doubts(begin["endpoints"])
            if self._met != begin["endpoints"]:
                self._meet(begin["endpoints"], begin["epoch"], until)
        except BaseException as error:
            self._withdraw(f"{type(error).__name__}: {error}"[:2000])
            raise
        assert self._executor is not None
        addresses = dict(self._addresses)
        if isinstance(sources, Sources):
            addresses |= {key: sources.address(key) for key in sources}
        return GpuRun(self, self._executor, begin, addresses, until=until, progress=progress)

    def _wait_for_stream(self, stream: Any) -> None:
        wait_for_stream(next(iter(self._devices.values())).local_hardware_id, stream_number(stream))

    def doubt(self) -> None:
        """After an attempt that failed: others may write here until their kernels have ended, which nobody knows."""
        doubt = Doubt(time.monotonic() + self.world.link.deadline_secs, self.world.exports)
        for piece in self._pieces:
            _DOUBTS.setdefault(piece, {}).update(dict.fromkeys(self._neighbours, doubt))

    @property
    def doubtful(self) -> dict[str, Doubt]:
        """Processes that took part in an attempt that failed, and have not been found harmless since."""
        return {process: doubt for piece in self._pieces for process, doubt in _DOUBTS.get(piece, {}).items()}

    def _check_doubts(self, endpoints: Mapping[str, str]) -> None:
        """Raises:
        UnknownOutcome: A process that took part in an attempt that failed may still write here.
        """
        here = {Endpoint.parse(text, int(rank)).process for rank, text in endpoints.items()}
        now = time.monotonic()
        for process, (until, exports) in self.doubtful.items():
            if process not in here and exports.may_write(process) and now < until:
                raise UnknownOutcome(
                    f"update: process {process[:6]} took part in an attempt that failed, is alive, and has not said "
                    f"that its kernel has ended. End that process, or try again in {until - now:.0f} s, when it can no "
                    "longer write."
                )
        for piece in self._pieces:
            _DOUBTS.pop(piece, None)
