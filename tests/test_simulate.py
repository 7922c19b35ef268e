"""The simulator: bounds by hand, what a schedule may cost above them, and the measured rows that it must meet."""

from __future__ import annotations

import dataclasses
import json
import re
import statistics
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh

import shardfly_jax as sf
from shardfly_jax.sharding.baselines import gather_broadcast_secs, shard_to_shard_secs
from shardfly_jax.sharding.bounds import needs_of
from shardfly_jax.sharding.rates import MEMORY, NVLINK, measured, measured_stores
from shardfly_jax.sharding.topology import Topology, pools, preset

ROOT = Path(__file__).parents[1]
FAST = Topology(name="test", hosts=1, gpus_per_host=8, nvlink_rate=1e9, nic_rate=0.0, hop_secs=0.0)


def copies(source_ranks: int, target_ranks: int, layers: int = 64, size: int = 1 << 18) -> sf.Plan:
    """Whole tensors on trainer rank 0 (of several) to each of several rollout ranks."""
    cut = [(k * size // source_ranks, (k + 1) * size // source_ranks) for k in range(source_ranks)]
    source = sf.Layout((size,), "float32", {r: (c,) for r, c in enumerate(cut)})
    target = sf.Layout((size,), "float32", dict.fromkeys(range(target_ranks), ((0, size),)))
    names = [f"w.{i}" for i in range(layers)]
    return sf.make_plan(dict.fromkeys(names, source), dict.fromkeys(names, target))


def qwen(
    model: str,
    fsdp: int,
    trainer_tp: int,
    replicas: int,
    tp: int,
    dtype: str = "bfloat16",
    layers: int | None = None,
    expert_parallel: bool = False,
    quantization: str | None = None,
    topology: Topology | None = None,
) -> tuple[sf.Plan, Topology]:
    """tunix to vLLM, planned for a cluster."""
    sizes = sf.engines.model(model)
    if layers is not None:
        sizes = dataclasses.replace(sizes, layers=layers)
    trainer = sf.engines.tunix.trainer(sizes, AbstractMesh((fsdp, trainer_tp), ("fsdp", "tp")), dtype=dtype)
    mesh = AbstractMesh((replicas, tp), ("replica", "tp"))
    rollout = sf.engines.vllm.rollout(sizes, mesh, expert_parallel=expert_parallel, quantization=quantization)
    topology = topology or pools("h200", fsdp * trainer_tp, replicas * tp)
    mapping = sf.engines.route(trainer, rollout)
    return sf.make_plan(trainer.params, rollout.params, mapping, allow_cast="*", topology=topology), topology


def test_one_sender_and_one_receiver_take_bytes_over_rate() -> None:
    plan = copies(1, 1)
    predicted = plan.simulate(FAST)
    assert predicted.bound_secs == pytest.approx(plan.nbytes / 1e9)
    assert predicted.secs == pytest.approx(predicted.bound_secs)


def test_four_replicas_cost_one_broadcast_of_egress_and_little_more_time() -> None:
    one, four = copies(1, 1), copies(1, 4)
    assert four.egress_nbytes == one.egress_nbytes
    assert four.simulate(FAST).secs < 1.1 * one.simulate(FAST).secs


def test_bytes_between_hosts_go_over_the_nic() -> None:
    topology = dataclasses.replace(FAST, hosts=2, gpus_per_host=1, nic_rate=1e8)
    plan = copies(1, 1)
    assert plan.simulate(topology).bound_secs == pytest.approx(plan.nbytes / 1e8)
    assert plan.simulate(topology).busiest.startswith("NIC")


def test_ranks_that_share_a_gpu_copy_within_its_memory() -> None:
    topology = dataclasses.replace(FAST, memory_rate=4e9, gpu_of_rank=(0, 0))
    predicted = copies(1, 1).simulate(topology)
    assert predicted.secs == pytest.approx(copies(1, 1).target_nbytes / 4e9)
    assert predicted.busiest == "memory egress of GPU 0"


@pytest.mark.parametrize(
    ("trainers", "rollouts", "words"),
    [
        (1, 1, "NVLink egress of rank 0 (1 more as busy)"),  # what leaves rank 0 enters rank 1
        (2, 1, "NVLink ingress of rank 2"),
        (4, 1, "NVLink ingress of rank 4"),
        (1, 2, "NVLink egress of rank 0 (3 more as busy)"),  # rank 1 passes on all that it gets
    ],
)
def test_links_that_are_as_busy_as_the_busiest_are_counted(trainers: int, rollouts: int, words: str) -> None:
    topology = dataclasses.replace(FAST, nvlink_both_ways_rate=1e9)
    assert copies(trainers, rollouts, layers=1, size=1 << 12).simulate(topology).busiest == words


def test_a_plan_that_moves_nothing_between_ranks_has_no_busiest_link() -> None:
    w = sf.Layout((4,), "float32", {0: ((0, 4),)})
    plan = sf.make_plan({"w": w}, {"w": w}, sf.Mapping({"w": sf.src("w")[:0].pad([(0, 4)])}))
    assert plan.simulate(FAST).busiest == "none"


def test_a_prediction_is_shown_as_one_line() -> None:
    topology = dataclasses.replace(FAST, name="1x8 test", nvlink_rate=1e6)
    predicted = copies(2, 1, layers=1, size=250_000).simulate(topology)
    line = "1x8 test: 1 s; bound 1 s, ratio 1.000; busiest link: NVLink ingress of rank 2"
    assert (str(predicted), repr(predicted)) == (line, f"<Simulation on {line}>")


def test_nvlink_is_slower_while_it_is_used_both_ways() -> None:
    """Rank 1 passes on to rank 2 all that it receives from rank 0."""
    topology = dataclasses.replace(FAST, nvlink_both_ways_rate=0.5e9)
    size = 1 << 18
    names = [f"w.{i}" for i in range(64)]
    source = sf.Layout((size,), "float32", {0: ((0, size),)})
    target = sf.Layout((size,), "float32", dict.fromkeys(range(2), ((0, size),)))
    plan = sf.make_plan(dict.fromkeys(names, source), dict.fromkeys(names, target))
    # both must receive all; a third of it twice from the trainer, who has no time for more, and passed on otherwise
    assert plan.simulate(topology).bound_secs == pytest.approx(4 / 3 * 64 * size * 4 / 1e9)


def test_short_runs_are_priced_by_the_measured_table() -> None:
    stores = measured_stores()
    found = stores.rate(NVLINK, np.array([8, 32, 90, 128, 1 << 20]))
    assert found[[1, 3, 4]].tolist() == [265e9, 350e9, measured()["peer_long"]["rate"]]
    assert found[0] == pytest.approx(265e9 / 4)
    assert 319e9 < found[2] < 350e9
    assert stores.rate(MEMORY, np.array([32]))[0] == 972e9


@pytest.mark.parametrize(("columns", "rate"), [(16, 265e9), (64, 350e9), (256, 358e9)])
def test_rows_of_a_strided_buffer_are_priced_by_their_length(columns: int, rate: float) -> None:
    source = sf.Layout((4096, columns), "bfloat16", {0: [(0, 4096), (0, columns)]})
    target = sf.Layout(source.shape, "bfloat16", {0: [(0, 4096), (0, columns)]}, strides={0: (4096, 1)})
    plan = sf.make_plan({"w": source}, {"w": target})
    predicted = plan.simulate(preset("h200"))
    assert plan.nbytes / (predicted.secs - predicted.launch_secs) == pytest.approx(rate)


def test_a_topology_with_too_few_places_is_refused() -> None:
    with pytest.raises(sf.PlanError, match="has 8 places, but the plan has 9 ranks"):
        copies(1, 8).simulate(FAST)


# Routes over hosts


@pytest.mark.parametrize(
    ("model", "fsdp", "trainer_tp", "replicas", "tp", "expert_parallel"),
    [
        ("Qwen3-30B-A3B", 2, 2, 2, 2, False),
        ("Qwen3-30B-A3B", 4, 2, 1, 8, False),
        ("Qwen3-30B-A3B", 4, 2, 4, 2, False),
        ("Qwen3-30B-A3B", 4, 2, 2, 4, False),  # two ranks side by side need what the same four trainers hold
        ("Qwen3-30B-A3B", 8, 1, 2, 4, False),
        ("Qwen3-30B-A3B", 8, 2, 4, 4, False),
        ("Qwen3-30B-A3B", 8, 4, 16, 4, False),
        ("Qwen3-8B", 4, 4, 32, 1, False),
        # as many bytes leave each trainer as enter each rollout: neither may wait
        ("Qwen3-8B", 2, 4, 1, 8, False),
        ("Qwen3-8B", 8, 1, 2, 4, False),
        ("Qwen3-8B", 2, 4, 16, 2, False),
        ("Qwen3-30B-A3B", 2, 4, 4, 8, True),
        ("Qwen3-30B-A3B", 2, 4, 16, 8, True),
        ("Qwen3-30B-A3B", 2, 4, 16, 8, False),
        # numbers of replicas that divide neither 128 experts nor anything else
        ("Qwen3-30B-A3B", 8, 1, 3, 1, False),
        ("Qwen3-30B-A3B", 2, 4, 3, 2, False),
        ("Qwen3-30B-A3B", 8, 1, 7, 1, False),
        ("Qwen3-30B-A3B", 8, 1, 3, 8, False),
        ("Qwen3-30B-A3B", 8, 1, 5, 8, False),
        ("Qwen3-235B-A22B", 16, 4, 3, 8, False),
        ("Qwen3-235B-A22B", 16, 4, 3, 8, True),
        # hosts of unequal numbers of replicas
        ("Qwen3-8B", 8, 1, 15, 1, False),
        ("Qwen3-8B", 8, 1, 23, 1, False),
        ("Qwen3-8B", 2, 4, 14, 1, False),
        ("Qwen3-8B", 8, 1, 7, 2, False),
        ("Qwen3-30B-A3B", 8, 1, 13, 1, False),
        ("Qwen3-30B-A3B", 8, 1, 27, 1, False),
        ("Qwen3-30B-A3B", 2, 4, 11, 2, False),
        ("Qwen3-30B-A3B", 8, 1, 19, 2, False),
    ],
)
def test_a_plan_stays_within_a_tenth_of_what_any_plan_needs(
    model: str, fsdp: int, trainer_tp: int, replicas: int, tp: int, expert_parallel: bool
) -> None:
    plan, topology = qwen(model, fsdp, trainer_tp, replicas, tp, expert_parallel=expert_parallel)
    predicted = plan.simulate(topology)
    assert 0.999 <= predicted.schedule_ratio <= 1.1
    if replicas * tp <= 8 or replicas * tp == 16:  # more hosts form trees whose first two get all from the trainers
        first_hop = plan.first_hop_nbytes
        assert first_hop.max() <= 1.1 * first_hop.mean()
    times = replicas if plan.moves.hop.any() else 1  # what fits into one host all comes from the trainers
    assert plan.egress_nbytes * times == pytest.approx(plan.broadcast_nbytes, rel=1e-3)
    assert plan.moves.hop.any() == (topology.hosts > 1)
    assert np.trace(plan.traffic()) == 0


@pytest.mark.parametrize(
    ("model", "fsdp", "trainer_tp", "replicas", "tp", "most"),
    [
        ("Qwen3-30B-A3B", 8, 4, 192, 1, 1.05),
        ("Qwen3-8B", 32, 4, 136, 1, 1.05),
        ("Qwen3-32B", 4, 4, 32, 8, 1.05),
        # as many bytes leave each trainer as enter each host's GPUs: every NIC sends and receives all the time
        ("Qwen3-30B-A3B", 2, 4, 32, 8, 1.05),
        ("Qwen3-8B", 2, 4, 160, 1, 1.05),
        ("Qwen3-8B", 2, 4, 88, 2, 1.05),
        ("Qwen3-32B", 2, 4, 36, 4, 1.05),
    ],
)
def test_trees_of_hosts_keep_all_links_busy(
    model: str, fsdp: int, trainer_tp: int, replicas: int, tp: int, most: float
) -> None:
    plan, topology = qwen(model, fsdp, trainer_tp, replicas, tp)
    assert 0.999 <= plan.simulate(topology).schedule_ratio <= most
    assert plan.egress_nbytes * replicas == pytest.approx(plan.broadcast_nbytes, rel=1e-3)
    host = topology.host_of(np.arange(plan.ranks))
    crossing = plan.traffic() * (host[:, None] != host)
    into, out = (crossing.sum(axis=axis)[plan.source_ranks :] for axis in (0, 1))
    assert max(into.max(), out.max()) <= 1.1 * into.mean()


@pytest.mark.parametrize(
    ("model", "fsdp", "trainer_tp", "replicas", "tp", "expert_parallel", "quantization"),
    [
        # blocks leave few ways to cut
        ("Qwen3-32B", 2, 4, 20, 8, False, "fp8_block"),
        ("Qwen3-32B", 2, 4, 2, 8, False, "fp8_block"),
        ("Qwen3-8B", 2, 4, 24, 1, False, "fp8_block"),
        ("Qwen3-8B", 2, 4, 32, 1, False, "fp8_block"),
        ("Qwen3-32B", 2, 4, 24, 1, False, "fp8_block"),
        ("Qwen3-32B", 2, 4, 48, 1, False, "fp8_block"),
        ("Llama-3.1-70B", 1, 8, 18, 4, False, "fp8_block"),
        ("Qwen3-30B-A3B", 2, 4, 5, 8, True, "fp8_block"),
        # some tensors need slots, others not
        ("Qwen3-8B", 1, 8, 6, 8, False, "fp8_channel"),
        ("Qwen3-30B-A3B", 4, 4, 8, 4, False, "fp8_channel"),
    ],
)
def test_replicas_that_quantize_are_passed_on_as_well(
    model: str, fsdp: int, trainer_tp: int, replicas: int, tp: int, expert_parallel: bool, quantization: str
) -> None:
    plan, topology = qwen(
        model, fsdp, trainer_tp, replicas, tp, expert_parallel=expert_parallel, quantization=quantization
    )
    assert 0.999 <= plan.simulate(topology).schedule_ratio <= 1.1


def test_pools_that_the_grid_does_not_have_take_what_the_documents_say() -> None:
    beside = preset("h200", hosts=2, gpu_of_rank=tuple(range(16)))
    predicted = [
        qwen("Qwen3-8B", 2, 1, 14, 1, topology=where)[0].simulate(where) for where in (beside, pools("h200", 2, 14))
    ]
    assert [round(1e3 * p.secs) for p in predicted] == [84, 165]
    assert round(1e3 * predicted[0].bound_secs) == 41
    plan, topology = qwen("Qwen3-0.6B", 2, 4, 14, 8)
    assert round(plan.simulate(topology).schedule_ratio, 2) == 1.37
    ratios = []
    for hosts, replicas, tp in ((2, 2, 8), (2, 4, 4), (2, 16, 1), (4, 4, 8)):  # trainers and rollouts on all of them
        shared = preset("h200", hosts=hosts, gpu_of_rank=(*range(8 * hosts), *range(8 * hosts)))
        plan, _ = qwen("Qwen3-8B", 8 * hosts, 1, replicas, tp, topology=shared)
        ratios.append(round(plan.simulate(shared).ratio, 2))
    assert ratios == [1.06, 1.18, 1.21, 1.03]


def test_every_nic_of_a_host_brings_its_part() -> None:
    """Four replicas of TP 4 in two hosts: each host needs the model once, an eighth over each of its NICs."""
    plan, topology = qwen("Qwen3-30B-A3B", 8, 2, 4, 4)
    traffic, host = plan.traffic(), topology.host_of(np.arange(plan.ranks))
    crossing = (traffic * (host[:, None] != host)).sum(axis=0)[16:]
    assert crossing.max() < 1.03 * plan.egress_nbytes / 8


def test_the_bound_holds_for_every_way_to_send_each_byte_once() -> None:
    """By hand: 16 trainers and two hosts of rollouts with 2 replicas of TP 4 each."""
    plan, topology = qwen("Qwen3-30B-A3B", 8, 2, 4, 4)
    assert plan.simulate(topology).bound_secs == pytest.approx(plan.egress_nbytes / 8 / 50e9, rel=2e-3)


def test_a_host_whose_gpus_all_need_everything_is_bound_by_all_its_links() -> None:
    """Two trainers in one host, two rollouts in another: each needs all, over its NIC or from the other one."""
    topology = dataclasses.replace(FAST, hosts=2, gpus_per_host=2, nic_rate=0.6e9, nvlink_both_ways_rate=0.5e9)
    plan = copies(2, 2)
    assert plan.simulate(topology).bound_secs == pytest.approx(plan.egress_nbytes / 1.1e9)


# Measured rows


def predictions() -> dict[str, float]:
    """What the model says of each row of `measured.json` that it claims to cover: seconds, or bytes per second."""
    model, two_gpus = qwen("Qwen3-8B", 1, 1, 1, 1)[0], preset("h200")
    layers = qwen("Qwen3-8B", 1, 1, 1, 1, layers=24)[0]
    across = layers.simulate(two_gpus)
    return {
        "qwen3_8b_copy": model.simulate(two_gpus).bound_secs,
        "peer_transposes": layers.nbytes / (across.secs - across.launch_secs),
        "nccl_buckets": gather_broadcast_secs(model, needs_of(model, two_gpus), two_gpus),
    }


def test_every_measured_row_that_the_model_covers_is_met_within_15_percent() -> None:
    rows = {name: row for name, row in measured().items() if row["use"] == "predict"}
    predicted = predictions()
    assert predicted.keys() == rows.keys()
    errors = {name: predicted[name] / row.get("secs", row.get("rate")) - 1 for name, row in rows.items()}
    assert {name: error for name, error in errors.items() if abs(error) > 0.15} == {}


def results(part: str) -> list[dict[str, Any]]:
    """Committed rows of a benchmark."""
    return json.loads((ROOT / "benchmarks" / "results" / f"{part}.json").read_text())["rows"]


def on_one_gpu(case: str, dtype: str) -> sf.Plan:
    """The plan of a row of `on_gpu`."""
    if matrices := re.fullmatch(r"(\d+) matrices of (\d+) x (\d+) (copied|transposed)", case):
        count, rows, columns = map(int, matrices.groups()[:3])
        moved = sf.src("w.{i}") if matrices[4] == "copied" else sf.src("w.{i}").rearrange("a b -> b a")
        shape = (rows, columns) if matrices[4] == "copied" else (columns, rows)

        def tree(shape: tuple[int, int], dtype: str) -> dict[str, sf.Layout]:
            layout = sf.Layout(shape, dtype, {0: tuple((0, n) for n in shape)})
            return dict.fromkeys((f"w.{k}" for k in range(count)), layout)

        target = tree(shape, "bfloat16")
        return sf.make_plan(tree((rows, columns), dtype), target, sf.Mapping({"w.{i}": moved}), allow_cast="*")
    model, layers = re.fullmatch(r"(\S+), (\d+) layers", case).groups()  # type: ignore[union-attr]
    return qwen(model, 1, 1, 1, 1, dtype=dtype, layers=int(layers))[0]


@pytest.mark.parametrize("row", results("on_gpu"), ids=lambda row: f"{row['case']}, {row['trainer_dtype']}")
def test_updates_within_one_gpu_take_what_is_predicted(row: dict[str, Any]) -> None:
    predicted = on_one_gpu(row["case"], row["trainer_dtype"]).simulate(preset("h200", gpu_of_rank=(0, 0))).secs
    assert predicted == pytest.approx(statistics.median(row["launched_secs"]), rel=0.15)


@pytest.mark.parametrize("row", results("on_gpus"), ids=lambda row: row["case"])
def test_updates_between_gpus_take_what_is_predicted(row: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks import on_gpus

    case = next(case for case in on_gpus.CASES if case.name == row["case"])
    plan = on_gpus.prepare(case, jax.devices())[1]
    topology = preset("h200", gpus_per_host=max(case.gpus, 2), gpu_of_rank=case.places)
    assert plan.simulate(topology).secs == pytest.approx(statistics.median(row["kernel_secs"]), rel=0.15)


def test_every_measured_row_has_a_use_and_the_others_say_why_not() -> None:
    for row in measured().values():
        assert row["use"] in ("price", "predict", "leave")
        assert ("why" in row) == (row["use"] == "leave")
        assert ("secs" in row) != ("rate" in row)


# Others' ways


def test_without_forwarding_trainers_send_every_replica_its_own() -> None:
    plan, topology = qwen("Qwen3-8B", 2, 1, 4, 8)
    secs = shard_to_shard_secs(plan, needs_of(plan, topology), topology) - measured_stores().launch_secs_between
    assert secs == pytest.approx(4 * plan.egress_nbytes / (2 * 50e9), rel=0.01)
    assert plan.simulate(topology).secs < secs / 3


def test_a_broadcast_of_everything_is_as_slow_as_its_root() -> None:
    plan, topology = qwen("Qwen3-8B", 2, 1, 4, 8)
    assert gather_broadcast_secs(plan, needs_of(plan, topology), topology) > plan.egress_nbytes / 50e9
