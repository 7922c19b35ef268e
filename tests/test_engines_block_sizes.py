"""Sizes that fp8 blocks do not divide: refused exactly where the engines refuse them, with what they do take."""

from __future__ import annotations

import ast
import dataclasses
import functools
import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest
from engine_checks import named
from hypothesis import assume, event, given, settings, strategies as st
from jax.sharding import AbstractMesh

import shardfly_jax as sf
from shardfly_jax.engines.models import Experts, Latent, Model
from shardfly_jax.engines.side import Side
from shardfly_jax.engines.vllm import ALL2ALL

E = sf.engines
GLM = Model(
    name="glm", family="glm4_moe", layers=2, hidden=192, heads=4, kv_heads=2, head_dim=128, width=512, vocab=64,
    tied=False, qk_norm=True, qkv_bias=True,
    experts=Experts(count=4, width=512, dense_layers=1, shared_width=512, correction=True),
)  # fmt: skip
DEEPSEEK = Model(
    name="deepseek", family="deepseek_v3", layers=2, hidden=192, heads=8, kv_heads=8, head_dim=192, width=512, vocab=64,
    tied=False, experts=GLM.experts, latent=Latent(q_rank=128, kv_rank=160, nope=128, rope=64, value=64),
)  # fmt: skip

TPS = (1, 2, 4, 8, 16, 32)
LEGAL: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "Qwen3-0.6B": ((1, 2, 4, 8), ()),
    "Qwen3-8B": (TPS, ()),
    "Qwen3-32B": ((1, 2, 4, 8), ()),
    "Qwen3-30B-A3B": ((1, 2), TPS),
    "Qwen3-235B-A22B": ((1, 2, 4), TPS),
    "Llama-3.1-8B": ((1, 2, 4, 8, 16), ()),
    "Llama-3.1-70B": (TPS, ()),
    "Llama-3.1-405B": (TPS, ()),
    "DeepSeek-V3": ((1, 2, 4, 8, 16), (1, 2, 4, 8, 16)),
    "Moonlight-16B-A3B": ((1,), (1, 2)),
    "GLM-4.5": ((1, 2, 4), (1, 2, 4)),
    "GLM-4.5-Air": ((), ()),
}
"""By model: tps that do, with experts cut and with whole experts."""


@functools.cache
def few_layers(name: str) -> Model:
    """A model with one layer of each kind."""
    model = E.model(name)
    return dataclasses.replace(model, layers=max(1, len(model.dense_layers) + 1) if model.experts else 1)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("name", LEGAL)
def test_sizes_that_an_engine_refuses_are_refused_before_planning(name: str, engine: str) -> None:
    model = few_layers(name)
    for whole, legal in enumerate(LEGAL[name]):
        for tp in TPS if model.experts or not whole else ():
            if model.heads % tp or (whole and model.experts is not None and model.experts.count % tp):
                continue
            options: dict[str, Any] = {"quantization": "fp8_block"}
            if whole:
                options["expert_parallel"] = True if engine == "vllm" else tp

            def rollout(tp: int = tp, options: dict[str, Any] = options) -> Side:
                return getattr(E, engine).rollout(model, AbstractMesh((1, tp), ("replica", "tp")), **options)

            if tp in legal:
                rollout()
                continue
            with pytest.raises(sf.PlanError, match=r"indivisible: .* of (self_attn|mlp)\..* per rank with tp="):
                rollout()


def is_refused_by_vllm(out: list[int], into: int, tp: int, cut: str | None = None, block: int = 128) -> bool:
    """`validate_fp8_block_shape` of vLLM, for the parts of a linear's rows and its columns; `cut`: which TP cuts."""
    parts = [n // tp if cut == "rows" else n for n in out]
    if tp > 1 and cut == "columns" and into // tp % block:
        return True
    if tp > 1 and cut == "rows":
        return any(n % block for n in parts)
    return any(n % block for n in parts[:-1])


@given(
    heads=st.sampled_from([4, 8]), kv_heads=st.sampled_from([2, 4]), head_dim=st.sampled_from([16, 32, 64, 128, 192]),
    widths=st.tuples(*[st.sampled_from([128, 192, 256, 384, 512, 1024])] * 3), tp=st.sampled_from([1, 2, 4]),
    latent=st.none() | st.tuples(
        st.none() | st.sampled_from([64, 128, 192]), st.sampled_from([32, 64, 128]), st.sampled_from([16, 32, 64, 128])
    ),
    whole=st.booleans(), engine=st.sampled_from(["vllm", "sglang"]),
)  # fmt: skip
def test_sizes_are_refused_exactly_where_vllms_own_check_refuses_them(
    heads: int,
    kv_heads: int,
    head_dim: int,
    widths: tuple[int, int, int],
    tp: int,
    latent: Any,
    whole: bool,
    engine: str,
) -> None:
    dense, shared, expert = widths
    experts = Experts(count=4, width=expert, dense_layers=1, shared_width=shared)
    model = dataclasses.replace(
        GLM, heads=heads, kv_heads=kv_heads, head_dim=head_dim, width=dense, experts=experts, qkv_bias=False
    )
    refused = {
        "mlp.gate_up_proj": is_refused_by_vllm([dense, dense], 192, tp, "rows"),
        "mlp.down_proj": is_refused_by_vllm([192], dense, tp, "columns"),
        "mlp.shared_experts.gate_up_proj": is_refused_by_vllm([shared, shared], 192, tp, "rows"),
        "mlp.shared_experts.down_proj": is_refused_by_vllm([192], shared, tp, "columns"),
        "mlp.experts.w13_weight": expert // (1 if whole else tp) % 128 > 0,  # Fp8MoEMethod.create_weights
        "mlp.experts.w2_weight": tp > 1 and expert // (1 if whole else tp) % 128 > 0,
    }
    if latent is None:
        kv = max(kv_heads, tp) * head_dim
        refused["self_attn.qkv_proj"] = is_refused_by_vllm([heads * head_dim, kv, kv], 192, tp, "rows")
        refused["self_attn.o_proj"] = is_refused_by_vllm([192], heads * head_dim, tp, "columns")
    else:
        q_rank, nope, value = latent
        mla = Latent(q_rank=q_rank, kv_rank=160, nope=nope, rope=32, value=value)
        model = dataclasses.replace(model, family="deepseek_v3", head_dim=nope + 32, latent=mla)
        queries = "self_attn.q_proj" if q_rank is None else "self_attn.q_b_proj"
        refused[queries] = is_refused_by_vllm([heads * (nope + 32)], q_rank or 192, tp, "rows")
        refused["self_attn.fused_qkv_a_proj"] = q_rank is not None and is_refused_by_vllm([q_rank, 192], 192, tp)
        refused["self_attn.kv_b_proj"] = is_refused_by_vllm([heads * (nope + value)], 160, tp, "rows")
        refused["self_attn.o_proj"] = is_refused_by_vllm([192], heads * value, tp, "columns")
    options: dict[str, Any] = {"quantization": "fp8_block"}
    if whole:
        options["expert_parallel"] = True if engine == "vllm" else tp
    if engine == "sglang":
        options["fuse_shared_experts"] = False

    def rollout() -> Side:
        return getattr(E, engine).rollout(model, AbstractMesh((tp,), ("tp",)), **options)

    try:
        rollout()
        named_by_us = set()
    except sf.PlanError as error:
        named_by_us = {re.search(r"((self_attn|mlp)\.[\w.]+?)(\.weight)? per rank", fault)[1] for fault in error.faults}
    assert named_by_us == {name for name, is_refused in refused.items() if is_refused}


def takes(engine: str, model: Model, sizes: dict[str, int], options: dict[str, Any]) -> bool:
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes))
    try:
        getattr(E, engine).rollout(model, mesh, **options)
    except sf.PlanError:
        return False
    return True


def offered(fault: str) -> Iterator[dict[str, Any]]:
    """The settings that the remedy of a fault says to choose, each `engine` and option by name."""
    for way in re.split(r"[Cc]hoose |, or ", re.split(r"do not divide them\. ", fault)[1]):
        change: dict[str, list[Any]] = {}
        if engine := re.match(r"engines\.(\w+) with ", way):
            change["engine"] = [engine[1]]
        for option, value, values in re.findall(r"(\w+)(?:=('\w+'|\w+)| from (\[[^]]*\]))", way):
            change[option] = [ast.literal_eval(value)] if value else ast.literal_eval(values)
        for chosen in itertools.product(*change.values()) if change else ():
            yield dict(zip(change, chosen, strict=True))


QUANTIZED = [name for name in E.names() if not name.startswith("gpt-oss")]


@st.composite
def requests(draw: Any) -> tuple[str, Model, dict[str, int], dict[str, Any]]:
    """An engine, a model, sizes of its mesh, and options."""
    engine, model = draw(st.sampled_from(["vllm", "sglang"])), few_layers(draw(st.sampled_from(QUANTIZED)))
    sizes = {"tp": draw(st.sampled_from([t for t in range(1, 129) if model.heads % t == 0]))}
    options = {"quantization": draw(st.sampled_from(["fp8_block", "fp8_block_ue8m0"]))}
    if engine == "vllm":
        sizes = {"dp": draw(st.sampled_from([1, 2, 3, 4])), **sizes}
        options |= {
            "expert_parallel": draw(st.booleans()) and model.experts is not None,
            "moe_backend": draw(st.sampled_from(["triton", "flashinfer_cutlass"])),
            "all2all_backend": draw(st.sampled_from(ALL2ALL)),
        }
    else:
        groups = [n for n in range(1, sizes["tp"] + 1) if sizes["tp"] % n == 0]
        options |= {
            "expert_parallel": draw(st.sampled_from(groups)) if model.experts is not None else 1,
            "moe_runner_backend": draw(st.sampled_from(["triton", "cutlass"])),
            "fuse_shared_experts": draw(st.sampled_from([None, False, True])),
        }
    return engine, model, sizes, options


@settings(max_examples=100)
@given(request=requests())
def test_whatever_a_refusal_offers_is_accepted_and_what_would_do_is_offered(request: Any) -> None:
    engine, model, sizes, options = request
    try:
        getattr(E, engine).rollout(model, AbstractMesh(tuple(sizes.values()), tuple(sizes)), **options)
    except sf.PlanError as error:
        faults = error.faults
    else:
        faults = ()
    assume(faults and "but blocks of" in faults[0])
    ways = list(offered(faults[0]))
    assert ways
    assert all(list(offered(fault)) == ways for fault in faults)
    event(f"{len(ways)} ways out")
    for way in ways:
        there, change = way.get("engine", engine), {k: v for k, v in way.items() if k not in ("engine", "tp")}
        kept = options if there == engine else {}
        assert takes(there, model, sizes | {"tp": way.get("tp", sizes["tp"])}, kept | change), way
    tps = [t for t in range(1, model.heads + 1) if model.heads % t == 0]
    alone = [t for t in tps if takes(engine, model, sizes | {"tp": t}, options)]
    assert [way["tp"] for way in ways if set(way) == {"tp"}] == alone
    parallel = (False, True) if engine == "vllm" else range(1, sizes["tp"] + 1)
    if model.experts is not None:
        same = [e for e in parallel if takes(engine, model, sizes, options | {"expert_parallel": e})]
        assert [way["expert_parallel"] for way in ways if set(way) == {"expert_parallel"}] == same
    if "No tp" in faults[0]:
        everywhere = [False, True] if engine == "vllm" else tps
        for t, e in itertools.product(tps, everywhere if model.experts is not None else [options["expert_parallel"]]):
            assert not takes(engine, model, sizes | {"tp": t}, options | {"expert_parallel": e})


def refused(engine: str, model: str | Model, tp: int, **options: Any) -> tuple[str, ...]:
    """The faults of a rollout in blocks."""
    sizes = {"dp": options.pop("dp", 1), "tp": tp} if engine == "vllm" else {"tp": tp}
    known = few_layers(model) if isinstance(model, str) else model
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes))
    with pytest.raises(sf.PlanError) as caught:
        getattr(E, engine).rollout(known, mesh, **{"quantization": "fp8_block", **options})
    return caught.value.faults


def test_every_size_that_blocks_do_not_divide_is_listed_with_what_would_do() -> None:
    faults = refused("vllm", "DeepSeek-V3", 32)
    assert [fault.split(" per rank")[0].split(" has ")[1] for fault in faults] == [
        "576 gate rows of mlp.gate_up_proj.weight",
        "576 columns of mlp.down_proj.weight",
        "64 gate rows of mlp.shared_experts.gate_up_proj.weight",
        "64 columns of mlp.shared_experts.down_proj.weight",
        "64 gate rows of mlp.experts.w13_weight",
        "64 columns of mlp.experts.w2_weight",
    ]
    assert all(fault.endswith("do not divide them. Choose tp from [1, 2, 4, 8, 16].") for fault in faults)
    # where the shared expert is one of the others
    assert refused("sglang", "DeepSeek-V3", 32) == tuple(fault for fault in faults if "shared" not in fault)


BY_ROW = "quantization='fp8_channel', whose scales per row take any size"


@pytest.mark.parametrize(
    ("engine", "model", "tp", "options", "remedy"),
    [
        ("vllm", "Qwen3-32B", 16, {}, f"Choose tp from [1, 2, 4, 8], or {BY_ROW}."),
        ("vllm", "Qwen3-30B-A3B", 8, {}, f"Choose tp from [1, 2], or expert_parallel=True, or {BY_ROW}."),
        ("sglang", "Qwen3-30B-A3B", 8, {}, "Choose tp from [1, 2], or expert_parallel from [4, 8]."),
        (
            "sglang", "Qwen3-30B-A3B", 8, {"expert_parallel": 2},
            "Choose tp from [2, 4], or expert_parallel from [4, 8].",
        ),
        ("vllm", "Moonlight-16B-A3B", 4, {}, "Choose tp=1, or tp=2 with expert_parallel=True."),
        ("vllm", "Moonlight-16B-A3B", 4, {"dp": 2}, "Choose expert_parallel=True."),
        (
            "vllm", "Moonlight-16B-A3B", 4, {"dp": 2, "all2all_backend": "flashinfer_nvlink_one_sided"},
            "Choose expert_parallel=True with all2all_backend='allgather_reducescatter'.",
        ),
        ("sglang", "Moonlight-16B-A3B", 16, {}, "Choose tp=1, or tp=2 with expert_parallel=2."),
        (
            "vllm", "GLM-4.5-Air", 2, {"moe_backend": "flashinfer_cutlass"},
            "No tp with any expert_parallel does: choose quantization='fp8_channel' with moe_backend='triton', whose "
            "scales per row take any size, or quantization=None.",
        ),
        (
            "sglang", "GLM-4.5-Air", 2, {"moe_runner_backend": "cutlass"},
            f"No tp with any expert_parallel does: choose engines.vllm with {BY_ROW}, or quantization=None with "
            "moe_runner_backend='triton'.",
        ),
        (
            "sglang", "GLM-4.5-Air", 2, {},
            f"No tp with any expert_parallel does: choose engines.vllm with {BY_ROW}, or quantization=None.",
        ),
        (
            "vllm", dataclasses.replace(DEEPSEEK, latent=dataclasses.replace(DEEPSEEK.latent, q_rank=96)), 1, {},
            "No tp with any expert_parallel does: choose quantization=None.",
        ),
        ("sglang", dataclasses.replace(GLM, width=192, experts=None), 1, {}, "No tp does: choose engines.vllm with"),
    ],
)  # fmt: skip
def test_a_refusal_says_what_the_engine_takes_instead(
    engine: str, model: str | Model, tp: int, options: dict[str, Any], remedy: str
) -> None:
    for fault in refused(engine, model, tp, **options):
        assert fault.split("do not divide them. ")[1].startswith(remedy)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_a_model_whose_sizes_no_block_divides_is_refused_with_the_format_that_takes_it(engine: str, tp: int) -> None:
    """The 10944 rows of its first layer's MLP are 85.5 blocks, and no tp makes them whole ones."""
    model, mesh = E.model("GLM-4.5-Air"), AbstractMesh((tp,), ("tp",))
    with pytest.raises(sf.PlanError) as caught:
        getattr(E, engine).rollout(model, mesh, quantization="fp8_block")
    assert f"{10944 // tp} gate rows of mlp.gate_up_proj.weight" in str(caught.value)
    way, unquantized = offered(caught.value.faults[0])
    assert unquantized == {"quantization": None}
    assert way == {"quantization": "fp8_channel"} | ({"engine": "vllm"} if engine == "sglang" else {})
    check_covered_in_channels(model, mesh)


def check_covered_in_channels(model: Model, mesh: AbstractMesh) -> None:
    """The remedy works: every linear has codes and a scale for each row."""
    params = named(E.vllm.rollout(model, mesh, quantization="fp8_channel").params)
    scales = {name: leaf for name, leaf in params.items() if name.endswith("_scale")}
    assert len(scales) == sum(leaf.dtype.name == "float8_e4m3fn" for leaf in params.values()) > 0
    for name, leaf in scales.items():
        assert leaf.shape == (*params[name.removesuffix("_scale")].shape[:-1], 1)
