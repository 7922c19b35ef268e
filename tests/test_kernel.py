"""The persistent kernel lowers for CUDA on any machine; what it computes is tested on GPUs."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import shardfly_jax as sf
from shardfly_jax.executors import persistent
from shardfly_jax.pallas_kernels import transfer
from shardfly_jax.sharding.formats import Divide, Fill, MulAdd, conversion
from shardfly_jax.sharding.layouts import Layout

CONVERSIONS = {
    "bits of one byte": conversion("uint8", (), "uint8"),
    "bits of two bytes": conversion("bfloat16", (), "bfloat16"),
    "bits of four bytes": conversion("int32", (), "int32"),
    "bits of eight bytes": conversion("int64", (), "int64"),
    "float32 to bfloat16": conversion("float32", (), "bfloat16"),
    "bfloat16 to float32": conversion("bfloat16", (), "float32"),
    "float16 to bfloat16": conversion("float16", (), "bfloat16"),
    "bfloat16 to float16": conversion("bfloat16", (), "float16"),
    "multiply and add": conversion("float32", (MulAdd(0.5, -1.0),), "bfloat16"),
    "divide": conversion("bfloat16", (Divide(3.0),), "bfloat16"),
    "fill": conversion("float16", (Fill("-0.0", "float16"),), "float16"),
}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_every_variant_of_the_kernel_lowers_for_cuda(name: str) -> None:
    kernel = transfer.make_kernel((CONVERSIONS[name],), 132, 4, transfer.WORKERS)
    words = [jax.ShapeDtypeStruct((n,), jnp.int32) for n in (96, 37, 50)]
    text = jax.jit(kernel).trace(*words).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text


def test_a_cpu_says_why_it_does_not_run_the_kernel() -> None:
    whole = {"w": Layout((4,), "float32", {0: [(0, 4)]})}
    plan = sf.register(sf.make_plan(whole, whole))
    assert sf.why_not_persistent(plan) == ("some ranks are not on a GPU",)
    chosen = sf.register(sf.make_plan(whole, whole), executor="portable")
    assert sf.why_not_persistent(chosen) == (
        "it is registered with executor='portable'",
        "some ranks are not on a GPU",
    )
    forced = sf.register(sf.make_plan(whole, whole), executor="persistent")
    with pytest.raises(sf.RegistrationError, match="not on a GPU"):
        sf.sync({"w": {0: jnp.arange(4.0)}}, forced)


@dataclasses.dataclass(frozen=True)
class Gpu:
    id: int
    compute_capability: str = "9.0"
    device_kind: str = "NVIDIA H200"
    platform: str = "gpu"

    @property
    def local_hardware_id(self) -> int:
        return self.id

    def __str__(self) -> str:
        return f"cuda:{self.id}"


def test_every_reason_against_the_kernel_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = {"w": Layout((4,), "float32", {0: [(0, 4)]})}
    plan = sf.make_plan(whole, whole)
    monkeypatch.setattr(persistent, "can_reach", lambda one, other: True)
    assert persistent.why_not(plan, {Gpu(0), Gpu(1)}, {(0, 0, 1): 256}) == ()
    monkeypatch.setattr(persistent, "can_reach", lambda one, other: (one, other) != (1, 0))
    monkeypatch.setenv(persistent.OTHER_CLIENT, "1")
    older = Gpu(1, "8.0", "NVIDIA A100")
    integers = sf.make_plan(
        {"w": Layout((4,), "int32", {0: [(0, 4)]})}, {"w": Layout((4,), "float32", {0: [(0, 4)]})}, allow_cast="*"
    )
    reasons = persistent.why_not(integers, {Gpu(0), older}, {(0, 0, 1): 258})
    wanted = [
        "NVIDIA A100 has compute capability 8.0",
        persistent.OTHER_CLIENT,
        "cuda:1 cannot reach",
        "that of 'w' of rank 1",
        "int32",
    ]
    for reason, part in zip(reasons, wanted, strict=True):
        assert part in reason


def test_an_unknown_executor_is_refused() -> None:
    whole = {"w": Layout((4,), "float32", {0: [(0, 4)]})}
    with pytest.raises(sf.RegistrationError, match="'fast'"):
        sf.register(sf.make_plan(whole, whole), executor="fast")
