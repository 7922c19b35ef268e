"""Against transformers: its own modules as rollouts, whose parameters are the registered buffers.

A module's logits after `sync` are those of the same class that loaded the checkpoint the ordinary way, bit for bit,
and those of the trainer's own forward as far as arithmetic allows. `-m gpu` runs it on GPUs; without the mark, torch on
CPUs is enough. torch is in no extra: bring your own.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from checkpoints import GPT_OSS, LLAMA, QWEN3, QWEN3_MOE, Arrays, checkpoint, into_maxtext, into_tunix
from engine_checks import named, placed
from forwards import EPS, FORWARDS, THETA, TOP_K
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import shardfly_jax as sf
from shardfly_jax.engines.models import Model
from shardfly_jax.engines.side import Side, nested

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's and transformers' own
WHERE = ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module")
def hugging() -> SimpleNamespace:
    torch = pytest.importorskip("torch", reason="needs torch")
    transformers = pytest.importorskip("transformers", minversion="5.0", reason="needs transformers 5")
    pytest.importorskip("safetensors", reason="needs safetensors")
    return SimpleNamespace(torch=torch, transformers=transformers)


def config(hugging: SimpleNamespace, m: Model) -> Any:
    """transformers' config of a small model."""
    t = hugging.transformers
    sizes: dict[str, Any] = {
        "hidden_size": m.hidden, "num_hidden_layers": m.layers, "num_attention_heads": m.heads,
        "num_key_value_heads": m.kv_heads, "head_dim": m.head_dim, "vocab_size": m.vocab, "rms_norm_eps": EPS,
        "tie_word_embeddings": m.tied, "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
        "max_position_embeddings": 64,
    }  # fmt: skip
    if m.experts is None:
        one = {"qwen3": t.Qwen3Config, "llama3": t.LlamaConfig}[m.family]
        return one(**sizes, intermediate_size=m.width)
    sizes["num_experts_per_tok"] = TOP_K
    if m.family == "gpt_oss":
        return t.GptOssConfig(**sizes, intermediate_size=m.experts.width, num_local_experts=m.experts.count)
    return t.Qwen3MoeConfig(
        **sizes, intermediate_size=m.hidden, moe_intermediate_size=m.experts.width, num_experts=m.experts.count,
        norm_topk_prob=True,
    )  # fmt: skip


def implementations(m: Model) -> dict[str, str]:
    """Plain torch operations, the same in both modules."""
    eager = {"attn_implementation": "eager"}
    return eager if m.experts is None else eager | {"experts_implementation": "eager"}


def rollout(module: Any, m: Model, where: NamedSharding) -> Side:
    """A module's parameters as targets: its own names; transformers 5 fuses experts that checkpoints hold apart."""
    leaves, mapping = {}, {}
    for name, parameter in module.state_dict().items():
        dtype = str(parameter.dtype).removeprefix("torch.")
        leaves[name] = jax.ShapeDtypeStruct(tuple(parameter.shape), dtype, sharding=where)
        if name.endswith("mlp.experts.gate_up_proj") and m.family == "qwen3_moe":
            parts = [sf.src(name.replace("gate_up_proj", f"{part}_proj.weight")) for part in ("gate", "up")]
            mapping[name] = sf.concat(parts, axis=1)
        elif name.endswith("mlp.experts.down_proj") and m.family == "qwen3_moe":
            mapping[name] = sf.src(name + ".weight")
        elif name == "lm_head.weight" and m.tied:
            mapping[name] = sf.alias("model.embed_tokens.weight")
        else:
            mapping[name] = sf.src(name)
    return Side(role="rollout", params=nested(leaves), mapping=sf.Mapping(mapping), model=m)


def random_checkpoint(m: Model, dtype: str, rng: np.random.Generator) -> Arrays:
    return {name: (w / 4).astype(ml_dtypes.bfloat16).astype(dtype) for name, w in checkpoint(m, rng).items()}


def loaded(hugging: SimpleNamespace, m: Model, ck: Arrays, folder: Path, device: str) -> Any:
    """The module that transformers loads from the checkpoint on disk."""
    from safetensors.numpy import save_file

    folder.mkdir()
    save_file({name: np.ascontiguousarray(w) for name, w in ck.items()}, folder / "model.safetensors", {"format": "pt"})
    config(hugging, m).save_pretrained(folder)
    dtype = getattr(hugging.torch, str(next(iter(ck.values())).dtype))
    module, report = hugging.transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, output_loading_info=True, **implementations(m)
    )
    for key in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not report[key], (key, report[key])
    return module.to(device).eval()


def logits(hugging: SimpleNamespace, module: Any, tokens: np.ndarray, device: str) -> np.ndarray:
    with hugging.torch.no_grad():
        out = module(hugging.torch.from_numpy(tokens).to(device), use_cache=False).logits
    return out.float().cpu().numpy()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A model and the trainer that holds it.

    Attributes:
      tolerance: Of logits against the trainer's own forward, as a part of the largest one.
    """

    model: Model
    trainer: str
    dtype: str
    tolerance: float

    def __str__(self) -> str:
        return f"{self.model.name}-{self.trainer}-{self.dtype}"

    def sides(self, devices: list[jax.Device], ck: Arrays) -> tuple[Side, Any]:
        """The trainer's side and its params, sharded over all devices."""
        ways = (2, 2) if len(devices) >= 4 else (len(devices), 1)
        grid = np.array(devices[: ways[0] * ways[1]]).reshape(ways)
        if self.trainer == "tunix":
            side = sf.engines.tunix.trainer(self.model, Mesh(grid, ("fsdp", "tp")), dtype=self.dtype)
            return side, placed(side, into_tunix(self.model, ck))
        side = sf.engines.maxtext.trainer(
            self.model, Mesh(grid, ("fsdp", "tensor")), dtype=self.dtype, scan_layers=False
        )
        return side, placed(side, into_maxtext(self.model, ck, scanned=False))


# float32: sums in another order. bfloat16: rounded to 8 bits after every operation (0.02 was the most between two ways
# to run the same JAX operations); experts only in float32, since a rounded router may choose another one.
CASES = [
    Case(model=QWEN3, trainer="tunix", dtype="float32", tolerance=1e-4),
    Case(model=QWEN3, trainer="tunix", dtype="bfloat16", tolerance=0.05),
    Case(model=LLAMA, trainer="tunix", dtype="float32", tolerance=1e-4),
    Case(model=LLAMA, trainer="tunix", dtype="bfloat16", tolerance=0.05),
    Case(model=QWEN3_MOE, trainer="tunix", dtype="float32", tolerance=1e-4),
    Case(model=GPT_OSS, trainer="maxtext", dtype="float32", tolerance=1e-4),
]


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_module_of_transformers_answers_as_its_trainer_after_every_sync(
    hugging: SimpleNamespace, case: Case, where: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    m, torch = case.model, hugging.torch
    devices = jax.local_devices(backend=where)
    device = "cpu" if where == "cpu" else f"cuda:{devices[-1].local_hardware_id}"
    module = hugging.transformers.AutoModelForCausalLM.from_config(
        config(hugging, m), dtype=getattr(torch, case.dtype), **implementations(m)
    ).eval()
    trainer, _ = case.sides(devices, random_checkpoint(m, case.dtype, rng))
    served = rollout(module, m, NamedSharding(Mesh(np.array(devices[-1:]), "x"), P()))
    plan = sf.register(sf.make_plan(trainer.params, served.params, sf.engines.route(trainer, served)))
    if where == "gpu" and (reasons := sf.why_not_persistent(plan)):
        pytest.skip(f"buffers are not written in place here: {'; '.join(reasons)}")
    tokens = rng.integers(m.vocab, size=(2, 9))
    seen = []
    for step in range(2):
        ck = random_checkpoint(m, case.dtype, rng)
        _, params = case.sides(devices, ck)
        out = named(sf.sync(params, plan))
        if not step:  # the module's parameters become the buffers, and the second update needs no word to torch
            shared = {name: torch.from_dlpack(leaf) for name, leaf in out.items()}
            module.load_state_dict(shared, assign=True)
            module.to(device)  # buffers that are no parameters: rotary frequencies
            for name, leaf in out.items():
                assert module.state_dict()[name].data_ptr() == leaf.unsafe_buffer_pointer(), name
        ordinary = loaded(hugging, m, ck, tmp_path / str(step), device)
        theirs = ordinary.state_dict()
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in module.state_dict().items())
        seen.append(logits(hugging, module, tokens, device))
        assert np.isfinite(seen[-1]).all()
        # one program, the same bytes
        np.testing.assert_array_equal(seen[-1], logits(hugging, ordinary, tokens, device))
        with jax.default_matmul_precision("highest"):
            own = jax.jit(lambda p, tokens: FORWARDS[case.trainer](m, p, tokens))(named(params), jnp.asarray(tokens))
        own = np.asarray(own.astype(jnp.float32))
        assert np.abs(own - seen[-1]).max() <= case.tolerance * np.abs(own).max()
    assert np.abs(seen[0] - seen[1]).max() > 0.1 * np.abs(seen[0]).max()
