"""Routes: every member is reached once, every host is entered once, and over the turns all NICs carry alike."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from random_problems import Case, cases, check, fill
from random_quantized import quantized_cases

from shardfly_jax.sharding import groups, pace, routes, routing
from shardfly_jax.sharding.families import TargetTree
from shardfly_jax.sharding.language import src
from shardfly_jax.sharding.layouts import Layout
from shardfly_jax.sharding.mapping import Mapping
from shardfly_jax.sharding.problem import Problem
from shardfly_jax.sharding.routes import LONGEST_CHAIN, fill_hops, roots_of, route
from shardfly_jax.sharding.routing import MAX_ROOTS
from shardfly_jax.sharding.topology import pools, preset

SIZES = st.lists(st.integers(1, 20), min_size=1, max_size=40).map(tuple)


@given(SIZES, st.data(), st.booleans())
def test_bytes_reach_every_member_from_one_that_has_them(
    sizes: tuple[int, ...], data: st.DataObject, few: bool
) -> None:
    members = sum(sizes)
    start = data.draw(st.integers(0, members - 1))
    turns = data.draw(st.integers(1, min(128, members)))
    cycle = data.draw(st.none() | st.integers(1, turns))
    found = route(sizes, start, turns, few, cycle)
    host = np.repeat(np.arange(len(sizes)), sizes)
    assert found.order[:, 0].tolist() == roots_of(sizes, np.array(start), turns, cycle).tolist()
    assert found.order[0, 0] == start
    for order, giver, depth in zip(*found, strict=True):
        assert sorted(order.tolist()) == list(range(members))
        root, rest = order[0], order[1:]
        assert (giver[root], depth[root]) == (root, 0)
        assert (depth[rest] == depth[giver[rest]] + 1).all()
        crossing = host[giver[rest]] != host[rest]
        assert sorted(host[rest[crossing]].tolist()) == [h for h in range(len(sizes)) if h != host[root]]
        assert np.bincount(giver[rest]).max(initial=0) <= 4


@pytest.mark.parametrize(("hosts", "per_host"), [*itertools.product((1, 2, 3, 4, 18, 128), (1, 2, 4, 8))])
def test_over_the_turns_every_nic_brings_and_takes_its_part(hosts: int, per_host: int) -> None:
    members = hosts * per_host
    turns = min(MAX_ROOTS, members) if hosts == 1 else 2 * per_host
    found = route((per_host,) * hosts, 0, turns, False)
    host = np.arange(members) // per_host
    ingress, egress = np.zeros(members), np.zeros(members)
    for order, giver, _ in zip(*found, strict=True):
        ingress[order[0]] += 1  # from the trainers
        into = order[1:][host[giver[order[1:]]] != host[order[1:]]]
        ingress[into] += 1
        np.add.at(egress, giver[into], 1)
    assert ingress.max() == ingress.min() == turns / per_host
    assert egress.max() <= ingress.max()


@pytest.mark.parametrize("sizes", [(8, 7), (8, 8, 3), (4, 3), (2, 1, 2), (8,) * 127 + (5,)])
def test_every_nic_brings_as_much_as_its_neighbours_where_hosts_are_unequal(sizes: tuple[int, ...]) -> None:
    cycle = 2 * max(sizes)
    turns = math.lcm(cycle, *sizes)
    host, ingress = np.repeat(np.arange(len(sizes)), sizes), np.zeros(sum(sizes))
    for order, giver, _ in zip(*route(sizes, 0, turns, False, cycle), strict=True):
        ingress[order[0]] += 1
        ingress[order[1:][host[giver[order[1:]]] != host[order[1:]]]] += 1
    assert (ingress == turns / np.array(sizes)[host]).all()


@pytest.mark.parametrize("trainers", [4, 16])
def test_trees_of_hosts_bring_every_byte_to_every_replica_once(
    trainers: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (groups, pace):
        monkeypatch.setattr(module, "SMALLEST_BAND_NBYTES", 16)
    hosts = 5
    arrays = {f"h.{k}.w": fill(rng, (64, 32), "float32") for k in range(3)} | {"embed": fill(rng, (256, 16), "float32")}
    sources, targets = {}, {}
    for name, x in arrays.items():
        rows, n = len(x) // trainers, x.shape[1]
        sources[name] = Layout(x.shape, "float32", {r: [(r * rows, (r + 1) * rows), (0, n)] for r in range(trainers)})
        whole = {r: [(0, len(x)), (0, n)] for r in range(8 * hosts)}
        targets[name] = Layout(x.shape, "bfloat16", whole)
    mapping = Mapping({name: src(name) for name in arrays})
    tree = TargetTree(name="rollout", tensors=targets, mapping=mapping, ranks=8 * hosts)
    case = Case(arrays, sources, trainers, [tree])
    plan = case.plan(pools("h200", trainers, 8 * hosts))
    assert len(np.unique(plan.moves.target_rank[plan.moves.hop == 0])) == 16
    assert plan.moves.hop.max() > 2
    check(case, plan)


@pytest.fixture
def trees_of_few(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two GPUs form a tree already, and a few bytes are a band."""
    for module in (groups, pace, routing):
        monkeypatch.setattr(module, "SMALLEST_BAND_NBYTES", 4)
    monkeypatch.setattr(routes, "LONGEST_CHAIN", 1)
    route.cache_clear()  # type: ignore[attr-defined]
    yield
    route.cache_clear()  # type: ignore[attr-defined]


SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


@pytest.mark.hypothesis
@pytest.mark.usefixtures("trees_of_few")
@pytest.mark.parametrize("random", [cases, quantized_cases], ids=["plain", "quantized"])
def test_trees_bring_every_byte_once_for_every_sharding(random: Callable[[], st.SearchStrategy[Case]]) -> None:
    paced = 0

    @settings(max_examples=150, suppress_health_check=SLOW)
    @given(random(), st.integers(1, 2))
    def run(case: Case, per_host: int) -> None:
        nonlocal paced
        plan = case.plan(preset("h200", hosts=-(-case.plan().ranks // per_host), gpus_per_host=per_host))
        paced += int(plan.moves.hop.max(initial=0)) > 0 and len(plan.bands) > 1
        check(case, plan)

    run()
    assert paced > 10


@pytest.mark.usefixtures("trees_of_few")
@pytest.mark.parametrize("rows", [1, 2, 4, 7])
def test_trees_take_hosts_that_hold_parts_of_a_tensor_in_unequal_numbers(rows: int, rng: np.random.Generator) -> None:
    arrays = {f"h.{i}.{name}": fill(rng, (8, 4), "float32") for i in range(2) for name in "abc"}
    whole = [(0, 8), (0, 4)]
    parts = {r: [(0, rows), (0, 4)] if r < 3 else [(rows, 8), (0, 4)] for r in (0, 1, 2, 3, 5)}
    tree = TargetTree(
        name="rollout",
        tensors={name: Layout(x.shape, "float32", parts) for name, x in arrays.items()},
        mapping=Mapping({name: src(name) for name in arrays}),
        ranks=6,
    )
    sources = {name: Layout(x.shape, "float32", {0: whole}) for name, x in arrays.items()}
    case = Case(arrays, sources, 1, [tree])
    topology = preset("h200", hosts=4, gpus_per_host=2)
    made = routing.make_groups(Problem(sources, 1, [tree]), topology)
    assert {group.sizes for group in made} == {(1, 2), (1, 1)}
    for group in made:
        assert (group.round < group.rounds).all()
    check(case, case.plan(topology))


@pytest.mark.usefixtures("trees_of_few")
def test_hosts_may_have_more_members_than_turns_are_kept_for(rng: np.random.Generator) -> None:
    members = groups.MOST_TURNS // 2 + 1
    x, ranks = fill(rng, (64, 8), "float32"), 2 * members - 1
    whole = Layout(x.shape, "float32", {rank: [(0, 64), (0, 8)] for rank in range(ranks)})
    tree = TargetTree(name="rollout", tensors={"w": whole}, mapping=None, ranks=ranks)
    case = Case({"w": x}, {"w": Layout(x.shape, "float32", {0: [(0, 64), (0, 8)]})}, 1, [tree])
    topology = preset("h200", hosts=2, gpus_per_host=members)
    (group,) = routing.make_groups(Problem(case.sources, 1, [tree]), topology)
    assert group.sizes == (members - 1, members)
    assert group.roots == 2 * members
    check(case, case.plan(topology))


def test_long_chains_become_trees() -> None:
    assert route((LONGEST_CHAIN,), 0, 1, False).depth.max() == LONGEST_CHAIN - 1
    assert route((LONGEST_CHAIN + 1,), 0, 1, False).depth.max() == 4
    assert route((1, 1, 1), 0, 1, False).depth.max() == 1
    assert route((1,) * 128, 0, 1, False).depth.max() == 7
    assert route((8,) * 128, 0, 1, False).depth.max() == 7 + 7
    assert route((1,) * 8, 0, 1, True).depth.max() == 3
    assert [fill_hops(members) for members in (8, 16, 17, 128)] == [7, 15, 10, 14]
