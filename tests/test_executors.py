"""Every executor writes the bytes that the language means, and conversions agree bit for bit everywhere."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import pytest
from checks import cut, sources_of
from hypothesis import HealthCheck, given, settings
from jax.sharding import AbstractMesh, Mesh
from random_problems import Case, cases, expected_buffers, source_buffers
from random_quantized import PACKED, Fp4Tensor, quantized_cases

import shardfly_jax as sf
from shardfly_jax import formats
from shardfly_jax.executors import convert, hostcopy, hostquantize
from shardfly_jax.executors.host import HostExecutor
from shardfly_jax.executors.memory import Shard, host_bytes
from shardfly_jax.executors.persistent import PersistentExecutor
from shardfly_jax.executors.xla import XlaExecutor
from shardfly_jax.sharding.families import TargetTree
from shardfly_jax.sharding.format_checks import LARGEST
from shardfly_jax.sharding.formats import (
    Amax,
    Cast,
    Conversion,
    Divide,
    Encode,
    MulAdd,
    Step,
    ToScale,
    conversion,
    np_dtype,
)

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


def run_on_poisoned_buffers(
    case: Case, kind: type[HostExecutor | XlaExecutor | PersistentExecutor], devices: list[jax.Device]
) -> None:
    plan = case.plan()
    want = expected_buffers(case, plan)
    shards = {}
    for key, flat in want.items():
        poison = jax.device_put(np.full(flat.nbytes, 0xA5, np.uint8).view(flat.dtype), devices[key[2] % len(devices)])
        shards[key] = Shard.of(jax.numpy.array(poison, copy=True))
    sources = {key: jax.device_put(x, devices[key[2] % len(devices)]) for key, x in source_buffers(case, plan).items()}
    addresses = {key: shard.array.unsafe_buffer_pointer() for key, shard in shards.items()}
    if kind is PersistentExecutor:
        executor = kind(plan, shards, {key[2]: x.device for key, x in sources.items()})
    else:
        executor = kind(plan, shards)
    executor.start(sources_of(sources))()
    for key, flat in want.items():
        array = shards[key].array
        assert array.unsafe_buffer_pointer() == addresses[key]
        on_host = host_bytes(array.unsafe_buffer_pointer(), flat.nbytes) if array.device.platform == "cpu" else None
        have = np.asarray(jax.device_get(array)) if on_host is None else on_host
        assert have.tobytes() == flat.tobytes()


@settings(max_examples=150, suppress_health_check=SLOW)
@given(cases(max_depth=3))
def test_host_executor_writes_what_the_mapping_means(case: Case) -> None:
    run_on_poisoned_buffers(case, HostExecutor, jax.local_devices())


@pytest.mark.hypothesis
@pytest.mark.parametrize("size", [1, 7])
def test_host_executor_quantizes_in_parts_of_any_size(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostquantize, "PART_SIZE", size)

    @settings(max_examples=40, suppress_health_check=SLOW)
    @given(quantized_cases())
    def run(case: Case) -> None:
        run_on_poisoned_buffers(case, HostExecutor, jax.local_devices())

    run()


@pytest.mark.parametrize("kind", [HostExecutor, XlaExecutor])
@pytest.mark.parametrize("format", [formats.Fp8Block(rows=4, columns=8), formats.Fp8Channel()])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_executors_refuse_values_that_are_not_finite(
    kind: type[HostExecutor | XlaExecutor], format: formats.Format, bad: float, rng: np.random.Generator
) -> None:
    """In blocks inside one shard and in rows that two shards share."""
    names = [f"h.{i}.w" for i in range(3)]
    arrays = {name: rng.standard_normal((8, 32), np.float32) for name in names}
    arrays["h.1.w"][5, 20] = bad
    tree = TargetTree(
        name="r", tensors={name: cut((8, 32), format.codes) for name in names}, ranks=1,
        mapping=sf.Mapping({"h.{i}.w": sf.src("h.{i}.w").quantize(format)}),
    )  # fmt: skip
    case = Case(arrays, {name: cut((8, 32), "float32", 1, 2) for name in names}, 2, [tree])
    plan = case.plan()
    assert bool(plan.staging_nbytes) == (format.scope == "row")
    device = jax.local_devices()[0]
    sources = {key: jax.device_put(x, device) for key, x in source_buffers(case, plan).items()}
    shards = {(0, i, 2): Shard.of(jax.numpy.zeros(256, np_dtype(format.codes))) for i in range(3)}
    with pytest.raises(sf.NotFinite, match=r"target 'h\.1\.w'.*NaN or infinity"):
        kind(plan, shards).start(sources_of(sources))


@settings(max_examples=10, suppress_health_check=SLOW)
@given(quantized_cases(max_depth=1))
def test_xla_executor_quantizes_as_the_mapping_means(case: Case) -> None:
    run_on_poisoned_buffers(case, XlaExecutor, jax.local_devices())


@settings(max_examples=10, suppress_health_check=SLOW)
@given(quantized_cases(max_depth=1, among=PACKED))
def test_xla_executor_packs_codes_as_the_mapping_means(case: Case) -> None:
    run_on_poisoned_buffers(case, XlaExecutor, jax.local_devices())


@settings(max_examples=100, suppress_health_check=SLOW)
@given(quantized_cases(among=PACKED))
def test_host_executor_packs_codes_as_the_mapping_means(case: Case) -> None:
    run_on_poisoned_buffers(case, HostExecutor, jax.local_devices())


@settings(max_examples=12, suppress_health_check=SLOW)
@given(cases(max_depth=3))
def test_xla_executor_writes_what_the_mapping_means(case: Case) -> None:
    run_on_poisoned_buffers(case, XlaExecutor, jax.local_devices())


@settings(max_examples=150, suppress_health_check=SLOW)
@given(quantized_cases())
def test_host_executor_quantizes_as_the_mapping_means(case: Case) -> None:
    run_on_poisoned_buffers(case, HostExecutor, jax.local_devices())


@pytest.mark.gpu
@settings(max_examples=60, suppress_health_check=SLOW)
@given(cases(max_depth=3))
def test_xla_executor_writes_what_the_mapping_means_on_gpus(case: Case) -> None:
    run_on_poisoned_buffers(case, XlaExecutor, jax.local_devices(backend="gpu"))


@pytest.mark.gpu
@settings(max_examples=30, suppress_health_check=SLOW)
@given(quantized_cases())
def test_xla_executor_quantizes_as_the_mapping_means_on_gpus(case: Case) -> None:
    run_on_poisoned_buffers(case, XlaExecutor, jax.local_devices(backend="gpu"))


@pytest.mark.gpu
@settings(max_examples=40, suppress_health_check=SLOW)
@given(cases(max_depth=3))
def test_the_persistent_kernel_writes_what_the_mapping_means(case: Case) -> None:
    run_on_poisoned_buffers(case, PersistentExecutor, jax.local_devices(backend="gpu")[:1])


@pytest.mark.gpu
@settings(max_examples=15, suppress_health_check=SLOW)
@given(quantized_cases())
def test_the_persistent_kernel_quantizes_as_the_mapping_means(case: Case) -> None:
    run_on_poisoned_buffers(case, PersistentExecutor, jax.local_devices(backend="gpu")[:1])


@pytest.mark.gpu
@pytest.mark.parametrize("executor", ["persistent", "portable"])
def test_a_whole_model_reaches_its_rollout_on_a_gpu_in_place(executor: str) -> None:
    model = dataclasses.replace(
        sf.engines.model("Qwen3-0.6B"), layers=2, hidden=256, heads=8, kv_heads=4, head_dim=32, width=512, vocab=1024
    )
    gpu = jax.local_devices(backend="gpu")[0]
    trainer = sf.engines.tunix.trainer(model, Mesh(np.array([gpu]).reshape(1, 1), ("fsdp", "tp")), dtype="float32")
    rollout = sf.engines.vllm.rollout(model, AbstractMesh((2, 2), ("replica", "tp")))
    plan = sf.make_plan(trainer.params, rollout.params, sf.engines.route(trainer, rollout), allow_cast="*")
    # four rollout ranks share the trainer's device
    plan = sf.register(plan, placement=lambda rank: gpu, executor=executor)
    rng = np.random.default_rng()
    addresses = None
    for step in range(5):
        params = jax.tree.map(
            lambda s: jax.device_put(rng.standard_normal(s.shape, np.float32), s.sharding), trainer.params
        )
        out = sf.sync(params, plan)
        assert sf.verify(params, plan) == plan.target_nbytes
        assert dict(plan.version) == {"rollout/0": step + 1, "rollout/1": step + 1}
        now = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(out)]
        assert addresses in (None, now)
        addresses = now


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


PLATFORMS = ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize(
    "chain", CHAINS, ids=[f"{s}-{'-'.join(type(x).__name__ for x in c)}-{t}" for s, c, t in CHAINS]
)
def test_conversions_agree_bit_for_bit_on_a_million_bit_patterns(
    chain: tuple[str, tuple[Step, ...], str], platform: str
) -> None:
    rule = conversion(*chain)
    x = awkward_values(rule.source, 1 << 20, seed=len(rule.describe()))
    with np.errstate(all="ignore"):
        want = rule.apply(x)
    jitted = jax.jit(lambda values: convert.apply(rule, values), compiler_options=convert.EXACT)
    on_device = jax.device_put(x, jax.local_devices(backend=platform)[0])
    have = np.asarray(jitted(on_device)).view(want.dtype)
    fast = hostcopy.convert(rule, x)
    assert_same_values(fast, want)
    assert_same_values(have, want)


FORMATS = [
    formats.vllm_fp8_block(), formats.slime_fp8_block(), formats.nemo_fp8_block(), formats.deepgemm_ue8m0(),
    formats.Fp8Block(formula="divide", floor=0.0), formats.Fp8Block(scale="e8m0", floor=0.0),
    formats.sglang_fp8_tensor(), formats.ocp_mxfp8(), formats.vllm_mxfp8(), formats.vllm_mxfp8_round_up(),
    formats.Int8Channel(), formats.Fp8Channel(), formats.ocp_mxfp4(), formats.triton_mxfp4(),
    formats.compressed_tensors_mxfp4(), Fp4Tensor(), Fp4Tensor(formula="divide"), Fp4Tensor(formula="factor"),
]  # fmt: skip


def coded(dtype: str) -> formats.Format:
    """A format like NeMo's, whose class states other codes."""
    stated = {"codes": dtype, "largest": LARGEST[dtype], "divisor": LARGEST[dtype]}
    return dataclasses.dataclass(frozen=True, kw_only=True)(type("Other", (formats.Fp8Block,), stated))(floor=0.0)


OTHER_CODES = [coded(dtype) for dtype in LARGEST if dtype not in {format.codes for format in FORMATS}]


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("source", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("format", [*FORMATS, *OTHER_CODES], ids=lambda f: f"{type(f).__name__}-{f.codes}-{f.formula}")
def test_quantization_agrees_bit_for_bit_on_a_million_values(
    format: formats.Format, source: str, platform: str, rng: np.random.Generator
) -> None:
    """4096 blocks of 256 values: of one magnitude, over all magnitudes, and awkward bit patterns that are finite."""
    magnitude = np.exp2(rng.integers(-126, 120, (4096, 1)).astype(np.float32))
    x = rng.standard_normal((4096, 256), np.float32) * magnitude
    x[::3] *= np.exp2(-rng.integers(0, 30, (1366, 256)).astype(np.float32))
    with np.errstate(over="ignore"):
        x = x.astype(np_dtype(source))
    x[1::3] = awkward_values(source, 1365 * 256, int(rng.integers(1 << 30))).reshape(1365, 256)
    x[~np.isfinite(x.astype(np.float32))] = 0
    x[:3] = 0
    x[2] = -x[2]
    rule = conversion(source, (Encode(format),), format.stored)
    scale = conversion(source, (Amax(), ToScale(format)), format.scale_dtype)
    x = x.reshape(4096, -1, format.per_byte)  # codes that share a byte are neighbours on an axis of their own
    want, want_scales = rule.apply(x, (1, 2), packed=2), scale.apply(x, (1, 2))
    have, have_scales = np.empty_like(want), np.empty_like(want_scales)
    hostquantize.encode(have, x, rule, (1, 2), None)
    hostquantize.scales(have_scales, x, scale, (1, 2))
    assert have.tobytes() == want.tobytes()
    assert have_scales.tobytes() == want_scales.tobytes()
    on_device = jax.device_put(x, jax.local_devices(backend=platform)[0])
    for chain, bits in ((rule, want), (scale, want_scales)):
        done, worst = jax.jit(
            functools.partial(convert.apply_watched, chain, within=(1, 2), packed=2), compiler_options=convert.EXACT
        )(on_device)
        assert np.asarray(done).tobytes() == bits.tobytes()
        assert int(worst) == int(Amax().apply(x, (0, 1, 2)).item())


@pytest.mark.parametrize("format", FORMATS, ids=[f"{type(f).__name__}-{k}" for k, f in enumerate(FORMATS)])
def test_host_codes_of_ordinary_weights_are_the_formats_own(format: formats.Format, rng: np.random.Generator) -> None:
    """The fast path, which blocks of tiny values do not take."""
    x = rng.standard_normal((4096, 256), np.float32) * np.float32(0.02)
    rule = conversion("float32", (Encode(format),), format.stored)
    x = x.reshape(4096, -1, format.per_byte)
    want = rule.apply(x, (1, 2), packed=2)
    have = np.empty_like(want)
    hostquantize.encode(have, x, rule, (1, 2), None)
    assert have.tobytes() == want.tobytes()


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
