"""`receiving` and `send`: an update whose sends run inside the user's jitted train step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Self

import jax

from shardfly_jax.layout import leaf_places
from shardfly_jax.planning import Plan
from shardfly_jax.sharding.errors import NotRegistered, ParamsMismatch
from shardfly_jax.sharding.formats import dtype_name


class receiving:  # a context manager that reads like a phrase
    """An update whose sends run inside a jitted step.

    Entering lets the trainer write: it waits for computations that were queued on the rollouts' devices, and poisons
    the replicas. Leaving waits until everything has arrived, and raises their versions.

        with sf.receiving(plan) as update:
            params, opt = step(params, opt, batch, plan.sender)   # ends with sf.send(params, sender)
        rollout_params = update.params()

    Args:
      plan: Registered, with the persistent executor, and made from a trainer tree of JAX arrays.

    Raises:
      NotRegistered: The plan has no buffers.
      RegistrationError: The plan runs on the portable executor, or its trainer's tree is unknown or rank-local.
      StaleBuffer: An owner rebound, deleted or donated a buffer. Nothing was written.
      SyncTimeout: On leaving: the step did not send, or something else did not come. The replicas are poisoned.
    """

    def __init__(self, plan: Plan):
        if not isinstance(plan, Plan):
            raise NotRegistered(f"receiving: {type(plan).__name__} is not a plan. Give a registered plan.")
        self._plan, self._session = plan, plan.registered()
        self._handles: Any = None

    def __enter__(self) -> Self:
        self._update = self._updating()
        self._update.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        self._update.__exit__(kind, error, trace)

    @contextlib.contextmanager
    def _updating(self) -> Iterator[None]:
        session = self._session
        stepping = session.stepping(self._plan.source)
        with session.updating():
            session.check_buffers()
            session.wait_for_readers()
            with session.attempting():
                attempt = stepping.executor.begin()
                session.sender = stepping.sender(attempt)
                try:
                    yield
                except BaseException:
                    stepping.outcomes()  # writers have ended before anybody begins another attempt
                    raise
                finally:
                    session.sender = None
                wait = stepping.executor.finish(attempt, stepping.outcomes)
                self._handles = session.handles()
                wait()

    def params(self) -> Any:
        """The rollout's params, as `sync` returns them; after the `with` block."""
        self._session.check_readable()
        return self._handles


def send(params: Any, sender: Any) -> Any:
    """Sends params to the rollouts of an update that `receiving` has begun. Called inside a jitted step, at its end.

    Args:
      params: The new params: the tree that was planned.
      sender: `plan.sender`, passed to the step as an argument.

    Returns:
      `params`, to be returned by the step.

    Raises:
      ParamsMismatch: They are not the planned ones; raised while the step is traced.
    """
    from shardfly_jax.executors.stepping import Sender

    if not isinstance(sender, Sender):
        raise ParamsMismatch(f"send: its second argument is a {type(sender).__name__}, but plan.sender is needed.")
    step = sender.step
    places, leaves, _ = leaf_places(params, step.names)
    found = {name: leaf for (name, _), leaf in zip(places, leaves, strict=True)}
    faults = []
    for name, shape, dtype in zip(step.names, step.shapes, step.dtypes, strict=True):
        leaf = found.get(name)
        if not isinstance(leaf, jax.Array):
            faults.append(f"{name!r} is {'missing' if leaf is None else f'a {type(leaf).__name__}'}")
        elif leaf.shape != shape or dtype_name(leaf.dtype) != dtype_name(dtype):
            faults.append(f"{name!r} is {leaf.dtype}{list(leaf.shape)}, but the plan has {dtype}{list(shape)}")
    if faults:
        raise ParamsMismatch(
            f"send: {len(faults)} params differ from the plan. Send the planned params or make a new plan.\n"
            + "\n".join(f"  - {fault}." for fault in faults)
        )
    step.call(sender.table, sender.numbers, sender.state, [found[name] for name in step.names])
    return params
