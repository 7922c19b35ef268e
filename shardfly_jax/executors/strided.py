"""Strided regions of flat buffers as reshapes, slices and transposes, which XLA compiles well.

A region is given by an offset, extents and strides. If each stride divides the next larger one and no digit carries,
the buffer seen in the mixed radix of its strides turns the region into a plain slice. Slice starts are arguments of the
compiled program, so all regions of one shape share it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardfly_jax.sharding.moves import View


@dataclasses.dataclass(frozen=True, slots=True)
class Region:
    """How to cut a strided region out of a flat buffer; hashable, so that programs are shared.

    Attributes:
      radices: The buffer's shape in the mixed radix of the strides, outermost first.
      sizes: Extents of the slice, one per radix.
      flipped: Axes of the slice that are read backwards.
      axes: For each axis of the result, the axis of the slice; -1 for an axis along which the region repeats.
      extents: Shape of the result.
    """

    radices: tuple[int, ...]
    sizes: tuple[int, ...]
    flipped: tuple[int, ...]
    axes: tuple[int, ...]
    extents: tuple[int, ...]

    def read(self, flat: jax.Array, starts: jax.Array) -> jax.Array:
        """The region of a flat buffer, of shape `extents`. Traceable."""
        block = lax.dynamic_slice(flat.reshape(self.radices), [starts[k] for k in range(len(self.radices))], self.sizes)
        block = lax.rev(block, self.flipped) if self.flipped else block
        present = [axis for axis in self.axes if axis >= 0]
        rest = [axis for axis in range(len(self.sizes)) if axis not in present]
        block = block.transpose([*present, *rest]).reshape([self.sizes[axis] for axis in present])
        kept = [k for k, axis in enumerate(self.axes) if axis >= 0]
        return lax.broadcast_in_dim(block, self.extents, kept)

    def write(self, flat: jax.Array, starts: jax.Array, values: jax.Array) -> jax.Array:
        """The buffer with a region that does not repeat replaced by values of shape `extents`. Traceable."""
        rest = [axis for axis in range(len(self.sizes)) if axis not in self.axes]
        order = [*self.axes, *rest]
        block = values.reshape([*values.shape, *(1,) * len(rest)]).transpose(np.argsort(order))
        whole = lax.dynamic_update_slice(
            flat.reshape(self.radices), block, [starts[k] for k in range(len(self.radices))]
        )
        return whole.reshape(flat.shape)


def region(view: View, size: int) -> tuple[Region, np.ndarray] | None:
    """A view of a flat buffer of `size` elements as a region with int32 starts; None if strides do not nest."""
    offset = view.offset + sum((n - 1) * step for n, step in zip(view.extents, view.strides, strict=True) if step < 0)
    moving = sorted((abs(step), k) for k, step in enumerate(view.strides) if step)[::-1]
    steps = [step for step, _ in moving]
    radices: list[int] = []
    above = size
    for step in [*steps, 1]:
        if step == 0 or above % step:
            return None
        radices.append(above // step)
        above = step
    sizes = [view.extents[k] for _, k in moving] + [1]
    # radices[k] counts units of steps[k] inside one unit of the next larger step; the last one, the rest below the
    # smallest step, has the extent 1
    starts = []
    for step, radix, extent in zip([*steps, 1], radices, sizes, strict=True):
        start = offset // step % radix
        if start + extent > radix:
            return None
        starts.append(start)
    if math.prod(radices) != size or max(radices) >= 2**31:
        return None
    axis_of = {k: axis for axis, (_, k) in enumerate(moving)}
    axes = tuple(axis_of.get(k, -1) for k in range(len(view.strides)))
    flipped = tuple(sorted(axis_of[k] for k, step in enumerate(view.strides) if step < 0))
    return Region(tuple(radices), tuple(sizes), flipped, axes, view.extents), np.array(starts, np.int32)


def indices(extents: Sequence[int], strides: Sequence[int]) -> jax.Array:
    """int32 indices of a region relative to its lowest element, for regions that do not nest. Traceable."""
    index = jnp.zeros(extents, jnp.int32)
    for axis, (n, step) in enumerate(zip(extents, strides, strict=True)):
        line = lax.broadcasted_iota(jnp.int32, tuple(extents), axis)
        index += line * step if step >= 0 else (n - 1 - line) * -step
    return index
