"""Composing with a mapping that defines a name in parts: against plain substitution, layer by layer."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from checks import blocks_by_hand, check_meaning, fresh
from hypothesis import given, strategies as st

import shardfly_jax as sf
from shardfly_jax.sharding.composition import undefined
from shardfly_jax.sharding.evaluate import evaluate
from shardfly_jax.sharding.quantization import Fp8Block


def test_an_entry_is_split_where_the_inner_mapping_is() -> None:
    inner = {"h.{i:0:3}.w": sf.src("first")["{i}"], "h.{i:3:}.w": sf.src("rest")["{i}-3"], "norm": sf.src("n")}
    composed = sf.compose({"t.{i}": sf.src("h.{i}.w")[1:], "norm": sf.src("norm")}, inner)
    assert dict(composed) == {
        "t.{i:0:3}": sf.src("first")["{i}"][1:],
        "t.{i:3:}": sf.src("rest")["{i}-3"][1:],
        "norm": sf.src("n"),
    }


def test_cycles_renumber_layers_lists_and_aliases() -> None:
    inner = {"h.{2*i}.w": sf.src("even")["{i}"], "h.{2*i+1}.w": sf.src("odd.{i}")}
    lists = {0: [0], 1: [1], 2: [2], 3: [3]}
    outer = {"t.{i}": sf.src("h.{i}.w").take(lists, axis=0), "u.{i:1:}": sf.src("h.{i}.w"), "v.{i}": sf.alias("t.{i}")}
    assert dict(sf.compose(outer, inner)) == {
        "t.{2*i}": sf.src("even")["{i}"].take({0: [0], 1: [2]}, axis=0),
        "t.{2*i+1}": sf.src("odd.{i}").take({0: [1], 1: [3]}, axis=0),
        "u.{2*i:1:}": sf.src("even")["{i}"],
        "u.{2*i+1}": sf.src("odd.{i}"),
        "v.{2*i}": sf.alias("t.{2*i}"),
        "v.{2*i+1}": sf.alias("t.{2*i+1}"),
    }


def test_scales_and_aliases_are_split_with_what_they_belong_to(rng: np.random.Generator) -> None:
    w = {"first": fresh(rng, 2, 3, 4), "rest": fresh(rng, 3, 3, 4)}
    inner = {"h.{i:0:2}.w": sf.src("first")["{i}"], "h.{i:2:}.w": sf.src("rest")["{i}-2"]}
    outer = {
        "t.{i}": sf.src("h.{i}.w").quantize(Fp8Block(rows=2, columns=2)), "t.{i}.scale": sf.scale_of("t.{i}"),
        "u.{i}": sf.src("h.{i}.w"), "v.{i}": sf.alias("u.{i}"),
    }  # fmt: skip
    composed = sf.compose(outer, inner)
    assert composed["t.{i:2:}.scale"] == sf.scale_of("t.{i}")
    layers = [*w["first"], *w["rest"]]
    each = [blocks_by_hand(layer, 2, 2) for layer in layers]
    want = {f"t.{i}": codes for i, (codes, _) in enumerate(each)}
    want |= {f"t.{i}.scale": scales for i, (_, scales) in enumerate(each)}
    want |= {f"{name}.{i}": layer for name in "uv" for i, layer in enumerate(layers)}
    check_meaning(composed, w, want, cuttings_of_target=[(None, 1)])


def test_a_second_variable_passes_through(rng: np.random.Generator) -> None:
    w = {name: fresh(rng, 2, 3, 4) for name in ("a", "b")}
    inner = {"h.{i:0:2}.w": sf.src("a")["{i}"], "h.{i:2:}.w": sf.src("b")["{i}-2"]}
    composed = sf.compose({"t.{i}.{e:0:3}": sf.src("h.{i}.w")["{e}"]}, inner)
    want = {f"t.{i}.{e}": w["ab"[i // 2]][i % 2, e] for i in range(4) for e in range(3)}
    check_meaning(composed, w, want)


def test_a_layer_may_be_read_by_its_number(rng: np.random.Generator) -> None:
    w = {"a": fresh(rng, 3, 4), "b": fresh(rng, 3, 4), "c.1": fresh(rng, 3, 4), "c.3": fresh(rng, 3, 4)}
    either = sf.stack([sf.src("a"), sf.src("b")]).take({0: [1], 1: [0]}, axis=0).rearrange("1 x y -> x y")
    inner = {"h.{2*i:0:2}.w": either, "h.{2*i+1}.w": sf.src("c.{2*i+1}")[1:], "s.{i:1:}.w": sf.src("a")[:, "{i}-1"]}
    outer = {
        "all": sf.concat([sf.src(f"h.{i}.w")[:2] for i in range(4)], axis=1),
        "t.{i}": sf.stack([sf.src("s.{i}.w"), sf.src("s.4.w")]),
    }
    layers = [w["b"][:2], w["c.1"][1:], w["a"][:2], w["c.3"][1:]]
    want = {"all": np.concatenate(layers, axis=1)}
    want |= {f"t.{i}": np.stack([w["a"][:, i - 1], w["a"][:, 3]]) for i in range(1, 5)}
    check_meaning(sf.compose(outer, inner), w, want)
    with pytest.raises(sf.LanguageError, match="no indices for layer 7"):
        sf.compose({"t": sf.src("h.7.w")}, {"h.{i}.w": sf.src("a").take({0: [1]}, axis=0)})
    with pytest.raises(sf.LanguageError, match="before the first"):
        sf.compose({"t": sf.src("h.1.w")}, {"h.{i}.w": sf.src("a")["{i}-2"]})


@pytest.mark.parametrize(
    ("outer", "inner", "words"),
    [
        ("h.{i}.w", {"h.{2*i}.v": sf.src("a")}, "does not define"),
        ("h.3.w", {"h.{2*i}.w": sf.src("a"), "h.{i:4:}.w": sf.src("a")}, "does not define"),
        ("h.{2*i}.w", {"h.{3*i}.w": sf.src("a")["{i}"]}, "one divides the other"),
    ],
)
def test_parts_that_do_not_fit_are_refused(outer: str, inner: dict[str, sf.Expr], words: str) -> None:
    with pytest.raises(sf.LanguageError, match=words):
        sf.compose({"t.{i}" if "{" in outer else "t": sf.src(outer)}, inner)


def test_undefined_lists_what_compose_refuses_and_nothing_else() -> None:
    inner = {"a": sf.src("x"), "h.{2*i}.w": sf.src("x"), "g.{i:0:2}.w": sf.src("x")}
    for name, missing in (
        ("a", False), ("b", True), ("h.{i}.w", False), ("h.4.w", False), ("h.3.w", True), ("h.{i}.v", True),
        ("g.1.w", False), ("g.2.w", True), ("h.{i}.{e}", True),
    ):  # fmt: skip
        outer = {"t.{i}.{e:0:2}" if "{e}" in name else "t.{i}": sf.src(name)}
        assert undefined(outer, inner) == [name] * missing
        if missing:
            with pytest.raises(sf.LanguageError, match="does not define"):
                sf.compose(outer, inner)
        else:
            sf.compose(outer, inner)
    both = sf.concat([sf.src("z"), sf.src("a"), sf.src("b")])
    assert undefined({"t": both, "u": sf.src("z")}, inner) == ["b", "z"]


@st.composite
def partitions(draw: st.DrawFn, name: str) -> dict[str, tuple[int, int, int, int]]:
    """Patterns that share out the layers 0..11 of a name: ranges, each in cycles; with step, offset, first, stop."""
    edges = sorted({0, 12, *draw(st.lists(st.integers(1, 11), max_size=2))})
    out = {}
    cycle = draw(st.sampled_from([1, 1, 2, 4]))
    for lo, hi in itertools.pairwise(edges):
        for k in range(cycle):  # layers cycle * j + k of [lo, hi)
            first, stop = -((k - lo) // cycle), -((k - hi) // cycle)
            if first < stop:
                hole = ("i" if cycle == 1 else f"{cycle}*i") + (f"+{k}" if k else "")
                out[f"{name}.{{{hole}:{first}:{stop}}}.w"] = (cycle, k, first, stop)
    return out


@given(data=st.data())
def test_every_layer_of_a_composed_mapping_means_what_substitution_gives(data: st.DataObject) -> None:
    canonical: dict[str, np.ndarray] = {}
    own: dict[str, np.ndarray] = {}
    inner: dict[str, sf.Expr] = {}
    for name in ("q", "k"):
        for pattern, (cycle, offset, first, stop) in data.draw(partitions(name)).items():
            stacked = f"{name}_{cycle}_{offset}_{first}"
            inner[pattern] = sf.src(stacked)["{i}" + (f"-{first}" if first else "")].scale(2.0)
            own[stacked] = np.random.default_rng(len(own)).standard_normal((stop - first, 2)).astype(np.float32)
            for j in range(first, stop):
                canonical[f"{name}.{cycle * j + offset}.w"] = own[stacked][j - first] * np.float32(2)
    lo = data.draw(st.integers(0, 3))
    lists = {i: [i % 2, 0] for i in range(12)}
    part = sf.src("k.{i}.w").take(lists, axis=0)
    composed = sf.compose({f"t.{{i:{lo}:12}}": sf.concat([sf.src("q.{i}.w"), part])}, inner)
    for i in range(12):
        found = composed.candidates(f"t.{i}")
        assert len(found) == (i >= lo)
        for text, values in found:
            have = evaluate(composed[text], lambda name, _: own[name], values["i"], ())
            want = np.concatenate([canonical[f"q.{i}.w"], canonical[f"k.{i}.w"][lists[i]]])
            assert have.tobytes() == want.tobytes()
