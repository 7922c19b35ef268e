"""vLLM and SGLang: every rank's bytes against the engines' own loading, for tiny models of every family."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from checkpoints import (
    DEEPSEEK,
    GLM,
    GPT_OSS,
    LLAMA,
    MOONLIGHT,
    QWEN3,
    QWEN3_MOE,
    TINY,
    checkpoint,
    into_maxtext,
    into_tunix,
)
from engine_checks import check_route, mesh, named
from jax.sharding import AbstractMesh
from rollout_loaders import Rank, sglang, vllm

import shardfly_jax as sf
from shardfly_jax.engines.models import Model
from shardfly_jax.engines.side import Side

E = sf.engines
SPARSE = tuple(m for m in TINY if m.experts is not None)


def by_name(m: Model) -> str:
    return m.name


def trained(model: Model, ck: dict[str, np.ndarray]) -> tuple[Side, dict[str, np.ndarray]]:
    """The most demanding trainer that knows the model, with its params."""
    if model.family in E.maxtext.FAMILIES:
        there = mesh((2, 2), ("fsdp", "tensor"))
        return E.maxtext.trainer(model, there, dtype="float32"), into_maxtext(model, ck, True)
    return E.hf.trainer(model, mesh((2,), ("x",)), dtype="float32"), ck


def rollout_mesh(tp: int, dp: int = 1) -> object:
    if dp > 1:
        return mesh((dp, tp), ("dp", "tp"), 8 - dp * tp)
    return mesh((1, tp), ("replica", "tp"), 8 - tp)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("model", TINY, ids=by_name)
def test_vllms_parameters_are_those_that_its_loader_fills(model: Model, tp: int, rng: np.random.Generator) -> None:
    ck = checkpoint(model, rng)
    rollout = E.vllm.rollout(model, rollout_mesh(tp), dtype="float32")
    check_route(
        *trained(model, ck), rollout, lambda k: vllm(model, ck, Rank(tp=k, tp_size=tp, moe_tp=k, moe_tp_size=tp))
    )


@pytest.mark.parametrize(("dp", "tp"), [(1, 4), (2, 2), (2, 4), (4, 1)])
@pytest.mark.parametrize("model", SPARSE, ids=by_name)
def test_vllm_shares_out_whole_experts(model: Model, dp: int, tp: int, rng: np.random.Generator) -> None:
    ck = checkpoint(model, rng)
    ranks = [Rank(tp=k % tp, tp_size=tp, ep=k, ep_size=dp * tp) for k in range(dp * tp)]
    rollout = E.vllm.rollout(model, rollout_mesh(tp, dp), dtype="float32", expert_parallel=True)
    sequence = dp > 1 and tp > 1
    check_route(*trained(model, ck), rollout, lambda k: vllm(model, ck, ranks[k], sequence_parallel=sequence))


def test_another_exchange_leaves_the_shared_expert_cut(rng: np.random.Generator) -> None:
    ck = checkpoint(DEEPSEEK, rng)
    ranks = [Rank(tp=k % 2, tp_size=2, ep=k, ep_size=4) for k in range(4)]
    exchange = "flashinfer_nvlink_two_sided"
    rollout = E.vllm.rollout(
        DEEPSEEK, rollout_mesh(2, 2), dtype="float32", expert_parallel=True, all2all_backend=exchange
    )
    check_route(*trained(DEEPSEEK, ck), rollout, lambda k: vllm(DEEPSEEK, ck, ranks[k]))


@pytest.mark.parametrize("model", [QWEN3_MOE, GPT_OSS], ids=by_name)
def test_vllm_cuts_experts_over_data_parallel_ranks_too(model: Model, rng: np.random.Generator) -> None:
    ck = checkpoint(model, rng)
    rollout = E.vllm.rollout(model, rollout_mesh(2, 2), dtype="float32")
    check_route(
        *trained(model, ck), rollout, lambda k: vllm(model, ck, Rank(tp=k % 2, tp_size=2, moe_tp=k, moe_tp_size=4))
    )


@pytest.mark.parametrize("model", [QWEN3, QWEN3_MOE, LLAMA], ids=by_name)
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_tunix_reaches_both_engines(model: Model, engine: str, rng: np.random.Generator) -> None:
    ck = checkpoint(model, rng)
    trainer = E.tunix.trainer(model, mesh((2, 2), ("fsdp", "tp")), dtype="float32")
    rollout = getattr(E, engine).rollout(model, rollout_mesh(4), dtype="float32")
    load = {"vllm": vllm, "sglang": sglang}[engine]
    check_route(
        trainer,
        into_tunix(model, ck),
        rollout,
        lambda k: load(model, ck, Rank(tp=k, tp_size=4, moe_tp=k, moe_tp_size=4)),
    )


def test_the_flashinfer_cutlass_backends_hold_up_before_gate(rng: np.random.Generator) -> None:
    ck = checkpoint(QWEN3_MOE, rng)
    side = trained(QWEN3_MOE, ck)
    backend = "flashinfer_cutlass"
    one = E.vllm.rollout(QWEN3_MOE, rollout_mesh(2), dtype="float32", moe_backend=backend)
    rank = [Rank(tp=k, tp_size=2, moe_tp=k, moe_tp_size=2) for k in range(2)]
    check_route(*side, one, lambda k: vllm(QWEN3_MOE, ck, rank[k], up_first=True))
    two = E.sglang.rollout(QWEN3_MOE, rollout_mesh(2), dtype="float32", moe_runner_backend=backend)
    check_route(*side, two, lambda k: sglang(QWEN3_MOE, ck, rank[k], backend))


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_experts_lie_in_the_slots_that_a_load_balancer_chose(engine: str, rng: np.random.Generator) -> None:
    ck = checkpoint(DEEPSEEK, rng)
    slots = {i: [*rng.permutation(8), *rng.integers(0, 8, 4)] for i in DEEPSEEK.sparse_layers}  # four redundant ones
    options = {"expert_parallel": True if engine == "vllm" else 4, "placement": slots}
    rollout = getattr(E, engine).rollout(DEEPSEEK, rollout_mesh(4), dtype="float32", **options)

    def wanted(k: int) -> dict[str, np.ndarray]:
        out = {}
        for i in DEEPSEEK.sparse_layers:  # the loader knows one list: take each layer's parameters from its own
            rank = Rank(tp=k, tp_size=4, ep=k, ep_size=4, slots=slots[i])
            whole = {"vllm": vllm, "sglang": sglang}[engine](DEEPSEEK, ck, rank)
            out |= {n: w for n, w in whole.items() if f"layers.{i}." in n or n not in out}
        return out

    check_route(*trained(DEEPSEEK, ck), rollout, wanted)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("model", TINY, ids=by_name)
def test_sglangs_parameters_are_those_that_its_loader_fills(model: Model, tp: int, rng: np.random.Generator) -> None:
    ck = checkpoint(model, rng)
    rollout = E.sglang.rollout(model, rollout_mesh(tp), dtype="float32", sinks_dtype="float32")
    fused = model.family == "glm4_moe"
    check_route(
        *trained(model, ck), rollout,
        lambda k: sglang(model, ck, Rank(tp=k, tp_size=tp, moe_tp=k, moe_tp_size=tp), fused_shared=fused),
    )  # fmt: skip


@pytest.mark.parametrize("model", [QWEN3_MOE, GPT_OSS, GLM], ids=by_name)
def test_sglangs_triton_kernels_want_experts_in_before_out(model: Model, rng: np.random.Generator) -> None:
    ck = checkpoint(model, rng)
    runner, fused = "triton_kernel", model.family == "glm4_moe"
    rollout = E.sglang.rollout(
        model, rollout_mesh(2), dtype="float32", sinks_dtype="float32", moe_runner_backend=runner
    )
    check_route(
        *trained(model, ck), rollout,
        lambda k: sglang(model, ck, Rank(tp=k, tp_size=2, moe_tp=k, moe_tp_size=2), runner, fused),
    )  # fmt: skip


@pytest.mark.parametrize(("tp", "ep"), [(4, 4), (8, 2), (8, 4)])
@pytest.mark.parametrize("model", [QWEN3_MOE, DEEPSEEK, MOONLIGHT, GLM], ids=by_name)
def test_sglang_cuts_experts_both_ways(model: Model, tp: int, ep: int, rng: np.random.Generator) -> None:
    ck = checkpoint(model, rng)
    rollout = E.sglang.rollout(model, rollout_mesh(tp), dtype="float32", expert_parallel=ep)
    inner = tp // ep
    check_route(
        *trained(model, ck), rollout,
        lambda k: sglang(
            model, ck, Rank(tp=k, tp_size=tp, ep=k // inner, ep_size=ep, moe_tp=k % inner, moe_tp_size=inner)
        ),
    )  # fmt: skip


@pytest.mark.parametrize("fused", [True, False])
def test_sglang_may_make_the_shared_expert_the_last_routed_one(fused: bool, rng: np.random.Generator) -> None:
    ck = checkpoint(DEEPSEEK, rng)
    rollout = E.sglang.rollout(DEEPSEEK, rollout_mesh(2), dtype="float32", fuse_shared_experts=fused)
    check_route(
        *trained(DEEPSEEK, ck), rollout,
        lambda k: sglang(DEEPSEEK, ck, Rank(tp=k, tp_size=2, moe_tp=k, moe_tp_size=2), fused_shared=fused),
    )  # fmt: skip


ABSTRACT = AbstractMesh((4,), ("tp",))


def test_sglang_fuses_the_shared_expert_where_it_does_so_itself() -> None:
    def slots(name: str, **options: int) -> int:
        params = E.sglang.rollout(E.model(name), ABSTRACT, **options).params
        return params["model"]["layers"]["9"]["mlp"]["experts"]["w13_weight"].shape[0]

    assert slots("DeepSeek-V3") == 257
    assert slots("DeepSeek-V3", expert_parallel=4) == 256
    assert slots("Moonlight-16B-A3B") == 64
    assert slots("GLM-4.5-Air") == 129


def test_parameters_that_stay_in_float32_do() -> None:
    def float32(side: Side) -> set[str]:
        p = "model.layers.2."
        return {
            name.removeprefix(p) for name, leaf in named(side.params).items() if leaf.dtype == np.float32 and p in name
        }

    bias = "mlp.gate.e_score_correction_bias"
    assert float32(E.vllm.rollout(DEEPSEEK, ABSTRACT)) == {bias}
    assert float32(E.vllm.rollout(GLM, ABSTRACT)) == {bias, "mlp.gate.weight"}
    assert float32(E.sglang.rollout(GLM, ABSTRACT)) == {bias, "mlp.gate._weight_fp32"}
    assert float32(E.vllm.rollout(GPT_OSS, ABSTRACT)) == set()
    biases = {"mlp.experts.w13_weight_bias", "mlp.experts.w2_weight_bias"}
    assert float32(E.sglang.rollout(GPT_OSS, ABSTRACT)) == biases
    assert float32(E.sglang.rollout(GPT_OSS, ABSTRACT, sinks_dtype="float32")) == {*biases, "self_attn.sinks"}


@pytest.mark.parametrize(
    ("engine", "model", "options", "words"),
    [
        ("vllm", QWEN3_MOE, {"moe_backend": "flashinfer_trtllm"}, "--moe-backend triton.*is_checkpoint"),
        ("vllm", GPT_OSS, {"moe_backend": "flashinfer_cutlass"}, r"only \['triton'\]"),
        ("vllm", QWEN3_MOE, {"moe_backend": "marlin"}, "engines.hf"),
        ("vllm", QWEN3, {"moe_backend": "tritn"}, "tiny-qwen3 has no experts. Leave it out"),
        ("vllm", QWEN3, {"all2all_backend": "pplx"}, "Choose one"),
        ("sglang", QWEN3, {"moe_runner_backend": "tritn"}, "tiny-qwen3 has no experts. Leave it out"),
        ("vllm", QWEN3_MOE, {"all2all_backend": "pplx"}, "allgather_reducescatter.*Choose one"),
        ("sglang", QWEN3_MOE, {"moe_runner_backend": "flashinfer_trtllm"}, "update_weights_from_disk"),
        ("sglang", GPT_OSS, {"moe_runner_backend": "flashinfer_cutlass"}, "triton_kernel"),
        ("sglang", GPT_OSS, {"expert_parallel": 2}, "does not share out"),
        ("sglang", QWEN3_MOE, {"expert_parallel": 3}, "must divide tp=4"),
        ("sglang", QWEN3_MOE, {"expert_parallel": 2, "moe_runner_backend": "triton_kernel"}, "Choose triton"),
        ("sglang", LLAMA, {"expert_parallel": 2}, "has no experts"),
        ("sglang", QWEN3_MOE, {"expert_parallel": True}, "is True, but it is a number.*whole experts on every rank, 4"),
        ("sglang", QWEN3_MOE, {"expert_parallel": False}, "is False, but it is a number"),
        ("sglang", QWEN3_MOE, {"expert_parallel": 2.0}, "is 2.0, but it is a number"),
        ("vllm", QWEN3_MOE, {"expert_parallel": 2}, "is 2, but it is True or False"),
        ("vllm", QWEN3_MOE, {"expert_parallel": 0}, "is 0, but it is True or False"),
        ("vllm", LLAMA, {"expert_parallel": True}, "tiny-llama has no experts. Leave it out"),
        ("sglang", MOONLIGHT, {"fuse_shared_experts": True}, "32 beside 16"),
        ("vllm", LLAMA, {"placement": [0, 1]}, "has no experts"),
        ("vllm", QWEN3_MOE, {"placement": [0, 1, 2, 3, 4, 5, 6, 6]}, "have no slot"),
        ("vllm", DEEPSEEK, {"placement": {0: range(8)}}, "range.1, 4.*Give a list for each"),
        ("vllm", dataclasses.replace(GLM, family="glm5"), {}, "no mapping for 'tiny-glm'"),
    ],
)  # fmt: skip
def test_what_a_mapping_cannot_write_is_refused_with_what_to_do(
    engine: str, model: Model, options: dict[str, object], words: str
) -> None:
    with pytest.raises(sf.PlanError, match=words):
        getattr(E, engine).rollout(model, ABSTRACT, **options)


def test_exchanges_that_pad_experts_are_refused_where_they_do() -> None:
    wide = AbstractMesh((2, 2), ("dp", "tp"))
    options = {"expert_parallel": True, "all2all_backend": "deepep_high_throughput"}
    with pytest.raises(sf.PlanError, match="pads the experts of gpt-oss-20b, whose hidden size is 2880"):
        E.vllm.rollout(E.model("gpt-oss-20b"), wide, **options)
    E.vllm.rollout(E.model("gpt-oss-20b"), ABSTRACT, **options)  # one data-parallel rank exchanges nothing
    E.vllm.rollout(E.model("DeepSeek-V3"), wide, **options)


@pytest.mark.parametrize(
    "placement",
    [
        {}, [], "round_robin", 3, {1: "ab"}, {1: []}, [0.0, 1.0], [list(range(128))] * 48, [True] * 128,
        np.tile(np.arange(128), (48, 1)), np.arange(128.0), np.array(0), {i: [[0]] for i in range(48)},
    ],
    ids=str,
)  # fmt: skip
def test_a_placement_that_names_no_experts_is_refused(placement: Any) -> None:
    model = sf.engines.model("Qwen3-30B-A3B")
    with pytest.raises(sf.PlanError, match="the number of the expert in each slot is needed"):
        sf.engines.vllm.rollout(model, AbstractMesh((2,), ("tp",)), expert_parallel=True, placement=placement)
