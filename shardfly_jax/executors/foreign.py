"""JAX arrays in memory that JAX has not allocated, of any dtype, through hand-made DLPack capsules.

Source: DLPack's `dlpack.h`, version 0.8 and the float8 type codes of 1.1. Libraries that make capsules know neither
bfloat16 nor float8 on all sides.
"""

from __future__ import annotations

import atexit
import ctypes
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from shardfly_jax.sharding.errors import RegistrationError
from shardfly_jax.sharding.formats import dtype_name

CPU, CUDA = 1, 2
KINDS = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}
CODES = {
    "bfloat16": 4,
    "float8_e3m4": 7,
    "float8_e4m3": 8,
    "float8_e4m3b11fnuz": 9,
    "float8_e4m3fn": 10,
    "float8_e4m3fnuz": 11,
    "float8_e5m2": 12,
    "float8_e5m2fnuz": 13,
    "float8_e8m0fnu": 14,
}
"""Type codes of what NumPy has no kind for."""


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


_alive: dict[int, tuple[_Managed, object]] = {}
"""What arrays use, by the address of their capsule's structure."""


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _let_go(managed: int) -> None:
    _alive.pop(managed, None)


ctypes.pythonapi.Py_IncRef(ctypes.py_object(_let_go))  # arrays may outlive this module


@atexit.register
def _forget_deleters() -> None:
    """Python cannot be called any more when the last arrays go, but XLA calls whatever deleter it then finds."""
    nothing = ctypes.cast(ctypes.pythonapi.Py_IsInitialized, ctypes.c_void_p)  # does no harm
    for managed, _ in _alive.values():
        managed.deleter = nothing


class _Exporter:
    """What `from_dlpack` asks for a capsule."""

    def __init__(self, managed: _Managed):
        self._managed = managed

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._managed.tensor.device_type, self._managed.tensor.device_id

    def __dlpack__(self, **_: object) -> Any:
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return new(ctypes.addressof(self._managed), b"dltensor", None)


def array_at(address: int, shape: Sequence[int], dtype: Any, device: jax.Device, owner: object) -> jax.Array:
    """An array over memory at an address.

    Args:
      address: Of `shape` elements in row-major order, aligned to 256 bytes.
      dtype: Of them.
      device: Whose memory it is: a CPU or an NVIDIA GPU.
      owner: Kept alive until the last array over this memory has gone.

    Raises:
      RegistrationError: JAX has copied the memory instead of adopting it.
    """
    dtype = np.dtype(dtype)
    name = dtype_name(dtype)
    code = CODES[name] if name in CODES else KINDS[dtype.kind]
    on_gpu = device.platform == "gpu"
    sizes = (ctypes.c_int64 * max(len(shape), 1))(*shape)
    tensor = _Tensor(
        data=address,
        device_type=CUDA if on_gpu else CPU,
        device_id=device.local_hardware_id if on_gpu else 0,
        ndim=len(shape),
        code=code,
        bits=8 * dtype.itemsize,
        lanes=1,
        shape=ctypes.cast(sizes, ctypes.POINTER(ctypes.c_int64)),
    )
    managed = _Managed(tensor=tensor, deleter=ctypes.cast(_let_go, ctypes.c_void_p))
    _alive[ctypes.addressof(managed)] = managed, (owner, sizes)
    array = jax.dlpack.from_dlpack(_Exporter(managed))
    if math.prod(shape) and array.unsafe_buffer_pointer() != address:
        raise RegistrationError(
            f"registration: JAX has copied {math.prod(shape) * dtype.itemsize} bytes at {address:#x} instead of "
            "adopting them. Report the versions of JAX and CUDA."
        )
    return array
