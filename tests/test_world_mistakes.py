"""What one process does wrong before it has entered an update: the others hear it, and pair no two training steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("zmq", reason="needs pyzmq (the zmq extra)")

import jax
import numpy as np
from small_world import make_plan, params_of, served
from threaded_world import Process, Processes, errors, together

import shardfly_jax as sf

pytestmark = pytest.mark.usefixtures("small_chunks")

MISTAKES: dict[str, tuple[int, str, str, Callable[[Process], Any]]] = {
    "a wait that is none": (
        1, "ParamsMismatch", "wait_secs is -1", lambda p: sf.sync(params_of(2, p.ranks), p.plan, wait_secs=-1),
    ),
    "progress that is no function": (
        1, "ParamsMismatch", "progress is a int",
        lambda p: sf.sync(params_of(2, p.ranks), p.plan, wait=False, progress=5),  # type: ignore[arg-type]
    ),
    "a trainer that receives": (0, "NotRegistered", "hold rollout ranks only", lambda p: sf.receive(p.plan)),
    "a rollout that syncs": (2, "NotRegistered", "no trainer ranks", lambda p: sf.sync({}, p.plan)),
    "a rollout's progress": (
        3, "ParamsMismatch", "progress is a str", lambda p: sf.receive(p.plan, progress="x"),  # type: ignore[arg-type]
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", MISTAKES)
def test_a_call_that_is_wrong_in_one_process_ends_the_update_for_all(rendezvous: Any, what: str) -> None:
    """Two trainer processes: the other one's shards would else wait for this one's of the next step."""
    who, kind, words, call = MISTAKES[what]
    members = Processes(rendezvous, [0], [1], [2, 3], [4, 5])
    with members as processes:
        assert errors(members.update(1)) == []
        calls = [lambda p=process: p.update(2) for process in processes]
        calls[who] = lambda: call(processes[who])
        results = together(*calls)
        assert errors(results) == [kind if k == who else "UpdateRefused" for k in range(4)], results
        assert all(words in str(result) for result in results), results
        assert all("Every replica is as it was" in str(result) for k, result in enumerate(results) if k != who)
        assert [served(process.plan, [1]) for process in processes[2:]] == ["1", "1"]
        assert errors(members.update(3)) == []
        assert [served(process.plan, [3]) for process in processes[2:]] == ["3", "3"]


def test_buffers_are_keyed_by_rank_within_their_tree_and_others_are_told_with_these(rendezvous: Any) -> None:
    plan = make_plan()

    def owner(ranks: list[int], keys: list[int]) -> dict[str, dict[int, jax.Array]]:
        families = [plan.families[index] for index in plan.target_families]
        return {
            name: {
                key: jax.device_put(np.zeros(family.layout.buffer_shape(rank), family.layout.dtype))
                for rank, key in zip(ranks, keys, strict=True)
            }
            for family in families
            for name in family.names
        }

    for ranks, keys in (([4, 5], [4, 5]), ([4, 5], [0, 1]), ([2, 3], [2, 3])):
        right = [rank - 2 for rank in ranks]
        with pytest.raises(sf.RegistrationError) as caught:
            Process(rendezvous, ranks, plan, owner(ranks, keys))
        words = (
            f"this process has the ranks {right}, counted from 0 within 'rollout' (plan-wide {ranks}). Key its buffers"
        )
        assert f"'norm' has a buffer for rank {keys[0]}, but of its holders {words}" in str(caught.value)
    trainer, first = Process(rendezvous, [0, 1]), Process(rendezvous, [2, 3])
    second = Process(rendezvous, [4, 5], plan, owner([4, 5], [2, 3]))
    with trainer.world, first.world, second.world:
        results = together(*(lambda p=process: p.update(1) for process in (trainer, first, second)))
        assert [set(result["norm"]) for result in results[1:]] == [{0, 1}, {2, 3}]
        wrong = {name: {rank + 2: x for rank, x in of.items()} for name, of in params_of(2, [0, 1]).items()}
        with pytest.raises(sf.ParamsMismatch, match=r"is given for rank 2, but .* has the trainer ranks \[0, 1\]"):
            sf.sync(wrong, trainer.plan)
