"""Random quantized mappings for property tests: any sharding of the trainer, blocks that the rollout does not cut."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
from hypothesis import assume, strategies as st
from random_problems import Case, cuts, expressions, fill, layouts

import shardfly_jax as sf
from shardfly_jax import formats
from shardfly_jax.sharding.families import TargetTree
from shardfly_jax.sharding.grids import grid_shape
from shardfly_jax.sharding.language import Expr, fuse, scale_of, src
from shardfly_jax.sharding.layouts import Layout
from shardfly_jax.sharding.mapping import Mapping
from shardfly_jax.sharding.quantization import Format


@dataclasses.dataclass(frozen=True, kw_only=True)
class SmallFp4(formats.MxFp4):
    """Blocks that small shards share."""

    @property
    def block(self) -> tuple[int | None, int | None]:
        return 1, 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fp4Tensor(formats.Fp8Tensor):
    """Half a byte, and scopes that a layout decides."""

    codes = "float4_e2m1fn"
    largest = divisor = 6.0


FORMATS: list[Format] = [
    formats.Fp8Block(rows=2, columns=3), formats.Fp8Block(rows=4, columns=2, scale="power_of_two"),
    formats.Fp8Block(rows=1, columns=4, scale="e8m0"), formats.Fp8Block(rows=3, columns=1, formula="factor"),
    formats.Fp8Block(), formats.Fp8Channel(formula="divide"), formats.Fp8Channel(local=True), formats.Int8Channel(),
    formats.Fp8Tensor(), formats.Fp8Tensor(per="part"), formats.Fp8Tensor(per="rank"), formats.MxFp8(),
    formats.triton_mxfp4(), SmallFp4(), SmallFp4(carry=1 << 21), Fp4Tensor(per="rank", formula="divide"),
]  # fmt: skip
PACKED = [format for format in FORMATS if format.per_byte > 1]


@st.composite
def payload_layouts(
    draw: Callable, shape: tuple[int, ...], format: Format, max_ranks: int, fused: tuple[int, int] | None
) -> Layout:
    """A layout of the codes of values of a shape, whose cuts no block crosses, and which are not inside a byte."""
    axes: list[list[tuple[int, int]]] = []
    for a, n in enumerate(shape):
        block = format.block[a - len(shape)] if a >= len(shape) - 2 else 1
        if fused and fused[0] == a:
            axes.append(draw(cuts(n, parts=fused[1])))
        elif fused or math.prod(map(len, axes)) > max_ranks // 2:
            axes.append([(0, n)])
        elif block is None:
            grain = format.per_byte if a == len(shape) - 1 else 1
            axes.append([(lo * grain, hi * grain) for lo, hi in draw(cuts(n // grain))])
        else:
            axes.append([(lo * block, min(hi * block, n)) for lo, hi in draw(cuts(-(-n // block)))])
    boxes = list(itertools.product(*axes))
    if len(boxes) > max_ranks:
        boxes = [tuple((0, n) for n in shape)]
    boxes = [(*outer, (lo // format.per_byte, hi // format.per_byte)) for *outer, (lo, hi) in boxes]
    boxes = boxes * draw(st.integers(1, max(1, max_ranks // len(boxes))))
    ranks = draw(st.permutations(range(len(boxes))))
    strides = None
    if len(shape) == 2 and draw(st.integers(0, 3)) == 0:  # held transposed
        strides = {rank: (1, box[0][1] - box[0][0]) for rank, box in zip(ranks, boxes, strict=True)}
    return Layout(format.stored_shape(shape), format.stored, dict(zip(ranks, boxes, strict=True)), strides)


@st.composite
def quantized_cases(draw: Callable, max_depth: int = 2, max_ranks: int = 8, among: Sequence[Format] = FORMATS) -> Case:
    """A random trainer, one or two rollouts with codes and scales."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    first = draw(st.integers(0, 1))
    stop = first + draw(st.integers(1, 3))
    arrays: dict[str, np.ndarray] = {}
    sources: dict[str, Layout] = {}
    counter = itertools.count()
    source_ranks = draw(st.sampled_from([1, 2, 4, max_ranks]))
    dtype = draw(st.sampled_from(["float32", "bfloat16"]))

    def leaf() -> tuple[Expr, tuple[int, ...]]:
        shape = tuple(draw(st.lists(st.sampled_from([1, 2, 4, 6, 8, 12]), min_size=2, max_size=3)))
        number = next(counter)
        layout, other = (draw(layouts(shape, dtype, source_ranks)) for _ in range(2))
        if draw(st.booleans()):
            for i in range(stop):  # two stages, as pipeline parallel trainers have
                name = f"h.{i}.w{number}"
                arrays[name], sources[name] = fill(rng, shape, dtype), layout if i < stop - 1 else other
            return src(f"h.{{i}}.w{number}"), shape
        axis = draw(st.integers(0, len(shape)))
        full, name = (*shape[:axis], stop, *shape[axis:]), f"w{number}"
        arrays[name], sources[name] = fill(rng, full, dtype), draw(layouts(full, dtype, source_ranks))
        return src(name)[(slice(None),) * axis + ("{i}",)], shape

    value, shape = draw(expressions(leaf, draw(st.integers(0, max_depth))))
    while len(shape) < 2:
        axes = " ".join("ab"[: len(shape)])
        value, shape = value.rearrange(f"{axes} -> 1 {axes}".strip()), (1, *shape)
    format = draw(st.sampled_from(among))
    if shape[-1] % format.per_byte:
        value, shape = value.repeat(format.per_byte, axis=-1), (*shape[:-1], shape[-1] * format.per_byte)
    fused = None
    if draw(st.integers(0, 2)) == 0:
        axis = draw(st.integers(0, len(shape) - (1 if format.per_byte == 1 else 2)))
        block = (*(1,) * (len(shape) - 2), *format.block)[axis] or 1
        per = [k for k in range(1, shape[axis] + 1) if shape[axis] % k == 0 and shape[axis] // k % block == 0]
        if per and max(per) <= max_ranks:
            value = fuse(value, value.scale(2.0), value.repeat(2, axis=axis), axis=axis)
            shape = (*shape[:axis], shape[axis] * 4, *shape[axis + 1 :])
            fused = (axis, draw(st.sampled_from(per)))
    scales: Expr = scale_of("m.{i}.t")
    order = draw(st.permutations(range(len(shape))))
    names = "abcde"[: len(shape)]
    if list(order) != sorted(order) or draw(st.booleans()):
        scales = scales.rearrange(f"{' '.join(names)} -> {' '.join(names[k] for k in order)}")
    follow = draw(st.sampled_from(["nothing", "nothing", "slice", "take", "repeat", "pad"]))
    axis = draw(st.integers(0, len(shape) - 1))

    def followed(expr: Expr, grid: tuple[int, ...]) -> tuple[Expr, tuple[int, ...]]:
        n = grid[axis]
        match follow:
            case "slice":
                return expr[(slice(None),) * axis + (slice(n // 2, None),)], (
                    *grid[:axis],
                    n - n // 2,
                    *grid[axis + 1 :],
                )
            case "take":
                return expr.take([n - 1, 0, 0], axis=axis), (*grid[:axis], 3, *grid[axis + 1 :])
            case "repeat":
                return expr.repeat(2, axis=axis), (*grid[:axis], 2 * n, *grid[axis + 1 :])
            case "pad":
                widths = [(0, int(a == axis)) for a in range(len(grid))]
                return expr.pad(widths, 1), (*grid[:axis], n + 1, *grid[axis + 1 :])
        return expr, grid

    trees = []
    for number in range(draw(st.integers(1, 2))):
        # two stages: the last layer may lie elsewhere, if its scales have the same shape
        staged = [draw(payload_layouts(shape, format, max_ranks, fused)) for _ in range(2)]
        grids = [_grid(format, shape, layout, fused) for layout in staged]
        if grids[0] != grids[1] or draw(st.booleans()):
            staged[1], grids[1] = staged[0], grids[0]
        expr, grid = followed(scales, tuple(grids[0][k] for k in order))
        of_scales = draw(layouts(grid, format.scale_dtype, max_ranks))
        names_ = {f"m.{i}.t": staged[i == stop - 1] for i in range(first, stop)}
        names_ |= {f"m.{i}.s": of_scales for i in range(first, stop)}
        ranks = 1 + max(rank for layout in names_.values() for rank in layout.ranks)
        mapping = Mapping({"m.{i}.t": value.quantize(format), "m.{i}.s": expr})
        trees.append(TargetTree(name=f"r{number}", tensors=names_, mapping=mapping, ranks=ranks))
    case = Case(arrays, sources, source_ranks, trees)
    if format.per_byte > 1:
        assume(not _is_refused(case))
    return case


def _is_refused(case: Case) -> bool:
    """Whether two codes of some byte lie apart."""
    try:
        case.plan()
    except sf.PlanError as error:
        if not all("Cut sources, and join parts, at even columns" in fault for fault in error.faults):
            raise
        return True
    return False


def _grid(format: Format, shape: tuple[int, ...], layout: Layout, fused: tuple[int, int] | None) -> tuple[int, ...]:
    """Shape of the scales, counted by hand."""
    grid = list(grid_shape(format, shape, ((), ())))
    for axis in (-2, -1):
        if format.scope == "rank" and format.block[axis] is None:
            grid[axis] = len(layout.cuts(axis % len(shape)))
        if format.scope == "part" and fused is not None and fused[0] - len(shape) == axis:
            grid[axis] = 3
    return tuple(grid)
