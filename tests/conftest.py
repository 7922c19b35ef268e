"""Eight CPU devices unless the user says otherwise; the installed package, not the checkout; skips that say why."""

import importlib.util
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    import numpy as np
    from fault_pool import Pool, Shared
    from host_gpu import Driver

    from shardfly_jax.worlds.world import World

CHECKOUT = Path(__file__).resolve().parent.parent
DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"


def choose_cpu_devices() -> None:
    """Asks for eight CPU devices where the environment leaves that open; takes effect only before jax is imported."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    flags = os.environ.get("XLA_FLAGS", "")
    if DEVICE_COUNT_FLAG not in flags and "JAX_NUM_CPU_DEVICES" not in os.environ:
        os.environ["XLA_FLAGS"] = f"{flags} {DEVICE_COUNT_FLAG}=8".strip()


def leave_the_checkout() -> None:
    """Takes the checkout root off sys.path: tests import what is installed, and the bare folders stay unreachable."""
    sys.path[:] = [entry for entry in sys.path if Path(entry or os.curdir).resolve() != CHECKOUT]


# a busy machine is no fault; `make test` chooses hypothesis' own profile `ci`, which repeats the same cases
settings.register_profile("random", deadline=None, print_blob=True)
settings.load_profile("random")
choose_cpu_devices()
leave_the_checkout()


def installed_at() -> str | None:
    """Returns the file that `import shardfly_jax` would run, or None when nothing is installed."""
    spec = importlib.util.find_spec("shardfly_jax")
    return None if spec is None else spec.origin


def count_gpus() -> int:
    import jax

    try:
        return len(jax.devices("gpu"))
    except RuntimeError:  # no such platform, or JAX_PLATFORMS leaves it out
        return 0


def why_no_gpus(needed: int) -> str | None:
    found = count_gpus()
    if found >= needed:
        return None
    return f"needs {needed} GPU(s), but JAX sees {found} (JAX_PLATFORMS is {os.environ['JAX_PLATFORMS']!r})"


def why_no_mpi() -> str | None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    missing = [name for name in ("mpi4jax", "mpi4py") if importlib.util.find_spec(name) is None]
    missing += [] if shutil.which("mpirun", path=path) else ["mpirun"]
    return f"needs {', '.join(missing)} (make setup-mpi)" if missing else None


NEEDS: dict[str, Callable[[], str | None]] = {
    "gpu": lambda: why_no_gpus(1),
    "multigpu": lambda: why_no_gpus(2),
    "mpi": why_no_mpi,
}


def pytest_configure(config: pytest.Config) -> None:
    if installed_at() is None:
        raise pytest.UsageError(
            "shardfly_jax is not installed for this Python. Run `make test`, or `python -m pip install -e '.[test]'`."
        )


def pytest_report_header(config: pytest.Config) -> str:
    return f"shardfly_jax: {installed_at()}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for name, why_not in NEEDS.items():
        marked = [item for item in items if item.get_closest_marker(name)]
        reason = why_not() if marked else None
        if reason is not None:
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def rng() -> "np.random.Generator":
    """Fresh random data each run. The seed is printed when the test fails; `SHARDFLY_SEED` repeats it."""
    import numpy as np

    seed = int(os.environ.get("SHARDFLY_SEED") or secrets.randbits(32))
    print(f"repeat with SHARDFLY_SEED={seed}")
    return np.random.default_rng(seed)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cuts even tiny tensors into several chunks and bands."""
    from shardfly_jax.executors import host
    from shardfly_jax.sharding import routing

    monkeypatch.setattr(host, "CHUNK_NBYTES", 200)
    monkeypatch.setattr(routing, "BAND_NBYTES", 400)
    monkeypatch.setattr(routing, "SMALLEST_BAND_NBYTES", 100)


@pytest.fixture
def pool(shared: "Shared") -> "Iterator[Pool]":
    """Five processes that have done an update, of a module's `shared`; those that a failed test has left end."""
    yield (pool := shared.whole())
    if not pool.is_whole:
        shared.end()


@pytest.fixture
def rendezvous() -> "Iterator[World]":
    """A world in this process that others may enter."""
    from small_world import TOKEN

    import shardfly_jax as sf

    with sf.connect("tcp://127.0.0.1:0", TOKEN, serve=True, deadline_secs=5, lost_secs=5) as world:
        yield world


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, small_chunks: None) -> "Iterator[Driver]":
    """Of CPU devices that are taken for GPUs; nothing is left in its books in the end, and no thread runs."""
    from host_gpu import install, library_threads
    from threaded_world import eventually

    before = library_threads()
    made = install(lambda *args: monkeypatch.setattr(*args, raising=False))
    yield made
    made.check_books()
    eventually(lambda: library_threads() <= before)
