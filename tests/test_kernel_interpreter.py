"""The interpreter of kernels: what is right on a GPU passes under every schedule, what is not is reported."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from kernel_interpreter import Allocation, Fault, Launch, Machine, UnknownInstruction
from small_kernels import SEEDS, block, compiled, element, first_of, first_thread, put, read, run, spin, words

from shardfly_jax.pallas_kernels import addresses as m
from shardfly_jax.pallas_kernels.emit import Int, const, when

# Blocks


def message(write: str, load: str) -> Callable[..., None]:
    """Block 0 writes a datum and then a flag; block 1 waits for the flag and reads the datum."""

    def emit(data: Int, flag: Int, out: Int) -> None:
        with when(first_of(0)):
            put(data, const(77))
            m.ptx(write, "l", flag)
        with when(first_of(1)):
            spin(lambda: m.ptx_value(load, "=r,l", flag) == 0)
            put(out, m.load32(data))

    return emit


ORDERED = [
    ("red.release.gpu.global.add.u32 [$0], 1;", "ld.acquire.gpu.global.u32 $0, [$1];"),
    ("st.release.sys.global.u32 [$0], 1;", "ld.acquire.sys.global.u32 $0, [$1];"),
    ("fence.acq_rel.gpu; red.relaxed.gpu.global.add.u32 [$0], 1;", "ld.acquire.gpu.global.u32 $0, [$1];"),
    ("fence.acq_rel.gpu; st.volatile.global.u32 [$0], 1;", "ld.relaxed.gpu.global.u32 $0, [$1]; membar.gl;"),
    ("red.release.gpu.global.add.u32 [$0], 1;", "atom.acq_rel.gpu.global.add.u32 $0, [$1], 0;"),
]
UNORDERED = [
    ("red.relaxed.gpu.global.add.u32 [$0], 1;", "ld.acquire.gpu.global.u32 $0, [$1];"),
    ("red.release.gpu.global.add.u32 [$0], 1;", "ld.relaxed.gpu.global.u32 $0, [$1];"),
    ("red.global.add.u32 [$0], 1;", "ld.volatile.global.u32 $0, [$1]; fence.acq_rel.gpu;"),
    ("red.relaxed.gpu.global.add.u32 [$0], 1; fence.acq_rel.gpu;", "ld.acquire.gpu.global.u32 $0, [$1];"),
    ("red.release.gpu.global.add.u32 [$0], 1;", "fence.acq_rel.gpu; ld.relaxed.gpu.global.u32 $0, [$1];"),
    ("st.global.u32 [$0], 1;", "ld.global.u32 $0, [$1];"),
    ("st.global.u32 [$0], 1;", "ld.acquire.gpu.global.u32 $0, [$1];"),
    ("st.release.gpu.global.u32 [$0], 1;", "ld.global.u32 $0, [$1];"),
]


def mailbox(**flags: bool) -> list[Allocation]:
    return [Allocation("data", 4), words("flag", 0, **flags), Allocation("out", 4)]


@pytest.mark.parametrize(("write", "load"), ORDERED)
def test_a_message_that_is_released_and_acquired_passes(write: str, load: str) -> None:
    _, _, out = run(message(write, load), mailbox, blocks=2)
    assert read(out)[0] == 77


@pytest.mark.parametrize(("write", "load"), UNORDERED)
def test_a_message_without_release_or_acquire_is_a_race(write: str, load: str) -> None:
    with pytest.raises(Fault, match="race") as fault:
        run(message(write, load), mailbox, blocks=2)
    assert "block 0 thread 0" in str(fault.value)
    assert "block 1 thread 0" in str(fault.value)


def test_flags_that_other_devices_read_need_system_scope() -> None:
    def peers() -> list[Allocation]:
        return mailbox(system=True)

    acquire = "ld.acquire.sys.global.u32 $0, [$1];"
    run(message("fence.acq_rel.sys; st.relaxed.sys.global.u32 [$0], 1;", acquire), peers, blocks=2)
    with pytest.raises(Fault, match=r"needs \.sys scope"):
        run(message("st.release.gpu.global.u32 [$0], 1;", acquire), peers, blocks=2)
    with pytest.raises(Fault, match="race"):
        run(message("fence.acq_rel.gpu; st.relaxed.sys.global.u32 [$0], 1;", acquire), peers, blocks=2)


def test_launches_on_two_devices_pass_messages() -> None:
    """Two programs at once, over memory that both hold."""

    def sender(data: Int, flag: Int) -> None:
        put(element(data, m.thread()), m.thread())
        m.barrier()
        with when(first_thread()):
            m.raise_counter(flag, "sys")

    def receiver(load: Callable[[Int], Int]) -> Callable[..., None]:
        def code(data: Int, flag: Int, out: Int) -> None:
            spin(lambda: load(flag) == 0)
            put(element(out, m.thread()), m.load32(element(data, m.thread())))

        return code

    def exchanged(load: Callable[[Int], Int]) -> None:
        programs = compiled(sender, 2), compiled(receiver(load), 3)
        for seed in SEEDS:
            data, flag, out = Allocation("data", 512), words("flag", 0, system=True), Allocation("out", 512)
            send = Launch(program=programs[0], operands=(data, flag), blocks=1)
            receive = Launch(program=programs[1], operands=(data, flag, out), blocks=1)
            Machine([send, receive], [], seed).run()
            np.testing.assert_array_equal(read(out), np.arange(128))

    exchanged(m.read_counter)
    with pytest.raises(Fault, match="race"):
        exchanged(lambda at: m.ptx_value("ld.relaxed.sys.global.u32 $0, [$1];", "=r,l", at))


def test_flags_of_64_bits_carry_messages() -> None:
    def emit(data: Int, flag: Int, out: Int) -> None:
        with when(first_of(0)):
            put(data, const(77))
            m.write_flag(flag, const(3 << 40, 64))
        with when(first_of(1)):
            spin(lambda: m.read_flag(flag) != 3 << 40)
            put(out, m.load32(data))

    def make() -> list[Allocation]:
        return [Allocation("data", 4), Allocation("flag", np.zeros(1, np.uint64), system=True), Allocation("out", 4)]

    assert read(run(emit, make, blocks=2)[2])[0] == 77


def test_counters_give_every_thread_that_asks_its_own_number() -> None:
    def emit(counter: Int, out: Int) -> None:
        me = block() * m.THREADS + m.thread()
        put(element(out, me), m.atomic_add(counter, 1, "relaxed", only=me % 2 == 1))

    counter, out = run(emit, lambda: [words("counter", 0), Allocation("out", 4 * 384)], blocks=3)
    assert read(counter)[0] == 192
    assert sorted(read(out)[1::2].tolist()) == list(range(192))
    assert not read(out)[::2].any()


# Threads of a block


def sync_warp() -> None:
    m.ptx("bar.warp.sync 0xffffffff;", "")


def exchange(sync: Callable[[], None], distance: int) -> Callable[..., None]:
    """Each thread passes its number on through shared memory."""

    def emit(out: Int, tile: Int) -> None:
        me = m.thread()
        m.store_shared(element(tile, me), me)
        sync()
        put(element(out, me), m.load_shared(element(tile, me ^ distance)))

    return emit


@pytest.mark.parametrize(
    ("sync", "distance", "ordered"),
    [
        (m.barrier, 64, True),
        (m.barrier, 1, True),
        (sync_warp, 31, True),
        (sync_warp, 32, False),
        (lambda: None, 1, False),
        (lambda: m.ptx("fence.acq_rel.gpu;", ""), 1, False),
    ],
)
def test_threads_pass_values_through_shared_memory_only_across_a_barrier(
    sync: Callable[[], None], distance: int, ordered: bool
) -> None:
    make = lambda: [Allocation("out", 512)]  # noqa: E731
    if ordered:
        (out,) = run(exchange(sync, distance), make, scratch={"tile": 512})
        np.testing.assert_array_equal(read(out), np.arange(128) ^ distance)
    else:
        with pytest.raises(Fault, match=r"race.*shared tile.*thread.*and.*thread|never written"):
            run(exchange(sync, distance), make, scratch={"tile": 512})


def test_a_write_after_reads_by_many_needs_a_barrier() -> None:
    def emit(again: bool) -> Callable[..., None]:
        def code(out: Int, tile: Int) -> None:
            for k in range(2):
                with when(first_thread()):
                    m.store_shared(tile, const(k))
                m.barrier()
                put(element(out, m.thread()), m.load_shared(tile))
                if again:
                    m.barrier()

        return code

    make = lambda: [Allocation("out", 512)]  # noqa: E731
    (out,) = run(emit(True), make, scratch={"tile": 4})
    assert (read(out) == 1).all()
    with pytest.raises(Fault, match="race"):
        run(emit(False), make, scratch={"tile": 4})


@pytest.mark.parametrize("sync", [m.barrier, sync_warp])
def test_a_barrier_that_some_lanes_do_not_reach_is_refused(sync: Callable[[], None]) -> None:
    def emit(out: Int) -> None:
        with when(m.thread() < 16):
            sync()

    with pytest.raises(Fault, match="lanes"):
        run(emit, lambda: [Allocation("out", 4)])


def test_a_wait_that_nothing_ends_is_a_hang() -> None:
    def emit(out: Int) -> None:
        with when(m.thread() < 96):
            m.barrier()

    with pytest.raises(Fault, match="hang"):
        run(emit, lambda: [Allocation("out", 4)])


def test_spinning_on_an_atomic_is_a_hang_too() -> None:
    def emit(flag: Int) -> None:
        spin(lambda: m.atomic_add(flag, 0, "acq_rel", only=const(1, bits=1)) == 0)

    with pytest.raises(Fault, match="hang"):
        run(emit, lambda: [words("flag", 0)])


@pytest.mark.parametrize("milliseconds", [1, 2**32 - 1])
def test_a_deadline_of_any_length_ends_a_wait(milliseconds: int) -> None:
    def emit(flag: Int, out: Int) -> None:
        start, limit = m.clock_ns(), const(milliseconds).wide() * 10**6
        spin(lambda: (m.read_counter(flag) == 0) & (m.clock_ns() - start <= limit))
        with when(first_thread()):
            put(out, const(1))

    assert read(run(emit, lambda: [words("flag", 0), Allocation("out", 4)])[1])[0] == 1


# Single accesses


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (lambda data, old: m.load32(data + 64), "out of bounds"),
        (lambda data, old: m.load32(data - 4), "out of bounds"),
        (lambda data, old: m.load_vector(element(data, m.thread(), 16)), "out of bounds"),
        (lambda data, old: m.load_vector(element(data, m.thread() % 4, 8)), "not aligned to 16"),
        (lambda data, old: put(data + 2, const(1)), "not aligned to 4"),
        (lambda data, old: m.load32(const(0, 64)), "no global allocation"),
        (lambda data, old: m.load32(data + 32), "never written"),
        (lambda data, old: put(old, const(1)), "only read"),
        (lambda data, old: put(data, m.thread()), "race of two lanes"),
        (lambda data, old: m.thread() // m.thread(), "division by zero"),
    ],
)
def test_a_wrong_access_is_reported(code: Callable[..., object], message: str) -> None:
    def emit(data: Int, old: Int) -> None:
        for k in range(4):
            with when(first_thread()):
                put(data + 4 * k, const(k))
        m.barrier()
        code(data, old)

    with pytest.raises(Fault, match=message):
        run(emit, lambda: [Allocation("data", 64), words("old", 1, 2, read_only=True)])


def test_a_byte_written_twice_in_order_is_reported_where_that_is_wrong() -> None:
    def emit(out: Int) -> None:
        for _ in range(2):
            put(element(out, m.thread()), m.thread())

    run(emit, lambda: [Allocation("out", 512)])
    with pytest.raises(Fault, match="written twice"):
        run(emit, lambda: [Allocation("out", 512, once=True)])


def test_what_is_read_as_constant_is_not_written_in_the_launch() -> None:
    def emit(data: Int, old: Int) -> None:
        at = element(data, m.thread())
        put(at, m.ptx_value("ld.global.nc.u32 $0, [$1];", "=r,l", old))
        m.ptx_value("ld.global.nc.L1::no_allocate.u32 $0, [$1];", "=r,l", at)

    with pytest.raises(Fault, match=r"ld\.global\.nc of bytes written"):
        run(emit, lambda: [Allocation("data", 512), words("old", 5, read_only=True)])


@pytest.mark.parametrize("text", ["ld.global.cta.relaxed.u32 $0, [$1];", "ld.u32 $0, [$1];", "popc.b32 $0, $1;"])
def test_an_instruction_without_a_meaning_is_refused(text: str) -> None:
    with pytest.raises(UnknownInstruction):
        compiled(lambda at: m.ptx_value(text, "=r,l", at), 1)
