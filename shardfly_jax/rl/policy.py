"""The trainer's side: a small transformer in flax nnx, float32, sharded over the axes `fsdp` and `tp`."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from shardfly_jax.rl.task import ALPHABET, ANSWER, PROMPT

NORM_EPSILON = 1e-6


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Of the transformer; `kv_heads` divides `heads`."""

    layers: int = 2
    width: int = 32
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    mlp: int = 64


class _Weights:
    """Makes params of random values, each on its part of the mesh."""

    def __init__(self, mesh: Mesh, seed: int):
        self._mesh, self._rng = mesh, np.random.default_rng(seed)

    def __call__(self, shape: tuple[int, ...], std: float, *spec: str | None) -> nnx.Param[jax.Array]:
        values = self._rng.standard_normal(shape, np.float32) * np.float32(std)
        return nnx.Param(jax.device_put(values, NamedSharding(self._mesh, P(*spec))))

    def ones(self, *shape: int) -> nnx.Param[jax.Array]:
        return nnx.Param(jax.device_put(np.ones(shape, np.float32), NamedSharding(self._mesh, P())))


class Layer(nnx.Module):
    """Attention with grouped key and value heads, and a gated MLP; each behind a norm and added to its input."""

    def __init__(self, sizes: Sizes, weights: _Weights):
        d, h, std = sizes.width, sizes.head_dim, sizes.width**-0.5
        self.attention_norm, self.mlp_norm = weights.ones(d), weights.ones(d)
        self.q = weights((d, sizes.heads, h), std, "fsdp", "tp")
        self.k = weights((d, sizes.kv_heads, h), std, "fsdp", "tp")
        self.v = weights((d, sizes.kv_heads, h), std, "fsdp", "tp")
        self.o = weights((sizes.heads, h, d), (sizes.heads * h) ** -0.5, "tp", None, "fsdp")
        self.gate = weights((d, sizes.mlp), std, "fsdp", "tp")
        self.up = weights((d, sizes.mlp), std, "fsdp", "tp")
        self.down = weights((sizes.mlp, d), sizes.mlp**-0.5, "tp", "fsdp")

    def __call__(self, x: jax.Array) -> jax.Array:
        y = normed(x, self.attention_norm[...])
        q, k, v = (jnp.einsum("btd,dnh->btnh", y, w[...]) for w in (self.q, self.k, self.v))
        x = x + jnp.einsum("btnh,nhd->btd", attention(q, k, v), self.o[...])
        y = normed(x, self.mlp_norm[...])
        return x + (nnx.silu(y @ self.gate[...]) * (y @ self.up[...])) @ self.down[...]


class Policy(nnx.Module):
    """A decoder over the task's alphabet.

    Args:
      sizes: Of the transformer.
      mesh: With the axes `fsdp` and `tp`.
      seed: Of the initial weights.
    """

    def __init__(self, sizes: Sizes, mesh: Mesh, seed: int):
        weights = _Weights(mesh, seed)
        self.whole = NamedSharding(mesh, P())
        self.embed = weights((len(ALPHABET), sizes.width), 0.5, "tp", "fsdp")
        self.positions = weights((PROMPT + ANSWER, sizes.width), 0.5, None, "fsdp")
        self.layers = nnx.List([Layer(sizes, weights) for _ in range(sizes.layers)])
        self.norm = weights.ones(sizes.width)
        # Small, so that all answers are about equally likely at first.
        self.head = weights((sizes.width, len(ALPHABET)), 0.1 * sizes.width**-0.5, "fsdp", "tp")

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits of the next token: [batch, length, alphabet] for int32 [batch, length]."""
        table = jax.lax.with_sharding_constraint(self.embed[...], self.whole)  # gathered before it is looked up in
        x = table[tokens] + self.positions[...][: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return normed(x, self.norm[...]) @ self.head[...]


def normed(x: jax.Array, weight: jax.Array) -> jax.Array:
    """RMSNorm over the last axis."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + NORM_EPSILON) * weight


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention: q [batch, length, heads, head_dim], k and v with fewer heads, each for a run of q's."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) * q.shape[3] ** -0.5
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(jnp.where(causal, scores, -jnp.inf)), v)


def answer_logps(policy: Policy, tokens: jax.Array) -> jax.Array:
    """Log-probabilities of every token at each place of the answer: [batch, ANSWER, alphabet]."""
    return jax.nn.log_softmax(policy(tokens[:, :-1])[:, PROMPT - 1 :])


def chosen(logps: jax.Array, tokens: jax.Array) -> jax.Array:
    """Log-probabilities of the answers that stand in `tokens`: [batch, ANSWER]."""
    return jnp.take_along_axis(logps, tokens[:, PROMPT:, None], -1)[..., 0]
