"""GRPO: a policy learns to add, and after every step `sf.sync` brings its weights to the rollouts.

Run it from a checkout, or from an installed package; both are this file:

    python examples/grpo.py --mode async
    python -m shardfly_jax rl --mode async

The trainer holds float32 weights on fsdp 2 x tp 2; two rollouts of TP 2 hold bfloat16 weights, fused and transposed as
an engine wants them, on four other devices. `Loop.__iter__` is the loop.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import shardfly_jax as sf
from shardfly_jax.rl import objective, rollout, task
from shardfly_jax.rl.options import Options
from shardfly_jax.rl.policy import Policy, Sizes, answer_logps, chosen

try:
    import optax
except ImportError as error:
    raise ImportError("GRPO needs optax, which is not installed. Run: pip install 'shardfly-jax[rl]'") from error

SIZES = Sizes()
DEVICES = 8
MAX_GRADIENT_NORM = 1.0


class Batch(NamedTuple):
    """Completions under way, and the version of the weights that draw them."""

    completions: rollout.Completions
    version: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one step did.

    Attributes:
      number: From 1.
      rollout_version: Of the weights that drew this step's tokens.
      reward: Mean over the batch: the share of right sums.
      drift: Mean |p / p_rollout - 1| over tokens.
      clipped: Share of tokens whose ratio was clipped.
      entropy: Of the policy, nats per token.
      sample: One completion, for people.
      sync_secs: Time that `sf.sync` took; async, it waits until the rollouts have drawn what is under way. None where
        nothing was synced.
    """

    number: int
    rollout_version: int
    reward: float
    drift: float
    clipped: float
    entropy: float
    sample: str
    sync_secs: float | None

    @property
    def trainer_version(self) -> int:
        """Of the weights that were trained: the initial ones are version 1, and every step makes the next."""
        return self.number


class Loop:
    """Trainer, rollouts and the plan between them.

    Args:
      options: Of the run.

    Raises:
      PlanError: JAX has fewer than 8 devices.
    """

    def __init__(self, options: Options):
        devices = np.array(jax.devices())
        if len(devices) < DEVICES:
            raise sf.PlanError(
                f"rl: JAX has {len(devices)} devices, but {DEVICES} are needed. Start it with "
                f"XLA_FLAGS=--xla_force_host_platform_device_count={DEVICES}."
            )
        self.options = options
        self.trainer_mesh = Mesh(devices[:4].reshape(2, 2), ("fsdp", "tp"))
        self.rollout_mesh = Mesh(devices[4:DEVICES].reshape(2, 2), ("replica", "tp"))
        self.policy = Policy(SIZES, self.trainer_mesh, options.seed)
        self.optimizer = nnx.Optimizer(self.policy, _transformation(options.learning_rate), wrt=nnx.Param)
        # Its counters too lie on the mesh from the start, so that the first step's program fits all steps.
        replicated = NamedSharding(self.trainer_mesh, P())
        state = nnx.state(self.optimizer)
        nnx.update(self.optimizer, jax.tree.map(lambda x: x if x.ndim else jax.device_put(x, replicated), state))
        target = rollout.layout(SIZES, self.rollout_mesh)
        # No data is read; the master weights are float32, so rounding them is opt-in.
        self.plan = sf.register(sf.make_plan(self.policy, target, rollout.MAPPING, allow_cast=("*",)))
        self._rng = np.random.default_rng(options.seed)
        self._key = jax.random.key(options.seed)

    def __iter__(self) -> Iterator[Step]:
        """Trains, one step at a time."""
        mode = self.options.mode
        weights = sf.sync(self.policy, self.plan)
        ahead: Batch | None = None
        for number in range(1, self.options.steps + 1):
            batch = ahead or self.draw(weights)
            # Async: the rollouts draw the next batch with the weights they have, while the trainer trains on this one.
            ahead = self.draw(weights) if mode == "async" else None
            rewards, terms = jax.block_until_ready(self.train(batch.completions))
            sync_secs = None
            if mode != "frozen":
                start = time.perf_counter()
                weights = sf.sync(self.policy, self.plan)
                sync_secs = time.perf_counter() - start
            yield Step(
                number=number, rollout_version=batch.version, reward=float(rewards.mean()),
                drift=float(terms.drift), clipped=float(terms.clipped), entropy=float(terms.entropy),
                sample=task.text(np.asarray(batch.completions.tokens)[0]), sync_secs=sync_secs,
            )  # fmt: skip

    def draw(self, weights: dict[str, jax.Array]) -> Batch:
        """Starts the rollouts on new prompts, each to be answered `completions` times."""
        prompts = task.prompts(self._rng, self.options.prompts, self.options.largest)
        self._key, key = jax.random.split(self._key)
        version = min(self.plan.version.values())
        rows = np.repeat(prompts, self.options.completions, 0)
        return Batch(rollout.sample(weights, rows, key, sizes=SIZES, mesh=self.rollout_mesh), version)

    def train(self, completions: rollout.Completions) -> tuple[np.ndarray, objective.Terms]:
        """One step of the trainer; returns the rewards [prompts, completions] and the parts of the objective."""
        tokens, logps = (np.asarray(x) for x in completions)
        rewards = task.rewards(tokens).reshape(self.options.prompts, self.options.completions)
        batch = (tokens, logps, objective.advantages(rewards).ravel())
        placed = jax.device_put(batch, NamedSharding(self.trainer_mesh, P("fsdp")))
        return rewards, _train_step(self.policy, self.optimizer, *placed)


@functools.cache
def _transformation(learning_rate: float) -> optax.GradientTransformation:
    """Cached: the compiled train step is keyed by it."""
    return optax.chain(optax.clip_by_global_norm(MAX_GRADIENT_NORM), optax.adam(learning_rate))


@nnx.jit
def _train_step(
    policy: Policy, optimizer: nnx.Optimizer, tokens: jax.Array, rollout_logps: jax.Array, advantages: jax.Array
) -> objective.Terms:
    def loss(policy: Policy) -> tuple[jax.Array, objective.Terms]:
        logps = answer_logps(policy, tokens)
        terms = objective.terms(logps, chosen(logps, tokens), rollout_logps, advantages)
        return terms.loss, terms

    (_, terms), gradients = nnx.value_and_grad(loss, has_aux=True)(policy)
    optimizer.update(policy, gradients)
    return terms


if __name__ == "__main__":
    from shardfly_jax.__main__ import main

    sys.exit(main(["rl", *sys.argv[1:]]))
