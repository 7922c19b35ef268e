"""What the mapping language refuses, and what it says then: the faulty thing by name, and the way out."""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
import pytest
from checks import cut

import shardfly_jax as sf
from shardfly_jax.sharding.families import TargetTree
from shardfly_jax.sharding.inference import TensorType, infer
from shardfly_jax.sharding.plan import Plan
from shardfly_jax.sharding.planner import build_plan
from shardfly_jax.sharding.problem import Problem

W = sf.src("w")


def planned(
    entries: dict[str, sf.Expr], sources: dict[str, tuple[int, ...]], want: dict[str, tuple[int, ...]], cuts: int = 1
) -> Plan:
    """Plans float32 tensors of the given shapes; targets are cut along axis 0."""
    tensors = {name: cut(shape, "float32") for name, shape in sources.items()}
    targets = {name: cut(shape, "float32", 0, cuts) for name, shape in want.items()}
    tree = TargetTree(name="rollout", tensors=targets, mapping=sf.Mapping(entries), ranks=cuts)
    return build_plan(Problem(tensors, 1, [tree]))


def refused(make: Callable[[], object], *words: str) -> str:
    """The message of the LanguageError that `make` raises; it must contain all of the words."""
    with pytest.raises(sf.LanguageError) as caught:
        make()
    message = str(caught.value)
    for word in words:
        assert word in message, f"{word!r} is not in: {message}"
    return message


# Found when the expression is written


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("a b", "'->'"),
        ("a -> b -> a", "'->'"),
        ("a (b -> a b", "a (b"),
        ("a ((b c)) -> a b c", "a ((b c))"),
        ("a a -> a", "a a"),
        ("a b -> a c", "['b', 'c']"),
        ("a b -> a", "['b']"),
        ("a ... -> ... a", "ellipsis"),
        ("a 2 -> 2 a", "number other than 1"),
        ("a b! -> b! a", "b!"),
    ],
)
def test_a_malformed_pattern_is_refused_with_its_text(pattern: str, words: str) -> None:
    refused(lambda: W.rearrange(pattern), repr(pattern), words)


def test_only_a_src_is_indexed_by_a_variable() -> None:
    refused(lambda: W.rearrange("a b -> b a")["{i}"], "'{i}'", "Index first")


@pytest.mark.parametrize("text", ["i", "{i", "{}", "{i}*2", "{i}{e}", "{i:3:}", "{i}-x", "{-i}", ""])
def test_an_index_text_of_another_form_is_refused(text: str) -> None:
    refused(lambda: W[text], repr(text)[1:-1] or "''")


@pytest.mark.parametrize("item", [1.5, True, None, [0, 1], np.array([0])])
def test_an_index_of_another_type_is_refused(item: object) -> None:
    refused(lambda: W[item], type(item).__name__, "take")


@pytest.mark.parametrize(
    ("make", "plain"),
    [
        (lambda: W[np.int64(1)], W[1]),
        (lambda: W[np.int64(1) : np.int64(3)], W[1:3]),
        (lambda: W.rearrange("(a b) c -> (b a) c", b=np.int64(2)), W.rearrange("(a b) c -> (b a) c", b=2)),
        (lambda: W.take(np.array([2, 0]), axis=np.int64(0)), W.take([2, 0], axis=0)),
        (lambda: W.repeat(np.int64(2), axis=np.int64(1)), W.repeat(2, axis=1)),
        (lambda: W.pad(np.array([(0, 1), (0, 0)]), np.float32(-1.5)), W.pad([(0, 1), (0, 0)], -1.5)),
        (lambda: sf.concat([W, W], axis=np.int64(1)), sf.concat([W, W], axis=1)),
        (lambda: sf.stack([W, W], axis=np.int64(1)), sf.stack([W, W], axis=1)),
        (lambda: sf.fuse(W, W, axis=np.int64(0)), sf.fuse(W, W, axis=0)),
        (lambda: W.scale(np.float32(0.5), np.int64(1)), W.scale(0.5, 1.0)),
    ],
)
def test_numpy_numbers_stand_for_pythons(make: Callable[[], sf.Expr], plain: sf.Expr) -> None:
    """Shapes and axes often come as NumPy's; plans, their digests and their files must take them."""
    shape = infer(plain, lambda *_: TensorType((4, 6), "float32"), range(1)).shape
    plans = [planned({"t": expr}, {"w": (4, 6)}, {"t": shape}) for expr in (make(), plain)]
    assert plans[0].digest == plans[1].digest
    plans[0].save(io.BytesIO())


def test_a_step_of_zero_is_refused() -> None:
    refused(lambda: W[::0], "step 0", "repeat")


def test_lists_of_different_lengths_per_layer_are_refused() -> None:
    refused(lambda: W.take({0: [0, 1], 1: [0]}, axis=0), "take", "same number")


def test_an_empty_take_per_layer_is_refused() -> None:
    refused(lambda: W.take({}, axis=0), "take")


@pytest.mark.parametrize("repeats", [0, -1])
def test_repeats_below_one_are_refused(repeats: int) -> None:
    refused(lambda: W.repeat(repeats, axis=0), str(repeats), "repeat")


def test_negative_widths_are_refused() -> None:
    refused(lambda: W.pad([(0, -1)]), "-1", "slice to truncate")


@pytest.mark.parametrize("divisor", [0, -0.0, 1e-60])
def test_division_by_zero_is_refused(divisor: float) -> None:
    """1e-60 is 0 in float32, in which the division is made."""
    refused(lambda: W.divide(divisor), "divisor", "0")


@pytest.mark.parametrize(
    ("dtype", "value"), [("int8", 300), ("uint8", -1), ("int32", 1.5), ("uint32", 2**40), ("bool", 2)]
)
def test_a_fill_that_its_dtype_cannot_hold_is_refused(dtype: str, value: float) -> None:
    """Else the update itself would fail half way, or fill with another value."""
    target = {"t": cut((5, 6), dtype)}
    mapping = sf.Mapping({"t": W.pad([(0, 1), (0, 0)], value)})
    tree = TargetTree(name="rollout", tensors=target, mapping=mapping, ranks=1)
    with pytest.raises((sf.LanguageError, sf.PlanError), match=r"'t'.*pad"):
        build_plan(Problem({"w": cut((4, 6), dtype)}, 1, [tree]))


@pytest.mark.parametrize("dtype", ["float33", "complex64", "U8", object])
def test_a_dtype_that_no_weight_has_is_refused(dtype: object) -> None:
    refused(lambda: W.astype(dtype), repr(dtype))


@pytest.mark.parametrize("make", [sf.concat, sf.stack, lambda parts: sf.fuse(*parts, axis=0)])
def test_joining_wants_expressions_and_no_alias(make: Callable[[list[object]], sf.Expr]) -> None:
    refused(lambda: make([]), "one or more expressions")
    refused(lambda: make([W, "w"]), "one or more expressions")
    refused(lambda: make([W, sf.alias("t")]), "alias stands alone")


# Found when the mapping is written


def test_a_mapping_wants_expressions() -> None:
    refused(lambda: sf.Mapping({"t": "w"}), "'t'", "sf.src")


@pytest.mark.parametrize(
    "around",
    [lambda x: x.rearrange("a b -> b a"), lambda x: x[0], lambda x: sf.concat([x, W]), lambda x: x.scale(2.0)],
)
def test_a_fuse_inside_another_operation_is_refused(around: Callable[[sf.Expr], sf.Expr]) -> None:
    fused = sf.fuse(W, W, axis=0)
    refused(lambda: sf.Mapping({"t": around(fused)}), "'t'", "fuse", "outermost")
    refused(lambda: sf.Mapping({"t": sf.fuse(fused, W, axis=0)}), "'t'", "fuse", "outermost")
    sf.Mapping({"t": fused.astype("bfloat16")})


def test_an_alias_inside_another_operation_is_refused() -> None:
    refused(lambda: sf.Mapping({"t": sf.alias("a")[0]}), "'t'", "alias", "whole expression")


def test_an_alias_under_a_cast_is_refused() -> None:
    refused(lambda: sf.Mapping({"t": sf.alias("a").astype("bfloat16")}), "'t'", "alias")


@pytest.mark.parametrize(
    ("name", "expr", "unbound"),
    [
        ("t", sf.src("h.{i}"), "['i']"),
        ("t", sf.src("w")["{i}"], "['i']"),
        ("t.{i}", sf.src("h.{j}"), "['j']"),
        ("t.{i}", sf.src("h.{i}")[:, "{e}"], "['e']"),
        ("t.{i}", sf.alias("a.{k}"), "['k']"),
    ],
)
def test_a_variable_that_the_name_does_not_bind_is_refused(name: str, expr: sf.Expr, unbound: str) -> None:
    refused(lambda: sf.Mapping({name: expr}), repr(name), unbound)


@pytest.mark.parametrize("name", ["t.{i", "t.i}", "t.{}", "t.{i:a:}", "t.{i:1:2:3}", "t.{i*2}", "t.{0*i}", "t.{i j}"])
def test_a_name_with_malformed_braces_is_refused(name: str) -> None:
    refused(lambda: sf.Mapping({name: W}), name[2:].strip("{}"))


def test_composing_with_a_mapping_that_lacks_a_name_is_refused() -> None:
    refused(lambda: sf.compose({"t": sf.src("h")}, {"other": W}), "'h'", "does not define")


# Found when the plan is made: all faults of a plan in one PlanError


@pytest.mark.parametrize(
    ("expr", "words"),
    [
        (W.rearrange("a b c -> c b a"), ["a b c", "3 axes", "(4, 6)"]),
        (W.rearrange("(a b) c -> a b c"), ["['a', 'b']", "Give all but one"]),
        (W.rearrange("(a b) c -> a b c", b=3), ["length 4", "b=3"]),
        (W.rearrange("a b -> b a", x=2), ["['x']", "not axes"]),
        (W.rearrange("a b -> b a", a=3), ["length 4", "a=3"]),
        (W.rearrange("a 1 -> 1 a"), ["length 6"]),
        (W[5], ["5", "length 4"]),
        (W[-5], ["-5", "length 4"]),
        (W[0, 0, 0], ["3 indices", "(4, 6)"]),
        (W.take([0, 4], axis=0), ["[4]", "length 4"]),
        (W.take([0], axis=2), ["axis 2", "(4, 6)"]),
        (W.repeat(2, axis=-3), ["axis -3", "(4, 6)"]),
        (W.pad([(0, 1)]), ["1 widths", "(4, 6)"]),
        (sf.concat([W, W[:, 1:]], axis=0), ["concat", "(4, 6)", "(4, 5)"]),
        (sf.concat([W, W], axis=2), ["concat", "axis 2"]),
        (sf.stack([W, W[1:]]), ["stack", "(3, 6)"]),
        (sf.stack([W, W], axis=4), ["stack", "axis 4"]),
        (sf.concat([W, W.astype("bfloat16")]), ["concat", "bfloat16", "astype"]),
        (W.astype("int32"), ["int32", "not defined"]),
        (sf.src("absent"), ["missing", "'absent'"]),
    ],
)
def test_an_expression_that_does_not_fit_its_sources_names_target_and_reason(expr: sf.Expr, words: list[str]) -> None:
    with pytest.raises(sf.PlanError) as caught:
        planned({"t": expr, "other": W}, {"w": (4, 6)}, {"t": (4, 6), "other": (4, 6)})
    (fault,) = caught.value.faults
    for word in ["'t'", *words]:
        assert word in fault, f"{word!r} is not in: {fault}"


def test_a_layer_index_outside_its_axis_is_refused() -> None:
    with pytest.raises(sf.PlanError, match=r"'t\.3'.*\{i\} reaches 3.*length 3"):
        planned({"t.{i}": W["{i}"]}, {"w": (3, 4)}, {f"t.{i}": (4,) for i in range(4)})
    with pytest.raises(sf.PlanError, match=r"'t\.0'.*-1"):
        planned({"t.{i}": W["{i}-1"]}, {"w": (3, 4)}, {f"t.{i}": (4,) for i in range(3)})


def test_a_layer_without_a_list_is_refused() -> None:
    with pytest.raises(sf.PlanError, match=r"'t\.1'.*no indices for layers \[1\]"):
        planned({"t.{i}": W["{i}"].take({0: [0]}, axis=0)}, {"w": (2, 4)}, {"t.0": (1,), "t.1": (1,)})


def test_a_fuse_whose_parts_the_ranks_do_not_divide_is_refused() -> None:
    entries = {"t": sf.fuse(sf.src("q"), sf.src("k"), axis=0)}
    with pytest.raises(sf.PlanError, match=r"'t'.*fuse.*does not divide a part of length 9.*\[9, 3\].*into 3"):
        planned(entries, {"q": (9, 2), "k": (3, 2)}, {"t": (12, 2)}, cuts=2)


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        (
            {"a": W, "t": sf.alias("b")},
            ["'t'", "'b'", "the alias' target 'b' is not in the mapping. Name a target that is."],
        ),
        ({"embed": W, "t": sf.alias("embd")}, ["'t'", "'embd'", "the nearest name is 'embed'."]),
        ({"a": W, "b": sf.alias("a"), "t": sf.alias("b")}, ["'t'", "'b'", "itself an alias"]),
        ({"a": W, "t": sf.alias("t")}, ["'t'", "itself an alias"]),
    ],
)
def test_an_alias_of_nothing_or_of_an_alias_is_refused(entries: dict[str, sf.Expr], words: list[str]) -> None:
    with pytest.raises(sf.PlanError) as caught:
        planned(entries, {"w": (4, 6)}, {name: (4, 6) for name in ["a", "b", "embed", "t"] if name in entries})
    for word in words:
        assert any(word in fault for fault in caught.value.faults), f"{word!r} is not in: {caught.value}"


def test_of_many_faults_one_of_each_kind_is_shown_and_all_are_kept() -> None:
    faults = [f"source: 'h.{k}.w' has {k + 8} rows" for k in range(28)] + ["target: 'norm' is missing"]
    error = sf.PlanError(faults)
    assert error.faults == tuple(faults)
    assert str(error).splitlines() == [
        "29 faults:", "  - source: 'h.0.w' has 8 rows (27 more like it)", "  - target: 'norm' is missing",
    ]  # fmt: skip
    assert str(sf.PlanError(faults[:20])).count("\n") == 20, "few are shown each"
    letters = [f"{a}{b}" for a in "abcdef" for b in "abcdef"]
    assert str(sf.PlanError(letters)).splitlines()[-1] == "  and 16 more kinds; `faults` of this error has all"
