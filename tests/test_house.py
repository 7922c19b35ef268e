"""The rules of the house: where imports may go, what modules are called, what is installed, how a Python is found."""

import ast
import importlib
import os
import pkgutil
import shutil
import subprocess
import sys
import types
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import shardfly_jax

CHECKOUT = Path(__file__).resolve().parent.parent
FIND_PYTHON = CHECKOUT / "scripts" / "find-python"

# What each folder may import besides the standard library: a name allows itself and all below it.
MAY_IMPORT = {
    "sharding": {"numpy", "ml_dtypes", "einops", "shardfly_jax.sharding"},
    "pallas_kernels": {"jax", "numpy", "ml_dtypes", "shardfly_jax.sharding", "shardfly_jax.pallas_kernels"},
}

# Names that users call on shardfly_jax, whether or not they are exported yet.
PUBLIC_CALLS = {
    "alias", "concat", "connect", "fuse", "load_plan", "local", "make_plan", "params", "receive", "receiving",
    "register", "rescale", "scale_of", "send", "src", "stack", "sync", "verify",
}  # fmt: skip


# Imports


def imported_names(source: str, module: str, *, is_package: bool) -> Iterator[tuple[int, str]]:
    """Yields (line, absolute dotted name) for all that `source`, being `module`, imports; a star is a name too."""
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield node.lineno, name.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")
                base = ".".join([*above[: len(above) - node.level + 1], *base.split(".")]).rstrip(".")
            for name in node.names:
                yield node.lineno, f"{base}.{name.name}"


def import_faults(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """Says which imports of `source` break a rule of the house."""
    room = next((room for room in MAY_IMPORT if module.split(".")[1:2] == [room]), None)
    faults = []
    for line, name in imported_names(source, module, is_package=is_package):
        root = name.split(".")[0]
        if name.endswith(".*"):
            faults.append(f"{module}:{line} imports * from {name[:-2]}")
        if root in MAY_IMPORT:
            faults.append(f"{module}:{line} imports {name} by its bare name")
        elif room is not None and root not in sys.stdlib_module_names:
            allowed = MAY_IMPORT[room]
            if not any(name == prefix or name.startswith(prefix + ".") for prefix in allowed):
                faults.append(f"{module}:{line} imports {name}, but {room} may import only {sorted(allowed)}")
    return faults


def packaged_files(*suffixes: str) -> list[Path]:
    """Files under shardfly_jax, the mapped folders included, relative to the checkout."""
    found = []
    for folder, folders, files in os.walk(CHECKOUT / "shardfly_jax", followlinks=True):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        found += [Path(folder, name).relative_to(CHECKOUT) for name in sorted(files) if name.endswith(suffixes)]
    return found


def test_imports_go_one_way_and_star_imports_are_absent() -> None:
    files = packaged_files(".py")
    assert Path("shardfly_jax/sharding/__init__.py") in files
    assert Path("shardfly_jax/pallas_kernels/__init__.py") in files
    faults = []
    for file in files:
        is_package = file.name == "__init__.py"
        module = ".".join(file.parent.parts if is_package else file.with_suffix("").parts)
        faults += import_faults((CHECKOUT / file).read_text(encoding="utf-8"), module, is_package=is_package)
    assert faults == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("shardfly_jax.sharding.boxes", "import jax"),
        ("shardfly_jax.sharding.boxes", "import numpy, jax.numpy as jnp"),
        ("shardfly_jax.sharding.boxes", "def f():\n    from shardfly_jax.pallas_kernels import tiles"),
        ("shardfly_jax.sharding.boxes", "import shardfly_jax"),
        ("shardfly_jax.sharding.boxes", "from shardfly_jax import planning"),
        ("shardfly_jax.sharding.boxes", "from ..planning import make_plan"),
        ("shardfly_jax.sharding.boxes", "from .. import planning"),
        ("shardfly_jax.sharding.boxes", "from .plan import *"),
        ("shardfly_jax.sharding.boxes", "from sharding import plan"),
        ("shardfly_jax.pallas_kernels.tiles", "from shardfly_jax.registry import Session"),
        ("shardfly_jax.pallas_kernels.tiles", "from shardfly_jax import Plan"),
        ("shardfly_jax.pallas_kernels.tiles", "import flax"),
        ("shardfly_jax.update", "import pallas_kernels.transfer"),
        ("shardfly_jax.update", "from shardfly_jax.sharding import *"),
    ],
)
def test_an_import_against_the_rules_is_found(module: str, source: str) -> None:
    assert len(import_faults(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("shardfly_jax.sharding.boxes", "import math\nimport numpy as np\nimport ml_dtypes, einops.parsing"),
        ("shardfly_jax.sharding.boxes", "from shardfly_jax.sharding import plan\nfrom .plan import Plan"),
        ("shardfly_jax.sharding.boxes", "from shardfly_jax import sharding\nfrom . import plan"),
        ("shardfly_jax.pallas_kernels.tiles", "from jax.experimental import pallas as pl\nfrom ..sharding import plan"),
        ("shardfly_jax.update", "import flax, rich\nfrom shardfly_jax.pallas_kernels import tiles"),
    ],
)
def test_an_import_within_the_rules_is_not_reported(module: str, source: str) -> None:
    assert import_faults(source, module) == []


def packages() -> list[types.ModuleType]:
    found = pkgutil.walk_packages(shardfly_jax.__path__, "shardfly_jax.")
    return [shardfly_jax, *(importlib.import_module(info.name) for info in found if info.ispkg)]


def test_no_module_is_named_like_a_public_function_of_its_package() -> None:
    for package in packages():
        modules = {info.name for info in pkgutil.iter_modules(package.__path__)}
        exported = {*dir(package), *getattr(package, "__all__", ())}
        public = {
            name
            for name in exported
            if not name.startswith("_") and not isinstance(getattr(package, name), types.ModuleType)
        }
        if package is shardfly_jax:
            public |= PUBLIC_CALLS
        assert modules & public == set(), f"import {package.__name__}.X would replace the function X"


@pytest.mark.parametrize("name", ["sharding", "pallas_kernels"])
def test_a_bare_folder_refuses_to_be_imported_and_names_the_package(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import {name}"], cwd=CHECKOUT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ImportError")
    assert f"shardfly_jax.{name}" in done.stderr.splitlines()[-1]


# The wheel


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names in a wheel built from a copy (setuptools leaves build/ and egg-info where it builds)."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(CHECKOUT / name, copy / name)
    for name in ("shardfly_jax", "sharding", "pallas_kernels", "examples", "tests"):
        shutil.copytree(CHECKOUT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(copy / "dist")]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (copy / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_wheel_holds_every_module_and_data_file(wheel_names: set[str]) -> None:
    assert {file.as_posix() for file in packaged_files(".py", ".json")} - wheel_names == set()


def test_the_wheel_installs_one_top_level_name(wheel_names: set[str]) -> None:
    top = {name.split("/")[0] for name in wheel_names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"shardfly_jax"}


# The search for a Python


def put_python(folder: Path, name: str, body: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / name
    program.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    program.chmod(0o755)
    return program


def find_python(home: Path, *path: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs scripts/find-python where only `path` and the pyenv of `home` can be seen."""
    env = {"PATH": os.pathsep.join(map(str, path)), "HOME": str(home), **env}
    return subprocess.run(
        ["/bin/sh", str(FIND_PYTHON)], env=env, capture_output=True, text=True, timeout=120, check=False
    )


SHIM = "echo 'pyenv: command not found' >&2; exit 127"
OLD = "echo Python 3.9.2"
NO_VENV = f"""exec '{sys.executable}' -c 'import sys; sys.modules["ensurepip"] = None; exec(sys.argv[3])' "$@" """
REAL = f"exec '{sys.executable}' \"$@\""


def test_find_python_passes_over_pythons_that_do_not_run_are_old_or_lack_venv(tmp_path: Path) -> None:
    put_python(tmp_path / "shims", "python3.13", SHIM)
    put_python(tmp_path / "shims", "python3.12", SHIM)
    put_python(tmp_path / "shims", "python3", OLD)
    put_python(tmp_path / "bin", "python3.12", NO_VENV)
    put_python(tmp_path / "bin", "python3", REAL)
    done = find_python(tmp_path, tmp_path / "shims", tmp_path / "bin")
    assert (done.returncode, done.stderr) == (0, "")
    assert Path(done.stdout.rstrip("\n")).samefile(sys.executable)


def test_find_python_falls_back_to_interpreters_of_pyenv(tmp_path: Path) -> None:
    put_python(tmp_path / "shims", "python3", SHIM)
    put_python(tmp_path / ".pyenv" / "versions" / "3.9.18" / "bin", "python", OLD)
    put_python(tmp_path / ".pyenv" / "versions" / "3.12.1" / "bin", "python", REAL)
    done = find_python(tmp_path, tmp_path / "shims")
    assert (done.returncode, done.stderr) == (0, "")
    assert Path(done.stdout.rstrip("\n")).samefile(sys.executable)


def test_find_python_takes_the_newest_of_pyenv_by_number(tmp_path: Path) -> None:
    # The programs print what the script's own probe would print.
    versions = tmp_path / "elsewhere" / "versions"
    for name, answer in [
        ("3.12.9", "usable:3012009:/pythons/3.12.9"),
        ("3.13.10", "usable:3013010:/pythons/3.13.10"),
        ("3.13.9", "usable:3013009:/pythons/3.13.9"),
        ("3.16.0a1", "early:3016000:/pythons/3.16.0a1"),
    ]:
        put_python(versions / name / "bin", "python", f"echo {answer}")
    done = find_python(tmp_path, PYENV_ROOT=str(versions.parent))
    assert (done.returncode, done.stdout) == (0, "/pythons/3.13.10\n")


def test_find_python_says_in_one_line_what_to_install_when_nothing_fits(tmp_path: Path) -> None:
    put_python(tmp_path / "shims", "python3.12", SHIM)
    put_python(tmp_path / "shims", "python3", OLD)
    done = find_python(tmp_path, tmp_path / "shims")
    assert (done.returncode, done.stdout) == (1, "")
    assert len(done.stderr.splitlines()) == 1
    assert "nstall" in done.stderr
    assert "3.12" in done.stderr


@pytest.mark.parametrize("body", [SHIM, OLD, NO_VENV])
def test_find_python_refuses_an_unusable_choice_of_the_user_in_one_line(tmp_path: Path, body: str) -> None:
    chosen = put_python(tmp_path / "chosen", "python", body)
    put_python(tmp_path / "bin", "python3", REAL)
    done = find_python(tmp_path, tmp_path / "bin", PYTHON=str(chosen))
    assert (done.returncode, done.stdout) == (1, "")
    assert len(done.stderr.splitlines()) == 1
    assert str(chosen) in done.stderr


def test_find_python_takes_the_choice_of_the_user_before_all_others(tmp_path: Path) -> None:
    put_python(tmp_path / "bin", "python3.13", "echo usable:3013000:/wrong")
    chosen = put_python(tmp_path / "chosen", "python", REAL)
    done = find_python(tmp_path, tmp_path / "bin", PYTHON=str(chosen))
    assert done.returncode == 0
    assert Path(done.stdout.rstrip("\n")).samefile(sys.executable)
