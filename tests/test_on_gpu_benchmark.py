"""The quantizing cases of the benchmark of one GPU, on CPU devices: plans are as stated, and the kernel takes them."""

from __future__ import annotations

import jax
import numpy as np
from benchmark_modules import module
from checks import assert_same_bits

import shardfly_jax as sf
from shardfly_jax.sharding.optable import why_unsupported
from shardfly_jax.today import make_update

on_gpu = module("on_gpu")


def test_every_format_of_the_benchmark_is_what_a_jitted_conversion_makes() -> None:
    cpu = jax.devices("cpu")[0]
    for name, format, _ in on_gpu.FORMATS:
        params, plan = on_gpu.quantized_matrices(cpu, format, count=2, n_in=256, n_out=384)
        assert why_unsupported(plan) is None, name
        plan = sf.register(plan)
        out = sf.sync(params, plan)
        for key, array in make_update(plan)(params).items():
            assert_same_bits(np.asarray(out[key.partition(":")[2]]), np.asarray(array))
        assert sf.verify(params, plan) == plan.target_nbytes
