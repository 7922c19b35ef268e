"""What an update would cost the ways of others, at the same links' rates and nothing else against them.

Both are floors: no Python, no per-tensor latency, no stalls. Published times are several times larger.
"""

from __future__ import annotations

import numpy as np

from shardfly_jax.sharding.bounds import Needs
from shardfly_jax.sharding.plan import Plan
from shardfly_jax.sharding.rates import measured
from shardfly_jax.sharding.simulate import row_secs
from shardfly_jax.sharding.topology import Topology


def gather_broadcast_secs(plan: Plan, needs: Needs, topology: Topology) -> float:
    """Gather on the trainers, broadcast of full tensors in buckets, conversion on every rollout (veRL, SGLang).

    The trainers gather every tensor; one of them packs the buckets and broadcasts them to all rollouts, in a pipeline
    as fast as its slowest link; each rollout cuts, converts and copies what it needs out of them. These steps follow
    each other, as in the measured row `nccl_buckets`. Sources: verl `checkpoint_engine/nccl_*`, SGLang
    `update_weights_from_distributed`.
    """
    rows = measured()
    model = plan.distinct_nbytes
    nccl = 16_381_470_720 / rows["nccl_wire"]["secs"]
    trainers = np.unique(topology.gpu(np.arange(plan.source_ranks)))
    hosts, n = np.unique(trainers // topology.gpus_per_host), len(trainers)
    gather = model * (n - 1) / n / nccl
    if len(hosts) > 1:
        gather = max(gather, model * (len(hosts) - 1) / (topology.nic_rate * n))
    alone = len(np.unique(topology.host_of(np.arange(plan.ranks)))) == 1
    wire = model / (nccl if alone else topology.nic_rate)
    pack = model / rows["memory_copy"]["rate"]
    convert = float(needs.gpu_nbytes.max()) / rows["xla_convert"]["rate"]
    return gather + pack + wire + convert


def shard_to_shard_secs(plan: Plan, needs: Needs, topology: Topology) -> float:
    """Every shard straight from a trainer to every rollout that needs it, nothing forwarded (Awex, vLLM RDT, ...).

    Converted in flight by the same kernel, without staging; the busiest link's time. Receivers of the same bytes are
    taken to be as far from their trainer as the first of them.
    """
    moves = plan.moves
    link, secs = row_secs(plan, topology)
    band = moves.band.astype(np.int64)
    receives = (moves.source_rank >= 0) & (moves.source_rank != moves.target_rank)
    pairs = np.unique(band[receives & (band >= 0)] * plan.ranks + moves.target_rank[receives & (band >= 0)])
    receivers = np.append(np.bincount(pairs // plan.ranks, minlength=len(plan.bands)), 1)  # of band -1: one
    first = np.nonzero((moves.source_rank >= 0) & (moves.source_rank < plan.source_ranks))[0]
    gpus = topology.gpus
    at = link[first] * gpus + topology.gpu(moves.source_rank[first])
    egress = np.bincount(at, secs[first] * receivers[band[first]])
    # all receivers of a band take what its first takes; spread evenly, the fullest takes its bytes at the mean price
    price = secs[first].sum() / max(plan.row_nbytes[first].sum(), 1)
    launches = topology.stores.launches(link[first]) if topology.stores else 0.0
    return max(float(egress.max()), float(needs.gpu_nbytes.max() * price)) + launches
