"""What many tests share: fresh data, meshes, layouts that cut one axis, poisoned memory, comparison of bits."""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from random_problems import fill, local_buffer

import shardfly_jax as sf
from shardfly_jax.executors.memory import Key, Sources
from shardfly_jax.sharding.evaluate import evaluate
from shardfly_jax.sharding.families import TargetTree
from shardfly_jax.sharding.formats import np_dtype
from shardfly_jax.sharding.layouts import Layout
from shardfly_jax.sharding.plan import Plan
from shardfly_jax.sharding.planner import build_plan
from shardfly_jax.sharding.problem import Problem
from shardfly_jax.sharding.replay import replay
from shardfly_jax.sharding.walks import outer_fuse

POISON = 0xA5


def fresh(rng: np.random.Generator, *shape: int, dtype: str = "float32") -> np.ndarray:
    """Random values of a dtype; for floats, over seven decades."""
    return fill(rng, shape, dtype)


def bits(x: Any) -> np.ndarray:
    """The bytes of an array, as a flat array."""
    return np.ascontiguousarray(np.asarray(x)).reshape(-1).view(np.uint8)


def assert_same_bits(have: Any, want: np.ndarray, what: str = "") -> None:
    """Compares shape, dtype and every byte."""
    have = np.asarray(have)
    assert (have.shape, have.dtype) == (want.shape, want.dtype), what
    wrong = np.flatnonzero(bits(have) != bits(want))
    assert not len(wrong), f"{what}: {len(wrong)} of {want.nbytes} bytes differ, the first at {wrong[0]}"


# Quantization


def by_hand(x: np.ndarray, floor: float = 1e-4) -> tuple[np.ndarray, np.float32]:
    """Codes and scale of one block, by vLLM's formula."""
    wide = x.astype(np.float32)
    scale = np.float32(max(np.abs(wide).max(), np.float32(floor)) / np.float32(448))
    return np.clip(wide * (np.float32(1) / scale), -448, 448).astype(ml_dtypes.float8_e4m3fn), scale


def blocks_by_hand(x: np.ndarray, rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales of a matrix, block by block."""
    n, k = x.shape
    codes, scales = np.empty(x.shape, ml_dtypes.float8_e4m3fn), np.empty((-(-n // rows), -(-k // columns)), np.float32)
    for a, b in np.ndindex(scales.shape):
        at = slice(a * rows, (a + 1) * rows), slice(b * columns, (b + 1) * columns)
        codes[at], scales[a, b] = by_hand(x[at])
    return codes, scales


# Pure planning


def cut(
    shape: Sequence[int], dtype: str, axis: int | None = None, parts: int = 1, ranks: Sequence[int] | None = None
) -> Layout:
    """A layout that cuts one axis into parts that are as even as can be."""
    ranks = range(parts) if ranks is None else ranks
    boxes = {}
    for k, rank in enumerate(ranks):
        box = [(0, n) for n in shape]
        if axis is not None:
            box[axis] = (k * shape[axis] // parts, (k + 1) * shape[axis] // parts)
        boxes[rank] = box
    return Layout(shape, dtype, boxes)


def cuttings(shape: Sequence[int]) -> Iterator[tuple[int | None, int]]:
    """(axis, parts): uncut, and each axis into two and three where it is long enough."""
    yield None, 1
    for axis, n in enumerate(shape):
        for parts in (2, 3):
            if n >= parts:
                yield axis, parts


def replayed(plan: Plan, arrays: Mapping[str, np.ndarray]) -> dict[tuple[str, int], np.ndarray]:
    """Runs a plan's moves on poisoned buffers; the shards it leaves by (name, rank of the target tree).

    Every element must have been written exactly once.
    """
    buffers: dict[tuple[int, int, int], np.ndarray] = {}
    writes: dict[tuple[int, int, int], np.ndarray] = {}
    for index, family in enumerate(plan.families):
        for tensor, name in enumerate(family.names if index not in plan.staging_families else ()):
            for rank in family.layout.ranks:
                key, layout = (index, tensor, rank), family.layout
                if family.expr is None:
                    buffers[key] = local_buffer(arrays[name], layout, rank)
                else:
                    size = layout.local_size(rank)
                    buffers[key] = np.full(size * layout.itemsize, POISON, np.uint8).view(np_dtype(layout.dtype))
                    writes[key] = np.zeros(size, int)
    replay(plan, lambda *key: buffers[key], lambda *key: writes[key])
    out = {}
    for key, counts in writes.items():
        family = plan.families[key[0]]
        shape, strides = family.layout.local_shape(key[2]), family.layout.local_strides(key[2])
        steps = [step * family.layout.itemsize for step in strides]
        out[family.name(key[1]), key[2] - plan.source_ranks] = np.ndarray(
            shape, buffers[key].dtype, buffers[key], 0, steps
        )
        assert counts.sum() == math.prod(shape), "every element is written once"
        assert counts.max() == 1, "no element is written twice"
    return out


def check_meaning(
    entries: Mapping[str, sf.Expr],
    arrays: Mapping[str, np.ndarray],
    want: Mapping[str, np.ndarray],
    *,
    cuttings_of_target: Iterable[tuple[int | None, int]] | None = None,
    allow_cast: tuple[str, ...] = (),
) -> None:
    """Both the moves and the stated meaning of a mapping must give `want`, however sources and targets are cut."""
    first = next(iter(want.values()))
    of_source = list(cuttings(next(iter(arrays.values())).shape))
    of_target = list(cuttings(first.shape) if cuttings_of_target is None else cuttings_of_target)
    for (s_axis, s_parts), (t_axis, t_parts) in itertools.product(of_source, of_target):
        sources = {}
        for name, x in arrays.items():
            fits = s_axis is not None and s_axis < x.ndim and x.shape[s_axis] >= s_parts
            sources[name] = cut(x.shape, x.dtype.name, *((s_axis, s_parts) if fits else ()))
        targets = {name: cut(x.shape, x.dtype.name, t_axis, t_parts) for name, x in want.items()}
        tree = TargetTree(name="rollout", tensors=targets, mapping=sf.Mapping(entries), ranks=t_parts)
        plan = build_plan(Problem(sources, s_parts, [tree], allow_cast=allow_cast))
        where = f"source cut {s_axis, s_parts}, target cut {t_axis, t_parts}"
        for (name, rank), have in replayed(plan, arrays).items():
            box = tuple(slice(lo, hi) for lo, hi in targets[name].box(rank))
            assert_same_bits(have, want[name][box], f"moves of {name} on rank {rank}, {where}")
        for index in plan.target_families:
            family = plan.families[index]
            assert family.expr is not None
            fused = outer_fuse(family.expr)
            ranges = family.layout.cuts(fused.axis % len(family.layout.shape)) if fused else ()
            for tensor, name in enumerate(family.names):
                meaning = evaluate(
                    family.expr.astype(family.layout.dtype),
                    lambda source, i: arrays[source.replace("{i}", str(i))],
                    family.first + tensor,
                    ranges,
                )
                assert_same_bits(meaning, want[name], f"meaning of {name}, {where}")


# Real updates


def mesh(shape: Sequence[int], names: str, ids: Sequence[int] | None = None) -> Mesh:
    """A mesh over CPU devices; `names` is split at spaces, `ids` chooses and orders the devices."""
    ids = range(math.prod(shape)) if ids is None else ids
    devices = np.array([jax.devices()[k] for k in ids])
    return Mesh(devices.reshape(shape), tuple(names.split()))


def put(x: np.ndarray, over: Mesh, *spec: Any) -> jax.Array:
    """A global array; every shard has memory of its own (JAX on CPUs adopts NumPy's, and lets replicas share it)."""
    sharding = NamedSharding(over, P(*spec))
    index = sharding.addressable_devices_indices_map(x.shape)
    parts = [jax.device_put(np.array(x[cut_]), device) for device, cut_ in index.items()]
    return jax.make_array_from_single_device_arrays(x.shape, sharding, parts)


def adoptable(x: np.ndarray) -> np.ndarray:
    """A copy in memory so aligned that JAX on CPUs adopts it instead of copying."""
    raw = np.empty(x.nbytes + 256, np.uint8)
    start = -raw.ctypes.data % 256
    out = raw[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
    out[...] = x
    return out


def like(shape: Sequence[int], dtype: Any, over: Mesh, *spec: Any) -> jax.ShapeDtypeStruct:
    """What stands for an array when planning."""
    return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=NamedSharding(over, P(*spec)))


def shards(tree: Any) -> Iterator[tuple[str, jax.Array]]:
    """Single-device arrays of all leaves, with the path of the leaf and the device."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        for shard in leaf.addressable_shards:
            yield f"{jax.tree_util.keystr(path)}@{shard.device.id}", shard.data


def poison(tree: Any) -> None:
    """Overwrites the memory of every array of a tree, so that a byte that is not written is seen."""
    jax.block_until_ready(tree)
    for _, data in shards(tree):
        ctypes.memset(data.unsafe_buffer_pointer(), POISON, data.nbytes)


def memory(tree: Any) -> dict[str, bytes]:
    """A copy of the bytes of every shard, read at its address."""
    return {name: ctypes.string_at(data.unsafe_buffer_pointer(), data.nbytes) for name, data in shards(tree)}


def pointers(tree: Any) -> dict[str, int]:
    """The address of every shard."""
    return {name: data.unsafe_buffer_pointer() for name, data in shards(tree)}


def assert_holds(leaf: jax.Array, want: np.ndarray, what: str = "") -> None:
    """Every shard on every device holds its part of a whole array, bit for bit."""
    assert leaf.shape == want.shape, what
    for shard in leaf.addressable_shards:
        have = np.frombuffer(ctypes.string_at(shard.data.unsafe_buffer_pointer(), shard.data.nbytes), want.dtype)
        assert_same_bits(have.reshape(shard.data.shape), want[shard.index], f"{what} {shard.device}")


def updated(params: Any, plan: sf.Plan) -> Any:
    """Poisons every registered buffer, synchronizes, and returns the rollout's params."""
    poison_buffers(plan)
    return sf.sync(params, plan)


def sources_of(arrays: Mapping[Key, jax.Array]) -> Sources:
    """Source shards for an executor, by key."""
    return Sources({key: place for place, key in enumerate(arrays)}, list(arrays.values()))


def poison_buffers(plan: sf.Plan, pattern: int = POISON) -> None:
    """Overwrites every registered buffer."""
    for shard in plan.registered().buffers.values():
        if shard.device.platform == "gpu":
            from cuda.bindings import runtime

            assert not runtime.cudaMemset(shard.address, pattern, shard.nbytes)[0].value
            assert not runtime.cudaDeviceSynchronize()[0].value
        else:
            ctypes.memset(shard.address, pattern, shard.nbytes)


def registered_bytes(plan: sf.Plan) -> dict[tuple[int, int, int], bytes]:
    """A copy of what every registered buffer holds."""
    return {key: ctypes.string_at(s.address, s.nbytes) for key, s in plan.registered().buffers.items()}
