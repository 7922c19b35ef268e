"""What README and notebooks show is run as it stands."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]


def test_the_readme_example_runs_as_printed(tmp_path: Path) -> None:
    code, *fragments = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    for fragment in fragments:
        compile(fragment, "README.md", "exec")
    script = tmp_path / "example.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=120, env={**os.environ}
    )
    assert done.returncode == 0, done.stderr
    assert "'rollout/0': 3, 'rollout/1': 3" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore")  # jupyter's own
def test_notebooks_run_from_top_to_bottom(path: Path) -> None:
    NotebookClient(nbformat.read(path, as_version=4), timeout=300).execute()


def test_readme_tables_are_those_of_the_committed_results() -> None:
    sys.path.insert(0, str(ROOT))
    try:
        from benchmarks import tables
    finally:
        sys.path.remove(str(ROOT))
    text = (ROOT / "README.md").read_text()
    found = dict(re.findall(r"<!-- table: (\w+) -->\n(.*?)\n<!-- end -->", text, re.DOTALL))
    assert set(found) == {"planning", "simulated", "updating", "on_gpu"}
    for part, shown in found.items():
        result = json.loads((ROOT / "benchmarks" / "results" / f"{part}.json").read_text())
        assert shown == tables.markdown(part, result)
