"""The demo on a small model: what it prints, with every byte checked on the way."""

from __future__ import annotations

import pytest

import shardfly_jax as sf
from shardfly_jax import demo
from shardfly_jax.engines.models import Model

SMALL = Model(
    name="small", family="qwen3", layers=2, hidden=256, heads=4, kv_heads=2, head_dim=128, width=512, vocab=128,
    tied=True, qk_norm=True,
)  # fmt: skip


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sf.engines, "model", lambda name: SMALL)
    monkeypatch.setattr(demo, "WARM_RUNS", 1)


def printed(capsys: pytest.CaptureFixture[str], **options: object) -> tuple[str, dict[str, str]]:
    """The first line, and the rows of the table."""
    assert demo.run("Qwen3-0.6B", **options) == 0
    text = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines() if "│" in line]
    return text.splitlines()[0], dict(rows)


def test_the_demo_checks_every_byte_of_every_update(capsys: pytest.CaptureFixture[str]) -> None:
    first, rows = printed(capsys, updates=2)
    assert first.startswith("Qwen3-0.6B: tunix trainer fsdp 2 x tp 2 -> 2 vLLM replicas of TP 2, on 8 cpu devices")
    assert "of what bfloat16 takes" not in rows
    assert "bytes checked against the mapping" in rows
    assert len(rows["later updates"].split(",")) == 1


@pytest.mark.parametrize("quantization", sf.engines.vllm.QUANTIZATIONS)
def test_a_quantized_demo_says_what_quantizing_saves(quantization: str, capsys: pytest.CaptureFixture[str]) -> None:
    first, rows = printed(capsys, updates=1, quantization=quantization)
    assert first.endswith(f"on 8 cpu devices, in {quantization}")
    assert 50 <= float(rows["of what bfloat16 takes"].removesuffix("%")) < 70
    assert "codes, scales and the rest checked" in rows


def test_what_is_done_is_printed_while_the_demo_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also into a file or a pipe, where no bar can move."""

    def race(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "make_update", race)
    seen = []
    monkeypatch.setattr(sf, "verify", lambda *_, **__: seen.append(capsys.readouterr().out) or 0)
    with pytest.raises(KeyboardInterrupt):
        demo.run("Qwen3-0.6B", 2)
    assert [text.count("100%") for text in seen] == [2, 3]
    assert "update 1: sync" in seen[0]
    assert "update 1: verify" in seen[1]
