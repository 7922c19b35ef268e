"""A PyTorch process as rollout on the trainer's GPU: logits right behind an update, also from a captured CUDA graph."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

pytest.importorskip("zmq", reason="needs pyzmq (the zmq extra)")
pytest.importorskip("cuda.bindings", reason="needs cuda-bindings (the gpu extra)")

from checkpoints import QWEN3, into_tunix
from engine_checks import placed
from jax.sharding import Mesh
from test_transformers import config, hugging as hugging, implementations, loaded, random_checkpoint
from torch_rollout import DTYPE, Forward, numbers, plan_of

import shardfly_jax as sf

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]  # torch's and transformers' own
PATIENCE_SECS = 90.0
TOKEN = "a token of the tests"


class Rollout:
    """The other process."""

    def __init__(self, address: str, tokens: np.ndarray):
        path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        env = os.environ | {"PYTHONPATH": path, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "JAX_PLATFORMS": "cuda,cpu"}
        self.popen = subprocess.Popen(
            [sys.executable, "-P", "-W", "ignore", "-m", "torch_rollout", address, TOKEN],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True,
        )  # fmt: skip
        self.ask(tokens.tolist())
        assert self.answer() == "registered"

    def ask(self, what: Any) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(json.dumps(what) + "\n")
        self.popen.stdin.flush()

    def answer(self) -> Any:
        assert self.popen.stdout is not None
        watch = threading.Timer(PATIENCE_SECS, self.popen.kill)
        watch.start()
        line = self.popen.stdout.readline()
        watch.cancel()
        assert line, "the rollout died or was silent"
        return json.loads(line)

    def end(self) -> None:
        self.popen.kill()
        self.popen.wait()
        for pipe in (self.popen.stdin, self.popen.stdout):
            assert pipe is not None
            pipe.close()


def test_a_torch_process_serves_every_update_right_behind_it_also_from_a_captured_graph(
    hugging: SimpleNamespace, tmp_path: Path, rng: np.random.Generator
) -> None:
    torch, gpu = hugging.torch, jax.local_devices(backend="gpu")[0]
    one = Mesh(np.array([[gpu]]), ("fsdp", "tp"))
    side = sf.engines.tunix.trainer(QWEN3, one, dtype=DTYPE)
    module = hugging.transformers.AutoModelForCausalLM.from_config(
        config(hugging, QWEN3), dtype=getattr(torch, DTYPE), **implementations(QWEN3)
    )
    plan = plan_of(module, side)
    tokens = rng.integers(QWEN3.vocab, size=(2, 9))
    with sf.connect("tcp://127.0.0.1:0", TOKEN, serve=True, name="trainer", deadline_secs=60) as world:
        plan = sf.register(plan, world=world, ranks=range(plan.source_ranks))
        rollout = Rollout(world.address, tokens)
        try:
            before = None
            for step, how in enumerate(["first", "graph", "module", "graph", "module"]):
                ck = random_checkpoint(QWEN3, DTYPE, rng)
                rollout.ask(how)
                sf.sync(placed(side, into_tunix(QWEN3, ck)), plan)
                answer = rollout.answer()
                ordinary = loaded(hugging, QWEN3, ck, tmp_path / str(step), "cuda:0")
                want = numbers(Forward(torch, ordinary, tokens).logits())
                assert np.isfinite(want).all()
                is_old = answer["after"] == before
                assert answer["after"] == want, f"step {step}, {how}: {'the old weights' if is_old else 'a mixture'}"
                assert answer.get("before", before) == before, "what was queued before the update saw the new weights"
                assert want != before
                before = want
        finally:
            rollout.end()
