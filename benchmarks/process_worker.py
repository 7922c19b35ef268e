"""One process of a pool on one GPU: trainer or rollout, told what to do by JSON lines. See `processes`.

Run as a program: `python -m benchmarks.process_worker MODEL ADDRESS TOKEN ROLE`, where a role is `trainer`, `alone`
(trainer and rollout in one process, without a world) or the number of a replica. Under mpirun it is
`python -m benchmarks.process_worker MODEL TRANSPORT RUNS`: process 0 trains, the others are replicas, all do the same
without being told, and process 0 prints what it took.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh

import shardfly_jax as sf
from shardfly_jax.executors.convert import as_bits
from shardfly_jax.layout import leaf_names
from shardfly_jax.today import make_update


class Worker:
    """What a process can be told.

    Args:
      model: Name of the model, all of whose layers are moved.
      address, token: Of the world; unused where there is none.
      role: See above.
    """

    def __init__(self, model: str, address: str, token: str, role: str):
        self.model, self.address, self.token, self.role = sf.engines.model(model), address, token, role
        self.gpu = jax.local_devices()[0]
        self.one = np.array([self.gpu]).reshape(1, 1)
        self.trains = role in ("trainer", "alone")
        self.plan: sf.Plan
        self.params: Any = None
        self.world: Any = None

    def trainer(self, here: bool) -> Any:
        """tunix' side, on this GPU or on nobody's."""
        mesh = Mesh(self.one, ("fsdp", "tp")) if here else AbstractMesh((1, 1), ("fsdp", "tp"))
        return sf.engines.tunix.trainer(self.model, mesh, dtype="bfloat16")

    def target(self, replicas: int) -> Any:
        """vLLM's side: replicas of one rank each."""
        mesh = AbstractMesh((replicas, 1), ("replica", "tp"))
        return sf.engines.vllm.rollout(self.model, Mesh(self.one, ("replica", "tp")) if self.role == "alone" else mesh)

    def join(self, replicas: int) -> dict[str, Any]:
        """Plans and registers."""
        trainer, rollout = self.trainer(self.trains), self.target(replicas)
        plan = sf.make_plan(trainer.params, rollout.params, sf.engines.route(trainer, rollout), allow_cast="*")
        start = time.perf_counter()
        if self.role == "alone":
            self.plan = sf.register(plan)
        else:
            world = self.world or sf.connect(self.address, self.token, name=self.role, listen="tcp://127.0.0.1:0")
            ranks = range(plan.source_ranks) if self.trains else plan.replicas[int(self.role)].ranks
            self.plan = sf.register(plan, world=world, ranks=ranks)
        return {"register_secs": time.perf_counter() - start, "target_nbytes": plan.target_nbytes}

    def rescale(self, replicas: int) -> dict[str, Any]:
        """Another number of replicas."""
        start = time.perf_counter()
        target = self.target(replicas)
        ranks = [0] if self.trains else [1 + int(self.role)]
        self.plan = sf.rescale(self.plan, target.params, ranks=ranks)
        return {"rescale_secs": time.perf_counter() - start}

    def fill(self, seed: int) -> dict[str, Any]:
        """New params."""
        self.params = params_of(self.trainer(True).params, seed)
        return {}

    def update(self) -> dict[str, Any]:
        """One update."""
        start = time.perf_counter()
        self.out = sf.sync(self.params, self.plan) if self.trains else sf.receive(self.plan, wait_secs=60)
        secs = time.perf_counter() - start
        executor = self.plan.registered().executor
        return {"secs": secs, "compiled": 0 if executor is None else executor.compiled, "gpu": self.gpu.device_kind}

    def check(self, seed: int) -> dict[str, Any]:
        """Compares every byte of this process' targets with XLA's conversion of the same params."""
        trainer, one = self.trainer(True), Mesh(self.one, ("replica", "tp"))
        rollout = sf.engines.vllm.rollout(self.model, one)
        plan = sf.make_plan(trainer.params, rollout.params, sf.engines.route(trainer, rollout), allow_cast="*")
        built = make_update(plan)(params_of(trainer.params, seed))
        names, leaves, _ = leaf_names(self.out)
        have = {name.removesuffix(f".{self.rank}"): leaf for name, leaf in zip(names, leaves, strict=True)}
        equal = jax.jit(lambda a, b: (as_bits(a) == as_bits(b)).all())
        for key, array in built.items():
            name = key.partition(":")[2]
            if not bool(equal(have[name], array)):
                raise sf.VerificationError(f"benchmark: {name!r} of {self.role} differs from XLA's.")
        return {"checked_nbytes": sum(array.nbytes for array in built.values())}

    @property
    def rank(self) -> int:
        """Of this process among the rollouts."""
        return 0 if self.role == "alone" else int(self.role)

    def free(self) -> dict[str, Any]:
        """Free memory of the GPU, whoever uses the rest."""
        from cuda.bindings import runtime

        error, free, _ = runtime.cudaMemGetInfo()
        assert not error.value
        return {"free_nbytes": int(free)}


def params_of(shapes: Any, seed: int) -> Any:
    """The same normal values for the same seed in every process."""
    keys = iter(jax.random.split(jax.random.key(seed), len(jax.tree.leaves(shapes))))
    draw = jax.jit(lambda key, shape, dtype: jax.random.normal(key, shape, dtype), static_argnums=(1, 2))
    params = jax.tree.map(lambda s: jax.device_put(draw(next(keys), s.shape, jnp.dtype(s.dtype)), s.sharding), shapes)
    return jax.block_until_ready(params)


def job(model: str, transport: str, runs: int) -> None:
    """What every process of an MPI job does."""
    world: Any = sf.connect(transport=transport, deadline_secs=180)  # who checks keeps the others waiting
    worker = Worker(model, "", "", "trainer" if world.process == 0 else str(world.process - 1))
    worker.world = world
    worker.join(replicas=world.processes - 1)
    if worker.trains:
        worker.fill(seed=6)
    first = worker.update()
    checked = 0 if worker.trains else worker.check(seed=6)["checked_nbytes"]
    total = sum(words["nbytes"] for words in world.exchange({"op": "checked", "nbytes": checked}, 60.0))
    secs = [worker.update()["secs"] for _ in range(runs)]
    if worker.trains:
        print(json.dumps(first | {"first_secs": first["secs"], "secs": secs, "checked_nbytes": total}), flush=True)


def main() -> None:
    """Reads commands, answers each with a line; or does its part of a job."""
    if len(sys.argv) == 4:
        job(sys.argv[1], sys.argv[2], int(sys.argv[3]))
        return
    worker = Worker(*sys.argv[1:])
    for line in sys.stdin:
        name, arguments = json.loads(line)
        print(json.dumps(getattr(worker, name)(**arguments)), flush=True)


if __name__ == "__main__":
    main()
