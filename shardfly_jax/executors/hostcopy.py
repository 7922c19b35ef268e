"""One strided, converting copy between two places of host memory, as fast as NumPy can be made to go.

Where source and target are contiguous along different axes (a transpose), a tile is read row by row into scratch memory
that fits the cache, converted there, and written out column by column. Scratch rows are padded: rows whose distance is
a power of two fall into the same cache sets and would evict each other.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from shardfly_jax.sharding.formats import Cast, Conversion

TILE_ROWS = 1024
TILE_COLUMNS = 128
TILE_PAD_NBYTES = 16
DIRECT_SIZE = 1 << 17
"""Elements converted at a time where no tile is needed."""

_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_scratch = threading.local()


def copy(target: np.ndarray, source: np.ndarray, conversion: Conversion) -> None:
    """`target[...] = conversion(source)` for two strided views of one shape.

    Args:
      target: Of the conversion's target dtype.
      source: Of the conversion's source dtype.
      conversion: Not a fill.
    """
    if conversion.is_bits:
        bits = _BITS[target.itemsize]
        target, source = target.view(bits), source.view(bits)
    rows = _unit_axis(target)  # contiguous in the target
    columns = _unit_axis(source)
    if rows is None or columns is None or rows == columns:
        _copy_straight(target, source, conversion)
        return
    order = [axis for axis in range(target.ndim) if axis not in (rows, columns)] + [rows, columns]
    target, source = target.transpose(order), source.transpose(order)
    for index in np.ndindex(target.shape[:-2]):
        _copy_transposed(target[index], source[index], conversion)


def place(target: np.ndarray, payload: Any) -> None:
    """Writes the bytes of a contiguous array of the target's shape and dtype.

    Args:
      target: A strided view.
      payload: A buffer of as many bytes.
    """
    bits = _BITS[target.itemsize]
    np.copyto(target.view(bits), np.frombuffer(payload, bits).reshape(target.shape))


def _unit_axis(x: np.ndarray) -> int | None:
    """The axis along which an array is contiguous."""
    return next((axis for axis in range(x.ndim) if x.strides[axis] == x.itemsize and x.shape[axis] > 1), None)


def _copy_straight(target: np.ndarray, source: np.ndarray, conversion: Conversion) -> None:
    if conversion.is_bits:
        np.copyto(target, source)
    elif target.size <= DIRECT_SIZE or target.ndim == 0:
        np.copyto(target, convert(conversion, source))
    else:  # keep intermediate values in the cache
        step = max(1, DIRECT_SIZE * target.shape[0] // target.size)
        for start in range(0, target.shape[0], step):
            _copy_straight(target[start : start + step], source[start : start + step], conversion)


def _copy_transposed(target: np.ndarray, source: np.ndarray, conversion: Conversion) -> None:
    n_rows, n_columns = target.shape
    pitch = TILE_COLUMNS + TILE_PAD_NBYTES // source.itemsize
    rows = min(n_rows, TILE_ROWS)
    tile = _tile(rows * pitch * source.itemsize).view(source.dtype).reshape(rows, pitch)
    for top in range(0, n_rows, rows):
        height = min(rows, n_rows - top)
        for left in range(0, n_columns, TILE_COLUMNS):
            width = min(TILE_COLUMNS, n_columns - left)
            part = tile[:height, :width]
            np.copyto(part, source[top : top + height, left : left + width])
            done = part if conversion.is_bits else convert(conversion, part)
            np.copyto(target[top : top + height, left : left + width].T, done.T)


def _tile(nbytes: int) -> np.ndarray:
    """This thread's scratch memory."""
    have = getattr(_scratch, "memory", None)
    if have is None or len(have) < nbytes:
        have = _scratch.memory = np.empty(nbytes, np.uint8)
    return have[:nbytes]


def convert(conversion: Conversion, x: np.ndarray) -> np.ndarray:
    """`conversion.apply(x)`, with the common rounding of float32 to bfloat16 done in integers, several times faster."""
    if conversion.source != "float32" or conversion.steps != (Cast("bfloat16"),):
        return conversion.apply(x)
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    out = rounded.astype(np.uint16)
    nan = np.isnan(x)
    if nan.any():
        out[nan] = ((bits[nan] >> 16) & 0x8000 | 0x7FC0).astype(np.uint16)
    return out.view(Cast("bfloat16").apply(np.empty(0, np.float32)).dtype)
