"""`Pending`: an update that goes on in the background while its caller does something else."""

from __future__ import annotations

import atexit
import threading
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shardfly_jax.sharding.errors import StillPending

if TYPE_CHECKING:
    from shardfly_jax.session import Session


class Pending:
    """An update that `sync(params, plan, wait=False)` has begun.

    It keeps the params' arrays alive until it is done. Until then they must not be donated, and on a process with
    rollout ranks nothing may read their buffers.

    Args:
      session: Of the plan; locked by the caller, unlocked here when the update is done.
      run: The update: returns when it is complete, and raises what went wrong.
    """

    def __init__(self, session: Session, run: Callable[[], object]):
        self._session = session
        self._run: Callable[[], object] | None = run
        self._error: BaseException | None = None
        self._ended = threading.Event()
        # Where a process that ends would wait for its threads, an update across processes could wait for ever.
        self._thread = threading.Thread(target=self._work, name="shardfly-update", daemon=True)

    def start(self) -> None:
        """Begins; called once."""
        if self._session.part is None:  # else its world ends it when the process does
            atexit.register(self.join)
        self._thread.start()

    def _work(self) -> None:
        assert self._run is not None
        try:
            with self._session.inside():
                self._run()
        except BaseException as error:
            self._error = error
            traceback.clear_frames(error.__traceback__)  # which hold the params, too
        finally:
            self._run = None  # and with it the params
            self._session.unlock()
            self._ended.set()
            atexit.unregister(self.join)

    def done(self) -> bool:
        """Whether the update's outcome is known."""
        return self._ended.is_set()

    def join(self) -> None:
        """Waits until the outcome is known, whatever it is; a callback of the update itself does not wait."""
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def result(self, timeout: float | None = None) -> Any:
        """What `sync` would have returned.

        Args:
          timeout: Seconds to wait for the outcome; None for as long as it takes.

        Returns:
          The rollout's current params; None on a process of a world that holds no rollout ranks.

        Raises:
          StillPending: There is no outcome yet. The update goes on; ask again.
          Poisoned, NotRegistered: A later update failed half way, or `rescale` has replaced the plan.
          What `sync` raises, if the update failed.
        """
        if not self._ended.wait(timeout):
            raise StillPending(
                f"sync: the update has no outcome after {timeout:g} s, but goes on. Ask for its result later."
            )
        if self._error is not None:
            raise self._error
        if not self._session.serves:
            return None
        self._session.check_in_force()
        self._session.check_readable()
        return self._session.handles()
