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
    "shardfly_jax.engines.canonical", "shardfly_jax.adapters.tunix",
)  # fmt: skip
"""What users import, in the order of the reference."""


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
    return [name for name in names if not name.startswith("_") and not isinstance(getattr(module, name), ModuleType)]


def build(folder: Path) -> None:
    """Writes one page per module, and an index."""
    for name in MODULES:
        module = importlib.import_module(name)
        module.__all__ = exported(module)  # type: ignore[attr-defined]  # pdoc leaves re-exports out without it
    pdoc.render.configure(docformat="google", footer_text="shardfly_jax", show_source=False)
    with warnings.catch_warnings():
        # of fields that sf.Plan inherits, whose types pdoc seeks in the subclass' module
        warnings.filterwarnings("ignore", "Error parsing type annotation", UserWarning)
        # of worlds of MPI, where mpi4jax is not built; the annotation is shown as it is written
        warnings.filterwarnings("ignore", "Failed to run TYPE_CHECKING code", UserWarning)
        pdoc.pdoc(*MODULES, output_directory=folder)


if __name__ == "__main__":
    build(Path(sys.argv[1]))
