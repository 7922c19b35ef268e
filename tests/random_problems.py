"""Random mappings and layouts for property tests, and what the targets must hold afterwards."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable

import numpy as np
from hypothesis import strategies as st

from shardfly_jax.sharding.evaluate import evaluate
from shardfly_jax.sharding.families import TargetTree
from shardfly_jax.sharding.formats import np_dtype
from shardfly_jax.sharding.language import Expr, concat, fuse, src, stack
from shardfly_jax.sharding.layouts import Layout
from shardfly_jax.sharding.mapping import Mapping
from shardfly_jax.sharding.plan import Plan
from shardfly_jax.sharding.planner import build_plan
from shardfly_jax.sharding.problem import Problem
from shardfly_jax.sharding.replay import replay
from shardfly_jax.sharding.topology import Topology
from shardfly_jax.sharding.walks import outer_fuse

EXTENTS = st.sampled_from([1, 2, 3, 4, 6, 8, 12])


@dataclasses.dataclass
class Case:
    """A problem with its data: whole source arrays by name, and the arguments of `Problem`."""

    arrays: dict[str, np.ndarray]
    sources: dict[str, Layout]
    source_ranks: int
    targets: list[TargetTree]

    def plan(self, topology: Topology | None = None) -> Plan:
        problem = Problem(self.sources, self.source_ranks, self.targets, allow_cast=("*",), unused=idle(self))
        return build_plan(problem, topology)


def idle(case: Case) -> tuple[str, ...]:
    """Names of layers below the target's first one, which random cases may leave unused."""
    try:
        Problem(case.sources, case.source_ranks, case.targets, allow_cast=("*",))
    except ValueError as error:
        return tuple(fault.split("'")[1] for fault in error.faults if fault.startswith("unused"))
    return ()


def fill(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Random values; for floats, also very small and large ones."""
    if np_dtype(dtype).kind in "iu":
        return rng.integers(0, 100, shape).astype(np_dtype(dtype))
    return (rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 4, shape)).astype(np.float32).astype(np_dtype(dtype))


@st.composite
def cuts(draw: Callable, n: int, parts: int | None = None) -> list[tuple[int, int]]:
    """Ranges that tile [0, n): even ones, or any."""
    if parts is None and n > 1 and draw(st.booleans()):
        edges = sorted({0, n, *draw(st.lists(st.integers(1, n - 1), max_size=2))})
        return list(itertools.pairwise(edges))
    parts = parts or draw(st.sampled_from([k for k in range(1, n + 1) if n % k == 0 and k <= 8]))
    return [(k * n // parts, (k + 1) * n // parts) for k in range(parts)]


@st.composite
def layouts(
    draw: Callable, shape: tuple[int, ...], dtype: str, max_ranks: int, fused: tuple[int, int] | None = None
) -> Layout:
    """A layout of at most `max_ranks` ranks in random order, perhaps replicated, perhaps strided."""
    axes = [draw(cuts(n, parts=fused[1] if fused and fused[0] == a else None)) for a, n in enumerate(shape)]
    if fused is None:
        for a in range(len(axes)):
            if math.prod(len(axis) for axis in axes) > max_ranks:
                axes[a] = [(0, shape[a])]
    else:
        axes = [axis if a == fused[0] else [(0, shape[a])] for a, axis in enumerate(axes)]
    boxes = list(itertools.product(*axes))
    copies = draw(st.sampled_from([1, 1, 2, 3]))
    boxes = (boxes * copies)[:max_ranks] if len(boxes) * copies <= max_ranks else boxes
    ranks = draw(st.permutations(range(len(boxes))))
    strides = None
    if len(shape) == 2 and draw(st.integers(0, 3)) == 0:  # held transposed
        strides = {rank: (1, box[0][1] - box[0][0]) for rank, box in zip(ranks, boxes, strict=True)}
    return Layout(shape, dtype, dict(zip(ranks, boxes, strict=True)), strides)


@st.composite
def expressions(
    draw: Callable, leaf: Callable[[], tuple[Expr, tuple[int, ...]]], depth: int
) -> tuple[Expr, tuple[int, ...]]:
    """A random expression and its shape."""
    if depth == 0:
        return leaf()
    expr, shape = draw(expressions(leaf, depth - 1))
    ops = ["rearrange", "rearrange", "repeat", "pad", "take", "index", "concat", "stack", "scale", "divide", "astype"]
    op = draw(st.sampled_from(ops if math.prod(shape) <= 600 else ["rearrange", "index"]))
    axis = draw(st.integers(0, len(shape) - 1)) if shape else 0
    if not shape and op not in ("scale", "divide", "astype", "stack"):
        return expr, shape

    def with_axis(n: int) -> tuple[int, ...]:
        return (*shape[:axis], n, *shape[axis + 1 :])

    match op:
        case "rearrange":
            return draw(_rearranged(expr, shape))
        case "repeat":
            repeats = draw(st.integers(1, 3))
            return expr.repeat(repeats, axis=axis), with_axis(shape[axis] * repeats)
        case "pad":
            widths = [draw(st.sampled_from([(0, 0), (0, 1), (2, 1)])) for _ in shape]
            return expr.pad(widths, 7), tuple(n + a + b for n, (a, b) in zip(shape, widths, strict=True))
        case "take":
            indices = draw(st.lists(st.integers(-shape[axis], shape[axis] - 1), min_size=1, max_size=6))
            return expr.take(indices, axis=axis), with_axis(len(indices))
        case "index":
            items, out = [], []
            for n in shape:
                if len(shape) > 1 and len(items) - len(out) < len(shape) - 1 and draw(st.integers(0, 5)) == 0:
                    items.append(draw(st.integers(-n, n - 1)))
                    continue
                lo = draw(st.integers(0, n - 1))
                hi = draw(st.integers(lo + 1, n))
                step = draw(st.sampled_from([1, 1, 1, 2, 3, -1, -2]))
                item = slice(lo, hi, step) if step > 0 else slice(hi - 1, lo - 1 if lo else None, step)
                items.append(item)
                out.append(len(range(n)[item]))
            return expr[tuple(items)], tuple(out)
        case "concat":
            lo = draw(st.integers(0, shape[axis] - 1))
            part = expr[(slice(None),) * axis + (slice(lo, None),)].scale(2.0)
            return concat([expr, part], axis), with_axis(2 * shape[axis] - lo)
        case "stack":
            return stack([expr, expr.scale(3.0, 1.0)], axis), (*shape[:axis], 2, *shape[axis:])
        case "scale":
            return expr.scale(0.37, draw(st.sampled_from([0.0, -1.0]))), shape
        case "divide":
            return expr.divide(3.0), shape
        case _:
            return expr.astype("bfloat16").astype("float32"), shape


@st.composite
def _rearranged(draw: Callable, expr: Expr, shape: tuple[int, ...]) -> tuple[Expr, tuple[int, ...]]:
    left, names, sizes, given = [], [], {}, {}
    for a, n in enumerate(shape):
        factors = [k for k in range(2, n) if n % k == 0]
        group = [f"x{a}"]
        sizes[f"x{a}"] = n
        if factors and draw(st.booleans()):
            inner = draw(st.sampled_from(factors))
            group.append(f"y{a}")
            sizes[f"x{a}"], sizes[f"y{a}"] = n // inner, inner
            given[f"y{a}"] = inner
        left.append(group)
        names += group
    right: list[list[str]] = []
    for name in draw(st.permutations(names)):
        if right and (len(right) >= 4 or draw(st.booleans())):
            right[-1].append(name)
        else:
            right.append([name])
    text = [" ".join(f"({' '.join(group)})" for group in side) for side in (left, right)]
    return expr.rearrange(" -> ".join(text), **given), tuple(math.prod(sizes[x] for x in group) for group in right)


@st.composite
def cases(draw: Callable, max_depth: int = 4, max_ranks: int = 8, even: bool = False) -> Case:
    """A random trainer, one or two rollouts, and one mapping between them."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    first = draw(st.integers(0, 2))
    stop = first + draw(st.integers(1, 3))
    arrays: dict[str, np.ndarray] = {}
    sources: dict[str, Layout] = {}
    counter = itertools.count()
    source_ranks = draw(st.sampled_from([1, 2, 4, max_ranks]))

    def add(name: str, shape: tuple[int, ...], layout: Layout) -> None:
        arrays[name], sources[name] = fill(rng, shape, layout.dtype), layout

    def leaf() -> tuple[Expr, tuple[int, ...]]:
        shape = tuple(draw(st.lists(EXTENTS, min_size=1, max_size=3)))
        number = next(counter)
        kind = draw(st.sampled_from(["family", "plain", "scanned"]))
        if kind == "family":
            layout = draw(layouts(shape, "float32", source_ranks))
            other = draw(layouts(shape, "float32", source_ranks))
            for i in range(stop):  # two stages, as pipeline parallel trainers have
                add(f"h.{i}.w{number}", shape, layout if i < stop - 1 else other)
            return src(f"h.{{i}}.w{number}"), shape
        if kind == "plain":
            add(f"w{number}", shape, draw(layouts(shape, "float32", source_ranks)))
            return src(f"w{number}"), shape
        shift = draw(st.sampled_from([0, -first]))
        axis = draw(st.integers(0, len(shape)))
        full = (*shape[:axis], stop + shift, *shape[axis:])
        add(f"w{number}", full, draw(layouts(full, "float32", source_ranks)))
        return src(f"w{number}")[(slice(None),) * axis + ("{i}" + (f"{shift:+d}" if shift else ""),)], shape

    expr, shape = draw(expressions(leaf, draw(st.integers(1, max_depth))))
    fused = None
    if shape and draw(st.integers(0, 2)) == 0:
        axis = draw(st.integers(0, len(shape) - 1))
        parts = draw(st.sampled_from([k for k in range(1, shape[axis] + 1) if shape[axis] % k == 0 and k <= max_ranks]))
        expr = fuse(expr, expr.scale(2.0), expr.repeat(2, axis=axis), axis=axis)
        shape = (*shape[:axis], shape[axis] * 4, *shape[axis + 1 :])
        fused = (axis, parts)
    dtype = draw(st.sampled_from(["float32", "bfloat16", "float16"]))
    trees = []
    layout = None
    for number in range(draw(st.integers(1, 2))):
        if layout is None or draw(st.booleans()):
            layout = draw(layouts(shape, dtype, max_ranks, fused))
        names = {f"m.{i}.t": layout for i in range(first, stop)}
        trees.append(
            TargetTree(name=f"r{number}", tensors=names, mapping=Mapping({"m.{i}.t": expr}), ranks=len(layout.ranks))
        )
    return Case(arrays, sources, source_ranks, trees)


def local_buffer(array: np.ndarray, layout: Layout, rank: int) -> np.ndarray:
    """What a rank holds of a whole array, as a flat buffer; holes of strided buffers are zero."""
    flat = np.zeros(layout.local_size(rank), array.dtype)
    view = np.lib.stride_tricks.as_strided(
        flat, layout.local_shape(rank), [s * flat.itemsize for s in layout.local_strides(rank)]
    )
    view[...] = array[tuple(slice(lo, hi) for lo, hi in layout.box(rank))]
    return flat


def source_buffers(case: Case, plan: Plan) -> dict[tuple[int, int, int], np.ndarray]:
    """Flat local buffer of every source shard, by (family, tensor, rank)."""
    return {
        (index, tensor, rank): local_buffer(case.arrays[name], plan.families[index].layout, rank)
        for index in plan.source_families
        for tensor, name in enumerate(plan.families[index].names)
        for rank in plan.families[index].layout.ranks
    }


def expected_buffers(case: Case, plan: Plan) -> dict[tuple[int, int, int], np.ndarray]:
    """What every target buffer must hold, by the language's meaning."""
    out = {}
    for index in plan.target_families:
        family = plan.families[index]
        fused = outer_fuse(family.expr)
        cut = family.layout.cuts(fused.axis % len(family.layout.shape)) if fused else ()
        expr = family.expr.astype(family.layout.dtype)
        for tensor in range(family.count):
            i = family.first + tensor
            whole = evaluate(expr, lambda name, i: case.arrays[name.replace("{i}", str(i))], i, cut)
            for rank in family.layout.ranks:
                out[index, tensor, rank] = local_buffer(whole, family.layout, rank)
    return out


def check(case: Case, plan: Plan) -> None:
    """Replays a plan on poisoned buffers: every element written once, every byte equal to the language's meaning."""
    want = expected_buffers(case, plan)
    buffers = source_buffers(case, plan)
    writes = {key: np.zeros(len(flat), int) for key, flat in want.items()}
    buffers |= {key: np.full(flat.nbytes, 0xA5, np.uint8).view(flat.dtype) for key, flat in want.items()}
    replay(plan, lambda *key: buffers[key], lambda *key: writes[key])
    for key, flat in want.items():
        assert (writes[key] == 1).all()
        assert buffers[key].tobytes() == flat.tobytes()
