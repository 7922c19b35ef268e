"""*send* inside a user's jitted step: what its sender holds, and the call that the step traces.

The step's arrays get their addresses when it runs, so they are operands of the launch. One operand holds a leaf; on a
mesh each device's launch has its own shard of it. The launch's state is a `jax.Ref`: JAX then keeps the launch, and
keeps launches of one sender in order.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from shardfly_jax.executors.launches import Attempt, Outcome, set_attempt
from shardfly_jax.executors.memory import Key
from shardfly_jax.executors.persistent import PersistentExecutor
from shardfly_jax.pallas_kernels import launch_words as lw, transfer
from shardfly_jax.sharding.formats import np_dtype
from shardfly_jax.sharding.optable import Inbox


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """What is compiled into a step, equal only to itself.

    Attributes:
      names: Leaf that each operand is.
      shapes: Of these leaves.
      dtypes: Of these leaves.
      mesh: Of the trainer; None for a single device.
      specs: How each leaf is cut over it.
      kernel: Arguments of `transfer.make_kernel`.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[Any, ...]
    mesh: Mesh | None
    specs: tuple[PartitionSpec, ...]
    kernel: tuple[Any, ...]

    def call(self, table: jax.Array, numbers: jax.Array, state: jax.Ref, leaves: Sequence[jax.Array]) -> None:
        """Traces the launch on every device of the trainer."""
        kernel = transfer.make_kernel(*self.kernel)
        if self.mesh is None:
            kernel(table, numbers, state, *leaves)
            return
        every = PartitionSpec(self.mesh.axis_names)
        jax.shard_map(
            kernel, mesh=self.mesh, in_specs=(every, every, every, *self.specs), out_specs=every, check_vma=False
        )(table, numbers, state, *leaves)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["table", "numbers", "state"], meta_fields=["step"])
@dataclasses.dataclass(frozen=True)
class Sender:
    """What `send` needs of an update that has begun; a pytree, to be passed to the jitted step.

    Attributes:
      table: int32 [devices * records * WORDS].
      numbers: int32 [devices * words], of this attempt.
      state: int32 [devices * STATE], changed in place.
      step: The rest.
    """

    table: jax.Array
    numbers: jax.Array
    state: jax.Ref
    step: Step


class Stepping:
    """Makes the senders of a plan.

    Args:
      executor: The plan's.
      shardings: Of the trainer's leaves by name: NamedShardings on one mesh, or one device.
    """

    def __init__(self, executor: PersistentExecutor, shardings: dict[str, NamedSharding | SingleDeviceSharding]):
        plan, sending = executor.plan, executor.works["send"]
        sources = [key for key in executor.moving if not isinstance(key, Inbox)]
        names = list(dict.fromkeys(plan.families[f].names[t] for f, t, _ in sources))
        operand = {name: k for k, name in enumerate(names)}
        self._place: NamedSharding | SingleDeviceSharding
        mesh = next(
            (s.mesh for s in shardings.values() if isinstance(s, NamedSharding) and len(s.device_set) > 1), None
        )
        assert mesh is None or isinstance(mesh, Mesh)
        devices = list(mesh.devices.flat) if mesh is not None else list(executor.devices[:1])
        self._place = (
            SingleDeviceSharding(devices[0]) if mesh is None else NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        )
        self.executor = executor
        at = [executor.devices.index(device) for device in devices]
        self._works = [sending.get(number) or executor.idle(number) for number in at]
        tables, numbers = [], []
        for work in self._works:
            held: dict[Key | Inbox, int] = {
                key: operand[plan.families[key[0]].names[key[1]]] for key in work.moving if not isinstance(key, Inbox)
            }
            number, table, _ = work.numbers(held, len(names))
            tables.append(table)
            numbers.append(number)
        self._table = jax.device_put(_padded(tables).reshape(-1), self._place)
        self._numbers = _padded(numbers)
        _, _, bases_at, _ = lw.launch_size(self._works[0].flags, 0)
        n_addresses = (self._numbers.shape[1] - bases_at) // 2
        self._state = jax.new_ref(jax.device_put(np.zeros(len(devices) * lw.STATE, np.int32), self._place))
        first = next(iter(sending.values()))
        families = {name: plan.families[f] for f in plan.source_families for name in plan.families[f].names}
        self._step = Step(
            tuple(names),
            tuple(families[name].layout.shape for name in names),
            tuple(np_dtype(families[name].layout.dtype) for name in names),
            mesh,
            tuple(getattr(shardings[name], "spec", PartitionSpec()) for name in names),
            (first.conversions, first.blocks, first.flags, first.workers, n_addresses),
        )

    def sender(self, attempt: Attempt) -> Sender:
        """The sender of an attempt."""
        numbers = self._numbers.copy()
        set_attempt(numbers, attempt, publishes=False)
        placed = jax.device_put(numbers.view(np.int32).reshape(-1), self._place)
        return Sender(self._table, placed, self._state, self._step)

    def outcomes(self) -> list[Outcome]:
        """What the last sends reported, once they have ended."""
        words = np.asarray(self._state[...]).reshape(len(self._works), lw.STATE)
        reports = words[:, lw.REPORT : lw.REPORT + lw.REPORT_SIZE]
        return [Outcome.of(work, report) for work, report in zip(self._works, reports, strict=True)]


def _padded(rows: list[np.ndarray]) -> np.ndarray:
    """Rows of any lengths as one array, zeros behind the short ones."""
    longest = max(len(row) for row in rows)
    return np.stack([np.pad(row, (0, longest - len(row))) for row in rows])
