"""Other systems' ways, both sides as threads over NumPy: every way brings every byte, whenever NCCL moves its own."""

from __future__ import annotations

import dataclasses
import importlib
import multiprocessing
import sys
import threading
from pathlib import Path
from typing import Any

import einops
import numpy as np
import pytest
from benchmark_modules import module
from fake_torch import Wire, modules

import shardfly_jax as sf

ROOT = Path(__file__).parents[1]
MODEL = dataclasses.replace(
    sf.engines.model("Qwen3-8B"), layers=1, hidden=256, heads=4, kv_heads=2, head_dim=64, width=384, vocab=320
)
EARLY_OR_LATE = [(False, False), (False, True), (True, False), (True, True)]


def load(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The worker's module over a fake PyTorch, and the peers' module."""
    monkeypatch.syspath_prepend(str(ROOT))
    peers = importlib.import_module("benchmarks.peers")
    einops.rearrange(np.zeros(2), "a -> a")  # so that einops takes NumPy for what it is
    for name, fake in modules(wire).items():
        monkeypatch.setitem(sys.modules, name, fake)
    for name in ("benchmarks.peer_side", "benchmarks.peer_worker"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    worker = importlib.import_module("benchmarks.peer_worker")
    for name in ("benchmarks.peer_side", "benchmarks.peer_worker"):
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(worker, "RUNS", 3)
    return worker, peers


def run(worker: Any, wire: Wire, job: Any, way: str) -> tuple[Any, Any]:
    """What `measure` gives on both sides: a row or an exception each."""
    ends = multiprocessing.Pipe()
    outcomes: list[Any] = [None, None]

    def side(rank: int) -> None:
        wire.here.rank = rank
        try:
            outcomes[rank] = worker.measure(worker.Side(job, rank == 0, rank, 1 - rank, ends[rank]), way)
        except Exception as error:
            outcomes[rank] = error
        finally:
            ends[rank].close()

    threads = [threading.Thread(target=side, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    return outcomes[0], outcomes[1]


def all_ways() -> list[str]:
    return [way.name for way in module("peers").WAYS]


@pytest.mark.parametrize("late", EARLY_OR_LATE)
@pytest.mark.parametrize("way", all_ways())
def test_every_way_brings_every_byte(way: str, late: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire(late)
    worker, peers = load(wire, monkeypatch)
    job = peers.job_of(MODEL, "float32", bucket_nbytes=150_000)
    row, theirs = run(worker, wire, job, way)
    assert isinstance(row, dict), row
    assert isinstance(theirs, dict), theirs
    assert row["way"] == way
    assert len(row["secs"]) == 3
    assert row["checked_nbytes"] == (0 if way == "nccl_wire" else job.nbytes)


@pytest.mark.parametrize("way", ["nccl_buckets", "nccl_tensors", "nccl_p2p", "nccl_buckets_fp8"])
def test_bytes_that_change_on_the_way_are_seen(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire((False, False), lost=True)
    worker, peers = load(wire, monkeypatch)
    row, _ = run(worker, wire, peers.job_of(MODEL, "bfloat16", bucket_nbytes=150_000), way)
    assert isinstance(row, RuntimeError)
    assert "targets differ" in str(row)


@pytest.mark.parametrize("way", ["ipc_bucket", "ipc_pulled", "host_buckets"])
def test_a_bucket_that_is_not_unpacked_is_seen(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire((False, False))
    worker, peers = load(wire, monkeypatch)
    real = worker.Side.unpack
    monkeypatch.setattr(worker.Side, "unpack", lambda side, bucket, pieces: real(side, bucket, pieces[:-1]))
    row, _ = run(worker, wire, peers.job_of(MODEL, "bfloat16", bucket_nbytes=150_000), way)
    assert isinstance(row, RuntimeError)


def test_a_bucket_that_is_packed_too_soon_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire((True, True))
    worker, peers = load(wire, monkeypatch)
    bucket = worker.Side.bucket
    kept: dict[int, Any] = {}

    def one_for_all(side: Any, *args: Any, **more: Any) -> Any:
        return kept.setdefault(id(side), bucket(side, *args, **more))

    monkeypatch.setattr(worker.Side, "bucket", one_for_all)
    row, _ = run(worker, wire, peers.job_of(MODEL, "bfloat16", bucket_nbytes=150_000), "nccl_buckets")
    assert isinstance(row, RuntimeError)


def test_fp8_codes_that_are_wrong_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire((False, False))
    worker, peers = load(wire, monkeypatch)
    monkeypatch.setattr(worker.torch, "compile", lambda f, dynamic: lambda x: (f(x)[0], f(x)[1] * 2))
    row, _ = run(worker, wire, peers.job_of(MODEL, "bfloat16", bucket_nbytes=150_000), "nccl_buckets_fp8")
    assert "codes of" in str(row)
