"""As much of PyTorch as `benchmarks.peer_worker` uses, over NumPy, with two ranks that are threads of one process.

Streams are not simulated: what a stream orders happens at once. What NCCL leaves open is a choice: a collective that is
not waited for moves its bytes as early as it may (when it is called), or as late (when it is waited for).
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import types
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

TIMEOUT_SECS = 20.0


class Tensor(np.ndarray):
    """An array with PyTorch's methods."""

    def view(self, *to: Any) -> Any:  # type: ignore[override]
        if isinstance(to[0], type | np.dtype):
            return np.ndarray.view(self, to[0])
        out = self.reshape(*to)
        if not np.shares_memory(out, self) and out.size:
            raise RuntimeError("view size is not compatible with input tensor's size and stride")
        return out

    def copy_(self, other: np.ndarray, non_blocking: bool = False) -> Tensor:
        self[...] = np.asarray(other).astype(self.dtype)
        return self

    def fill_(self, value: int) -> Tensor:
        self[...] = value
        return self

    def to(self, dtype: Any) -> Tensor:
        return self.astype(dtype)

    def float(self) -> Tensor:
        return self.astype(np.float32)

    def short(self) -> Tensor:
        return self.astype(np.int16)

    def contiguous(self) -> Tensor:
        return np.ascontiguousarray(self).view(Tensor)

    def clone(self, memory_format: Any) -> Tensor:
        return self.copy(order="C")

    def abs(self) -> Tensor:
        return np.abs(self)

    def amax(self, axes: tuple[int, ...], keepdim: bool) -> Tensor:
        return np.max(self, axes, keepdims=keepdim)

    def clamp(self, least: float | None = None, most: float | None = None, *, min: float | None = None) -> Tensor:
        return np.clip(self, least if min is None else min, most)


class Wire:
    """What lies between the two ranks: queues of messages.

    Args:
      late: By rank, whether its collectives move bytes when they are waited for.
      lost: Whether one byte of each message is changed.
    """

    def __init__(self, late: tuple[bool, bool], lost: bool = False):
        self.late, self.lost = late, lost
        self.here = threading.local()
        self.messages: queue.Queue[np.ndarray] = queue.Queue()
        self.shared: dict[int, np.ndarray] = {}

    def moved(self, tensor: np.ndarray, sends: bool, wait: bool) -> Any:
        assert tensor.flags.c_contiguous

        def move() -> None:
            if sends:
                data = np.array(tensor).reshape(-1)
                if self.lost:
                    data.view(np.uint8)[0] ^= 1
                self.messages.put(data)
                return
            data = self.messages.get(timeout=TIMEOUT_SECS)
            assert data.size == tensor.size
            tensor.reshape(-1)[...] = data

        if wait or not self.late[self.here.rank]:
            move()
            return types.SimpleNamespace(wait=lambda: None)
        return types.SimpleNamespace(wait=move)

    def broadcast(self, tensor: np.ndarray, root: int, async_op: bool = False) -> Any:
        return self.moved(tensor, self.here.rank == root, wait=not async_op)


def modules(wire: Wire) -> dict[str, Any]:
    """What to put into `sys.modules`."""
    torch = types.ModuleType("torch")
    dtypes = {"float32": np.float32, "int16": np.int16, "uint8": np.uint8}
    dtypes |= {name: getattr(ml_dtypes, name) for name in ("bfloat16", "float8_e4m3fn")}
    vars(torch).update({name: np.dtype(dtype) for name, dtype in dtypes.items()})

    def empty(shape: Any, dtype: Any = np.float32, device: Any = None, pin_memory: bool = False) -> Tensor:
        return np.full(shape, 0.5, np.float32).astype(dtype).view(Tensor)

    def randn(shape: Any, dtype: Any, device: Any, generator: Any) -> Tensor:
        return generator.rng.standard_normal(shape, np.float32).astype(dtype).view(Tensor)

    class Generator:
        def __init__(self, device: Any):
            self.rng = np.random.default_rng(0)

        def manual_seed(self, seed: int) -> Generator:
            self.rng = np.random.default_rng(seed)
            return self

    class Stream:
        def __init__(self, device: Any = None):
            self.device = device

        def wait_event(self, event: Any) -> None:
            assert event is not None

        def record_event(self) -> Any:
            return types.SimpleNamespace(synchronize=lambda: None)

        def synchronize(self) -> None:
            pass

    numbers = itertools.count()

    def reduce_tensor(tensor: Tensor) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        key = next(numbers)
        SHARED[key] = tensor
        return shared_tensor, (key,)

    def batch(operations: list[Any]) -> list[Any]:
        return [wire.moved(tensor, sends, wait=False) for sends, tensor in operations]

    torch.Tensor = Tensor
    torch.device = lambda *words: words
    torch.empty, torch.randn, torch.Generator = empty, randn, Generator
    torch.contiguous_format = "contiguous"
    torch.equal = lambda a, b: a.shape == b.shape and bool((a == b).all())
    torch.allclose = lambda a, b, rtol: bool(np.allclose(a, b, rtol=rtol))
    torch.cat = lambda parts: np.concatenate(parts).view(Tensor)
    torch.compile = lambda function, dynamic: function
    cuda = types.ModuleType("torch.cuda")
    cuda.set_device = cuda.synchronize = lambda device=None: None
    cuda.empty_cache = lambda: None
    cuda.Stream, cuda.current_stream = Stream, Stream
    cuda.stream = cuda.device = lambda what: contextlib.nullcontext()
    dist = types.ModuleType("torch.distributed")
    dist.broadcast, dist.batch_isend_irecv = wire.broadcast, batch
    dist.isend, dist.irecv = True, False
    dist.P2POp = lambda sends, tensor, peer: (sends, tensor)
    reductions = types.ModuleType("torch.multiprocessing.reductions")
    reductions.reduce_tensor = reduce_tensor
    torch.cuda, torch.distributed = cuda, dist
    return {
        "torch": torch, "torch.cuda": cuda, "torch.distributed": dist,
        "torch.multiprocessing": types.ModuleType("torch.multiprocessing"),
        "torch.multiprocessing.reductions": reductions,
    }  # fmt: skip


SHARED: dict[int, Tensor] = {}


def shared_tensor(key: int) -> Tensor:
    """What `reduce_tensor` makes a handle of."""
    return SHARED[key]
