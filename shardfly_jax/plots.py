"""`plot_plan`, `plot_timeline`: a plan as matplotlib figures, without pyplot and its global state."""

from __future__ import annotations

import io

import numpy as np

from shardfly_jax.contiguity import RUN_CLASSES, runs
from shardfly_jax.sharding.plan import Plan
from shardfly_jax.sharding.schedule import LENGTH
from shardfly_jax.wording import bytes_text

try:
    from matplotlib.axes import Axes
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
except ImportError as error:
    raise ImportError("plots need matplotlib, which is not installed. Run: pip install 'shardfly-jax[plot]'") from error

DIRECT, FORWARDED, SENT = "#4477aa", "#ee9944", "#99aabb"
ALIKE, REORDERED = "#44aa99", "#aa4499"
CELL_RANKS = 12
"""Up to so many ranks, each cell of the heat map says its bytes."""
LABELS = 16
"""Ranks that are named on an axis, at most."""
SMALLEST_LABELLED = 0.2
"""Share of the heat map below which a side has no room for a label."""
SLICES = 100
"""Of the order line, in a timeline."""
TIMELINE_RANKS = 8
"""Of each side, in a timeline, at most."""
TIMELINE_HEIGHT = 0.45
"""Of the most bytes in a slice, by any rank of a side; a row is 1 high."""


class ShownFigure(Figure):
    """A figure that notebooks show although pyplot does not know it."""

    def _repr_png_(self) -> bytes:
        out = io.BytesIO()
        self.savefig(out, format="png")
        return out.getvalue()


def plot_plan(plan: Plan) -> Figure:
    """Traffic between ranks, bytes in and out of each rank, and bytes by length of run, side by side."""
    figure = ShownFigure(figsize=(16.5, 5.4), dpi=100, layout="constrained")
    figure.suptitle(
        f"Plan {plan.digest[:12]}: {bytes_text(plan.nbytes)} from {plan.source_ranks} trainer to {plan.target_ranks} "
        f"rollout ranks, {bytes_text(plan.egress_nbytes)} of them sent by trainers"
    )
    heat, bars, lengths = figure.subplots(1, 3, width_ratios=(1.15, 1.2, 0.9))
    traffic = plan.traffic()
    np.fill_diagonal(traffic, 0)
    _traffic(plan, traffic, figure, heat)
    _ranks(plan, traffic, bars)
    _runs(plan, lengths)
    return figure


def _bytes_axis(value: float, _: object = None) -> str:
    return bytes_text(abs(value)) if value else "0"


def _name_ranks(plan: Plan, axes: Axes, *, x: bool, y: bool = False) -> None:
    step = next(s for s in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, plan.ranks) if plan.ranks <= s * LABELS)
    places = list(range(0, plan.ranks, step))
    for axis in [axes.xaxis] * x + [axes.yaxis] * y:
        axis.set_ticks(places)
        axis.set_minor_locator(NullLocator())


def _traffic(plan: Plan, traffic: np.ndarray, figure: Figure, axes: Axes) -> None:
    shown = np.ma.masked_equal(traffic, 0)
    top = max(int(traffic.max()), 1)
    bottom = min(int(shown.min()) if shown.count() else 1, top / 10)
    norm = LogNorm(bottom, top)
    image = axes.imshow(shown, norm=norm, cmap="viridis", interpolation="nearest", aspect="equal")
    border = plan.source_ranks - 0.5
    axes.axhline(border, color="black", linewidth=1.2)
    axes.axvline(border, color="black", linewidth=1.2)
    _name_ranks(plan, axes, x=True, y=True)
    axes.set(title="payload from rank to rank", xlabel="to rank", ylabel="from rank")
    beside = plan.ranks - 0.5 + 0.02 * plan.ranks
    halves = (("trainers", 0, plan.source_ranks), ("rollouts", plan.source_ranks, plan.target_ranks))
    for side, first, count in halves:
        if count > SMALLEST_LABELLED * plan.ranks:
            axes.text(beside, first + count / 2 - 0.5, side, rotation=270, ha="left", va="center", color="gray")
    if min(plan.source_ranks, plan.target_ranks) > SMALLEST_LABELLED * plan.ranks:
        x, y = plan.source_ranks / 2 - 0.5, plan.source_ranks + plan.target_ranks / 2 - 0.5
        axes.text(x, y, "trainers\nreceive nothing", ha="center", va="center", color="gray", fontsize=9)
    if plan.ranks <= CELL_RANKS:
        for s, t in np.argwhere(traffic).tolist():
            dark = norm(traffic[s, t]) < 0.6
            axes.text(
                t, s, bytes_text(traffic[s, t], short=True), ha="center", va="center", fontsize=8,
                color="white" if dark else "black",
            )  # fmt: skip
    bar = figure.colorbar(image, ax=axes, format=FuncFormatter(_bytes_axis), shrink=0.9, pad=0.04)
    bar.ax.yaxis.set_major_locator(LogLocator(numticks=8))
    bar.ax.yaxis.set_minor_locator(NullLocator())


def _ranks(plan: Plan, traffic: np.ndarray, axes: Axes) -> None:
    ranks = np.arange(plan.ranks)
    direct, forwarded = traffic[: plan.source_ranks].sum(axis=0), traffic[plan.source_ranks :].sum(axis=0)
    width = 0.8 if plan.ranks <= 64 else 1.0
    axes.bar(ranks, direct, width, color=DIRECT, label="in, from trainers")
    axes.bar(ranks, forwarded, width, bottom=direct, color=FORWARDED, label="in, from rollouts")
    axes.bar(ranks, -traffic.sum(axis=1), width, color=SENT, label="out")
    axes.axhline(0, color="black", linewidth=0.8)
    axes.axvline(plan.source_ranks - 0.5, color="black", linewidth=1.2)
    axes.set(title="bytes in (up) and out (down) of each rank\ntrainers | rollouts", xlim=(-0.7, plan.ranks - 0.3))
    axes.yaxis.set_major_formatter(FuncFormatter(_bytes_axis))
    axes.yaxis.set_major_locator(MaxNLocator(8))
    _name_ranks(plan, axes, x=True)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.07), ncols=3, fontsize=9, frameon=False)


def _runs(plan: Plan, axes: Axes) -> None:
    found = runs(plan)
    total = found.alike + found.reordered
    places = np.arange(len(RUN_CLASSES))
    axes.barh(places, found.alike, color=ALIKE, label="same on both sides")
    axes.barh(places, found.reordered, left=found.alike, color=REORDERED, label="reordered (transposes)")
    for place, nbytes in zip(places.tolist(), total.tolist(), strict=True):
        axes.annotate(f" {bytes_text(nbytes)}", (nbytes, place), va="center", fontsize=9)
    element = int(found.element.sum())
    axes.set(
        title=f"bytes written by length of contiguous run\n({bytes_text(element)} need the element path)",
        xlim=(0, max(int(total.max()) * 1.25, 1)),
    )
    axes.set_yticks(places, RUN_CLASSES)
    axes.invert_yaxis()
    axes.xaxis.set_major_formatter(FuncFormatter(_bytes_axis))
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.legend(loc="upper center", bbox_to_anchor=(0.4, -0.07), ncols=2, fontsize=9, frameon=False)


def plot_timeline(plan: Plan, first: float = 0.0, last: float = 1.0) -> Figure:
    """What each rank receives (up) and sends (down) along the plan's order, trainers and rollouts each on a scale.

    Of many ranks only those of each side are shown that move most. The order says what comes before what; it is no
    clock.

    Args:
      plan: The plan.
      first, last: The part of the order that is shown, as shares of it.
    """
    direct, forwarded, sent = flows_by_slice(plan, first, last)
    received = direct + forwarded
    busy = (received + sent).sum(axis=1)
    edges = np.linspace(100 * first, 100 * last, SLICES + 1)
    figure = ShownFigure(dpi=100, layout="constrained")
    axes = figure.subplots()
    labels: list[str] = []
    highest: list[str] = []
    for side, ranks in (("trainer", range(plan.source_ranks)), ("rollout", range(plan.source_ranks, plan.ranks))):
        shown = sorted(sorted(ranks, key=lambda rank: -busy[rank])[:TIMELINE_RANKS])
        top = max(received[shown].max(), sent[shown].max(), 1.0)
        highest.append(f"{bytes_text(top)} of a {side}")
        axes.axhline(len(labels) - 0.5, color="black", linewidth=1.5)
        for rank in shown:
            row = len(labels)
            axes.axhline(row, color="black", linewidth=0.3)
            lanes = ((0, direct[rank], DIRECT), (direct[rank], received[rank], FORWARDED), (0, -sent[rank], SENT))
            for low, high, colour in lanes:
                ends = (row - TIMELINE_HEIGHT * x / top + np.zeros(SLICES) for x in (high, low))  # rows count downwards
                axes.stairs(next(ends), edges, baseline=next(ends), fill=True, color=colour)
            labels.append(f"{side} {rank}")
        if len(ranks) > len(shown):
            labels.append(f"and {len(ranks) - len(shown)} more {side}s")
    figure.set_size_inches(11, 1.6 + 0.45 * len(labels))
    axes.set_yticks(range(len(labels)), labels)
    axes.set(xlabel="place in the plan's order, %", xlim=(edges[0], edges[-1]), ylim=(len(labels) - 0.5, -0.5))
    axes.set_title(f"What moves when, in the plan's order; highest in 1/{SLICES} of the picture: {', '.join(highest)}")
    kinds = {"in, from trainers": DIRECT, "in, from rollouts": FORWARDED, "out": SENT}
    figure.legend([Patch(color=colour) for colour in kinds.values()], kinds, loc="outside lower center", ncols=3)
    return figure


def flows_by_slice(plan: Plan, first: float, last: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bytes received from trainers, received from rollouts, and sent, in each slice: float64 [ranks, SLICES]."""
    moves = plan.moves
    rows, ks = moves.expanded()
    travels = (moves.source_rank >= 0) & (moves.source_rank != moves.target_rank)
    rows, ks = (x[travels[rows]] for x in (rows, ks))
    start = (moves.order[rows] + ks * moves.order_step[rows]).astype(np.float64)
    span = np.maximum(moves.order_span[rows], 1).astype(np.float64)
    nbytes = (plan.row_nbytes // moves.count)[rows]
    whole = max(LENGTH, (start + span).max(initial=0))
    edges = np.linspace(first * whole, last * whole, SLICES + 1)
    source, target = moves.source_rank[rows], moves.target_rank[rows]
    from_trainer = source < plan.source_ranks

    def flow(here: np.ndarray) -> np.ndarray:
        return np.diff(np.clip((edges[:, None] - start[here]) / span[here], 0, 1), axis=0) @ nbytes[here]

    ranks = range(plan.ranks)
    direct = [flow((target == rank) & from_trainer) for rank in ranks]
    forwarded = [flow((target == rank) & ~from_trainer) for rank in ranks]
    return np.array(direct), np.array(forwarded), np.array([flow(source == rank) for rank in ranks])
