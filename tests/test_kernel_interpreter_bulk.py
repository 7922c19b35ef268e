"""The interpreter of kernels: bulk copies, and what must happen before and after them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from kernel_interpreter import Allocation, Fault
from small_kernels import element, first_thread, put, read, run, words

from shardfly_jax.pallas_kernels import addresses as m
from shardfly_jax.pallas_kernels.emit import Int, const, when


def staged(**change: str) -> Callable[..., None]:
    """Threads write shared memory, a bulk store takes it to global memory; then it is used again."""
    step = {
        "fence": "fence.proxy.async.shared::cta;",
        "barrier": "bar.sync 1, 128;",
        "commit": "cp.async.bulk.commit_group;",
        "wait": "cp.async.bulk.wait_group.read 0;",
        "again": "bar.sync 1, 128;",
        "end": "cp.async.bulk.wait_group 0;",
    } | change

    def emit(out: Int, tile: Int) -> None:
        for k in range(2):
            m.store_shared(element(tile, m.thread()), m.thread() + k)
            for name in ("fence", "barrier"):
                m.ptx(step[name], "")
            with when(first_thread()):
                m.bulk_store(out + 512 * k, tile, const(512))
                for name in ("commit", "wait"):
                    m.ptx(step[name], "")
            m.ptx(step["again"], "")
        with when(first_thread()):
            m.ptx(step["end"], "")

    return emit


def test_bulk_stores_write_what_threads_put_into_shared_memory() -> None:
    (out,) = run(staged(), lambda: [Allocation("out", 1024)], scratch={"tile": 512})
    want = np.arange(128) + np.arange(2)[:, None]
    np.testing.assert_array_equal(read(out).reshape(2, 128), want)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fence": ""}, "want of fence.proxy.async"),
        ({"fence": "fence.proxy.async.global;"}, "want of fence.proxy.async"),
        ({"barrier": ""}, "race"),
        ({"wait": ""}, "race.*whose end was not waited for"),
        ({"again": ""}, "race"),
        ({"commit": ""}, "race.*whose end was not waited for"),
        ({"wait": "cp.async.bulk.wait_group.read 1;"}, "race.*whose end was not waited for"),
    ],
)
def test_a_bulk_store_of_shared_memory_in_use_is_reported(change: dict[str, str], message: str) -> None:
    with pytest.raises(Fault, match=message):
        run(staged(**change), lambda: [Allocation("out", 1024)], scratch={"tile": 512})


def test_a_block_must_not_end_before_its_bulk_stores_have_read() -> None:
    def emit(out: Int, tile: Int) -> None:
        with when(first_thread()):
            for k in range(4):
                m.store_shared(tile + 4 * k, const(k))
            m.fence_async()
            m.bulk_store(out, tile, const(16))
            m.commit_stores()

    with pytest.raises(Fault, match="ends while a bulk copy uses its shared memory"):
        run(emit, lambda: [Allocation("out", 16)], scratch={"tile": 16})


def fetched(
    *,
    expect: int = 512,
    wait: bool = True,
    parity: int = 0,
    barrier: bool = True,
    init_fence: bool = True,
    skew: int = 0,
) -> Callable[..., None]:
    """A bulk load that all threads wait for."""

    def emit(data: Int, out: Int, tile: Int, bar: Int) -> None:
        with when(first_thread()):
            m.ptx("mbarrier.init.shared::cta.b64 [$0], 1;", "r", bar)
            if init_fence:
                m.ptx("fence.mbarrier_init.release.cluster;", "")
        if barrier:
            m.barrier()
        with when(first_thread()):
            m.expect_bytes(bar, const(expect))
            m.bulk_load(tile, data + skew, const(512), bar)
        if wait:
            m.wait_barrier(bar, const(parity))
        put(element(out, m.thread()), m.load_shared(element(tile, m.thread())))

    return emit


def operands_of_a_fetch() -> list[Allocation]:
    return [words("data", *range(1000, 1128), read_only=True), Allocation("out", 512)]


def test_bulk_loads_are_seen_by_those_who_wait() -> None:
    _, out = run(fetched(), operands_of_a_fetch, scratch={"tile": 512, "barrier": 8})
    np.testing.assert_array_equal(read(out), np.arange(1000, 1128))


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"wait": False}, "race.*whose end was not waited for|never written"),
        ({"parity": 1}, "race.*whose end was not waited for|never written"),
        ({"expect": 528}, "hang"),
        ({"barrier": False}, "race: mbarrier|no mbarrier"),
        ({"init_fence": False}, "no fence has made visible"),
        ({"skew": 4}, "out of bounds|not aligned to 16"),
        ({"skew": -16}, "out of bounds"),
    ],
)
def test_a_wrong_bulk_load_is_reported(broken: dict[str, int], message: str) -> None:
    with pytest.raises(Fault, match=message):
        run(fetched(**broken), operands_of_a_fetch, scratch={"tile": 512, "barrier": 8})


def test_what_a_bulk_copy_reads_was_written() -> None:
    with pytest.raises(Fault, match="never written"):
        run(fetched(), lambda: [Allocation("data", 512), Allocation("out", 512)], scratch={"tile": 512, "barrier": 8})
