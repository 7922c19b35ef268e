"""`make docs` builds, and its pages name and explain all that users import."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

import shardfly_jax

SCRIPT = Path(__file__).parents[1] / "scripts" / "api_docs.py"
PAGES = ("", ".formats", ".plots", ".engines", ".engines.flax", ".engines.jax_toolbox", ".adapters.tunix")


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("pdoc", reason="needs pdoc (the docs extra)")
    folder = tmp_path_factory.mktemp("api")
    done = subprocess.run([sys.executable, str(SCRIPT), str(folder)], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    return folder


def public(module: types.ModuleType) -> dict[str, object]:
    """What users may call or raise from a module, by name."""
    found = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    return {
        name: value
        for name, value in found.items()
        if not isinstance(value, types.ModuleType)
        and getattr(value, "__module__", "").startswith("shardfly_jax")
        and (
            module in (shardfly_jax, shardfly_jax.engines, shardfly_jax.formats) or value.__module__ == module.__name__
        )
    }


@pytest.mark.parametrize("name", PAGES)
def test_every_public_name_has_a_place_and_an_explanation(pages: Path, name: str) -> None:
    module = importlib.import_module(f"shardfly_jax{name}")
    html = (pages / f"shardfly_jax{name.replace('.', '/')}.html").read_text()
    symbols = public(module)
    assert symbols
    for symbol, value in symbols.items():
        assert f'id="{symbol}"' in html, symbol
        words = inspect.getdoc(value)
        assert words, symbol
        first = re.sub(r"<[^>]+>|\W+", " ", words.split("\n")[0].split("`")[0]).strip()
        shown = re.sub(r"<[^>]+>|&\w+;|\W+", " ", html)
        assert re.sub(r"\W+", " ", first) in re.sub(r"\W+", " ", shown), symbol


def test_the_readmes_table_of_calls_is_in_the_reference(pages: Path) -> None:
    readme = (SCRIPT.parents[1] / "README.md").read_text()
    calls = set(re.findall(r"`sf\.(\w+)\(", readme))
    html = (pages / "shardfly_jax.html").read_text()
    assert len(calls) >= 12
    assert {call for call in calls if f'id="{call}"' not in html} == set()


def test_every_page_can_be_reached_from_the_index_by_links(pages: Path) -> None:
    waiting, seen = [pages / "index.html"], set[Path]()
    while waiting:
        page = waiting.pop()
        seen.add(page)
        found = re.findall(r'(?:href="|url=)([^"#:]+\.html)', page.read_text())
        waiting += {(page.parent / link).resolve() for link in found} - seen - set(waiting)
    assert seen == {page.resolve() for page in pages.rglob("*.html")}
    assert len(seen) > len(PAGES)


def test_modules_are_named_with_what_they_are_for(pages: Path) -> None:
    html = (pages / "shardfly_jax" / "engines.html").read_text()
    for name in ("tunix", "maxtext", "flax", "jax_toolbox", "hf", "vllm", "sglang", "canonical"):
        words = importlib.import_module(f"shardfly_jax.engines.{name}").__doc__
        assert words is not None
        first = re.split(r"[.:\n`]", words)[0].strip()
        assert first in html, name


def test_the_reference_begins_with_the_main_calls(pages: Path) -> None:
    html = (pages / "shardfly_jax.html").read_text()
    places = [html.index(f'id="{call}"') for call in ("make_plan", "register", "sync", "params", "verify", "receiving")]
    assert places == sorted(places)
    assert places[0] == min(html.index(f'id="{name}"') for name in public(shardfly_jax))
