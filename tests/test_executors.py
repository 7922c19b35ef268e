"""Every executor writes the bytes that the language means, and conversions agree bit for bit everywhere."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from random_problems import Case, cases, expected_buffers, source_buffers

from shardfly_jax.executors import convert, hostcopy
from shardfly_jax.executors.host import HostExecutor
from shardfly_jax.executors.memory import Shard, host_bytes
from shardfly_jax.executors.xla import XlaExecutor
from shardfly_jax.sharding.formats import Cast, Conversion, Divide, MulAdd, Step, conversion, np_dtype

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


def run_on_poisoned_buffers(case: Case, kind: type[HostExecutor] | type[XlaExecutor]) -> None:
    plan = case.plan()
    devices = jax.local_devices()
    shards = {}
    for key, want in expected_buffers(case, plan).items():
        poison = np.full(want.nbytes, 0xA5, np.uint8).view(want.dtype)
        shards[key] = Shard.of(jax.device_put(poison.copy(), devices[key[2] % len(devices)]))
    shards = {key: Shard.of(jax.numpy.array(shard.array, copy=True)) for key, shard in shards.items()}
    sources = {key: jax.device_put(x, devices[key[2] % len(devices)]) for key, x in source_buffers(case, plan).items()}
    addresses = {key: shard.array.unsafe_buffer_pointer() for key, shard in shards.items()}
    kind(plan, shards).run(lambda *key: sources[key])
    for key, want in expected_buffers(case, plan).items():
        assert shards[key].array.unsafe_buffer_pointer() == addresses[key]
        have = host_bytes(shards[key].array.unsafe_buffer_pointer(), want.nbytes)
        assert have.tobytes() == want.tobytes()


@settings(max_examples=150, deadline=None, suppress_health_check=SLOW)
@given(cases(max_depth=3))
def test_host_executor_writes_what_the_mapping_means(case: Case) -> None:
    run_on_poisoned_buffers(case, HostExecutor)


@settings(max_examples=12, deadline=None, suppress_health_check=SLOW)
@given(cases(max_depth=3))
def test_xla_executor_writes_what_the_mapping_means(case: Case) -> None:
    run_on_poisoned_buffers(case, XlaExecutor)


def awkward_values(dtype: str, size: int, seed: int) -> np.ndarray:
    """Random bit patterns: every exponent, subnormals, infinities and NaNs among them."""
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, size * np_dtype(dtype).itemsize, np.uint8)
    return raw.view(np_dtype(dtype))


CHAINS: list[tuple[str, tuple[Step, ...], str]] = [
    ("float32", (), "bfloat16"),
    ("float32", (), "float16"),
    ("bfloat16", (), "float32"),
    ("float16", (), "float32"),
    ("float16", (), "bfloat16"),
    ("bfloat16", (), "float16"),
    ("float32", (MulAdd(0.37, -1.0),), "float32"),
    ("float32", (MulAdd(11.313708, 0.0), Cast("bfloat16")), "bfloat16"),
    ("bfloat16", (MulAdd(0.37, 0.25),), "bfloat16"),
    ("float16", (MulAdd(1.7, -0.3),), "bfloat16"),
    ("float32", (Divide(3.0),), "float32"),
    ("bfloat16", (Divide(448.0),), "float32"),
    ("int32", (), "float32"),
]


@pytest.mark.parametrize(
    "chain", CHAINS, ids=[f"{s}-{'-'.join(type(x).__name__ for x in c)}-{t}" for s, c, t in CHAINS]
)
def test_conversions_agree_bit_for_bit_on_a_million_bit_patterns(chain: tuple[str, tuple[Step, ...], str]) -> None:
    rule = conversion(*chain)
    x = awkward_values(rule.source, 1 << 20, seed=len(rule.describe()))
    with np.errstate(all="ignore"):
        want = rule.apply(x)
    jitted = jax.jit(lambda values: convert.apply(rule, values))
    have = np.asarray(jitted(x)).view(want.dtype)
    fast = hostcopy.convert(rule, x)
    assert_same_values(fast, want)
    assert_same_values(have, want)


def assert_same_values(have: np.ndarray, want: np.ndarray) -> None:
    """Equal bits; a NaN is only required to be one, as its payload is the hardware's."""
    bits = np.dtype(f"u{want.itemsize}")
    both_nan = np.isnan(have.astype(np.float32)) & np.isnan(want.astype(np.float32))
    wrong = np.nonzero((have.view(bits) != want.view(bits)) & ~both_nan)[0]
    assert not len(wrong), f"{len(wrong)} differ, first {have[wrong[0]]!r} for {want[wrong[0]]!r}"


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32"])
@pytest.mark.parametrize("shape", [(1, 7), (3, 1), (129, 131), (1300, 260), (2, 3, 150, 140)])
def test_transposing_copies_equal_numpy_for_ragged_tiles(shape: tuple[int, ...], dtype: str) -> None:
    x = awkward_values(dtype, int(np.prod(shape)), seed=7).reshape(shape)
    order = [*range(len(shape) - 2), len(shape) - 1, len(shape) - 2]
    out = np.zeros([shape[k] for k in order], x.dtype)
    hostcopy.copy(out, x.transpose(order), Conversion(dtype, (), dtype))
    assert out.tobytes() == np.ascontiguousarray(x.transpose(order)).tobytes()
