"""What two GPUs' memories and the links between them give: `cudaMemcpyPeer` one way and both ways at once.

Run as a program (`python -m benchmarks.links NBYTES`) which starts no JAX, so that all memory is free.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.children import emit
from shardfly_jax.sharding.topology import preset

RUNS = 9
PATTERN = 0xA5


def check(result: tuple[Any, ...]) -> Any:
    """What a call of the CUDA runtime returns besides its error.

    Raises:
      RuntimeError: The error.
    """
    error, *rest = result
    if error.value:
        raise RuntimeError(str(error))
    return rest[0] if rest else None


def gpus() -> dict[str, Any]:
    """How many GPUs there are, and what the first is called."""
    from cuda.bindings import runtime

    count, name = check(runtime.cudaGetDeviceCount()), check(runtime.cudaGetDeviceProperties(0)).name
    return {"gpus": int(count), "gpu": name.decode().rstrip("\0") if isinstance(name, bytes) else str(name)}


def measure(nbytes: int, gpus: int) -> dict[str, Any]:
    """Times copies of `nbytes`.

    Returns:
      Seconds of each run: `within` GPU 0; `one_way` from GPU 0 to 1 and `one_way_back`; `both_ways` until both copies
      have ended. Without a second GPU only the first.
    """
    from cuda.bindings import runtime as cuda

    found: dict[str, Any] = {"nbytes": nbytes}
    used = range(min(gpus, 2))
    streams, sources, targets = {}, {}, {}
    for gpu in used:
        check(cuda.cudaSetDevice(gpu))
        for peer in used:
            if peer != gpu:
                check(cuda.cudaDeviceEnablePeerAccess(peer, 0))
        streams[gpu] = check(cuda.cudaStreamCreate())
        sources[gpu], targets[gpu] = check(cuda.cudaMalloc(nbytes)), check(cuda.cudaMalloc(nbytes))

    def copies(pairs: Sequence[tuple[int, int]]) -> Callable[[], None]:
        def run() -> None:
            for one, other in pairs:
                check(cuda.cudaSetDevice(one))
                if one == other:
                    kind = cuda.cudaMemcpyKind.cudaMemcpyDeviceToDevice
                    check(cuda.cudaMemcpyAsync(targets[one], sources[one], nbytes, kind, streams[one]))
                else:
                    check(cuda.cudaMemcpyPeerAsync(targets[other], other, sources[one], one, nbytes, streams[one]))
            for one, _ in pairs:
                check(cuda.cudaStreamSynchronize(streams[one]))

        return run

    def secs(pairs: Sequence[tuple[int, int]]) -> list[float]:
        run = copies(pairs)
        for gpu in used:
            check(cuda.cudaSetDevice(gpu))
            check(cuda.cudaMemset(sources[gpu], PATTERN ^ gpu, nbytes))
            check(cuda.cudaMemset(targets[gpu], 0, nbytes))
            check(cuda.cudaDeviceSynchronize())
        run()
        for one, other in pairs:
            end = np.zeros(4096, np.uint8)
            to_host = cuda.cudaMemcpyKind.cudaMemcpyDeviceToHost
            check(cuda.cudaMemcpy(end.ctypes.data, int(targets[other]) + nbytes - end.nbytes, end.nbytes, to_host))
            if not (end == PATTERN ^ one).all():
                raise RuntimeError(f"the copy from GPU {one} to GPU {other} did not bring its bytes")
        times = []
        for _ in range(RUNS):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        return times

    found["within"] = secs([(0, 0)])
    if gpus > 1:
        found |= {"one_way": secs([(0, 1)]), "one_way_back": secs([(1, 0)]), "both_ways": secs([(0, 1), (1, 0)])}
    return found


def rates(found: Mapping[str, Any]) -> dict[str, float]:
    """Bytes per second of the medians; `within` counts bytes read plus written, `both_ways` those of one way.

    Where the copies could not be measured, those of the topologies.
    """
    if "within" not in found:
        known = preset("h200")
        one, both = known.nvlink_rate, known.nvlink_both_ways_rate
        return {"within": 2 * known.memory_rate, "one_way": one, "both_ways": both}
    times = {name: statistics.median(found[name]) for name in ("within", "one_way", "both_ways") if name in found}
    return {name: found["nbytes"] * (2 if name == "within" else 1) / secs for name, secs in times.items()}


def bound_secs(needed: np.ndarray, touched: np.ndarray, rate: Mapping[str, float]) -> float:
    """The time that no update can beat: the busiest link or memory at the rates of copies.

    Args:
      needed: [gpus, gpus]; bytes that the column's GPU needs of what only the row's holds.
      touched: [gpus]; bytes read plus written in each GPU's memory.
      rate: From `rates`.
    """
    between = needed * (1 - np.eye(len(needed)))
    out, into = between.sum(1), between.sum(0)
    both, one = np.minimum(out, into), np.abs(out - into)
    links = float((both / rate["both_ways"] + one / rate["one_way"]).max()) if between.any() else 0.0
    return max(links, float(touched.max()) / rate["within"])


if __name__ == "__main__":
    found = gpus()
    emit(found)
    emit(measure(int(sys.argv[1]), found["gpus"]))
