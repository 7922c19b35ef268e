"""GRPO's objective (Shao et al. 2024, DeepSeekMath, section 4.1), without its KL term: there is no reference model.

    A_k = (R_k - mean(R)) / std(R)                      over the completions of one prompt
    r   = p(token) / p_rollout(token)
    J   = mean over tokens of  min(r A, clip(r, 1 - eps, 1 + eps) A)  +  entropy bonus

The denominator of r is what the *rollout* reported when it drew the token. So r corrects for all that tells the
trainer's policy from the one that drew: weights one step older, and their rounding to bfloat16.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

CLIP = 0.2
ENTROPY_BONUS = 0.02
"""Without it the policy settles on wrong sums before it has tried the right ones."""
STD_EPSILON = 1e-4


class Terms(NamedTuple):
    """Parts of the objective, means over tokens.

    Attributes:
      gain: The clipped term.
      entropy: Of the policy, nats per token.
      drift: |r - 1|.
      clipped: Share of tokens whose r lies outside the clip range.
    """

    gain: jax.Array
    entropy: jax.Array
    drift: jax.Array
    clipped: jax.Array

    @property
    def loss(self) -> jax.Array:
        """What the trainer makes small."""
        return -(self.gain + ENTROPY_BONUS * self.entropy)


def advantages(rewards: np.ndarray) -> np.ndarray:
    """How much better than its group each completion is, in the group's standard deviations.

    Args:
      rewards: float32 [groups, completions].

    Returns:
      The same shape; zero in a group of equal rewards, from which nothing can be learned.
    """
    centred = rewards - rewards.mean(1, keepdims=True)
    return centred / (rewards.std(1, keepdims=True) + np.float32(STD_EPSILON))


def terms(all_logps: jax.Array, logps: jax.Array, rollout_logps: jax.Array, advantages: jax.Array) -> Terms:
    """The objective's parts, to be differentiated by what `all_logps` and `logps` depend on.

    Args:
      all_logps: [batch, tokens, alphabet], the policy's.
      logps: [batch, tokens], those of them that were drawn.
      rollout_logps: [batch, tokens], as the rollout reported them.
      advantages: [batch].
    """
    ratio, gain = jnp.exp(logps - rollout_logps), advantages[:, None]
    clipped = jnp.clip(ratio, 1 - CLIP, 1 + CLIP)
    return Terms(
        gain=jnp.mean(jnp.minimum(ratio * gain, clipped * gain)),
        entropy=-jnp.mean(jnp.sum(jnp.exp(all_logps) * all_logps, -1)),
        drift=jnp.mean(jnp.abs(ratio - 1)),
        clipped=jnp.mean(ratio != clipped),
    )
