"""Modules of the benchmarks, which are not installed."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

ROOT = str(Path(__file__).parents[1])


def module(name: str) -> ModuleType:
    """One of them."""
    sys.path.insert(0, ROOT)
    try:
        return importlib.import_module(f"benchmarks.{name}")
    finally:
        sys.path.remove(ROOT)
