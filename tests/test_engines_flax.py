"""Flax models of one's own: Hugging Face's module names, other names by rules, stacks, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from checkpoints import DEEPSEEK, GLM, LLAMA, QWEN3_MOE, TINY, Arrays, checkpoint
from engine_checks import check_route, mesh, named
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P, SingleDeviceSharding

import shardfly_jax as sf
from shardfly_jax.engines.models import Model
from shardfly_jax.engines.side import nested

E = sf.engines


def leaf_name(name: str) -> str:
    """What flax modules call a leaf that Hugging Face calls `weight`."""
    if "embed_tokens" in name:
        return name.replace(".weight", ".embedding")
    return name.replace(".weight", ".scale" if "norm" in name else ".kernel")


def as_flax(m: Model, ck: Arrays, stack_experts: bool) -> Arrays:
    """A checkpoint as a flax port with the same module names holds it: kernels turned, experts perhaps stacked."""
    out: Arrays = {}
    for name, w in ck.items():
        turned = w.T if w.ndim == 2 and name.endswith(".weight") and "embed_tokens" not in name else w
        out[leaf_name(name)] = turned
    if m.experts is not None and not m.experts.interleaved and stack_experts:
        for name in [name for name in out if ".experts.0." in name]:
            each = [out.pop(name.replace(".experts.0.", f".experts.{e}.")) for e in range(m.experts.count)]
            out[name.replace(".experts.0.", ".experts.")] = np.stack(each)
    return out


def tree_of(arrays: Arrays, cut_first: bool = False) -> Any:
    """Arrays on two devices, as a tree; axis 0 is cut where it can be."""
    there = mesh((2,), ("x",))

    def put(w: np.ndarray) -> jax.Array:
        spec = P("x") if cut_first and w.shape[0] % 2 == 0 else P()
        return jax.device_put(np.ascontiguousarray(w), NamedSharding(there, spec))

    return nested({name: put(w) for name, w in arrays.items()})


def plain(model: Model) -> Any:
    return E.hf.rollout(model, mesh((1,), ("x",), 6), dtype="float32")


@pytest.mark.parametrize("stack_experts", [True, False], ids=["stacked", "apart"])
@pytest.mark.parametrize("model", TINY, ids=lambda m: m.name)
def test_modules_with_hugging_faces_names_need_no_rules(
    model: Model, stack_experts: bool, rng: np.random.Generator
) -> None:
    ck = checkpoint(model, rng)
    arrays = as_flax(model, ck, stack_experts)
    trainer = E.flax.trainer(model, tree_of(arrays, cut_first=True))
    check_route(trainer, arrays, plain(model), lambda rank: ck)


@pytest.mark.parametrize("model", TINY, ids=lambda m: m.name)
def test_a_rollout_of_flax_modules_receives_what_a_port_would_load(model: Model, rng: np.random.Generator) -> None:
    ck = checkpoint(model, rng)
    arrays = as_flax(model, ck, stack_experts=True)
    rollout = E.flax.rollout(model, tree_of(arrays))
    check_route(E.hf.trainer(model, mesh((1,), ("x",), 6), dtype="float32"), ck, rollout, lambda rank: arrays)


RULES = {
    "model": "",
    "model.embed_tokens": "embed",
    "model.layers.{i}": "blocks.{i}",
    "model.layers.{i}.input_layernorm.weight": "blocks.{i}.ln1",  # a bare param
    "model.layers.{i}.self_attn": "blocks.{i}.attn",
    "model.layers.{i}.self_attn.q_proj": "blocks.{i}.attn.query",
    "model.layers.{i}.mlp.experts": "blocks.{i}.moe.expert_{e}",
}


def with_own_names(m: Model, ck: Arrays) -> Arrays:
    """The same by names of one's own; attention has its heads as axes."""
    out: Arrays = {}
    shapes = {"q": (m.heads, m.head_dim), "k": (m.kv_heads, m.head_dim), "v": (m.kv_heads, m.head_dim)}
    for name, w in as_flax(m, ck, stack_experts=False).items():
        new = name.removeprefix("model.").replace("layers.", "blocks.").replace("embed_tokens.", "embed.")
        new = new.replace("input_layernorm.scale", "ln1").replace("mlp.experts.", "moe.expert_")
        for head, shape in shapes.items():
            if f".{head}_proj." in name:
                w = w.reshape(*w.shape[:-1], *shape)
        if ".o_proj.kernel" in name:
            w = w.reshape(m.heads, m.head_dim, m.hidden)
        out[new.replace("self_attn.", "attn.").replace("attn.q_proj", "attn.query")] = w
    return out


@pytest.mark.parametrize("model", [QWEN3_MOE, GLM], ids=lambda m: m.name)
def test_rules_rename_and_heads_may_be_axes(model: Model, rng: np.random.Generator) -> None:
    ck = checkpoint(model, rng)
    arrays = with_own_names(model, ck)
    trainer = E.flax.trainer(model, tree_of(arrays), rules=RULES)
    check_route(trainer, arrays, plain(model), lambda rank: ck)
    rollout = E.flax.rollout(model, tree_of(arrays), rules=RULES)
    check_route(E.hf.trainer(model, mesh((1,), ("x",), 6), dtype="float32"), ck, rollout, lambda rank: arrays)


def stacked(arrays: Arrays, layers: range, part: str, axis: int) -> Arrays:
    """Arrays whose name has `part` after the layer's number, of all those layers in one."""
    mark = f".layers.{layers[0]}.{part}"
    out = {name: w for name, w in arrays.items() if not any(f".layers.{i}.{part}" in name for i in layers)}
    for name in arrays:
        if mark in name:
            each = [arrays[name.replace(mark, f".layers.{i}.{part}")] for i in layers]
            out[name.replace(mark, f".layers.{part}")] = np.stack(each, axis=axis)
    return out


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("model", [LLAMA, DEEPSEEK], ids=lambda m: m.name)
def test_layers_may_be_stacked(model: Model, axis: int, rng: np.random.Generator) -> None:
    ck = checkpoint(model, rng)
    # of DeepSeek's layers, only those with experts look alike
    layers, part = (model.sparse_layers, "mlp.") if model.experts else (model.dense_layers, "")
    arrays = stacked(as_flax(model, ck, stack_experts=True), layers, part, axis)
    if model.experts is None:
        rules = {"model.layers.{i}": "model.layers"}
    else:
        names = ("mlp.experts", "mlp.gate", "mlp.shared_experts")
        rules = {f"model.layers.{{i}}.{name}": f"model.layers.{name}" for name in names}
    trainer = E.flax.trainer(model, tree_of(arrays), rules=rules, layer_axis=axis)
    check_route(trainer, arrays, plain(model), lambda rank: ck)
    rollout = E.flax.rollout(model, tree_of(arrays), rules=rules, layer_axis=axis)
    check_route(E.hf.trainer(model, mesh((1,), ("x",), 6), dtype="float32"), ck, rollout, lambda rank: arrays)


class Attention(nnx.Module):
    def __init__(self, m: Model, rngs: nnx.Rngs):
        self.q_proj = nnx.LinearGeneral(m.hidden, (m.heads, m.head_dim), use_bias=False, rngs=rngs)
        self.k_proj = nnx.LinearGeneral(m.hidden, (m.kv_heads, m.head_dim), use_bias=False, rngs=rngs)
        self.v_proj = nnx.LinearGeneral(m.hidden, (m.kv_heads, m.head_dim), use_bias=False, rngs=rngs)
        self.o_proj = nnx.LinearGeneral((m.heads, m.head_dim), m.hidden, axis=(-2, -1), use_bias=False, rngs=rngs)


class Mlp(nnx.Module):
    def __init__(self, m: Model, rngs: nnx.Rngs):
        self.gate_proj = nnx.Linear(m.hidden, m.width, use_bias=False, rngs=rngs)
        self.up_proj = nnx.Linear(m.hidden, m.width, use_bias=False, rngs=rngs)
        self.down_proj = nnx.Linear(m.width, m.hidden, use_bias=False, rngs=rngs)


class Layer(nnx.Module):
    def __init__(self, m: Model, rngs: nnx.Rngs):
        self.input_layernorm = nnx.RMSNorm(m.hidden, rngs=rngs)
        self.post_attention_layernorm = nnx.RMSNorm(m.hidden, rngs=rngs)
        self.self_attn, self.mlp = Attention(m, rngs), Mlp(m, rngs)


class Decoder(nnx.Module):
    def __init__(self, m: Model, rngs: nnx.Rngs):
        self.embed_tokens = nnx.Embed(m.vocab, m.hidden, rngs=rngs)
        self.layers = nnx.List([Layer(m, rngs) for _ in range(m.layers)])
        self.norm = nnx.RMSNorm(m.hidden, rngs=rngs)
        self.lm_head = nnx.Linear(m.hidden, m.vocab, use_bias=False, rngs=rngs)


def test_an_nnx_module_is_taken_as_it_is() -> None:
    small = dataclasses.replace(LLAMA, layers=1)
    model = Decoder(small, nnx.Rngs(int(np.random.default_rng().integers(1 << 31))))
    trainer = E.flax.trainer(small, model, rules={"model": ""})
    rollout = plain(small)
    plan = sf.register(sf.make_plan(trainer.params, rollout.params, E.route(trainer, rollout)))
    out = {name: np.asarray(w) for name, w in named(sf.sync(nnx.state(model, nnx.Param), plan)).items()}
    x = np.random.default_rng().standard_normal((3, small.hidden), np.float32)
    attention = model.layers[0].self_attn
    heads = np.asarray(attention.q_proj(x))
    q, o = (out[f"model.layers.0.self_attn.{name}.weight"] for name in ("q_proj", "o_proj"))
    # matmuls in float32, in whatever order XLA adds: torch's x @ weight.T against flax' own layers
    np.testing.assert_allclose(x @ q.T, heads.reshape(3, -1), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(heads.reshape(3, -1) @ o.T, np.asarray(attention.o_proj(heads)), rtol=1e-4, atol=1e-4)
    assert (out["model.embed_tokens.weight"] == np.asarray(model.embed_tokens.embedding[...])).all()


def test_all_that_does_not_fit_is_listed(rng: np.random.Generator) -> None:
    arrays = as_flax(LLAMA, checkpoint(LLAMA, rng), stack_experts=True)
    p = "model.layers.0.self_attn."
    del arrays["model.norm.scale"]
    arrays["model.embed_tokens.weight"] = arrays["model.embed_tokens.embedding"]
    arrays[p + "k_proj.kernel"] = arrays[p + "k_proj.kernel"].T[:-1]
    with pytest.raises(sf.PlanError) as caught:
        E.flax.trainer(LLAMA, tree_of(arrays), rules={"model.layers.{i}.attn": "x"})
    faults = "\n".join(caught.value.faults)
    assert len(caught.value.faults) == 4
    for words in (
        "'model.norm.weight' is under none of", "'model.embed_tokens.weight' is under several names",
        "k_proj.kernel' has shape (63, 16)", "rule: 'model.layers.{i}.attn' renames no tensor",
    ):  # fmt: skip
        assert words in faults


@pytest.mark.parametrize("side", [E.flax.trainer, E.flax.rollout])
@pytest.mark.parametrize(
    ("rule", "leaf"),
    [
        ({"model.layers.{i}.mlp.up_proj": "model.layers.{i}.mlp.gate_proj"}, "model.layers.0.mlp.gate_proj.kernel"),
        ({"model.norm": "model.layers.1.input_layernorm"}, "model.layers.1.input_layernorm.scale"),
    ],
    ids=["two projections", "one layer's"],
)
def test_a_leaf_that_rules_give_to_two_tensors_is_refused(
    side: Any, rule: dict[str, str], leaf: str, rng: np.random.Generator
) -> None:
    arrays = as_flax(LLAMA, checkpoint(LLAMA, rng), stack_experts=True)
    with pytest.raises(sf.PlanError, match=rf"doubly mapped: '{leaf}' is meant as .* Mend the rules") as caught:
        side(LLAMA, tree_of(arrays), rules=rule)
    assert len(caught.value.faults) == 1


def test_a_square_matrix_of_unclear_orientation_is_refused(rng: np.random.Generator) -> None:
    square = dataclasses.replace(LLAMA, width=LLAMA.hidden, vocab=LLAMA.hidden)
    arrays = as_flax(square, checkpoint(square, rng), stack_experts=True)
    arrays["model.embed_tokens.w"] = arrays.pop("model.embed_tokens.embedding")  # never turned, so never unclear
    for leaf, refused in (("w", True), ("kernel", False), ("weight", False)):
        renamed = {name.replace("up_proj.kernel", f"up_proj.{leaf}"): w for name, w in arrays.items()}
        if refused:
            with pytest.raises(sf.PlanError, match=r"up_proj.w' has shape \(16, 16\), which may be"):
                E.flax.trainer(square, tree_of(renamed))
            continue
        mapping = E.flax.trainer(square, tree_of(renamed)).mapping
        own = sf.src(f"model.layers.{{i}}.mlp.up_proj.{leaf}")
        assert (mapping["model.layers.{i}.mlp.up_proj.weight"] == own) is (leaf == "weight")
        assert mapping["model.embed_tokens.weight"] == sf.src("model.embed_tokens.w")


def test_a_stack_that_does_not_hold_its_layers_is_refused(rng: np.random.Generator) -> None:
    arrays = stacked(as_flax(DEEPSEEK, checkpoint(DEEPSEEK, rng), stack_experts=True), range(1, 4), "self_attn.", 0)
    with pytest.raises(sf.PlanError, match=r"\(3, 16, 8\), but .*q_a_proj.weight' has the layers range\(0, 4\)"):
        E.flax.trainer(DEEPSEEK, tree_of(arrays), rules={"model.layers.{i}.self_attn": "model.layers.self_attn"})


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("q_proj", (256, 128, 8)),  # head_dim before heads
        ("o_proj", (128, 8, 256)),
        ("k_proj", (256, 128, 4)),
    ],
)
def test_heads_that_do_not_come_first_are_refused(name: str, shape: tuple[int, ...]) -> None:
    model = dataclasses.replace(
        sf.engines.model("Qwen3-0.6B"), layers=1, hidden=256, heads=8, kv_heads=4, head_dim=128, width=64, vocab=128
    )
    good = {
        "q_proj": (256, 8, 128), "k_proj": (256, 4, 128), "v_proj": (256, 4, 128), "o_proj": (8, 128, 256),
    } | {name: shape}  # fmt: skip
    place = SingleDeviceSharding(jax.devices()[0])

    def leaf(*size: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(size, "bfloat16", sharding=place)

    attention = {key: {"kernel": leaf(*size)} for key, size in good.items()}
    attention |= {key: {"scale": leaf(128)} for key in ("q_norm", "k_norm")}
    mlp = {"gate_proj": leaf(256, 64), "up_proj": leaf(256, 64), "down_proj": leaf(64, 256)}
    layer = {
        "self_attn": attention, "mlp": {key: {"kernel": one} for key, one in mlp.items()},
        "input_layernorm": {"scale": leaf(256)}, "post_attention_layernorm": {"scale": leaf(256)},
    }  # fmt: skip
    tree = {
        "model": {"embed_tokens": {"embedding": leaf(128, 256)}, "norm": {"scale": leaf(256)}, "layers": {"0": layer}}
    }
    with pytest.raises(sf.PlanError, match=f"{name}.kernel.* with heads first"):
        sf.engines.flax.trainer(model, tree)
    attention[name] = {
        "kernel": leaf(*{"q_proj": (256, 8, 128), "k_proj": (256, 4, 128), "o_proj": (8, 128, 256)}[name])
    }
    sf.engines.flax.trainer(model, tree)
