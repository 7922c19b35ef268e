"""Updates across processes that wait in the background, and replicas that fall behind."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("zmq", reason="needs pyzmq (the zmq extra)")

from small_world import params_of, served
from threaded_world import PATIENCE_SECS, Process, Processes, behind, check_update, errors, eventually, together

import shardfly_jax as sf

pytestmark = pytest.mark.usefixtures("small_chunks")


def test_rollouts_go_on_with_the_old_weights_while_an_update_waits_for_them(rendezvous: Any) -> None:
    members = Processes(rendezvous, [0, 1], [2, 3], [4, 5])
    with members as (trainer, first, second):
        assert errors(members.update(1)) == []
        assert behind(trainer) == {0}
        handle = sf.sync(params_of(2, [0, 1]), trainer.plan, wait=False)
        assert behind(trainer) == {1}
        for rollout in (first, second):  # which learn of it outside of any call
            eventually(lambda rollout=rollout: behind(rollout) == {1})
            assert served(rollout.plan, [1, 2]) == "1"
        assert not handle.done()
        with pytest.raises(sf.UpdateRefused, match="pending"):
            trainer.update(3)
        results = together(lambda: first.update(2), lambda: second.update(2), lambda: handle.result(PATIENCE_SECS))
        assert errors(results) == []
        assert results[2] is None
        assert [served(rollout.plan, [1, 2]) for rollout in (first, second)] == ["2", "2"]
        for process in members.all:
            eventually(lambda process=process: dict(process.plan.version) == {"rollout/0": 2, "rollout/1": 2})
            eventually(lambda process=process: behind(process) == {0})


def test_a_process_with_trainer_and_rollout_ranks_gets_its_params_from_the_handle(rendezvous: Any) -> None:
    with Processes(rendezvous, [0, 1, 2, 3], [4, 5]) as (both, rollout):
        handle = sf.sync(params_of(1, [0, 1]), both.plan, wait=False)
        _, out = together(lambda: rollout.update(1), lambda: handle.result(PATIENCE_SECS))
        assert set(out["norm"]) == {0, 1}
        assert served(both.plan, [1]) == served(rollout.plan, [1]) == "1"


def test_an_update_that_nobody_takes_part_in_is_given_up_and_nothing_is_written(rendezvous: Any) -> None:
    members = Processes(rendezvous, [0, 1], [2, 3], [4, 5])
    with members as (trainer, *rollouts):
        assert errors(members.update(1)) == []
        handle = sf.sync(params_of(2, [0, 1]), trainer.plan, wait=False, wait_secs=0.3)
        with pytest.raises(sf.SyncTimeout, match=r"rank 2.*did not take part within 0\.3 s.*before anything"):
            handle.result(PATIENCE_SECS)
        assert behind(trainer) == {0}
        for rollout in rollouts:
            eventually(lambda rollout=rollout: behind(rollout) == {0})
            assert served(rollout.plan, [1, 2]) == "1"
        assert errors(members.update(3)) == []


def test_a_rollout_that_dies_while_an_update_waits_for_it_is_named_by_the_result(rendezvous: Any) -> None:
    with Processes(rendezvous, [0, 1], [2, 3], [4, 5]) as (trainer, first, second):
        handle = sf.sync(params_of(1, [0, 1]), trainer.plan, wait=False)
        eventually(lambda: behind(second) == {1})
        second.world.close()
        with pytest.raises(sf.RankLost, match=r"rank 4 \(process 'process \[4, 5\]'\) left"):
            handle.result(PATIENCE_SECS)
        assert served(first.plan, [1]) == "empty"


def test_an_update_that_fails_half_way_counts_and_leaves_a_gap_in_the_versions(rendezvous: Any) -> None:
    class Broken(Exception):
        pass

    def progress(_: int) -> None:
        raise Broken

    members = Processes(rendezvous, [0, 1], [2, 3, 4, 5])
    with members as (trainer, rollout):
        assert errors(members.update(1)) == []
        handle = sf.sync(params_of(2, [0, 1]), trainer.plan, wait=False)
        assert errors(together(lambda: rollout.update(2, progress=progress))) == ["Broken"]
        with pytest.raises(sf.TransferError, match="rank 2 failed: Broken"):
            handle.result(PATIENCE_SECS)
        assert behind(trainer) == behind(rollout) == {1}
        assert set(trainer.plan.version.values()) == set(rollout.plan.version.values()) == {1}
        assert check_update(members.all, 3) == 3
        assert behind(trainer) == behind(rollout) == {0}


def test_a_replacement_is_seen_to_hold_nothing(rendezvous: Any) -> None:
    members = Processes(rendezvous, [0, 1], [2, 3], [4, 5])
    with members as (trainer, first, second):
        for seed in (1, 2):
            assert errors(members.update(seed)) == []
        second.world.close()
        members.all[2] = Process(rendezvous, [4, 5])
        eventually(lambda: dict(trainer.plan.version) == {"rollout/0": 2, "rollout/1": 0})
        eventually(lambda: dict(first.plan.staleness) == {"rollout/0": 0, "rollout/1": 2})
        assert served(members.all[2].plan, [1, 2]) == "empty"
        assert check_update(members.all, 3) == 3


# Who leaves while an update waits


def test_a_world_that_is_closed_ends_the_update_that_waits_in_it(rendezvous: Any) -> None:
    with Processes(rendezvous, [0, 1], [2, 3, 4, 5]) as (trainer, rollout):
        handle = sf.sync(params_of(1, [0, 1]), trainer.plan, wait=False)
        trainer.world.close()
        with pytest.raises(sf.WorldLost, match="closed"):
            handle.result(PATIENCE_SECS)
        assert served(rollout.plan, [1]) == "empty"


def test_a_world_takes_no_other_plan_while_an_update_waits_in_it(rendezvous: Any) -> None:
    with Processes(rendezvous, [0, 1], [2, 3, 4, 5]) as (trainer, rollout):
        handle = sf.sync(params_of(1, [0, 1]), trainer.plan, wait=False)
        with pytest.raises(sf.UpdateRefused, match="pending"):
            sf.register(trainer.plan, world=trainer.world, ranks=[0, 1])
        assert errors(together(lambda: rollout.update(1), lambda: handle.result(PATIENCE_SECS))) == []
        assert served(rollout.plan, [1]) == "1"


PROGRAM = """
import sys
import jax
import small_world
import shardfly_jax as sf
small_world.cut_small()
world = sf.connect(sys.argv[1], small_world.TOKEN, deadline_secs=30)
plan = sf.register(small_world.make_plan(), world=world, ranks=[0, 1])
handle = sf.sync(small_world.params_of(1, [0, 1]), plan, wait=False)
print("leaves", flush=True)
"""


def test_a_trainer_may_end_while_its_update_waits_and_is_missed_at_once(rendezvous: Any) -> None:
    with Processes(rendezvous, [2, 3], [4, 5]) as rollouts:
        errors_of: list[Any] = []
        waiting = threading.Thread(
            target=lambda: errors_of.extend(together(lambda: rollouts[0].update(1, wait_secs=PATIENCE_SECS)))
        )
        waiting.start()
        env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(__file__).parent)}
        done = subprocess.run(
            [sys.executable, "-P", "-c", PROGRAM, rendezvous.address],
            capture_output=True, text=True, timeout=120, env=env, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stdout, done.stderr) == (0, "leaves\n", "")
        waiting.join(PATIENCE_SECS)
        assert isinstance(errors_of[0], sf.RankLost)
        assert "rank 0" in str(errors_of[0])
