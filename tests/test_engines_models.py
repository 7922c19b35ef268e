"""Every known model, from its trainers to the rollout engines, for every legal TP up to 8: on shapes alone."""

from __future__ import annotations

import math

import jax
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
