"""Worlds whose processes are threads here: what is written where, who votes how, what is refused."""

from __future__ import annotations

import logging
import os
import pickle
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from checks import like, mesh, poison_buffers, registered_bytes

pytest.importorskip("zmq", reason="needs pyzmq (the zmq extra)")

import zmq
from jax.sharding import NamedSharding, PartitionSpec as P
from small_world import TOKEN, holds, make_plan, params_of, served
from threaded_world import Process, Processes, errors, together

import shardfly_jax as sf
from shardfly_jax.transports import choice
from shardfly_jax.transports.choice import PROBES, choose
from shardfly_jax.worlds import connecting
from shardfly_jax.worlds.wire import Seal

pytestmark = pytest.mark.usefixtures("small_chunks")


# Bytes


@pytest.mark.parametrize(
    "spread",
    [
        [[0, 1], [2, 3, 4, 5]],
        [[0], [1], [2], [3], [4], [5]],
        [[0, 2], [1, 5], [3, 4]],
        [[0, 1, 2, 3], [4, 5]],
        [[0, 1, 2, 3, 4, 5]],
    ],
    ids=str,
)
def test_every_byte_is_right_however_ranks_are_spread_over_processes(rendezvous: Any, spread: list[list[int]]) -> None:
    members = Processes(rendezvous, *spread)
    with members as processes:
        addresses = [{k: s.address for k, s in p.plan.registered().buffers.items()} for p in processes]
        for seed in (1, 2, 3):
            for process in processes:
                poison_buffers(process.plan)
            results = members.update(seed)
            assert errors(results) == [], results
            for process, result in zip(processes, results, strict=True):
                if max(process.ranks) < 2:
                    assert result is None
                else:
                    assert holds(process.plan, seed), process.ranks
                    own = [r.name for r in process.plan.replicas if set(r.ranks) & set(process.ranks)]
                    assert {process.plan.version[name] for name in own} == {seed}
        assert addresses == [{k: s.address for k, s in p.plan.registered().buffers.items()} for p in processes]


def test_a_wrong_byte_would_be_seen(rendezvous: Any) -> None:
    members = Processes(rendezvous, [0, 1], [2, 3, 4, 5])
    with members as (_, rollout):
        members.update(1)
        assert served(rollout.plan, [1]) == "1"
        poison_buffers(rollout.plan, 1)
        assert served(rollout.plan, [1]) == "mixture"


def test_ranks_of_the_plan_forward_to_each_other() -> None:
    traffic = make_plan().traffic()
    assert traffic[2:4, 4:6].sum() > 0
    assert traffic[4:6, 2:4].sum() > 0


def test_a_trainer_and_a_rollout_with_meshes_of_their_own_take_part(rendezvous: Any, rng: np.random.Generator) -> None:
    """Each process plans with its own devices where it has some; the plans are one."""
    here, there = mesh((2, 2), "x y"), mesh((2,), "tp", [5, 4])
    elsewhere = jax.sharding.AbstractMesh((2, 2), ("x", "y")), jax.sharding.AbstractMesh((2,), ("tp",))

    def planned(source: Any, target: Any) -> sf.Plan:
        source = {"w": like((8, 6), "float32", source, "x", "y")}
        return sf.make_plan(source, {"t": like((6, 8), "bfloat16", target, "tp")}, mapping, allow_cast="t")

    mapping = sf.Mapping({"t": sf.src("w").rearrange("a b -> b a")})
    trainer_plan, rollout_plan = planned(here, elsewhere[1]), planned(elsewhere[0], there)
    buffers = {"t": jax.device_put(np.zeros((6, 8), "bfloat16"), NamedSharding(there, P("tp")))}
    trainer = Process(rendezvous, [0, 1, 2, 3], trainer_plan)
    rollout = Process(rendezvous, [4, 5], rollout_plan, buffers)
    try:
        for _ in range(2):
            x = rng.standard_normal((8, 6), np.float32)
            params = {"w": jax.device_put(x, NamedSharding(here, P("x", "y")))}
            _, out = together(lambda p=params: sf.sync(p, trainer.plan), lambda: sf.receive(rollout.plan))
            assert out["t"].sharding.is_equivalent_to(buffers["t"].sharding, 2)
            assert np.asarray(out["t"]).tobytes() == np.ascontiguousarray(x.T).astype("bfloat16").tobytes()
    finally:
        trainer.world.close()
        rollout.world.close()


def test_a_rollout_rank_that_gets_nothing_takes_part(rendezvous: Any) -> None:
    source = {"a": sf.Layout((4,), "float32", {0: [(0, 4)]})}
    trees = [{name: jax.ShapeDtypeStruct((4,), "float32")} for name in ("a", "k")]
    plan = sf.make_plan(source, sf.local(trees), sf.Mapping({"a": sf.src("a")}), keep=("k",))

    def owner(name: str, rank: int) -> dict[str, Any]:
        return {name: {rank: jax.device_put(np.zeros(4, np.float32))}}

    processes = [
        Process(rendezvous, [0], plan),
        Process(rendezvous, [1], plan, owner("a", 0)),
        Process(rendezvous, [2], plan, owner("k", 1)),
    ]
    try:
        whole = np.arange(4, dtype=np.float32) + 1
        _, first, second = together(
            lambda: sf.sync({"a": {0: jax.device_put(whole)}}, processes[0].plan),
            *(lambda p=p: sf.receive(p.plan, wait_secs=10) for p in processes[1:]),
        )
        assert np.asarray(first["a"][0]).tolist() == whole.tolist()
        assert not np.asarray(second["k"][1]).any()
    finally:
        for process in processes:
            process.world.close()


# Votes


def test_params_that_do_not_fit_end_the_update_for_all_before_anything_is_written(rendezvous: Any) -> None:
    members = Processes(rendezvous, [0, 1], [2, 3], [4, 5])
    with members as (trainer, *rollouts):
        members.update(1)
        before = [registered_bytes(rollout.plan) for rollout in rollouts]
        wrong = params_of(2, [0, 1])
        del wrong["norm"]
        results = together(
            lambda: sf.sync(wrong, trainer.plan), *(lambda r=rollout: r.update(2) for rollout in rollouts)
        )
        assert errors(results) == ["ParamsMismatch", "UpdateRefused", "UpdateRefused"]
        assert "rank 0 refused" in str(results[1])
        assert ".," not in str(results[1])
        assert ".." not in str(results[1])
        assert "Every replica is as it was." in str(results[1])
        assert [registered_bytes(rollout.plan) for rollout in rollouts] == before
        assert [served(rollout.plan, [1]) for rollout in rollouts] == ["1", "1"]
        assert errors(members.update(3)) == []
        assert [served(rollout.plan, [3]) for rollout in rollouts] == ["3", "3"]


def test_a_rebound_buffer_ends_the_update_for_all(rendezvous: Any) -> None:
    owner: dict[str, Any] = {}
    plan = make_plan()
    for index in plan.target_families:
        family = plan.families[index]
        for name in family.names:
            shape = {rank: family.layout.buffer_shape(rank) for rank in family.layout.ranks}
            owner[name] = {r - 2: jax.device_put(np.zeros(shape[r], family.layout.dtype)) for r in shape}
    trainer, rollout = Process(rendezvous, [0, 1]), Process(rendezvous, [2, 3, 4, 5], plan, lambda: owner)
    try:
        assert errors(together(lambda: trainer.update(1), lambda: rollout.update(1))) == []
        good = owner["norm"]
        owner["norm"] = {rank: x + 1 for rank, x in good.items()}
        results = together(lambda: trainer.update(2), lambda: rollout.update(2))
        assert errors(results) == ["UpdateRefused", "StaleBuffer"]
        owner["norm"] = good
        assert served(rollout.plan, [1]) == "1"
    finally:
        trainer.world.close()
        rollout.world.close()


def test_two_plans_are_found_out_before_anything_moves(rendezvous: Any) -> None:
    """AReaL#1439: two sides that had planned differently hung."""
    trainer, rollout = Process(rendezvous, [0, 1]), Process(rendezvous, [2, 3, 4, 5], make_plan(2.0))
    try:
        poison_buffers(rollout.plan)
        before = registered_bytes(rollout.plan)
        results = together(lambda: trainer.update(1), lambda: rollout.update(1))
        assert errors(results) == ["DigestMismatch", "DigestMismatch"]
        assert make_plan().digest[:12] in str(results[1])
        assert registered_bytes(rollout.plan) == before
    finally:
        trainer.world.close()
        rollout.world.close()


def test_who_does_not_take_part_is_named(rendezvous: Any) -> None:
    with Processes(rendezvous, [0, 1], [2, 3]) as (trainer, rollout):
        (error,) = together(lambda: rollout.update(1, wait_secs=0.3))
        assert isinstance(error, sf.SyncTimeout)
        assert "rank 0 (process 'process [0, 1]')" in str(error)
        assert "before anything was written" in str(error)
        results = together(lambda: trainer.update(1), lambda: rollout.update(1, wait_secs=0.3))
        assert errors(results) == ["SyncTimeout", "SyncTimeout"]
        assert "rank 4, which no living process holds" in str(results[1])
        assert "Start a process that registers rank 4, or sf.rescale" in str(results[1])
        assert served(rollout.plan, [1]) == "empty"


def test_an_update_that_one_process_breaks_off_ends_for_all_and_is_healed(rendezvous: Any) -> None:
    class Broken(Exception):
        pass

    def progress(_: int) -> None:
        raise Broken("a callback")

    members = Processes(rendezvous, [0, 1], [2, 3], [4, 5])
    with members as (trainer, first, second):
        members.update(1)
        results = together(
            lambda: trainer.update(2), lambda: first.update(2, progress=progress), lambda: second.update(2)
        )
        assert isinstance(results[1], Broken)
        assert isinstance(results[0], sf.TransferError)
        assert "rank 2 failed: Broken: a callback" in str(results[0])
        assert served(first.plan, [1, 2]) == "poisoned"
        assert served(second.plan, [1, 2]) in {"poisoned", "2"}
        assert second.plan.version["rollout/1"] == (2 if served(second.plan, [2]) == "2" else 1)
        assert errors(members.update(3)) == []
        assert [served(p.plan, [3]) for p in (first, second)] == ["3", "3"]
        assert len(set(trainer.plan.version.values())) == 1


def test_a_rollout_that_is_slow_itself_is_named_and_not_the_trainer_that_it_waits_for() -> None:
    with (
        sf.connect("tcp://127.0.0.1:0", TOKEN, serve=True, deadline_secs=1) as world,
        Processes(world, [0, 1], [2, 3, 4, 5]) as (trainer, rollout),
    ):
        results = together(
            lambda: trainer.update(1), lambda: rollout.update(1, progress=lambda nbytes: time.sleep(0.1))
        )
        assert errors(results) == ["SyncTimeout", "SyncTimeout"]
        for error in results:
            assert re.search(r"rank [2-5] had not yet taken chunks that have come", str(error)), error


def test_replicas_are_dropped_by_registering_a_plan_without_them(rendezvous: Any) -> None:
    """Two replicas, one dies: the others register a plan of one, with the buffers that they have."""
    members = Processes(rendezvous, [0, 1], [2, 3], [4, 5])
    with members as (trainer, first, second):
        members.update(1)
        second.world.close()
        assert errors(together(lambda: trainer.update(2), lambda: first.update(2, wait_secs=0.3)))
        assert served(first.plan, [1]) == "1"
        buffers, addresses = sf.params(first.plan), {s.address for s in first.plan.registered().buffers.values()}
        for process, owner in ((trainer, None), (first, buffers)):
            process.plan = sf.register(make_plan(replicas=1), owner, world=process.world, ranks=process.ranks)
        poison_buffers(first.plan)
        assert errors(together(lambda: trainer.update(3), lambda: first.update(3))) == []
        assert served(first.plan, [1, 3]) == "3"
        assert {s.address for s in first.plan.registered().buffers.values()} == addresses
        assert set(trainer.plan.version.values()) == {2}, "versions go on"


def test_a_rollout_is_not_served_while_an_update_writes_it(rendezvous: Any) -> None:
    members = Processes(rendezvous, [0, 1], [2, 3, 4, 5])
    with members as (trainer, rollout):
        members.update(1)
        during: list[str] = []
        results = together(
            lambda: trainer.update(2),
            lambda: rollout.update(2, progress=lambda _: during.append(served(rollout.plan, [1, 2]))),
        )
        assert errors(results) == []
        assert set(during) == {"poisoned"}
        assert served(rollout.plan, [1, 2]) == "2"


def test_two_updates_that_race_are_served_whole_one_after_the_other(rendezvous: Any) -> None:
    with Processes(rendezvous, [0, 1], [2, 3, 4, 5]) as (trainer, rollout):
        seen = []

        def receive_two() -> None:
            for _ in range(2):
                rollout.update(0)
                seen.append(served(rollout.plan, [1, 2]))

        assert errors(together(lambda: trainer.update(1), lambda: trainer.update(2), receive_two)) == []
        assert sorted(seen) == ["1", "2"]
        assert set(rollout.plan.version.values()) == {2}


# Who may take part


def test_a_wrong_token_is_refused_and_logged(rendezvous: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "shardfly_jax.worlds"), pytest.raises(sf.WorldError, match="this token"):
        sf.connect(rendezvous.address, "another token", deadline_secs=10)
    assert "another token" in caplog.text


class Bomb:
    """Leaves a trace when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_messages_that_are_none_are_refused_and_logged_and_nothing_is_unpickled(
    rendezvous: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bomb = pickle.dumps(Bomb(tmp_path / "trace"))
    seal = Seal(TOKEN)

    def sealed(text: bytes) -> list[bytes]:
        return [seal._mac(text), text]

    bad = [
        [], [b""], [b"", bomb], [bomb, bomb, bomb], [bomb], sealed(bomb), sealed(b"[1]"), sealed(b'{"op":["beat"]}'),
        seal.close({"op": "beat"}), seal.close({"op": "beat", "session": -1, "seq": 1}), sealed(b"{" * 100_000),
        seal.close({"op": "register", "session": 1, "seq": 1, "digest": 3}), seal.close({"op": "run", "seq": 1}),
    ]  # fmt: skip
    members = Processes(rendezvous, [0, 1], [2, 3, 4, 5])
    with members as (_, rollout), zmq.Context() as context, caplog.at_level(logging.WARNING, "shardfly_jax.worlds"):
        for kind, address, tail in (
            (zmq.DEALER, rendezvous.address, []),
            (zmq.PUSH, rollout.plan.session.part._incoming.endpoint, [bomb]),
        ):
            with context.socket(kind) as stranger:
                stranger.setsockopt(zmq.LINGER, 1000)
                stranger.connect(address)
                for frames in bad:
                    if sum(map(len, frames)) < 60_000 or not tail:  # zmq itself refuses longer headers of chunks
                        stranger.send_multipart([*frames, *tail] or [b""])
        assert errors(members.update(1)) == []
        assert served(rollout.plan, [1]) == "1"
        until = time.monotonic() + 10

        def refused(what: str) -> int:
            return sum(map(int, re.findall(rf"refused (\d+) x {what}", caplog.text)))

        while refused("a message") + refused("a chunk") < 2 * len(bad) - 1 and time.monotonic() < until:
            members.update(1)
    assert (refused("a message"), refused("a chunk")) == (len(bad), len(bad) - 1)
    assert caplog.text.count("refused") < 2 * len(bad) - 1, "a line a second is enough"
    assert not (tmp_path / "trace").exists()


def test_chunks_of_another_attempt_or_size_are_never_written(rendezvous: Any, caplog: pytest.LogCaptureFixture) -> None:
    """What a late writer, or a program with a wrong table, would send; its token is right."""
    members = Processes(rendezvous, [0, 1], [2, 3, 4, 5])
    with members as (_, rollout), zmq.Context() as context:
        members.update(1)
        seal, session = Seal(TOKEN), rollout.world.link.session
        chunk = {"op": "chunk", "session": session, "epoch": 2, "source": 0, "target": 2, "number": 0}
        size = next(s.nbytes for s in rollout.plan.session.part._steps.incoming if s.pair == (0, 2) and s.number == 0)
        late = [
            ({**chunk, "epoch": 1}, size), ({**chunk, "session": session + 1}, size), (chunk, size + 1), (chunk, 0),
            ({**chunk, "number": 10**6}, size), ({**chunk, "source": 5, "target": 2}, size),
        ]  # fmt: skip
        with context.socket(zmq.PUSH) as stranger, caplog.at_level(logging.WARNING, "shardfly_jax.worlds"):
            stranger.setsockopt(zmq.LINGER, 1000)
            stranger.connect(rollout.plan.session.part._incoming.endpoint)
            for header, nbytes in late:
                stranger.send_multipart(seal.close(header, b"\xa5" * nbytes))
            for seed in (2, 3):
                assert errors(members.update(seed)) == []
                assert served(rollout.plan, [seed]) == str(seed)
        assert "dropped" in caplog.text


def test_a_rank_belongs_to_one_living_process(rendezvous: Any) -> None:
    with sf.connect("tcp://127.0.0.1:0", TOKEN, serve=True, deadline_secs=0.5, lost_secs=2.5) as hasty:
        first = Process(hasty, [0, 1])
        with pytest.raises(sf.WorldError, match=r"rank 1 is held by process 'process \[0, 1\]'"):
            Process(hasty, [1])
        first.world.close()
        Process(hasty, [1]).world.close()


def test_a_lost_rendezvous_ends_the_wait() -> None:
    served_here = sf.connect("tcp://127.0.0.1:0", TOKEN, serve=True, deadline_secs=20, lost_secs=0.5)
    rollout = Process(served_here, [2, 3])
    try:
        (error, _) = together(lambda: rollout.update(1), served_here.close)
        assert isinstance(error, sf.WorldLost)
        with pytest.raises(sf.WorldLost, match=r"sf\.connect again"):
            rollout.update(1)
    finally:
        rollout.world.close()


def test_a_rendezvous_that_is_lost_half_way_leaves_poison_and_another_one_heals_it(rendezvous: Any) -> None:
    served_here = sf.connect("tcp://127.0.0.1:0", TOKEN, serve=True, deadline_secs=20, lost_secs=2)
    trainer, rollout = Process(served_here, [0, 1]), Process(served_here, [2, 3, 4, 5])
    try:
        closing = iter([served_here.close])
        results = together(
            lambda: trainer.update(1), lambda: rollout.update(1, progress=lambda _: next(closing, lambda: None)())
        )
        assert errors(results) == ["WorldLost", "WorldLost"]
        assert served(rollout.plan, [1]) == "poisoned"
        addresses = {s.address for s in rollout.plan.registered().buffers.values()}
        owner = rollout.plan.registered().handles()
    finally:
        trainer.world.close()
        rollout.world.close()
    trainer, rollout = Process(rendezvous, [0, 1]), Process(rendezvous, [2, 3, 4, 5], None, owner)
    try:
        assert errors(together(lambda: trainer.update(2), lambda: rollout.update(2))) == []
        assert served(rollout.plan, [1, 2]) == "2"
        assert {s.address for s in rollout.plan.registered().buffers.values()} == addresses
    finally:
        trainer.world.close()
        rollout.world.close()


def test_calls_on_the_wrong_side_say_which_is_right(rendezvous: Any) -> None:
    with Processes(rendezvous, [0, 1], [2, 3]) as (trainer, rollout):
        with pytest.raises(sf.NotRegistered, match=r"sf\.receive"):
            sf.sync({}, rollout.plan)
        with pytest.raises(sf.NotRegistered, match=r"sf\.sync"):
            sf.receive(trainer.plan)
        with pytest.raises(sf.NotRegistered, match="no rollout ranks"):
            sf.params(trainer.plan)
        with pytest.raises(sf.RegistrationError, match="other processes"), sf.receiving(rollout.plan):
            pass


def test_a_later_registration_takes_the_place_of_an_earlier_one(rendezvous: Any) -> None:
    process = Process(rendezvous, [0, 1])
    try:
        earlier = process.plan
        process.plan = sf.register(make_plan(2.0), world=process.world, ranks=[0, 1])
        with pytest.raises(sf.WorldError, match="later registration"):
            sf.sync(params_of(1, [0, 1]), earlier)
    finally:
        process.world.close()


def test_a_world_whose_plan_fails_to_end_frees_every_socket(rendezvous: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was left open would let the end of the context wait for ever."""
    with Processes(rendezvous, [0, 1], [2, 3, 4, 5]) as (trainer, rollout):
        results = together(*(lambda p=process: p.update(1) for process in (trainer, rollout)))
        assert errors(results) == []

        def fail() -> None:
            raise RuntimeError("out of luck")

        for process in (trainer, rollout):
            monkeypatch.setattr(process.plan.registered(), "end_pending", fail)
        closed = together(trainer.world.close, rollout.world.close)
        assert errors(closed) == ["RuntimeError", "RuntimeError"]
        assert trainer.world.context.closed
        assert rollout.world.context.closed
        with pytest.raises(sf.WorldError, match="was closed"):
            sf.receive(rollout.plan)


def test_the_persistent_executor_is_refused_over_sockets(rendezvous: Any) -> None:
    with sf.connect(rendezvous.address, TOKEN, listen="tcp://127.0.0.1:0") as world:
        words = "executor is 'persistent', but between processes over zmq there is only 'portable'. Leave executor out"
        with pytest.raises(sf.RegistrationError, match=words):
            sf.register(make_plan(), world=world, ranks=[2, 3], executor="persistent")
        plan = sf.register(make_plan(), world=world, ranks=[2, 3], executor="portable")
        assert plan.registered().part.transport == "zmq"


def test_ranks_and_endpoints_that_cannot_work_are_refused(rendezvous: Any) -> None:
    plan = make_plan()
    for ranks, listen, error, words in (
        (None, None, sf.RegistrationError, "go together"),
        ([], None, sf.RegistrationError, r"ranks are \[\]"),
        ([6], None, sf.RegistrationError, "ranks 0 to 5"),
        ([2], None, sf.RegistrationError, "listens nowhere"),
        ([2], "tcp://192.0.2.1:0", sf.WorldError, "cannot listen"),
    ):
        with (
            sf.connect(rendezvous.address, TOKEN, listen=listen) as world,
            pytest.raises(error, match=words),
        ):
            sf.register(plan, world=world, ranks=ranks)
    for options, words in (
        ({"address": "127.0.0.1:1"}, "must begin with"),
        ({"listen": 3}, "must begin with"),
        ({"token": ""}, "token"),
        ({"token": "a\udc80"}, "token is no printable"),
        ({"name": 7}, "name is no printable"),
        ({"deadline_secs": 0}, "positive"),
        ({"serve": True}, "cannot listen"),
        ({"address": "tcp://127.0.0.1:1", "deadline_secs": 0.1}, "nobody answers"),
    ):
        with pytest.raises(sf.WorldError, match=words):
            sf.connect(**{"address": rendezvous.address, "token": TOKEN, **options})


# pyzmq and transports


def test_without_pyzmq_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connecting.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(sf.WorldError, match=r"pip install 'shardfly-jax\[zmq\]'"):
        sf.connect("tcp://127.0.0.1:0", TOKEN, serve=True)
    assert "pyzmq" in str(PROBES["zmq"](()))


def test_importing_the_library_does_not_import_pyzmq() -> None:
    code = "import shardfly_jax, sys; sys.exit('zmq' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-P", "-c", code], env={**os.environ}, timeout=120, check=False).returncode == 0
    )


def test_explain_says_which_transport_is_used_and_why_no_other(rendezvous: Any) -> None:
    with Processes(rendezvous, [0, 1], [2, 3, 4, 5]) as (_, rollout):
        text = rollout.plan.explain()
    assert "Transport: zmq; ranks of this process: 2, 3, 4, 5" in text
    assert "not ipc: " in text
    assert "Transport" not in make_plan().explain()


def test_every_transport_says_why_it_is_not_chosen() -> None:
    name, reasons = choose(jax.devices("cpu"), PROBES)
    assert name == "zmq"
    assert set(reasons) == {"ipc", "nvshmem"}
    assert all(reasons.values())


def test_processes_that_mpirun_started_and_that_meet_at_a_rendezvous_use_its_transports(
    monkeypatch: pytest.MonkeyPatch, rendezvous: Any
) -> None:
    """Nothing speaks against NVSHMEM and MPI here, but this world is none of theirs."""
    mine = {"ipc": lambda devices: "it is not there", "zmq": lambda devices: "these are GPUs"}
    monkeypatch.setattr(choice, "PROBES", dict.fromkeys(PROBES, lambda devices: None) | mine)
    with pytest.raises(sf.RegistrationError, match=r"no transport reaches .*: ipc: it is not there; zmq: these are"):
        Process(rendezvous, [2, 3])
    monkeypatch.setitem(choice.PROBES, "zmq", lambda devices: None)
    process = Process(rendezvous, [2, 3])
    with process.world:
        assert process.plan.registered().part.transport == "zmq"


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="needs CPU devices, as host memory is written")
def test_sockets_alone_are_taken_where_they_are_asked_for(rendezvous: Any, driver: Any) -> None:
    with sf.connect(rendezvous.address, TOKEN, listen="tcp://127.0.0.1:0", transport="auto") as world:
        plan = sf.register(make_plan(), world=world, ranks=[2, 3])
        assert plan.registered().part.transport == "ipc"
    with sf.connect(rendezvous.address, TOKEN, listen="tcp://127.0.0.1:0", transport="zmq") as world:
        plan = sf.register(make_plan(), world=world, ranks=[2, 3])
        assert plan.registered().part.transport == "zmq"


def test_the_meaning_of_the_small_world_is_that_of_the_library(rng: np.random.Generator) -> None:
    """`holds` compares with NumPy by hand; the same plan in one process must agree, through `verify`."""
    plan = sf.register(make_plan())
    params = params_of(5, [0, 1])
    sf.sync(params, plan)
    assert sf.verify(params, plan) == plan.target_nbytes
    assert holds(plan, 5)
    assert not holds(plan, 6)
