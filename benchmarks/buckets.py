"""How other systems see an update: tensors in the engine's order, cut from the trainer's, packed into buckets.

Without JAX, because the programs that import this hold the GPUs with PyTorch.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import einops

WIRE_ITEMSIZE = 2
"""Bytes of an element under way: bfloat16, the rollout's dtype."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A run of a target's elements that one trainer tensor gives.

    Attributes:
      target: Name of the target.
      offset: Where the run begins in the flat target, elements.
      source: Name of the trainer's tensor.
      shape: What the source is reshaped to first.
      pattern: How einops permutes its axes then; the result is the run.
    """

    target: str
    offset: int
    source: str
    shape: tuple[int, ...]
    pattern: str

    @property
    def rows(self) -> int:
        """Extent of the permuted leading axis."""
        left, right = self.pattern.split("->")
        return self.shape[left.split().index(right.split()[0])]

    @property
    def row_size(self) -> int:
        """Elements per row."""
        return math.prod(self.shape) // self.rows

    @property
    def nbytes(self) -> int:
        """Bytes under way."""
        return math.prod(self.shape) * WIRE_ITEMSIZE

    def view(self, source: Any) -> Any:
        """The run as a view of the source, which is not copied: of NumPy, JAX or PyTorch."""
        return einops.rearrange(source.reshape(self.shape), self.pattern)


class Piece(NamedTuple):
    """Rows of a part in a bucket.

    Attributes:
      part: Index of the part.
      first, stop: Rows.
      offset: Where they begin in the bucket, elements.
      size: Elements.
    """

    part: int
    first: int
    stop: int
    offset: int
    size: int


def fill(parts: Sequence[Part], nbytes: int) -> list[list[Piece]]:
    """Cuts parts into buckets of at most `nbytes`, in order; a part that does not fit is cut between rows."""
    room = nbytes // WIRE_ITEMSIZE
    buckets: list[list[Piece]] = [[]]
    used = 0
    for index, part in enumerate(parts):
        first = 0
        while first < part.rows:
            rows = min(part.rows - first, (room - used) // part.row_size)
            if rows:
                size = rows * part.row_size
                buckets[-1].append(Piece(index, first, first + rows, used, size))
                first, used = first + rows, used + size
            elif used:
                buckets.append([])
                used = 0
            else:
                raise ValueError(f"bucket: a row of {part.target!r} has {part.row_size * WIRE_ITEMSIZE} bytes, "
                                 f"but a bucket {nbytes}. Use larger buckets.")  # fmt: skip
    return buckets


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What the programs of `peer_worker` are to move.

    Attributes:
      dtype: The trainer's.
      sources: Shapes of its tensors.
      targets: Shapes of the rollout's tensors.
      quantized: Targets that become fp8 codes with scales per block on arrival.
      parts: In the order in which they are sent.
      bucket_nbytes: Of a bucket.
    """

    dtype: str
    sources: dict[str, tuple[int, ...]]
    targets: dict[str, tuple[int, ...]]
    quantized: tuple[str, ...]
    parts: tuple[Part, ...]
    bucket_nbytes: int

    @property
    def nbytes(self) -> int:
        """Bytes under way."""
        return sum(part.nbytes for part in self.parts)

    def write(self, path: Path) -> None:
        """As JSON."""
        path.write_text(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Job:
        """What `write` wrote."""
        given = json.loads(path.read_text())
        parts = tuple(Part(**part | {"shape": tuple(part["shape"])}) for part in given.pop("parts"))
        shapes = {side: {name: tuple(s) for name, s in given.pop(side).items()} for side in ("sources", "targets")}
        return cls(parts=parts, quantized=tuple(given.pop("quantized")), **shapes, **given)
