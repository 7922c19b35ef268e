"""What a link really carries: the measured table of `measured.json`, as prices.

Three kinds of link: a GPU's memory (a copy within it), NVLink to the GPUs of its host, its NIC to other hosts. The
persistent kernel's stores are priced by the run that they write contiguously. A NIC is taken at its line rate, whatever
the runs: nothing here was measured over one.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import json
from typing import Any

import numpy as np

MEMORY, NVLINK, NIC = range(3)
"""Kinds of link."""
LINKS = ("memory", "NVLink", "NIC")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stores:
    """What a kernel's stores reach on the links of one GPU.

    Attributes:
      nvlink, memory: (run in bytes, bytes per second), ascending: rows of so many contiguous bytes.
      both_ways_rate: Over NVLink each way, while a GPU sends and receives alike.
      launch_secs: What an update costs beside its bytes within one GPU.
      launch_secs_between: The same where GPUs send to each other.
    """

    nvlink: tuple[tuple[int, float], ...]
    memory: tuple[tuple[int, float], ...]
    both_ways_rate: float
    launch_secs: float
    launch_secs_between: float

    def rate(self, link: int, run_nbytes: np.ndarray) -> np.ndarray:
        """Bytes per second of stores of these runs, one way; between measured runs linear in their logarithm.

        A run below the shortest measured one takes as long as that one.
        """
        runs, rates = np.array(self.memory if link == MEMORY else self.nvlink).T
        run = np.maximum(run_nbytes, 1)
        return np.interp(np.log2(run), np.log2(runs), rates) * np.minimum(run / runs[0], 1)

    def launches(self, link: np.ndarray) -> float:
        """Seconds of launches of an update that uses these kinds of link."""
        return self.launch_secs if (link == MEMORY).all() else self.launch_secs_between

    @property
    def nvlink_rate(self) -> float:
        """Of the longest runs, one way."""
        return self.nvlink[-1][1]


@functools.cache
def measured() -> dict[str, dict[str, Any]]:
    """The rows of `measured.json` by name; the keys beside `rows` are its date and software."""
    file = importlib.resources.files("shardfly_jax.sharding").joinpath("measured.json")
    return {row["name"]: row for row in json.loads(file.read_text(encoding="utf-8"))["rows"]}


@functools.cache
def measured_stores() -> Stores:
    """The persistent kernel's, on H200."""
    rows = measured()

    def table(link: str) -> tuple[tuple[int, float], ...]:
        return tuple((r["run_nbytes"], r["rate"]) for r in rows.values() if r.get("link") == link and "run_nbytes" in r)

    return Stores(
        nvlink=table("nvlink"),
        memory=table("memory"),
        both_ways_rate=rows["both_ways"]["rate"],
        launch_secs=rows["launches"]["secs"],
        launch_secs_between=rows["launches_between"]["secs"],
    )
