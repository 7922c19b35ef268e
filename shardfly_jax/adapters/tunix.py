"""A handler for tunix' experimental weight sync: a coordinator's `transfer` is one `sf.sync`.

Follows google/tunix@c7d8950, `tunix/experimental/orchestrator/weight_sync.py`, which no release has yet (0.1.7 is the
newest): both may change. Its own handler stages through TPU hosts; this one moves weights between devices of this
process, GPUs included.

The contract wants a failed round to leave the old weights in service, while `sf.sync` writes in place. So the handler
keeps two sets of buffers and writes into the one that does not serve; `publish` swaps them. A rollout holds its weights
twice, as with any handler of that contract.
"""

from __future__ import annotations

import importlib
import itertools
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from shardfly_jax.planning import Plan
from shardfly_jax.registry import register
from shardfly_jax.sharding.errors import NoUpdate, RankLost, RegistrationError, ShardflyError, SyncTimeout, WorldLost
from shardfly_jax.update import sync

CONTRACT = "tunix.experimental.orchestrator.weight_sync"
"""The module of tunix that says what a handler does."""


class Handler:
    """A `WeightSyncHandler` over one plan.

    A destination's `weight_sync` may look at `staged(req_id)`; its `post_weight_sync` serves with what
    `publish(req_id)` returns, and its `abort_weight_sync` has nothing to do here.
    """

    def __init__(self, plan: Plan, params: Callable[[], Any]):
        """Registers the plan twice, in buffers of its own.

        Args:
          plan: Not registered. All its replicas are destinations of every round.
          params: Returns the trainer's current tree, as it was planned; asked once per transfer.

        Raises:
          RegistrationError: This tunix has no such contract.
        """
        self._contract = _contract()
        self._params = params
        self._buffers = (register(plan), register(plan))
        self._spare = 0
        self._lock = threading.Lock()
        self._units: dict[Any, Any] = {}
        self._unnamed = itertools.count(1)
        self._staged: tuple[str, Any] | None = None
        self._published: tuple[str, Any] | None = None

    def register_work_unit(self, metadata: Any) -> None:
        """Notes a `WorkUnitMetadata`; one of the same unit is replaced."""
        with self._lock:
            self._units[metadata.unit] = metadata

    def transfer(
        self,
        src_units: Sequence[Any],
        dst_units: Sequence[Any],
        req_id: str | None = None,
        generation: int | None = None,
    ) -> Any:
        """Brings the spare buffers to the trainer's current weights; what serves stays as it is.

        Args:
          src_units, dst_units: `WorkUnitId`s that were registered.
          req_id: Of the round, for `staged` and `publish`; a round of an id that was used before takes its place. None
            for an id of the handler's own, another one each time: the result has it.
          generation: Of the round; rounds come one after the other, so that nothing depends on it.

        Returns:
          A `TransferResult`, with the reason where it failed: nothing writes any more.

        Raises:
          TransferOutcomeUnknownError: A rank did not answer in time and may still write into the spare buffers.
        """
        result = self._contract.TransferResult
        with self._lock:
            req_id = f"unnamed-{next(self._unnamed)}" if req_id is None else req_id
            self._staged = None
            if self._published and self._published[0] == req_id:
                self._published = None
            unknown = [unit for unit in (*src_units, *dst_units) if unit not in self._units]
            if unknown or not src_units or not dst_units:
                what = f"units {unknown} were never registered" if unknown else "one side has no units"
                return result(req_id=req_id, success=False, message=f"transfer: {what}. Register both sides.")
            try:
                staged = sync(self._params(), self._buffers[self._spare])
            except (SyncTimeout, RankLost, WorldLost) as error:
                raise self._contract.TransferOutcomeUnknownError(str(error)) from error
            except ShardflyError as error:
                return result(req_id=req_id, success=False, message=f"{type(error).__name__}: {error}")
            self._staged = (req_id, staged)
            return result(req_id=req_id, success=True)

    def staged(self, req_id: str) -> Any:
        """The rollout's tree of weights that a round has brought and that do not serve yet.

        Raises:
          NoUpdate: The last transfer that succeeded is another round's, or was published.
        """
        with self._lock:
            return self._of_round(req_id)

    def publish(self, req_id: str) -> Any:
        """Makes a round's weights the ones that serve, and the buffers that served until now the spare ones.

        Calling it again for the same round changes nothing.

        Returns:
          The rollout's tree of weights, valid until the first transfer after another round is published.

        Raises:
          NoUpdate: The last transfer that succeeded is another round's.
        """
        with self._lock:
            if self._published and self._published[0] == req_id:
                return self._published[1]
            self._published = (req_id, self._of_round(req_id))
            self._staged = None
            self._spare = 1 - self._spare
            return self._published[1]

    def close(self) -> None:
        """Forgets the units and the spare weights; published arrays stay valid as long as somebody holds them."""
        with self._lock:
            self._units.clear()
            self._staged = None

    def _of_round(self, req_id: str) -> Any:
        if self._staged is None or self._staged[0] != req_id:
            held = "nothing is staged" if self._staged is None else f"what is staged is {self._staged[0]!r}"
            raise NoUpdate(f"round: {req_id!r} is wanted, but {held}. Transfer it first, and give its result's req_id.")
        return self._staged[1]


def _contract() -> ModuleType:
    """tunix' contract, with `Handler` as one of its handlers."""
    try:
        module = importlib.import_module(CONTRACT)
    except ImportError as error:
        raise RegistrationError(
            f"adapter: {CONTRACT} cannot be imported ({error}), but tunix' weight sync is needed, which no release has "
            "yet. Install google-tunix from its repository."
        ) from error
    module.WeightSyncHandler.register(Handler)
    return module
