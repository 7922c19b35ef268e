"""The parts of real models, from a JAX trainer's layout to an engine's, with expectations written by hand."""

from __future__ import annotations

from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from checks import assert_holds, assert_same_bits, fresh, like, mesh, put, updated

import shardfly_jax as sf

BF16 = ml_dtypes.bfloat16


def update(params: dict[str, jax.Array], target: Any, mapping: dict[str, sf.Expr], **options: Any) -> Any:
    """Plans, registers, poisons, synchronizes, verifies."""
    plan = sf.register(sf.make_plan(params, target, sf.Mapping(mapping), **options))
    out = updated(params, plan)
    assert sf.verify(params, plan) == plan.target_nbytes
    return out


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_grouped_query_attention_with_fewer_kv_heads_than_ranks(rng: np.random.Generator, tp: int) -> None:
    """Each rank holds its query heads and the kv head that they attend to, repeated where ranks share one."""
    width, heads, kv_heads, dim = 6, 8, 2, 4
    q, k, v = (fresh(rng, width, n, dim) for n in (heads, kv_heads, kv_heads))
    over, rollout = mesh((2, 2), "fsdp tp", [1, 0, 3, 2]), mesh((tp,), "tp", list(range(8))[-tp:])
    params = {name: put(x, over, "fsdp", "tp") for name, x in {"q": q, "k": k, "v": v}.items()}
    copies = max(tp // kv_heads, 1)
    rows = (heads + 2 * kv_heads * copies) * dim
    parts = [
        sf.src("q").rearrange("d n h -> (n h) d"),
        *(sf.src(name).repeat(copies, axis=1).rearrange("d n h -> (n h) d") for name in "kv"),
    ]
    out = update(params, {"qkv": like((rows, width), "bfloat16", rollout, "tp")},
                 {"qkv": sf.fuse(*parts, axis=0).astype("bfloat16")})  # fmt: skip
    ranks = []
    for rank in range(tp):
        own_q = [q[:, n].T for n in range(rank * heads // tp, (rank + 1) * heads // tp)]
        served = (
            range(rank * kv_heads // tp, (rank + 1) * kv_heads // tp) if tp <= kv_heads else [rank * kv_heads // tp]
        )
        ranks += own_q + [k[:, n].T for n in served] + [v[:, n].T for n in served]
    assert_holds(out["qkv"], np.concatenate(ranks).astype(BF16))


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("cut", [0, 1, 2])
def test_scanned_layers_are_unstacked_from_any_axis(rng: np.random.Generator, axis: int, cut: int) -> None:
    """The trainer may even cut the axis of the layers."""
    layers = [fresh(rng, 4, 8) for _ in range(4)]
    stacked = np.stack(layers, axis)
    over, rollout = mesh((4,), "x", [2, 0, 1, 3]), mesh((2,), "y", [5, 4])
    params = {"decoder.wo": put(stacked, over, *(("x" if a == cut else None) for a in range(3)))}
    target = {f"layers.{i}.wo": like((8, 4), "float32", rollout, None, "y") for i in range(4)}
    expr = sf.src("decoder.wo")[(slice(None),) * axis + ("{i}",)].rearrange("f d -> d f")
    out = update(params, target, {"layers.{i}.wo": expr})
    for i, layer in enumerate(layers):
        assert_holds(out[f"layers.{i}.wo"], np.ascontiguousarray(layer.T), f"layer {i}")


def test_layers_are_stacked_for_a_scanning_engine(rng: np.random.Generator) -> None:
    layers = [fresh(rng, 4, 8) for _ in range(3)]
    over, rollout = mesh((2,), "x"), mesh((3,), "y", [4, 5, 6])
    params = {f"h.{i}": put(x, over, "x") for i, x in enumerate(layers)}
    out = update(
        params,
        {"all": like((3, 4, 8), "float32", rollout, "y")},
        {"all": sf.stack([sf.src(f"h.{i}") for i in range(3)])},
    )
    assert_holds(out["all"], np.stack(layers))


@pytest.mark.parametrize("source", ["e", "d", "f"])
@pytest.mark.parametrize("target", ["e", "d", "f"])
def test_experts_cut_by_any_axis_on_both_sides(rng: np.random.Generator, source: str, target: str) -> None:
    """w13 of every expert is [gate; up], rank by rank if its rows are cut."""
    experts, width, inner = 4, 6, 8
    gate, up = fresh(rng, experts, width, inner), fresh(rng, experts, width, inner)
    over, rollout = mesh((2, 2), "a b", [3, 2, 1, 0]), mesh((2,), "y", [6, 7])
    spec = {"e": (("a", "b"), None, None), "d": (None, "a", None), "f": (None, None, ("b", "a"))}[source]
    params = {"gate": put(gate, over, *spec), "up": put(up, over, *spec)}
    cut = {"e": ("y", None, None), "f": (None, "y", None), "d": (None, None, "y")}[target]
    parts = [sf.src(name).rearrange("e d f -> e f d") for name in ("gate", "up")]
    out = update(
        params, {"w13": like((experts, 2 * inner, width), "float32", rollout, *cut)}, {"w13": sf.fuse(*parts, axis=1)}
    )
    g, u = np.transpose(gate, (0, 2, 1)), np.transpose(up, (0, 2, 1))
    halves = [(0, 4), (4, 8)] if target == "f" else [(0, 8)]
    want = np.concatenate([x[:, lo:hi] for lo, hi in halves for x in (g, u)], axis=1)
    assert_holds(out["w13"], np.ascontiguousarray(want))


def test_expert_maps_differ_per_layer_and_place_redundant_experts(rng: np.random.Generator) -> None:
    """Six places for four experts, in round robin over three ranks, another map for each layer."""
    w = fresh(rng, 2, 4, 3, 5)
    maps = {0: [0, 3, 1, 0, 2, 3], 1: [3, 2, 1, 0, 3, 2]}
    params = {"moe": put(w, mesh((4,), "x"), None, "x")}
    target = {f"h.{i}.w2": like((6, 5, 3), "float32", mesh((3,), "ep", [4, 5, 6]), "ep") for i in range(2)}
    out = update(params, target, {"h.{i}.w2": sf.src("moe")["{i}"].take(maps, axis=0).rearrange("e f d -> e d f")})
    for i, order in maps.items():
        assert_holds(out[f"h.{i}.w2"], np.stack([w[i, e].T for e in order]), f"layer {i}")


def test_experts_by_name_become_one_tensor_and_back(rng: np.random.Generator) -> None:
    named = {f"h.{i}.e.{e}.w": fresh(rng, 4, 6) for i in range(2) for e in range(4)}
    over, rollout = mesh((2,), "x"), mesh((4,), "ep", [4, 5, 6, 7])
    params = {name: put(x, over, "x") for name, x in named.items()}
    target = {f"h.{i}.moe": like((4, 4, 6), "float32", rollout, "ep") for i in range(2)}
    out = update(params, target, {"h.{i}.moe": sf.stack([sf.src(f"h.{{i}}.e.{e}.w") for e in range(4)])})
    for i in range(2):
        want = np.stack([named[f"h.{i}.e.{e}.w"] for e in range(4)])
        assert_holds(out[f"h.{i}.moe"], want)
    back = {name: like((4, 6), "float32", over, None, "x") for name in named}
    again = update(out, back, {"h.{i}.e.{e}.w": sf.src("h.{i}.moe")["{e}"]})
    for name, x in named.items():
        assert_holds(again[name], x, name)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_vocabulary_is_padded_to_a_multiple_of_the_ranks(rng: np.random.Generator, tp: int) -> None:
    """The last rank may hold padding alone."""
    rows, padded = 9, 16
    x = fresh(rng, rows, 6)
    params = {"embed": put(x, mesh((3,), "x"), "x")}
    target = {
        name: like((padded, 6), "bfloat16", mesh((tp,), "tp", list(range(8))[-tp:]), "tp") for name in ("embed", "head")
    }
    mapping = {"embed": sf.src("embed").pad([(0, padded - rows), (0, 0)]), "head": sf.alias("embed")}
    out = update(params, target, mapping, allow_cast=("*",))
    want = np.zeros((padded, 6), BF16)
    want[:rows] = x.astype(BF16)
    assert_holds(out["embed"], want)
    assert_holds(out["head"], want)


def test_rope_lanes_and_the_query_scale_are_folded_in(rng: np.random.Generator) -> None:
    """Pairs (0 1)(2 3) of each head become halves; queries take the scale, norms lose the one that Gemma adds."""
    q, norm = fresh(rng, 6, 2, 4), fresh(rng, 6)
    over, rollout = mesh((2,), "x"), mesh((2,), "tp", [4, 5])
    params = {"q": put(q, over, "x"), "norm": put(norm, over)}
    target = {"q": like((8, 6), "float32", rollout, "tp"), "norm": like((6,), "float32", rollout)}
    expr = sf.src("q").rearrange("d n (half two) -> (n two half) d", two=2).scale(4**-0.5)
    out = update(params, target, {"q": expr, "norm": sf.src("norm").scale(1.0, -1.0)})
    lanes = [0, 2, 1, 3]
    want = np.concatenate([q[:, n][:, lanes].T for n in range(2)]) * np.float32(0.5)
    assert_holds(out["q"], np.ascontiguousarray(want))
    assert_holds(out["norm"], norm + np.float32(-1))


def test_a_rank_local_engine_fuses_by_the_shapes_of_its_ranks(rng: np.random.Generator) -> None:
    """gate_up of a torch engine: each rank's tensor is [gate_r; up_r]."""
    gate, up = fresh(rng, 6, 8), fresh(rng, 6, 8)
    over = mesh((2,), "x")
    params = {"gate": put(gate, over, "x"), "up": put(up, over, None, "x")}
    target = sf.local([{"gate_up": jax.ShapeDtypeStruct((4, 6), "float32")} for _ in range(4)])
    parts = [sf.src(name).rearrange("d f -> f d") for name in ("gate", "up")]
    out = update(params, target, {"gate_up": sf.fuse(*parts, axis=0)})
    for rank, tree in enumerate(out):
        rows = slice(2 * rank, 2 * rank + 2)
        assert_same_bits(tree["gate_up"], np.concatenate([gate.T[rows], up.T[rows]]))
