"""A parameter mapping of NVIDIA's JAX-Toolbox drives an update into vLLM's layout: python examples/jax_toolbox.py

`jax_toolbox_mapping.json` has the schema of JAX-Toolbox's `jax-inference-offloading/examples/mappings`, for a small
Llama on tunix' modules. The same file serves any rollout: vLLM fuses and cuts its tensors, and no byte takes a detour.
"""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import numpy as np
from jax.sharding import Mesh

import shardfly_jax as sf

MODEL = sf.engines.Model(
    name="small-llama", family="llama3", layers=3, hidden=16, heads=8, kv_heads=4, head_dim=16, width=32, vocab=64,
    tied=False,
)  # fmt: skip


def main() -> None:
    devices = np.array(jax.devices())
    rng = np.random.default_rng()
    tunix = sf.engines.tunix.trainer(MODEL, Mesh(devices[:4].reshape(2, 2), ("fsdp", "tp")), dtype="bfloat16")
    params = jax.tree.map(
        lambda leaf: jax.device_put(rng.standard_normal(leaf.shape).astype(leaf.dtype), leaf.sharding), tunix.params
    )
    trainer = sf.engines.jax_toolbox.trainer(Path(__file__).with_name("jax_toolbox_mapping.json"), params, model=MODEL)
    rollout = sf.engines.vllm.rollout(MODEL, Mesh(devices[4:].reshape(2, 2), ("replica", "tp")))
    plan = sf.register(sf.make_plan(trainer.params, rollout.params, sf.engines.route(trainer, rollout)))
    served = sf.sync(params, plan)
    sf.verify(params, plan)
    print("one of vLLM's parameters:", served["model"]["layers"]["0"]["self_attn"]["qkv_proj"]["weight"].shape)
    print("every byte of version 1 is as the mapping says")


if __name__ == "__main__":
    main()
