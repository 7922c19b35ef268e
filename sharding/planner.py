"""`build_plan`: groups are lowered, roots and sources chosen, forwards added, everything ordered."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from shardfly_jax.sharding.errors import LanguageError, PlanError
from shardfly_jax.sharding.groups import Group
from shardfly_jax.sharding.lowering import MAX_DIMS
from shardfly_jax.sharding.moves import MoveTable
from shardfly_jax.sharding.plan import Plan, Replica
from shardfly_jax.sharding.problem import Problem
from shardfly_jax.sharding.routing import make_groups
from shardfly_jax.sharding.rows import Rows
from shardfly_jax.sharding.schedule import Place, places
from shardfly_jax.sharding.topology import Topology


def build_plan(problem: Problem, topology: Topology | None = None) -> Plan:
    """Plans a sound problem.

    Args:
      problem: Its construction found no fault.
      topology: Steers which holder serves whom and the order of forwarding; the moves are right without.

    Raises:
      PlanError: Source boxes that do not tile their tensor, cuts that do not divide the parts of a fuse, or a topology
        with too few places.
    """
    if topology is not None:
        topology.check(problem.source_ranks + problem.target_ranks)
    groups = make_groups(problem, topology)
    where = places(groups, problem.families)
    rows = Rows(problem)
    faults: dict[str, None] = {}

    def attempt(lower: Callable[[int, Group], None], index: int, group: Group) -> None:
        try:
            lower(index, group)
        except LanguageError as error:
            name = problem.families[group.members[0][0]].name(0)
            faults[f"misshapen: target {name!r}: {str(error).rstrip('.')}."] = None

    for index, group in enumerate(groups):
        attempt(rows.lower, index, group)
    if not faults:
        rows.quantized.settle()
        for index, group in rows.quantized.scale_groups:
            attempt(rows.lower_plain, index, group)
    if faults:
        raise PlanError(faults)
    late = rows.quantized.placed(where, at_a_pace=any(group.pace is not None for group in groups))
    direct, served = rows.expanded(groups, late, topology)
    tables = [direct, *_forwards(groups, late, problem, rows.bit_conversion, rows.first_band)]
    if any(rows.quantized.users):
        tables.append(rows.quantized.reductions(groups, where, served))
    table = MoveTable.merged(tables)
    del tables, direct
    replicas, base = [], problem.source_ranks
    for tree in problem.targets:
        parts = tree.replicas or {tree.name: tuple(range(tree.ranks))}
        replicas += [Replica(name, tree.name, tuple(rank + base for rank in ranks)) for name, ranks in parts.items()]
        base += tree.ranks
    return Plan(
        families=(*problem.families, *rows.quantized.read_families()),
        moves=table,
        conversions=tuple(rows.conversions),
        blocks=tuple(rows.quantized.views),
        bands=np.array(rows.bands, np.int64),
        source_ranks=problem.source_ranks,
        target_ranks=problem.target_ranks,
        replicas=tuple(replicas),
        keep=tuple(problem.keep),
    )


def _forwards(
    groups: Sequence[Group],
    where: Sequence[Place],
    problem: Problem,
    bits: Callable[[str], int],
    first_band: Sequence[int],
) -> list[MoveTable]:
    """The rows that pass bands from member to member, and to twins within a rank."""
    first = np.array([family.first for family in problem.families])
    tables = []
    for index, (group, place) in enumerate(zip(groups, where, strict=True)):
        if not group.is_forwarded:
            continue
        m, n_bands, layers = len(group.members), len(group.bands), group.n_layers
        period = group.roots if group.takes_turns else 1
        members = np.array(group.members, np.int64)
        twin_member, twin_family = np.array(group.twins, np.int64).reshape(-1, 2).T
        # one row per band, first layer, and receiver: members after the root, then twins
        n_receivers = m - 1 + len(group.twins)
        band, j, receiver = (
            axis.ravel()
            for axis in np.meshgrid(
                np.arange(n_bands), np.arange(min(period, layers)), np.arange(n_receivers), indexing="ij"
            )
        )
        turn = j if group.takes_turns else group.turn[band]
        route = group.route
        is_twin = receiver >= m - 1
        which = np.where(is_twin, receiver - (m - 1), 0)
        at = np.append(twin_member, 0)[which]
        to = np.where(is_twin, at, route.order[turn, np.minimum(receiver + 1, m - 1)])
        giver = members[np.where(is_twin, at, route.giver[turn, to])]
        depth = route.depth[turn, to] + is_twin
        taker = members[to]
        taker[is_twin, 0] = np.append(twin_family, 0)[which[is_twin]]
        begin = place.span * group.round[band] // group.rounds
        lasts = 0 if group.is_paced else place.span // group.rounds  # a lag is at least a tick
        layer = group.layers[0] + j
        dims = np.array([(*b.dims, *[(1, 0)] * (MAX_DIMS - len(b.dims))) for b in group.bands], np.int64)[band]
        extents, strides = dims[:, :, 0], dims[:, :, 1]
        offset = np.array([b.offset for b in group.bands])[band]
        dtype = problem.families[group.members[0][0]].layout.dtype
        tables.append(MoveTable.from_columns(
            source_family=giver[:, 0], source_rank=giver[:, 1], target_family=taker[:, 0], target_rank=taker[:, 1],
            extents=extents, source_strides=strides, target_strides=strides, source_offset=offset, target_offset=offset,
            count=(layers - j + period - 1) // period,
            source_tensor=layer - first[giver[:, 0]], source_tensor_step=period, source_offset_step=0,
            target_tensor=layer - first[taker[:, 0]], target_tensor_step=period, convert=bits(dtype),
            band=first_band[index] + band, hop=depth, block=-1,
            order=place.order + j * place.layer_step + begin + lasts + depth * place.lag,
            order_step=period * place.layer_step, order_span=0,
        ))  # fmt: skip
    return tables
