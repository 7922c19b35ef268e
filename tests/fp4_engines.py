"""What other projects compute when they quantize to mxfp4, in NumPy, operation by operation."""

from __future__ import annotations

import numpy as np


def triton(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """triton_kernels' `_compute_quant_and_scale`, operation by operation: [rows, K / 2] and [rows, K / 32].

    But for one thing: its shift of values below 1 drops their lowest bits, so that the three float32 next above 0.25
    (scaled) count as ties there and round to 0. Here what is dropped stays seen, and they round to 0.5.
    """
    groups = x.astype(np.float32).reshape(len(x), -1, 32)
    scale = np.abs(groups).max(-1, keepdims=True) / np.float32(6)
    exponent = (scale.view(np.uint32) + np.uint32(0x7FFFFF)) & np.uint32(0x7F800000)
    rounded = exponent.view(np.float32)
    with np.errstate(divide="ignore"):
        factor = np.where(rounded == 0, np.float32(0), np.float32(1) / rounded)
    bits = (groups * factor).view(np.uint32)
    sign, e, m = bits & np.uint32(1 << 31), (bits >> 23 & 0xFF).astype(np.int64), (bits & 0x7FFFFF).astype(np.int64)
    whole, shift = 0x800000 | m, np.clip(127 - e, 0, 40)
    m = np.where(e < 127, whole >> shift | (whole & (1 << shift) - 1 != 0), m)
    e = np.maximum(e, 126) - 126
    top = m >> 21
    up = top & 1 & ((m & 0x1FFFFF != 0) | (top >> 1 & 1))
    code = (sign >> 28).astype(np.int64) | np.minimum(((e << 2 | top) + up) >> 1, 7)
    pairs = code.reshape(len(x), -1, 2)
    return (pairs[..., 0] | pairs[..., 1] << 4).astype(np.uint8), (exponent >> 23).astype(np.uint8)[..., 0]


def compressed_tensors(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """compressed-tensors' `generate_mx_scales`, `cast_to_fp4` and `pack_fp4_to_uint8`."""
    groups = x.astype(np.float32).reshape(len(x), -1, 32)
    amax = np.abs(groups).max(-1, keepdims=True)
    power = ((amax.view(np.uint32) + np.uint32(1 << 21)) & np.uint32(0x7F800000)).view(np.float32)
    with np.errstate(divide="ignore"):
        stored = np.clip(127 + np.floor(np.log2(power)) - 2, 0, 255).astype(np.uint8)
    y = groups / np.ldexp(np.float32(1), stored.astype(int) - 127)
    size, code = np.abs(y), np.zeros(y.shape, np.uint8)
    for k, (lo, hi, closed) in enumerate(
        [(0, 0.25, 1), (0.25, 0.75, 0), (0.75, 1.25, 1), (1.25, 1.75, 0), (1.75, 2.5, 1), (2.5, 3.5, 0), (3.5, 5, 1)]
    ):
        code[(size >= lo) & (size <= hi) if closed else (size > lo) & (size < hi)] = k
    code[size > 5] = 7
    code |= (np.signbit(y) & (y != 0)).astype(np.uint8) << 3  # its sign of -0.0 is 0
    pairs = code.reshape(len(x), -1, 2)
    return pairs[..., 0] | pairs[..., 1] << 4, stored[..., 0]
