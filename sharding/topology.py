"""Links between ranks and their rates. Presets hold measured figures.

A GPU sends and receives over two links of its own: one inside its host (NVLink) and one to other hosts (its NIC). A NIC
is full duplex; NVLink is a little slower each way while it is used both ways. Ranks that share a GPU copy within its
memory. GPUs fill hosts in order: GPU g is in host `g // gpus_per_host`.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from shardfly_jax.sharding.errors import PlanError
from shardfly_jax.sharding.rates import MEMORY, NIC, NVLINK, Stores, measured, measured_stores


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Rates in bytes per second and per direction.

    Attributes:
      name: For reports.
      hosts: Number of hosts.
      gpus_per_host: GPUs per host.
      nvlink_rate: One GPU to the GPUs of its host.
      nic_rate: One GPU to other hosts; 0 if there is one host.
      nvlink_both_ways_rate: Each way, while a GPU sends and receives alike; 0 if that is no slower.
      memory_rate: A copy within one GPU, bytes counted once; 0 if it costs nothing.
      stores: What the kernel's stores reach; None if they reach the links' rates.
      hop_secs: Time from a band's arrival until a forward of it is under way; assumed, not measured.
      gpu_of_rank: The GPU of each rank; rank r is on GPU r if it is empty.
    """

    name: str
    hosts: int
    gpus_per_host: int
    nvlink_rate: float
    nic_rate: float
    nvlink_both_ways_rate: float = 0.0
    memory_rate: float = 0.0
    stores: Stores | None = None
    hop_secs: float = 2e-6
    gpu_of_rank: tuple[int, ...] = ()

    @property
    def gpus(self) -> int:
        """Number of GPUs."""
        return self.hosts * self.gpus_per_host

    @property
    def ranks(self) -> int:
        """Places for ranks."""
        return len(self.gpu_of_rank) or self.gpus

    def gpu(self, ranks: np.ndarray) -> np.ndarray:
        """GPU of each rank."""
        return np.array(self.gpu_of_rank)[ranks] if self.gpu_of_rank else np.asarray(ranks)

    def host_of(self, ranks: np.ndarray) -> np.ndarray:
        """Host of each rank."""
        return self.gpu(ranks) // self.gpus_per_host

    def link(self, source: np.ndarray, target: np.ndarray) -> np.ndarray:
        """Which kind of link joins each pair of ranks (`rates.LINKS`)."""
        a, b = self.gpu(source), self.gpu(target)
        return np.where(a == b, MEMORY, np.where(a // self.gpus_per_host == b // self.gpus_per_host, NVLINK, NIC))

    def check(self, ranks: int) -> None:
        """Raises:
        PlanError: The plan has more ranks than this topology has places.
        """
        if ranks > self.ranks:
            raise PlanError(
                f"topology: {self.name!r} has {self.ranks} places, but the plan has {ranks} ranks. Use more "
                f"hosts, e.g. preset(..., hosts={-(-ranks // self.gpus_per_host)})."
            )


PRESETS = ("h200", "h100", "h20")
"""Names that `preset` takes. Rates are measured on H200; H100 and H20 have the same NVLink 4 with 18
links and are taken to be alike."""
NIC_RATE = 400e9 / 8
"""A 400 Gb/s NIC per GPU, line rate."""


def preset(gpu: str, hosts: int = 1, gpus_per_host: int = 8, gpu_of_rank: tuple[int, ...] = ()) -> Topology:
    """A named topology: `hosts` NVLink hosts of `gpus_per_host` GPUs with a 400 Gb/s NIC per GPU.

    Args:
      gpu: `h20`, `h100` or `h200`.
      hosts, gpus_per_host, gpu_of_rank: See `Topology`.

    Raises:
      PlanError: An unknown GPU.
    """
    key = gpu.lower()
    if key not in PRESETS:
        raise PlanError(f"topology: {gpu!r} is not a known GPU, but one of {sorted(PRESETS)} is needed.")
    rows = measured()
    return Topology(
        name=f"{hosts}x{gpus_per_host} {key.upper()}",
        hosts=hosts,
        gpus_per_host=gpus_per_host,
        nvlink_rate=rows["peer_copy"]["rate"],
        nic_rate=NIC_RATE if hosts > 1 else 0.0,
        nvlink_both_ways_rate=rows["peer_copy_both_ways"]["rate"],
        memory_rate=rows["memory_copy"]["rate"],
        stores=measured_stores(),
        gpu_of_rank=gpu_of_rank,
    )


def pools(gpu: str, trainers: int, rollouts: int) -> Topology:
    """A preset whose trainers and rollouts share one host of 8 if they fit, else have hosts of their own."""
    if trainers + rollouts <= 8:
        return preset(gpu)
    first = -(-trainers // 8)
    places = (*range(trainers), *range(8 * first, 8 * first + rollouts))
    return preset(gpu, hosts=first + -(-rollouts // 8), gpu_of_rank=places)
