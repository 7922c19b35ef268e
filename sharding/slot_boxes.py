"""Sets of blocks as disjoint boxes: what needs slots, gathered into as few boxes as cheap merging leaves."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from shardfly_jax.sharding.layouts import Box


def without(box: Box, other: Box) -> list[Box]:
    """A box less another, as disjoint boxes."""
    if any(hi <= lo2 or hi2 <= lo for (lo, hi), (lo2, hi2) in zip(box, other, strict=True)):
        return [box]
    out = []
    for axis, ((lo, hi), (lo2, hi2)) in enumerate(zip(box, other, strict=True)):
        for start, stop in ((lo, min(lo2, hi)), (max(hi2, lo), hi)):
            if start < stop:
                out.append((*box[:axis], (start, stop), *box[axis + 1 :]))
        box = (*box[:axis], (max(lo, lo2), min(hi, hi2)), *box[axis + 1 :])
    return out


def boxes_of(mask: np.ndarray) -> list[Box]:
    """Disjoint boxes of the marked elements: runs of equal slices along each axis in turn."""
    if mask.ndim == 0:
        return [()] if mask else []
    if not mask.any():
        return []
    flat = mask.reshape(len(mask), -1)
    edges = [0, *(np.nonzero((flat[1:] != flat[:-1]).any(axis=1))[0] + 1).tolist(), len(mask)]
    return [((lo, hi), *box) for lo, hi in itertools.pairwise(edges) for box in boxes_of(mask[lo])]


def merged(boxes: Sequence[Box]) -> list[Box]:
    """The same disjoint boxes, neighbours that make a box together joined, last axis first; sorted."""
    out = sorted(boxes)
    for axis in reversed(range(len(out[0]) if out else 0)):
        found: list[Box] = []
        for box in sorted(out, key=lambda b: (*b[:axis], *b[axis + 1 :], b[axis])):
            last = found[-1] if found else None
            if last and last[axis][1] == box[axis][0] and (*last[:axis], *last[axis + 1 :]) == (
                *box[:axis], *box[axis + 1 :]
            ):  # fmt: skip
                found[-1] = (*box[:axis], (last[axis][0], box[axis][1]), *box[axis + 1 :])
            else:
                found.append(box)
        out = found
    return sorted(out)
