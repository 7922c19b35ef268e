"""`explain`: a plan as plain text. Every figure is read from the plan's moves.

Bytes are decimal (1 GB = 10^9 bytes) and counted after conversion. *Payload* is what travels between ranks; *written*
adds copies within a rank and fills.
"""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
from rich.box import SIMPLE
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from shardfly_jax.contiguity import RUN_CLASSES, runs
from shardfly_jax.sharding.families import Family
from shardfly_jax.sharding.language import Scales
from shardfly_jax.sharding.mapping import matches
from shardfly_jax.sharding.plan import Plan
from shardfly_jax.sharding.simulate import simulate
from shardfly_jax.sharding.topology import Topology
from shardfly_jax.sharding.walks import nodes, quantized
from shardfly_jax.wording import COPY, bytes_text, in_words, ranks_text, share_text, some, type_text

WIDTH = 110
MATRIX_RANKS = 16
"""Up to so many ranks, traffic is shown as a matrix; beyond, as the fullest links."""
TOP_FAMILIES = 15
TOP_LINKS = 10


def explain(plan: Plan, topology: Topology | None, assumed: bool = False) -> str:
    """Who sends what to whom, converted how, in runs of which length, and how long it would take.

    Args:
      plan: The plan.
      topology: None for a plan whose devices are CPUs: no time is predicted.
      assumed: Whether nobody has named it.

    Returns:
      Lines of at most 110 characters, without colour codes.

    Raises:
      PlanError: The topology has fewer places than the plan has ranks.
    """
    traffic = plan.traffic()
    return rendered(
        _head(plan),
        _summary(plan, traffic, topology, assumed),
        *_transport(plan),
        *_rescaled(plan),
        "Targets",
        _families(plan),
        Text("boxes: distinct boxes / ranks that hold one; written: payload, copies within a rank and fills"),
        *_without_scales(plan),
        "Conversions",
        _conversions(plan),
        "Who sends what to whom",
        *(_matrix(plan, traffic) if plan.ranks <= MATRIX_RANKS else _top_links(plan, traffic)),
        _balance(plan, traffic),
        "Forwarding among ranks that need the same bytes",
        _forwarding(plan),
        "Contiguous runs, on the side where they are shorter",
        _runs(plan),
        Text(
            "Reordered: not contiguous in the same axis on both sides, e.g. a transpose; the run is the shorter row.\n"
            "Element path: on some side a run, an offset or a stride is no multiple of 16 bytes, as bulk copies need."
        ),
    )


def _transport(plan: Plan) -> list[Text]:
    """How payload reaches other processes, and why not faster; nothing for a plan of one process."""
    session = getattr(plan, "session", None)  # of a plan that users hold
    part = session.part if session is not None else None
    if part is None:
        return []
    held = ", ".join(map(str, sorted(part.held)))
    lines = [f"Transport: {part.transport}; ranks of this process: {held}"]
    lines += [f"  not {name}: {reason}" for name, reason in part.passed_over.items()]
    return [Text("\n".join(lines))]


def _rescaled(plan: Plan) -> list[Text]:
    """What was kept of the plan before; nothing for a plan that has replaced none."""
    session = getattr(plan, "session", None)
    done = session.rescaled if session is not None else None
    if done is None:
        return []
    kept, made, freed = (bytes_text(n) for n in (done.kept_nbytes, done.allocated_nbytes, done.freed_nbytes))
    lines = [
        f"Rescaled: {done.kept:,} buffers kept ({kept}), {done.allocated:,} allocated ({made}), "
        f"{done.freed:,} freed ({freed})",
    ]
    if done.kernels + done.compiled:
        lines.append(f"  {done.kernels} kernels used again, {done.compiled} compiled")
    for what, names in (("go on serving", done.serving), ("wait for an update", done.joined)):
        if names:
            lines.append(f"  {what}: {some(names, 6)}")
    return [Text("\n".join(lines))]


def rendered(*parts: RenderableType) -> str:
    """Tables as plain text; a string becomes a heading."""
    out = io.StringIO()
    console = Console(
        file=out, width=WIDTH, color_system=None, force_terminal=False, force_jupyter=False, force_interactive=False,
        markup=False, highlight=False, emoji=False, legacy_windows=False,
    )  # fmt: skip
    for part in parts:
        if isinstance(part, str):
            console.print()
            console.print(part)
            console.print("=" * min(len(part), WIDTH))
        else:
            console.print(part)
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    kept = [line for k, line in enumerate(lines) if line or (k and lines[k - 1])]
    return "\n".join(kept).strip("\n") + "\n"


def table(*columns: str, left: int = 1, footer: Sequence[str] | None = None) -> Table:
    """An empty table: the first `left` columns are text, the others figures."""
    feet = footer if footer is not None else [""] * len(columns)
    out = Table(box=SIMPLE, pad_edge=False, collapse_padding=True, show_edge=False, show_footer=footer is not None)
    for k, (name, foot) in enumerate(zip(columns, feet, strict=True)):
        if k < left:
            out.add_column(name, foot, overflow="fold")
        else:
            out.add_column(name, foot, justify="right", no_wrap=True)
    return out


# Sections


def _head(plan: Plan) -> str:
    trees = list(dict.fromkeys(replica.tree for replica in plan.replicas))
    replicas = f"{len(plan.replicas)} replicas of " if len(plan.replicas) > len(trees) else ""
    return (
        f"Plan {plan.digest[:12]}: {plan.source_ranks} trainer -> {plan.target_ranks} rollout ranks, "
        f"{replicas}{some(trees, 3)}"
    )


def _summary(plan: Plan, traffic: np.ndarray, topology: Topology | None, assumed: bool) -> Table:
    local = int(np.trace(traffic[plan.source_ranks :, plan.source_ranks :]))
    fills = (plan.moves.source_rank < 0) & ~np.isin(plan.moves.target_family, plan.staging_families)
    filled = int(plan.row_nbytes[fills].sum())
    egress, broadcast = plan.egress_nbytes, plan.broadcast_nbytes
    forwarded = plan.nbytes - egress - plan.exchange_nbytes
    targets = [plan.families[k] for k in plan.target_families]
    sources = [plan.families[k] for k in plan.source_families]
    out = Table.grid(padding=(0, 2))
    out.add_column(no_wrap=True)
    out.add_column(overflow="fold")
    trainers, rollouts = range(plan.source_ranks), range(plan.source_ranks, plan.ranks)
    out.add_row("ranks", f"trainers {ranks_text(trainers)}; rollouts {ranks_text(rollouts)}")
    replicas = some([f"{replica.name} (ranks {ranks_text(replica.ranks)})" for replica in plan.replicas], 6)
    out.add_row("replicas", f"{len(plan.replicas)}: {replicas}")
    out.add_row(
        "tensors",
        f"{sum(f.count for f in sources):,} sources of {len(sources)} patterns -> "
        f"{sum(f.count for f in targets):,} targets of {len(targets)} patterns",
    )
    out.add_row(
        "moves",
        f"{len(plan.moves):,}, which stand for {int(plan.moves.count.sum()):,} with all layers; "
        f"table {bytes_text(plan.moves.nbytes)}",
    )
    out.add_row(
        "payload",
        f"{bytes_text(plan.nbytes)}: {bytes_text(egress)} from trainers, {bytes_text(forwarded)} forwarded"
        + (f"; besides, {bytes_text(local)} are copied within a rank" if local else "")
        + (f"; {bytes_text(filled)} are fills" if filled else ""),
    )
    times = f" ({broadcast / egress:.3g}x)" if egress else ""
    themselves = ", as trainers send to several replicas themselves" if egress > 1.01 * plan.distinct_nbytes else ""
    out.add_row(
        "trainer egress",
        f"{bytes_text(egress)}{themselves}; "
        f"one broadcast of everything to every replica costs {bytes_text(broadcast)}{times}",
    )
    out.add_row(
        "staging",
        f"{bytes_text(plan.staging_nbytes)} beside sources and targets"
        + (f"; {bytes_text(plan.exchange_nbytes)} of block maxima go between trainers" if plan.staging_nbytes else ""),
    )
    of_ranks = [f.pattern for f in targets if (q := quantized(f.expr)) and q.format.scope == "rank"]  # type: ignore[arg-type]
    if of_ranks:
        names = some(list(dict.fromkeys(of_ranks)), 4)
        out.add_row("rank scales", f"{names}: a scale over what a rank holds; it changes with the number of ranks")
    _add_leftovers(out, plan)
    if topology is None:
        out.add_row("predicted", 'no time: all devices are CPUs. plan.explain("h100") says what H100s would take')
    else:
        _add_prediction(out, plan, traffic, topology, assumed)
    return out


def _add_prediction(out: Table, plan: Plan, traffic: np.ndarray, topology: Topology, assumed: bool) -> None:
    predicted = simulate(plan, topology)
    host = topology.host_of(np.arange(plan.ranks))
    crossing = int(traffic[host[:, None] != host[None, :]].sum())
    nic = f", NIC {bytes_text(topology.nic_rate)}/s" if topology.nic_rate else ""
    rates = f"NVLink {bytes_text(topology.nvlink_rate)}/s{nic} per GPU and direction"
    out.add_row("topology", f"{topology.name}{' (assumed, as none was named)' if assumed else ''}: {rates}")
    if topology.hosts > 1:
        out.add_row("between hosts", f"{bytes_text(crossing)}, {share_text(crossing, plan.nbytes)} of the payload")
    out.add_row("predicted", f"{predicted.outcome}; busiest link: {predicted.busiest}")


def _add_leftovers(out: Table, plan: Plan) -> None:
    """Kept targets and unused sources; a loaded plan knows only the patterns of the former."""
    trees = getattr(plan, "targets", {}).values()
    if plan.keep:
        known = sum(1 for tree in trees for name in tree.tensors if matches(name, plan.keep))
        count = f"{known} targets: " if trees else ""
        out.add_row("kept", f"{count}{some(plan.keep, 6)}; never touched")
    source = getattr(plan, "source", None)
    if source is not None:
        used = {name for k in plan.source_families for name in plan.families[k].names}
        idle = [name for name in source.tensors if name not in used]
        if idle:
            out.add_row("unused", f"{len(idle)} sources: {some(idle, 6)}")


def _families(plan: Plan) -> Table:
    moving = wire(plan)
    families = len(plan.families)
    payload = np.zeros(families, np.int64)
    np.add.at(payload, plan.moves.target_family[moving], plan.row_nbytes[moving])
    written = np.zeros(families, np.int64)
    np.add.at(written, plan.moves.target_family, plan.row_nbytes)
    moves = np.bincount(plan.moves.target_family, minlength=families)
    staged = list(plan.staging_families)
    written[staged], payload[staged] = 0, 0
    order = sorted(plan.target_families, key=lambda k: (-int(written[k]), k))
    total = ("all", "", "", "", bytes_text(written.sum()), bytes_text(payload.sum()), f"{len(plan.moves):,}")
    out = table("pattern", "type", "layer", "boxes", "written", "payload", "moves", footer=total)
    several = len({plan.families[k].tree for k in plan.target_families}) > 1
    for k in order[:TOP_FAMILIES]:
        family, layout = plan.families[k], plan.families[k].layout
        last = family.first + family.count - 1
        layers = "-" if "{" not in family.pattern else f"{family.first}-{last}" if family.count > 1 else f"{last}"
        tree = f"{family.tree}: " if several else ""
        held = len(layout.holders)
        out.add_row(
            f"{tree}{family.pattern}{_meaning(family)}",
            type_text(layout.dtype, layout.shape), layers, f"{held}/{len(layout.ranks)}",
            bytes_text(written[k]), bytes_text(payload[k]), f"{moves[k]:,}",
        )  # fmt: skip
    rest = order[TOP_FAMILIES:]
    if rest:
        sums = (bytes_text(written[rest].sum()), bytes_text(payload[rest].sum()), f"{moves[rest].sum():,}")
        out.add_row(f"{len(rest)} smaller patterns", "", "", "", *sums)
    return out


def _without_scales(plan: Plan) -> list[Text]:
    """The codes whose scales no target of their tree gets; nothing where there are none."""
    families = [plan.families[k] for k in plan.target_families]
    scaled = {
        (family.tree, node.value, node.format, node.segments)
        for family in families
        for node in (nodes(family.expr) if family.expr is not None else ())
        if isinstance(node, Scales)
    }
    bare = [
        family.pattern
        for family in families
        if family.expr is not None
        and (codes := quantized(family.expr)) is not None
        and (family.tree, codes.value, codes.format, codes.segments) not in scaled
    ]
    return [Text(f"codes without a target for their scales (sf.scale_of): {some(bare, 3)}")] if bare else []


def _meaning(family: Family) -> str:
    """A second line where the target is no plain copy."""
    if family.alias_of:
        return f"\n  alias of {family.alias_of}"
    text = in_words(family.expr) if family.expr is not None else COPY
    return "" if text == COPY else f"\n  {text}"


def _conversions(plan: Plan) -> Table:
    convert = plan.moves.convert
    nbytes = np.zeros(len(plan.conversions), np.int64)
    np.add.at(nbytes, convert, plan.row_nbytes)
    moves = np.bincount(convert, minlength=len(plan.conversions))
    out = table("conversion", "written", "share", "moves")
    for k, conversion in enumerate(plan.conversions):
        share = share_text(nbytes[k], int(nbytes.sum()))
        out.add_row(conversion.describe(), bytes_text(nbytes[k]), share, f"{moves[k]:,}")
    return out


def wire(plan: Plan) -> np.ndarray:
    """bool [rows]: travels between ranks, so is neither a fill nor a copy within a rank."""
    return (plan.moves.source_rank >= 0) & (plan.moves.source_rank != plan.moves.target_rank)


def _matrix(plan: Plan, traffic: np.ndarray) -> list[RenderableType]:
    senders = np.nonzero(traffic.sum(axis=1))[0].tolist()
    takers = np.nonzero(traffic.sum(axis=0))[0].tolist()
    off = traffic - np.diag(np.diag(traffic))
    total = ("sum", *(bytes_text(off[:, t].sum(), short=True) for t in takers), bytes_text(off.sum(), short=True))
    out = table("from \\ to", *(str(t) for t in takers), "sum", footer=total)
    for s in senders:
        cells = [_cell(traffic[s, t], within=s == t) for t in takers]
        side = "trainer" if s < plan.source_ranks else "rollout"
        out.add_row(f"{side} {s}", *cells, bytes_text(off[s].sum(), short=True))
    note = "(in brackets): copied within the rank, no payload\n" if np.trace(traffic) else ""
    return [out, Text(note)]


def _cell(nbytes: int, within: bool) -> str:
    if not nbytes:
        return "."
    text = bytes_text(nbytes, short=True)
    return f"({text})" if within else text


def _top_links(plan: Plan, traffic: np.ndarray) -> list[RenderableType]:
    off = traffic - np.diag(np.diag(traffic))
    order = np.argsort(-off.ravel(), kind="stable")[:TOP_LINKS]
    busy = int(np.count_nonzero(off))
    out = table(f"the fullest of {busy:,} pairs", "from", "to", "payload")
    for cell in order.tolist():
        s, t = divmod(cell, plan.ranks)
        if off[s, t]:
            how = "trainer to rollout" if s < plan.source_ranks else "forwarded"
            out.add_row(how, str(s), str(t), bytes_text(off[s, t]))
    return [out, Text("")]


def _balance(plan: Plan, traffic: np.ndarray) -> Table:
    off = traffic - np.diag(np.diag(traffic))
    direct, forwarded = off[: plan.source_ranks], off[plan.source_ranks :]
    sides = [
        ("trainers send", direct.sum(axis=1)),
        ("rollouts receive from trainers (first hop)", direct[:, plan.source_ranks :].sum(axis=0)),
        ("rollouts receive from rollouts", forwarded[:, plan.source_ranks :].sum(axis=0)),
        ("rollouts receive", off[:, plan.source_ranks :].sum(axis=0)),
        ("rollouts send", forwarded.sum(axis=1)),
    ]
    out = table("per rank", "min", "mean", "max", "max/mean", "sum")
    for name, values in sides:
        mean = float(values.mean())
        ratio = f"{values.max() / mean:.3f}" if mean else "-"
        out.add_row(name, *(bytes_text(v) for v in (values.min(), mean, values.max())), ratio, bytes_text(values.sum()))
    return out


def _forwarding(plan: Plan) -> Table:
    moves, nbytes = plan.moves, plan.row_nbytes
    sharing = sharing_sets(plan)
    size_of_band = np.ones(len(plan.bands) + 1, np.int64)  # the last stands for -1: not forwarded
    for ranks, bands in sharing.items():
        size_of_band[bands] = len(ranks)
    size = size_of_band[moves.band]
    direct = (moves.source_rank >= 0) & (moves.source_rank < plan.source_ranks)
    direct &= ~np.isin(moves.target_family, plan.staging_families)
    passed = wire(plan) & (moves.source_rank >= plan.source_ranks)

    def figures(here: np.ndarray, bands_of_sets: list[list[int]]) -> tuple[str, ...]:
        sums = bytes_text(nbytes[here & direct].sum()), bytes_text(nbytes[here & passed].sum())
        if not bands_of_sets:
            return ("-", "-", *sums, "-")
        chain = int(moves.hop[here & (size > 1)].max())
        return (f"{len(bands_of_sets):,}", f"{sum(map(len, bands_of_sets)):,}", *sums, str(chain))

    total = ("all", *figures(size > 0, list(sharing.values())))
    out = table("ranks that share", "sets", "bands", "from trainers", "forwarded", "longest chain", footer=total)
    for n in np.unique(size).tolist():
        shared = [bands for ranks, bands in sharing.items() if len(ranks) == n]
        out.add_row(str(n) if n > 1 else "1 (nothing to forward)", *figures(size == n, shared))
    return out


def sharing_sets(plan: Plan) -> dict[tuple[int, ...], list[int]]:
    """Sets of two or more ranks that need the same bytes, and the bands that are forwarded among them."""
    moves = plan.moves
    banded = np.nonzero(moves.band >= 0)[0]
    takers: dict[int, list[int]] = {}
    for cell in np.unique(moves.band[banded].astype(np.int64) * plan.ranks + moves.target_rank[banded]).tolist():
        takers.setdefault(cell // plan.ranks, []).append(cell % plan.ranks)
    sets: dict[tuple[int, ...], list[int]] = {}
    for band, ranks in takers.items():
        if len(ranks) > 1:
            sets.setdefault(tuple(ranks), []).append(band)
    return sets


def _runs(plan: Plan) -> Table:
    found = runs(plan)
    columns = [found.alike, found.reordered, found.element]
    sums = [bytes_text(c.sum()) for c in columns]
    whole = int(plan.row_nbytes.sum())
    shares = [share_text(c.sum(), whole) for c in columns]
    total = ("all", "100.0%", sums[0], sums[1], f"{sums[2]} ({shares[2]})")
    out = table("run", "share", "same on both sides", "reordered", "needs the element path", footer=total)
    for k, name in enumerate(RUN_CLASSES):
        share = share_text(found.alike[k] + found.reordered[k], whole)
        out.add_row(name, share, *(bytes_text(c[k]) for c in columns))
    return out
