"""A plan: immutable data from which every executor, report and simulation works.

Equal inputs give equal bytes on every machine and in every process; `digest` proves it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import zipfile
import zlib
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from shardfly_jax.sharding import codec
from shardfly_jax.sharding.blocking import STAGING
from shardfly_jax.sharding.errors import PlanFileError
from shardfly_jax.sharding.families import Family
from shardfly_jax.sharding.formats import Conversion, itemsize
from shardfly_jax.sharding.lowering import BlockView
from shardfly_jax.sharding.moves import Key, Move, MoveTable, move_size, target_key
from shardfly_jax.sharding.units import bytes_text

FILE_FORMAT = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Replica:
    """Rollout ranks that serve together; versions and poison belong to it.

    Attributes:
      name: Unique in the plan.
      tree: The target tree it belongs to.
      ranks: Plan-wide rank numbers.
    """

    name: str
    tree: str
    ranks: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Plan:
    """Which bytes go from where to where, converted how, forwarded along which replicas, in what order.

    Attributes:
      families: Targets, then sources, then staging.
      moves: The table of moves, in order of their first expansion.
      conversions: What the `convert` column names.
      blocks: What the `block` column names.
      bands: int64; bytes of each band, which must all have arrived before it is forwarded.
      source_ranks, target_ranks: Trainers are ranks 0 to `source_ranks`; rollouts follow.
      replicas: In rank order.
      keep: Patterns of targets that are never touched.
    """

    families: tuple[Family, ...]
    moves: MoveTable
    conversions: tuple[Conversion, ...]
    blocks: tuple[BlockView, ...]
    bands: np.ndarray
    source_ranks: int
    target_ranks: int
    replicas: tuple[Replica, ...]
    keep: tuple[str, ...]

    def __post_init__(self) -> None:
        self.bands.setflags(write=False)

    @property
    def ranks(self) -> int:
        """Trainer and rollout ranks together."""
        return self.source_ranks + self.target_ranks

    @property
    def source_families(self) -> tuple[int, ...]:
        """Indices of the families that are read."""
        return tuple(k for k, family in enumerate(self.families) if family.expr is None and family.tree != STAGING)

    @property
    def staging_families(self) -> tuple[int, ...]:
        """Indices of the families of slots, which hold the maxima of blocks while an update runs."""
        return tuple(k for k, family in enumerate(self.families) if family.tree == STAGING)

    @property
    def target_families(self) -> tuple[int, ...]:
        """Indices of the families that are written."""
        return tuple(k for k, family in enumerate(self.families) if family.expr is not None)

    @cached_property
    def row_nbytes(self) -> np.ndarray:
        """int64 [rows]: bytes written by all expansions of each row, after conversion."""
        sizes = np.array([itemsize(conversion.target) for conversion in self.conversions], np.int64)
        return self.moves.written * self.moves.count * sizes[self.moves.convert]

    @cached_property
    def slot_reads(self) -> tuple[np.ndarray, np.ndarray]:
        """Maxima of blocks that rows read from slots.

        Returns:
          int64 [rows], twice: the rank that owns the slots, -1 where none are read; and bytes, each slot once.
        """
        owner, nbytes = np.full(len(self.moves), -1, np.int64), np.zeros(len(self.moves), np.int64)
        for row in np.nonzero(self.moves.block >= 0)[0].tolist():
            view = self.blocks[self.moves.block[row]]
            if view.family >= 0:
                extents = self.moves.extents[row].tolist()[: len(view.strides)]
                across = math.prod(n for n, step in zip(extents, view.strides, strict=True) if step)
                itemsize_ = self.families[view.family].layout.itemsize
                owner[row], nbytes[row] = view.rank, across * itemsize_ * int(self.moves.count[row])
        return owner, nbytes

    def traffic(self) -> np.ndarray:
        """Payload between ranks.

        Returns:
          int64 [ranks, ranks], bytes from row to column. The diagonal holds copies within a rank (aliases with a buffer
          of their own); fills are not traffic. The maxima of blocks that trainers tell each other are.
        """
        moving = self.moves.source_rank >= 0
        cell = self.moves.source_rank[moving].astype(np.int64) * self.ranks + self.moves.target_rank[moving]
        matrix = np.zeros(self.ranks * self.ranks, np.int64)
        np.add.at(matrix, cell, self.row_nbytes[moving])
        owner, read = self.slot_reads
        told = (owner >= 0) & moving
        np.add.at(matrix, owner[told] * self.ranks + self.moves.source_rank[told], read[told])
        return matrix.reshape(self.ranks, self.ranks)

    @cached_property
    def nbytes(self) -> int:
        """Payload: bytes that travel from one rank to another, forwards included."""
        matrix = self.traffic()
        return int(matrix.sum() - np.trace(matrix))

    @cached_property
    def egress_nbytes(self) -> int:
        """Bytes that the trainers send to rollouts: each distinct byte once, whatever the number of replicas, unless a
        topology lets trainers send to more of them themselves (`parting`)."""
        return int(self.traffic()[: self.source_ranks, self.source_ranks :].sum())

    @cached_property
    def exchange_nbytes(self) -> int:
        """Bytes of block maxima that trainers tell each other."""
        among = self.traffic()[: self.source_ranks, : self.source_ranks]
        return int(among.sum() - np.trace(among))

    @cached_property
    def broadcast_nbytes(self) -> int:
        """Bytes that the trainers would send if they served every replica by itself, each distinct byte once."""
        return sum(self._needed({rank: replica.name for replica in self.replicas for rank in replica.ranks}).values())

    @cached_property
    def distinct_nbytes(self) -> int:
        """Bytes that rollouts need, those that several need alike counted once."""
        return sum(self._needed(dict.fromkeys(range(self.ranks), "")).values())

    def _needed(self, who: Mapping[int, str]) -> dict[tuple[Any, ...], int]:
        """Bytes of each distinct box that somebody needs, by who it is, its meaning and its place.

        Args:
          who: Name of each rank; ranks of one name need their bytes once.
        """
        needed: dict[tuple[Any, ...], int] = {}
        for index in self.target_families:
            family = self.families[index]
            for (box, _), ranks in family.layout.holders:
                nbytes = math.prod(hi - lo for lo, hi in box) * family.layout.itemsize * family.count
                for name in {who[rank] for rank in ranks}:
                    needed[name, family.expr, family.first, family.count, box, family.layout.dtype] = nbytes
        return needed

    @cached_property
    def target_nbytes(self) -> int:
        """Bytes of all target shards on all ranks."""
        return int(self.row_nbytes[~np.isin(self.moves.target_family, self.staging_families)].sum())

    @cached_property
    def staging_nbytes(self) -> int:
        """Temporary bytes that the plan needs beside sources and targets: one slot for each block that several source
        shards or moves share."""
        return sum(size * self.families[index].layout.itemsize for (index, _, _), size in staging_sizes(self).items())

    @cached_property
    def first_hop_nbytes(self) -> np.ndarray:
        """int64 [target_ranks]: bytes each rollout rank receives straight from trainers."""
        return self.traffic()[: self.source_ranks, self.source_ranks :].sum(axis=0)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of everything the plan says, as 64 hexadecimal digits."""
        sha = hashlib.sha256(json.dumps(self._header(), sort_keys=True).encode())
        for name, column in sorted(self.moves.columns.items()):
            sha.update(name.encode())
            sha.update(np.ascontiguousarray(column, column.dtype.newbyteorder("<")).tobytes())
        sha.update(np.ascontiguousarray(self.bands, "<i8").tobytes())
        return sha.hexdigest()

    def _header(self) -> dict[str, Any]:
        return {
            "format": FILE_FORMAT,
            "families": [codec.family_to_json(family) for family in self.families],
            "conversions": [codec.conversion_to_json(conversion) for conversion in self.conversions],
            "blocks": [list(view) for view in self.blocks],
            "source_ranks": self.source_ranks,
            "target_ranks": self.target_ranks,
            "replicas": [dataclasses.astuple(replica) for replica in self.replicas],
            "keep": list(self.keep),
        }

    def save(self, path: str | Path | BinaryIO) -> None:
        """Writes the plan as a compressed `.npz` with a JSON header; nothing in it is executable."""
        header = json.dumps({**self._header(), "digest": self.digest})
        arrays: dict[str, Any] = {
            "header": np.frombuffer(header.encode(), np.uint8),
            "bands": self.bands,
            **self.moves.columns,
        }
        if isinstance(path, str | Path):
            partial = Path(f"{path}.partial")  # never a half-written plan; NumPy would append .npz to a path
            with partial.open("wb") as file:
                np.savez_compressed(file, **arrays)
            partial.replace(path)
        else:
            np.savez_compressed(path, **arrays)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self.digest[:12]}: {len(self.moves)} moves, {self.source_ranks} trainer ranks -> "
            f"{self.target_ranks} rollout ranks, {bytes_text(self.nbytes)} payload>"
        )

    def move_nbytes(self, move: Move) -> int:
        """Bytes that one expansion of a move writes."""
        return move_size(move) * itemsize(self.conversions[move.convert].target)


def staging_sizes(plan: Plan) -> dict[Key, int]:
    """Slots of each staging buffer, which begin every update as zeros."""
    sizes = {}
    for index in plan.staging_families:
        family = plan.families[index]
        (owner,) = family.layout.ranks
        sizes.update({(index, tensor, owner): family.layout.local_size(owner) for tensor in range(family.count)})
    return sizes


def slot_key(plan: Plan, move: Move, k: int) -> Key:
    """The slots that expansion `k` of an encoding move reads: those of the layer that it writes."""
    view = plan.blocks[move.block]
    family, tensor, _ = target_key(move, k)
    return view.family, plan.families[family].first + tensor - plan.families[view.family].first, view.rank


def load(path: str | Path | BinaryIO) -> Plan:
    """Reads a plan that `save` wrote.

    Raises:
      PlanFileError: The file is no plan, of another format version, or damaged.
      FileNotFoundError: There is no such file.
    """
    try:
        with np.load(path, allow_pickle=False) as data:
            arrays = {name: data[name] for name in data.files}
        header = json.loads(arrays.pop("header").tobytes())
        if header["format"] != FILE_FORMAT:
            raise PlanFileError(
                f"plan file: {path} has format {header['format']}, but this version reads {FILE_FORMAT}. Make "
                "the plan again."
            )
        bands = arrays.pop("bands")
        plan = Plan(
            families=tuple(codec.family_from_json(item) for item in header["families"]),
            moves=MoveTable.from_columns(**arrays),
            conversions=tuple(codec.conversion_from_json(item) for item in header["conversions"]),
            blocks=tuple(
                BlockView(family, rank, offset, tuple(strides)) for family, rank, offset, strides in header["blocks"]
            ),
            bands=bands,
            source_ranks=header["source_ranks"],
            target_ranks=header["target_ranks"],
            replicas=tuple(Replica(name, tree, tuple(ranks)) for name, tree, ranks in header["replicas"]),
            keep=tuple(header["keep"]),
        )
    except FileNotFoundError:
        raise
    except (
        OSError, ValueError, KeyError, TypeError, EOFError, AttributeError, RuntimeError, zipfile.BadZipFile, zlib.error
    ) as error:  # fmt: skip
        if isinstance(error, PlanFileError):
            raise
        # Of the others' words only the system's help: NumPy's advise to unpickle whatever it is.
        reason = f": {error}" if isinstance(error, OSError) else ", or it is damaged"
        raise PlanFileError(f"plan file: {path} is no plan file{reason}. Make the plan again.") from error
    if plan.digest != header.get("digest"):
        raise PlanFileError(
            f"plan file: {path} holds digest {str(header.get('digest'))[:12]}, but its contents give "
            f"{plan.digest[:12]}. It is damaged; make the plan again."
        )
    return plan
