"""A small plan for several processes, its weights, and a worker process that holds some of its ranks.

Trainers are ranks 0 and 1; rollout replica 0 has ranks 2 and 3, replica 1 has ranks 4 and 5. Tensors are cut into many
small chunks, so that every rank sends, receives and forwards some.

As a program (see `PROGRAM`) it reads one JSON command per line and answers each with one JSON line. A command may ask
for a fault: at the n-th time that the process gets to some point, it is killed or stopped, or a message is dropped or
doubled.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec as P

import shardfly_jax as sf
from shardfly_jax.executors import host
from shardfly_jax.executors.memory import Shard, fresh_handle, host_bytes
from shardfly_jax.sharding import routing
from shardfly_jax.sharding.evaluate import evaluate
from shardfly_jax.sharding.moves import View
from shardfly_jax.worlds import attempt, link

TRAINER = AbstractMesh((2,), ("fsdp",))
LAYERS = 3
PROGRAM = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCONT})  # in every thread: who was stopped waits for it
import small_world
small_world.main()
"""
HOST_GPU = "SHARDFLY_TESTS_HOST_GPU"
"""Set in the environment of a worker process that is to take its CPU for a GPU."""
TOKEN = "a token of the tests"
RANKS = {"t0": [0], "t1": [1], "r0": [2], "r1": [3], "r2": [4, 5]}
"""Ranks of each process of the fault tests."""


def cut_small() -> None:
    """Makes chunks and bands so small that tiny tensors have several."""
    host.CHUNK_NBYTES = 200
    routing.BAND_NBYTES = 400
    routing.SMALLEST_BAND_NBYTES = 100


def like(mesh: AbstractMesh, shape: tuple[int, ...], dtype: str, *spec: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def target_of(replicas: int, tp: int = 2) -> dict[str, Any]:
    """What rollouts of some replicas of `tp` ranks hold."""
    rollout = AbstractMesh((replicas, tp), ("replica", "tp"))
    target: dict[str, Any] = {"norm": like(rollout, (12,), "float32")}
    for i in range(LAYERS):
        target[f"h.{i}.wt"] = like(rollout, (12, 16), "bfloat16", "tp")
        target[f"h.{i}.w2"] = like(rollout, (16, 14), "float32", None, "tp")
    return target


def make_plan(scale: float = 1.0, replicas: int = 2, tp: int = 2) -> sf.Plan:
    """The plan; another `scale`, number of replicas or `tp` makes another one."""
    source: dict[str, Any] = {"norm": like(TRAINER, (12,), "float32")}
    source.update({f"h.{i}.w": like(TRAINER, (16, 12), "float32", "fsdp") for i in range(LAYERS)})
    mapping = {
        "norm": sf.src("norm").scale(scale),
        "h.{i}.wt": sf.src("h.{i}.w").rearrange("a b -> b a"),
        "h.{i}.w2": sf.src("h.{i}.w").pad([(0, 0), (0, 2)], 7.0),
    }
    return sf.make_plan(source, target_of(replicas, tp), sf.Mapping(mapping), allow_cast=("*",))


def weights(seed: int) -> dict[str, np.ndarray]:
    """Whole sources of an update."""
    rng = np.random.default_rng(seed)
    shapes = {"norm": (12,)} | {f"h.{i}.w": (16, 12) for i in range(LAYERS)}
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def meaning(seed: int, plan: sf.Plan) -> dict[tuple[int, int], np.ndarray]:
    """Whole targets of an update by (family, tensor): in plain NumPy, or, where they are quantized, as stated."""
    whole = weights(seed)
    out = {}
    for index in plan.target_families:
        family = plan.families[index]
        for k, name in enumerate(family.names):
            if name == "norm":
                value = whole["norm"]
            elif not name.endswith(("wt", "w2")):
                assert family.expr is not None
                stated, cuts = family.expr.astype(family.layout.dtype), family.cuts
                value = evaluate(stated, lambda name, i: whole[name.format(i=i)], family.first + k, cuts)
            else:
                x = whole[name.rsplit(".", 1)[0] + ".w"]
                value = (
                    x.T.astype("bfloat16") if name.endswith("wt") else np.pad(x, [(0, 0), (0, 2)], constant_values=7)
                )
            out[index, k] = value
    return out


def params_of(seed: int, ranks: list[int], spoiled: bool = False) -> dict[str, Any]:
    """What the trainer ranks of one process hold, rank by rank; where it is spoiled, one value of rank 1 is NaN."""
    whole = weights(seed)
    whole["h.1.w"][9, 3] = np.nan if spoiled else whole["h.1.w"][9, 3]
    devices = jax.local_devices()
    parts = {name: [x, x] if name == "norm" else [x[:8], x[8:]] for name, x in whole.items()}
    return {
        name: {r: jax.device_put(np.array(part[r]), devices[r % len(devices)]) for r in ranks}
        for name, part in parts.items()
    }


def bytes_of(shard: Shard) -> np.ndarray:
    """What a buffer holds."""
    if shard.device.platform == "cpu":
        return host_bytes(shard.address, shard.nbytes)
    return np.asarray(fresh_handle(shard.array)).reshape(-1).view(np.uint8)


def holds(plan: sf.Plan, seed: int) -> bool:
    """Whether every buffer of this process has every byte of an update."""
    whole = meaning(seed, plan)
    for (family, tensor, rank), shard in plan.registered().buffers.items():
        layout = plan.families[family].layout
        want = whole[family, tensor][tuple(slice(lo, hi) for lo, hi in layout.box(rank))]
        flat = bytes_of(shard).view(want.dtype)
        have = View(0, layout.local_shape(rank), layout.local_strides(rank)).of(flat)
        if np.ascontiguousarray(have).tobytes() != np.ascontiguousarray(want).tobytes():
            return False
    return True


def served(plan: sf.Plan, seeds: list[int]) -> str:
    """What the rollout ranks of this process serve: a seed, `poisoned`, `empty` or `mixture`."""
    try:
        sf.params(plan)
    except sf.Poisoned as error:
        return "empty" if "never been filled" in str(error) else "poisoned"
    except sf.NotRegistered:
        return "no rollout"
    return next((str(seed) for seed in seeds if holds(plan, seed)), "mixture")


class Faults:
    """What goes wrong in this process, and when. Sits where messages and chunks leave and arrive.

    Chunks for rollouts pass `send` and `take`, those that trainers send each other `tell` and `told`. On GPUs there are
    `launch` and `launched` instead, before and after the kernels of *send* and *finish* are, and `offer inboxes`,
    before others can map them.
    """

    def __init__(self) -> None:
        self.point, self.left, self.action = "", 0, ""

    def plan(self, point: str, n: int, action: str) -> None:
        """The n-th time, counted from 1, that the process gets to a point, it does something."""
        self.point, self.left, self.action = point, n, action

    def at(self, point: str) -> int:
        """How often the message at this point is to be handled: once, but for faults."""
        if point != self.point:
            return 1
        self.left -= 1
        if self.left != 0:
            return 1
        if self.action in ("kill", "stop"):  # and not a step further, whichever thread the signal reaches first
            os.kill(os.getpid(), signal.SIGKILL if self.action == "kill" else signal.SIGSTOP)
            signal.sigwait({signal.SIGCONT})
        return {"drop": 0, "double": 2}.get(self.action, 1)

    def install(self) -> None:
        """Wraps the library's ways in and out."""
        link_send, link_receive = link.Link._send, link.Link._receive
        chunk_send, chunk_take = attempt.Outgoing.send, attempt.Incoming.take

        def send(self: Any, header: dict[str, Any]) -> None:
            number = self._sent
            for _ in range(times := faults.at(f"say {header['op']}")):
                self._sent = number
                link_send(self, header)
            self._sent = number + 1 if not times else self._sent

        def receive(self: Any, frames: list[bytes]) -> None:
            for _ in range(faults.at(f"hear {json.loads(frames[1])['op']}")):
                link_receive(self, frames)

        def send_chunk(self: Any, endpoint: str, header: dict[str, Any], payload: Any) -> None:
            for k in range(faults.at("tell" if header["target"] < 2 else "send")):
                while k and not self.has_room(endpoint):
                    self.socket(endpoint).poll(100, 2)  # zmq.POLLOUT
                chunk_send(self, endpoint, header, payload)

        def take(self: Any) -> Any:
            message = chunk_take(self)
            if message is None:
                return None
            return message if faults.at("told" if message[0]["target"] < 2 else "take") else chunk_take(self)

        faults = self
        link.Link._send, link.Link._receive = send, receive  # type: ignore[method-assign]
        attempt.Outgoing.send, attempt.Incoming.take = send_chunk, take  # type: ignore[method-assign]
        if jax.default_backend() == "gpu" or HOST_GPU in os.environ:
            from shardfly_jax.worlds.gpu_part import GpuPart
            from shardfly_jax.worlds.gpu_run import GpuRun

            gpu_launch, gpu_offer = GpuRun._launch, GpuPart._offer

            def launch(self: Any) -> None:
                faults.at("launch")
                gpu_launch(self)
                faults.at("launched")

            def offer(self: Any, what: str, addresses: Any) -> Any:
                faults.at(f"offer {what.split()[0]}")
                return gpu_offer(self, what, addresses)

            GpuRun._launch, GpuPart._offer = launch, offer  # type: ignore[method-assign]


class Worker:
    """The commands of a worker process."""

    def __init__(self) -> None:
        self.faults = Faults()
        self.faults.install()
        self.plan: sf.Plan = make_plan()
        self.world: Any = None
        self.ranks: list[int] = []

    def join(
        self, address: str, ranks: list[int], replicas: int = 2, tp: int = 2, quantized: bool = False
    ) -> dict[str, Any]:
        from quantized_world import make_quantized_plan  # which imports this module

        if self.world is not None:
            self.world.close()
        self.ranks = ranks
        self.plan = (make_quantized_plan if quantized else make_plan)(replicas=replicas, tp=tp)
        listen = "tcp://127.0.0.1:0" if quantized or max(ranks) >= 2 else None
        self.world = sf.connect(address, TOKEN, listen=listen, name="-".join(map(str, ranks)), deadline_secs=30)
        self.plan = sf.register(self.plan, world=self.world, ranks=ranks)
        return {}

    def rescale(self, ranks: list[int], replicas: int, tp: int = 2) -> dict[str, Any]:
        self.faults.plan("", 0, "")
        where = self._addresses()
        self.plan = sf.rescale(self.plan, target_of(replicas, tp), ranks=ranks)
        self.ranks = ranks
        done = self.plan.rescaled
        assert done is not None
        assert done.kept == len(where & self._addresses())
        return {"kept": done.kept, "allocated": done.allocated, "serving": done.serving, "joined": done.joined}

    def _addresses(self) -> set[int]:
        return {shard.address for shard in self.plan.registered().buffers.values()}

    def update(self, seed: int, fault: tuple[str, int, str] | None = None, spoiled: bool = False) -> dict[str, Any]:
        self.faults.plan(*(fault or ("", 0, "")))
        trainers = [rank for rank in self.ranks if rank < 2]
        if trainers:
            sf.sync(params_of(seed, trainers, spoiled), self.plan)
        else:
            sf.receive(self.plan, wait_secs=6)
        return {"versions": dict(self.plan.version)}

    def serves(self, seeds: list[int]) -> dict[str, Any]:
        return {"serves": served(self.plan, seeds)}

    def close(self) -> dict[str, Any]:
        if self.world is not None:
            self.world.close()
        return {}


def main() -> None:
    cut_small()
    if HOST_GPU in os.environ:
        import host_gpu

        host_gpu.install()
    worker = Worker()
    commands: Mapping[str, Callable[..., dict[str, Any]]] = {
        name: getattr(worker, name) for name in ("join", "rescale", "update", "serves", "close")
    }
    print(json.dumps({"outcome": "started"}), flush=True)
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            answer = {"outcome": "ok", **commands[name](**arguments)}
        except sf.ShardflyError as error:
            answer = {"outcome": type(error).__name__, "message": str(error)}
        print(json.dumps(answer), flush=True)
