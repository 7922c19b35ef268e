"""Links between ranks and their rates. Presets hold measured figures.

A rank sends and receives over two links of its own: one inside its host (NVLink) and one to other hosts (its NIC),
each full duplex. Ranks fill hosts in order: rank r lives on host `r // gpus_per_host`.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from shardfly_jax.sharding.errors import PlanError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Rates in bytes per second and per direction.

    Attributes:
      name: For reports.
      hosts: Number of hosts.
      gpus_per_host: Ranks per host.
      nvlink_rate: One GPU to the GPUs of its host.
      nic_rate: One GPU to other hosts; 0 if there is one host.
      hop_secs: Time from a band's arrival until a forward of it is under way; assumed, not measured.
    """

    name: str
    hosts: int
    gpus_per_host: int
    nvlink_rate: float
    nic_rate: float
    hop_secs: float = 2e-6

    @property
    def ranks(self) -> int:
        """Places for ranks."""
        return self.hosts * self.gpus_per_host

    def host_of(self, ranks: np.ndarray) -> np.ndarray:
        """Host of each rank."""
        return np.asarray(ranks) // self.gpus_per_host

    def check(self, ranks: int) -> None:
        """Raises:
        PlanError: The plan has more ranks than this topology has places.
        """
        if ranks > self.ranks:
            raise PlanError(
                f"topology: {self.name!r} has {self.ranks} places, but the plan has {ranks} ranks. Use more "
                f"hosts, e.g. preset(..., hosts={-(-ranks // self.gpus_per_host)})."
            )


NVLINK_RATES = {
    # Measured on two H200 with cudaMemcpyPeer, 18 links, one way. H100 and H20 have the same NVLink 4 with 18 links.
    "h200": 394.6e9,
    "h100": 394.6e9,
    "h20": 394.6e9,
}
NIC_RATE = 400e9 / 8
"""A 400 Gb/s NIC per GPU, line rate."""


def preset(gpu: str, hosts: int = 1, gpus_per_host: int = 8) -> Topology:
    """A named topology: `hosts` NVLink hosts of `gpus_per_host` GPUs with a 400 Gb/s NIC per GPU.

    Args:
      gpu: `h20`, `h100` or `h200`.

    Raises:
      PlanError: An unknown GPU.
    """
    key = gpu.lower()
    if key not in NVLINK_RATES:
        raise PlanError(f"topology: {gpu!r} is not a known GPU, but one of {sorted(NVLINK_RATES)} is needed.")
    return Topology(
        name=f"{hosts}x{gpus_per_host} {key.upper()}",
        hosts=hosts,
        gpus_per_host=gpus_per_host,
        nvlink_rate=NVLINK_RATES[key],
        nic_rate=NIC_RATE if hosts > 1 else 0.0,
    )


PRESETS = tuple(NVLINK_RATES)
"""Names that `preset` takes."""
