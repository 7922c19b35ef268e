"""A process whose rollout is a module of transformers: its parameters are the registered buffers, its forward a graph.

As a program (`python -m torch_rollout ADDRESS TOKEN`, with the model's name and tokens on the first line of its input)
it reads one JSON command per line and answers each with a line.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
from checkpoints import QWEN3
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec as P
from test_transformers import config, implementations, rollout

import shardfly_jax as sf
from shardfly_jax.layout import leaf_names

DTYPE = "bfloat16"
SLEEP_CYCLES = 200_000_000
"""Of the GPU, about a tenth of a second: whoever does not wait for the stream comes before it is over."""


def plan_of(module: Any, trainer: Any) -> sf.Plan:
    """From a trainer's side to a module's parameters."""
    served = rollout(module, QWEN3, NamedSharding(AbstractMesh((1,), "x"), P()))
    return sf.make_plan(trainer.params, served.params, sf.engines.route(trainer, served))


class Forward:
    """A module's logits, computed step by step or by replaying a graph that was captured once.

    Args:
      torch: The library.
      module: On a GPU.
      tokens: int64 [batch, length].
    """

    def __init__(self, torch: Any, module: Any, tokens: np.ndarray):
        self.torch, self.module = torch, module
        self.tokens = torch.from_numpy(tokens).cuda()
        length = tokens.shape[1]
        self.positions = torch.arange(length, device="cuda")[None]
        lowest = torch.finfo(getattr(torch, DTYPE)).min
        ahead = torch.full((length, length), lowest, dtype=getattr(torch, DTYPE), device="cuda").triu(1)
        self.mask = {"full_attention": ahead[None, None]}  # given, since making one asks the GPU for values
        self.graph: Any = None

    def logits(self) -> Any:
        """On the current stream."""
        with self.torch.no_grad():
            return self.module(
                self.tokens, attention_mask=self.mask, position_ids=self.positions, use_cache=False
            ).logits

    def capture(self, stream: Any) -> None:
        """Captures the graph."""
        with self.torch.cuda.stream(stream):
            for _ in range(3):
                self.logits()
        stream.synchronize()
        self.graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(self.graph, stream=stream):
            self.out = self.logits()

    def replayed(self) -> Any:
        """On the current stream."""
        self.graph.replay()
        return self.out.clone()


def numbers(logits: Any) -> list[Any]:
    """Every bit of bfloat16 logits, in JSON."""
    return list(logits.float().cpu().numpy().tolist())


def main() -> None:
    import torch
    import transformers

    address, token = sys.argv[1:]
    hugging = SimpleNamespace(torch=torch, transformers=transformers)
    module = transformers.AutoModelForCausalLM.from_config(
        config(hugging, QWEN3), dtype=getattr(torch, DTYPE), **implementations(QWEN3)
    ).eval()
    trainer = sf.engines.tunix.trainer(QWEN3, AbstractMesh((1, 1), ("fsdp", "tp")), dtype=DTYPE)
    plan = plan_of(module, trainer)
    world = sf.connect(address, token, name="torch", deadline_secs=60)
    plan = sf.register(plan, world=world, ranks=plan.replicas[0].ranks)
    tokens = np.array(json.loads(sys.stdin.readline()))
    stream = torch.cuda.Stream()
    forward: Forward | None = None
    print(json.dumps("registered"), flush=True)
    for line in sys.stdin:
        how = json.loads(line)
        if forward is None:  # the module's parameters become the buffers
            out = sf.receive(plan, stream=stream)
            names, leaves, _ = leaf_names(out)  # each is of rank 0, the only one
            shared = {
                name.removesuffix(".0"): torch.from_dlpack(leaf) for name, leaf in zip(names, leaves, strict=True)
            }
            module.load_state_dict(shared, assign=True)
            module.cuda()
            forward = Forward(torch, module, tokens)
            forward.capture(stream)
            with torch.cuda.stream(stream):
                answer = {"after": numbers(forward.logits())}
        else:
            run = forward.replayed if how == "graph" else forward.logits
            with torch.cuda.stream(stream):
                torch.cuda._sleep(SLEEP_CYCLES)
                before = run()
                sf.receive(plan, stream=stream)
                after = run()  # right behind
                answer = {"before": numbers(before), "after": numbers(after)}  # on this stream too: no other waits
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
