"""`python -m shardfly_jax`: what it prints, what it refuses, and that it needs no devices to plan."""

import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

import shardfly_jax as sf
from shardfly_jax import commands
from shardfly_jax.__main__ import choose_devices, main
from shardfly_jax.engines.quantized import FORMATS
from shardfly_jax.wording import bytes_text, secs_text

ROUTE = ["--model", "Qwen3-0.6B", "--trainer", "tunix:fsdp=2,tp=2", "--rollout", "vllm:tp=2,replicas=2"]


def plan(trainer: str = ROUTE[3], rollout: str = ROUTE[5], **more: str) -> sf.Plan:
    return commands.Route(**{"model": "Qwen3-0.6B", "trainer": trainer, "rollout": rollout, **more}).plan("h100")


def run_python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if key not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    return subprocess.run(
        [sys.executable, *arguments], env=kept | environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_explain_prints_the_report_and_needs_no_device() -> None:
    done = run_python("-m", "shardfly_jax", "explain", *ROUTE, JAX_PLATFORMS="no_such_platform")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"Qwen3-0.6B: {ROUTE[3]} -> {ROUTE[5]}\n\n{plan().explain()}"


def test_the_example_of_the_help_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["explain", "--help"])
    assert exit_.value.code == 0
    example = re.search(r"example: python -m\s+shardfly_jax (explain .*)", capsys.readouterr().out, re.DOTALL)
    assert example is not None
    assert main(example.group(1).split()) == 0
    out = capsys.readouterr().out
    assert "64 trainer -> 32 rollout ranks, 4 replicas of rollout" in out
    assert "12x8 H100" in out


def test_explain_saves_and_draws_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved, drawn = tmp_path / "a.plan", tmp_path / "a.png"
    assert main(["explain", *ROUTE, "--save", str(saved), "--plot", str(drawn)]) == 0
    assert sf.load_plan(saved) == plan()
    assert drawn.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.endswith(
        f"\nplan saved: {saved}, {bytes_text(saved.stat().st_size)}\nplan drawn: {drawn}\n"
    )


def test_simulate_shows_every_topology_with_its_prediction(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *ROUTE]) == 0
    lines = capsys.readouterr().out.splitlines()[-3:]
    assert [line[:8].strip() for line in lines] == ["1x8 H20", "1x8 H100", "1x8 H200"]
    for gpu, line in zip(("h20", "h100", "h200"), lines, strict=True):
        result = plan().simulate(sf.preset(gpu))
        figures = f"{secs_text(result.secs)}  {secs_text(result.bound_secs)}  {result.ratio:.3f}"
        assert re.sub(r" +", " ", figures) in re.sub(r" +", " ", line)
        assert line.endswith(result.busiest)


def test_one_topology_with_more_hosts_can_be_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *ROUTE, "--topology", "h20", "--hosts", "3"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split()[:6] == ["3x8", "H20", "393", "GB/s", "50", "GB/s"]


def test_a_float32_trainer_is_cast(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", *ROUTE, "--trainer-dtype", "float32"]) == 0
    assert "float32 -> bfloat16" in capsys.readouterr().out


def test_expert_parallel_gives_whole_experts_to_ranks() -> None:
    for ep, box in ((1, (32, 2 * 768)), (0, (128, 2 * 768 // 4))):
        made = plan("tunix:fsdp=4", f"vllm:tp=4,ep={ep}", model="Qwen3-30B-A3B")
        (experts,) = [f for f in made.families if f.pattern.endswith("experts.w13_weight")]
        assert experts.layout.local_shape(4) == (*box, 2048)


@pytest.mark.parametrize(
    ("model", "trainer", "rollout", "ranks"),
    [
        ("DeepSeek-V3", "maxtext:fsdp=4,expert=4", "vllm:tp=8,dp=2,ep=1", "16 trainer -> 16 rollout ranks"),
        ("gpt-oss-20b", "maxtext:tensor=2,scan=0", "sglang:tp=4,replicas=2", "2 trainer -> 8 rollout ranks, 2 rep"),
        ("Qwen3-30B-A3B", "tunix:fsdp=4", "sglang:tp=4,ep=2", "4 trainer -> 4 rollout ranks"),
        ("Llama-3.1-8B", "maxtext:fsdp=4,tensor=2", "hf:replicas=2", "8 trainer -> 2 rollout ranks, 2 replicas"),
    ],
)  # fmt: skip
def test_every_engine_can_be_explained(
    model: str, trainer: str, rollout: str, ranks: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", "--model", model, "--trainer", trainer, "--rollout", rollout]) == 0
    assert ranks in capsys.readouterr().out


QUANTIZED = [
    (engine, quantization)
    for engine in ("vllm", "sglang")
    for quantization in getattr(sf.engines, engine).QUANTIZATIONS
]


@pytest.mark.parametrize(("engine", "quantization"), QUANTIZED)
def test_every_quantization_of_an_engine_is_explained(
    engine: str, quantization: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", *ROUTE[:-1], f"{engine}:tp=2,quantization={quantization}"]) == 0
    text = capsys.readouterr().out
    assert f"{type(FORMATS[quantization]).__name__} per " in text
    assert "weight_scale" in text


def test_the_hubs_mxfp4_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    route = ["--model", "gpt-oss-20b", "--trainer", "maxtext:tensor=2"]
    assert main(["explain", *route, "--rollout", "hf:quantization=mxfp4"]) == 0
    assert "MxFp4 per block" in capsys.readouterr().out
    assert main(["explain", *route, "--rollout", "hf:quantization=none"]) == 0
    assert "MxFp4" not in capsys.readouterr().out


def test_a_quantized_rollout_is_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    rollout = "vllm:tp=2,quantization=int8_channel"
    made = plan(rollout=rollout)
    assert made.nbytes < 0.7 * plan(rollout="vllm:tp=2").nbytes
    assert main(["simulate", *ROUTE[:-1], rollout, "--topology", "h100"]) == 0
    assert f" {bytes_text(made.nbytes)} " in capsys.readouterr().out


@pytest.mark.parametrize("command", ["explain", "simulate"])
def test_help_lists_every_quantization_of_each_engine(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for engine in ("vllm", "sglang", "hf"):
        choices = " | ".join(["none", *getattr(sf.engines, engine).QUANTIZATIONS])
        assert f"quantization of {engine}: {choices}" in text


def test_models_lists_every_model_and_who_has_a_mapping(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    text, in_python = capsys.readouterr().out.split("\n\n*")
    assert {"sf.engines.hf.trainer.", "sf.engines.flax.trainer"} <= set(in_python.split())
    rows = [line.split() for line in text.splitlines()[4:]]
    assert [row[0] for row in rows] == list(sf.engines.names())
    assert ["Qwen3-8B", "qwen3", "tunix,", "maxtext,", "hf*", "vllm,", "sglang,", "hf", "36", "8.19"] in rows
    assert ["Llama-3.1-405B", "llama3", "tunix,", "maxtext,", "hf*", "vllm,", "sglang,", "hf", "126", "405.85"] in rows
    assert ["GLM-4.5", "glm4_moe", "hf*", "vllm,", "sglang,", "hf", "92", "358.34"] in rows


def change(index: int, value: str) -> list[str]:
    return ["explain", *ROUTE[:index], value, *ROUTE[index + 1 :]]


@pytest.mark.parametrize(
    ("arguments", "allowed"),
    [
        ([], "explain,simulate"),
        (["explode"], "'simulate'"),
        (["explain", *ROUTE[:4]], "--rollout"),
        (change(1, "Qwen9"), "Qwen3-235B-A22B"),
        (change(1, "DeepSeek-V3"), "qwen3_moe"),
        (change(3, "verl:fsdp=2"), "tunix, maxtext"),
        (change(3, "tunix:pp=2"), "fsdp, tp"),
        (change(3, "tunix:tp=x"), "from 1 to 4096"),
        (change(3, "tunix:tp"), "from 1 to 4096"),
        (change(3, "tunix:tp=0"), "from 1 to 4096"),
        (change(3, "tunix:tp=00000000000000000002"), "from 1 to 4096"),
        (change(3, "tunix:tp=2,tp=2"), "twice"),
        (change(3, "tunix:fsdp=4096,tp=2"), "at most 4096"),
        (change(5, "vllm:ep=2"), "0 or 1"),
        (change(5, "vllm:ep=1"), "no experts"),
        (change(5, "vllm:dp=2"), "no experts"),
        (change(5, "sglang:tp=2,ep=2"), "no experts"),
        (change(5, "vllm:quantization=fp3"), "none, fp8_block, fp8_block_ue8m0, fp8_tensor, fp8_channel, int8_channel"),
        (
            change(5, "sglang:quantization=int8_channel"),
            "'int8_channel', but it must be one of none, fp8_block, fp8_block_ue8m0.",
        ),
        (change(5, "sglang:quantization"), "none, fp8_block"),
        (change(5, "hf:quantization=fp8_block"), "none, mxfp4"),
        (change(5, "hf:quantization=mxfp4"), "'mxfp4' of 'gpt_oss'"),
        (change(3, "tunix:quantization=fp8_block"), "fsdp, tp"),
        (change(5, "vllm:fp8=1"), "ep, quantization"),
        (["explain", *ROUTE, "--topology", "b200"], "h100"),
        (["explain", *ROUTE, "--hosts", "0"], "from 1 to 4096"),
        (["explain", *ROUTE[:5], "vllm:tp=2,replicas=8", "--hosts", "2"], "Give 3 or more"),
        (["explain", *ROUTE, "--trainer-dtype", "int8"], "float32"),
        (["explain", *ROUTE, "--save", "/no/such/folder/plan"], "/no/such/folder"),
        (["explain", *ROUTE, "--plot", "plan.what"], "png"),
        (["demo", "--updates", "none"], "from 1 to 4096"),
        (["rl", "--mode", "fast"], "async"),
        (["rl", "--plot", "rewards.txt"], "does not end in .png"),
        (["rl", "--largest", "10"], "from 1 to 9"),
        (["rl", "--seed", "-1"], "from 0 to"),
        (["rl", "--learning-rate", "0"], "positive"),
        (["rl", "--learning-rate", "fast"], "positive"),
        (["rl", "--prompts", "3", "--completions", "5"], "even number"),
        (["demo", "--format", "fp3"], "fp8_block"),
    ],
)
def test_a_wrong_argument_is_one_line_that_says_what_is_allowed(
    arguments: list[str], allowed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1
    assert allowed in err


def test_faults_that_repeat_in_every_layer_are_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(change(3, "tunix:fsdp=3,tp=2")) == 2
    lines = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"error: \d+ faults:", lines[0])
    assert len(lines) <= 10
    assert any("'layers.0.attn.q_proj.w' of source has 1024" in li and li.endswith("(27 more like it)") for li in lines)


def test_a_further_engine_is_an_entry(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    tunix = commands.TRAINERS["tunix"]
    monkeypatch.setitem(commands.TRAINERS, "mine", tunix)
    assert main(change(3, "mine:fsdp=2,tp=2")) == 0
    assert plan().digest[:12] in capsys.readouterr().out


def test_the_demo_gets_model_updates_and_format(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    fake = types.ModuleType("shardfly_jax.demo")
    fake.run = lambda model, updates, format: calls.append((model, updates, format)) or 5  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "shardfly_jax.demo", fake)
    monkeypatch.setattr(sf, "demo", fake, raising=False)
    assert main(["demo", "--model", "Qwen3-8B", "--updates", "1"]) == 5
    assert main(["demo"]) == 5
    assert main(["demo", "--format", "fp8_block"]) == 5
    assert calls == [("Qwen3-8B", 1, None), ("Qwen3-0.6B", 3, None), ("Qwen3-0.6B", 3, "fp8_block")]


def test_the_demo_runs_on_eight_cpu_devices_by_default() -> None:
    code = "from shardfly_jax.__main__ import choose_devices; choose_devices(); import jax; print(jax.devices())"
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("CpuDevice") == 8


def test_devices_that_the_user_chose_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = {"JAX_PLATFORMS": "cuda", "XLA_FLAGS": "--xla_force_host_platform_device_count=3"}
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    choose_devices()
    assert {name: os.environ[name] for name in chosen} == chosen
