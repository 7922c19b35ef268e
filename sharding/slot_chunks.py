"""Cuts work on slots into chunks of blocks, so that what was read to find their maxima is still in a cache.

What fills or reads slots is cut at the same blocks. A chunk's second reading follows soon after its first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from shardfly_jax.sharding.quantized_records import TILE, SideRegion

CHUNK_NBYTES = 8 << 20
"""Of sources that a chunk reads: 256 tiles."""
READ_LAG = 3
"""How many chunks later slots are read than filled. By then those that fill them should have ended: the workers of an
H200 hold about 800 tiles at a time. Its L2 has 50 MB."""


def chunks(regions: Sequence[SideRegion], base: int, nbytes: int) -> list[list[SideRegion | None]]:
    """Parts of regions, chunk by chunk.

    Args:
      regions: Whose sides lie in the same slots.
      base: Offset of the first slot, bytes.
      nbytes: What a device reads of them.

    Returns:
      For each chunk what it holds of each region; one chunk if some region's blocks cannot be cut along one dimension.
    """
    step = max((dim.side for region in regions for dim in region.dims), default=0)
    axes = [[a for a, dim in enumerate(region.dims) if dim.side == step and dim.extent > 1] for region in regions]
    if not step or any(len(axis) > 1 for axis in axes):
        return [list(regions)]
    for region in regions:
        inner = sum((dim.extent - 1) * dim.side for dim in region.dims if dim.side < step)
        if (region.side - base) % step + inner >= step:
            return [list(regions)]
    starts = [(region.side - base) // step for region in regions]
    counts = [region.dims[axis[0]].extent if axis else 1 for region, axis in zip(regions, axes, strict=True)]
    first, last = min(starts), max(start + n for start, n in zip(starts, counts, strict=True))
    length = math.ceil((last - first) / max(math.ceil(nbytes / CHUNK_NBYTES), 1))
    if last - first >= 2 * TILE:  # rows, of which a tile takes as many
        length = -(-length // TILE) * TILE
    out = []
    for lo in range(first, last, length):
        chunk: list[SideRegion | None] = []
        for region, axis, start, n in zip(regions, axes, starts, counts, strict=True):
            a, b = max(lo - start, 0), min(lo + length - start, n)
            chunk.append(None if a >= b else region.cut(axis[0], a, b) if axis else region)
        out.append(chunk)
    return out
