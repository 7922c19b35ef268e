"""A third rollout joins two that serve: what it costs, what is kept, and that the next update is right in every byte.

python examples/rescale.py                        # Qwen3-0.6B on 4 CPU devices, about 8 GB of memory
JAX_PLATFORMS=cuda python examples/rescale.py     # the same where trainer and rollouts share the GPUs there are
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

import shardfly_jax as sf
from shardfly_jax.demo import random_params


def run(model: Any) -> sf.Rescaled:
    """Updates two replicas, rescales to three, and updates those; prints times and counts.

    Args:
      model: Sizes, from `sf.engines.model`.

    Raises:
      VerificationError: A byte is wrong.
    """
    trainer_device, *others = jax.devices()
    trainer = sf.engines.tunix.trainer(model, Mesh(np.array([[trainer_device]]), ("fsdp", "tp")))

    def place(rank: int) -> jax.Device:
        return others[rank % len(others)] if others else trainer_device

    def rollouts(replicas: int) -> Any:
        return sf.engines.vllm.rollout(model, AbstractMesh((replicas, 1), ("replica", "tp")))

    first = rollouts(2)
    plan = sf.make_plan(trainer.params, first.params, sf.engines.route(trainer, first))
    plan = sf.register(plan, placement=place)
    for number in range(2):
        update(plan, random_params(trainer.params, (0, number)))

    start = time.perf_counter()
    plan = sf.rescale(plan, rollouts(3).params, placement=place)
    print(f"rescaled from 2 to 3 replicas in {time.perf_counter() - start:.3f} s")
    done = plan.rescaled
    assert done is not None
    print(f"  {done.kept} buffers kept ({done.kept_nbytes / 1e9:.2f} GB), {done.allocated} allocated")
    print(f"  kernels: {done.kernels} used again, {done.compiled} compiled")
    print(f"  serving: {', '.join(done.serving)}; waiting for an update: {', '.join(done.joined)}")
    for number in range(2, 4):
        update(plan, random_params(trainer.params, (0, number)))
    return done


def update(plan: sf.Plan, params: Any) -> None:
    """One update, timed and checked."""
    start = time.perf_counter()
    sf.sync(params, plan)
    secs = time.perf_counter() - start
    print(f"update {max(plan.version.values())}: {secs:.3f} s, {sf.verify(params, plan):,} bytes checked")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen3-0.6B", help="as sf.engines.model names it")
    run(sf.engines.model(parser.parse_args().model))
