"""What users of other weight syncs reported, each as a small test that it cannot happen here: crashes, memory, speed,
and which version is served after a failure."""

from __future__ import annotations

import io
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_holds, cut, fresh, like, mesh, pointers, poison_buffers, put

import shardfly_jax as sf
from shardfly_jax.executors import host, hostcopy
from shardfly_jax.sharding import routing
from shardfly_jax.sharding.families import TargetTree
from shardfly_jax.sharding.planner import build_plan
from shardfly_jax.sharding.problem import Problem


def planned_layouts(source: sf.Layout, target: sf.Layout, expr: sf.Expr | None = None, layers: int = 0) -> sf.Plan:
    """A plan of one tensor, or one per layer, without any device."""
    if layers:
        sources = {f"w.{i}": source for i in range(layers)}
        targets, entries = {f"t.{i}": target for i in range(layers)}, {"t.{i}": expr or sf.src("w.{i}")}
    else:
        sources, targets, entries = {"w": source}, {"t": target}, {"t": expr or sf.src("w")}
    tree = TargetTree(name="rollout", tensors=targets, mapping=sf.Mapping(entries), ranks=target.ranks[-1] + 1)
    return build_plan(Problem(sources, source.ranks[-1] + 1, [tree]))


def test_two_sides_that_planned_differently_find_out_before_anything_moves(rng: np.random.Generator) -> None:
    """AReaL#1439, AReaL#1488: metadata said fp32, the wire was bf16, and the receiver hung."""
    over, rollout = mesh((2,), "x"), mesh((2,), "y", [2, 3])
    params = {"w": put(fresh(rng, 4, 4), over, "x")}
    trainers = sf.make_plan(params, {"w": like((4, 4), "float32", rollout)})
    receivers = sf.make_plan(params, {"w": like((4, 4), "bfloat16", rollout)}, allow_cast=("w",))
    file = io.BytesIO()
    receivers.save(file)
    file.seek(0)
    with pytest.raises(sf.DigestMismatch, match="same inputs"):
        sf.load_plan(file, digest=trainers.digest)


def test_tensors_longer_than_a_chunk_and_a_band_are_cut_unevenly(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vllm#31943, miles#1313: a tensor larger than a bucket met an assertion."""
    monkeypatch.setattr(host, "CHUNK_NBYTES", 1000)
    monkeypatch.setattr(routing, "BAND_NBYTES", 1500)
    monkeypatch.setattr(routing, "SMALLEST_BAND_NBYTES", 300)
    over, rollout = mesh((2,), "x"), mesh((2, 2), "dp tp", [4, 5, 6, 7])
    x = fresh(rng, 74, 13)  # 3848 bytes: three chunks and a bit
    params = {"w": put(x, over, "x")}
    target = {"copy": like((74, 13), "float32", rollout), "turn": like((13, 74), "float32", rollout, None, "tp")}
    mapping = sf.Mapping({"copy": sf.src("w"), "turn": sf.src("w").rearrange("a b -> b a")})
    plan = sf.register(sf.make_plan(params, target, mapping))
    assert len(plan.bands) > 2
    poison_buffers(plan)
    out = sf.sync(params, plan)
    assert_holds(out["copy"], x)
    assert_holds(out["turn"], np.ascontiguousarray(x.T))


def test_an_update_needs_no_memory_beside_sources_and_targets(rng: np.random.Generator) -> None:
    """sglang#8076, sglang#10597, SkyRL#1623, verl#7987, tunix#1990: gathered or staged copies."""
    over, rollout = mesh((4,), "x"), mesh((2, 2), "dp tp", [4, 5, 6, 7])
    rows = 1024
    params = {"w": put(rng.random((rows, 4096), np.float32), over, "x")}
    target = {"t": like((4096, rows), "bfloat16", rollout, "tp"), "copy": like((rows, 4096), "float32", rollout)}
    mapping = sf.Mapping({"t": sf.src("w").rearrange("a b -> b a").astype("bfloat16"), "copy": sf.src("w")})
    plan = sf.register(sf.make_plan(params, target, mapping))
    assert plan.staging_nbytes == 0
    sf.sync(params, plan)

    def live() -> int:
        """Bytes of all arrays that are alive, each buffer counted once."""
        found = {}
        for array in jax.live_arrays():
            found |= {d.data.unsafe_buffer_pointer(): d.data.nbytes for d in array.addressable_shards}
        return sum(found.values())

    before, during = live(), []
    tracemalloc.start()
    try:
        sf.sync(params, plan, progress=lambda _: during.append(live()))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert max(during) <= before
    assert plan.target_nbytes > 80e6
    assert peak < plan.target_nbytes / 10, "NumPy's scratch memory is a few tiles"


# Speed: nothing is resolved twice, and nothing grows with elements


def called(run: Callable[[], Any]) -> set[tuple[str, str]]:
    """(module file, function) of every Python function of the library that runs, in all threads."""
    seen: set[tuple[str, str]] = set()

    def profile(frame: Any, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if (
            event == "call"
            and ("shardfly_jax" in path.parts or "sharding" in path.parts)
            and "site-packages" not in path.parts
        ):
            seen.add((path.name, frame.f_code.co_name))

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return seen


@pytest.fixture
def compilations() -> Iterator[list[str]]:
    """Names of JAX's tracing and compiling events."""
    events: list[str] = []

    def listen(name: str, _: float, **__: Any) -> None:
        if "compile" in name or "trace" in name or "lower" in name:
            events.append(name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield events
    jax.monitoring.unregister_event_duration_listener(listen)


def test_the_second_update_resolves_no_name_and_compiles_nothing(
    rng: np.random.Generator, compilations: list[str]
) -> None:
    """sglang#30848, sglang#30849: names were matched again by linear scan, 60 s per update."""
    over, rollout = mesh((2,), "x"), mesh((2, 2), "dp tp", [4, 5, 6, 7])
    shapes = {f"h.{i}.w": (4, 6) for i in range(6)}
    mapping = sf.Mapping({"t.{i}": sf.src("h.{i}.w").rearrange("a b -> b a").scale(0.5)})
    targets = {f"t.{i}": like((6, 4), "float32", rollout, "tp") for i in range(6)}
    first, second = ({name: put(fresh(rng, *s), over, "x") for name, s in shapes.items()} for _ in range(2))
    plan = sf.register(sf.make_plan(first, targets, mapping))
    once = called(lambda: sf.sync(first, plan))
    assert ("layout.py", "_name") in once, "the first update resolves names, and this test sees it"
    compilations.clear()
    again = called(lambda: sf.sync(second, plan))
    assert compilations == []
    assert ("update.py", "sync") in again
    naming = {"patterns.py", "mapping.py", "problem.py", "planner.py", "lowering.py", "inference.py", "pieces.py"}
    assert not {call for call in again if call[0] in naming}
    assert {name for file, name in again if file == "layout.py"} <= {
        "leaves_of",
        "leaves_like",
        "params_of",
        "is_module",
    }
    jax.jit(lambda x: x * rng.random())(jnp.zeros(3)).block_until_ready()
    assert compilations, "a compilation would have been seen"


def test_the_number_of_moves_follows_boxes_and_not_elements() -> None:
    """modelexpress#481: one tuple per element of a contiguous tensor."""
    for expr in (None, sf.src("w").rearrange("a b -> b a")):
        large, small = (
            planned_layouts(
                cut((rows, columns), "float32", 0, 8),
                cut((columns, rows) if expr else (rows, columns), "float32", 0, 4), expr,
            )
            for rows, columns in ((150_000, 8_000), (8, 8))
        )  # fmt: skip
        assert len(large.moves) == len(small.moves) == (32 if expr else 8)
        assert large.nbytes == 150_000 * 8_000 * 4


def test_the_number_of_moves_does_not_follow_layers() -> None:
    """vllm#5723: minutes per update, tensor by tensor."""
    two, many = (
        planned_layouts(cut((8, 4), "float32", 0, 4), cut((8, 4), "float32", 1, 2), layers=n) for n in (2, 200)
    )
    assert len(many.moves) == len(two.moves) == 8
    assert many.nbytes == 100 * two.nbytes


# Versions and failures


class Broken(Exception):
    pass


def fail_at(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """The `number`-th copy of the next update fails."""
    real, count, lock = hostcopy.copy, iter(range(1_000_000)), threading.Lock()

    def copy(*args: Any) -> None:
        with lock:
            mine = next(count)
        if mine == number:
            raise Broken(f"copy {number}")
        real(*args)

    monkeypatch.setattr(hostcopy, "copy", copy)


def small_update(rng: np.random.Generator) -> tuple[sf.Plan, Callable[[], tuple[dict[str, jax.Array], np.ndarray]]]:
    """A plan with two replicas, and what gives fresh params for it."""
    over, rollout = mesh((4,), "x"), mesh((2, 2), "dp tp", [4, 5, 6, 7])

    def params() -> tuple[dict[str, jax.Array], np.ndarray]:
        x = fresh(rng, 8, 8)
        return {"w": put(x, over, "x")}, x

    return sf.register(sf.make_plan(params()[0], {"w": like((8, 8), "float32", rollout, None, "tp")})), params


@pytest.mark.parametrize("number", [0, 3, -1])
def test_a_failure_half_way_poisons_until_the_next_complete_update(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """vllm#57854, vllm#39212, dynamo#9131: mixed weights went on being served."""
    plan, fresh_params = small_update(rng)
    sf.sync(fresh_params()[0], plan)
    expansions = len(plan.moves.expanded()[0])
    params, _ = fresh_params()
    with monkeypatch.context() as patch:
        fail_at(patch, number % expansions)
        with pytest.raises(Broken, match=f"copy {number % expansions}"):
            sf.sync(params, plan)
    assert plan.version == {"rollout/0": 1, "rollout/1": 1}
    for read in (lambda: sf.params(plan), lambda: sf.verify(params, plan)):
        with pytest.raises(sf.Poisoned, match=r"'rollout/0' \(and 1 more\).*Broken: copy.*sf\.sync.*heals"):
            read()
    params, x = fresh_params()
    poison_buffers(plan)
    sf.sync(params, plan)
    assert_holds(sf.params(plan)["w"], x)
    assert plan.version == {"rollout/0": 3, "rollout/1": 3}
    assert sf.verify(params, plan) == plan.target_nbytes


def test_a_failing_progress_callback_and_an_interrupt_poison_too(rng: np.random.Generator) -> None:
    plan, fresh_params = small_update(rng)
    for error in (Broken, KeyboardInterrupt):

        def stop(_: int, error: type[BaseException] = error) -> None:
            raise error("stop")

        params, x = fresh_params()
        with pytest.raises(error):
            sf.sync(params, plan, progress=stop)
        with pytest.raises(sf.Poisoned):
            sf.params(plan)
        sf.sync(params, plan)
        assert_holds(sf.params(plan)["w"], x)


def test_refused_params_do_not_heal_a_poisoned_replica(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, fresh_params = small_update(rng)
    params, _ = fresh_params()
    with monkeypatch.context() as patch:
        fail_at(patch, 1)
        with pytest.raises(Broken):
            sf.sync(params, plan)
    with pytest.raises(sf.ParamsMismatch):
        sf.sync({}, plan)
    with pytest.raises(sf.Poisoned):
        sf.params(plan)


def test_nothing_is_written_any_more_once_a_failed_update_has_returned(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that goes on would mix old bytes into the next update."""
    monkeypatch.setattr(host.os, "sched_getaffinity", lambda _: {0, 1, 2}, raising=False)
    plan, fresh_params = small_update(rng)
    real, second_began, release, working = hostcopy.copy, threading.Event(), threading.Event(), []
    lock, count = threading.Lock(), iter(range(1_000_000))

    def copy(*args: Any) -> None:
        with lock:
            mine = next(count)
        if mine == 0:
            second_began.wait(10)
            raise Broken("first")
        working.append(mine)
        second_began.set()
        release.wait(0.5)  # far longer than raising takes
        real(*args)
        working.remove(mine)

    with monkeypatch.context() as patch:
        patch.setattr(hostcopy, "copy", copy)
        with pytest.raises(Broken):
            sf.sync(fresh_params()[0], plan)
        still_working = list(working)
        release.set()
        while working:
            pass
    assert not still_working, "sync raised while workers were still writing"


def test_a_rollout_that_just_joined_is_not_readable_before_its_first_update(rng: np.random.Generator) -> None:
    """miles#1724, miles#1444, marin#1829: a restarted engine served before it was synchronized."""
    plan, fresh_params = small_update(rng)
    assert plan.version == {"rollout/0": 0, "rollout/1": 0}
    with pytest.raises(sf.Poisoned, match=r"never been filled.*sf\.sync"):
        sf.params(plan)
    params, x = fresh_params()
    sf.sync(params, plan)
    assert_holds(sf.params(plan)["w"], x)
    again = sf.register(plan)
    assert again.version == {"rollout/0": 0, "rollout/1": 0}
    assert plan.version == {"rollout/0": 1, "rollout/1": 1}
    assert not set(pointers(sf.params(plan)).values()) & {s.address for s in again.registered().buffers.values()}


def test_updates_from_several_threads_finish_and_never_mix(rng: np.random.Generator) -> None:
    """TRL#7103, AReaL#1596: two rollouts updated in opposite orders; each holds one update, wholly."""
    (left, fresh_params), (right, _) = small_update(rng), small_update(rng)
    given = [fresh_params() for _ in range(8)]
    errors: list[BaseException] = []

    def work(plans: tuple[sf.Plan, ...], params: dict[str, jax.Array]) -> None:
        try:
            for plan in plans:
                sf.sync(params, plan)
        except BaseException as error:
            errors.append(error)

    orders = [(left, right), (right, left)]
    threads = [threading.Thread(target=work, args=(orders[k % 2], params)) for k, (params, _) in enumerate(given)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not errors
    for plan in (left, right):
        assert set(plan.version.values()) == {len(given)}
        last = np.asarray(sf.params(plan)["w"])
        (x,) = [x for _, x in given if (x == last).all()]
        assert_holds(sf.params(plan)["w"], x)
