"""JAX-Toolbox's parameter mappings: a model's, against tunix' own loading; every operation, against NumPy's."""

from __future__ import annotations

import copy
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from checkpoints import LLAMA, checkpoint, into_tunix
from engine_checks import check_route, mesh
from hypothesis import given, strategies as st
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec as P
from rollout_loaders import Rank, vllm

import shardfly_jax as sf
from shardfly_jax.sharding.evaluate import evaluate

EXAMPLE = Path(__file__).parents[1] / "examples" / "jax_toolbox_mapping.json"
TRAINER = mesh((2, 2), ("fsdp", "tp"))


def one(shape: list[int], transform: dict[str, Any], target: list[int]) -> dict[str, Any]:
    """A mapping with a single entry."""
    jax_param = {"name": "layers.{layer}.w", "transform": transform}
    vllm_param = {"name": "model.layers.{layer}.w.weight", "shape": target}
    return {"num_layers": 2, "mappings": [{"jax_param": jax_param, "vllm_param": vllm_param}]}


def tree(shape: list[int]) -> dict[str, Any]:
    leaf = jax.ShapeDtypeStruct(tuple(shape), "float32", sharding=NamedSharding(AbstractMesh((1,), ("x",)), P()))
    return {"layers": {"0": {"w": leaf}, "1": {"w": leaf}}}


@pytest.mark.parametrize("tp", [2, 8])
def test_a_mapping_takes_tunix_params_to_vllm(tp: int, rng: np.random.Generator) -> None:
    ck = checkpoint(LLAMA, rng)
    params = sf.engines.tunix.trainer(LLAMA, TRAINER, dtype="float32").params
    trainer = sf.engines.jax_toolbox.trainer(EXAMPLE, params, model=LLAMA)
    rollout = sf.engines.vllm.rollout(LLAMA, mesh((1, tp), ("replica", "tp"), 8 - tp), dtype="float32")
    check_route(trainer, into_tunix(LLAMA, ck), rollout, lambda k: vllm(LLAMA, ck, Rank(tp=k, tp_size=tp)))


def test_the_example_runs() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE.with_name("jax_toolbox.py"))],
        capture_output=True, text=True, timeout=120, env=dict(os.environ),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "every byte of version 1 is as the mapping says" in done.stdout


@st.composite
def transforms(draw: st.DrawFn) -> tuple[list[int], dict[str, Any]]:
    """A shape, and a transform of it as JSON has it."""
    shape = draw(st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), min_size=1, max_size=4))
    transform: dict[str, Any] = {}
    rest = list(shape)
    if draw(st.booleans()):
        items: list[Any] = []
        rest = []
        count = draw(st.integers(0, len(shape)))
        for n in shape[:count]:
            if draw(st.booleans()) and len(shape) - len(items) > 1:
                items.append(draw(st.integers(-n, n - 1)))
                continue
            lo = draw(st.integers(0, n - 1))
            hi = draw(st.integers(lo + 1, n))
            items.append(draw(st.sampled_from([[lo, hi], [lo, None], [None, hi], [lo], []])))
        if draw(st.booleans()):
            items.append("...")
        transform["slice"] = items
        rest = list(np.empty(shape)[as_numpy(items)].shape)
    if rest and draw(st.booleans()):
        transform["transpose"] = draw(st.permutations(range(len(rest))))
        rest = [rest[k] for k in transform["transpose"]]
    if rest and draw(st.booleans()):
        size = math.prod(rest)
        lead = draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
        transform["reshape"] = draw(
            st.sampled_from([[lead, size // lead], [-1, size // lead], [lead, -1], [size], [-1]])
        )
    return shape, transform


def as_numpy(items: list[Any]) -> tuple[Any, ...]:
    """NumPy's items for JSON's; a list holds a start, and perhaps a stop."""
    out: list[Any] = []
    for item in items:
        if isinstance(item, list):
            start = item[0] if item else None
            out.append(slice(start, item[1] if len(item) == 2 else None))
        else:
            out.append(Ellipsis if item == "..." else item)
    return tuple(out)


@given(transforms())
def test_every_transform_means_what_numpy_makes_of_it(case: tuple[list[int], dict[str, Any]]) -> None:
    shape, transform = case
    x = np.random.default_rng().standard_normal(shape).astype(np.float32)
    want = x
    if "slice" in transform:
        want = want[as_numpy(transform["slice"])]
    if transform.get("transpose"):
        want = want.transpose(transform["transpose"])
    if transform.get("reshape"):
        want = want.reshape(transform["reshape"])
    try:
        side = sf.engines.jax_toolbox.trainer(one(shape, transform, list(want.shape)), tree(shape))
    except sf.PlanError as error:
        assert "cuts across its axes" in str(error)  # noqa: PT017
        return
    have = evaluate(side.mapping["model.layers.{i}.w.weight"], lambda name, i: x, 0, ())
    np.testing.assert_array_equal(have, want)


def test_the_reshapes_of_real_mappings_are_taken() -> None:
    """Heads merged and split; a reshape across axes is the only one that is refused."""
    for shape, reshape in (([12, 2, 4], [-1, 4]), ([24, 4], [12, 2, 4]), ([4, 6], [8, 3]), ([2, 1, 3], [6])):
        sf.engines.jax_toolbox.trainer(one(shape, {"reshape": reshape}, _filled(shape, reshape)), tree(shape))
    with pytest.raises(sf.PlanError, match=r"is \(4, 6\) when it is to become \(3, 8\), which cuts across"):
        sf.engines.jax_toolbox.trainer(one([4, 6], {"reshape": [3, 8]}, [3, 8]), tree([4, 6]))


def _filled(shape: list[int], reshape: list[int]) -> list[int]:
    return list(np.empty(shape).reshape(reshape).shape)


def test_all_that_does_not_fit_is_listed() -> None:
    held = copy.deepcopy(json.loads(EXAMPLE.read_text()))
    entries = {entry["jax_param"]["name"]: entry for entry in held["mappings"]}
    entries["final_norm.w"]["jax_param"]["name"] = "final_norm.scale"
    entries["lm_head.w"]["jax_param"]["transform"] = {"permute": [1, 0]}
    entries["layers.{layer}.mlp.up_proj.kernel"]["vllm_param"]["shape"] = [16, 32]
    entries["layers.{layer}.attn.o_proj.w"]["jax_param"]["transform"]["transpose"] = [2, 0]
    entries["layers.{layer}.attn.v_proj.w"]["jax_param"]["transform"]["reshape"] = [-1, 7]
    entries["layers.{layer}.input_layernorm.w"]["vllm_param"]["name"] = "model.norms.weight"
    held["mappings"].append(entries["embedder.input_embedding"])
    with pytest.raises(sf.PlanError) as caught:
        sf.engines.jax_toolbox.trainer(held, sf.engines.tunix.trainer(LLAMA, TRAINER).params)
    faults = "\n".join(caught.value.faults)
    assert len(caught.value.faults) == 7
    for words in (
        "'final_norm.scale' is not in the tree", "has ['permute']", "becomes (32, 16)", "its transpose is [2, 0]",
        "to become [-1, 7]", "must stand in both names or in none", "stands twice",
    ):  # fmt: skip
        assert words in faults
    held = json.loads(EXAMPLE.read_text()) | {"num_layers": LLAMA.layers + 1}
    with pytest.raises(
        sf.PlanError, match=r"num_layers is 4, but the tree has no 'layers\.3\.[\w.]+'\. Mend num_layers"
    ):
        sf.engines.jax_toolbox.trainer(held, sf.engines.tunix.trainer(LLAMA, TRAINER).params)


GOOD = one([4, 6], {"slice": [[0, 2]], "transpose": [1, 0], "reshape": [-1, 2]}, [6, 2])
JAX, VLLM = ("mappings", 0, "jax_param"), ("mappings", 0, "vllm_param")
TRANSFORM = (*JAX, "transform")
GONE = object()


def changed(*changes: tuple[tuple[Any, ...], Any]) -> Any:
    """`GOOD` with other values at some places, or without them."""
    held = copy.deepcopy(GOOD)
    for (*parents, key), value in changes:
        node = held
        for parent in parents:
            node = node[parent]
        if value is GONE:
            del node[key]
        else:
            node[key] = value
    return held


def test_layers_of_different_shapes_are_refused() -> None:
    params = {"layers": {str(i): tree([4, n])["layers"]["0"] for i, n in enumerate((6, 8))}}
    with pytest.raises(sf.PlanError, match=r"has the shapes \[\(4, 6\), \(4, 8\)\] in the tree, but one for all"):
        sf.engines.jax_toolbox.trainer(GOOD, params)


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (("mappings",), GONE, r"the file has no \['mappings'\]"),
        (("mappings",), [], r"has \[\] as mappings, but a list of entries"),
        (("mappings",), {"a": 1}, "as mappings, but a list of entries"),
        (("mappings", 0), "a", r"mappings\[0\] is 'a', but an object with \['jax_param', 'vllm_param'\]"),
        (("mappings", 0, "note"), "x", r"has \['note'\], but only \['jax_param', 'vllm_param'\]"),
        (("modules",), 1, r"the file has \['modules'\], but only"),
        (JAX, GONE, r"has no \['jax_param'\]"),
        (VLLM, None, "vllm_param of .* is None, but an object"),
        ((*JAX, "name"), GONE, r"jax_param of .* has no \['name'\]"),
        ((*JAX, "name"), "layers.{i}.w", "only variable is {layer}"),
        ((*VLLM, "name"), 3, "has 3 as name"),
        ((*VLLM, "shape"), GONE, r"has no \['shape'\]"),
        ((*VLLM, "shape"), "62", "has '62' as shape, but a list of sizes"),
        (TRANSFORM, None, "transform of .* is None, but an object"),
        ((*TRANSFORM, "slice"), [[0, 4, 2]], "without a step"),
        ((*TRANSFORM, "slice"), ["...", "..."], "once"),
        ((*TRANSFORM, "slice"), "0", "has '0' as slice"),
        ((*TRANSFORM, "slice"), [0.0], "as slice"),
        ((*TRANSFORM, "transpose"), ["a", "b"], "a list of axes"),
        ((*TRANSFORM, "reshape"), "-1", "has '-1' as reshape"),
        (("num_layers",), "2", "has '2' as num_layers, but a positive number"),
        (("num_layers",), True, "has True as num_layers"),
        (("num_layers",), GONE, r"^mapping: names have {layer}, but num_layers does not say how many.*Give it.$"),
        (("num_layers",), 1, r"num_layers is 1, but the tree has 'layers.1.w' too"),
        (("num_layers",), 3, "num_layers is 3, but the tree has no 'layers.2.w'. Mend num_layers, or give a tree with"),
        (("num_layers",), 10**12, "num_layers is 1000000000000, but the tree has no 'layers.2.w'"),
    ],
)
def test_what_the_schema_does_not_have_is_refused(place: tuple[Any, ...], value: Any, words: str) -> None:
    sf.engines.jax_toolbox.trainer(GOOD, tree([4, 6]))
    with pytest.raises(sf.PlanError, match=words):
        sf.engines.jax_toolbox.trainer(changed((place, value)), tree([4, 6]))


def test_faults_of_the_form_are_all_listed() -> None:
    held = changed(
        (("modules",), 1), (("num_layers",), "2"), ((*JAX, "name"), 1), ((*VLLM, "shape"), None),
        ((*TRANSFORM, "slice"), [["x"]]), ((*TRANSFORM, "reshape"), 5), (("mappings", 0, "note"), 1),
    )  # fmt: skip
    held["mappings"].append([])
    with pytest.raises(sf.PlanError) as caught:
        sf.engines.jax_toolbox.trainer(held, tree([4, 6]))
    assert len(caught.value.faults) == 8, caught.value


def places(node: Any, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """All places in a JSON document."""
    for key, below in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        yield (*here, key)
        yield from places(below, (*here, key))


JUNK = (
    None,
    True,
    0,
    -1,
    10**12,
    1.5,
    "",
    "x",
    "...",
    "{layer}",
    [],
    [None],
    [0],
    [[]],
    ["..."],
    [[0, 1, 2]],
    {},
    {"a": 1},
)


@pytest.mark.parametrize("place", list(places(GOOD)), ids=lambda place: ".".join(map(str, place)))
@pytest.mark.parametrize("junk", JUNK, ids=repr)
def test_junk_anywhere_is_a_plan_error_or_another_good_mapping(place: tuple[Any, ...], junk: Any) -> None:
    try:
        sf.engines.jax_toolbox.trainer(changed((place, junk)), tree([4, 6]))
    except sf.PlanError as error:
        assert error.faults  # noqa: PT017


def test_what_is_no_file_of_json_is_refused(tmp_path: Path) -> None:
    broken, array = tmp_path / "broken.json", tmp_path / "array.json"
    broken.write_text('{"mappings": [')
    array.write_text("[]")
    for given_, words in (
        (json.dumps(GOOD), "it is JSON itself"), (broken, "does not hold JSON"), (str(broken), "does not hold JSON"),
        (array, r"the file is \[\], but an object"), ([], "of type list, but the path"), (None, "of type NoneType"),
    ):  # fmt: skip
        with pytest.raises(sf.PlanError, match=words):
            sf.engines.jax_toolbox.trainer(given_, tree([4, 6]))
    with pytest.raises(FileNotFoundError):
        sf.engines.jax_toolbox.trainer(tmp_path / "none.json", tree([4, 6]))
