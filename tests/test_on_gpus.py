"""The benchmark of several GPUs, driven with CPU devices and small models: what it checks, measures and shows."""

from __future__ import annotations

import ast
import ctypes
import dataclasses
import json
import os
import select
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from benchmark_modules import module
from checks import assert_same_bits
from hypothesis import given, strategies as st
from jax.sharding import Mesh

import shardfly_jax as sf
from shardfly_jax.layout import leaf_names
from shardfly_jax.sharding.formats import np_dtype

ROOT = Path(__file__).parents[1]
MODEL = dataclasses.replace(
    sf.engines.model("Qwen3-8B"), layers=1, hidden=256, heads=8, kv_heads=4, head_dim=32, width=512, vocab=640
)
RATE = {"within": 4000e9, "one_way": 400e9, "both_ways": 300e9}


buckets, children, links = module("buckets"), module("children"), module("links")
gpu_job, on_gpus = module("gpu_job"), module("on_gpus")
peers, tables = module("peers"), module("tables")
CASES = {case.name: case for case in on_gpus.CASES}


@pytest.fixture
def few_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module("on_gpu"), "RUNS", 2)
    monkeypatch.setattr(on_gpus, "RUNS", 2)
    monkeypatch.setattr(on_gpus, "MATRICES", (3, (64, 96)))


# Our cases


@pytest.mark.usefixtures("few_runs")
@pytest.mark.parametrize("name", CASES)
def test_a_case_compares_every_byte_and_gives_all_that_the_tables_show(name: str) -> None:
    case = CASES[name]
    row = on_gpus.measure(case, jax.devices(), "auto", MODEL)
    row |= {"gpu": "a CPU", "rates": RATE} | gpu_job.against_bound(row, RATE)
    _, plan = on_gpus.prepare(case, jax.devices(), MODEL)
    assert row["checked_nbytes"] == plan.target_nbytes  # this model ties nothing
    assert row["of_bound"] > 0
    assert row["grown_nbytes"] == [0] * case.gpus
    assert bool(row["jit_secs"]) == name.startswith("fsdp 2 on both")
    assert bool(row["today_secs"]) != bool(row["jit_secs"])
    assert case.name in tables.markdown("on_gpus", {"machine": machine(), "rows": [row]})
    json.dumps(row)


def machine() -> dict[str, Any]:
    return {"python": "3", "jax": "0", "numpy": "2", "commit": "abc", "cores": 2, "cpu": "x"}


def test_a_byte_that_differs_fails_the_case() -> None:
    case = CASES["GPU 0 to two replicas on 1"]
    shapes, plan = on_gpus.prepare(case, jax.devices(), MODEL)
    plan = sf.register(plan)
    params = on_gpus.random_params(shapes)
    built = on_gpus.make_update(plan)(params)
    on_gpus.check(params, plan, built)
    key = "r1:model.norm.weight"
    built[key] = built[key].at[7].add(1)
    with pytest.raises(sf.VerificationError, match=r"1 shards differ.*r1:model\.norm"):
        on_gpus.check(params, plan, built)


def test_a_target_that_is_not_written_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes, plan = on_gpus.prepare(CASES["GPU 0 to 1"], jax.devices(), MODEL)
    plan = sf.register(plan)
    params = on_gpus.random_params(shapes)
    built = on_gpus.make_update(plan)(params)
    sf.sync(params, plan)
    monkeypatch.setattr(on_gpus.sf, "sync", lambda params, plan: sf.params(plan))
    with pytest.raises(sf.VerificationError):
        on_gpus.check(params, plan, built)


def test_what_must_move_does_not_depend_on_the_routes() -> None:
    def crossing(name: str) -> tuple[int, int]:
        between, _ = on_gpus.needed(CASES[name], on_gpus.prepare(CASES[name], jax.devices(), MODEL)[1], MODEL)
        return int(between[1, 0]), int(between[0, 1])

    _, all_ = crossing("GPU 0 to 1")
    assert crossing("GPU 0 to 1") == (0, all_)
    assert all_ == on_gpus.prepare(CASES["GPU 0 to 1"], jax.devices(), MODEL)[1].target_nbytes
    for name in ("GPU 0 to 1, from float32", "GPU 0 to a replica on each", "GPU 0 to two replicas on 1"):
        assert crossing(name) == (0, all_)
    for name, part in (("fsdp 2 on both to TP 2 on both", 0.25), ("fsdp 2 on both to a replica on each", 0.5)):
        back, forth = crossing(name)
        assert back == pytest.approx(part * all_, rel=0.01)
        assert forth == pytest.approx(part * all_, rel=0.01)


@pytest.mark.parametrize(
    ("between", "touched", "secs"),
    [
        ([[9e9, 400e9], [0, 7e9]], [1, 1], 1.0),
        ([[0, 300e9], [300e9, 0]], [1, 1], 1.0),
        ([[0, 500e9], [300e9, 0]], [1, 1], 1.5),
        ([[0, 400e9], [0, 0]], [1, 8000e9], 2.0),
        ([[0, 200e9, 200e9], [0, 0, 0], [0, 0, 0]], [0, 0, 0], 1.0),
        ([[5e9]], [4000e9], 1.0),
    ],
)
def test_the_bound_is_the_busiest_link_or_memory(between: list, touched: list, secs: float) -> None:
    assert links.bound_secs(np.array(between), np.array(touched), RATE) == pytest.approx(secs)


def test_rates_are_those_of_medians_and_of_the_topologies_where_copies_failed() -> None:
    found = {"nbytes": 100, "within": [1.0, 2.0, 9.0], "one_way": [1.0], "both_ways": [4.0]}
    assert links.rates(found) == {"within": 100.0, "one_way": 100.0, "both_ways": 25.0}
    assert links.rates({"gpus": 2})["one_way"] == 393.2e9


class FakeRuntime:
    """The calls of the CUDA runtime that `links` makes, over host memory."""

    cudaMemcpyKind = types.SimpleNamespace(cudaMemcpyDeviceToDevice=3, cudaMemcpyDeviceToHost=2)

    def __init__(self, gpus: int, lost: tuple[int, int] | None = None):
        self.gpus, self.lost = gpus, lost
        self.memory: list[np.ndarray] = []
        self.copied: list[tuple[int, int]] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*words: Any) -> tuple[Any, ...]:
            done = vars(FakeRuntime).get(f"_{name}", lambda *_: (0,))
            return types.SimpleNamespace(value=0), *done(self, *words)

        return call

    def _cudaGetDeviceCount(self) -> tuple[int]:
        return (self.gpus,)

    def _cudaGetDeviceProperties(self, gpu: int) -> tuple[Any]:
        return (types.SimpleNamespace(name=b"A GPU"),)

    def _cudaMalloc(self, nbytes: int) -> tuple[int]:
        self.memory.append(np.zeros(nbytes, np.uint8))
        return (self.memory[-1].ctypes.data,)

    def _cudaMemset(self, at: int, value: int, nbytes: int) -> tuple[()]:
        ctypes.memset(at, value, nbytes)
        return ()

    def _cudaMemcpy(self, to: int, at: int, nbytes: int, kind: int) -> tuple[()]:
        ctypes.memmove(to, at, nbytes)
        return ()

    def _cudaMemcpyAsync(self, to: int, at: int, nbytes: int, kind: int, stream: int) -> tuple[()]:
        return self._cudaMemcpyPeerAsync(to, 0, at, 0, nbytes, stream)

    def _cudaMemcpyPeerAsync(self, to: int, target: int, at: int, source: int, nbytes: int, stream: int) -> tuple[()]:
        self.copied.append((source, target))
        if (source, target) != self.lost:
            ctypes.memmove(to, at, nbytes)
        return ()


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeRuntime]:
    def install(*words: Any) -> FakeRuntime:
        fake = FakeRuntime(*words)
        monkeypatch.setitem(sys.modules, "cuda", types.ModuleType("cuda"))
        monkeypatch.setitem(sys.modules, "cuda.bindings", types.SimpleNamespace(runtime=fake))
        return fake

    return install


@pytest.mark.parametrize("gpus", [1, 2, 8])
def test_copies_are_timed_within_one_way_and_both_ways(gpus: int, runtime: Callable[..., FakeRuntime]) -> None:
    fake = runtime(gpus)
    assert links.gpus() == {"gpus": gpus, "gpu": "A GPU"}
    found = links.measure(5000, gpus)
    wanted = {"within": [(0, 0)]}
    if gpus > 1:
        wanted |= {"one_way": [(0, 1)], "one_way_back": [(1, 0)], "both_ways": [(0, 1), (1, 0)]}
    assert set(found) == {"nbytes", *wanted}
    assert fake.copied == [pair for pairs in wanted.values() for pair in pairs * (links.RUNS + 1)]
    assert all(len(found[name]) == links.RUNS for name in wanted)
    assert links.rates(found)["within"] > 0


def test_a_copy_that_brings_nothing_is_no_measurement(runtime: Callable[..., FakeRuntime]) -> None:
    runtime(2, (1, 0))
    with pytest.raises(RuntimeError, match="from GPU 1 to GPU 0 did not bring"):
        links.measure(5000, 2)


# Buckets


def packed(job: Any, sources: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What `peer_worker` does, in NumPy: bucket by bucket, each element written once."""
    targets = {name: np.zeros(int(np.prod(shape)), np_dtype("bfloat16")) for name, shape in job.targets.items()}
    writes = {name: np.zeros(target.size, int) for name, target in targets.items()}
    for pieces in buckets.fill(job.parts, job.bucket_nbytes):
        bucket = np.zeros(job.bucket_nbytes // buckets.WIRE_ITEMSIZE, np_dtype("bfloat16"))
        for piece in pieces:
            part = job.parts[piece.part]
            rows = part.view(sources[part.source])[piece.first : piece.stop]
            bucket[piece.offset : piece.offset + piece.size].reshape(rows.shape)[...] = rows
        for piece in pieces:
            part = job.parts[piece.part]
            at = part.offset + piece.first * part.row_size
            targets[part.target][at : at + piece.size] = bucket[piece.offset : piece.offset + piece.size]
            writes[part.target][at : at + piece.size] += 1
    assert all((count == 1).all() for count in writes.values())
    return targets


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_buckets_bring_what_sync_brings(dtype: str, tmp_path: Path) -> None:
    job = peers.job_of(MODEL, dtype, bucket_nbytes=100_000)
    job.write(tmp_path / "job.json")
    assert buckets.Job.read(tmp_path / "job.json") == job
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    trainer = sf.engines.tunix.trainer(MODEL, mesh, dtype=dtype)
    rollout = sf.engines.vllm.rollout(MODEL, Mesh(np.array(jax.devices()[1:2]).reshape(1, 1), ("replica", "tp")))
    plan = sf.register(sf.make_plan(trainer.params, rollout.params, sf.engines.route(trainer, rollout), allow_cast="*"))
    params = on_gpus.random_params(trainer.params)
    names, leaves, _ = leaf_names(sf.sync(params, plan))
    have = packed(job, dict(zip(leaf_names(params)[0], map(np.asarray, leaf_names(params)[1]), strict=True)))
    assert set(names) == set(have)
    for name, leaf in zip(names, leaves, strict=True):
        assert_same_bits(have[name].reshape(leaf.shape), np.asarray(leaf), name)
    assert sum(part.nbytes for part in job.parts) == job.nbytes == plan.target_nbytes
    assert len(job.quantized) == 4 * MODEL.layers


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 6)), min_size=1, max_size=8), st.integers(6, 30))
def test_buckets_hold_every_row_once_in_order_and_are_never_too_full(shapes: list, room: int) -> None:
    parts = [buckets.Part(target="t", offset=0, source="s", shape=shape, pattern="a b -> a b") for shape in shapes]
    found = buckets.fill(parts, 2 * room)
    assert all(pieces[-1].offset + pieces[-1].size <= room for pieces in found)
    for pieces in found:
        ends = [0, *(piece.offset + piece.size for piece in pieces)]
        assert [piece.offset for piece in pieces] == ends[:-1]
    rows = [(piece.part, row) for pieces in found for piece in pieces for row in range(piece.first, piece.stop)]
    assert rows == [(k, row) for k, (n, _) in enumerate(shapes) for row in range(n)]


def test_a_row_that_fits_no_bucket_is_refused() -> None:
    part = buckets.Part(target="t", offset=0, source="s", shape=(2, 8), pattern="a b -> a b")
    with pytest.raises(ValueError, match="a row of 't' has 16 bytes"):
        buckets.fill([part], 15)


def test_every_way_has_a_worker() -> None:
    tree = ast.parse((ROOT / "benchmarks" / "peer_worker.py").read_text())  # importing it takes PyTorch
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)} | {"ipc_bucket_colocated"}
    assert {way.name for way in peers.WAYS} <= functions
    assert {name for _, names in peers.JOBS for name in names} == {way.name for way in peers.WAYS}
    assert set(peers.COUNTERPARTS.values()) <= set(CASES)


# Programs that are watched

EMIT = "import json, sys, time\nemit = lambda **row: print('ROW ' + json.dumps(row), flush=True)\n"


def watched(code: str, *words: str) -> list[dict[str, Any]]:
    return list(children.rows(["-c", EMIT + code, *words], silence_secs=60, deadline=time.monotonic() + 60))


def test_rows_come_as_they_are_printed_and_other_lines_are_passed_over() -> None:
    assert watched("print('hello'); emit(a=1); emit(b=sys.argv[1])", "x") == [{"a": 1}, {"b": "x"}]


def test_a_program_that_dies_is_told_with_its_last_words() -> None:
    with pytest.raises(children.Died, match=r"ended with 1:(.|\n)*ZeroDivisionError"):
        watched("emit(a=1); 1 / 0")


@pytest.mark.parametrize(
    ("limits", "said"),
    [({"silence_secs": 3.0}, "said nothing for 3 s"), ({"secs": 3.0}, "the time for all cases was over")],
)
def test_a_program_that_hangs_is_killed_with_what_it_started(limits: dict[str, float], said: str) -> None:
    code = "import subprocess; p = subprocess.Popen(['sleep', '60']); emit(pid=p.pid); p.wait()"
    given = {"silence_secs": 60.0, "secs": 60.0} | limits
    rows = children.rows(
        ["-c", EMIT + code], silence_secs=given["silence_secs"], deadline=time.monotonic() + given["secs"]
    )
    started = os.pidfd_open(next(rows)["pid"])
    try:
        with pytest.raises(children.Died, match=said):
            next(rows)
        assert select.select([started], [], [], 20.0)[0]  # readable when it has ended
    finally:
        os.close(started)


@pytest.mark.parametrize(
    ("fault", "error"), [("sys.exit(3)", "ended with 3"), ("emit(case=n, error='bad'); sys.exit()", "bad"),
                         ("sys.exit()", "ended too soon"), ("emit(case='z')", "where 'b' was due")],
)  # fmt: skip
def test_a_case_that_fails_costs_only_itself(fault: str, error: str) -> None:
    code = f"for n in sys.argv[1:]:\n  if n == 'b':\n    {fault}\n    sys.exit()\n  emit(case=n, secs=1)"
    started = []

    def run(names: list[str]) -> Any:
        started.append(list(names))
        words = ["-c", EMIT + code, *names]
        return children.rows(words, silence_secs=60, deadline=time.monotonic() + 60)

    rows = list(children.each(["a", "b", "c"], run))
    assert [row["case"] for row in rows] == ["a", "b", "c"]
    assert error in rows[1]["error"]
    assert "error" not in rows[0] | rows[2]
    assert started == [["a", "b", "c"], ["c"]]


# The whole run


def fake(found: dict[str, Any], cases: Callable[[str], dict[str, Any]]) -> Callable[..., Any]:
    def rows(words: list[str], **limits: Any) -> Any:
        if words[1] == "benchmarks.links":
            yield found
        elif words[1] == "benchmarks.on_gpus":
            yield from (cases(name) for name in words[2:])
        else:
            yield from ({"way": way, "secs": [2.0, 3.0, 4.0], "checked_nbytes": 5} for way in words[6:])

    return rows


@pytest.fixture
def measured() -> Callable[[str], dict[str, Any]]:
    def row(name: str) -> dict[str, Any]:
        if "fp8" in name:
            return {"case": name, "refused": "the kernel does not"}
        secs = {key: [1.0, 2.0, 3.0] for key in ("kernel_secs", "sync_secs", "host_secs", "today_secs")}
        return {
            "case": name, "model": "m", "arrays": 3, "jit_secs": [], "needed_nbytes": [[0, 400e9], [0, 0]],
            "touched_nbytes": [0, 0], **secs,
        }  # fmt: skip

    return row


def test_a_run_saves_after_each_case_and_sets_peers_beside_ours(
    monkeypatch: pytest.MonkeyPatch, measured: Callable[[str], dict[str, Any]]
) -> None:
    found = {"gpus": 2, "gpu": "H", "nbytes": 400e9, "within": [0.1], "one_way": [1.0], "both_ways": [1.5]}
    monkeypatch.setattr(children, "rows", fake(found, measured))
    saved: list[tuple[str, int, int]] = []
    last: dict[str, Any] = {}

    def save(part: str, rows: list[dict[str, Any]], failed: list[dict[str, Any]]) -> None:
        saved.append((part, len(rows), len(failed)))
        last[part] = {"machine": machine(), "rows": list(rows), "failed": list(failed)}

    ours = gpu_job.run(lambda _: None, save)
    assert [row["of_bound"] for row in ours] == [0.5] * (len(CASES) - 2)
    assert saved[:2] == [("on_gpus", 0, 0), ("on_gpus", 1, 0)]
    assert ("on_gpus", len(CASES) - 2, 2) in saved
    buckets_row = next(row for row in last["peers"]["rows"] if row["way"] == "nccl_buckets")
    assert buckets_row["over_ours"] == 1.5
    colocated = next(row for row in last["peers"]["rows"] if row["way"] == "ipc_bucket_colocated")
    assert "over_ours" not in colocated  # it crosses no link
    assert all("over_ours" not in row for row in last["peers"]["rows"] if row["way"].endswith("fp8"))
    text = tables.markdown("on_gpus", last["on_gpus"])
    assert "400.0 GB/s one way, 266.7 each way" in text
    assert "Not measured: GPU 0 to 1, fp8 blocks; GPU 0 to 1, fp8 blocks from float32" in text
    assert "1.50x" in tables.markdown("peers", last["peers"])


def test_one_gpu_runs_what_it_can_and_says_why_not_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"gpus": 1, "gpu": "H", "nbytes": 400e9, "within": [0.1]}
    monkeypatch.setattr(children, "rows", fake(found, lambda name: pytest.fail(name)))
    last: dict[str, Any] = {}
    gpu_job.run(lambda _: None, lambda part, rows, failed: last.update({part: (list(rows), list(failed))}))
    assert [row["error"] for row in last["on_gpus"][1]] == ["needs 2 GPUs, and there are 1"] * len(CASES)
    rows, failed = last["peers"]
    assert {row["way"] for row in failed} == {way.name for way in peers.WAYS if way.name.startswith("nccl")}
    assert all("NCCL refuses two processes on one GPU" in row["error"] for row in failed)
    assert {tuple(row["gpus"]) for row in rows} == {(0, 0)}


def test_every_part_of_the_readme_has_a_table() -> None:
    assert set(tables.MAKERS) >= {"on_gpus", "peers"}
    assert tables.shown(ROOT / "nowhere", "peers") == "(not measured yet)"
    assert jnp.bfloat16.dtype.itemsize == buckets.WIRE_ITEMSIZE
