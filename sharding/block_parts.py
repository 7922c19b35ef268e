"""Parts of quantized values that one source shard holds, their slots, and the rows that move them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

from shardfly_jax.sharding.grids import Run
from shardfly_jax.sharding.layouts import Box, box_shape, dense_strides
from shardfly_jax.sharding.lowering import MAX_DIMS, BlockView, Clipped, Template
from shardfly_jax.sharding.pieces import TARGET, Digit, span


class Part(NamedTuple):
    """Elements of one source shard; on each axis the digits move by whole blocks or stay within one.

    Attributes:
      clipped: In the target's coordinates.
      runs: Of the grid, one per axis, that the part lies in.
    """

    clipped: Clipped
    runs: tuple[Run, ...]

    def is_outer(self, digit: Digit) -> bool:
        """Whether a digit moves from block to block."""
        run = self.runs[digit.t_axis - 1]
        return run.block == 1 or (run.hi - run.lo > run.block and digit.t_radix % run.block == 0)

    @property
    def digits(self) -> list[Digit]:
        """Those that move in the target, all but the layers'."""
        return [d for d in self.clipped.piece.digits if d.t_axis]

    @property
    def size(self) -> int:
        """Elements, of all layers."""
        return math.prod(d.count for d in self.clipped.piece.digits)

    @property
    def is_complete(self) -> bool:
        """Whether every block that the part touches lies in it."""
        inner = math.prod(d.count for d in self.clipped.piece.digits if d.t_axis and not self.is_outer(d))
        return all(run.whole for run in self.runs) and inner == math.prod(run.block for run in self.runs)

    @property
    def is_solid(self) -> bool:
        """Whether it touches every block of `blocks`."""
        n = math.prod(d.count for d in self.clipped.piece.digits if d.t_axis and self.is_outer(d))
        return n == math.prod(hi - lo for lo, hi in self.blocks[1:])

    @property
    def blocks(self) -> Box:
        """The box of layers and blocks that the part touches."""
        piece = self.clipped.piece
        box = [span(piece, TARGET, 0)]
        for axis, run in enumerate(self.runs):
            lo, hi = span(piece, TARGET, axis + 1)
            box.append((run.index + (lo - run.lo) // run.block, run.index + (hi - 1 - run.lo) // run.block + 1))
        return tuple(box)


@dataclasses.dataclass(eq=False, slots=True)
class Slots:
    """The slots of a box of blocks, for some layers: one staging family with one owner.

    Attributes:
      box: Layers, then blocks per axis.
      family: Index in the plan.
      name: By which pieces read them.
      owner: Rank that holds them.
    """

    box: Box
    family: int
    name: str
    owner: int

    @property
    def strides(self) -> tuple[int, ...]:
        """Of the local buffer, per axis of the grid."""
        return dense_strides(box_shape(self.box[1:]))


def place_in_slots(part: Part, slots: Slots) -> tuple[int, list[int]]:
    """Offset and steps of a part's blocks in slots; 0 within a block."""
    strides = slots.strides
    firsts = zip(part.blocks[1:], slots.box[1:], strides, strict=True)
    steps = [
        strides[d.t_axis - 1] * (d.t_radix // part.runs[d.t_axis - 1].block) if part.is_outer(d) else 0
        for d in part.digits
    ]
    return sum((at - lo) * step for (at, _), (lo, _), step in firsts), steps


def emitted(
    part: Part,
    target_offset: int,
    target_steps: Sequence[int],
    block_offset: int,
    block_steps: Sequence[int],
    slots: tuple[int, int] | None,
) -> list[Template] | None:
    """A part as rows of at most `MAX_DIMS` dimensions.

    Args:
      target_steps, block_steps: One per digit of the value's axes.
      slots: Family and owner of the slots that encoding reads, (-1, -1) if it finds the maxima itself: then no block
        may be cut. None for rows that do not encode.
    """
    clipped, piece = part.clipped, part.clipped.piece
    source_offset, tensor = clipped.source_start
    count, tensor_step, offset_step, layer_step = 1, 0, 0, 1
    dims: list[tuple[int, int, int, int]] = []
    steps = iter(zip(target_steps, block_steps, strict=True))
    for d in piece.digits:
        stride = clipped.source_step(d.s_axis, d.s_radix)
        if d.t_axis == 0:
            count, layer_step = d.count, d.t_radix
            tensor_step, offset_step = (d.s_radix, 0) if d.s_axis == 0 else (0, stride)
        else:
            dims.append((d.count, stride, *next(steps)))
    dims = _joined(dims)
    heads = [(source_offset, target_offset, block_offset)]
    while len(dims) > MAX_DIMS:
        # a block that is encoded without slots stays in one row, and so do codes that share a byte
        movable = [k for k, d in enumerate(dims) if slots is None or (d[2] and (d[3] or slots != (-1, -1)))]
        if not movable:
            return None
        n, *moves = dims.pop(min(movable, key=lambda k: dims[k][0]))
        heads = [tuple(at + k * step for at, step in zip(head, moves, strict=True)) for head in heads for k in range(n)]  # type: ignore[misc]
    out = []
    for source, target, block in heads:
        view = None
        if slots is not None:
            view = BlockView(*slots, block if slots[0] >= 0 else 0, tuple(step for *_, step in dims))
        out.append(
            Template(
                clipped.family, clipped.shard, piece.steps, tuple(d[:3] for d in dims), source, target, count, tensor,
                tensor_step, offset_step, piece.t_origin[0], layer_step, view,
            )
        )  # fmt: skip
    return out


def _joined(dims: Sequence[tuple[int, int, int, int]]) -> list[tuple[int, int, int, int]]:
    """As `lowering.merge_dims`, with strides in the slots too."""
    out: list[tuple[int, int, int, int]] = []
    for n, *steps in sorted(dims, key=lambda d: (-d[2], d[1], d[3])):
        if out and list(out[-1][1:]) == [n * step for step in steps]:
            out[-1] = (out[-1][0] * n, *steps)  # type: ignore[assignment]
        else:
            out.append((n, *steps))  # type: ignore[arg-type]
    return out
