"""Every known model, from its trainers to the rollout engines, for every legal TP up to 8: on shapes alone."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh

import shardfly_jax as sf
from shardfly_jax.engines.canonical import tensors
from shardfly_jax.engines.models import Model
from shardfly_jax.engines.side import Side, SideBuilder
from shardfly_jax.sharding.language import src

E = sf.engines
KNOWN = E.names()


def stacked(model: Model) -> Side:
    """A trainer that holds the canonical tensors as they are: for families that no described trainer has."""
    builder = SideBuilder(AbstractMesh((4,), ("x",)), "bfloat16", model)
    for t in tensors(model):
        builder.leaf(t.name, t.shape, *((None, "x") if len(t.shape) > 1 else ()), layers=t.layers, dtype=t.dtype)
        builder.entries[t.name] = src(t.name)
    return builder.side("trainer")


def trainers(model: Model) -> list[Side]:
    found = []
    if model.family in E.maxtext.FAMILIES:
        mesh = AbstractMesh((2, 2, 2), ("fsdp", "tensor", "expert"))
        found += [E.maxtext.trainer(model, mesh, scan_layers=scanned) for scanned in (True, False)]
    if model.family in E.tunix.FAMILIES:
        found.append(E.tunix.trainer(model, AbstractMesh((4, 2), ("fsdp", "tp"))))
    return found or [stacked(model)]


def check_covered(trainer: Side, rollout: Side) -> None:
    """Plans, and compares the bytes that its moves write with those of all shards."""
    plan = sf.make_plan(trainer.params, rollout.params, E.route(trainer, rollout), allow_cast=("*",))
    leaves = jax.tree.leaves(rollout.params)
    mesh = leaves[0].sharding.mesh
    want = 0
    for leaf in leaves:
        assert leaf.sharding.mesh == mesh
        cut = {
            axis for entry in leaf.sharding.spec if entry for axis in ((entry,) if isinstance(entry, str) else entry)
        }
        want += leaf.size * leaf.dtype.itemsize * math.prod(n for axis, n in mesh.shape.items() if axis not in cut)
    assert plan.target_nbytes == want


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("name", KNOWN)
def test_every_tp_up_to_eight_is_covered(name: str, engine: str) -> None:
    model = E.model(name)
    first, *others = trainers(model)
    for tp in (1, 2, 4, 8):
        rollout = getattr(E, engine).rollout(model, AbstractMesh((tp,), ("tp",)))
        check_covered(first, rollout)
    for trainer in others:
        check_covered(trainer, rollout)


@pytest.mark.parametrize("name", [name for name in KNOWN if E.model(name).experts])
def test_experts_shared_out_over_ranks_are_covered(name: str) -> None:
    model = E.model(name)
    trainer = trainers(model)[0]
    check_covered(trainer, E.vllm.rollout(model, AbstractMesh((2, 8), ("dp", "tp")), expert_parallel=True))
    if model.family != "gpt_oss":
        for ep in (2, 8):
            mesh = AbstractMesh((2, 8), ("replica", "tp"))
            check_covered(trainer, E.sglang.rollout(model, mesh, expert_parallel=ep))


@pytest.mark.parametrize("name", ["Qwen3-0.6B", "Moonlight-16B-A3B", "gpt-oss-20b"])
def test_trainers_reach_plain_names(name: str) -> None:
    model = E.model(name)
    rollout = E.hf.rollout(model, AbstractMesh((2,), ("replica",)))
    for trainer in trainers(model):
        check_covered(trainer, rollout)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("name", KNOWN)
def test_sizes_that_tp_does_not_divide_are_all_listed(name: str, engine: str) -> None:
    model = E.model(name)
    with pytest.raises(sf.PlanError) as caught:
        getattr(E, engine).rollout(model, AbstractMesh((7,), ("tp",)))
    assert len(caught.value.faults) >= 2
    assert all(fault.startswith("indivisible: ") for fault in caught.value.faults)


SIZES: dict[str, Any] = {
    "name": "tiny", "family": "llama3", "layers": 2, "hidden": 8, "heads": 4, "kv_heads": 2, "head_dim": 4, "width": 8,
    "vocab": 16, "tied": False,
}  # fmt: skip
LATENT = E.Latent(q_rank=None, kv_rank=4, nope=2, rope=2, value=2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layers": -1}, ["'tiny' layers is -1, but a whole number of at least 1"]),
        ({"heads": 0}, ["'tiny' heads is 0, but a whole number"]),
        ({"hidden": "8", "vocab": 16.0}, ["hidden is '8'", "vocab is 16.0"]),
        ({"kv_heads": True}, ["kv_heads is True"]),
        ({"heads": 3}, ["heads is 3, but it must be a multiple of kv_heads, 2"]),
        ({"width": 0}, ["width is 0"]),
        ({"name": 3, "family": None}, ["name is 3, but a string", "family is None, but a string"]),
        ({"experts": {"count": 8}}, ["but Experts or None is needed. Give sf.engines.Experts"]),
        ({"latent": 4}, ["but Latent or None is needed"]),
        ({"experts": E.Experts(count=2, width=4, dense_layers=3)}, ["layers is 2, but experts.dense_layers is 3"]),
        ({"latent": LATENT, "head_dim": 5}, ["head_dim is 5, but that of queries, latent.nope .* is 4"]),
    ],
    ids=str,
)
def test_sizes_that_no_model_has_are_all_listed(changes: dict[str, Any], words: list[str]) -> None:
    E.Model(**SIZES)
    with pytest.raises(sf.PlanError) as caught:
        E.Model(**SIZES | changes)
    assert len(caught.value.faults) == len(words)
    for fault, some in zip(caught.value.faults, words, strict=True):
        assert re.search(some, fault), fault


def test_sizes_that_some_models_have_are_taken() -> None:
    E.Model(**SIZES | {"width": 0, "experts": E.Experts(count=2, width=4)})  # no MLP but experts
    E.Model(**SIZES | {"latent": LATENT, "layers": np.int64(2)})


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: E.Experts(count=0, width="4"), ["count is 0", "width is '4'"]),
        (
            lambda: E.Experts(count=2, width=4, shared_width=-1),
            ["shared_width is -1, but a whole number of at least"],
        ),
        (lambda: E.Latent(q_rank=0, kv_rank=4, nope=2, rope=None, value=2), ["q_rank is 0", "rope is None"]),
    ],
)
def test_sizes_that_no_part_of_a_model_has_are_all_listed(make: Callable[[], Any], words: list[str]) -> None:
    with pytest.raises(sf.PlanError) as caught:
        make()
    assert len(caught.value.faults) == len(words)
    assert all(some in fault for fault, some in zip(caught.value.faults, words, strict=True))


@pytest.mark.parametrize("name", [["Qwen3-0.6B"], None, 3, "Qwen3"])
def test_what_is_no_known_model_is_refused_with_those_that_are(name: Any) -> None:
    with pytest.raises(sf.PlanError, match=r"is unknown, but one of these is needed: Qwen3-0\.6B, "):
        E.model(name)
