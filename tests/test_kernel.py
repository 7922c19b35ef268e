"""The persistent kernel lowers for CUDA on any machine; what it computes is tested on GPUs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import shardfly_jax as sf
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
    kernel = transfer.make_kernel((CONVERSIONS[name],), 132, 4)
    words = [jax.ShapeDtypeStruct((n,), jnp.int32) for n in (96, 37, 50)]
    text = jax.jit(kernel).trace(*words).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text


def test_a_cpu_says_why_it_does_not_run_the_kernel() -> None:
    whole = {"w": Layout((4,), "float32", {0: [(0, 4)]})}
    plan = sf.register(sf.make_plan(whole, whole))
    assert sf.why_not_persistent(plan) == ("some ranks are not on a GPU",)
    forced = sf.register(sf.make_plan(whole, whole), executor="persistent")
    with pytest.raises(sf.RegistrationError, match="not on a GPU"):
        sf.sync({"w": {0: jnp.arange(4.0)}}, forced)


def test_an_unknown_executor_is_refused() -> None:
    whole = {"w": Layout((4,), "float32", {0: [(0, 4)]})}
    with pytest.raises(sf.RegistrationError, match="'fast'"):
        sf.register(sf.make_plan(whole, whole), executor="fast")
