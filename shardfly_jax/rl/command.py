"""The command `rl`: runs the loop, shows its progress, draws its rewards."""

from __future__ import annotations

import sys
from pathlib import Path

import jax
from flax import nnx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from shardfly_jax.rl.curves import SMOOTHED, plot_rewards
from shardfly_jax.rl.grpo import Loop, Step
from shardfly_jax.rl.options import MODES, Options
from shardfly_jax.wording import bytes_text, secs_text

ROWS = 8
"""Of the table at the end, at most."""


def run(options: Options, plot: Path) -> int:
    """Runs the loop and prints its table; the exit status.

    Raises:
      PlanError: JAX has too few devices.
      OSError: The picture cannot be written.
    """
    console = Console(width=110) if not sys.stdout.isatty() else Console()
    plot.parent.mkdir(parents=True, exist_ok=True)
    loop = Loop(options)
    parameters = sum(x.size for x in jax.tree.leaves(nnx.state(loop.policy, nnx.Param)))
    console.print(
        f"{parameters:,} parameters: trainer fsdp 2 x tp 2, float32 -> 2 rollouts of TP 2, bfloat16, on "
        f"{loop.plan.ranks} {jax.devices()[0].platform} devices; {bytes_text(loop.plan.nbytes)} per sync, "
        f"{bytes_text(loop.plan.egress_nbytes)} of them from the trainer\n"
        f"{options.mode}: {MODES[options.mode]}"
    )
    steps: list[Step] = []
    versions = "trained v{task.fields[trained]} on v{task.fields[drew]}'s tokens"
    columns = (
        BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("reward {task.fields[reward]:.2f}, " + versions),
    )  # fmt: skip
    with Progress(*columns, console=console) as bars:
        bar = bars.add_task("", total=options.steps, reward=0.0, trained=1, drew=1)
        for step in loop:
            steps.append(step)
            bars.update(bar, advance=1, reward=step.reward, trained=step.trainer_version, drew=step.rollout_version)
    plot_rewards({options.mode: steps}).savefig(plot, format="png")
    console.print(_table(steps))
    console.print(f"rewards drawn: {plot}")
    return 0


def _table(steps: list[Step]) -> Table:
    """Some steps, from the first to the last."""
    out = Table(caption=f"reward: mean of the last {SMOOTHED} steps or fewer; the rest: of this step")
    for name in ("step", "trained", "tokens of", "reward", "|ratio - 1|", "clipped", "entropy", "sync", "an answer"):
        out.add_column(name, justify="right")
    edges = sorted({round(1 + k * (len(steps) - 1) / (ROWS - 1)) for k in range(ROWS)})
    for edge in edges:
        step, last = steps[edge - 1], steps[max(0, edge - SMOOTHED) : edge]
        mean = sum(s.reward for s in last) / len(last)
        out.add_row(
            str(step.number), f"v{step.trainer_version}", f"v{step.rollout_version}", f"{mean:.2f}",
            f"{step.drift:.4f}", f"{step.clipped:.3f}", f"{step.entropy:.2f}",
            "-" if step.sync_secs is None else secs_text(step.sync_secs), step.sample,
        )  # fmt: skip
    return out
