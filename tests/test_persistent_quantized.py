"""The persistent executor quantizes on GPUs: any matrix, shards that share blocks, models, values that it refuses."""

from __future__ import annotations

import dataclasses
import secrets
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh, SingleDeviceSharding

import shardfly_jax as sf
from shardfly_jax import formats
from shardfly_jax.sharding.formats import np_dtype

pytestmark = pytest.mark.gpu

EXECUTOR = "persistent"
FORMATS = [
    formats.vllm_fp8_block(), formats.nemo_fp8_block(), formats.deepgemm_ue8m0(), formats.Fp8Block(scale="e8m0"),
    formats.ocp_mxfp8(), formats.Fp8Channel(), formats.vllm_fp8_channel(), formats.Int8Channel(), formats.Fp8Tensor(),
    formats.Fp8Block(rows=24, columns=40, formula="divide", floor=0.0), formats.triton_mxfp4(),
    formats.compressed_tensors_mxfp4(),
]  # fmt: skip


def gpus() -> list[jax.Device]:
    return jax.local_devices(backend="gpu")


def weights(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Normal values over several magnitudes, zeros, subnormals, and a huge one."""
    x = rng.standard_normal(shape, np.float32) * np.exp2(rng.integers(-20, 10, (shape[0], 1)).astype(np.float32))
    x[:, : shape[1] // 8] = 0
    x[shape[0] // 2, ::3] = 1e-39
    x[-1, -1] = 3e4
    return x.astype(np_dtype(dtype))


def update_of(arrays: dict[str, np.ndarray], format: formats.Format, turned: bool, cuts: int) -> tuple[Any, sf.Plan]:
    """Matrices on one GPU, cut along their first axis, and a plan to codes and scales."""
    place, held, params, target, mapping = SingleDeviceSharding(gpus()[0]), {}, {}, {}, {}
    for name, x in arrays.items():
        edges = [k * x.shape[0] // cuts for k in range(cuts + 1)]
        boxes = {rank: [(edges[rank], edges[rank + 1]), (0, x.shape[1])] for rank in range(cuts)}
        held[name] = sf.Layout(x.shape, x.dtype.name, boxes)
        params[name] = {rank: jax.device_put(x[edges[rank] : edges[rank + 1]], place) for rank in range(cuts)}
        value, shape = (sf.src(name).rearrange("a b -> b a"), x.shape[::-1]) if turned else (sf.src(name), x.shape)
        grid = formats_grid(format, shape)
        codes = jax.ShapeDtypeStruct(format.stored_shape(shape), np_dtype(format.stored), sharding=place)
        target[f"{name}.codes"] = codes
        target[f"{name}.scales"] = jax.ShapeDtypeStruct(grid, np_dtype(format.scale_dtype), sharding=place)
        mapping[f"{name}.codes"] = value.quantize(format)
        mapping[f"{name}.scales"] = sf.scale_of(f"{name}.codes")
    plan = sf.make_plan(held, target, sf.Mapping(mapping))
    return params, sf.register(plan, executor=EXECUTOR)


def formats_grid(format: formats.Format, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(-(-n // (block or n)) for n, block in zip(shape, format.block, strict=True))


@pytest.mark.parametrize("cuts", [1, 3])
@pytest.mark.parametrize("format", FORMATS, ids=[f"{type(f).__name__}-{k}" for k, f in enumerate(FORMATS)])
def test_matrices_are_quantized_bit_for_bit(format: formats.Format, cuts: int) -> None:
    """Of one dtype, since a kernel for all would take long to compile."""
    seed = secrets.randbits(32)
    print("seed", seed)
    rng = np.random.default_rng(seed)
    dtype = str(rng.choice(["bfloat16", "float32", "float16"]))
    for turned in (True, False):
        arrays = {}
        for k in range(6):
            rows, columns = (int(n) for n in rng.integers(8, 1000, 2))
            grain = 1 if format.per_byte == 1 else 2 * cuts  # no shard ends inside a byte
            unit = grain * (128 if k < 4 else 1)
            rows, columns = (-(-n // unit) * unit for n in (rows, columns))
            arrays[f"w{k}"] = weights(rng, (rows, columns), dtype)
        params, plan = update_of(arrays, format, turned, cuts)
        for _ in range(3):
            sf.sync(params, plan)
            assert sf.verify(params, plan) == plan.target_nbytes


@pytest.mark.parametrize("source", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("format", FORMATS, ids=[f"{type(f).__name__}-{k}" for k, f in enumerate(FORMATS)])
def test_a_million_values_of_every_magnitude_have_the_formats_own_codes(format: formats.Format, source: str) -> None:
    """Any bits that are finite; in blocks of one row, so that magnitudes do not mix, where the format has rows."""
    if isinstance(format, formats.Fp8Block):
        format = dataclasses.replace(format, rows=1, columns=64)
    seed = secrets.randbits(32)
    print("seed", seed)
    rng = np.random.default_rng(seed)
    rows = [rng.standard_normal((4096, 256), np.float32) * np.exp2(rng.integers(-126, 120, (4096, 1)).astype("f4"))]
    with np.errstate(over="ignore"):
        x = rows[0].astype(np_dtype(source))
    x[::2] = rng.integers(0, 256, x[::2].nbytes, np.uint8).view(x.dtype).reshape(x[::2].shape)
    x[~np.isfinite(x.astype(np.float32))] = 0
    for turned in (True, False):
        params, plan = update_of({"w": np.ascontiguousarray(x.T) if turned else x}, format, turned, 1)
        sf.sync(params, plan)
        assert sf.verify(params, plan) == plan.target_nbytes


MODEL = dataclasses.replace(
    sf.engines.model("Qwen3-0.6B"), layers=2, hidden=512, heads=8, kv_heads=4, head_dim=64, width=1024, vocab=1024
)


def small_model(mesh: Mesh, devices: list[jax.Device], replicas: int) -> tuple[Any, sf.Plan]:
    trainer = sf.engines.tunix.trainer(MODEL, mesh, dtype="bfloat16")
    rollout = sf.engines.vllm.rollout(MODEL, AbstractMesh((replicas, 2), ("replica", "tp")), quantization="fp8_block")
    plan = sf.make_plan(trainer.params, rollout.params, sf.engines.route(trainer, rollout), allow_cast="*")
    placed = sf.register(plan, placement=lambda rank: devices[rank % len(devices)], executor=EXECUTOR)
    return trainer.params, placed


def fresh_params(shapes: Any) -> Any:
    rng = np.random.default_rng()
    return jax.tree.map(
        lambda s: jax.device_put(rng.standard_normal(s.shape, np.float32).astype(s.dtype), s.sharding), shapes
    )


@pytest.mark.parametrize("replicas", [1, 3])
def test_a_model_reaches_its_replicas_in_fp8_by_sync_and_from_a_jitted_step(replicas: int) -> None:
    shapes, plan = small_model(Mesh(np.array(gpus()[:1]).reshape(1, 1), ("fsdp", "tp")), gpus()[:1], replicas)
    step = jax.jit(lambda params, sender: sf.send(jax.tree.map(lambda x: x * 2, params), sender))
    for _ in range(3):
        params = fresh_params(shapes)
        sf.sync(params, plan)
        assert sf.verify(params, plan) == plan.target_nbytes
        with sf.receiving(plan):
            params = step(params, plan.sender)
        assert sf.verify(params, plan) == plan.target_nbytes


def test_replicas_pass_on_parts_of_rows_of_blocks() -> None:
    """Of 64 kB each: 512 columns of a row of blocks, so rows of bytes with gaps between them."""
    format, shape, gpu, rng = formats.Fp8Block(), (256, 8192), gpus()[0], np.random.default_rng()
    target = {
        name: sf.Layout(size, dtype, {rank: [(0, n) for n in size] for rank in range(4)})
        for name, size, dtype in (("t", shape, format.codes), ("s", formats_grid(format, shape), format.scale_dtype))
    }
    mapping = sf.Mapping({"t": sf.src("w").quantize(format), "s": sf.scale_of("t")})
    plan = sf.make_plan({"w": sf.Layout(shape, "bfloat16", {0: [(0, n) for n in shape]})}, target, mapping)
    forwarded = [move for move in plan.moves if move.hop]
    assert [move.extents for move in forwarded].count((128, 512)) == 3 * 32
    plan = sf.register(plan, placement=lambda rank: gpu, executor=EXECUTOR)
    for _ in range(20):
        params = {"w": {0: jax.device_put(weights(rng, shape, "bfloat16"), gpu)}}
        sf.sync(params, plan)
        assert sf.verify(params, plan) == plan.target_nbytes


@pytest.mark.parametrize("format", [formats.Fp8Block(), formats.Fp8Channel(), formats.Fp8Block(rows=3, columns=5)])
def test_values_that_are_not_finite_are_refused_and_the_next_update_heals(format: formats.Format) -> None:
    rng = np.random.default_rng()
    params, plan = update_of({"w": weights(rng, (256, 384), "float32")}, format, True, 2)
    bad = {"w": {**params["w"], 1: params["w"][1].at[100, 300].set(jnp.nan)}}
    with pytest.raises(sf.NotFinite, match=r"target 'w\.(codes|scales)'.*NaN or infinity"):
        sf.sync(bad, plan)
    with pytest.raises(sf.Poisoned, match="NotFinite"):
        sf.params(plan)
    sf.sync(params, plan)
    assert sf.verify(params, plan) == plan.target_nbytes


@pytest.mark.multigpu
def test_shards_on_several_gpus_share_blocks() -> None:
    devices = gpus()
    mesh = Mesh(np.array(devices[:2]).reshape(2, 1), ("fsdp", "tp"))
    shapes, plan = small_model(mesh, devices, 3)
    for _ in range(10):
        params = fresh_params(shapes)
        sf.sync(params, plan)
        assert sf.verify(params, plan) == plan.target_nbytes
