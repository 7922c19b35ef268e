"""The rollouts' side: the same transformer as a tensor-parallel engine holds and runs it, bfloat16, in two replicas.

Nothing here reads a trainer's array: tokens come from the weights that `sf.sync` wrote.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import shardfly_jax as sf
from shardfly_jax.rl.policy import Sizes, attention, normed
from shardfly_jax.rl.task import ALPHABET, ANSWER, PROMPT

DTYPE = "bfloat16"

_layer = "layers.{i}."
MAPPING = sf.Mapping(
    {
        "embed_tokens.weight": sf.src("embed"),
        "embed_positions.weight": sf.src("positions"),
        _layer + "input_norm.weight": sf.src(_layer + "attention_norm"),
        _layer + "qkv_proj.weight": sf.fuse(  # each rank holds [q_r; k_r; v_r]
            *(sf.src(_layer + name).rearrange("d n h -> (n h) d") for name in "qkv"), axis=0
        ),
        _layer + "o_proj.weight": sf.src(_layer + "o").rearrange("n h d -> d (n h)"),
        _layer + "post_norm.weight": sf.src(_layer + "mlp_norm"),
        _layer + "gate_up_proj.weight": sf.fuse(
            *(sf.src(_layer + name).rearrange("d f -> f d") for name in ("gate", "up")), axis=0
        ),
        _layer + "down_proj.weight": sf.src(_layer + "down").rearrange("f d -> d f"),
        "norm.weight": sf.src("norm"),
        "lm_head.weight": sf.src("head").rearrange("d v -> v d"),
    }
)
"""From the names and axes of `Policy` to the engine's."""


class Completions(NamedTuple):
    """What the rollouts wrote.

    Attributes:
      tokens: int32 [batch, PROMPT + ANSWER], prompts with their answers.
      logps: float32 [batch, ANSWER], log-probability of each answer token under the weights that drew it.
    """

    tokens: jax.Array
    logps: jax.Array


def layout(sizes: Sizes, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """The engine's weights by name, cut over `tp`; no weight uses `replica`, so each replica holds all of them."""
    d, h, vocab = sizes.width, sizes.head_dim, len(ALPHABET)
    tensors: dict[str, tuple[tuple[int, ...], P]] = {
        "embed_tokens.weight": ((vocab, d), P()),
        "embed_positions.weight": ((PROMPT + ANSWER, d), P()),
        "norm.weight": ((d,), P()),
        "lm_head.weight": ((vocab, d), P("tp")),
    }
    for i in range(sizes.layers):
        tensors |= {
            f"layers.{i}.input_norm.weight": ((d,), P()),
            f"layers.{i}.qkv_proj.weight": (((sizes.heads + 2 * sizes.kv_heads) * h, d), P("tp")),
            f"layers.{i}.o_proj.weight": ((d, sizes.heads * h), P(None, "tp")),
            f"layers.{i}.post_norm.weight": ((d,), P()),
            f"layers.{i}.gate_up_proj.weight": ((2 * sizes.mlp, d), P("tp")),
            f"layers.{i}.down_proj.weight": ((d, sizes.mlp), P(None, "tp")),
        }
    return {
        name: jax.ShapeDtypeStruct(shape, DTYPE, sharding=NamedSharding(mesh, spec))
        for name, (shape, spec) in tensors.items()
    }


@functools.partial(jax.jit, static_argnames=("sizes", "mesh"))
def sample(
    weights: dict[str, jax.Array], prompts: jax.Array, key: jax.Array, *, sizes: Sizes, mesh: Mesh
) -> Completions:
    """Draws an answer to every prompt, at temperature 1.

    Args:
      weights: In `layout`'s names and shardings.
      prompts: int32 [batch, PROMPT]; the replicas take equal parts.
      key: Of the draws.
      sizes, mesh: Of the engine.
    """
    specs = {name: like.sharding.spec for name, like in layout(sizes, mesh).items()}
    # Of one rank; JAX cannot see that the ranks of a replica draw the same tokens from the same gathered logits.
    on_ranks = functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(specs, P("replica"), P()), out_specs=P("replica"), check_vma=False
    )

    @on_ranks
    def drawn(held: dict[str, jax.Array], tokens: jax.Array, key: jax.Array) -> Completions:
        held = {name: x.astype(jnp.float32) for name, x in held.items()}
        key = jax.random.fold_in(key, jax.lax.axis_index("replica"))
        logps = []
        for draw in jax.random.split(key, ANSWER):  # so short that a cache of keys and values would not pay
            all_logps = jax.nn.log_softmax(_last_logits(held, tokens, sizes))
            token = jax.random.categorical(draw, all_logps)[:, None]
            logps.append(jnp.take_along_axis(all_logps, token, 1))
            tokens = jnp.concatenate([tokens, token.astype(tokens.dtype)], 1)
        return Completions(tokens, jnp.concatenate(logps, 1))

    return drawn(weights, prompts, key)


def _last_logits(held: dict[str, jax.Array], tokens: jax.Array, sizes: Sizes) -> jax.Array:
    """Logits after the last token, [batch, alphabet], from what one rank of `tp` holds."""
    x = held["embed_tokens.weight"][tokens] + held["embed_positions.weight"][: tokens.shape[1]]
    for i in range(sizes.layers):
        mine = {name: held[f"layers.{i}.{name}.weight"] for name in _LAYER}
        qkv = (normed(x, mine["input_norm"]) @ mine["qkv_proj"].T).reshape(*tokens.shape, -1, sizes.head_dim)
        kv_heads = qkv.shape[2] * sizes.kv_heads // (sizes.heads + 2 * sizes.kv_heads)
        q, k, v = jnp.split(qkv, [-2 * kv_heads, -kv_heads], 2)
        x = x + jax.lax.psum(attention(q, k, v).reshape(*tokens.shape, -1) @ mine["o_proj"].T, "tp")
        gate, up = jnp.split(normed(x, mine["post_norm"]) @ mine["gate_up_proj"].T, 2, -1)
        x = x + jax.lax.psum((jax.nn.silu(gate) * up) @ mine["down_proj"].T, "tp")
    logits = normed(x[:, -1], held["norm.weight"]) @ held["lm_head.weight"].T
    return jax.lax.all_gather(logits, "tp", axis=1, tiled=True)


_LAYER = ("input_norm", "qkv_proj", "o_proj", "post_norm", "gate_up_proj", "down_proj")
