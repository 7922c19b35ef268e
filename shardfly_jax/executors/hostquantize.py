"""Quantization of strided views of host memory: the largest values of blocks, and their codes.

Work goes in the source's order, in parts that fit the cache and hold whole blocks; only codes, a byte at most, are
transposed. Equal bit for bit to `sharding.formats`, which is slower.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import numpy as np

from shardfly_jax.executors import hostcopy
from shardfly_jax.sharding.formats import Amax, Conversion, Encode, Fill, check_finite, np_dtype
from shardfly_jax.sharding.quantization import Format

PART_SIZE = 1 << 18
"""Elements converted at a time, if blocks allow."""
SMALL_AMAX = np.float32(2.0**-80)
"""Where every block reaches it, a subnormal value has the code zero whether or not it is flushed."""


def write(
    target: np.ndarray, source: np.ndarray, conversion: Conversion, within: tuple[int, ...], bits: np.ndarray | None
) -> None:
    """Writes what a conversion of any kind makes of a view.

    Args:
      target: A view of the conversion's target dtype; where it reduces, of length 1 along the axes within blocks.
      source: A view of its source dtype; of a fill only the shape counts.
      within: Axes inside a block, of a conversion that quantizes.
      bits: The maximum of each element's block, for codes; found here if None.

    Raises:
      NotFinite: A block holds NaN or infinity.
    """
    if isinstance(conversion.steps[-1] if conversion.steps else None, Amax):
        target[...] = amax(source, conversion, within)
    elif conversion.reduces:
        scales(target, source, conversion, within)
    elif conversion.encodes is not None:
        encode(target, source, conversion, within, bits)
    elif conversion.steps and isinstance(conversion.steps[0], Fill):
        target[...] = conversion.apply(source)
    else:
        hostcopy.copy(target, source, conversion)


def amax(source: np.ndarray, conversion: Conversion, within: tuple[int, ...]) -> np.ndarray:
    """The largest absolute value of each block, as float32 bits.

    Args:
      source: A view of the conversion's source dtype.
      conversion: Its steps before `Amax` or `Encode` come first.
      within: Axes inside a block; they come back with length 1.
    """
    if source.ndim == 0:
        return amax(source.reshape(1), conversion, ()).reshape(())
    out = np.zeros([1 if axis in within else n for axis, n in enumerate(source.shape)], np.uint32)
    for part in _parts(source, range(source.ndim)):
        at = tuple(slice(None) if axis in within else cut for axis, cut in enumerate(part))
        order = _order(source[part])
        values = conversion.values(np.asarray(source[part].transpose(order), order="C"))
        back = [axis for axis, place in enumerate(order) if place in within]
        found = _largest(values, tuple(back)).transpose(np.argsort(order))
        out[at] = np.maximum(out[at], found)
    return out


def scales(target: np.ndarray, source: np.ndarray, conversion: Conversion, within: tuple[int, ...]) -> None:
    """Writes the scale of each block of a view.

    Raises:
      NotFinite: A block holds NaN or infinity.
    """
    found = amax(source, conversion, within)
    after = next(k for k, step in enumerate(conversion.steps) if isinstance(step, Amax)) + 1
    target[...] = Conversion("uint32", conversion.steps[after:], conversion.target).apply(found)


def encode(
    target: np.ndarray, source: np.ndarray, conversion: Conversion, within: tuple[int, ...], bits: np.ndarray | None
) -> None:
    """Writes the codes of a view.

    Args:
      target, source: Views of one shape, of the conversion's dtypes. Where codes share a byte, the target has length 1
        on the axis on which they are neighbours.
      conversion: Ends in `Encode`.
      within: Axes inside a block.
      bits: The maximum of each element's block, a view of the same shape; found here if None.

    Raises:
      NotFinite: A block holds NaN or infinity.
    """
    if source.ndim == 0:  # NumPy makes scalars of arrays without axes
        bits = None if bits is None else bits.reshape(1)
        target, source = target.reshape(1), source.reshape(1)
    outer = [axis for axis in range(source.ndim) if axis not in within]
    if bits is not None:  # once for each block
        bits = bits[tuple(slice(0, 1) if axis in within else slice(None) for axis in range(source.ndim))]
    elif source.size > PART_SIZE and not outer:  # one large block
        bits = amax(source, conversion, within)
    packed = next((axis for axis, n in enumerate(source.shape) if target.shape[axis] != n), -1)
    for part in _parts(source, [axis for axis in (outer if bits is None else range(source.ndim)) if axis != packed]):
        order = _order(source[part])
        values = conversion.values(np.asarray(source[part].transpose(order), order="C"))
        if bits is None:
            of_block = _largest(values, tuple(axis for axis, place in enumerate(order) if place in within))
        else:
            at = tuple(slice(None) if axis in within else cut for axis, cut in enumerate(part))
            of_block = bits[at].transpose(order)
        codes = _codes(conversion.steps[-1], values, of_block, order.index(packed) if packed >= 0 else -1)
        hostcopy.copy(target[part].transpose(order), codes, Conversion(conversion.target, (), conversion.target))


def _largest(values: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """`Amax().apply`, in integers."""
    if values.dtype == np_dtype("bfloat16"):
        found = (values.view(np.uint16) & 0x7FFF).max(axis=axes, keepdims=True).astype(np.uint32) << 16
    else:
        found = (values.astype(np.float32).view(np.uint32) & 0x7FFFFFFF).max(axis=axes, keepdims=True)
    return np.where(found < 0x800000, np.uint32(0), found)


def _codes(step: object, values: np.ndarray, bits: np.ndarray, packed: int) -> np.ndarray:
    """`Encode.apply`, by a table."""
    assert isinstance(step, Encode)
    check_finite(bits)
    format, largest = step.format, bits.view(np.float32)
    if largest.min(initial=np.inf) < SMALL_AMAX or format.divides:
        return step.apply(values, bits, packed)
    scaled = np.multiply(values.astype(np.float32), format.factors(largest))
    np.clip(scaled, np.float32(-format.largest), np.float32(format.largest), out=scaled)
    target = np_dtype(format.codes)
    if target.kind == "i":
        return np.rint(scaled).astype(target)
    words = scaled.view(np.uint32)
    top = (words >> 16).astype(np.uint16)
    top |= (words & 0xFFFF) != 0  # what is cut off still decides ties
    return format.pack(_table(format)[top].view(target), packed)


@functools.cache
def _table(format: Format) -> np.ndarray:
    """Code of every float32 whose lower half is zero: 7 bits of mantissa and a sticky one decide all roundings."""
    numbers = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
    with np.errstate(all="ignore"):
        return numbers.astype(np_dtype(format.codes)).view(np.uint8)


def _order(x: np.ndarray) -> list[int]:
    """Axes by falling stride, so that a copy reads memory in order."""
    return sorted(range(x.ndim), key=lambda axis: -abs(x.strides[axis]))


def _parts(source: np.ndarray, axes: Sequence[int]) -> Iterator[tuple[slice, ...]]:
    """Cuts a view along some axes into parts of about `PART_SIZE` elements, each as dense in memory as can be."""
    order = [axis for axis in _order(source) if axis in axes]

    def cut(part: tuple[slice, ...], size: int) -> Iterator[tuple[slice, ...]]:
        axis = next((axis for axis in order if part[axis].stop - part[axis].start > 1), None)
        if size <= PART_SIZE or axis is None:
            yield part
            return
        n, start = part[axis].stop - part[axis].start, part[axis].start
        pieces = min(n, -(-size // PART_SIZE))
        for k in range(pieces):
            lo, hi = start + k * n // pieces, start + (k + 1) * n // pieces
            yield from cut((*part[:axis], slice(lo, hi), *part[axis + 1 :]), size // n * (hi - lo))

    yield from cut(tuple(slice(0, n) for n in source.shape), source.size)
