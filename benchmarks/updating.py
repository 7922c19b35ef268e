"""Updates on CPU devices: `sync` against one jitted conversion and `jax.device_put`, bytes checked first.

What `sync` costs before and after the bytes is timed where there are hardly any: the same number of arrays, each of a
few rows and columns.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from rich.console import Console

import shardfly_jax as sf
from shardfly_jax import demo

TINY = {"hidden": 32, "heads": 8, "kv_heads": 4, "head_dim": 4, "width": 32, "vocab": 32}
"""Sizes that any of the models may have."""
HOST_RUNS = 21


def host_secs(model: str) -> tuple[int, list[float]]:
    """Arrays of a model's trainer, and seconds of updates of them in tiny shapes, between one device and another."""
    devices = jax.devices()
    small = dataclasses.replace(sf.engines.model(model), **TINY)
    trainer = sf.engines.tunix.trainer(small, Mesh(np.array(devices[:1]).reshape(1, 1), ("fsdp", "tp")))
    rollout = sf.engines.vllm.rollout(small, Mesh(np.array(devices[1:2]).reshape(1, 1), ("replica", "tp")))
    plan = sf.register(sf.make_plan(trainer.params, rollout.params, sf.engines.route(trainer, rollout)))
    params = demo.random_params(trainer.params, (time.time_ns(),))
    sf.sync(params, plan)
    sf.verify(params, plan)
    secs = []
    for _ in range(HOST_RUNS):
        start = time.perf_counter()
        sf.sync(params, plan)
        secs.append(time.perf_counter() - start)
    return len(jax.tree.leaves(params)), secs


def run(console: Console) -> list[dict[str, Any]]:
    """The demo's model and layouts; one row."""
    model = "Qwen3-0.6B"
    arrays, host = host_secs(model)
    figures = demo.measure(model, 2, console)
    return [
        {
            "model": model,
            "trainer": f"tunix fsdp {demo.FSDP} x tp {demo.TRAINER_TP}",
            "rollout": f"vLLM {demo.REPLICAS} x TP {demo.ROLLOUT_TP}",
            "payload_nbytes": figures.plan.nbytes,
            "checked_nbytes": figures.checked_nbytes,
            "register_secs": figures.register_secs,
            "first_secs": figures.first_secs,
            "sync_secs": list(figures.sync_secs),
            "today_secs": list(figures.today_secs),
            "speedup_of_bests": min(figures.today_secs) / min(figures.sync_secs),
            "peak_nbytes": figures.peak_nbytes,
            "arrays": arrays,
            "host_secs": host,
        }
    ]
