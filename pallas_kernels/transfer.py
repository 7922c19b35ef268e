"""The persistent transfer kernel: one launch executes one phase of an update on one device.

Protocol
  attempt: 64 bits, session number and epoch. A flag *stands* when it equals the attempt of this launch; one of a later
    epoch means that this launch comes too late, and it writes nothing.
  heads: before its first tile, every worker waits until the *ready* flags of the devices that it writes to stand. They
    are in those devices' own inboxes, so a launch that comes too late sees that, whoever has started it.
  claims: workers take batches of `CLAIM` tiles from one counter, in order, and do them in order; the next batch is
    claimed while one is done. A tile waits only for tiles of smaller numbers, and the worker that holds the smallest
    unfinished one can always go on: no deadlock, whatever the number of workers.
  counters: every tile of a record with `SIGNAL` raises a counter, on the target's device, after its stores are visible
    there; a record with `WAIT` starts when its counter has reached `WAIT_COUNT`. *ready* zeroes the counters before it
    lets anybody write.
  end: a worker counts itself as finished after its stores are visible everywhere. The last one tells other devices,
    waits for the flags of those that write here (tails), notes the version, reports, and zeroes the private words.
  refusals: a block of values that holds NaN or infinity is noted in `REFUSED`, as its record plus one, and the launch
    goes on. The host learns of it from the report; what was written is void.
  deadline: a wait that goes on when the launch has lasted longer sets `ERROR`. Then no worker claims another tile,
    nobody is told, and the report says which wait it was. What was written is void. The same happens when the host
    gives the attempt up: it writes it into `ABORTED` of the device's inbox.

Operands: the table, this launch's numbers and addresses, the state, which is changed in place, and, in a jitted step
that cannot know the addresses of its arrays, these arrays. Flags and counters are in the device's inbox, at an address
that never changes. Nothing about a model or plan is compiled in but the set of conversions.

A worker is a warpgroup with shared memory of its own. A block has several, which share nothing but its operands'
addresses.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from shardfly_jax.pallas_kernels import addresses as m
from shardfly_jax.pallas_kernels.emit import Int, const, for_range, if_else, when, while_loop
from shardfly_jax.pallas_kernels.launch_words import (
    ABORTED,
    CLAIMED,
    COUNTER,
    COUNTERS,
    DEADLINE_MS,
    ERROR,
    ERROR_SHIFT,
    FINISHED,
    GIVEN_UP,
    HEAD,
    INBOX,
    LATE,
    LAUNCHES,
    LISTS,
    N_HEADS,
    N_TAILS,
    N_TELLS,
    N_TILES,
    NEW_VERSION,
    POISONED,
    REFUSED,
    REPORT,
    REPORT_SIZE,
    RESET,
    SESSION,
    SEVERAL,
    TAIL,
    VERSION,
    launch_size,
)
from shardfly_jax.pallas_kernels.record import Record
from shardfly_jax.sharding import records as r
from shardfly_jax.sharding.formats import Conversion

WORKERS = 3
"""Of a block that moves tiles. ptxas lets a thread have 65,536 registers over the block's threads, 168 here. With a
worker per block it took up to 229 for kernels that quantize, and only two blocks shared a multiprocessor."""
ROOM_OF_ONE = 116 << 10
"""Bytes of shared memory of a block of which only one fits on a multiprocessor."""
OWN_NBYTES = (r.TILE_NBYTES, 8, 16)
"""Bytes of shared memory of each worker: a tile, an mbarrier, four words."""
CLAIM = 2
"""Tiles per claim."""
POLL_NS = 100


@functools.lru_cache(maxsize=64)
def make_kernel(
    conversions: tuple[Conversion, ...], blocks: int, flags: int, workers: int = 1, buffers: int = 0, at: int = 0
) -> Callable[..., jax.Array]:
    """The kernel for plans with these conversions.

    Args:
      conversions: What the `CONVERT` words name.
      blocks: Of the launch.
      flags: Room for heads, tails and tells, see `launch_size`.
      workers: Of a block. With more than one, only one block fits on a multiprocessor.
      buffers: How many addresses the launch has, where its operands take the place of some; else 0.
      at: First word of this launch among those given.

    Returns:
      `kernel(table, launch, state, *operands)`: int32 [records * WORDS], [words], [STATE], and arrays whose addresses
      take the place of the first ones of the launch. It changes the state in place and returns its report, int32 [2]:
      the error, and the record plus one that met values that are not finite; both 0 if all went well.
    """
    room = ROOM_OF_ONE - workers * r.TILE_NBYTES if workers > 1 else 0

    def body(table, launch, state, *rest):  # type: ignore[no-untyped-def]
        *operands, out, tile, barrier, shared, addresses, _room = rest
        state[LAUNCHES] = state[LAUNCHES] + 1  # JAX keeps the launch because it sees this write; its value is nobody's
        refs = (table, launch, state, out, tile, barrier, shared, addresses, *operands)

        @plgpu.inline_mgpu(arg_types=tuple(plgpu.RefType() for _ in refs))
        def run(_, *memrefs):  # type: ignore[no-untyped-def]
            table_at, launch_at, state_at, out_at = map(m.address, memrefs[:4])
            addresses = (table_at, launch_at + 4 * at, state_at, out_at, *map(m.shared_address, memrefs[4:8]))
            operand_addresses = [m.address(ref) for ref in memrefs[8:]]
            Worker(conversions, blocks * workers, flags, *addresses, buffers=buffers).run(operand_addresses)

        run(*refs)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((REPORT_SIZE,), jnp.int32),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=workers,
        thread_name="worker",
        scratch_types=[
            plgpu.SMEM((nbytes // 4,), jnp.int32)
            for nbytes in (*(workers * size for size in OWN_NBYTES), max(8 * buffers, 8), max(room, 4))
        ],
    )


class Worker:
    """Emits the code of one worker.

    Args:
      conversions, flags: As for `make_kernel`.
      workers: Of the launch.
      table, launch, state, out: Global addresses.
      tile, barrier, shared, addresses: Shared-memory addresses, of the block: of each worker's tile, mbarrier, and four
        words (the batch, the error of a wait, and when this worker started); and of `buffers` addresses.
      buffers: As for `make_kernel`.
    """

    def __init__(
        self,
        conversions: tuple[Conversion, ...],
        workers: int,
        flags: int,
        table: Int,
        launch: Int,
        state: Int,
        out: Int,
        tile: Int,
        barrier: Int,
        shared: Int,
        addresses: Int,
        buffers: int = 0,
    ):
        self.conversions, self.workers = conversions, workers
        self.table, self.launch, self.state, self.out = table, launch, state, out
        own = zip((tile, barrier, shared), OWN_NBYTES, strict=True)
        self.tile, self.barrier, self.shared = (first + m.warpgroup() * size for first, size in own)
        self.addresses = addresses
        self.buffers = buffers
        self.thread = m.thread()
        self.leads = self.thread == 0
        self.tails_at, self.tells_at, self.bases_at, _ = launch_size(flags, 0)

    # Read again where they are needed: registers are short.

    @property
    def n_tiles(self) -> Int:
        """Tiles of the table."""
        return m.load_word(self.launch, N_TILES)

    @property
    def attempt(self) -> Int:
        """Session number and epoch."""
        return m.load_pair(self.launch, SESSION)

    @property
    def counters(self) -> Int:
        """Address of the first counter of the own inbox."""
        return self.inbox + m.load_word(self.launch, COUNTERS) * const(4, 64)

    @property
    def inbox(self) -> Int:
        """Address of the own inbox."""
        return self.base(m.load_word(self.launch, INBOX))

    def run(self, operands: Sequence[Int] = ()) -> None:
        """The whole kernel.

        Args:
          operands: Addresses that take the place of the launch's first ones.
        """
        m.init_barrier(self.barrier)
        zero = const(0)
        if self.buffers:
            self.take(operands)
        self.reset()
        with when(self.leads):
            start = m.clock_ns()
            m.store_shared(self.shared + 8, start.low())
            m.store_shared(self.shared + 12, (start >> 32).low())
            for_range(zero, m.load_word(self.launch, N_HEADS), 1, self.await_head)

        def has_batch(claimed: Int, error: Int, record: Int, parity: Int) -> tuple[Int, list[Int]]:
            batch = self.broadcast(claimed, error)
            return batch * CLAIM < self.n_tiles, [batch, error, record, parity]

        def do_batch(batch: Int, error: Int, record: Int, parity: Int) -> list[Int]:
            claimed, error = self.claim()  # arrive while the tiles are done
            first = batch * CLAIM
            stop = (first + CLAIM).at_most(self.n_tiles)

            def has_tile(record: Int, parity: Int, number: Int) -> tuple[Int, list[Int]]:
                return number < stop, [record, parity, number]

            def do_tile(record: Int, parity: Int, number: Int) -> list[Int]:
                record = self.seek(record, number)
                return [record, self.do_tile(record, number, parity), number + 1]

            record, parity, _ = while_loop([record, parity, first], has_tile, do_tile)
            return [claimed, error, record, parity]

        while_loop([*self.claim(), zero, zero], has_batch, do_batch)
        self.end()

    def take(self, operands: Sequence[Int]) -> None:
        """Puts all addresses, the operands' first, into the block's shared memory: registers cannot be indexed."""

        def copy(k: Int) -> None:
            m.store_shared(self.addresses + k * 4, m.load32(self.launch + (k + self.bases_at) * const(4, 64)))

        with when(m.warpgroup() == 0):
            for_range(self.thread + 2 * len(operands), const(2 * self.buffers), m.THREADS, copy)
            with when(self.leads):
                for k, address in enumerate(operands):
                    m.store_shared(self.addresses + 8 * k, address.low())
                    m.store_shared(self.addresses + 8 * k + 4, (address >> 32).low())
        m.block_barrier()

    def reset(self) -> None:
        """Zeroes as many counters as the launch says, and sets POISONED if there are any."""
        count, counters, zero = m.load_word(self.launch, RESET), self.counters, const(0)
        for_range(self.thread, count, m.THREADS, lambda k: m.store_element(counters + k * const(4, 64), [zero], 4))
        with when(self.leads & (count != 0)):
            m.store_element(self.inbox + 4 * POISONED, [const(1)], 4)

    def claim(self) -> tuple[Int, Int]:
        """Claims a batch: its number and the launch's error in the leading thread, neither waited for."""
        error = if_else(self.leads, lambda: m.read_word(self.state + 4 * ERROR), lambda: const(0))
        return m.atomic_add(self.state + 4 * CLAIMED, 1, "relaxed", only=self.leads), error

    def broadcast(self, claimed: Int, error: Int) -> Int:
        """The leading thread's batch for all; after an error one that does not exist."""
        with when(self.leads):
            m.store_shared(self.shared, (error != 0).where(const(1 << 30), claimed))
        m.barrier()
        batch = m.load_shared(self.shared)
        m.barrier()
        return batch

    def record_at(self, record: Int) -> Int:
        """Address of a record."""
        return self.table + record * const(4 * r.WORDS, 64)

    def seek(self, record: Int, number: Int) -> Int:
        """The record of a tile, from one at or before it."""

        def condition(record: Int) -> tuple[Int, list[Int]]:
            return m.load_word(self.record_at(record), r.END_TILE) <= number, [record]

        return while_loop([record], condition, lambda record: [record + 1])[0]

    def base(self, index: Int) -> Int:
        """Address of a buffer."""
        if not self.buffers:
            return m.load_pair(self.launch + index * const(8, 64), self.bases_at)
        at = self.addresses + index * 8
        return m.load_shared(at).wide() | m.load_shared(at + 4).wide() << 32

    def do_tile(self, index: Int, number: Int, parity: Int) -> Int:
        """Waits for, moves and signals one tile of a record; returns the barrier's parity after it."""
        refuse = functools.partial(self.refuse, index)
        record = Record(at=self.record_at(index), base=self.base, refuse=refuse)
        word, kind, convert, remote = record.word, *map(record.word, (r.KIND, r.CONVERT, r.REMOTE))
        tile = record.tile(number, thread=self.thread, shared=self.tile, barrier=self.barrier)

        def wait() -> Int:
            with when(self.leads):
                self.await_counter(index, word(r.WAIT_INBOX), word(r.WAIT), word(r.WAIT_COUNT))
                m.store_shared(self.shared + 4, m.read_word(self.state + 4 * ERROR))
            m.barrier()
            error = m.load_shared(self.shared + 4)
            m.barrier()
            return error

        failed = if_else(word(r.WAIT) != 0xFFFFFFFF, wait, lambda: const(0))
        with when(failed == 0):
            record.move(tile, self.conversions, kind, convert, remote, parity)
            with when((word(r.SIGNAL) & word(r.SIDE_SIGNAL)) != 0xFFFFFFFF):  # one of them is a counter
                self.publish()
                for signal, inbox in ((r.SIGNAL, r.SIGNAL_INBOX), (r.SIDE_SIGNAL, r.SIDE_INBOX)):
                    with when(self.leads & (word(signal) != 0xFFFFFFFF)):
                        self.signal(self.base(word(inbox)), word(signal))
        bulk = (failed == 0) & (kind == r.ROWS) & (remote != 0)
        return bulk.where(parity ^ 1, parity)

    def refuse(self, record: Int, condition: Int) -> None:
        """Notes a record where a condition holds."""
        with when(condition):
            m.set_if_zero(self.state + 4 * REFUSED, record + 1)

    def counter_at(self, inbox: Int, counter: Int) -> Int:
        """Address of a counter."""
        return inbox + (m.load_word(self.launch, COUNTERS) + counter) * const(4, 64)

    def signal(self, inbox: Int, counter: Int) -> None:
        """Raises a counter after what was published."""
        several, at = m.load_word(self.launch, SEVERAL), self.counter_at(inbox, counter)
        with when(several != 0):
            m.raise_counter(at, "sys")
        with when(several == 0):
            m.raise_counter(at, "gpu")

    def publish(self) -> None:
        """Brings the worker's stores before what its leading thread releases next: release is cumulative."""
        m.wait_stores(read=False)
        m.fence_async()
        m.barrier()

    # Waits: the leading thread's, with the clock it started.

    def poll(self, missing: Callable[[], Int], error: Int) -> None:
        """Waits while something is missing; sets `ERROR` when the launch has lasted too long."""
        error_at = self.state + 4 * ERROR

        def condition(missed: Int) -> tuple[Int, list[Int]]:
            with when(missed != 0):
                m.sleep(POLL_NS)
                start = m.load_shared(self.shared + 8).wide() | m.load_shared(self.shared + 12).wide() << 32
                limit = m.load_word(self.launch, DEADLINE_MS) * const(1_000_000, 64)
                with when(m.clock_ns() - start > limit):
                    m.set_if_zero(error_at, error)
                with when(m.read_flag(self.inbox + 4 * ABORTED) == self.attempt):
                    m.set_if_zero(error_at, const(GIVEN_UP << ERROR_SHIFT))
            more = missing() & (m.read_word(error_at) == 0)
            return more, [missed]

        while_loop([const(0)], condition, lambda _: [const(1)])

    def await_counter(self, record: Int, inbox: Int, counter: Int, count: Int) -> None:
        """Until a counter has reached a count."""
        at = self.counter_at(self.base(inbox), counter)
        self.poll(lambda: m.read_counter(at) < count, record | COUNTER << ERROR_SHIFT)

    def await_flag(self, at: Int, error: Int) -> None:
        """Until a flag stands; one of a later epoch of this session ends the launch."""
        attempt = self.attempt

        def missing() -> Int:
            flag = m.read_flag(at)
            ahead = (flag >> 32).low() - (attempt >> 32).low()
            same = flag.low() == attempt.low()
            with when(same & (ahead != 0) & (ahead < 1 << 31)):
                m.set_if_zero(self.state + 4 * ERROR, const(LATE << ERROR_SHIFT))
            return flag != attempt

        self.poll(missing, error)

    def flag_of_other(self, k: Int, first: int) -> Int:
        """Address of the `k`-th flag of a list of buffers and words."""
        pair = self.launch + k * const(8, 64)
        return self.base(m.load_word(pair, first)) + m.load_word(pair, first + 1) * const(4, 64)

    def await_head(self, k: Int) -> None:
        """The `k`-th head."""
        self.await_flag(self.flag_of_other(k, LISTS), k | HEAD << ERROR_SHIFT)

    def await_tail(self, k: Int) -> None:
        """The `k`-th tail."""
        word = m.load_word(self.launch + k * const(4, 64), self.tails_at)
        self.await_flag(self.inbox + word * const(4, 64), k | TAIL << ERROR_SHIFT)

    def tell(self, k: Int) -> None:
        """Sets the `k`-th flag of its own or of other devices."""
        m.write_flag(self.flag_of_other(k, self.tells_at), self.attempt)

    def end(self) -> None:
        """Counts this worker as finished; the last one ends the phase."""
        self.publish()
        before = m.atomic_add(self.state + 4 * FINISHED, 1, "acq_rel", only=self.leads)
        with when(self.leads & (before == self.workers - 1)):
            error_at, version_at = self.state + 4 * ERROR, self.inbox + 4 * VERSION
            version = m.load_word(self.launch, NEW_VERSION)
            zero = const(0)

            def unless_failed(action: Callable[[Int], None], count: int) -> None:
                going = (m.read_word(error_at) == 0).where(m.load_word(self.launch, count), 0)
                for_range(zero, going, 1, action)

            unless_failed(self.tell, N_TELLS)
            unless_failed(self.await_tail, N_TAILS)
            error = m.read_word(error_at)
            with when((error == 0) & (version != 0xFFFFFFFF)):
                m.store_element(version_at, [version], 4)
                m.store_element(self.inbox + 4 * POISONED, [zero], 4)
            for k, reported in enumerate((error, m.read_word(self.state + 4 * REFUSED))):
                m.store_element(self.out + 4 * k, [reported], 4)
                m.store_element(self.state + 4 * (REPORT + k), [reported], 4)
            for word in (CLAIMED, FINISHED, ERROR, REFUSED):
                m.store_element(self.state + 4 * word, [zero], 4)
