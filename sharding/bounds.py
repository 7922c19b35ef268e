"""The time that no plan can beat on a topology, if it sends what ranks need alike from the trainers once.

Cuts through the links, whatever the routes: what a host needs must enter it through the NICs of its GPUs; all that its
GPUs need enters them through their NICs or over NVLink from GPUs of the host; what the trainers hold must leave them;
what a GPU needs must enter it. The largest is the bound.
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
      host_nbytes: [hosts]; distinct bytes that each host's GPUs receive.
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
    host = gpu[wire] // topology.gpus_per_host
    # each member of a band receives all of it: what a host receives over how many of its GPUs do is distinct
    band = moves.band[wire].astype(np.int64)
    cell, first = np.unique(band * hosts + host, return_inverse=True)
    received = np.bincount(first, nbytes[wire])
    receivers = np.bincount(np.unique(first * gpus + gpu[wire]) // gpus)
    distinct = np.where(cell // hosts >= 0, received / receivers, received)
    return Needs(
        egress_nbytes=int(nbytes[wire][moves.source_rank[wire] < plan.source_ranks].sum()),
        gpu_nbytes=np.bincount(gpu[wire], nbytes[wire], minlength=gpus),
        host_nbytes=np.bincount(cell % hosts, distinct, minlength=hosts),
        memory_nbytes=np.bincount(gpu[inside], nbytes[inside], minlength=gpus),
    )


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
        forwarded = total - needs.egress_nbytes
        cuts.append(((total + forwarded * (one / both - 1)) / (len(rollouts) * one), "NVLink of the rollouts"))
    for host in rollout_hosts[~np.isin(rollout_hosts, trainer_hosts)].tolist():
        here = np.count_nonzero(rollouts // per_host == host)
        needed = float(needs.gpu_nbytes[host * per_host : (host + 1) * per_host].sum())
        cuts += [
            (float(needs.host_nbytes[host]) / (here * nic), f"NIC ingress of host {host}"),
            (needed / (here * (both + nic)), f"NVLink and NICs of host {host}"),
        ]
    secs, why = max(cuts)
    return Bound(secs=secs, why=why)
