"""vLLM's Qwen3 in fp8 blocks: against the engine's own quantization written out by hand, and today's way."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import ml_dtypes
import numpy as np
import pytest
from checks import assert_same_bits, blocks_by_hand, updated
from jax.sharding import AbstractMesh, Mesh

import shardfly_jax as sf
from shardfly_jax import formats
from shardfly_jax.engines.models import Experts, Model
from shardfly_jax.layout import leaf_names
from shardfly_jax.sharding.grids import quantize
from shardfly_jax.today import make_update

DENSE = Model(
    name="small", family="qwen3", layers=2, hidden=192, heads=4, kv_heads=2, head_dim=128, width=256, vocab=64,
    tied=True, experts=None,
)  # fmt: skip
SPARSE = dataclasses.replace(DENSE, layers=1, family="qwen3_moe", tied=False, experts=Experts(count=4, width=256))


def synced(
    model: Model, tp: int, expert_parallel: bool = False, quantization: str = "fp8_block"
) -> tuple[dict[str, np.ndarray], dict[str, jax.Array], sf.Plan, object]:
    """Source arrays and rollout arrays by name, after an update that is verified; the plan; the params."""
    devices = np.array(jax.devices())
    trainer = sf.engines.tunix.trainer(model, Mesh(devices[:4].reshape(2, 2), ("fsdp", "tp")))
    mesh = Mesh(devices[8 - 2 * tp :].reshape(2, tp), ("replica", "tp"))
    rollout = sf.engines.vllm.rollout(model, mesh, expert_parallel=expert_parallel, quantization=quantization)
    plan = sf.register(sf.make_plan(trainer.params, rollout.params, sf.engines.route(trainer, rollout)))
    rng = np.random.default_rng()
    draw = lambda s: (rng.standard_normal(s.shape) * 0.02).astype(ml_dtypes.bfloat16)  # noqa: E731
    params = jax.tree.map(lambda s: jax.device_put(draw(s), s.sharding), trainer.params)
    out = updated(params, plan)
    assert sf.verify(params, plan) == plan.target_nbytes
    flat = [dict(zip(*leaf_names(tree)[:2], strict=True)) for tree in (params, out)]
    return {k: np.asarray(v) for k, v in flat[0].items()}, flat[1], plan, params


def local(array: jax.Array, replica: int, rank: int, tp: int) -> np.ndarray:
    return np.asarray(array.addressable_shards[replica * tp + rank].data)


@pytest.mark.parametrize("tp", [1, 2])
def test_dense_linears_hold_the_codes_and_scales_that_vllm_computes_on_each_rank(tp: int) -> None:
    src, out, plan, _ = synced(DENSE, tp)
    m = DENSE
    for i, replica, rank in itertools.product(range(m.layers), range(2), range(tp)):
        p, layer = f"layers.{i}.", f"model.layers.{i}."
        heads = {n: src[p + f"attn.{n}_proj.w"].reshape(m.hidden, -1).T for n in "qkv"}
        gate, up, down = (src[p + f"mlp.{n}_proj.kernel"].T for n in ("gate", "up", "down"))
        o = src[p + "attn.o_proj.w"].reshape(-1, m.hidden).T
        want = {
            "self_attn.qkv_proj": np.concatenate([np.split(x, tp)[rank] for x in heads.values()]),
            "mlp.gate_up_proj": np.concatenate([np.split(x, tp)[rank] for x in (gate, up)]),
            "self_attn.o_proj": np.split(o, tp, 1)[rank],
            "mlp.down_proj": np.split(down, tp, 1)[rank],
        }
        for name, weight in want.items():
            codes, scales = blocks_by_hand(weight, 128, 128)
            assert_same_bits(local(out[layer + name + ".weight"], replica, rank, tp), codes, name)
            assert_same_bits(local(out[layer + name + ".weight_scale_inv"], replica, rank, tp), scales, name)
    assert out["model.embed_tokens.weight"].dtype == ml_dtypes.bfloat16
    assert plan.staging_nbytes > 0, "fsdp cuts 192 columns in the middle of a block"


@pytest.mark.parametrize(("tp", "expert_parallel"), [(1, False), (2, False), (2, True)])
def test_experts_have_one_grid_each(tp: int, expert_parallel: bool) -> None:
    src, out, _, _ = synced(SPARSE, tp, expert_parallel)
    assert SPARSE.experts is not None
    e = SPARSE.experts.count
    for rank in range(tp):
        experts = range(rank * e // tp, (rank + 1) * e // tp) if expert_parallel else range(e)
        parts = 1 if expert_parallel else tp
        gate, up, down = (src[f"layers.0.mlp.{n}_proj"] for n in ("gate", "up", "down"))
        for k, x in enumerate(experts):
            cut = 0 if expert_parallel else rank
            w13 = np.concatenate([np.split(w[x].T, parts)[cut] for w in (gate, up)])
            w2 = np.split(down[x].T, parts, 1)[cut]
            for name, weight in (("w13", w13), ("w2", w2)):
                codes, scales = blocks_by_hand(weight, 128, 128)
                at = f"model.layers.0.mlp.experts.{name}_weight"
                assert_same_bits(local(out[at], 0, rank, tp)[k], codes, name)
                assert_same_bits(local(out[at + "_scale_inv"], 1, rank, tp)[k], scales, name)


def test_powers_of_two_are_deepgemms() -> None:
    src, out, _, _ = synced(DENSE, 1, quantization="fp8_block_ue8m0")
    scales = np.asarray(out["model.layers.1.mlp.down_proj.weight_scale_inv"])
    assert (np.frexp(scales)[0] == 0.5).all()
    codes, want = quantize(formats.deepgemm_ue8m0(), src["layers.1.mlp.down_proj.kernel"].T)
    assert_same_bits(scales, want)
    assert_same_bits(np.asarray(out["model.layers.1.mlp.down_proj.weight"]), codes)


@pytest.mark.parametrize("quantization", ["fp8_block", "fp8_block_ue8m0", "fp8_tensor", "int8_channel"])
def test_a_jitted_quantization_of_the_whole_tree_gives_the_same_bits(quantization: str) -> None:
    """What the demo races against."""
    for model in (DENSE, SPARSE):
        _, out, plan, params = synced(model, 2, quantization=quantization)
        for key, array in make_update(plan)(params).items():
            have = out[key.partition(":")[2]]
            for mine, theirs in zip(have.addressable_shards, array.addressable_shards, strict=True):
                assert_same_bits(np.asarray(mine.data), np.asarray(theirs.data), key)


def test_every_legal_qwen3_plans_without_staging_for_even_trainers() -> None:
    for name in ("Qwen3-8B", "Qwen3-235B-A22B"):
        model = sf.engines.model(name)
        trainer = sf.engines.tunix.trainer(model, AbstractMesh((4, 2), ("fsdp", "tp")))
        rollout = sf.engines.vllm.rollout(model, AbstractMesh((2, 4), ("replica", "tp")), quantization="fp8_block")
        plan = sf.make_plan(trainer.params, rollout.params, sf.engines.route(trainer, rollout))
        plain = sf.engines.vllm.rollout(model, AbstractMesh((2, 4), ("replica", "tp")))
        whole = sf.make_plan(trainer.params, plain.params, sf.engines.route(trainer, plain))
        assert plan.staging_nbytes == 0
        assert plan.egress_nbytes < 0.6 * whole.egress_nbytes
