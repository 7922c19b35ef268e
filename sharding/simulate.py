"""Predicts the time of an update on a topology from the plan's own schedule.

The order line is cut into slots, and each slot into hops. In each, every GPU sends its chunks over its links, and
receives what others send it. A GPU starts when its links are free; a forward starts when everything that its GPU
received one hop earlier in the slots before has arrived; a sender is ahead of its receivers by what its blocks hold,
a slot at least. So imbalance in time, the filling of chains and idle links cost what they would cost.

Bytes are priced by `rates.Stores`: by the run that a move writes contiguously, and by how much a GPU's NVLink is used
both ways. An update's launches are added once. Not priced: runs on the source side, moves that must go
element by element, and how many bytes a NIC or a transport stages.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np

from shardfly_jax.sharding.bounds import Bound, Needs, bound_of, needs_of
from shardfly_jax.sharding.formats import itemsize
from shardfly_jax.sharding.moves import contiguous
from shardfly_jax.sharding.plan import Plan
from shardfly_jax.sharding.rates import LINKS, MEMORY, NVLINK
from shardfly_jax.sharding.records import TILE_NBYTES
from shardfly_jax.sharding.schedule import CHUNK_NBYTES, LAG, LENGTH
from shardfly_jax.sharding.topology import Topology
from shardfly_jax.sharding.units import secs_text

SLOTS = LENGTH // LAG
IN_FLIGHT_NBYTES = 116 * 2 * TILE_NBYTES
"""How far a GPU can be ahead of one that it sends to: 116 blocks, one per SM but for those that a kernel with company
leaves free, hold a batch of two tiles each, taken in the plan's order. A slot is taken where that is more."""
MOST_SLOTS_AHEAD = 16
"""Further ahead changes nothing: a slot of such a GPU is less than half a megabyte."""

AS_BUSY = 0.999
"""Of the time of the busiest link, for which one is as busy: norms, say, make small differences."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Simulation:
    """A predicted update. Printed, it is its topology, `outcome` and busiest link.

    Attributes:
      topology: Where it would run.
      needs: What must get where.
      secs: Predicted time, launches included.
      launch_secs: Of that, what launches cost.
      bound: What no plan can be faster than on these links (`bounds`).
      stores_bound_secs: The same with what the kernel's stores reach instead of what the links can carry.
      busiest: Which link the plan uses longest, and how many others it uses as long to a thousandth, for people.
    """

    topology: Topology
    needs: Needs
    secs: float
    launch_secs: float
    bound: Bound
    stores_bound_secs: float
    busiest: str

    @property
    def bound_secs(self) -> float:
        """Seconds of the bound."""
        return self.bound.secs

    @property
    def ratio(self) -> float:
        """Predicted time over bound."""
        return self.secs / self.bound_secs if self.bound_secs else 1.0

    @property
    def schedule_ratio(self) -> float:
        """What routes and order cost: time without launches over the bound at the kernel's own rates."""
        return (self.secs - self.launch_secs) / self.stores_bound_secs if self.stores_bound_secs else 1.0

    @property
    def outcome(self) -> str:
        """Time, bound and their ratio in words; no ratio where launches take longer than the bound."""
        secs, bound = secs_text(self.secs), secs_text(self.bound_secs)
        if self.bound_secs < self.launch_secs:  # so few bytes that a ratio would say nothing about the plan
            return f"{secs}, {secs_text(self.launch_secs)} of it launches; bound {bound}"
        return f"{secs}; bound {bound}, ratio {self.ratio:.3f}"

    def __str__(self) -> str:
        return f"{self.topology.name}: {self.outcome}; busiest link: {self.busiest}"

    def __repr__(self) -> str:
        return f"<Simulation on {self}>"


@dataclasses.dataclass(frozen=True, slots=True)
class _Flows:
    """Bytes under way at one stage from one GPU to another, sorted by slot, then hop; `secs` is one way."""

    slot: np.ndarray
    hop: np.ndarray
    source: np.ndarray
    target: np.ndarray
    link: np.ndarray
    secs: np.ndarray


def simulate(plan: Plan, topology: Topology) -> Simulation:
    """Runs a plan's schedule on a topology's links.

    Raises:
      PlanError: The topology has fewer places than the plan has ranks.
    """
    topology.check(plan.ranks)
    stores = topology.stores
    flows, needs = _flows(plan, topology), needs_of(plan, topology)
    gpus = int(topology.gpu(np.arange(plan.ranks)).max(initial=0)) + 1
    out_link, in_link = flows.link * gpus + flows.source, flows.link * gpus + flows.target
    links = len(LINKS) * gpus
    sending, receiving = _both_ways(flows, topology, gpus)
    busiest = _busiest(
        np.bincount(out_link, sending, links).reshape(-1, gpus),
        np.bincount(in_link, receiving, links).reshape(-1, gpus),
        "GPU" if topology.gpu_of_rank else "rank",
    )
    launch_secs = stores.launches(flows.link) if stores else 0.0
    return Simulation(
        topology=topology,
        needs=needs,
        secs=_played(
            flows, out_link, in_link, sending, receiving, _slots_ahead(plan, topology, gpus), topology.hop_secs
        )
        + launch_secs,
        launch_secs=launch_secs,
        bound=bound_of(plan, needs, topology, None),
        stores_bound_secs=bound_of(plan, needs, topology, stores).secs,
        busiest=busiest,
    )


def _played(
    flows: _Flows,
    out_link: np.ndarray,
    in_link: np.ndarray,
    out_secs: np.ndarray,
    in_secs: np.ndarray,
    slots_ahead: np.ndarray,
    hop_secs: float,
) -> float:
    """Seconds until the last link is done."""
    gpus = len(slots_ahead)
    links = len(LINKS) * gpus
    sent, received = np.zeros(links), np.zeros(links)
    ahead = np.tile(slots_ahead, len(LINKS)) - 1
    past = np.zeros((int(ahead.max(initial=0)) + 1, links))  # until when links received, as of the last slots' ends
    slot, hop = flows.slot, flows.hop
    arrived = np.zeros((int(hop.max(initial=0)) + 1, gpus))
    before, now = arrived.copy(), -1
    stage = slot * len(arrived) + hop
    edges = [0, *(np.nonzero(np.diff(stage))[0] + 1).tolist(), len(stage)] if len(stage) else []
    for first, stop in itertools.pairwise(edges):
        out, into, h = out_link[first:stop], in_link[first:stop], int(hop[first])
        if slot[first] != now:
            passed = min(int(slot[first]) - now, len(past))
            past = np.concatenate([np.broadcast_to(received, (passed, links)), past[: len(past) - passed]])
            before, now = arrived.copy(), int(slot[first])
        start = np.maximum(sent, np.tile(before[h - 1] + hop_secs, len(LINKS))) if h else sent
        sending = np.bincount(out, out_secs[first:stop], minlength=links)
        receiving = np.bincount(into, in_secs[first:stop], minlength=links)
        earliest, latest, pressure = np.full(links, np.inf), np.zeros(links), np.zeros(links)
        np.minimum.at(earliest, into, start[out])
        np.maximum.at(latest, into, (start + sending)[out])
        np.maximum.at(pressure, out, past[ahead[out], into])
        sent = np.where(sending > 0, np.maximum(start + sending, pressure), sent)
        takes = receiving > 0
        received = np.where(
            takes, np.maximum(np.maximum(received, np.where(takes, earliest, 0)) + receiving, latest), received
        )
        np.maximum.at(arrived[h], flows.target[first:stop], received[into])
    return float(max(received.max(initial=0), sent.max(initial=0)))


def _slots_ahead(plan: Plan, topology: Topology, gpus: int) -> np.ndarray:
    """How many slots each GPU can be ahead of those that it sends to, [gpus]."""
    sends = plan.moves.source_rank >= 0
    sent = np.bincount(topology.gpu(plan.moves.source_rank[sends]), plan.row_nbytes[sends], minlength=gpus)
    return np.clip(IN_FLIGHT_NBYTES * SLOTS // np.maximum(sent, 1), 1, MOST_SLOTS_AHEAD).astype(np.int64)


def _both_ways(flows: _Flows, topology: Topology, gpus: int) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of each flow for its sender and for its receiver, with what NVLink loses to the other way.

    A GPU that sends less than it receives is taken to do all of it while it receives, and the other way round.
    """
    stores = topology.stores
    one, both = (
        (stores.nvlink_rate, stores.both_ways_rate)
        if stores
        else (topology.nvlink_rate, topology.nvlink_both_ways_rate or topology.nvlink_rate)
    )
    if both >= one or not len(flows.slot):
        return flows.secs, flows.secs
    nvlink = flows.link == NVLINK
    secs = np.where(nvlink, flows.secs, 0)
    out, into = np.bincount(flows.source, secs, gpus), np.bincount(flows.target, secs, gpus)
    lost = (one / both - 1) * np.minimum(out, into)
    out_factor = 1 + np.divide(lost, out, out=np.zeros(gpus), where=out > 0)
    in_factor = 1 + np.divide(lost, into, out=np.zeros(gpus), where=into > 0)
    return (
        flows.secs * np.where(nvlink, out_factor[flows.source], 1),
        flows.secs * np.where(nvlink, in_factor[flows.target], 1),
    )


def _busiest(out_secs: np.ndarray, in_secs: np.ndarray, called: str) -> str:
    """The link that is used longest.

    Args:
      out_secs, in_secs: [kinds of links, GPUs]; how long each is used. A copy within memory counts once.
      called: What to call a GPU.
    """
    used_secs = np.stack([out_secs, in_secs])
    used_secs[1, MEMORY] = 0
    longest = used_secs.max(initial=0)
    if not longest:
        return "none"
    way, link, gpu = np.argwhere(used_secs == longest)[0]
    alike = np.count_nonzero(used_secs >= AS_BUSY * longest) - 1
    more = f" ({alike} more as busy)" if alike else ""
    return f"{LINKS[link]} {('egress', 'ingress')[way]} of {called} {gpu}{more}"


def row_secs(plan: Plan, topology: Topology) -> tuple[np.ndarray, np.ndarray]:
    """Link and one-way seconds of each row of the table, all its expansions together; fills take none."""
    moves, stores = plan.moves, topology.stores
    link = topology.link(np.maximum(moves.source_rank, 0), moves.target_rank)
    nbytes = plan.row_nbytes.astype(float)
    inside = link == MEMORY
    # a copy within memory reads and writes there: what is counted once is their mean
    sizes = np.array([(itemsize(c.source) + itemsize(c.target)) / 2 / itemsize(c.target) for c in plan.conversions])
    nbytes[inside] *= sizes[moves.convert[inside]]
    rate = np.choose(link, [topology.memory_rate or np.inf, topology.nvlink_rate, topology.nic_rate or np.inf])
    if stores:
        width = np.array([itemsize(c.target) for c in plan.conversions])
        run = contiguous(moves.extents, [moves.target_strides])[0] * width[moves.convert]
        for kind in (MEMORY, NVLINK):
            chosen = link == kind
            rate[chosen] = stores.rate(kind, run[chosen])
    return link, np.where(moves.source_rank >= 0, nbytes / rate, 0)


def _flows(plan: Plan, topology: Topology) -> _Flows:
    """Moves expanded, chunked and summed per slot, hop and pair of GPUs."""
    moves = plan.moves
    row_link, row_time = row_secs(plan, topology)
    moved = np.nonzero(row_time > 0)[0]
    owner, read = plan.slot_reads  # maxima of blocks go from their owner to those who encode
    told = np.nonzero((owner >= 0) & (moves.source_rank >= 0) & (owner != moves.source_rank))[0]
    told_link = topology.link(owner[told], moves.source_rank[told])
    rate = np.choose(told_link, [topology.memory_rate or np.inf, topology.nvlink_rate, topology.nic_rate or np.inf])
    priced = np.concatenate([moved, told])
    link = np.concatenate([row_link[moved], told_link])
    secs = np.concatenate([row_time[moved], read[told] / rate])
    nbytes = np.concatenate([plan.row_nbytes[moved], read[told]])
    source = topology.gpu(np.concatenate([moves.source_rank[moved], owner[told]]))
    target = topology.gpu(np.concatenate([moves.target_rank[moved], moves.source_rank[told]]))
    count = moves.count[priced].astype(np.int64)
    chunks = np.clip(nbytes // count // CHUNK_NBYTES, 1, SLOTS)
    step, span = moves.order_step[priced], moves.order_span[priced] // chunks
    # rows alike in all but what they move are one
    shape = _ids(_ids(count, chunks), _ids(step, np.where(chunks > 1, span, 0)))
    same = _ids(_ids(source, target), _ids(_ids(moves.hop[priced], moves.order[priced] // LAG), shape))
    _, kept = np.unique(same, return_index=True)
    secs = np.bincount(same, secs)
    count, chunks, step, span = count[kept], chunks[kept], step[kept], span[kept]
    each = count * chunks
    row = np.repeat(np.arange(len(kept), dtype=np.int32), each)
    index = np.arange(len(row)) - np.repeat(np.cumsum(each) - each, each)
    k, chunk = index // chunks[row], index % chunks[row]
    hop = moves.hop[priced][kept]
    slot = ((moves.order[priced][kept])[row] + k * step[row] + span[row] * chunk) // LAG
    stage = slot * (int(hop.max(initial=0)) + 1) + hop[row]
    narrow = np.uint16 if int(stage.max(initial=0)) < 1 << 16 else np.int64  # 16 bits are sorted by radix
    by = np.argsort(stage.astype(narrow), kind="stable")
    row = row[by]
    return _Flows(
        slot=slot[by],
        hop=hop[row].astype(np.int64),
        source=source[kept][row],
        target=target[kept][row],
        link=link[kept][row],
        secs=(secs / each)[row],
    )


def _ids(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """One number per distinct pair, counted from 0."""
    inner = np.unique(b, return_inverse=True)[1]
    outer = np.unique(a, return_inverse=True)[1]
    return np.unique(outer * (int(inner.max(initial=0)) + 1) + inner, return_inverse=True)[1]
