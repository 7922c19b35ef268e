"""Who gets bytes from the trainers, and who from other rollouts: no GPU sends more than another one receives."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from random_problems import Case, cases, check, fill
from random_quantized import quantized_cases

from shardfly_jax.sharding import parting
from shardfly_jax.sharding.baselines import gather_broadcast_secs
from shardfly_jax.sharding.bounds import needs_of
from shardfly_jax.sharding.families import TargetTree
from shardfly_jax.sharding.language import src
from shardfly_jax.sharding.layouts import Layout
from shardfly_jax.sharding.mapping import Mapping
from shardfly_jax.sharding.simulate import simulate
from shardfly_jax.sharding.topology import Topology, preset

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


def whole_replicas(rng: np.random.Generator, trainers: int, replicas: int, dtype: str = "float32") -> Case:
    """Trainers hold equal parts of all tensors, replicas of one rank each all of them."""
    arrays = {f"h.{k}.{name}": fill(rng, (16, 8), dtype) for k in range(3) for name in "ab"}
    rows = 16 // trainers
    cut = {r: [(r * rows, (r + 1) * rows), (0, 8)] for r in range(trainers)}
    whole = {r: [(0, 16), (0, 8)] for r in range(replicas)}
    mapping = Mapping({name: src(name) for name in arrays})
    tree = TargetTree(
        name="rollout",
        tensors={name: Layout((16, 8), dtype, whole) for name in arrays},
        mapping=mapping,
        ranks=replicas,
    )
    return Case(arrays, {name: Layout((16, 8), dtype, cut) for name in arrays}, trainers, [tree])


@pytest.mark.parametrize(
    ("trainers", "replicas", "passes_on"),
    [
        # GPUs of the trainers, and of the replicas
        ((0, 1), (0, 1), False),
        ((0,), (0, 1), False),
        ((0, 1, 2, 3), (0, 1, 2, 3), False),
        ((0, 1, 2, 3), (2, 3), False),
        ((0, 1, 2, 3), (4, 5, 6, 7), False),
        ((0,), (1, 1), True),  # one GPU, which needs all of it once
        ((0, 1), (2, 3, 4), True),  # trainers would send more than others receive
        ((0,), (0, 1, 2), True),
        ((0, 1), (0, 1, 1), True),  # what the last one needs is on its GPU once the one before has it
    ],
)
def test_trainers_in_the_rollouts_host_send_to_all_where_that_costs_no_link_more(
    trainers: tuple[int, ...], replicas: tuple[int, ...], passes_on: bool, rng: np.random.Generator
) -> None:
    case = whole_replicas(rng, len(trainers), len(replicas))
    plan = case.plan(preset("h200", gpu_of_rank=(*trainers, *replicas)))
    check(case, plan)
    assert (int(plan.moves.hop.max()) > 0) == passes_on
    if not passes_on:
        gpus = np.array((*trainers, *replicas))
        between = np.zeros((8, 8), np.int64)
        np.add.at(between, np.ix_(gpus, gpus), plan.traffic())
        np.fill_diagonal(between, 0)
        nbytes = sum(x.nbytes for x in case.arrays.values())
        held = nbytes // len(trainers)
        assert between.sum(axis=0).tolist() == [
            (nbytes - held * trainers.count(gpu)) if gpu in replicas else 0 for gpu in range(8)
        ]


def between(case: Case, places: tuple[int, ...], topology: Topology, gpus: int) -> np.ndarray:
    """Bytes that cross from GPU to GPU."""
    out = np.zeros((gpus, gpus), np.int64)
    np.add.at(out, np.ix_(places, places), case.plan(topology).traffic())
    np.fill_diagonal(out, 0)
    return out


def unequal(rng: np.random.Generator) -> Case:
    """The first of two trainers holds seven of eight tensors."""
    arrays = {f"h.{k}.w": fill(rng, (16, 8), "float32") for k in range(8)}
    everything = [(0, 16), (0, 8)]
    sources = {name: Layout((16, 8), "float32", {int(k == 7): everything}) for k, name in enumerate(arrays)}
    targets = {name: Layout((16, 8), "float32", dict.fromkeys(range(2), everything)) for name in arrays}
    mapping = Mapping({name: src(name) for name in arrays})
    return Case(arrays, sources, 2, [TargetTree(name="rollout", tensors=targets, mapping=mapping, ranks=2)])


def test_a_trainer_that_holds_more_than_others_does_not_send_to_all(rng: np.random.Generator) -> None:
    for case, places in ((unequal(rng), (0, 1, 2, 3)), (whole_replicas(rng, 4, 2), (0, 0, 0, 1, 2, 3))):
        plan = case.plan(preset("h200", gpu_of_rank=places))
        check(case, plan)
        assert plan.moves.hop.max() > 0


def test_replicated_trainers_serve_the_rollouts_on_their_own_gpus(rng: np.random.Generator) -> None:
    case = whole_replicas(rng, 1, 4)
    layout = Layout((16, 8), "float32", {rank: [(0, 16), (0, 8)] for rank in range(4)})
    case = Case(case.arrays, dict.fromkeys(case.arrays, layout), 4, case.targets)
    places = (0, 1, 2, 3, 2, 0, 3, 1)
    topology = preset("h200", gpu_of_rank=places)
    check(case, case.plan(topology))
    assert not between(case, places, topology, 8).any()


@pytest.mark.parametrize("hosts", [2, 4])
def test_what_a_shared_host_lacks_enters_it_once_over_all_its_nics(hosts: int, rng: np.random.Generator) -> None:
    gpus = 2 * hosts
    case = whole_replicas(rng, gpus, gpus)
    places = (*range(gpus), *range(gpus))
    topology = preset("h200", hosts=hosts, gpus_per_host=2, gpu_of_rank=places)
    plan = case.plan(topology)
    check(case, plan)
    crossing = between(case, places, topology, gpus)
    host = np.arange(gpus) // 2
    crossing[host[:, None] == host[None]] = 0
    nbytes = sum(x.nbytes for x in case.arrays.values())
    assert crossing.sum() == nbytes * (hosts - 1)
    assert set(crossing.sum(axis=1)) == {nbytes * (hosts - 1) // gpus}
    needs = needs_of(plan, topology)
    assert needs.host_nbytes.tolist() == [nbytes * (hosts - 1) // hosts] * hosts


def test_trainers_of_one_host_do_not_feed_many_hosts(rng: np.random.Generator) -> None:
    """Two trainers beside a rollout would send everything twice over their own NICs."""
    case = whole_replicas(rng, 2, 5)
    places = (0, 1, 1, 2, 3, 4, 5)
    plan = case.plan(preset("h200", hosts=3, gpus_per_host=2, gpu_of_rank=places))
    check(case, plan)
    assert plan.egress_nbytes < 2 * plan.distinct_nbytes


def test_what_others_ways_cost_and_the_bound_do_not_depend_on_the_routes(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = whole_replicas(rng, 4, 4)
    topology = preset("h200", gpu_of_rank=tuple(range(8)))
    plans = [case.plan(topology)]
    monkeypatch.setattr(parting, "_send_no_more", lambda *_, **__: False)
    plans.append(case.plan(topology))
    assert [int(plan.moves.hop.max()) > 0 for plan in plans] == [False, True]
    theirs = {gather_broadcast_secs(plan, needs_of(plan, topology), topology) for plan in plans}
    bounds = [simulate(plan, topology).bound_secs for plan in plans]
    assert len(theirs) == 1
    assert bounds[0] == pytest.approx(bounds[1])


@pytest.mark.hypothesis
@pytest.mark.parametrize("random", [cases, quantized_cases], ids=["plain", "quantized"])
@pytest.mark.parametrize("hosts", [(1, 1), (2, 3)], ids=["one host", "hosts"])
def test_ranks_of_shared_gpus_get_every_byte_once_for_every_sharding(
    random: Callable[[], st.SearchStrategy[Case]], hosts: tuple[int, int]
) -> None:
    parted = 0

    @settings(max_examples=150, suppress_health_check=SLOW)
    @given(random(), st.integers(*hosts), st.integers(1, 4 if hosts == (1, 1) else 2))
    def run(case: Case, hosts: int, per_host: int) -> None:
        nonlocal parted
        usual = case.plan()
        places = tuple(rank % (hosts * per_host) for rank in range(usual.ranks))
        plan = case.plan(preset("h200", hosts=hosts, gpus_per_host=per_host, gpu_of_rank=places))
        if hosts == 1:
            parted += int(usual.moves.hop.max(initial=0)) > 0 and int(plan.moves.hop.max(initial=0)) == 0
        else:
            parted += plan.egress_nbytes > usual.egress_nbytes
        check(case, plan)

    run()
    assert parted > 5
