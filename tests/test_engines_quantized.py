"""vLLM and SGLang in fp8: every rank's codes and scales against the engines' loading, and the rule for sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from checkpoints import Arrays, checkpoint, into_maxtext, into_tunix
from checks import blocks_by_hand, by_hand, updated
from engine_checks import check_route, mesh, named, placed
from jax.sharding import AbstractMesh
from rollout_loaders import Rank, sglang, vllm

import shardfly_jax as sf
from shardfly_jax.engines.models import Experts, Latent, Model
from shardfly_jax.engines.side import Side

E = sf.engines
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

QWEN3 = Model(
    name="qwen", family="qwen3", layers=1, hidden=192, heads=4, kv_heads=2, head_dim=128, width=512, vocab=64,
    tied=True, qk_norm=True,
)  # fmt: skip
LLAMA = dataclasses.replace(QWEN3, name="llama", family="llama3", qk_norm=False, tied=False)
QWEN3_MOE = dataclasses.replace(
    QWEN3, name="qwen-moe", family="qwen3_moe", tied=False, experts=Experts(count=4, width=512)
)
GLM = dataclasses.replace(
    QWEN3, name="glm", family="glm4_moe", layers=2, tied=False, qkv_bias=True,
    experts=Experts(count=4, width=512, dense_layers=1, shared_width=512, correction=True),
)  # fmt: skip
# 352 rows of the fused compressions and 160 columns end inside a block; a head's 192 rows are one and a half
DEEPSEEK = Model(
    name="deepseek", family="deepseek_v3", layers=2, hidden=192, heads=8, kv_heads=8, head_dim=192, width=512, vocab=64,
    tied=False, experts=Experts(count=4, width=512, dense_layers=1, shared_width=512, correction=True),
    latent=Latent(q_rank=128, kv_rank=160, nope=128, rope=64, value=64),
)  # fmt: skip
MOONLIGHT = dataclasses.replace(
    DEEPSEEK, name="moonlight", latent=Latent(q_rank=None, kv_rank=160, nope=128, rope=64, value=64)
)
MODELS = (QWEN3, LLAMA, QWEN3_MOE, GLM, DEEPSEEK, MOONLIGHT)

LINEARS = (
    "qkv_proj", "o_proj", "q_proj", "q_b_proj", "kv_b_proj", "kv_a_proj_with_mqa", "fused_qkv_a_proj",
    "fused_qkv_a_proj_with_mqa", "gate_up_proj", "down_proj",
)  # fmt: skip
"""What both engines give their `quant_config`; routers, norms, embeddings and heads get none."""


def by_name(m: Model) -> str:
    return m.name


def ue8m0_by_hand(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales of a matrix, block by block: DeepGEMM's `per_block_cast_to_fp8(use_ue8m0=True)`, in float64."""
    n, k = x.shape
    codes, scales = np.empty(x.shape, ml_dtypes.float8_e4m3fn), np.empty((-(-n // 128), -(-k // 128)), np.float32)
    for a, b in np.ndindex(scales.shape):
        at = slice(a * 128, (a + 1) * 128), slice(b * 128, (b + 1) * 128)
        block = x[at].astype(np.float64)
        scales[a, b] = 2.0 ** np.ceil(np.log2(max(np.abs(block).max(), 1e-4) / 448))
        codes[at] = np.clip(block / scales[a, b], -448, 448).astype(np.float32)
    return codes, scales


def one_scale_by_hand(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`ops.scaled_fp8_quant(weight)`: one scale for all that the rank holds, [1]."""
    codes, scale = by_hand(x, floor=0)
    return codes, np.array([scale])


def rows_by_hand(x: np.ndarray, largest: float, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales [rows, 1] of a whole matrix, row by row, divided in float32."""
    wide = x.astype(np.float32)
    scales = np.array([[np.float32(np.abs(row).max() / np.float32(largest))] for row in wide], np.float32)
    codes = np.clip(wide / scales, -largest, largest)
    return (np.rint(codes) if dtype == np.int8 else codes).astype(dtype), scales


By = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
BY_HAND: dict[str, By] = {
    "fp8_block": lambda x: blocks_by_hand(x, 128, 128),
    "fp8_block_ue8m0": ue8m0_by_hand,
    "fp8_tensor": one_scale_by_hand,
    "fp8_channel": lambda x: rows_by_hand(x, 448, ml_dtypes.float8_e4m3fn),
    "int8_channel": lambda x: rows_by_hand(x, 127, np.int8),
}


def suffix_of(quantization: str) -> str:
    """`weight_scale_inv` for blocks, `weight_scale` else."""
    return "_scale_inv" if "block" in quantization else "_scale"


def quantized(rank: Arrays, quantization: str) -> Arrays:
    """A rank of an engine after loading, its linears and experts as codes and scales."""
    by, suffix = BY_HAND[quantization], suffix_of(quantization)
    out = {}
    for name, weight in rank.items():
        if name.endswith(("w13_weight", "w2_weight")):
            if name.endswith("w13_weight") and suffix == "_scale_inv":  # halves are loaded one by one
                halves = [[by(half) for half in np.split(expert, 2)] for expert in weight]
                each = [tuple(np.concatenate(part) for part in zip(*pair, strict=True)) for pair in halves]
            else:
                each = [by(expert) for expert in weight]
            out[name], scales = (np.stack(part) for part in zip(*each, strict=True))
            out[name + suffix] = scales.reshape(-1) if quantization == "fp8_tensor" else scales
        elif name.endswith(tuple(f".{linear}.weight" for linear in LINEARS)):
            out[name], out[name + suffix] = by(weight)
        else:
            keeps = name.endswith(("e_score_correction_bias", "_weight_fp32"))
            out[name] = weight if keeps else weight.astype(BFLOAT16)
    return out


def trained(model: Model, rng: np.random.Generator) -> tuple[Side, Arrays, Arrays]:
    """A trainer in bfloat16 whose shards cut through blocks, its params, and the checkpoint that they are."""
    ck = {n: (w * 0.05).astype(BFLOAT16).astype(np.float32) for n, w in checkpoint(model, rng).items()}
    if model.latent is not None:
        side = E.maxtext.trainer(model, mesh((2, 2), ("fsdp", "tensor")))
        loaded = into_maxtext(model, ck, True)
    elif model.family in E.tunix.FAMILIES:
        side = E.tunix.trainer(model, mesh((2, 2), ("fsdp", "tp")))
        loaded = into_tunix(model, ck)
    else:
        side, loaded = E.hf.trainer(model, mesh((2,), ("x",))), ck
    leaves = named(side.params)
    return side, {name: array.astype(leaves[name].dtype) for name, array in loaded.items()}, ck


def rollout_mesh(tp: int, dp: int = 1) -> Any:
    return mesh((dp, tp), ("dp", "tp"), 8 - dp * tp) if dp > 1 else mesh((1, tp), ("replica", "tp"), 8 - tp)


def vllm_rank(model: Model, ck: Arrays, rank: Rank, quantization: str, **options: bool) -> Arrays:
    """vLLM's parameters of a rank, and the storage of what it absorbs."""
    loaded = vllm(model, ck, rank, **options)
    out = quantized(loaded, quantization)
    if model.family == "glm4_moe":  # its router is in float32
        out |= {name: weight for name, weight in loaded.items() if name.endswith("mlp.gate.weight")}
    for i in range(model.layers) if model.latent else ():
        a = f"model.layers.{i}.self_attn."
        kv_b = loaded[a + "kv_b_proj.weight"].astype(BFLOAT16)
        out[a + "mla_attn.mla_attn.W_UK_T"] = kv_b.T if quantization == "fp8_block_ue8m0" else kv_b
    return out


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("model", MODELS, ids=by_name)
def test_vllm_holds_blocks_where_its_loader_puts_them(model: Model, tp: int, rng: np.random.Generator) -> None:
    side, loaded, ck = trained(model, rng)
    rollout = E.vllm.rollout(model, rollout_mesh(tp), quantization="fp8_block")
    ranks = [Rank(tp=k, tp_size=tp, moe_tp=k, moe_tp_size=tp) for k in range(tp)]
    check_route(side, loaded, rollout, lambda k: vllm_rank(model, ck, ranks[k], "fp8_block"))


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("model", MODELS, ids=by_name)
def test_sglang_holds_blocks_where_its_loader_puts_them(model: Model, tp: int, rng: np.random.Generator) -> None:
    side, loaded, ck = trained(model, rng)
    rollout = E.sglang.rollout(model, rollout_mesh(tp), quantization="fp8_block")
    fused = model.family == "glm4_moe"
    ranks = [Rank(tp=k, tp_size=tp, moe_tp=k, moe_tp_size=tp) for k in range(tp)]
    check_route(
        side, loaded, rollout, lambda k: quantized(sglang(model, ck, ranks[k], fused_shared=fused), "fp8_block")
    )


@pytest.mark.parametrize("model", [QWEN3_MOE, DEEPSEEK], ids=by_name)
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_powers_of_two_come_in_the_same_places(engine: str, model: Model, rng: np.random.Generator) -> None:
    side, loaded, ck = trained(model, rng)
    rollout = getattr(E, engine).rollout(model, rollout_mesh(2), quantization="fp8_block_ue8m0")
    ranks = [Rank(tp=k, tp_size=2, moe_tp=k, moe_tp_size=2) for k in range(2)]
    if engine == "vllm":
        check_route(side, loaded, rollout, lambda k: vllm_rank(model, ck, ranks[k], "fp8_block_ue8m0"))
    else:
        check_route(side, loaded, rollout, lambda k: quantized(sglang(model, ck, ranks[k]), "fp8_block_ue8m0"))


@pytest.mark.parametrize("quantization", ["fp8_block", "fp8_block_ue8m0"])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_absorbed_copies_differ_from_decoded_codes_by_what_the_design_note_says(
    engine: str, quantization: str, rng: np.random.Generator
) -> None:
    """The engines make the copies of the codes, D = bfloat16(code * scale); here they are the trainer's values."""
    side, loaded, _ = trained(DEEPSEEK, rng)
    rollout = getattr(E, engine).rollout(DEEPSEEK, rollout_mesh(1), quantization=quantization)
    plan = sf.register(sf.make_plan(side.params, rollout.params, E.route(side, rollout)))
    out = {name: np.asarray(array) for name, array in named(updated(placed(side, loaded), plan)).items()}
    p = "model.layers.0.self_attn."
    codes, scales = (out[p + f"kv_b_proj.weight{suffix}"].astype(np.float32) for suffix in ("", "_scale_inv"))
    steps = scales.repeat(128, 0).repeat(128, 1)[: codes.shape[0], : codes.shape[1]]
    decoded = (codes * steps).astype(BFLOAT16).astype(np.float64)
    if engine == "vllm":
        ours = out[p + "mla_attn.mla_attn.W_UK_T"]
        ours = ours.T if quantization == "fp8_block_ue8m0" else ours
    else:
        keys, values = out[p + "w_kc"].transpose(0, 2, 1), out[p + "w_vc"]
        ours = np.concatenate([keys, values], 1).reshape(codes.shape)
    ours = ours.astype(np.float64)
    off = np.abs(decoded - ours)
    relative = off[ours != 0] / np.abs(ours[ours != 0])
    assert 0.0220 < relative.mean() < 0.0230
    assert 0.0255 < np.sqrt((off**2).sum() / (ours**2).sum()) < 0.0275
    normal = np.abs(ours) >= steps / 64  # at least the smallest normal code
    assert 0.999 < normal.mean() < 1
    assert 0.058 < (off[normal] / np.abs(ours[normal])).max() < 0.064
    assert (off[~normal] <= steps[~normal] / 1000).all()  # half a unit of subnormal codes, 2^-10 of a scale


@pytest.mark.parametrize(("dp", "tp"), [(1, 4), (2, 2)])
@pytest.mark.parametrize("model", [QWEN3_MOE, DEEPSEEK], ids=by_name)
def test_whole_experts_of_vllm_are_quantized_too(model: Model, dp: int, tp: int, rng: np.random.Generator) -> None:
    side, loaded, ck = trained(model, rng)
    rollout = E.vllm.rollout(model, rollout_mesh(tp, dp), expert_parallel=True, quantization="fp8_block")
    ranks = [Rank(tp=k % tp, tp_size=tp, ep=k, ep_size=dp * tp) for k in range(dp * tp)]
    check_route(side, loaded, rollout, lambda k: vllm_rank(model, ck, ranks[k], "fp8_block", sequence_parallel=dp > 1))


@pytest.mark.parametrize(("tp", "ep"), [(4, 2), (4, 4)])
@pytest.mark.parametrize("model", [QWEN3_MOE, DEEPSEEK], ids=by_name)
def test_sglang_quantizes_experts_that_are_cut_both_ways(
    model: Model, tp: int, ep: int, rng: np.random.Generator
) -> None:
    side, loaded, ck = trained(model, rng)
    rollout = E.sglang.rollout(model, rollout_mesh(tp), expert_parallel=ep, quantization="fp8_block")
    inner = tp // ep
    ranks = [Rank(tp=k, tp_size=tp, ep=k // inner, ep_size=ep, moe_tp=k % inner, moe_tp_size=inner) for k in range(tp)]
    check_route(side, loaded, rollout, lambda k: quantized(sglang(model, ck, ranks[k]), "fp8_block"))


def test_the_expert_that_sglang_fuses_is_quantized_like_the_others(rng: np.random.Generator) -> None:
    side, loaded, ck = trained(DEEPSEEK, rng)
    rollout = E.sglang.rollout(DEEPSEEK, rollout_mesh(2), fuse_shared_experts=True, quantization="fp8_block")
    ranks = [Rank(tp=k, tp_size=2, moe_tp=k, moe_tp_size=2) for k in range(2)]
    check_route(
        side, loaded, rollout, lambda k: quantized(sglang(DEEPSEEK, ck, ranks[k], fused_shared=True), "fp8_block")
    )


def test_swapped_halves_of_vllm_have_swapped_scales(rng: np.random.Generator) -> None:
    side, loaded, ck = trained(QWEN3_MOE, rng)
    rollout = E.vllm.rollout(QWEN3_MOE, rollout_mesh(2), moe_backend="flashinfer_cutlass", quantization="fp8_block")
    ranks = [Rank(tp=k, tp_size=2, moe_tp=k, moe_tp_size=2) for k in range(2)]
    check_route(side, loaded, rollout, lambda k: vllm_rank(QWEN3_MOE, ck, ranks[k], "fp8_block", up_first=True))


@pytest.mark.parametrize("tp", [1, 2, 8])
@pytest.mark.parametrize("model", [QWEN3, LLAMA, QWEN3_MOE, GLM], ids=by_name)
def test_vllms_online_scales_cover_what_a_rank_holds(model: Model, tp: int, rng: np.random.Generator) -> None:
    wide = dataclasses.replace(model, heads=8)  # 8 ranks share 2 kv heads, and 64 columns are half a block
    side, loaded, ck = trained(wide, rng)
    rollout = E.vllm.rollout(wide, rollout_mesh(tp), quantization="fp8_tensor")
    ranks = [Rank(tp=k, tp_size=tp, moe_tp=k, moe_tp_size=tp) for k in range(tp)]
    check_route(side, loaded, rollout, lambda k: vllm_rank(wide, ck, ranks[k], "fp8_tensor"))


@pytest.mark.parametrize("expert_parallel", [False, True])
def test_vllms_online_scales_follow_experts_over_data_parallel_ranks(
    expert_parallel: bool, rng: np.random.Generator
) -> None:
    side, loaded, ck = trained(QWEN3_MOE, rng)
    rollout = E.vllm.rollout(QWEN3_MOE, rollout_mesh(2, 2), expert_parallel=expert_parallel, quantization="fp8_tensor")
    place = ("ep", "ep_size") if expert_parallel else ("moe_tp", "moe_tp_size")
    ranks = [Rank(tp=k % 2, tp_size=2, **dict(zip(place, (k, 4), strict=True))) for k in range(4)]
    check_route(side, loaded, rollout, lambda k: vllm_rank(QWEN3_MOE, ck, ranks[k], "fp8_tensor"))


def quantized_before(ck: Arrays, quantization: str) -> tuple[Arrays, Arrays]:
    """A checkpoint's linears as codes and as scales [rows, 1], as compressed-tensors stores them."""
    names = [n for n in ck if n.endswith("_proj.weight")]
    each = {n: BY_HAND[quantization](ck[n]) for n in names}
    return {n: codes for n, (codes, _) in each.items()}, {n: scales for n, (_, scales) in each.items()}


@pytest.mark.parametrize("quantization", ["fp8_channel", "int8_channel"])
@pytest.mark.parametrize("tp", [1, 2, 8])
@pytest.mark.parametrize("model", [QWEN3, LLAMA, QWEN3_MOE, GLM], ids=by_name)
def test_channels_have_the_scales_of_their_whole_rows(
    model: Model, tp: int, quantization: str, rng: np.random.Generator
) -> None:
    """vLLM loads codes like weights, and scales [rows, 1] like weights of one column that no rank cuts."""
    wide = dataclasses.replace(model, heads=8)
    side, loaded, ck = trained(wide, rng)
    rollout = E.vllm.rollout(wide, rollout_mesh(tp), quantization=quantization)
    codes, scales = quantized_before(ck, quantization)

    def wanted(k: int) -> Arrays:
        rank = Rank(tp=k, tp_size=tp, moe_tp=k, moe_tp_size=tp)
        out = vllm_rank(wide, ck, rank, quantization)
        held = vllm(wide, ck | {n: c.astype(np.float32) for n, c in codes.items()}, rank)
        # one column of scales for each rank that cuts the columns: any of them is the scale
        wide_scales = {n: np.repeat(s, ck[n].shape[1], 1) for n, s in scales.items()}
        of_rows = vllm(wide, ck | wide_scales, rank)
        for name in out:
            if name.endswith("_scale"):
                weight = name.removesuffix("_scale")
                out[weight] = held[weight].astype(out[weight].dtype)
                out[name] = np.ascontiguousarray(of_rows[weight][..., :1])
        return out

    check_route(side, loaded, rollout, wanted)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_deepseeks_linears_are_quantized_and_nothing_else(engine: str) -> None:
    """Shapes and dtypes of DeepSeek-V3 on a rank of TP 8, from its configuration."""
    model = dataclasses.replace(E.model("DeepSeek-V3"), layers=4)
    side = getattr(E, engine).rollout(model, AbstractMesh((8,), ("tp",)), quantization="fp8_block")
    ranks = {
        name.removeprefix("model.layers."): (leaf.sharding.shard_shape(leaf.shape), leaf.dtype.name)
        for name, leaf in named(side.params).items()
    }
    fused = "fused_qkv_a_proj" if engine == "vllm" else "fused_qkv_a_proj_with_mqa"
    experts = 256 if engine == "vllm" else 257
    codes = {
        f"3.self_attn.{fused}.weight": ((2112, 7168), (17, 56)),
        "3.self_attn.q_b_proj.weight": ((3072, 1536), (24, 12)),
        "3.self_attn.kv_b_proj.weight": ((4096, 512), (32, 4)),
        "3.self_attn.o_proj.weight": ((7168, 2048), (56, 16)),
        "0.mlp.gate_up_proj.weight": ((4608, 7168), (36, 56)),
        "0.mlp.down_proj.weight": ((7168, 2304), (56, 18)),
        "3.mlp.experts.w13_weight": ((experts, 512, 7168), (experts, 4, 56)),
        "3.mlp.experts.w2_weight": ((experts, 7168, 256), (experts, 56, 2)),
    }
    if engine == "vllm":
        codes["3.mlp.shared_experts.gate_up_proj.weight"] = ((512, 7168), (4, 56))
        codes["3.mlp.shared_experts.down_proj.weight"] = ((7168, 256), (56, 2))
    for name, (weight, scales) in codes.items():
        assert ranks.pop(name) == (weight, "float8_e4m3fn"), name
        assert ranks.pop(name + "_scale_inv") == (scales, "float32"), name
    rest = {name[2:]: found for name, found in ranks.items() if name.startswith("3.")}
    derived = {"self_attn.mla_attn.mla_attn.W_UK_T": (4096, 512)}
    if engine == "sglang":
        derived = {"self_attn.w_kc": (16, 512, 128), "self_attn.w_vc": (16, 128, 512)}
    assert rest == {
        "mlp.gate.weight": ((256, 7168), "bfloat16"),
        "mlp.gate.e_score_correction_bias": ((256,), "float32"),
        "input_layernorm.weight": ((7168,), "bfloat16"),
        "post_attention_layernorm.weight": ((7168,), "bfloat16"),
        "self_attn.q_a_layernorm.weight": ((1536,), "bfloat16"),
        "self_attn.kv_a_layernorm.weight": ((512,), "bfloat16"),
        **{name: (shape, "bfloat16") for name, shape in derived.items()},
    }
    assert ranks["model.embed_tokens.weight"] == ranks["lm_head.weight"] == ((16160, 7168), "bfloat16")


@pytest.mark.parametrize(
    ("engine", "model", "options", "words"),
    [
        ("vllm", "Qwen3-0.6B", {"quantization": "int3"}, r"of vllm is 'int3', but one of \['fp8_block', 'fp8_block_ue"),
        ("vllm", "Qwen3-0.6B", {"quantization": True}, "is True, but one of"),
        ("sglang", "Qwen3-0.6B", {"quantization": "fp8_tensor"}, r"of sglang is 'fp8_tensor', but one of \['fp8"),
        ("vllm", "gpt-oss-20b", {"quantization": "fp8_block"}, "gpt-oss-20b of family 'gpt_oss' is described unquant"),
        ("sglang", "gpt-oss-20b", {"quantization": "fp8_block"}, "described unquantized only"),
        ("vllm", "DeepSeek-V3", {"quantization": "fp8_tensor"}, "latent attention of DeepSeek-V3 only"),
        ("vllm", "DeepSeek-V3", {"quantization": "int8_channel"}, "latent attention of DeepSeek-V3 only"),
        (
            "vllm", "Qwen3-30B-A3B", {"quantization": "fp8_tensor", "moe_backend": "flashinfer_cutlass"},
            "--moe-backend triton",
        ),
        (
            "sglang", "Qwen3-30B-A3B", {"quantization": "fp8_block", "moe_runner_backend": "flashinfer_cutlass"},
            r"only \['triton', 'cutlass'\]",
        ),
        ("sglang", "Qwen3-30B-A3B", {"moe_runner_backend": "cutlass"}, r"only \['triton', 'triton_kernel'"),
    ],
)  # fmt: skip
def test_quantizations_that_are_not_described_are_refused_with_those_that_are(
    engine: str, model: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(sf.PlanError, match=words):
        getattr(E, engine).rollout(E.model(model), AbstractMesh((1,), ("tp",)), **options)
