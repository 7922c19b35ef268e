"""The persistent executor: one launch of one kernel per update, on a GPU that holds all ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import jax
import numpy as np

from shardfly_jax.executors.memory import Key, Shard, Sources
from shardfly_jax.pallas_kernels import transfer
from shardfly_jax.sharding import optable
from shardfly_jax.sharding.errors import StaleBuffer, TransferError
from shardfly_jax.sharding.formats import Conversion
from shardfly_jax.sharding.plan import Plan

SUPPORTED_CAPABILITY = "9.0"
DEADLINE_MS = 60_000


def why_not(plan: Plan, devices: set[jax.Device]) -> tuple[str, ...]:
    """Why this executor cannot run a plan on these GPUs; empty if it can."""
    reasons = []
    if len(devices) > 1:
        reasons.append(f"the ranks are spread over {len(devices)} GPUs, and the kernel serves one so far")
    for kind, capability in sorted({(d.device_kind, getattr(d, "compute_capability", "unknown")) for d in devices}):
        if capability != SUPPORTED_CAPABILITY:
            wanted = f"the kernel is built for {SUPPORTED_CAPABILITY} (Hopper)"
            reasons.append(f"{kind} has compute capability {capability}, and {wanted}")
    unsupported = optable.why_unsupported(plan)
    return (*reasons, unsupported) if unsupported else tuple(reasons)


class PersistentExecutor:
    """Runs a plan whose ranks share one GPU.

    Args:
      plan: `why_not` has nothing against it.
      buffers: Registered shards of all target families.
    """

    def __init__(self, plan: Plan, buffers: Mapping[Key, Shard]):
        self.plan, self.buffers = plan, buffers
        (self.device,) = {shard.device for shard in buffers.values()}
        self.table = optable.make_table(plan, lambda key: buffers[key].address)
        self.blocks = self.device.core_count * transfer.BLOCKS_PER_SM
        self._kernel = _jitted(plan.conversions, self.blocks)
        words = np.zeros((_size_class(len(self.table.words)), optable.WORDS), np.int32)
        words[: len(self.table.words)] = self.table.words
        self._words = jax.device_put(words.reshape(-1), self.device)
        self._launch = np.zeros(transfer.BASES + 2 * _size_class(len(self.table.buffers)), np.uint32)
        self._reset()

    def _reset(self) -> None:
        state = np.zeros(transfer.COUNTERS + _size_class(self.table.n_counters), np.int32)
        self._state = jax.device_put(state, self.device)
        self._epoch = 0

    def run(self, sources: Sources, progress: Callable[[int], None] | None = None) -> None:
        """Executes every move in one launch; see `Executor`.

        Raises:
          StaleBuffer: A buffer is not aligned to 16 bytes.
          TransferError: A forward waited for its data beyond the deadline.
        """
        arrays = [  # alive until the kernel has ended
            self.buffers[key].array if key in self.buffers else sources(*key) for key in self.table.buffers
        ]
        bases = np.array([array.unsafe_buffer_pointer() for array in arrays], np.uint64)
        if (bases % optable.BULK_ALIGNMENT).any():
            key = self.table.buffers[int((bases % optable.BULK_ALIGNMENT).argmax())]
            raise StaleBuffer(
                f"buffer: {self.plan.families[key[0]].name(key[1])!r} of rank {key[2]} is not aligned to "
                f"{optable.BULK_ALIGNMENT} bytes. Let JAX allocate params and rollout buffers."
            )
        batches = -(-self.table.n_tiles // transfer.CLAIM)
        numbers = [self.table.n_tiles, self._epoch * (batches + self.blocks), self._epoch + 1, DEADLINE_MS]
        self._epoch += 1
        self._launch[: transfer.BASES] = np.array(numbers, np.uint64)  # modulo 2^32
        self._launch[transfer.BASES : transfer.BASES + 2 * len(bases)] = bases.view(np.uint32)
        failed = self._kernel(self._words, jax.device_put(self._launch.view(np.int32), self.device), self._state)
        if int(failed[0]):
            self._reset()
            raise TransferError(
                f"transfer: a forward waited longer than {DEADLINE_MS / 1000:g} s for what it forwards. "
                "Sync again; if it stays so, report the plan."
            )
        if progress is not None:
            progress(self.plan.target_nbytes)


@functools.lru_cache(maxsize=64)
def _jitted(conversions: tuple[Conversion, ...], blocks: int) -> Callable[..., jax.Array]:
    return jax.jit(transfer.make_kernel(conversions, blocks))


def _size_class(n: int) -> int:
    """The next power of two: plans of one class share a compiled kernel."""
    return 1 << max(n - 1, 1).bit_length()
