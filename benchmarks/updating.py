"""Updates on CPU devices: `sync` against one jitted conversion and `jax.device_put`, bytes checked first."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from shardfly_jax import demo


def run(console: Console) -> list[dict[str, Any]]:
    """The demo's model and layouts; one row."""
    model = "Qwen3-0.6B"
    figures = demo.measure(model, 2, console)
    return [
        {
            "model": model,
            "trainer": f"tunix fsdp {demo.FSDP} x tp {demo.TRAINER_TP}",
            "rollout": f"vLLM {demo.REPLICAS} x TP {demo.ROLLOUT_TP}",
            "payload_nbytes": figures.plan.nbytes,
            "checked_nbytes": figures.checked_nbytes,
            "register_secs": figures.register_secs,
            "first_secs": figures.first_secs,
            "sync_secs": list(figures.sync_secs),
            "today_secs": list(figures.today_secs),
            "speedup_of_bests": min(figures.today_secs) / min(figures.sync_secs),
            "peak_nbytes": figures.peak_nbytes,
        }
    ]
