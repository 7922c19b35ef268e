"""The time that no plan can beat on a topology.

Cuts through the links, whatever the routes: what a host needs and no trainer there has must enter it through the NICs
of its GPUs; all that its GPUs need enters them through their NICs or over NVLink from GPUs of the host; what the
trainers hold must leave them, what ranks need alike once at least; what a GPU needs must enter it. The largest is the
bound. Ranks need alike what is the same box of the same value.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from shardfly_jax.sharding.plan import Plan
from shardfly_jax.sharding.rates import MEMORY, Stores
from shardfly_jax.sharding.topology import Topology


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """A lower bound of an update's time.

    Attributes:
      secs: The bound.
      why: Which cut it comes from, for people.
    """

    secs: float
    why: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What must get where, read off a plan: facts of the problem, not of its routes.

    Attributes:
      egress_nbytes: Distinct bytes that leave the trainers.
      gpu_nbytes: [gpus]; what each GPU receives from other GPUs.
      host_nbytes: [hosts]; distinct bytes that each host's GPUs receive and no trainer there sends.
      memory_nbytes: [gpus]; bytes copied within each GPU, read and written counted once.
    """

    egress_nbytes: int
    gpu_nbytes: np.ndarray
    host_nbytes: np.ndarray
    memory_nbytes: np.ndarray


def needs_of(plan: Plan, topology: Topology) -> Needs:
    """Sums a plan's moves over GPUs and hosts."""
    moves, nbytes = plan.moves, plan.row_nbytes
    gpus = int(topology.gpu(np.arange(plan.ranks)).max(initial=0)) + 1
    hosts = -(-gpus // topology.gpus_per_host)
    gpu = topology.gpu(moves.target_rank)
    real = moves.source_rank >= 0
    inside = real & (topology.link(np.maximum(moves.source_rank, 0), moves.target_rank) == MEMORY)
    wire = np.nonzero(real & ~inside)[0]
    return Needs(
        egress_nbytes=min(int(nbytes[wire][moves.source_rank[wire] < plan.source_ranks].sum()), plan.distinct_nbytes),
        gpu_nbytes=np.bincount(gpu[wire], nbytes[wire], minlength=gpus),
        host_nbytes=_lacking(plan, topology, hosts),
        memory_nbytes=np.bincount(gpu[inside], nbytes[inside], minlength=gpus),
    )


def _lacking(plan: Plan, topology: Topology, hosts: int) -> np.ndarray:
    """[hosts]; what must enter each: of a band what one of its ranks receives, less what trainers there send of it."""
    moves, nbytes = plan.moves, plan.row_nbytes
    host, sender = topology.host_of(moves.target_rank), topology.host_of(np.maximum(moves.source_rank, 0))
    real, band = moves.source_rank >= 0, moves.band.astype(np.int64)
    banded = real & (band >= 0)
    arrives = banded & (moves.source_rank != moves.target_rank)
    of_rank, got = _sums(band[arrives] * plan.ranks + moves.target_rank[arrives], nbytes[arrives])
    cell = of_rank // plan.ranks * hosts + topology.host_of(of_rank % plan.ranks)
    of_host, which = np.unique(cell, return_inverse=True)
    lacks = np.zeros(len(of_host))
    np.maximum.at(lacks, which, got)
    begins = banded & (moves.hop == 0)
    begun, sent = _sums(band[begins] * hosts + sender[begins], nbytes[begins])
    _, at, of = np.intersect1d(of_host, begun, assume_unique=True, return_indices=True)
    lacks[at] = np.maximum(lacks[at] - sent[of], 0)
    alone = real & ~banded & (sender != host)
    return np.bincount(host[alone], nbytes[alone], hosts) + np.bincount(of_host % hosts, lacks, hosts)


def _sums(key: np.ndarray, nbytes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each key once, and its bytes."""
    keys, which = np.unique(key, return_inverse=True)
    return keys, np.bincount(which, nbytes, minlength=len(keys))


def bound_of(plan: Plan, needs: Needs, topology: Topology, stores: Stores | None) -> Bound:
    """The bound at the links' rates, or at what a kernel's stores reach."""
    one, both, memory = (
        (stores.nvlink_rate, stores.both_ways_rate, stores.memory[-1][1])
        if stores
        else (topology.nvlink_rate, topology.nvlink_both_ways_rate or topology.nvlink_rate, topology.memory_rate)
    )
    per_host, nic = topology.gpus_per_host, topology.nic_rate
    trainers = np.unique(topology.gpu(np.arange(plan.source_ranks)))
    rollouts = np.unique(topology.gpu(np.arange(plan.source_ranks, plan.ranks)))
    trainer_hosts, rollout_hosts = np.unique(trainers // per_host), np.unique(rollouts // per_host)
    apart = not np.isin(trainer_hosts, rollout_hosts).any()
    together = len(np.union1d(trainer_hosts, rollout_hosts)) == 1
    out = nic if apart else one if together else one + nic
    into = one if together else one + nic
    fullest = int(needs.gpu_nbytes.argmax())
    cuts = [
        (needs.egress_nbytes / (len(trainers) * out), "egress of the trainers"),
        (float(needs.gpu_nbytes[fullest]) / into, f"ingress of GPU {fullest}"),
    ]
    if memory:
        cuts.append((float(needs.memory_nbytes.max()) / memory, "copies within a GPU"))
    total = float(needs.gpu_nbytes.sum())
    if together and not np.isin(trainers, rollouts).any():
        # what fewer trainers than rollouts cannot send themselves meanwhile is passed on, which slows links down
        slower = one / both - 1 if len(trainers) < len(rollouts) else 0.0
        rate = one * (len(rollouts) + slower * len(trainers))
        cuts.append((total * (1 + slower) / rate, "NVLink of the rollouts"))
    for host in rollout_hosts.tolist() if nic else ():
        here = int(np.count_nonzero(np.union1d(rollouts, trainers) // per_host == host))
        cuts.append((float(needs.host_nbytes[host]) / (here * nic), f"NIC ingress of host {host}"))
        if host not in trainer_hosts:
            needed = float(needs.gpu_nbytes[host * per_host : (host + 1) * per_host].sum())
            cuts.append((needed / (here * (both + nic)), f"NVLink and NICs of host {host}"))
    secs, why = max(cuts)
    return Bound(secs=secs, why=why)
