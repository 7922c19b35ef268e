"""The process that serves the rendezvous is stopped for longer than silence is borne, and goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("zmq", reason="needs pyzmq (the zmq extra)")

from small_world import TOKEN, make_plan, params_of, served
from threaded_world import eventually, together

import shardfly_jax as sf
from shardfly_jax.worlds.serving import Serving

LOST_SECS = 1.0
TRAINER = f"""
import sys
import shardfly_jax as sf
from small_world import TOKEN, make_plan, params_of
world = sf.connect("tcp://127.0.0.1:0", TOKEN, serve=True, lost_secs={LOST_SECS}, deadline_secs=30)
plan = sf.register(make_plan(), world=world, ranks=[0, 1])
print(world.address, flush=True)
for seed in (1, 2):
    sys.stdin.readline()
    sf.sync(params_of(seed, [0, 1]), plan)
    print(max(plan.version.values()), flush=True)
"""


def test_a_trainer_that_serves_and_was_stopped_goes_on_and_the_others_connect_anew() -> None:
    """It took its own silence for that of its rendezvous, and the rendezvous for its."""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(
        [sys.executable, "-P", "-c", TRAINER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    ) as trainer:
        assert trainer.stdin is not None
        assert trainer.stdout is not None
        try:
            address = trainer.stdout.readline().strip()
            for seed in (1, 2):
                with sf.connect(address, TOKEN, listen="tcp://127.0.0.1:0") as world:
                    plan = sf.register(make_plan(), world=world, ranks=[2, 3, 4, 5])
                    trainer.stdin.write("go\n")
                    trainer.stdin.flush()
                    sf.receive(plan, wait_secs=20)
                    assert served(plan, [seed]) == str(seed)
                    assert trainer.stdout.readline() == f"{seed}\n", "numbers go on, as the rendezvous does"
                    if seed == 1:
                        trainer.send_signal(signal.SIGSTOP)
                        before = time.monotonic()
                        (error,) = together(lambda p=plan: sf.receive(p, wait_secs=20))
                        assert isinstance(error, sf.WorldLost)
                        assert "nothing was heard of the rendezvous at" in str(error)
                        eventually(lambda since=before: time.monotonic() > since + 2 * LOST_SECS)
                        trainer.send_signal(signal.SIGCONT)
            assert trainer.wait(60) == 0
        finally:
            trainer.kill()


def test_a_process_whose_own_rendezvous_is_silent_hears_that_it_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    with sf.connect("tcp://127.0.0.1:0", TOKEN, serve=True, lost_secs=0.3) as world:
        plan = sf.register(make_plan(), world=world, ranks=[0, 1])
        monkeypatch.setattr(Serving, "_beat", lambda serving, now: None)
        eventually(lambda: world.link.lost is not None)
        with pytest.raises(sf.WorldLost) as caught:
            sf.sync(params_of(1, [0, 1]), plan)
    assert "nothing was heard of its own rendezvous at tcp://127.0.0.1:" in str(caught.value)
    assert "The rendezvous was this process' own, so all others have to do that too." in str(caught.value)
