"""One side of the ways of `peers`, with PyTorch: `python -m benchmarks.peer_worker JOB FOLDER GPU GPU WAY ...`.

The first process holds the trainer's tensors and starts the second one, which holds the rollout's. Every way is a
function of a `Side`, which prepares what lasts (buffers, handles) and returns one update. All waits end: collectives
after `TIMEOUT`, messages likewise, and whoever started the first process kills both when it says nothing.
"""

from __future__ import annotations

import multiprocessing.connection
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import reduce_tensor

from benchmarks.buckets import Job, Part
from benchmarks.children import emit
from benchmarks.peer_side import TIMEOUT, Side

RUNS = 9
BLOCK = 128
FLOOR, LARGEST = 1e-4, 448.0
"""Of fp8 blocks (vLLM's `per_block_cast_to_fp8`)."""

Update = Callable[[], None]


# NCCL


def nccl_wire(side: Side) -> Update:
    """Only the bytes."""
    sizes = [pieces[-1].offset + pieces[-1].size for pieces in side.buckets]
    bucket = side.bucket()

    def update() -> None:
        for size in sizes:
            dist.broadcast(bucket[:size], 0)

    return update


def nccl_buckets(side: Side) -> Update:
    """Two buckets: while one is broadcast, the other one is packed or unpacked."""
    bucket = (side.bucket(), side.bucket())

    def send() -> None:
        under_way: list[Any] = [None, None]
        for k, pieces in enumerate(side.buckets):
            if under_way[k % 2] is not None:
                under_way[k % 2].wait()
            under_way[k % 2] = dist.broadcast(side.pack(bucket[k % 2], pieces), 0, async_op=True)
        for work in under_way:
            if work is not None:
                work.wait()

    def receive() -> None:
        def coming(k: int) -> Any:
            last = side.buckets[k][-1]
            return dist.broadcast(bucket[k % 2][: last.offset + last.size], 0, async_op=True)

        work = coming(0)
        for k, pieces in enumerate(side.buckets):
            following = coming(k + 1) if k + 1 < len(side.buckets) else None  # after the unpacking of bucket k - 1
            work.wait()
            side.unpack(bucket[k % 2], pieces)
            work = following

    return send if side.sends else receive


def nccl_tensors(side: Side) -> Update:
    """A broadcast for each tensor, in memory of its own on both sides; a request at a time is waited for and loaded."""
    requests: list[list[Part]] = [[]]
    for part in side.job.parts:
        if sum(other.nbytes for other in requests[-1]) + part.nbytes > side.job.bucket_nbytes and requests[-1]:
            requests.append([])
        requests[-1].append(part)

    def send() -> None:
        for request in requests:
            tensors, works = [], []
            for part in request:  # while one is under way, the next one is converted
                tensors.append(part.view(side.sources[part.source]).to(torch.bfloat16).contiguous())
                works.append(dist.broadcast(tensors[-1], 0, async_op=True))
            for work in works:
                work.wait()

    def receive() -> None:
        for request in requests:
            tensors = [torch.empty(part.nbytes // 2, dtype=torch.bfloat16, device=side.device) for part in request]
            for work in [dist.broadcast(tensor, 0, async_op=True) for tensor in tensors]:
                work.wait()
            for part, tensor in zip(request, tensors, strict=True):
                side.place(part).copy_(tensor)

    return send if side.sends else receive


def nccl_p2p(side: Side) -> Update:
    """Clones of everything, then one batch of sends, received in place."""

    def send() -> None:
        clones = [
            part.view(side.sources[part.source]).clone(memory_format=torch.contiguous_format).to(torch.bfloat16)
            for part in side.job.parts
        ]
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, clone, 1) for clone in clones]):
            work.wait()
        torch.cuda.synchronize(side.device)  # before the clones go

    def receive() -> None:
        places = [side.place(part) for part in side.job.parts]
        for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, place, 0) for place in places]):
            work.wait()

    return send if side.sends else receive


def nccl_buckets_fp8(side: Side) -> Update:
    """As `nccl_buckets`, then codes and scales of every target that is to be quantized."""
    update = nccl_buckets(side)
    if side.sends:
        return update
    for name in side.job.quantized:
        rows, columns = side.job.targets[name]
        side.codes[name] = torch.empty((rows, columns), dtype=torch.float8_e4m3fn, device=side.device)
        side.scales[name] = torch.empty((rows // BLOCK, columns // BLOCK), device=side.device)
    quantize = torch.compile(quantized, dynamic=False)

    def receive() -> None:
        update()
        for name in side.job.quantized:
            code, scale = quantize(side.targets[name])
            side.codes[name].copy_(code)
            side.scales[name].copy_(scale)

    return receive


def quantized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of a matrix in blocks of 128 x 128."""
    rows, columns = x.shape
    blocks = x.float().view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
    scale = blocks.abs().amax((1, 3), keepdim=True).clamp(min=FLOOR) / LARGEST
    code = (blocks * (1.0 / scale)).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return code.view(rows, columns), scale.view(rows // BLOCK, columns // BLOCK)


# CUDA IPC


def _share(side: Side, buckets: Sequence[torch.Tensor]) -> None:
    side.tell([reduce_tensor(bucket) for bucket in buckets])


def _shared(side: Side) -> list[torch.Tensor]:
    return [rebuild(*arguments) for rebuild, arguments in side.hear()]


def ipc_bucket(side: Side) -> Update:
    """One bucket that both sides see, handed over and back by messages."""
    if side.sends:
        bucket = side.bucket()
        _share(side, [bucket])

        def send() -> None:
            for pieces in side.buckets:
                side.pack(bucket, pieces)
                torch.cuda.synchronize(side.device)
                side.tell()
                side.hear()

        return send
    (theirs,) = _shared(side)

    def receive() -> None:
        for pieces in side.buckets:
            side.hear()
            side.unpack(theirs, pieces)
            torch.cuda.synchronize(side.device)
            side.tell()

    return receive


def ipc_pulled(side: Side) -> Update:
    """Two buckets on each side: one is pulled while the sender packs and the receiver unpacks the other one."""
    if side.sends:
        buckets = [side.bucket(), side.bucket()]
        _share(side, buckets)

        def send() -> None:
            for k, pieces in enumerate(side.buckets):
                side.pack(buckets[k % 2], pieces)
                torch.cuda.synchronize(side.device)
                if k:
                    side.hear()  # the one before has been pulled
                side.tell()
            side.hear()

        return send
    theirs = _shared(side)
    own = [side.bucket(), side.bucket()]
    pulling = torch.cuda.Stream(side.device)

    def receive() -> None:
        current = torch.cuda.current_stream(side.device)
        unpacked: list[torch.cuda.Event | None] = [None, None]
        for k, pieces in enumerate(side.buckets):
            side.hear()
            size = pieces[-1].offset + pieces[-1].size
            with torch.cuda.stream(pulling):
                if (event := unpacked[k % 2]) is not None:
                    pulling.wait_event(event)
                own[k % 2][:size].copy_(theirs[k % 2][:size], non_blocking=True)
                pulled = pulling.record_event()
            pulled.synchronize()
            side.tell()
            current.wait_event(pulled)
            side.unpack(own[k % 2], pieces)
            unpacked[k % 2] = current.record_event()

    return receive


def host_buckets(side: Side) -> Update:
    """All to pinned host memory; from there bucket by bucket to the receiver's GPU, which the sender's process shares
    with it."""
    if side.sends:
        own = side.bucket()
        host = [side.bucket(torch.device("cpu"), pin_memory=True) for _ in side.buckets]
        there = torch.device("cuda", side.other)
        with torch.cuda.device(there):
            buckets = [side.bucket(there), side.bucket(there)]
            copying = torch.cuda.Stream(there)
        _share(side, buckets)

        def send() -> None:
            for pieces, memory in zip(side.buckets, host, strict=True):
                used = side.pack(own, pieces)
                memory[: len(used)].copy_(used, non_blocking=True)
            torch.cuda.synchronize(side.device)
            for k, (pieces, memory) in enumerate(zip(side.buckets, host, strict=True)):
                if k >= 2:
                    side.hear()
                size = pieces[-1].offset + pieces[-1].size
                with torch.cuda.device(there), torch.cuda.stream(copying):
                    buckets[k % 2][:size].copy_(memory[:size], non_blocking=True)
                copying.synchronize()
                side.tell()
            for _ in range(min(2, len(side.buckets))):
                side.hear()

        return send
    theirs = _shared(side)

    def receive() -> None:
        for k, pieces in enumerate(side.buckets):
            side.hear()
            side.unpack(theirs[k % 2], pieces)
            torch.cuda.synchronize(side.device)
            side.tell()

    return receive


WAYS: dict[str, Callable[[Side], Update]] = {
    way.__name__: way
    for way in (nccl_wire, nccl_buckets, nccl_tensors, nccl_p2p, nccl_buckets_fp8, ipc_bucket, ipc_pulled, host_buckets)
} | {"ipc_bucket_colocated": ipc_bucket}


# The program


def measure(side: Side, way: str) -> dict[str, Any]:
    """One way: checked, then timed; the time is the later side's.

    Raises:
      RuntimeError: A target is not what it should be.
    """
    update = WAYS[way](side)
    side.poison()
    side.meet()
    update()
    torch.cuda.synchronize(side.device)
    side.tell(None if side.sends else check(side, way))
    wrong = side.hear()
    if side.sends and wrong:
        raise RuntimeError(f"{len(wrong)} targets differ, first {wrong[0]}")
    secs = []
    for _ in range(RUNS):
        side.meet()
        start = time.perf_counter()
        update()
        torch.cuda.synchronize(side.device)
        secs.append(time.perf_counter() - start)
    side.tell(secs)
    return {
        "way": way,
        "secs": [max(pair) for pair in zip(secs, side.hear(), strict=True)],
        "checked_nbytes": 0 if way == "nccl_wire" else side.job.nbytes,
    }


def check(side: Side, way: str) -> list[str]:
    """The receiver's targets that are wrong."""
    if way == "nccl_wire":
        return []
    wrong = side.differing()
    for name in side.job.quantized if way == "nccl_buckets_fp8" else ():
        # Triton's division is not rounded correctly, so a code may be its neighbour
        codes, scales = quantized(side.targets[name])
        off = (side.codes[name].view(torch.uint8).short() - codes.view(torch.uint8).short()).abs()
        if off.max() > 1 or off.float().mean() > 1e-3 or not torch.allclose(side.scales[name], scales, rtol=1e-6):
            wrong.append(f"codes of {name}")
    return wrong


def main(words: Sequence[str]) -> None:
    """Runs the ways of the command line; the sender starts the receiver, with the end of a socket before its words."""
    sends = words[0] != "receive"
    job_path, folder, sender, receiver, *ways = words if sends else words[2:]
    gpu, other = (int(sender), int(receiver)) if sends else (int(receiver), int(sender))
    torch.cuda.set_device(gpu)
    if sends:
        here, there = socket.socketpair()
        command = [sys.executable, "-m", "benchmarks.peer_worker", "receive", str(there.fileno()), *words]
        subprocess.Popen(command, stdout=sys.stderr, pass_fds=[there.fileno()])
        there.close()
        talk = multiprocessing.connection.Connection(here.detach())
    else:
        talk = multiprocessing.connection.Connection(int(words[1]))
    if gpu != other:
        store = f"file://{Path(folder, 'nccl')}"
        dist.init_process_group("nccl", store, TIMEOUT, world_size=2, rank=0 if sends else 1,
                                device_id=torch.device("cuda", gpu))  # fmt: skip
    side = Side(Job.read(Path(job_path)), sends, gpu, other, talk)
    for way in ways:
        try:
            row = measure(side, way)
        except Exception as error:
            traceback.print_exc()
            row = {"way": way, "error": f"{type(error).__name__}: {error}"}
        if sends:
            emit(row)
        if "error" in row:
            break
        side.codes.clear()
        side.scales.clear()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main(sys.argv[1:])
