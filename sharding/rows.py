"""From groups to table rows: lowered once, cut at bands, spread over roots, served by the least loaded holders."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import numpy as np

from shardfly_jax.sharding.denotation import denote
from shardfly_jax.sharding.errors import LanguageError
from shardfly_jax.sharding.formats import Conversion, Step, conversion
from shardfly_jax.sharding.groups import Band, Group, bands_of
from shardfly_jax.sharding.lowering import BUFFERS, MAX_DIMS, Lowerer, SourceShards, Template
from shardfly_jax.sharding.moves import MoveTable
from shardfly_jax.sharding.problem import Problem
from shardfly_jax.sharding.quantized_rows import QuantizedRows, scales_in
from shardfly_jax.sharding.routing import choose_sources
from shardfly_jax.sharding.schedule import CHUNK_NBYTES, CLOSE, Place, begin_roots, scattered
from shardfly_jax.sharding.template_rows import (
    BAND,
    BLOCK,
    CONVERT,
    COUNT,
    EXTENTS,
    FAMILY,
    GROUP,
    LAYER,
    LAYER_STEP,
    SHARD,
    SOURCE_OFFSET,
    SOURCE_OFFSET_STEP,
    SOURCE_STRIDES,
    SOURCE_TENSOR,
    SOURCE_TENSOR_STEP,
    TARGET_OFFSET,
    TARGET_STRIDES,
    cut_at_bands,
)
from shardfly_jax.sharding.topology import Topology
from shardfly_jax.sharding.walks import quantized


class Rows:
    """Collects templates of all groups and turns them into table columns."""

    def __init__(self, problem: Problem):
        self.problem = problem
        self.conversions: dict[Conversion, int] = {}
        self.holders: list[tuple[int, ...]] = []
        self.first_holder: dict[int, int] = {}
        self.templates: list[np.ndarray] = []
        self.first_band: list[int] = []
        self.bands: list[int] = []
        self.shards = functools.lru_cache(maxsize=None)(self._shards_of)
        self.quantized = QuantizedRows(self)
        self._lowerer = functools.lru_cache(maxsize=4)(self._make_lowerer)

    def bit_conversion(self, dtype: str) -> int:
        return self._conversion(dtype, (), dtype)

    def _conversion(self, source: str, steps: tuple[Step, ...], target: str) -> int:
        return self.conversions.setdefault(conversion(source, steps, target), len(self.conversions))

    def convert_of(self, t: Template, target_dtype: str) -> int:
        """Index of the conversion that a template needs."""
        base = len(self.problem.families)
        families = self.problem.families if t.family < base else self.quantized.families
        source = families[t.family % base].layout.dtype if t.family >= 0 else target_dtype
        return self._conversion(source, t.steps, target_dtype)  # type: ignore[arg-type]

    def holders_of(self, family: int, shard: int) -> tuple[int, ...]:
        """Ranks that hold a shard of a source family; none for a fill."""
        return self.holders[self.first_holder[family] + shard] if family >= 0 else ()

    def _shards_of(self, name: str) -> list[SourceShards]:
        slots = self.quantized.slot_shards(name)
        if slots is not None:
            self.first_holder[slots[0].family] = len(self.holders)
            self.holders += [self.quantized.families[slots[0].family - len(self.problem.families)].layout.ranks]
            return slots
        if name.startswith(BUFFERS):
            return [shards.in_buffers() for shards in self.shards(name.removeprefix(BUFFERS))]
        out = []
        for index in self.problem.source_families[name]:
            family = self.problem.families[index]
            held = family.layout.holders
            self.first_holder[index] = len(self.holders)
            self.holders += [ranks for _, ranks in held]
            bounds = np.array([box for (box, _), _ in held], np.int64).reshape(len(held), len(family.layout.shape), 2)
            layers = (family.first, family.first + family.count)
            out.append(SourceShards(index, family.first, layers, bounds, [key for key, _ in held]))
        return out

    def _make_lowerer(self, expr: object, layers: tuple[int, int], cuts: tuple[tuple[int, int], ...]) -> Lowerer:
        value = denote(
            expr,  # type: ignore[arg-type]
            self.problem._lookup,
            range(*layers),
            cuts,
            lambda scales: self.quantized.scales_of(scales, layers),
        )
        return Lowerer(value, self.shards)

    def lower(self, index: int, group: Group) -> None:
        """Adds the templates of one group.

        Raises:
          LanguageError: Its elements are not written exactly once.
        """
        self.first_band.append(len(self.bands) if group.is_forwarded else -1)
        if group.is_forwarded:
            self.bands += [band.size * group.itemsize for band in group.bands]
        expr = quantized(group.expr)
        if expr is not None:
            self.templates.append(self.quantized.lower(index, group, expr))
        elif scales_in(group.expr):
            self.quantized.scale_groups.append((index, group))
        else:
            self.lower_plain(index, group)

    def lower_plain(self, index: int, group: Group) -> None:
        """Adds the templates of one group that encodes nothing.

        Raises:
          LanguageError: Its elements are not written exactly once.
        """
        lowerer = self._lowerer(group.expr, group.layers, group.cuts)
        origin = tuple(lo for lo, _ in group.box)
        target_dtype = self.problem.families[group.members[0][0]].layout.dtype

        def lowered(band: Band, number: int) -> np.ndarray:
            made = lowerer.lower_box(band.box, group.strides, group.layers, origin)
            self.check_tiled(sum(t.size * t.count for t in made), band.size * group.n_layers)
            self.quantized.note_readers(index, made)
            return self.stacked([self.flat(index, number, t, target_dtype) for t in made])

        (everything,) = bands_of(group, [group.box])
        cut = cut_at_bands(lowered(everything, 0), [band.offset for band in group.bands[1:]])
        if cut is None:
            made = np.concatenate([lowered(band, number) for number, band in enumerate(group.bands)])
        else:
            made = cut.rows
        self.templates.append(made)

    def check_tiled(self, written: int, wanted: int) -> None:
        """Raises:
        LanguageError: Not every element is written exactly once.
        """
        if written != wanted:
            how = "leave out" if written < wanted else "overlap in"
            raise LanguageError(
                f"the boxes of its sources {how} {abs(wanted - written)} of {wanted} elements. Give source "
                "boxes that tile each tensor"
            )

    def stacked(self, flats: Sequence[tuple[int, ...]]) -> np.ndarray:
        """Templates as rows of integers."""
        return np.array(flats, np.int64).reshape(len(flats), TARGET_STRIDES.stop)

    def flat(self, group: int, band: int, t: Template, target_dtype: str) -> tuple[int, ...]:
        """A template as a row of integers, its `BLOCK` not set."""
        convert = self.convert_of(t, target_dtype)
        pad = MAX_DIMS - len(t.dims)
        extents, source_strides, target_strides = zip(*t.dims, strict=True) if t.dims else ((), (), ())
        shard = self.first_holder[t.family] + t.shard if t.family >= 0 else -1
        return (
            group, band, t.family, shard, convert, t.source_offset, t.target_offset, t.count, t.source_tensor,
            t.source_tensor_step, t.source_offset_step, t.layer, t.layer_step, -1,
            *extents, *(1,) * pad, *source_strides, *(0,) * pad, *target_strides, *(0,) * pad,
        )  # fmt: skip

    def expanded(
        self, groups: Sequence[Group], where: Sequence[Place], topology: Topology | None
    ) -> tuple[MoveTable, dict[tuple[int, int], int]]:
        """One row per template and root; sources chosen.

        A template of `count` layers whose roots rotate with period p becomes p rows of every p-th layer.

        Returns:
          The rows, and the rank that serves each (slots' family, shard) to be encoded.
        """
        table = np.concatenate(self.templates)
        self.templates.clear()

        def of_group(values: Iterable[int]) -> np.ndarray:
            return np.array(list(values), np.int64)

        n_members = of_group(len(g.members) for g in groups)
        turns = of_group(g.takes_turns for g in groups) != 0
        roots = of_group(g.roots for g in groups)
        step = table[:, LAYER_STEP]
        of_row = roots[table[:, GROUP]]
        period = np.where(turns[table[:, GROUP]], of_row // np.gcd(of_row, step), 1)
        copies = np.minimum(period, table[:, COUNT])
        row = np.repeat(np.arange(len(table)), copies)
        j = np.arange(len(row)) - np.repeat(np.cumsum(copies) - copies, copies)
        t, period = (table if len(row) == len(table) else table[row]), period[row]
        del table
        group, band = t[:, GROUP], t[:, BAND]
        layer = t[:, LAYER] + j * t[:, LAYER_STEP]
        step = t[:, LAYER_STEP] * period
        count = (t[:, COUNT] - j + period - 1) // period
        since_first = layer - of_group(g.layers[0] for g in groups)[group]
        bands = of_group(len(g.bands) for g in groups)
        place = (np.cumsum(bands) - bands)[group] + band
        turn = np.where(turns[group], since_first % roots[group], np.concatenate([g.turn for g in groups])[place])
        root = np.concatenate([g.route.order[:, 0] for g in groups])[(np.cumsum(roots) - roots)[group] + turn]
        member_list = np.array([member for g in groups for member in g.members], np.int64).reshape(-1, 2)
        family, rank = member_list[(np.cumsum(n_members) - n_members)[group] + root].T
        payload = t[:, EXTENTS].prod(axis=1) * count * of_group(g.itemsize for g in groups)[group]
        source = choose_sources(t[:, SHARD], self.holders, payload, rank, topology)
        order, layer_step, span, _ = (of_group(column)[group] for column in zip(*where, strict=True))
        rounds = of_group(g.rounds for g in groups)[group]
        number = (np.cumsum(roots) - roots)[group] + np.where(turns[group], 0, turn)
        reads = source >= 0
        begin_roots(groups, number[reads], band[reads], source[reads], payload[reads])
        begin = span * np.concatenate([g.round for g in groups])[place] // rounds
        lasts = span // rounds
        chunks = np.maximum(payload // count // CHUNK_NBYTES, 1)
        # who alone needs its bytes gets them at the same time as others, in turn from each trainer
        turned = (rank - source) % (self.problem.source_ranks + self.problem.target_ranks)
        room = np.where(of_group(g.is_paced for g in groups)[group] != 0, CLOSE, lasts // chunks)
        begin += np.where(n_members[group] > 1, scattered(number - source, room), turned)
        first_band = of_group(self.first_band)[group]
        columns = MoveTable.from_columns(
            source_family=t[:, FAMILY],
            source_rank=source,
            target_family=family,
            target_rank=rank,
            extents=t[:, EXTENTS],
            source_strides=t[:, SOURCE_STRIDES],
            target_strides=t[:, TARGET_STRIDES],
            source_offset=t[:, SOURCE_OFFSET] + j * t[:, SOURCE_OFFSET_STEP],
            target_offset=t[:, TARGET_OFFSET],
            count=count,
            source_tensor=t[:, SOURCE_TENSOR] + j * t[:, SOURCE_TENSOR_STEP],
            source_tensor_step=t[:, SOURCE_TENSOR_STEP] * period,
            source_offset_step=t[:, SOURCE_OFFSET_STEP] * period,
            target_tensor=layer - of_group(f.first for f in self.problem.families)[family],
            target_tensor_step=step,
            convert=t[:, CONVERT],
            band=np.where(first_band >= 0, first_band + band, -1),
            hop=0,
            order=order + since_first * layer_step + begin,
            order_step=step * layer_step,
            order_span=lasts,
            block=t[:, BLOCK],
        )
        slots_of_view = np.array([view.family for view in self.quantized.views], np.int64)
        encoding = np.nonzero(t[:, BLOCK] >= 0)[0]
        key = np.stack([slots_of_view[t[encoding, BLOCK]], t[encoding, SHARD]], axis=1)
        pairs, first = np.unique(key, axis=0, return_index=True)
        served = dict(zip(map(tuple, pairs.tolist()), source[encoding[first]].tolist(), strict=True))
        return columns, served
