"""Giving back several things, of which one may fail."""

from __future__ import annotations

from collections.abc import Callable


def close_all(*calls: Callable[[], object]) -> None:
    """Makes calls in order, each of them whatever became of those before.

    Raises:
      The first error that one of them raised, once all were made.
    """
    first = None
    for call in calls:
        try:
            call()
        except BaseException as error:
            first = error if first is None else first
    try:
        if first is not None:
            raise first
    finally:
        del first  # its traceback holds this frame, and with it what was closed
