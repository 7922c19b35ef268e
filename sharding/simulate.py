"""Predicts the time of an update on a topology from the plan's own schedule.

The order line is cut into slots, and each slot into hops. In each, every rank sends its chunks over its NVLink and NIC,
and receives what others send it. A rank starts when its links are free; a forward starts when everything that its rank
received one hop earlier in the slots before has arrived; a sender is at most one slot ahead of its receivers. So
imbalance in time, the filling of chains and idle links cost what they would cost. Launches and conversion are not
modelled; rates are the topology's.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np

from shardfly_jax.sharding.plan import Plan
from shardfly_jax.sharding.schedule import CHUNK_NBYTES, LAG, LENGTH
from shardfly_jax.sharding.topology import Topology

SLOTS = LENGTH // LAG


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """A predicted update.

    Attributes:
      topology: Where it would run.
      secs: Predicted time.
      bound_secs: Bytes of the busiest link over its rate; no schedule can be faster.
      busiest: Which link that is, for people.
    """

    topology: Topology
    secs: float
    bound_secs: float
    busiest: str

    @property
    def ratio(self) -> float:
        """Predicted time over bound."""
        return self.secs / self.bound_secs if self.bound_secs else 1.0


def simulate(plan: Plan, topology: Topology) -> Simulation:
    """Runs a plan's schedule on a topology's links.

    Raises:
      PlanError: The topology has fewer places than the plan has ranks.
    """
    topology.check(plan.ranks)
    slot, hop, source, target, nbytes = _flows(plan)
    ranks = plan.ranks
    crossing = topology.host_of(source) != topology.host_of(target)
    rate = np.where(crossing, topology.nic_rate or topology.nvlink_rate, topology.nvlink_rate)
    secs = nbytes / rate
    link = crossing * ranks
    out_total = np.bincount(source + link, secs, minlength=2 * ranks)
    in_total = np.bincount(target + link, secs, minlength=2 * ranks)
    bound, busiest = _busiest(out_total, in_total, ranks)

    out_link, in_link = source + link, target + link
    sent, received = np.zeros(2 * ranks), np.zeros(2 * ranks)
    arrived = np.zeros((int(hop.max(initial=0)) + 1, ranks))
    before, now = arrived.copy(), -1
    stage = slot * len(arrived) + hop
    edges = [0, *(np.nonzero(np.diff(stage))[0] + 1).tolist(), len(stage)] if len(stage) else []
    for first, stop in itertools.pairwise(edges):
        out, into, to, t, h = (
            out_link[first:stop],
            in_link[first:stop],
            target[first:stop],
            secs[first:stop],
            int(hop[first]),
        )
        if slot[first] != now:
            before, now = arrived.copy(), int(slot[first])
        start = np.maximum(sent, np.tile(before[h - 1] + topology.hop_secs, 2)) if h else sent
        sending = np.bincount(out, t, minlength=2 * ranks)
        receiving = np.bincount(into, t, minlength=2 * ranks)
        earliest, latest, pressure = np.full(2 * ranks, np.inf), np.zeros(2 * ranks), np.zeros(2 * ranks)
        np.minimum.at(earliest, into, start[out])
        np.maximum.at(latest, into, (start + sending)[out])
        np.maximum.at(pressure, out, received[into])
        sent = np.where(sending > 0, np.maximum(start + sending, pressure), sent)
        takes = receiving > 0
        received = np.where(
            takes, np.maximum(np.maximum(received, np.where(takes, earliest, 0)) + receiving, latest), received
        )
        np.maximum.at(arrived[h], to, received[into])
    return Simulation(topology=topology, secs=float(max(received.max(), sent.max())), bound_secs=bound, busiest=busiest)


def _busiest(out_total: np.ndarray, in_total: np.ndarray, ranks: int) -> tuple[float, str]:
    which = "egress" if out_total.max() >= in_total.max() else "ingress"
    totals = out_total if which == "egress" else in_total
    link = int(totals.argmax())
    return float(totals.max()), f"{'NIC' if link >= ranks else 'NVLink'} {which} of rank {link % ranks}"


def _flows(plan: Plan) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Slot, hop, source, target and bytes: moves expanded, chunked, summed; sorted by slot, then hop."""
    moves = plan.moves
    wire = np.nonzero((moves.source_rank >= 0) & (moves.source_rank != moves.target_rank))[0]
    owner, read = plan.slot_reads  # maxima of blocks go from their owner to those who encode
    told = np.nonzero((owner >= 0) & (moves.source_rank >= 0) & (owner != moves.source_rank))[0]
    source = np.concatenate([moves.source_rank[wire], owner[told]])
    target = np.concatenate([moves.target_rank[wire], moves.source_rank[told]])
    nbytes_of_row = np.concatenate([plan.row_nbytes[wire], read[told]])
    wire = np.concatenate([wire, told])
    count = moves.count[wire].astype(np.int64)
    each = nbytes_of_row // count
    chunks = np.clip(each // CHUNK_NBYTES, 1, SLOTS)
    row = np.repeat(np.arange(len(wire)), count * chunks)
    index = np.arange(len(row)) - np.repeat(np.cumsum(count * chunks) - count * chunks, count * chunks)
    k, chunk = index // chunks[row], index % chunks[row]
    order = (
        moves.order[wire][row] + k * moves.order_step[wire][row] + moves.order_span[wire][row] // chunks[row] * chunk
    )
    hops = int(moves.hop.max(initial=0)) + 1
    stage = order // LAG * hops + moves.hop[wire][row]
    key = (stage * plan.ranks + source[row]) * plan.ranks + target[row]
    unique, inverse = np.unique(key, return_inverse=True)
    nbytes = np.bincount(inverse, (each / chunks)[row])
    stage, pair = unique // plan.ranks**2, unique % plan.ranks**2
    return stage // hops, stage % hops, pair // plan.ranks, pair % plan.ranks, nbytes
