"""What a process with GPUs says of itself, and what its neighbours believe: nothing that would let a kernel write
elsewhere than into the buffers and inboxes which that process offers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import NamedTuple

from shardfly_jax.buffers import ALIGNMENT
from shardfly_jax.sharding.errors import TransferError
from shardfly_jax.sharding.formats import itemsize
from shardfly_jax.sharding.moves import Key
from shardfly_jax.sharding.plan import Plan
from shardfly_jax.transports.exports import Offered

Spot = tuple[str, int, int]
"""Where something lies: name of a process, piece of the memory that it offers, and offset in it, bytes."""


class Place(NamedTuple):
    """A device of another process.

    Attributes:
      process: Its name for this plan.
      device: Number of the device there.
    """

    process: str
    device: int

    def __str__(self) -> str:
        return f"cuda:{self.device} of process {self.process[:6]}"


class Endpoint(NamedTuple):
    """Where a process' memory is handed out, and which of its devices hold which ranks."""

    path: str
    process: str
    devices: Mapping[int, int]

    @classmethod
    def parse(cls, text: str, rank: int) -> Endpoint:
        """From what the process that holds a rank registered with.

        Raises:
          TransferError: It takes its payload another way, or does not say where the rank is.
        """
        try:
            given = json.loads(text)
            devices = {int(r): int(device) for r, device in given["devices"].items()}
            path, process = str(given["path"]), str(given["process"])
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            raise TransferError(
                f"update: rank {rank} is not on a GPU of this host, but rank {rank} shares a plan with ranks that are. "
                "Put all ranks of a plan on GPUs, or all on CPU devices."
            ) from None
        if rank not in devices:
            raise TransferError(
                f"update: the process of rank {rank} has registered devices of the ranks {sorted(devices)} only. End "
                "that process: it does not speak as this library does."
            )
        return cls(path, process, devices)

    def __str__(self) -> str:
        given = {"path": self.path, "process": self.process, "devices": {str(r): d for r, d in self.devices.items()}}
        return json.dumps(given, sort_keys=True)


def parsed(endpoints: Mapping[str, str], me: str, held: frozenset[int]) -> dict[int, Endpoint]:
    """The endpoint of every rank.

    Args:
      endpoints: As the rendezvous says.
      me: Name of this process.
      held: Its ranks.

    Raises:
      TransferError: One is none, or another process goes by the name of this one.
    """
    found = {int(rank): Endpoint.parse(text, int(rank)) for rank, text in endpoints.items()}
    if strays := sorted(rank for rank, one in found.items() if (one.process == me) != (rank in held)):
        raise TransferError(
            f"update: the process of rank {strays[0]} has registered under the name of another one. End that "
            "process: it does not speak as this library does."
        )
    return found


def _check(holds: bool, name: str, ranks: list[int], what: str) -> None:
    if not holds:
        raise TransferError(
            f"update: process {name[:6]} (ranks {ranks}) offers {what}; nothing was written there. End that "
            "process: it does not speak as this library does."
        )


def _check_spot(offered: Offered, piece: int, offset: int, nbytes: int, name: str, ranks: list[int], what: str) -> None:
    sizes, descriptors, _ = offered
    _check(piece < min(len(sizes), len(descriptors)), name, ranks, f"{what} in a piece of memory that it does not give")
    _check(
        offset % ALIGNMENT == 0 and offset + nbytes <= sizes[piece],
        name, ranks, f"{what} of {nbytes} bytes at offset {offset} of {sizes[piece]} bytes",
    )  # fmt: skip


def buffers_offered(plan: Plan, by_rank: Mapping[int, Endpoint], offers: Mapping[str, Offered]) -> dict[Key, Spot]:
    """Where the buffers of other processes are.

    Args:
      plan: The plan.
      by_rank: Endpoint of every rank.
      offers: What each of the other processes says.

    Raises:
      TransferError: A process offers what is not its own, not in its memory, or less than the plan has for its ranks.
    """
    at: dict[Key, Spot] = {}
    for name, offered in offers.items():
        ranks = sorted(rank for rank, one in by_rank.items() if one.process == name)
        wanted = {
            (index, k, rank): math.prod(layout.buffer_shape(rank)) * itemsize(layout.dtype)
            for index in plan.target_families
            for layout in (plan.families[index].layout,)
            for rank in layout.position.keys() & ranks
            for k in range(plan.families[index].count)
        }
        for row in offered[2]:
            _check(len(row) == 5 and tuple(row[:3]) in wanted, name, ranks, f"a buffer {row} that the plan has not")
            key, (piece, offset) = (row[0], row[1], row[2]), row[3:]
            _check_spot(offered, piece, offset, wanted[key], name, ranks, f"a buffer of rank {row[2]}")
            at[key] = name, piece, offset
        lacking = {key[2] for key, nbytes in wanted.items() if nbytes and key not in at}
        _check(not lacking, name, ranks, f"too few buffers for the ranks {sorted(lacking)}")
    return at


def inbox_offered(offered: Offered, device: int, nbytes: int, name: str, ranks: list[int]) -> tuple[int, int]:
    """Piece and offset of a device's inbox.

    Args:
      offered: What its process says.
      device: Its number in the plan.
      nbytes: Of the inbox.
      name, ranks: Of its process.

    Raises:
      TransferError: It is not there.
    """
    row = next((row for row in offered[2] if len(row) == 3 and row[0] == device), None)
    _check(row is not None, name, ranks, "no inbox of a device that holds some of them")
    assert row is not None
    _, piece, offset = row
    _check_spot(offered, piece, offset, nbytes, name, ranks, "an inbox")
    return piece, offset
