"""`build_plan`: groups are lowered, roots and sources chosen, forwards added, everything ordered."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np

from shardfly_jax.sharding.errors import LanguageError, PlanError
from shardfly_jax.sharding.formats import Conversion, Step, conversion
from shardfly_jax.sharding.lowering import MAX_DIMS, Lowerer, SourceShards, Template, denote
from shardfly_jax.sharding.moves import MoveTable
from shardfly_jax.sharding.plan import Plan, Replica
from shardfly_jax.sharding.problem import Problem
from shardfly_jax.sharding.routing import Group, choose_sources, make_groups
from shardfly_jax.sharding.schedule import LAG, Place, places
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
    rows = _Rows(problem)
    faults: dict[str, None] = {}
    for index, group in enumerate(groups):
        try:
            rows.lower(index, group)
        except LanguageError as error:
            name = problem.families[group.members[0][0]].name(0)
            faults[f"misshapen: target {name!r}: {str(error).rstrip('.')}."] = None
    if faults:
        raise PlanError(faults)
    direct, bands = rows.expanded(groups, where, topology)
    forwards = _forwards(groups, where, problem, rows.bit_conversion, rows.first_band)
    table = MoveTable.concatenate([direct, forwards])
    table = table.take(np.lexsort((table.source_rank, table.target_rank, table.order)))
    replicas, base = [], problem.source_ranks
    for tree in problem.targets:
        parts = tree.replicas or {tree.name: tuple(range(tree.ranks))}
        replicas += [Replica(name, tree.name, tuple(rank + base for rank in ranks)) for name, ranks in parts.items()]
        base += tree.ranks
    return Plan(
        families=tuple(problem.families),
        moves=table,
        conversions=tuple(rows.conversions),
        bands=np.array(bands, np.int64),
        source_ranks=problem.source_ranks,
        target_ranks=problem.target_ranks,
        replicas=tuple(replicas),
        keep=tuple(problem.keep),
    )


class _Rows:
    """Collects templates of all groups and turns them into table columns."""

    def __init__(self, problem: Problem):
        self.problem = problem
        self.conversions: dict[Conversion, int] = {}
        self.holders: list[tuple[int, ...]] = []
        self.first_holder: dict[int, int] = {}
        self.templates: list[tuple[int, ...]] = []
        self.first_band: list[int] = []
        self.bands: list[int] = []
        self._shards = functools.lru_cache(maxsize=None)(self._shards_of)
        self._lowerer = functools.lru_cache(maxsize=4)(self._make_lowerer)

    def bit_conversion(self, dtype: str) -> int:
        return self._conversion(dtype, (), dtype)

    def _conversion(self, source: str, steps: tuple[Step, ...], target: str) -> int:
        return self.conversions.setdefault(conversion(source, steps, target), len(self.conversions))

    def _shards_of(self, name: str) -> list[SourceShards]:
        out = []
        for index in self.problem.source_families[name]:
            family = self.problem.families[index]
            held = family.layout.holders
            self.first_holder[index] = len(self.holders)
            self.holders += [ranks for _, ranks in held]
            boxes = np.array([box for (box, _), _ in held], np.int64).reshape(len(held), len(family.layout.shape), 2)
            layers = (family.first, family.first + family.count)
            out.append(SourceShards(index, family.first, layers, boxes, [strides for (_, strides), _ in held]))
        return out

    def _make_lowerer(self, expr: object, layers: tuple[int, int], cuts: tuple[tuple[int, int], ...]) -> Lowerer:
        value = denote(expr, self.problem._lookup, range(*layers), cuts)  # type: ignore[arg-type]
        return Lowerer(value, self._shards)

    def lower(self, index: int, group: Group) -> None:
        """Adds the templates of one group.

        Raises:
          LanguageError: Its elements are not written exactly once.
        """
        lowerer = self._lowerer(group.expr, group.layers, group.cuts)
        origin = tuple(lo for lo, _ in group.box)
        target_dtype = self.problem.families[group.members[0][0]].layout.dtype
        forwarded = len(group.members) > 1
        self.first_band.append(len(self.bands) if forwarded else -1)
        for number, band in enumerate(group.bands):
            made = lowerer.lower_box(band.box, group.strides, group.layers, origin)
            written, wanted = sum(t.size * t.count for t in made), band.size * group.n_layers
            if written != wanted:
                how = "leave out" if written < wanted else "overlap in"
                raise LanguageError(
                    f"the boxes of its sources {how} {abs(wanted - written)} of {wanted} elements. Give source "
                    "boxes that tile each tensor"
                )
            if forwarded:
                self.bands.append(band.size * group.itemsize)
            for t in made:
                self.templates.append(self._flat(index, number, t, target_dtype))

    def _flat(self, group: int, band: int, t: Template, target_dtype: str) -> tuple[int, ...]:
        source_dtype = self.problem.families[t.family].layout.dtype if t.family >= 0 else target_dtype
        convert = self._conversion(source_dtype, t.steps, target_dtype)  # type: ignore[arg-type]
        pad = MAX_DIMS - len(t.dims)
        extents, source_strides, target_strides = zip(*t.dims, strict=True) if t.dims else ((), (), ())
        shard = self.first_holder[t.family] + t.shard if t.family >= 0 else -1
        return (
            group, band, t.family, shard, convert, t.source_offset, t.target_offset, t.count, t.source_tensor,
            t.source_tensor_step, t.source_offset_step, t.layer, t.layer_step,
            *extents, *(1,) * pad, *source_strides, *(0,) * pad, *target_strides, *(0,) * pad,
        )  # fmt: skip

    def expanded(
        self, groups: Sequence[Group], where: Sequence[Place], topology: Topology | None
    ) -> tuple[MoveTable, list[int]]:
        """One row per template and root; sources chosen.

        A template of `count` layers whose roots rotate with period p becomes p rows of every p-th layer.
        """
        table = np.array(self.templates, np.int64).reshape(len(self.templates), 13 + 3 * MAX_DIMS)
        self.templates.clear()
        group, band, count, layer, layer_step = table[:, 0], table[:, 1], table[:, 7], table[:, 11], table[:, 12]
        members = np.array([len(g.members) for g in groups])[group]
        turning = np.array([len(g.bands) == 1 for g in groups])[group]
        first_layer = np.array([g.layers[0] for g in groups])[group]
        period = np.where(turning, members // np.gcd(members, layer_step), 1)
        copies = np.minimum(period, count)
        row = np.repeat(np.arange(len(table)), copies)
        j = np.arange(len(row)) - np.repeat(np.cumsum(copies) - copies, copies)
        t, group, band, period = table[row], group[row], band[row], period[row]
        layer = layer[row] + j * layer_step[row]
        step = layer_step[row] * period
        start = np.array([g.start for g in groups])[group]
        per_root = np.array([g.bands_per_root for g in groups])[group]
        root = (start + np.where(turning[row], layer - first_layer[row], band // per_root)) % members[row]
        offset = np.cumsum([0, *(len(g.members) for g in groups)])[group] + root
        member = np.array([member for g in groups for member in g.members], np.int64).reshape(-1, 2)[offset]
        family_first = np.array([family.first for family in self.problem.families])[member[:, 0]]
        order0, layer_order, span = (np.array(column, np.int64)[group] for column in zip(*where, strict=True))
        rounds = np.array([g.rounds for g in groups])[group]
        round_ = band % per_root * rounds // per_root
        n = (t[:, 7] - j + period - 1) // period
        extents = t[:, 13 : 13 + MAX_DIMS]
        itemsize = np.array([g.itemsize for g in groups])[group]
        shard = t[:, 3]
        source = choose_sources(shard, self.holders, extents.prod(axis=1) * n * itemsize, member[:, 1], topology)
        turn = (member[:, 1] - source) % (self.problem.source_ranks + self.problem.target_ranks)
        first_band = np.array(self.first_band)[group]
        columns = MoveTable.from_columns(
            source_family=t[:, 2], source_rank=source, target_family=member[:, 0], target_rank=member[:, 1],
            extents=extents, source_strides=t[:, 13 + MAX_DIMS : 13 + 2 * MAX_DIMS],
            target_strides=t[:, 13 + 2 * MAX_DIMS :],
            source_offset=t[:, 5] + j * t[:, 10], target_offset=t[:, 6], count=n,
            source_tensor=t[:, 8] + j * t[:, 9], source_tensor_step=t[:, 9] * period,
            source_offset_step=t[:, 10] * period,
            target_tensor=layer - family_first, target_tensor_step=step, convert=t[:, 4],
            band=np.where(first_band >= 0, first_band + band, -1), hop=0,
            order=order0 + (layer - first_layer[row]) * layer_order + span * round_ // rounds + turn,
            order_step=step * layer_order, order_span=span // rounds,
        )  # fmt: skip
        return columns, self.bands


def _forwards(
    groups: Sequence[Group],
    where: Sequence[Place],
    problem: Problem,
    bits: Callable[[str], int],
    first_band: Sequence[int],
) -> MoveTable:
    """The rows that pass bands from member to member."""
    tables = []
    for index, (group, place) in enumerate(zip(groups, where, strict=True)):
        m, n_bands, layers = len(group.members), len(group.bands), group.n_layers
        if m == 1:
            continue
        turning = n_bands == 1
        period = m if turning else 1
        band, j, t = (
            axis.ravel()
            for axis in np.meshgrid(np.arange(n_bands), np.arange(min(period, layers)), np.arange(1, m), indexing="ij")
        )
        root = (group.start + (j if turning else band // group.bands_per_root)) % m
        parent = (t - 1) // 2 if group.is_tree else t - 1
        depth = np.floor(np.log2(t + 1.5)).astype(np.int64) if group.is_tree else t
        round_ = band % group.bands_per_root * group.rounds // group.bands_per_root
        members = np.array(group.members, np.int64)
        giver, taker = members[(root + parent) % m], members[(root + t) % m]
        first = np.array([family.first for family in problem.families])
        layer = group.layers[0] + j
        dtype = problem.families[group.members[0][0]].layout.dtype
        extents = np.ones((len(t), MAX_DIMS), np.int64)
        extents[:, 0] = np.array([b.size for b in group.bands])[band]
        strides = np.zeros((len(t), MAX_DIMS), np.int64)
        strides[:, 0] = 1
        offset = np.array([b.offset for b in group.bands])[band]
        tables.append(MoveTable.from_columns(
            source_family=giver[:, 0], source_rank=giver[:, 1], target_family=taker[:, 0], target_rank=taker[:, 1],
            extents=extents, source_strides=strides, target_strides=strides, source_offset=offset, target_offset=offset,
            count=(layers - j + period - 1) // period,
            source_tensor=layer - first[giver[:, 0]], source_tensor_step=period, source_offset_step=0,
            target_tensor=layer - first[taker[:, 0]], target_tensor_step=period, convert=bits(dtype),
            band=first_band[index] + band, hop=depth,
            order=place.order + j * place.layer_step + place.span * (round_ + 1) // group.rounds + depth * LAG,
            order_step=period * place.layer_step, order_span=0,
        ))  # fmt: skip
    return MoveTable.concatenate(tables)
