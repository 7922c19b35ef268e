"""`sync`, `receive`, `params`, `verify`: one update of the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from shardfly_jax.binding import bind, check_addresses, check_not_donated, ready_shards, shards_of
from shardfly_jax.executors.memory import Key, Sources, fresh_handle, host_bytes
from shardfly_jax.planning import Plan
from shardfly_jax.session import Session
from shardfly_jax.sharding.errors import NotRegistered, ParamsMismatch, VerificationError
from shardfly_jax.sharding.evaluate import evaluate
from shardfly_jax.sharding.formats import Cast, Divide, MulAdd, is_float, np_dtype
from shardfly_jax.sharding.layouts import Box
from shardfly_jax.sharding.moves import View
from shardfly_jax.sharding.patterns import FAMILY, name_pattern
from shardfly_jax.sharding.plan import Plan as TransferPlan
from shardfly_jax.worlds.wire import MAX_SECS, is_secs

PATIENCE_SECS = 600.0
"""How long a process of a world waits by default for an update for which it does not block a trainer."""


def sync(
    params: Any,
    plan: Plan,
    *,
    wait: bool = True,
    wait_secs: float | None = None,
    progress: Callable[[int], None] | None = None,
) -> Any:
    """Brings every rollout to the trainer's current weights.

    In a world every process takes part in every update: those with trainer ranks call this, the others `receive`. A
    call whose arguments are wrong counts: the others get `UpdateRefused`.

    Blocks until the update's outcome is known. Computations on rollout params that were queued before see the old
    weights; what runs after it returns sees the new ones.

    With `wait=False` only the arguments are checked at once. The update goes on in a thread, which waits for the params
    to be computed, in a world for every rollout to call `receive` (until then rollouts go on with the old weights), and
    moves them. Nothing waits on a device. Another update of the plan is refused until this one is done.

    Args:
      params: The trainer's tree as it was planned: same names, shapes, dtypes and shardings. Where only some trainer
        ranks live in this process, or their mesh is not there, `{rank: array}` stands for each leaf, keyed by trainer
        rank, which is the plan-wide number. With `wait=False` the handle keeps them alive; do not donate them before it
        is done, or the update fails.
      plan: A registered plan.
      wait: Whether to wait for the outcome.
      wait_secs: In a world, how long every other process may take to take part. By default the world's deadline, and
        600 s with `wait=False`. Afterwards the world's deadline counts.
      progress: Called with bytes written as they are, from several threads.

    Returns:
      The rollout's params: new arrays at the registered addresses, in the structure of their owner; a dict of trees for
      several replica trees. Arrays returned earlier are invalid from now on. None on a process of a world that holds no
      rollout ranks.
      With `wait=False` a handle: `done()` says whether the outcome is known, `result(timeout=None)` returns the above
      or raises.

    Raises:
      NotRegistered, DigestMismatch: The plan has no buffers, or another plan's.
      ParamsMismatch: `params` are not the planned ones. Nothing was written, the old version is still served.
      StaleBuffer: An owner rebound, deleted or donated a buffer. Nothing was written.
      UpdateRefused: An update that was begun with `wait=False` is not done. Nothing was written.
      NotFinite: A tensor to be quantized holds NaN or infinity, here or in another process of a world. The replicas are
        poisoned, as below.
      SyncTimeout, RankLost, UpdateRefused, WorldLost: In a world, another process failed; the message says whether
        anything was written.
      Any error in between: replicas are poisoned until the next complete update.
    """
    if not isinstance(plan, Plan):
        raise NotRegistered(f"sync: its second argument is a {type(plan).__name__}, but a registered plan is needed.")
    session = plan.registered()
    if wait_secs is None and not wait:
        wait_secs = PATIENCE_SECS
    part = session.part

    def check() -> None:
        _check_arguments("sync", wait_secs, progress)
        if part is not None and not part.sends:
            raise NotRegistered("sync: this process holds no trainer ranks. Call sf.receive(plan).")

    def prepare() -> Callable[[], Any]:
        if part is not None:
            return part.prepare(check, params, wait_secs, progress)
        check()
        return _prepare(params, session, progress, wait)

    if not wait:
        return session.update_later(prepare)
    with session.updating():
        out = prepare()()
        return session.handles() if part is not None and session.serves else out


def _prepare(params: Any, session: Session, progress: Callable[[int], None] | None, wait: bool) -> Callable[[], Any]:
    """Checks the arguments of an update in one process; the rest of it.

    Args:
      wait: Whether somebody waits for the rest, which then returns the rollout's params.
    """
    leaves, binding = bind(params, session, read_next=wait)
    session.check_buffers()
    if session.executor is None:
        session.make_executor(binding.devices)
    executor = session.executor
    assert executor is not None

    def run() -> Any:
        try:
            # sources among what it waits for need not be asked again; in the background they are kept first
            computed = wait and session.wait_for_readers(binding.devices.values())
            arrays, kept = ready_shards(leaves, binding, computed=computed, keep=not wait)
            check_addresses(session, binding, arrays)
            if not wait:
                session.wait_for_readers()
            with session.attempting():
                finish = executor.start(arrays, None if progress is None else session.guarded(progress))
                handles = session.handles() if wait else None  # made while the update runs
                finish()
                if not wait:
                    check_not_donated(leaves, binding)
            kept.clear()  # not before
            return handles
        finally:
            leaves.clear()  # an error that is kept would keep them

    return run


def _check_arguments(what: str, wait_secs: Any, progress: Any) -> None:
    if progress is not None and not callable(progress):
        raise ParamsMismatch(f"{what}: progress is a {type(progress).__name__}, but a function of bytes is needed.")
    if wait_secs is not None and not is_secs(wait_secs):
        raise ParamsMismatch(
            f"{what}: wait_secs is {wait_secs!r}, but a positive number of seconds is needed, {MAX_SECS:,} at most."
        )


def receive(
    plan: Plan,
    *,
    wait_secs: float = PATIENCE_SECS,
    progress: Callable[[int], None] | None = None,
    stream: Any = None,
) -> Any:
    """Takes part in the next update, on a process without trainer ranks; see `sync`.

    Args:
      plan: A plan that is registered in a world.
      wait_secs: How long to wait for the update to begin. Afterwards the world's deadline counts.
      progress: As for `sync`.
      stream: Of an engine that is not JAX and reads the buffers on a GPU: a `torch.cuda.Stream`, or the number of a
        CUDA stream. Nothing is written before all that was queued on it has run; what is queued on any stream after
        this returns sees the new weights.

    Returns:
      The rollout's params: new arrays at the registered addresses.

    Raises:
      As `sync`.
    """
    session = plan.registered()
    part = session.part
    wrong = NotRegistered(
        "receive: it is for processes of a world that hold rollout ranks only. Call sf.sync(params, plan)."
    )
    if part is None:
        raise wrong

    def check() -> None:
        if part.sends:
            raise wrong
        _check_arguments("receive", wait_secs, progress)

    with session.updating():
        part.prepare(check, None, wait_secs, progress, stream)()
        return session.handles()


def params(plan: Plan) -> Any:
    """The rollout's current params, as `sync` or `receive` returned them last.

    Raises:
      NotRegistered: The plan has no buffers, or this process holds no rollout ranks.
      Poisoned: An update failed half way, or allocated buffers have never been filled.
    """
    session = plan.registered()
    session.check_readable()
    session.check_alive()
    return session.handles()


def bound_sources(params_: Any, plan: Plan) -> Sources:
    """The single-device array of every source shard that a registered plan reads, by (family, tensor, rank).

    Raises:
      ParamsMismatch: `params_` are not the planned ones.
    """
    return shards_of(*bind(params_, plan.registered()))


def verify(params_: Any, plan: Plan, *, progress: Callable[[int], None] | None = None) -> int:
    """Compares every byte of every target shard of this process with what the mapping says it should be.

    In a world it works in a process that holds all trainer ranks and some rollout ranks.

    NaN that is copied keeps its bits. NaN that is cast or scaled stays NaN, of a sign and payload that executors choose
    by themselves: in such tensors any two count as equal.

    Args:
      params_: The params that were synced last.
      plan: A registered plan.
      progress: Called with bytes compared.

    Returns:
      Bytes compared.

    Raises:
      VerificationError: Names the tensors and ranks that differ, and how many elements.
      ParamsMismatch: Some trainer ranks live in other processes; and as for `sync`.
      Poisoned, NotRegistered: As for `params`.
    """
    session = plan.registered()
    session.check_readable()
    if not session.held.issuperset(range(session.plan.source_ranks)):
        raise ParamsMismatch("verify: it needs every shard of the trainer, but some live in other processes.")
    leaves, binding = bind(params_, session)
    session.check_alive()
    arrays = shards_of(leaves, binding)
    parts: dict[str, list[tuple[Key, jax.Array]]] = {}
    for expect in binding.expected.values():
        parts.setdefault(expect.name, []).extend((key, arrays[key]) for key, _ in expect.keys)

    def source(name: str, i: int) -> np.ndarray:
        return _whole(parts[name_pattern(name).format({FAMILY: i})], session)

    computed = _computed(session.plan)
    wrong: list[str] = []
    checked = 0
    for family_index, tensor, whole in _meanings(session, source):
        family = session.plan.families[family_index]
        for rank in session.held.intersection(family.layout.ranks):
            meant = whole[tuple(slice(lo, hi) for lo, hi in family.layout.box(rank))]
            have = _read(session, (family_index, tensor, rank))
            differing = int(np.count_nonzero(_differ(meant, have, family_index in computed)))
            if differing:
                wrong.append(f"{family.name(tensor)!r} of rank {rank}: {differing} of {meant.nbytes} bytes")
            checked += meant.nbytes
            if progress is not None:
                progress(meant.nbytes)
    if wrong:
        shown = "\n".join(f"  - {line}" for line in wrong[:20])
        raise VerificationError(f"verify: {len(wrong)} target shards differ from their mapping:\n{shown}")
    return checked


def _whole(parts: list[tuple[Key, jax.Array]], session: Session) -> np.ndarray:
    """The whole of a source, from its shards."""
    layout = session.plan.families[parts[0][0][0]].layout
    out = np.zeros(layout.shape, np_dtype(layout.dtype))  # plans read no part that no rank holds
    filled: set[Box] = set()
    for (family, _, rank), array in parts:
        layout = session.plan.families[family].layout
        box = layout.box(rank)
        if box not in filled:
            filled.add(box)
            view = View(0, layout.local_shape(rank), layout.local_strides(rank))
            copy = np.asarray(fresh_handle(array))  # which keeps the host copy, not the user's array
            out[tuple(slice(lo, hi) for lo, hi in box)] = view.of(copy.reshape(-1))
    return out


def _meanings(session: Session, source: Callable[[str, int], np.ndarray]) -> Iterator[tuple[int, int, np.ndarray]]:
    """Family, tensor and whole value of every target."""
    for index in session.plan.target_families:
        family = session.plan.families[index]
        assert family.expr is not None
        expr = family.expr.astype(family.layout.dtype)
        for tensor in range(family.count):
            yield index, tensor, evaluate(expr, source, family.first + tensor, family.cuts)


def _read(session: Session, key: Key) -> np.ndarray:
    """A copy of what a registered buffer holds, in the order of its box's axes."""
    shard, layout = session.buffers[key], session.plan.families[key[0]].layout
    if shard.device.platform == "cpu":
        flat = host_bytes(shard.address, shard.nbytes).view(np_dtype(layout.dtype))
    else:  # through a new handle: the registered one would keep the host copy of its first reading
        array = shard.array
        flat = np.asarray(fresh_handle(array)).reshape(-1)
    return View(0, layout.local_shape(key[2]), layout.local_strides(key[2])).of(flat)


def _computed(plan: TransferPlan) -> set[int]:
    """Target families of which some values are cast or scaled."""
    computes = [any(isinstance(step, Cast | MulAdd | Divide) for step in rule.steps) for rule in plan.conversions]
    return set(plan.moves.target_family[np.array(computes, bool)[plan.moves.convert]].tolist())


def _differ(meant: np.ndarray, have: np.ndarray, computed: bool) -> np.ndarray:
    """Which bytes differ, bool [elements, bytes of one]; those of two NaNs that were `computed` do not."""
    wrong = (_bytes_of(meant) != _bytes_of(have)).reshape(-1, meant.itemsize)
    if computed and is_float(meant.dtype.name) and wrong.any():
        wrong[(np.isnan(meant) & np.isnan(have)).reshape(-1)] = False
    return wrong


def _bytes_of(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)
