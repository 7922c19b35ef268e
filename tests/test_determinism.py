"""Equal inputs give equal plans on every machine, in every process and in every order; offsets are 64-bit."""

from __future__ import annotations

import collections
import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checks import cut
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec as P
from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__

import shardfly_jax as sf
from shardfly_jax.sharding.families import TargetTree
from shardfly_jax.sharding.plan import Plan
from shardfly_jax.sharding.planner import build_plan
from shardfly_jax.sharding.problem import Problem

TRAINER = AbstractMesh((4, 2), ("fsdp", "tp"))
ROLLOUT = AbstractMesh((3, 4), ("dp", "tp"))
LAYERS = 5


def like(mesh: AbstractMesh, shape: tuple[int, ...], dtype: str, *spec: Any) -> Any:
    import jax

    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


MAPPING = {
    "h.{i}.qkv": sf.fuse(
        sf.src("layers.{i}.q").rearrange("d n h -> (n h) d"),
        sf.src("layers.{i}.k").repeat(2, axis=1).rearrange("d n h -> (n h) d"), axis=0,
    ),
    "h.{i}.experts.{e}": sf.src("moe")["{i}", "{e}"].rearrange("a b -> b a").scale(1 / 3),
    "h.{i}.q": sf.src("layers.{i}.q").rearrange("d n h -> (n h) d").quantize(sf.formats.Fp8Channel()),
    "h.{i}.q_scale": sf.scale_of("h.{i}.q").rearrange("n 1 -> n"),
    "h.{i}.norm": sf.src("layers.{i}.norm"),
    "embed": sf.src("embed").pad([(0, 6), (0, 0)]).astype("bfloat16"),
    "head": sf.alias("embed"),
    "tail": sf.alias("embed"),
}  # fmt: skip


def rich_plan(order: int = 1, container: type = dict, topology: sf.Topology | None = None) -> sf.Plan:
    """A plan with ties to break everywhere: replicas on both sides, equal sizes, many tensors.

    Args:
      order: Step with which keys are permuted; 1 leaves them as they are.
      container: What holds them.
    """
    source = {"embed": like(TRAINER, (250, 16), "float32", "tp", "fsdp")}
    source["moe"] = like(TRAINER, (LAYERS, 4, 8, 16), "float32", None, "fsdp", None, "tp")
    target = {name: like(ROLLOUT, (256, 16), "bfloat16", "tp") for name in ("embed", "head", "tail")}
    for i in range(LAYERS):
        source[f"layers.{i}.q"] = like(TRAINER, (16, 8, 2), "float32", "fsdp", "tp")
        source[f"layers.{i}.k"] = like(TRAINER, (16, 4, 2), "float32", "fsdp", "tp")
        source[f"layers.{i}.norm"] = like(TRAINER, (16,), "float32")
        target[f"h.{i}.qkv"] = like(ROLLOUT, (32, 16), "float32", "tp")
        target[f"h.{i}.q"] = like(ROLLOUT, (16, 16), "float8_e4m3fn", "tp")
        target[f"h.{i}.q_scale"] = like(ROLLOUT, (16,), "float32", "tp")
        target[f"h.{i}.norm"] = like(ROLLOUT, (16,), "float32")
        target |= {f"h.{i}.experts.{e}": like(ROLLOUT, (16, 8), "float32", None, "tp") for e in range(4)}

    def permuted(tree: dict[str, Any]) -> Any:
        names = list(tree)
        return container(
            [(names[k * order % len(names)], tree[names[k * order % len(names)]]) for k in range(len(names))]
        )

    return sf.make_plan(permuted(source), permuted(target), sf.Mapping(MAPPING), topology=topology)


def digest_elsewhere(**env: str) -> str:
    """The digest of the rich plan as another process finds it."""
    code = "import test_determinism as t; print(t.rich_plan().digest)"
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    done = subprocess.run(
        [sys.executable, "-P", "-W", "ignore", "-c", code],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path, **env},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_rich_plan_has_ties() -> None:
    plan = rich_plan()
    assert len(plan.replicas) == 3
    assert plan.moves.hop.max() >= 1
    assert len(plan.moves) > 100


@pytest.mark.parametrize("seed", ["1", "2"])
def test_another_process_with_another_hash_seed_finds_the_same_digest(seed: str) -> None:
    assert digest_elsewhere(PYTHONHASHSEED=seed) == rich_plan().digest


def test_a_process_without_vector_instructions_finds_the_same_digest() -> None:
    disabled = [name for name in __cpu_dispatch__ if __cpu_features__.get(name)]
    if not disabled:
        pytest.skip("NumPy uses no optional CPU feature on this machine")
    assert digest_elsewhere(NPY_DISABLE_CPU_FEATURES=" ".join(disabled)) == rich_plan().digest


@pytest.mark.parametrize("order", [3, 5, -1])
def test_the_order_of_keys_does_not_matter(order: int) -> None:
    assert rich_plan(order).digest == rich_plan().digest


def test_the_order_of_an_ordered_dict_does_not_matter() -> None:
    """JAX sorts the keys of a dict, but not those of an OrderedDict."""
    assert rich_plan(3, collections.OrderedDict).digest == rich_plan(1, collections.OrderedDict).digest
    names = [f"{group}.{i}" for group in "ba" for i in range(3)]
    digests = set()
    for some in (names, names[::-1], sorted(names)):
        source = collections.OrderedDict((name, like(TRAINER, (8, 8), "float32", "fsdp", "tp")) for name in some)
        target = collections.OrderedDict((name, like(ROLLOUT, (8, 8), "float32", "tp")) for name in some)
        digests.add(sf.make_plan(source, target).digest)
    assert len(digests) == 1


def test_a_topology_is_part_of_the_inputs_and_is_as_deterministic() -> None:
    topology = sf.preset("h100", hosts=3)
    assert rich_plan(topology=topology).digest == rich_plan(3, topology=topology).digest


def test_plans_do_not_change_under_a_reader() -> None:
    plan = rich_plan()
    for column in (*plan.moves.columns.values(), plan.bands):
        with pytest.raises(ValueError, match="read-only"):
            column[...] = 0
    with pytest.raises(AttributeError):
        plan.source_ranks = 3  # type: ignore[misc]


# Offsets beyond 2**31 elements


def planned(source: sf.Layout, targets: dict[str, sf.Layout], entries: dict[str, sf.Expr]) -> Plan:
    ranks = 1 + max(layout.ranks[-1] for layout in targets.values())
    tree = TargetTree(name="rollout", tensors=targets, mapping=sf.Mapping(entries), ranks=ranks)
    return build_plan(Problem({"w": source}, source.ranks[-1] + 1, [tree]))


def test_source_offsets_beyond_two_to_the_31_are_exact() -> None:
    rows, columns = 300_000, 16_384  # 4.9e9 elements on one rank
    shape = (rows, columns)
    plan = planned(cut(shape, "float32"), {"t": cut(shape, "float32", 0, 4)}, {"t": sf.src("w")})
    found = {(move.target_rank, move.source_offset, move.target_offset, move.extents) for move in plan.moves}
    assert found == {(1 + k, k * 75_000 * 16_384, 0, (75_000 * 16_384,)) for k in range(4)}
    assert max(move.source_offset for move in plan.moves) == 3_686_400_000 > 2**31
    assert plan.nbytes == rows * columns * 4


def test_target_offsets_and_strides_beyond_two_to_the_31_are_exact() -> None:
    """A transpose of three long columns."""
    rows, columns = 2_863_311_531, 3
    source = cut((rows, columns), "bfloat16", 1, 3)
    plan = planned(source, {"t": cut((columns, rows), "bfloat16")}, {"t": sf.src("w").rearrange("a b -> b a")})
    found = {(move.source_rank, move.source_offset, move.target_offset, move.extents) for move in plan.moves}
    assert found == {(k, 0, k * rows, (rows,)) for k in range(3)}
    assert max(move.target_offset for move in plan.moves) == 5_726_623_062 > 2**32
    whole = planned(cut((rows, columns), "bfloat16"), {"t": cut((columns, rows), "bfloat16")},
                    {"t": sf.src("w").rearrange("a b -> b a")})  # fmt: skip
    (move,) = whole.moves
    assert sorted(zip(move.extents, move.source_strides, move.target_strides, strict=True)) == [
        (3, 1, rows),
        (rows, 3, 1),
    ]


def test_layers_of_a_stacked_source_step_beyond_two_to_the_31() -> None:
    layers, rows, columns = 80, 8_192, 28_672
    targets = {f"t.{i}": cut((rows, columns), "bfloat16", 0, 2) for i in range(layers)}
    plan = planned(cut((layers, rows, columns), "bfloat16"), targets, {"t.{i}": sf.src("w")["{i}"]})
    assert len(plan.moves) == 2
    half = rows // 2 * columns
    for k, move in enumerate(sorted(plan.moves, key=lambda move: move.target_rank)):
        assert (move.count, move.extents, move.target_offset) == (layers, (half,), 0)
        assert (move.source_offset, move.source_offset_step) == (k * half, rows * columns)
        last = move.source_offset + (layers - 1) * move.source_offset_step
        assert last == k * 117_440_512 + 79 * 234_881_024 > 2**34
    assert plan.target_nbytes == layers * rows * columns * 2


def test_forwards_of_large_tensors_have_exact_offsets() -> None:
    """Two replicas of a tensor of 2**32 + 2**20 elements: its bands tile it, and each is passed on where it arrived."""
    size = 2**32 + 2**20
    layout = sf.Layout((size,), "bfloat16", {0: [(0, size)], 1: [(0, size)]})
    plan = planned(cut((size,), "bfloat16"), {"t": layout}, {"t": sf.src("w")})
    for rank in (1, 2):
        arrived = sorted((m.target_offset, m.target_offset + m.extents[0]) for m in plan.moves if m.target_rank == rank)
        assert arrived[0][0] == 0
        assert arrived[-1][1] == size
        assert all(end == start for (_, end), (start, _) in itertools.pairwise(arrived))
    assert all(move.source_offset == move.target_offset for move in plan.moves)
    assert np.array(plan.bands).sum() == size * 2
