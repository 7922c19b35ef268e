"""The persistent kernel's own code, run on a CPU: every byte, bounds, alignment, races; broken kernels are reported."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from kernel_interpreter import Fault
from kernel_jobs import SESSION, Job, compile_transfer
from random_problems import Case, cases, fill

from shardfly_jax.pallas_kernels import addresses as m, launch_words as lw, tiles
from shardfly_jax.pallas_kernels.emit import const
from shardfly_jax.pallas_kernels.transfer import WORKERS
from shardfly_jax.sharding import records as r
from shardfly_jax.sharding.families import TargetTree
from shardfly_jax.sharding.language import Expr, src
from shardfly_jax.sharding.layouts import Layout
from shardfly_jax.sharding.mapping import Mapping
from shardfly_jax.sharding.optable import OpTables, Phase

RANDOM = settings(max_examples=8, suppress_health_check=list(HealthCheck))
SEEDS = st.integers(0, 2**32 - 1)


@RANDOM
@given(cases(max_depth=2), st.integers(1, 3), st.booleans(), SEEDS)
def test_the_kernel_writes_what_the_mapping_means(case: Case, devices: int, in_step: bool, seed: int) -> None:
    job = Job(case, devices=devices)
    job.update(seed, in_step=in_step)
    job.check()


def replicated(
    arrays: dict[str, np.ndarray], target: dict[str, tuple[Expr, tuple[int, ...], str]], replicas: int
) -> Case:
    """One trainer rank holds all arrays; each rollout rank gets every target: its expression, shape and dtype."""
    sources = {name: Layout(x.shape, x.dtype.name, {0: [(0, n) for n in x.shape]}) for name, x in arrays.items()}
    tensors = {
        name: Layout(shape, dtype, {rank: [(0, n) for n in shape] for rank in range(replicas)})
        for name, (_, shape, dtype) in target.items()
    }
    mapping = Mapping({name: expr for name, (expr, _, _) in target.items()})
    return Case(arrays, sources, 1, [TargetTree(name="r", tensors=tensors, mapping=mapping, ranks=replicas)])


DTYPES = [
    ("bfloat16", "bfloat16"), ("float32", "bfloat16"), ("bfloat16", "float32"), ("float16", "bfloat16"),
    ("float32", "float16"), ("float32", "float32"), ("uint8", "uint8"), ("int64", "int64"),
]  # fmt: skip


@st.composite
def matrices(draw: Callable) -> Case:
    """Matrices large enough for vectors, several tiles and long rows, cut anywhere, perhaps transposed or scaled."""
    kind, dtype = draw(st.sampled_from(DTYPES))
    columns = draw(st.one_of(st.integers(1, 150), st.sampled_from([16, 64, 144, 528, 4208])))
    rows = draw(st.integers(1, max(1, min(150, 6000 // columns))))
    top, left = (draw(st.sampled_from([k for k in (0, 0, 0, 1, 3, 8, 16) if k < n])) for n in (rows, columns))
    expr, shape = src("w")[top:, left:], (rows - top, columns - left)
    if draw(st.booleans()):
        expr, shape = expr.rearrange("a b -> b a"), shape[::-1]
    if kind.startswith(("f", "b")) and draw(st.integers(0, 3)) == 0:
        expr = expr.scale(0.37, -1.0)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return replicated({"w": fill(rng, (rows, columns), kind)}, {"t": (expr, shape, dtype)}, draw(st.integers(1, 2)))


@RANDOM
@given(matrices(), st.integers(1, 3), SEEDS)
def test_the_kernel_moves_matrices_of_any_size_and_alignment(case: Case, devices: int, seed: int) -> None:
    job = Job(case, devices=devices)
    job.update(seed)
    job.check()


def every_kind(replicas: int = 3) -> Case:
    """Replicas fed by each other: rows, casts, transposes, and tensors too odd for vectors."""
    rng = np.random.default_rng()
    arrays = {
        "rows": fill(rng, (8, 272), "bfloat16"),
        "cast": fill(rng, (12, 40), "float32"),
        "turn": fill(rng, (16, 144), "bfloat16"),
        "skew": fill(rng, (33, 47), "float32"),
        "odd": fill(rng, (5, 7), "float32"),
    }
    target = {
        "rows": (src("rows")[:, 16:], (8, 256), "bfloat16"),
        "cast": (src("cast"), (12, 40), "bfloat16"),
        "turn": (src("turn").rearrange("a b -> b a"), (144, 16), "bfloat16"),
        "skew": (src("skew").rearrange("a b -> b a"), (47, 33), "bfloat16"),
        "odd": (src("odd"), (5, 7), "float32"),
    }
    return replicated(arrays, target, replicas)


@pytest.mark.parametrize(
    ("blocks", "workers", "devices"), [(1, 1, 1), (3, 1, 2), (2, WORKERS, 1), (1, WORKERS, 2), (2, 2, 4)]
)
def test_every_kind_of_record_is_moved_and_forwarded(
    blocks: int, workers: int, devices: int, rng: np.random.Generator
) -> None:
    job = Job(every_kind(), devices=devices, blocks=blocks, workers=workers)
    kinds = {int(kind) for table in job.tables.tables.values() for kind in table.words[:, r.KIND]}
    assert kinds == {r.ROWS, r.CAST, r.TRANSPOSE, r.TRANSPOSE_ELEMENTS, r.ELEMENTS}
    assert any((table.words[:, r.WAIT] >= 0).any() for table in job.tables.tables.values())
    for _ in range(2):
        fresh = Job(every_kind())
        for key, buffer in fresh.sources.items():
            job.sources[key].fill(buffer.data)
        for buffer in job.targets.values():
            buffer.data[:] = 0xA5
        job.want = fresh.want
        job.update(int(rng.integers(2**32)))
        job.check()
    assert all(inbox.data.view(np.int32)[[lw.VERSION, lw.POISONED]].tolist() in ([2, 0], [0, 0])
               for inbox in job.inboxes)  # fmt: skip


def odd_transposes() -> Case:
    """Several tiles of each, one after the other in the same shared memory."""
    rng = np.random.default_rng()
    arrays = {"wide": fill(rng, (257, 131), "float32"), "bytes": fill(rng, (40, 300), "uint8")}
    target = {
        "wide": (src("wide").rearrange("a b -> b a"), (131, 257), "bfloat16"),
        "bytes": (src("bytes").rearrange("a b -> b a"), (300, 40), "uint8"),
    }
    return replicated(arrays, target, 1)


def test_transposes_of_odd_widths_take_tile_after_tile() -> None:
    job = Job(odd_transposes(), blocks=1, workers=2)
    for table in job.tables.tables.values():
        assert set(table.words[:, r.KIND].tolist()) == {r.TRANSPOSE_ELEMENTS}
        assert table.n_tiles > 8
    job.update(1)
    job.check()


def test_a_tile_that_is_put_into_shared_memory_before_the_last_one_has_left_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tiles, "claim_shared", lambda: None)
    with pytest.raises(Fault, match="race"):
        Job(odd_transposes(), blocks=1, workers=1).update(1, compile_=compile_transfer)


# Attempts, deadlines


def test_a_send_that_nobody_is_ready_for_writes_nothing_and_says_whom_it_waited_for() -> None:
    job = Job(every_kind(), devices=2)
    job.epoch = 1
    job.run(("ready",), 0)
    errors = job.run(("send",), 0, epoch=2)
    assert [error >> lw.ERROR_SHIFT for error in errors.values()] == [lw.HEAD]
    assert not any(buffer.written.any() for buffer in job.targets.values())


def test_a_send_that_comes_too_late_writes_nothing() -> None:
    job = Job(every_kind(), devices=2)
    job.epoch = 8
    job.run(("ready",), 0)
    errors = job.run(("send",), 0, epoch=7)
    assert [error >> lw.ERROR_SHIFT for error in errors.values()] == [lw.LATE]
    assert not any(buffer.written.any() for buffer in job.targets.values())


@pytest.mark.parametrize("epoch", [1, 2])
def test_what_waits_in_an_attempt_that_the_host_gives_up_ends_without_a_deadline(epoch: int) -> None:
    job = Job(every_kind(), devices=2)
    job.epoch = 1
    job.run(("ready",), 0)
    for inbox in job.inboxes:  # as the host writes it
        inbox.data.view(np.uint32)[lw.ABORTED : lw.ABORTED + 2] = SESSION, epoch
    errors = job.run(("finish",), 0)
    kinds = {error >> lw.ERROR_SHIFT for error in errors.values()}
    assert kinds == ({lw.GIVEN_UP} if epoch == 1 else {lw.TAIL, lw.COUNTER}), "given up is one attempt only"


def test_a_launch_says_which_phase_of_which_rank_it_waited_for() -> None:
    job = Job(every_kind(), devices=2)
    job.epoch = 1
    job.run(("ready",), 0)
    (error,) = job.run(("send",), 0, epoch=2).values()
    (work,) = job.phases().send().values()
    target = next(rank for rank, device in job.tables.device_of.items() if device == work.heads[0].device and rank > 0)
    assert work.blamed(error) == ("ready", target)
    assert "waited for ready of rank" in (work.fault(error) or "")
    job.run(("ready",), 0)
    errors = job.run(("finish",), 0)
    for device, waiting in job.phases().finish().items():
        phase, rank = waiting.blamed(errors[waiting.name])
        assert phase in ("send", "finish"), device
        assert rank in {at for table in job.tables.tables.values() for at, _ in table.moves}


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_a_finish_without_sends_ends_at_the_deadline_and_stays_poisoned(devices: int) -> None:
    job = Job(every_kind(), devices=devices)
    job.epoch = 1
    job.run(("ready",), 0)
    errors = job.run(("finish",), 0)
    assert all(error >> lw.ERROR_SHIFT in (lw.COUNTER, lw.TAIL, lw.HEAD) for error in errors.values())
    for work in job.phases().finish().values():
        assert "waited for" in str(work.fault(errors[work.name]))
    written = {job.tables.device_of[rank] for table in job.tables.tables.values() for _, rank in table.moves}
    assert all(job.inboxes[d].data.view(np.int32)[lw.POISONED] == 1 for d in written)
    job.update(1)
    job.check()


# Broken kernels and tables


def nothing(*args: object, **kwargs: object) -> None:
    pass


def add_in_two_steps(at: m.Int, value: int, order: str, *, only: m.Int) -> m.Int:
    old = m.load32(at)
    with m.when(only):
        m.store_element(at, [old + value], 4)
    return old


BROKEN_HELPERS: dict[str, tuple[str, Callable[..., object]]] = {
    "no barrier of the block": ("barrier", nothing),
    "no fence between threads and bulk copies": ("fence_async", nothing),
    "bulk loads not waited for": ("wait_barrier", nothing),
    "bulk stores not committed": ("commit_stores", nothing),
    "bulk stores not waited for": ("wait_stores", nothing),
    "a signal before the stores have landed": (
        "wait_stores",
        lambda *, read, real=m.wait_stores: real(read=True),
    ),
    "a signal that other devices need not see": (
        "raise_counter",
        lambda at, scope: m.ptx("red.release.gpu.global.add.u32 [$0], 1;", "l", at),
    ),
    "a signal that releases nothing": (
        "raise_counter",
        lambda at, scope: m.ptx(f"red.relaxed.{scope}.global.add.u32 [$0], 1;", "l", at),
    ),
    "a wait that acquires nothing": ("read_counter", m.read_word),
    "claims that are not atomic": ("atomic_add", add_in_two_steps),
    "workers of a block that share a tile and a barrier": ("warpgroup", lambda: const(0)),
    "addresses that other workers read before they are there": ("block_barrier", nothing),
}


@pytest.mark.parametrize("name", BROKEN_HELPERS)
def test_a_kernel_that_lacks_an_order_is_reported(
    name: str, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    helper, broken = BROKEN_HELPERS[name]
    monkeypatch.setattr(m, helper, broken)
    in_step = helper == "block_barrier"  # only there addresses are in shared memory
    job = Job(every_kind(), devices=2)
    with pytest.raises(Fault, match=r"race|never written|ends while|hang|scope|made twice"):  # whatever the schedule
        job.update(int(rng.integers(2**32)), in_step=in_step, compile_=compile_transfer)


def first(words: np.ndarray, *conditions: np.ndarray) -> int:
    """Index of the first record of which all holds."""
    assert np.all(conditions, axis=0).any()
    return int(np.argmax(np.all(conditions, axis=0)))


def without_waits(words: np.ndarray) -> np.ndarray:
    words[:, r.WAIT] = -1
    return words


def too_long(words: np.ndarray) -> np.ndarray:
    record = words[first(words, words[:, r.KIND] == r.ELEMENTS)]
    record[r.EXTENT + 4] += 1  # the last tile is ragged, so no tile is added
    record[r.TILE_4] += 1
    return words


def read_too_far(words: np.ndarray) -> np.ndarray:
    words[first(words, words[:, r.KIND] == r.ROWS), r.SOURCE_OFFSET] += 16
    return words


def written_too_far(words: np.ndarray) -> np.ndarray:
    words[first(words, words[:, r.KIND] == r.TRANSPOSE), r.TARGET_OFFSET] += 16
    return words


def misaligned(words: np.ndarray) -> np.ndarray:
    words[first(words, words[:, r.KIND] == r.CAST), r.TARGET_OFFSET] += 8
    return words


def done_twice(words: np.ndarray) -> np.ndarray:
    """The last record once more, by tiles of its own."""
    again = words[-1].copy()
    tiles = again[r.END_TILE] - again[r.FIRST_TILE]
    again[[r.FIRST_TILE, r.END_TILE]] += tiles
    return np.concatenate([words, again[None]])


BROKEN_TABLES = {
    without_waits: "race|never written",
    too_long: "out of bounds|written twice|race",
    read_too_far: "out of bounds",
    written_too_far: "out of bounds",
    misaligned: "out of bounds|not aligned to 16",
    done_twice: "written twice|race",
}


@pytest.mark.parametrize("broken", BROKEN_TABLES)
def test_a_broken_table_is_reported(broken: Callable[[np.ndarray], np.ndarray], rng: np.random.Generator) -> None:
    def change(tables: OpTables) -> OpTables:
        table = tables.tables[0, Phase.SEND]
        words = broken(table.words.copy())
        moves = (*table.moves, table.moves[-1])[: len(words)]
        new = dataclasses.replace(table, words=words, n_tiles=int(words[-1, r.END_TILE]), moves=moves)
        return dataclasses.replace(tables, tables=tables.tables | {(0, Phase.SEND): new})

    with pytest.raises(Fault, match=BROKEN_TABLES[broken]):
        Job(every_kind(), change=change).update(int(rng.integers(2**32)))
