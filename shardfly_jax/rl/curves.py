"""Reward curves as a matplotlib figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from shardfly_jax.plots import ShownFigure
from shardfly_jax.rl.grpo import Step
from shardfly_jax.rl.task import ALPHABET, ANSWER

COLOURS = ("#4477aa", "#ee7733", "#777777")
SMOOTHED = 10
"""Steps of the moving mean, at most."""


def plot_rewards(runs: Mapping[str, Sequence[Step]]) -> ShownFigure:
    """Reward per step of each run, thin, and its mean over the last steps, thick.

    Args:
      runs: Steps by label; up to three.
    """
    figure = ShownFigure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.subplots()
    for (label, steps), colour in zip(runs.items(), COLOURS, strict=False):
        numbers = [step.number for step in steps]
        rewards = [step.reward for step in steps]
        means = [np.mean(rewards[max(0, k - SMOOTHED + 1) : k + 1]) for k in range(len(rewards))]
        axes.plot(numbers, rewards, color=colour, alpha=0.35, linewidth=1)
        axes.plot(numbers, means, color=colour, linewidth=2.2, label=f"{label}: {means[-1]:.2f} at the end")
    chance = len(ALPHABET) ** -ANSWER
    axes.plot([], [], color="gray", alpha=0.35, linewidth=1, label=f"thin: a step; thick: mean of {SMOOTHED}")
    axes.axhline(chance, color="black", linewidth=0.8, linestyle=":", label=f"chance: {chance:.3f}")
    axes.set(title="GRPO: share of right sums among the rollouts' answers", xlabel="step", ylabel="reward")
    axes.set(ylim=(-0.03, 1.03), xlim=(1, max(len(steps) for steps in runs.values())))
    axes.grid(alpha=0.25)
    axes.legend(loc="upper left", frameon=False)
    return figure
