"""Other systems' ways on the same tensors, in two processes with PyTorch (`peer_worker`): bytes checked, then timed.

What is real: NCCL through `torch.distributed`, CUDA IPC through PyTorch, PyTorch's own strided copies as conversion.
What is a model: each way's order of copies, buffers and waits was read in the system's source and written anew, without
its control plane (Ray, zmq metadata, engine hooks), which only makes it faster. The trainer holds tunix tensors, the
rollout vLLM's, so the sender permutes axes where a PyTorch trainer would not have to; our update and XLA's do that too.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jax.sharding import AbstractMesh

import shardfly_jax as sf
from benchmarks import children
from benchmarks.buckets import Job, Part
from shardfly_jax.engines.models import Model
from shardfly_jax.layout import leaf_names
from shardfly_jax.sharding import language as lang
from shardfly_jax.sharding.families import Family
from shardfly_jax.sharding.language import axis_sizes, split_pattern
from shardfly_jax.sharding.patterns import FAMILY, name_pattern
from shardfly_jax.sharding.plan import Plan

BUCKET_NBYTES = 512 << 20
SILENCE_SECS = 110


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """Somebody's way.

    Attributes:
      name: Also of the worker's function.
      what: For people.
      source: Whose code was read for it; empty for what is nobody's in particular.
      gpus: Of sender and receiver.
      quantizes: Whether the receiver makes fp8 codes of what arrives.
    """

    name: str
    what: str
    source: str = ""
    gpus: tuple[int, int] = (0, 1)
    quantizes: bool = False

    @property
    def needs_two(self) -> bool:
        """Whether its library refuses two processes on one GPU."""
        return self.name.startswith("nccl")


VERL = "volcengine/verl@29f3865 verl/checkpoint_engine"
WAYS = [
    Way(name="nccl_wire", what="NCCL broadcast of 512 MB, nothing converted"),
    Way(
        name="nccl_buckets",
        what="NCCL broadcast of 512 MB buckets, two of them, packed and unpacked meanwhile",
        source=f"{VERL}/nccl_checkpoint_engine.py",
    ),
    Way(
        name="nccl_tensors",
        what="NCCL broadcast of each tensor, converted before and copied into place after, 512 MB at a time",
        source="sgl-project/sglang model_executor/model_runner.py, update_weights_from_distributed",
    ),
    Way(
        name="nccl_p2p",
        what="Awex, model: all tensors cloned, one batch of NCCL sends straight into place",
        source="inclusionAI/Awex@024fb09 awex/transfer/nccl_stream_batch.py",
    ),
    Way(
        name="ipc_pulled",
        what="NIXL as veRL uses it, model: two buckets, pulled over CUDA IPC into two of the receiver's",
        source=f"{VERL}/nixl_checkpoint_engine.py; UCX moves device memory of one host by CUDA IPC",
    ),
    Way(
        name="ipc_bucket",
        what="CUDA IPC bucket between two GPUs: packed, unpacked over the link, acknowledged",
        source="verl workers/rollout/vllm_rollout/bucketed_weight_transfer.py, SGLang update_weights_from_tensor",
    ),
    Way(
        name="ipc_bucket_colocated",
        what="CUDA IPC bucket, both processes on one GPU (the colocated way)",
        source="verl workers/rollout/vllm_rollout/bucketed_weight_transfer.py, SGLang update_weights_from_tensor",
        gpus=(0, 0),
    ),
    Way(
        name="host_buckets",
        what="checkpoint-engine, model: all to pinned host memory, then buckets to the rollout's GPU, CUDA IPC there",
        source="MoonshotAI/checkpoint-engine@1f14a07 checkpoint_engine/{ps,worker}.py",
    ),
    Way(
        name="nccl_buckets_fp8",
        what="as NCCL buckets, and fp8 blocks made of what has arrived",
        source=f"{VERL}/nccl_checkpoint_engine.py; the formula of vLLM's per_block_cast_to_fp8",
        quantizes=True,
    ),
]
JOBS = [
    # the trainer's dtype, its ways, and which of our cases they stand beside
    ("bfloat16", tuple(way.name for way in WAYS)),
    ("float32", ("nccl_buckets", "nccl_buckets_fp8")),
]
COUNTERPARTS = {
    ("bfloat16", False): "GPU 0 to 1",
    ("float32", False): "GPU 0 to 1, from float32",
    ("bfloat16", True): "GPU 0 to 1, fp8 blocks",
    ("float32", True): "GPU 0 to 1, fp8 blocks from float32",
}


def run(
    report: Callable[[str], None], save: Any, ours: list[dict[str, Any]], found: dict[str, Any], deadline: float
) -> None:
    """Every way of every job; what has been measured is saved after each.

    Args:
      report, save: As for `gpu_job.run`.
      ours: Rows of our cases, to compare with.
      found: Of the links.
      deadline: In `time.monotonic()`.
    """
    rows: list[dict[str, Any]] = []
    failed: list[dict[str, Any]] = []
    model = sf.engines.model("Qwen3-8B")
    for dtype, names in JOBS:
        ways = [way for way in WAYS if way.name in names]
        job = job_of(model, dtype)
        for row in _job(job, ways, found["gpus"], deadline):
            way = next(way for way in ways if way.name == row["way"])
            row |= {"what": way.what, "source": way.source, "trainer_dtype": dtype, "gpu": found["gpu"]}
            if "error" in row:
                failed.append(row)
                report(f"{way.name}, {dtype}: {row['error']}")
            else:
                row |= _beside_ours(ours, COUNTERPARTS[dtype, way.quantizes], row)
                rows.append(row)
                report(f"{way.name}, {dtype}: {statistics.median(row['secs']) * 1e3:.2f} ms")
            save("peers", rows, failed)


def _beside_ours(ours: list[dict[str, Any]], case: str, row: dict[str, Any]) -> dict[str, Any]:
    """Our median of the same run over the same tensors; nothing where the case did not run or GPUs differ."""
    same = [mine for mine in ours if mine["case"] == case]
    if not same or row["gpus"] != [0, 1]:
        return {}
    mine = statistics.median(same[0]["sync_secs"])
    return {"our_secs": mine, "over_ours": statistics.median(row["secs"]) / mine}


def _job(job: Job, ways: Sequence[Way], gpus: int, deadline: float) -> Iterator[dict[str, Any]]:
    """Rows of all ways, one pair of processes for those on the same GPUs."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "job.json")
        job.write(path)
        if gpus == 1:
            refused = "NCCL refuses two processes on one GPU, and there is no other"
            yield from ({"way": way.name, "gpus": [0, 0], "error": refused} for way in ways if way.needs_two)
        for places in dict.fromkeys(way.gpus for way in ways):
            names = [way.name for way in ways if way.gpus == places and (gpus > 1 or not way.needs_two)]
            shown = [min(gpu, gpus - 1) for gpu in places]

            def programs(left: Sequence[str], shown: list[int] = shown) -> Iterator[dict[str, Any]]:
                rendezvous = tempfile.mkdtemp(dir=folder)
                words = ["-m", "benchmarks.peer_worker", str(path), rendezvous, *map(str, shown), *left]
                quiet = {"NCCL_DEBUG": os.environ.get("NCCL_DEBUG", "WARN")}
                return children.rows(words, silence_secs=SILENCE_SECS, deadline=deadline, env=quiet)

            if time.monotonic() < deadline:
                for row in children.each(names, programs, key="way"):
                    yield row | {"gpus": shown, "payload_nbytes": job.nbytes}
            else:
                yield from ({"way": name, "gpus": shown, "error": "no time was left"} for name in names)


# The tensors


def job_of(model: Model, dtype: str, bucket_nbytes: int = BUCKET_NBYTES) -> Job:
    """Everything that the workers need to know of a model's update from tunix to vLLM with one rank each.

    Aliases are left out.
    """
    trainer = sf.engines.tunix.trainer(model, AbstractMesh((1, 1), ("fsdp", "tp")), dtype=dtype)
    mesh = AbstractMesh((1, 1), ("replica", "tp"))
    plain, coded = (sf.engines.vllm.rollout(model, mesh, quantization=q) for q in (None, "fp8_block"))
    plan = sf.make_plan(trainer.params, plain.params, sf.engines.route(trainer, plain), allow_cast="*")
    families = [plan.families[k] for k in plan.target_families if plan.families[k].alias_of is None]
    names, leaves, _ = leaf_names(coded.params)
    codes = {name for name, leaf in zip(names, leaves, strict=True) if leaf.dtype.name == "float8_e4m3fn"}
    return Job(
        dtype=dtype,
        sources={name: plan.families[k].layout.shape for k in plan.source_families for name in plan.families[k].names},
        targets={name: family.layout.shape for family in families for name in family.names},
        quantized=tuple(name for family in families for name in family.names if name in codes),
        parts=tuple(part for family in families for k in range(family.count) for part in _parts(plan, family, k)),
        bucket_nbytes=bucket_nbytes,
    )


def _parts(plan: Plan, family: Family, tensor: int) -> Iterator[Part]:
    """The parts of one target.

    Raises:
      TypeError: Its expression does more than fuse sources whose axes it puts in order.
    """
    target, offset = family.name(tensor), 0
    shapes = {name: plan.families[k].layout.shape for k in plan.source_families for name in plan.families[k].names}
    expr = family.expr
    for part in expr.parts if isinstance(expr, lang.Fuse) and expr.axis == 0 else (expr,):
        leaf = part.value if isinstance(part, lang.Rearrange) else part
        if not isinstance(leaf, lang.Src):
            raise TypeError(f"{target}: {part} is more than an order of axes")
        name = name_pattern(leaf.name).format({FAMILY: family.first + tensor})
        if isinstance(part, lang.Rearrange):
            sizes = axis_sizes(part, shapes[name])
            left, right = ([axis for group in side for axis in group] for side in split_pattern(part.pattern))
        else:
            left = right = [f"a{k}" for k in range(len(shapes[name]))]
            sizes = dict(zip(left, shapes[name], strict=True))
        found = Part(
            target=target,
            offset=offset,
            source=name,
            shape=tuple(sizes[axis] for axis in left),
            pattern=f"{' '.join(left)} -> {' '.join(right)}",
        )
        offset += found.rows * found.row_size
        yield found
