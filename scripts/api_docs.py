"""Builds the API reference from docstrings, as HTML: python scripts/api_docs.py FOLDER (or `make docs`)."""

from __future__ import annotations

import ast
import importlib
import sys
import warnings
from pathlib import Path
from types import ModuleType

import pdoc
import pdoc.render

MODULES = (
    "shardfly_jax", "shardfly_jax.formats", "shardfly_jax.plots", "shardfly_jax.engines", "shardfly_jax.engines.tunix",
    "shardfly_jax.engines.maxtext", "shardfly_jax.engines.flax", "shardfly_jax.engines.jax_toolbox",
    "shardfly_jax.engines.hf", "shardfly_jax.engines.vllm", "shardfly_jax.engines.sglang",
    "shardfly_jax.engines.canonical", "shardfly_jax.adapters", "shardfly_jax.adapters.tunix",
)  # fmt: skip
"""What users import, in the order of the reference."""
FIRST = (
    "make_plan", "register", "sync", "params", "verify", "Plan", "load_plan", "replicas", "local", "Layout", "Mapping",
    "src", "fuse", "concat", "stack", "alias", "scale_of", "Expr", "connect", "receive", "rescale",
)  # fmt: skip
"""What every user meets, before the rest, in this order."""


def exported(module: ModuleType) -> list[str]:
    """Names that a module exports, without modules: imported `as` themselves, or defined there without underscore."""
    assert module.__file__ is not None
    names: list[str] = []
    for node in ast.parse(Path(module.__file__).read_text(encoding="utf-8")).body:
        match node:
            case ast.ImportFrom():
                names += [name.name for name in node.names if name.asname == name.name]
            case ast.FunctionDef() | ast.ClassDef():
                names.append(node.name)
            case ast.Assign(targets=[ast.Name(id=name)]):
                names.append(name)
    own = [name for name in names if not name.startswith("_") and not isinstance(getattr(module, name), ModuleType)]
    return sorted(own, key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST))


def below(module: ModuleType) -> list[str]:
    """Full names of a module's own modules."""
    return [name for name in MODULES if name.rpartition(".")[0] == module.__name__]


def first_line(name: str) -> str:
    """Of a module's docstring."""
    return str(importlib.import_module(name).__doc__).strip().partition("\n")[0]


def build(folder: Path) -> None:
    """Writes one page per module, and an index."""
    for name in MODULES:
        module = importlib.import_module(name)
        shown = [*exported(module), *(inner.rpartition(".")[2] for inner in below(module))]
        module.__all__ = shown  # type: ignore[attr-defined]  # pdoc leaves re-exports out without it
        if below(module):
            listed = "".join(f"\n- `{inner}`: {first_line(inner)}" for inner in below(module))
            module.__doc__ = f"{module.__doc__}\n\nModules:\n{listed}\n"
    pdoc.render.configure(docformat="google", footer_text="shardfly_jax", show_source=False)
    with warnings.catch_warnings():
        # of fields that sf.Plan inherits, whose types pdoc seeks in the subclass' module
        warnings.filterwarnings("ignore", "Error parsing type annotation", UserWarning)
        # of worlds of MPI, where mpi4jax is not built; the annotation is shown as it is written
        warnings.filterwarnings("ignore", "Failed to run TYPE_CHECKING code", UserWarning)
        pdoc.pdoc(MODULES[0], output_directory=folder)  # and what its `__all__` names below it


if __name__ == "__main__":
    build(Path(sys.argv[1]))
