"""Processes that have the token and say what cannot be: they are refused by name, and nobody else breaks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import pytest
from hypothesis import given, settings, strategies as st

pytest.importorskip("zmq", reason="needs pyzmq (the zmq extra)")

import host_gpu
from checks import registered_bytes
from small_world import served
from test_rendezvous import HELD, REPLICAS, SESSION, World
from threaded_world import Process, Processes, check_update, errors, together

import shardfly_jax as sf
from shardfly_jax.transports.exports import Exports
from shardfly_jax.worlds.gpu_part import GpuPart
from shardfly_jax.worlds.members import MAX_VERSION
from shardfly_jax.worlds.part import Part
from shardfly_jax.worlds.wire import MAX_SECS, PROTOCOL, TO_RENDEZVOUS

GOOD: dict[str, Any] = {
    "digest": "d", "source_ranks": 1, "target_ranks": 3, "held": [3], "replicas": REPLICAS, "endpoint": "tcp://x",
    "versions": {}, "newest": 0, "confirms": False,
}  # fmt: skip
NONSENSE: dict[str, tuple[dict[str, Any], str]] = {
    "a rank beyond the plan": ({"held": [3, 4]}, "it holds rank 4, but its plan has the ranks 0 to 3"),
    "more ranks than memory": ({"target_ranks": 1 << 62}, "its replicas hold 3 ranks, but each of"),
    "more trainers than memory": ({"source_ranks": 1 << 62, "held": [3]}, "its replicas hold 3 ranks"),
    "a rank in two replicas": ({"replicas": {"a": [1, 2], "b": [2]}}, "is needed once"),
    "a trainer in a replica": ({"replicas": {"a": [1, 2], "b": [0]}}, "is needed once"),
    "a version of no replica": ({"versions": {"c": 1}}, "version of replica 'c', of which it holds no rank"),
    "a version of others' replica": ({"versions": {"a": 1}}, "version of replica 'a', of which it holds no rank"),
    "a version past all": ({"versions": {"b": MAX_VERSION + 1}}, "knows of update 2147483648, but no pool has had so"),
    "an update past all": ({"newest": MAX_VERSION + 1}, "knows of update 2147483648, but no pool has had so many"),
    "payload that goes nowhere": ({"endpoint": "carrier pigeon"}, "'carrier pigeon', which no transport reaches"),
    "payload with half a letter": ({"endpoint": "tcp://\ud800:1"}, "which no transport reaches"),
    "another plan of that digest": (
        {"target_ranks": 4, "replicas": {**REPLICAS, "c": [4]}}, "process 't' has other ranks for its plan",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", NONSENSE)
def test_a_registration_that_no_plan_has_is_refused_by_name(what: str, caplog: pytest.LogCaptureFixture) -> None:
    changes, words = NONSENSE[what]
    world = World()
    for who in ("t", "a1", "a2"):
        world.join(who)
        world.enter(who)
    world.say("liar", "hello", protocol=PROTOCOL, name="liar")
    world.say("liar", "register", **{**GOOD, **changes})
    assert world.ops("liar") == ["welcome", "refused"]
    assert words in world.last("liar")["why"]
    assert "process 'liar'" in world.last("liar")["why"]
    assert "process 'liar' registers nonsense" in caplog.text
    world.enter("liar")
    world.pass_time(0.1)
    assert world.ops("t") == ["welcome", "registered"], "no attempt began, and nobody was told anything"
    world.say("liar", "register", **GOOD)
    world.enter("liar", entry=2)
    assert world.last("t")["op"] == "begin"


TEXTS = st.sampled_from(["d", "e", "a", "", "tcp://x", "{", "timeout", "withheld", "finish"]) | st.text(max_size=3)
NUMBERS = st.integers(0, 4) | st.integers(0, (1 << 63) - 1)
RANKS = st.lists(NUMBERS, min_size=1, max_size=4)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "seq": st.just(1), "session": st.just(SESSION), "protocol": st.just(PROTOCOL), "held": RANKS,
    "replicas": st.just(REPLICAS) | st.dictionaries(TEXTS, RANKS, max_size=3), "endpoint": TEXTS,
    "versions": st.dictionaries(TEXTS, NUMBERS, max_size=2), "confirms": st.booleans(),
    "wait_secs": st.floats(0.001, MAX_SECS), "refusal": st.none() | TEXTS,
    **dict.fromkeys(("source_ranks", "target_ranks", "newest", "entry", "epoch", "rank"), NUMBERS),
    **dict.fromkeys(("name", "digest", "why", "kind", "phase"), TEXTS),
}  # fmt: skip
WORDS = st.one_of(
    st.fixed_dictionaries({"op": st.just(op), **{name: FIELDS[name] for name in fields}})
    for op, fields in TO_RENDEZVOUS.items()
)


@settings(max_examples=300)
@given(st.lists(st.tuples(st.sampled_from(["liar", "fool"]), WORDS), max_size=12))
def test_no_words_break_the_rendezvous(words: list[tuple[str, dict[str, Any]]]) -> None:
    world = World()
    for who in HELD:
        world.join(who)
    for who, said in [*((who, {"op": "hello", "protocol": PROTOCOL, "name": who}) for who in ("liar", "fool")), *words]:
        world.say(who, said["op"], **{name: value for name, value in said.items() if name not in ("op", "seq")})
        world.pass_time(0.1)
    for who in ("liar", "fool"):
        world.say(who, "leave")
    for who in HELD:
        world.say(who, "beat")
        world.enter(who, entry=7)
    assert world.last("t")["op"] == "begin"


def test_an_endpoint_that_nobody_can_connect_to_is_refused_with_its_rank(
    rendezvous: Any, monkeypatch: pytest.MonkeyPatch, small_chunks: None
) -> None:
    real = Part._endpoint

    def endpoint(part: Part) -> str:
        return "tcp://two words:1" if 2 in part.held else real.fget(part)  # type: ignore[attr-defined]

    monkeypatch.setattr(Part, "_endpoint", property(endpoint))
    members = Processes(rendezvous, [0, 1], [2, 3], [4, 5])
    with members:
        results = members.update(1)
        assert errors(results) == ["TransferError"] * 3
        assert "rank 2 has registered 'tcp://two words:1' as where it takes payload" in str(results[0])
        assert "rank 2 has registered 'tcp://two words:1'" in str(results[2])


Offer = tuple[list[int], list[int], list[list[int]]]


def change_offers(monkeypatch: pytest.MonkeyPatch, what: str, change: Callable[[Offer], Any]) -> list[str]:
    """Lets whoever holds rank 2 offer something else; the names of its offers."""
    offer, changed = Exports.offer, []

    def offered(self: Exports, name: str, sizes: Any, descriptors: Any, rows: Any) -> None:
        mine = [list(sizes), list(descriptors), [list(row) for row in rows]]
        if name.startswith(what) and name.split()[1] in liars:
            changed.append(name)
            mine = change((mine[0], mine[1], mine[2]))
        offer(self, name, *mine)

    liars: set[str] = set()
    open_ = GpuPart._offer

    def opened(self: GpuPart, name: str, addresses: Any) -> None:
        if 2 in self.held:
            liars.add(self.process)
        open_(self, name, addresses)

    monkeypatch.setattr(GpuPart, "_offer", opened)
    monkeypatch.setattr(Exports, "offer", offered)
    return changed


def moved(offer: Offer, k: int, value: Callable[[int], int], of: int = 0) -> Offer:
    """An offer with another value in one of its rows."""
    sizes, descriptors, rows = offer
    rows[of] = [*rows[of][:k], value(rows[of][k]), *rows[of][k + 1 :]]
    return sizes, descriptors, rows


LIES: dict[str, tuple[str, Callable[[Offer], Any], str]] = {
    "a buffer behind its memory": ("buffers", lambda o: moved(o, 4, lambda n: n + (1 << 20)), "of 65536 bytes"),
    "a buffer far away": ("buffers", lambda o: moved(o, 4, lambda n: n + (1 << 46)), "a buffer of rank 2 of"),
    "a buffer that is crooked": ("buffers", lambda o: moved(o, 4, lambda n: n + 4), "448 bytes at offset"),
    "a buffer in no piece": ("buffers", lambda o: moved(o, 3, lambda n: 7), "that it does not give"),
    "a buffer of another's rank": ("buffers", lambda o: moved(o, 2, lambda n: 4), "that the plan has not"),
    "a buffer of no tensor": ("buffers", lambda o: moved(o, 1, lambda n: 99), "that the plan has not"),
    "no buffers": ("buffers", lambda o: (*o[:2], []), "too few buffers for the ranks [2, 3]"),
    "rows that are none": ("buffers", lambda o: (*o[:2], [[]]), "that the plan has not"),
    "an inbox behind its memory": ("inboxes", lambda o: moved(o, 2, lambda n: o[0][0]), "an inbox of"),
    "no inbox": ("inboxes", lambda o: (*o[:2], []), "no inbox"),
}


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="needs CPU devices, as host memory is written")
@pytest.mark.parametrize("lie", LIES)
def test_memory_that_is_not_its_own_is_never_mapped_for_a_kernel(
    lie: str, driver: host_gpu.Driver, rendezvous: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    what, change, words = LIES[lie]
    with Processes(rendezvous, [0, 1], [4, 5]) as (trainer, other), contextlib.ExitStack() as stack:
        with monkeypatch.context() as lying:
            changed = change_offers(lying, what, change)
            liar = Process(rendezvous, [2, 3])
            stack.callback(liar.world.close)
            before = registered_bytes(other.plan)
            results = together(*(lambda p=process: p.update(1) for process in (trainer, liar, other)))
            assert changed
            assert {"TransferError", "UpdateRefused"} >= set(errors(results)), results
            assert any(words in str(result) and "(ranks [2, 3]) offers" in str(result) for result in results), results
            assert registered_bytes(other.plan) == before
            assert served(other.plan, [1]) in ("empty", "poisoned")
            liar.world.close()
        liar = Process(rendezvous, [2, 3])
        stack.callback(liar.world.close)
        check_update([trainer, liar, other], 2)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="needs CPU devices, as host memory is written")
def test_memory_that_the_driver_does_not_map_is_refused_with_its_owner(
    driver: host_gpu.Driver, rendezvous: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Processes(rendezvous, [0, 1], [2, 3, 4, 5]) as (trainer, rollout):
        driver.fails["cuMemImportFromShareableHandle"] = 1
        results = together(*(lambda p=process: p.update(1) for process in (trainer, rollout)))
        assert all(isinstance(result, sf.TransferError) for result in results), results
        assert any("cannot be mapped: GPU memory: cuMemImportFrom" in str(result) for result in results), results


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="needs CPU devices, as host memory is written")
@pytest.mark.parametrize(
    ("endpoint", "words"),
    [
        ('{"path": "/nowhere", "process": "x", "devices": {"3": 0}}', "has registered devices of the ranks [3] only"),
        ('{"path": "/nowhere", "process": "x", "devices": {"2": Infinity}}', "rank 2 is not on a GPU"),
        ('{"path": "/no\\u0000where", "process": "x", "devices": {"2": 0, "3": 0}}', "cannot be reached at"),
        ("{ME}", "under the name of another one"),
    ],
)
def test_an_endpoint_that_says_something_else_of_ranks_is_refused(
    driver: host_gpu.Driver, rendezvous: Any, monkeypatch: pytest.MonkeyPatch, endpoint: str, words: str
) -> None:
    real = GpuPart._endpoint.fget  # type: ignore[attr-defined]
    with Processes(rendezvous, [0, 1], [4, 5]) as (trainer, other):
        theirs = real(trainer.plan.registered().part)
        text = endpoint if endpoint != "{ME}" else theirs.replace('"0"', '"2"').replace('"1"', '"3"')

        def said(part: GpuPart) -> str:
            return text.replace('"x"', f'"{part.process}"') if 2 in part.held else real(part)

        monkeypatch.setattr(GpuPart, "_endpoint", property(said))
        liar = Process(rendezvous, [2, 3])
        with liar.world:
            results = together(*(lambda p=process: p.update(1) for process in (trainer, liar, other)))
        assert all(isinstance(result, sf.TransferError) for result in results), results
        assert any(words in str(result) for result in results), results
