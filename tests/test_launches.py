"""How the host learns that a launch has ended."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from shardfly_jax.executors.launches import LINE_NBYTES, Report

STAMP = 0x1234_5678_9ABC_DEF0
OLD, NEW = [7, 7, 7, 7], [1, 2, 3, 4]
"""Of two works: what the memory held before, and what they report."""


class Queued:
    """An array of the host's memory that a launch has yet to fill; JAX hears of it when `heard` is set.

    Args:
      offset: Bytes from the start of a cache line.
    """

    def __init__(self, offset: int = 0) -> None:
        line = np.zeros(3 * LINE_NBYTES // 4, np.uint32)
        start = -line.ctypes.data % LINE_NBYTES // 4 + offset // 4
        self.memory = line[start : start + 6]
        self.memory[:] = [*OLD, 0xFFFFFFFF, 0]
        self.nbytes, self.heard = self.memory.nbytes, threading.Event()
        self.error: RuntimeError | None = None

    def fill(self) -> None:
        self.memory[:4] = NEW
        self.memory[4:].view(np.uint64)[0] = STAMP

    def unsafe_buffer_pointer(self) -> int:
        return self.memory.ctypes.data

    def is_ready(self) -> bool:
        return self.heard.is_set()

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        assert self.heard.wait(60)
        if self.error is not None:
            raise self.error
        return self.memory.view(np.int32)


def test_a_report_is_read_as_soon_as_it_is_in_memory() -> None:
    """JAX never hears of it here; asked for the array, it would wait a minute."""
    queued = Queued()
    report = Report(queued, STAMP)  # type: ignore[arg-type]
    assert not report.is_over()
    timer = threading.Timer(0.05, queued.fill)
    timer.start()
    words = report.words()
    assert report.is_over()
    assert words.tolist() == [NEW[:2], NEW[2:]]
    queued.memory[:] = 0  # JAX has given it to another launch
    assert words.tolist() == [NEW[:2], NEW[2:]]


def test_what_another_launch_left_is_no_report() -> None:
    queued = Queued()
    queued.fill()
    assert Report(queued, STAMP).is_over()  # type: ignore[arg-type]
    assert not Report(queued, STAMP + 1).is_over()  # type: ignore[arg-type]
    assert not Report(queued, STAMP + (1 << 32)).is_over()  # type: ignore[arg-type]


def test_a_launch_that_failed_reports_the_error_of_jax() -> None:
    queued = Queued()
    queued.error = RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")
    report = Report(queued, STAMP)  # type: ignore[arg-type]
    threading.Timer(0.05, queued.heard.set).start()
    with pytest.raises(RuntimeError, match="ILLEGAL_ADDRESS"):
        report.words()
    assert report.is_over()


@pytest.mark.parametrize(("offset", "torn"), [(0, False), (40, False), (48, True), (56, True)])
def test_a_report_that_may_come_in_two_parts_is_not_read_before_jax_says_so(offset: int, torn: bool) -> None:
    queued = Queued(offset)
    report = Report(queued, STAMP)  # type: ignore[arg-type]
    queued.fill()
    assert report.is_over() is not torn
    queued.heard.set()
    assert report.is_over()
    assert report.words().tolist() == [NEW[:2], NEW[2:]]
