"""tunix to vLLM: against the engine's loading rules written out by hand, and for every known model."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh, PartitionSpec as P
from random_problems import Case, check

import shardfly_jax as sf
from shardfly_jax.engines.fused import padded_vocab
from shardfly_jax.engines.models import Experts, Model
from shardfly_jax.layout import leaf_names
from shardfly_jax.planning import make_plan

DENSE = Model(
    name="small", family="qwen3", layers=2, hidden=16, heads=8, kv_heads=2, head_dim=8, width=32, vocab=100, tied=True,
    qk_norm=True,
)  # fmt: skip
SPARSE = dataclasses.replace(DENSE, family="qwen3_moe", tied=False, experts=Experts(count=8, width=16))


def random_tree(tree: object, seed: int) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda s: jax.device_put(rng.standard_normal(s.shape, np.float32), s.sharding), tree)


def synced(model: Model, tp: int, expert_parallel: bool = False, seed: int = 0) -> tuple[dict, dict, sf.Plan]:
    """Source arrays and rollout arrays by name, after one update."""
    devices = np.array(jax.devices())
    trainer = sf.engines.tunix.trainer(model, Mesh(devices[:4].reshape(2, 2), ("fsdp", "tp")), dtype="float32")
    mesh = Mesh(devices[8 - tp :].reshape(1, tp), ("replica", "tp"))
    rollout = sf.engines.vllm.rollout(model, mesh, dtype="float32", expert_parallel=expert_parallel)
    plan = sf.register(sf.make_plan(trainer.params, rollout.params, sf.engines.route(trainer, rollout)))
    params = random_tree(trainer.params, seed)
    out = sf.sync(params, plan)
    sf.verify(params, plan)
    flat = [dict(zip(*leaf_names(tree)[:2], strict=True)) for tree in (params, out)]
    return {k: np.asarray(v) for k, v in flat[0].items()}, flat[1], plan


def on_rank(array: jax.Array, rank: int) -> np.ndarray:
    return np.asarray(array.addressable_shards[rank].data)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_fused_parameters_hold_what_vllms_loader_would_put_there(tp: int) -> None:
    src, out, _ = synced(DENSE, tp, seed=tp)
    m = DENSE
    for i, rank in itertools.product(range(m.layers), range(tp)):
        p, layer = f"layers.{i}.", f"model.layers.{i}."
        hf = {n: src[p + f"attn.{n}_proj.w"].reshape(m.hidden, -1).T for n in "qkv"}
        rows = m.heads // tp * m.head_dim
        per_rank = max(1, m.kv_heads // tp)
        first = rank * m.kv_heads // tp * m.head_dim  # several ranks share a head when tp > kv heads
        kv = slice(first, first + per_rank * m.head_dim)
        want = np.concatenate([hf["q"][rank * rows : (rank + 1) * rows], hf["k"][kv], hf["v"][kv]])
        assert on_rank(out[layer + "self_attn.qkv_proj.weight"], rank).tobytes() == want.tobytes()
        half = m.width // tp
        gate, up = (src[p + f"mlp.{n}_proj.kernel"].T[rank * half : (rank + 1) * half] for n in ("gate", "up"))
        assert on_rank(out[layer + "mlp.gate_up_proj.weight"], rank).tobytes() == np.concatenate([gate, up]).tobytes()
        down = np.ascontiguousarray(src[p + "mlp.down_proj.kernel"].T[:, rank * half : (rank + 1) * half])
        assert on_rank(out[layer + "mlp.down_proj.weight"], rank).tobytes() == down.tobytes()
        norm = src[p + "attn.q_norm.w"]
        assert on_rank(out[layer + "self_attn.q_norm.weight"], rank).tobytes() == norm.tobytes()


@pytest.mark.parametrize(("tp", "expert_parallel"), [(2, False), (4, False), (4, True), (8, True)])
def test_experts_hold_gate_then_up_per_expert(tp: int, expert_parallel: bool) -> None:
    src, out, _ = synced(SPARSE, tp, expert_parallel, seed=tp)
    assert SPARSE.experts is not None
    e, f = SPARSE.experts.count, SPARSE.experts.width
    experts = [range(r * e // tp, (r + 1) * e // tp) if expert_parallel else range(e) for r in range(tp)]
    cuts = [slice(0, f) if expert_parallel else slice(r * f // tp, (r + 1) * f // tp) for r in range(tp)]
    for i, rank in itertools.product(range(SPARSE.layers), range(tp)):
        gate, up, down = (src[f"layers.{i}.mlp.{n}_proj"] for n in ("gate", "up", "down"))
        w13 = np.stack([np.concatenate([gate[x].T[cuts[rank]], up[x].T[cuts[rank]]]) for x in experts[rank]])
        w2 = np.stack([down[x].T[:, cuts[rank]] for x in experts[rank]])
        assert on_rank(out[f"model.layers.{i}.mlp.experts.w13_weight"], rank).tobytes() == w13.tobytes()
        assert on_rank(out[f"model.layers.{i}.mlp.experts.w2_weight"], rank).tobytes() == w2.tobytes()


def test_vocabulary_padding_is_filled_with_zeros_and_lm_head_is_tied() -> None:
    src, out, _ = synced(DENSE, 2)
    embed = np.asarray(out["model.embed_tokens.weight"])
    assert embed.shape[0] == padded_vocab(DENSE) == 128
    assert (embed[:100] == src["embedder.input_embedding"]).all()
    assert not embed[100:].any()
    head, table = out["lm_head.weight"], out["model.embed_tokens.weight"]
    assert on_rank(head, 0).tobytes() == on_rank(table, 0).tobytes()
    address = [x.addressable_shards[1].data.unsafe_buffer_pointer() for x in (head, table)]
    assert address[0] == address[1]


def test_totals_agree_with_the_published_parameter_counts() -> None:
    published = {"Qwen3-0.6B": 596_049_920, "Qwen3-8B": 8_190_735_360, "Qwen3-32B": 32_762_123_264}
    for name, count in published.items():
        trainer = sf.engines.tunix.trainer(sf.engines.model(name), AbstractMesh((1, 1), ("fsdp", "tp")))
        assert sum(leaf.size for leaf in jax.tree.leaves(trainer.params)) == count


def test_a_model_without_a_mapping_is_refused_by_name() -> None:
    with pytest.raises(sf.PlanError, match=r"tunix has no mapping for 'DeepSeek-V3'"):
        sf.engines.tunix.trainer(sf.engines.model("DeepSeek-V3"), AbstractMesh((1, 1), ("fsdp", "tp")))


def test_all_sizes_that_tp_does_not_divide_are_listed() -> None:
    with pytest.raises(sf.PlanError) as caught:
        sf.engines.vllm.rollout(sf.engines.model("Qwen3-8B"), AbstractMesh((1, 3), ("replica", "tp")))
    assert len(caught.value.faults) == 3


@pytest.mark.parametrize("expert_maps", [False, True])
def test_deepseeks_two_stacks_reach_their_layers(expert_maps: bool) -> None:
    """The planning benchmark's layouts, small, against the language's meaning."""
    root = str(Path(__file__).parents[1])
    sys.path.insert(0, root)
    try:
        from benchmarks import deepseek
    finally:
        sys.path.remove(root)
    s = deepseek.Sizes(
        layers=4, dense=1, hidden=32, heads=4, q_rank=16, kv_rank=8, nope=4, rope=2, value=4, width=16, expert_width=8,
        experts=8, vocab=32,
    )  # fmt: skip
    trainer = deepseek.trainer(s, expert=2, fsdp=2)
    plan = make_plan(trainer, deepseek.rollout(s, dp=2, tp=2), deepseek.mapping(s, expert_maps))
    rng = np.random.default_rng(5)
    names, leaves, _ = leaf_names(trainer)
    arrays = {n: rng.standard_normal(x.shape, np.float32).astype(x.dtype) for n, x in zip(names, leaves, strict=True)}
    check(Case(arrays, {}, 4, []), plan)


@pytest.mark.parametrize("engine", ["tunix", "vllm", "sglang"])
def test_a_mesh_without_the_engines_axis_is_refused(engine: str) -> None:
    side = sf.engines.tunix.trainer if engine == "tunix" else getattr(sf.engines, engine).rollout
    with pytest.raises(sf.PlanError, match=rf"mesh of {engine} has the axes \['fsdp', 'model'\], but an axis 'tp'"):
        side(DENSE, AbstractMesh((1, 1), ("fsdp", "model")))


def test_a_route_between_models_of_other_sizes_is_refused() -> None:
    model = dataclasses.replace(sf.engines.model("Qwen3-0.6B"), layers=3)
    mesh = AbstractMesh((1, 1), ("fsdp", "tp"))
    trainer = sf.engines.tunix.trainer(dataclasses.replace(model, layers=4), mesh)
    rollout = sf.engines.vllm.rollout(model, AbstractMesh((1,), ("tp",)))
    with pytest.raises(sf.PlanError, match=r"they differ in layers \(4 and 3\)"):
        sf.engines.route(trainer, rollout)


def test_a_route_wants_one_trainer_and_one_rollout_in_this_order() -> None:
    trainer = sf.engines.tunix.trainer(DENSE, AbstractMesh((1, 1), ("fsdp", "tp")))
    rollout = sf.engines.vllm.rollout(DENSE, AbstractMesh((1,), ("tp",)))
    for sides, words in (
        ((rollout, trainer), "takes the trainer first. Swap them"),
        ((rollout, rollout), "given 'rollout' and 'rollout', but it takes one trainer and one rollout"),
        ((trainer, trainer), "given 'trainer' and 'trainer'"),
        ((DENSE, rollout), "given 'Model' and 'rollout'"),
        ((trainer, rollout.params), "given 'trainer' and 'dict'"),
    ):
        with pytest.raises(sf.PlanError, match=words):
            sf.engines.route(*sides)


def test_every_tensor_that_the_trainer_lacks_is_listed_with_what_to_do() -> None:
    untied = dataclasses.replace(DENSE, tied=False)
    trainer = sf.engines.tunix.trainer(DENSE, AbstractMesh((1, 1), ("fsdp", "tp")))
    layers = "model.layers.{i}.mlp.gate_proj.weight"
    less = sf.Mapping({name: expr for name, expr in trainer.mapping.items() if name != layers})
    rollout = sf.engines.vllm.rollout(untied, AbstractMesh((1,), ("tp",)))
    for model, ours in ((untied, "trainer of small"), (None, "trainer")):
        with pytest.raises(sf.PlanError) as caught:
            sf.engines.route(dataclasses.replace(trainer, mapping=less, model=model), rollout)
        head, gate = caught.value.faults
        assert f"'lm_head.weight' is read by the rollout of small, but the {ours} does not define it" in head
        assert "small is not tied here" in head
        assert "tied=True" in head
        assert f"{layers!r} is read by the rollout of small" in gate
        assert "tied" not in gate


MESH = AbstractMesh((1, 1), ("fsdp", "tp"))
FSDP = AbstractMesh((1,), ("fsdp",))
FRONT_DOORS = {
    "tunix": sf.engines.tunix.trainer,
    "maxtext": sf.engines.maxtext.trainer,
    "vllm": sf.engines.vllm.rollout,
    "sglang": sf.engines.sglang.rollout,
    "hf.trainer": sf.engines.hf.trainer,
    "hf.rollout": sf.engines.hf.rollout,
}
OF_TREES = {
    "flax.trainer": lambda model: sf.engines.flax.trainer(model, {}),
    "flax.rollout": lambda model: sf.engines.flax.rollout(model, {}),
    "jax_toolbox": lambda model: sf.engines.jax_toolbox.trainer({}, {}, model=model),
}


@pytest.mark.parametrize("engine", [*FRONT_DOORS, *OF_TREES])
def test_a_models_name_instead_of_its_sizes_is_refused_with_what_to_write(engine: str) -> None:
    def side(model: object) -> object:
        return OF_TREES[engine](model) if engine in OF_TREES else FRONT_DOORS[engine](model, MESH)

    with pytest.raises(sf.PlanError, match=r"Give sf.engines.model\('Qwen3-0.6B'\)"):
        side("Qwen3-0.6B")
    with pytest.raises(sf.PlanError, match="of type dict, but a Model is needed"):
        side({"layers": 3})


@pytest.mark.parametrize("engine", FRONT_DOORS)
def test_what_is_no_dtype_is_refused(engine: str) -> None:
    for dtype in ("bflot16", None):
        with pytest.raises(sf.PlanError, match=f"dtype: {dtype!r} is not a dtype"):
            FRONT_DOORS[engine](DENSE, FSDP if engine == "maxtext" else MESH, dtype=dtype)


@pytest.mark.parametrize("engine", FRONT_DOORS)
def test_what_is_no_mesh_is_refused(engine: str) -> None:
    with pytest.raises(sf.PlanError, match="mesh: 8 is of type int"):
        FRONT_DOORS[engine](DENSE, 8)


def test_specs_that_do_not_fit_are_refused_with_both() -> None:
    for spec, words in (
        (P("x"), r"spec: P.*'x'.* does not fit shape \(64, 16\).*\['fsdp', 'tp'\]"),
        (P(None, None, "tp"), "spec"),
    ):
        with pytest.raises(sf.PlanError, match=words):
            sf.engines.hf.rollout(DENSE, MESH, specs={"*.q_proj.weight": spec})


@pytest.mark.parametrize("rules", [[("model", "m")], {"model": 3}, "model"])
def test_rules_that_are_no_names_are_refused(rules: object) -> None:
    with pytest.raises(sf.PlanError, match="a dict from names to names is needed"):
        sf.engines.flax.trainer(DENSE, {}, rules=rules)
