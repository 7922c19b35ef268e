"""Planning: seconds, memory, moves and file size of real models, each in a process of its own."""

from __future__ import annotations

import io
import sys
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

from jax.sharding import AbstractMesh

import shardfly_jax as sf
from benchmarks import children, deepseek

Inputs = Callable[[], tuple[Any, Any, sf.Mapping]]
RUNS = 3
LIMIT_SECS = 1200


def qwen(
    model: str, fsdp: int, trainer_tp: int, replicas: int, tp: int, quantization: str | None = None
) -> tuple[Any, Any, sf.Mapping]:
    """tunix to vLLM."""
    sizes = sf.engines.model(model)
    trainer = sf.engines.tunix.trainer(sizes, AbstractMesh((fsdp, trainer_tp), ("fsdp", "tp")))
    mesh = AbstractMesh((replicas, tp), ("replica", "tp"))
    rollout = sf.engines.vllm.rollout(sizes, mesh, quantization=quantization)
    return trainer.params, rollout.params, sf.engines.route(trainer, rollout)


def deepseek_v3(expert_maps: bool) -> tuple[Any, Any, sf.Mapping]:
    """MaxText to vLLM."""
    sizes = deepseek.Sizes()
    return deepseek.trainer(sizes), deepseek.rollout(sizes), deepseek.mapping(sizes, expert_maps)


def deepseek_v3_fp8() -> tuple[Any, Any, sf.Mapping]:
    """MaxText to vLLM's blocks of 128 x 128, by the engines' own descriptions; heads of queries have 192 rows."""
    model = sf.engines.model("DeepSeek-V3")
    trainer = sf.engines.maxtext.trainer(model, AbstractMesh((32, 8), ("expert", "fsdp")))
    mesh = AbstractMesh((16, 8), ("dp", "tp"))
    rollout = sf.engines.vllm.rollout(model, mesh, expert_parallel=True, quantization="fp8_block")
    return trainer.params, rollout.params, sf.engines.route(trainer, rollout)


def one_large_tensor() -> tuple[Any, Any, sf.Mapping]:
    """A contiguous 150,000 x 8,000 tensor, 4 ranks to 8."""
    source = sf.Layout(
        (150_000, 8_000), "bfloat16", {r: ((r * 37_500, (r + 1) * 37_500), (0, 8_000)) for r in range(4)}
    )
    target = sf.Layout(
        (150_000, 8_000), "bfloat16", {r: ((r * 18_750, (r + 1) * 18_750), (0, 8_000)) for r in range(8)}
    )
    return {"w": source}, {"w": target}, sf.Mapping({"w": sf.src("w")})


CASES: dict[str, tuple[Inputs, float]] = {
    "150,000 x 8,000 contiguous, 4 -> 8 ranks": (one_large_tensor, 0.05),
    "Qwen3-0.6B, 4 -> 2 x TP 2": (lambda: qwen("Qwen3-0.6B", 2, 2, 2, 2), 0.3),
    "Qwen3-30B-A3B, 8 -> TP 8": (lambda: qwen("Qwen3-30B-A3B", 4, 2, 1, 8), 0.3),
    "Qwen3-235B-A22B, 64 -> 4 x TP 8": (lambda: qwen("Qwen3-235B-A22B", 16, 4, 4, 8), 1.0),
    "DeepSeek-V3, 256 -> 128, TP 8 x DP 16, EP 128": (lambda: deepseek_v3(False), 10.0),
    "DeepSeek-V3, the same, expert maps per layer": (lambda: deepseek_v3(True), 30.0),
    "Qwen3-8B in fp8 blocks, 8 -> 2 x TP 4": (lambda: qwen("Qwen3-8B", 4, 2, 2, 4, "fp8_block"), 1.0),
    "DeepSeek-V3 in fp8 blocks, 256 -> 128, TP 8 x DP 16, EP 128": (deepseek_v3_fp8, 10.0),
}
"""Inputs, and the seconds wanted on one core."""


def timed(source: Any, target: Any, mapping: Any) -> tuple[sf.Plan, list[float], dict[str, int]]:
    """Plans `RUNS` times in this process, and once more for the memory: the plan, the seconds, and its sizes."""

    def plan_it() -> sf.Plan:
        return sf.make_plan(source, target, mapping, allow_cast=("*",))

    secs = []
    for _ in range(RUNS):
        start = time.perf_counter()
        plan = plan_it()
        secs.append(time.perf_counter() - start)
    tracemalloc.start()
    plan_it()
    _, memory = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return (
        plan,
        secs,
        {
            "memory_nbytes": memory,
            "moves": len(plan.moves),
            "moves_with_layers": int(plan.moves.count.sum()),
            "saved_nbytes": saved_nbytes(plan),
        },
    )


def measure(name: str) -> dict[str, Any]:
    """Plans one case."""
    inputs, wanted = CASES[name]
    plan, times, sizes = timed(*inputs())
    return {
        "case": name,
        "secs": sorted(times)[RUNS // 2],
        "secs_min": min(times),
        "secs_max": max(times),
        "wanted_secs": wanted,
        "of_wanted": min(wanted / sorted(times)[RUNS // 2], 1.0),
        **sizes,
        "payload_nbytes": plan.nbytes,
        "staging_nbytes": plan.staging_nbytes,
        "digest": plan.digest,
    }


def saved_nbytes(plan: sf.Plan) -> int:
    """Bytes of its file."""
    buffer = io.BytesIO()
    plan.save(buffer)
    return buffer.tell()


def run(report: Callable[[str], None]) -> list[dict[str, Any]]:
    """All cases, one process each, so that memory is each case's own."""
    rows = []
    for name in CASES:
        report(name)
        rows.append(children.measured("planning", name, limit_secs=LIMIT_SECS))
    return rows


if __name__ == "__main__":
    children.emit(measure(sys.argv[1]))
