"""Arrays in memory that JAX has not allocated."""

from __future__ import annotations

import gc
import weakref

import jax
import numpy as np
import pytest

from shardfly_jax.executors.foreign import CODES, array_at
from shardfly_jax.sharding.formats import np_dtype


class Owner:
    """Memory aligned to 256 bytes."""

    def __init__(self, nbytes: int):
        self.whole = np.random.default_rng().integers(0, 256, nbytes + 256, np.uint8)
        skip = -self.whole.ctypes.data % 256
        self.bytes = self.whole[skip : skip + nbytes]

    @property
    def address(self) -> int:
        return self.bytes.ctypes.data


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "uint8", "int32", "bool", *CODES])
def test_an_array_of_any_dtype_lies_where_it_was_put_and_shows_what_is_written_there(dtype: str) -> None:
    try:
        of = np_dtype(dtype)
        jax.numpy.zeros((1,), of)
    except (TypeError, ValueError, KeyError):
        pytest.skip(f"JAX has no {dtype} here")
    owner = Owner(6 * of.itemsize)
    if dtype == "bool":
        owner.bytes &= 1
    array = array_at(owner.address, (2, 3), of, jax.devices("cpu")[0], owner)
    assert (array.shape, array.dtype) == ((2, 3), of)
    assert array.unsafe_buffer_pointer() == owner.address
    assert np.asarray(array.clone()).tobytes() == owner.bytes.tobytes()
    owner.bytes[:] = 1
    assert np.asarray(array.clone()).tobytes() == bytes([1] * owner.bytes.size)


def test_memory_lives_as_long_as_the_last_array_over_it() -> None:
    owner = Owner(64)
    gone = weakref.ref(owner)
    array = array_at(owner.address, (16,), np.float32, jax.devices("cpu")[0], owner)
    other = array.clone()
    del owner, array
    gc.collect()
    assert gone() is not None
    del other
    gc.collect()
    assert gone() is None
