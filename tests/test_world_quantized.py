"""Quantized plans over several processes: only codes, scales and maxima travel, and every bit is right."""

from __future__ import annotations

import logging
import math
from typing import Any

import numpy as np
import pytest
from checks import blocks_by_hand, poison_buffers, registered_bytes

pytest.importorskip("zmq", reason="needs pyzmq (the zmq extra)")

import zmq
from quantized_world import SCALES, make_quantized_plan, quantized_target_of
from small_world import LAYERS, TOKEN, holds, params_of, served, weights
from threaded_world import Process, Processes, errors, together

import shardfly_jax as sf
from shardfly_jax.worlds.attempt import Run
from shardfly_jax.worlds.steps import Step
from shardfly_jax.worlds.wire import Seal

pytestmark = pytest.mark.usefixtures("small_chunks")

SPREADS = [
    [[0], [1], [2, 3], [4, 5]],
    [[0], [1], [2], [3], [4], [5]],
    [[0, 1], [2, 3, 4, 5]],
    [[0, 2], [1, 5], [3, 4]],
    [[0, 3, 4], [1, 2, 5]],
]


def quantized(rendezvous: Any, *spread: list[int]) -> Processes:
    return Processes(rendezvous, *spread, make=make_quantized_plan)


@pytest.mark.parametrize("spread", SPREADS, ids=str)
def test_every_code_and_scale_is_right_however_ranks_are_spread(rendezvous: Any, spread: list[list[int]]) -> None:
    with (members := quantized(rendezvous, *spread)) as processes:
        for seed in (1, 2):
            for process in processes:
                poison_buffers(process.plan)
            assert errors(results := members.update(seed)) == [], results
            for process in processes:
                assert max(process.ranks) < 2 or holds(process.plan, seed), process.ranks


def test_bits_are_those_of_the_portable_executor_in_one_process_and_of_numpy(rendezvous: Any) -> None:
    plan = sf.register(make_quantized_plan(), executor="portable")
    poison_buffers(plan)
    params = params_of(3, [0, 1])
    sf.sync(params, plan)
    assert sf.verify(params, plan) == plan.target_nbytes
    with (members := quantized(rendezvous, [0], [1], [2, 3], [4, 5])) as processes:
        assert errors(members.update(3)) == []
        have: dict[Any, bytes] = {}
        for process in processes:
            have |= registered_bytes(process.plan)
        assert have == registered_bytes(plan)
        out = sf.params(processes[2].plan)
    codes, scales = blocks_by_hand(weights(3)["h.2.w"].T, 2, 4)
    for rank in (0, 1):
        half, groups = slice(6 * rank, 6 * rank + 6), slice(3 * rank, 3 * rank + 3)
        assert np.asarray(out["h.2.block"][rank]).tobytes() == codes[half].tobytes()
        assert np.asarray(out["h.2.block_scale"][rank]).tobytes() == scales[groups].tobytes()


def test_only_codes_scales_and_shared_maxima_travel(rendezvous: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    travelled: list[Step] = []
    queue = Run._queue

    def note(self: Run, step: Step) -> None:
        if step.pair[1] not in self._held:
            travelled.append(step)
        queue(self, step)

    monkeypatch.setattr(Run, "_queue", note)
    with (members := quantized(rendezvous, *SPREADS[1])) as processes:
        plan = processes[0].plan
        assert errors(members.update(1)) == []
    shared = LAYERS * sum(math.prod(shape) for name, shape in SCALES.items() if name != "block")
    assert plan.staging_nbytes == 4 * shared, "a slot for each block that lies on both trainers"
    among = [step for step in travelled if step.pair[1] < 2]
    assert sum(step.nbytes for step in among) == 2 * 4 * shared, "to the slot's owner, and what it found back"
    down = [step for step in travelled if step.pair[0] < 2 <= step.pair[1] and not step.merges]
    assert sum(step.nbytes for step in down) == plan.egress_nbytes, "each code and scale leaves the trainers once"


def test_progress_counts_what_is_written_to_buffers_and_no_maxima(rendezvous: Any) -> None:
    members = quantized(rendezvous, [0, 2], [1, 3, 4, 5])
    with members as (first, second):
        counted: list[list[int]] = [[], []]
        results = together(
            *(lambda p=p, c=c: p.update(1, progress=c.append) for p, c in zip((first, second), counted, strict=True))
        )
        assert errors(results) == []
        for process, found in zip((first, second), counted, strict=True):
            assert sum(found) == sum(shard.nbytes for shard in process.plan.registered().buffers.values())


def test_values_that_are_not_finite_are_refused_everywhere_by_name_and_healed(rendezvous: Any) -> None:
    with (members := quantized(rendezvous, *SPREADS[0])) as processes:
        assert errors(members.update(1)) == []
        results = together(*(lambda p=p: p.update(2, spoiled=True) for p in processes))
        assert errors(results) == ["NotFinite"] * len(processes), results
        for result in results:
            assert "target 'h.1." in str(result)
            assert "hold NaN or infinity" in str(result)
        assert [served(p.plan, [1, 2]) for p in processes[2:]] == ["poisoned", "poisoned"]
        assert errors(members.update(3)) == []
        assert [served(p.plan, [3]) for p in processes[2:]] == ["3", "3"]


def test_a_trainer_that_shares_blocks_with_another_must_listen(rendezvous: Any) -> None:
    with (
        sf.connect(rendezvous.address, TOKEN) as world,
        pytest.raises(sf.RegistrationError, match=r"the ranks \[1\] receive the maxima of blocks .* listens nowhere"),
    ):
        sf.register(make_quantized_plan(), world=world, ranks=[1])
    with sf.connect(rendezvous.address, TOKEN) as world:  # both: what they share stays in the process
        sf.register(make_quantized_plan(), world=world, ranks=[0, 1])


def test_maxima_of_another_attempt_are_never_counted(rendezvous: Any, caplog: pytest.LogCaptureFixture) -> None:
    """What a trainer that was slow in a failed attempt would send, larger than any maximum."""
    with (members := quantized(rendezvous, *SPREADS[0])) as processes, zmq.Context() as context:
        assert errors(members.update(1)) == []
        part = processes[0].plan.session.part
        step = next(step for step in part._steps.incoming if step.pair == (1, 0))
        late = {"op": "chunk", "session": part.world.link.session, "epoch": 1, "source": 1, "target": 0,
                "number": step.number}  # fmt: skip
        with context.socket(zmq.PUSH) as stranger, caplog.at_level(logging.WARNING, "shardfly_jax.worlds"):
            stranger.setsockopt(zmq.LINGER, 1000)
            stranger.connect(part._incoming.endpoint)
            stranger.send_multipart(Seal(TOKEN).close(late, b"\x7e" * step.nbytes))
            for seed in (2, 3):
                assert errors(members.update(seed)) == []
                assert [served(p.plan, [seed]) for p in processes[2:]] == [str(seed)] * 2
        assert "dropped a chunk of attempt 1" in caplog.text


def test_a_quantized_pool_is_rescaled_and_a_lost_trainer_replaced(rendezvous: Any) -> None:
    with (members := quantized(rendezvous, *SPREADS[0])) as processes:
        assert errors(members.update(1)) == []
        processes[1].world.close()
        processes[1] = Process(rendezvous, [1], make_quantized_plan())
        for process, ranks in zip(processes, ([0], [1], [2], [3]), strict=True):
            process.ranks = ranks
            process.plan = sf.rescale(process.plan, quantized_target_of(2, tp=1), ranks=ranks)
        assert errors(members.update(2)) == []
        assert [served(p.plan, [1, 2]) for p in processes[2:]] == ["2", "2"]
        assert set(processes[0].plan.version.values()) == {2}
