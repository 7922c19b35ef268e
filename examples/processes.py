"""A trainer and rollouts as programs of their own: `python examples/processes.py`.

The trainer serves the rendezvous and starts two rollouts. Each plans the same, holds its own ranks, and answers a
prompt with the weights that it got; the trainer knows what the answer must be. On CPU devices weights travel over
sockets. On GPUs of one host (`pip install 'shardfly-jax[gpu]'`, and `XLA_PYTHON_CLIENT_PREALLOCATE=false` where they
share one) the trainer's kernel writes straight into the rollouts' memory. Nothing here says which: `plan.explain()`
does.
"""

from __future__ import annotations

import argparse
import os
import secrets
import subprocess
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec as P
from rich.console import Console

import shardfly_jax as sf

LAYERS, WIDTH = 4, 512
REPLICAS, STEPS = 2, 3
console = Console()


def plan_of(mesh: Mesh | AbstractMesh) -> sf.Plan:
    """Trainer weights `[in, out]` in float32 become rollout weights `[out, in]` in bfloat16.

    Args:
      mesh: Of the trainer's device; others, who do not have it, describe it.
    """
    rollouts = NamedSharding(AbstractMesh((REPLICAS,), ("replica",)), P())
    source = {
        f"layers.{i}.w": jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32, sharding=NamedSharding(mesh, P()))
        for i in range(LAYERS)
    }
    target = {
        f"h.{i}.weight": jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.bfloat16, sharding=rollouts) for i in range(LAYERS)
    }
    mapping = sf.Mapping({"h.{i}.weight": sf.src("layers.{i}.w").rearrange("i o -> o i")})
    return sf.make_plan(source, target, mapping, allow_cast="*")


@jax.jit
def answer(weights: list[jax.Array], prompt: jax.Array) -> jax.Array:
    """What a rollout makes of a prompt."""
    for w in weights:
        prompt = jnp.tanh(w @ prompt)
    return prompt.astype(jnp.float32).sum()


def train() -> None:
    """The trainer's program."""
    token = secrets.token_hex(16)
    here = Mesh(np.array(jax.local_devices()[:1]), ("x",))
    prompt = jnp.ones((WIDTH, 8), jnp.bfloat16)
    with sf.connect("tcp://127.0.0.1:0", token, serve=True, name="trainer") as world:
        plan = plan_of(here)
        plan = sf.register(plan, world=world, ranks=range(plan.source_ranks))
        rollouts = [
            subprocess.Popen(
                [sys.executable, __file__, "--address", world.address, "--replica", str(k)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                env=os.environ | {"SHARDFLY_EXAMPLE_TOKEN": token},
            )
            for k in range(REPLICAS)
        ]  # fmt: skip
        for step in range(STEPS):
            keys = jax.random.split(jax.random.key(step), LAYERS)
            params: dict[str, Any] = {
                f"layers.{i}.w": jax.device_put(
                    jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5, NamedSharding(here, P())
                )
                for i, key in enumerate(keys)
            }
            start = time.perf_counter()
            sf.sync(params, plan)
            secs = time.perf_counter() - start
            if not step:
                console.print(next(line for line in plan.explain().splitlines() if line.startswith("Transport")))
            want = answer([w.T.astype(jnp.bfloat16) for w in params.values()], prompt)
            said = [float(rollout.stdout.readline()) for rollout in rollouts if rollout.stdout]
            console.print(
                f"step {step}: {secs * 1e3:.1f} ms, versions {dict(plan.version)}, answers {said}, {want:.6f}"
            )
            if said != [float(want)] * REPLICAS:
                raise SystemExit("a rollout answers with other weights")
        for rollout in rollouts:
            rollout.communicate(timeout=60)  # which ends its input, and it leaves


def roll_out(address: str, replica: int) -> None:
    """A rollout's program."""
    token = os.environ["SHARDFLY_EXAMPLE_TOKEN"]
    prompt = jnp.ones((WIDTH, 8), jnp.bfloat16)
    with sf.connect(address, token, listen="tcp://127.0.0.1:0", name=f"rollout {replica}") as world:
        plan = plan_of(AbstractMesh((1,), ("x",)))
        plan = sf.register(plan, world=world, ranks=plan.replicas[replica].ranks)
        for _ in range(STEPS):
            weights = sf.receive(plan)
            arrays = [array for i in range(LAYERS) for array in weights[f"h.{i}.weight"].values()]
            print(float(answer(arrays, prompt)), flush=True)
        sys.stdin.read()  # whoever leaves has no version any more, and the trainer is to print all of them


def main() -> None:
    """Which of the two this process is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", help="of the trainer's rendezvous; without it, this is the trainer")
    parser.add_argument("--replica", type=int, help="number of this rollout")
    options = parser.parse_args()
    if options.address is None:
        train()
    else:
        roll_out(options.address, options.replica)


if __name__ == "__main__":
    main()
