"""What README and notebooks show is run as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from benchmark_modules import module
from nbclient import NotebookClient

from shardfly_jax.__main__ import main

ROOT = Path(__file__).parents[1]


def test_the_readme_examples_run_as_printed(tmp_path: Path) -> None:
    short, code, *fragments = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    for fragment in fragments:
        compile(fragment, "README.md", "exec")
    script = tmp_path / "example.py"
    for example, printed in ((short, "spec=P(None, 'x')"), (code, "'rollout/0': 3, 'rollout/1': 3")):
        script.write_text(example)
        done = subprocess.run(
            [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=120, env={**os.environ}
        )
        assert done.returncode == 0, done.stderr
        assert printed in done.stdout


SHARDINGS = re.findall(
    r"^\| (\S+) \| `(\S+)` \| `(\S+)` \| (.*) \|$", (ROOT / "docs" / "shardings.md").read_text(), re.MULTILINE
)


@pytest.mark.parametrize(("model", "trainer", "rollout", "figures"), SHARDINGS, ids=lambda x: x.partition(" | ")[0])
def test_the_figures_on_shardings_are_what_explain_prints(
    model: str, trainer: str, rollout: str, figures: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", "--model", model, "--trainer", trainer, "--rollout", rollout]) == 0
    text = capsys.readouterr().out
    printed = [
        re.search(pattern, text, re.MULTILINE)
        for pattern in (
            r"^moves +([\d,]+),", r"^payload .*: (\S+ .B) from trainers", r"^between hosts +(\S+ .?B)",
            r"^all +100.0% .*\(([^)]+)\)$", r"^predicted +(\S+ ms);", r"ratio (\S+);",
        )
    ]  # fmt: skip
    assert figures.split(" | ") == [found[1] if found else "-" for found in printed]


def test_the_sharp_bits_are_as_sharp_as_the_page_says(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "sharp-bits.md").read_text(), re.DOTALL)
    script = tmp_path / "bits.py"
    script.write_text("\n".join(blocks))
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for word in ("another one", "allow_cast", "never been filled", "nothing was written", "'extra'"):
        assert word in done.stdout


def test_the_page_on_shardings_has_figures() -> None:
    assert len(SHARDINGS) == 17


OF_EVERY_PROCESS = """
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec as P
import shardfly_jax as sf

token = "of the tests"
like = lambda mesh, name: jax.ShapeDtypeStruct((4, 6), "float32", sharding=NamedSharding(mesh, P(name)))
plan = sf.make_plan({"w": like(AbstractMesh((2,), "x"), "x")}, {"w": like(AbstractMesh((2,), "y"), "y")})
whole = np.arange(24, dtype=np.float32).reshape(4, 6) + 1
params = {"w": jax.device_put(whole, NamedSharding(Mesh(jax.devices(), "x"), P("x")))}
"""


def test_the_readme_example_of_several_processes_runs(tmp_path: Path) -> None:
    pytest.importorskip("zmq", reason="needs pyzmq (the zmq extra)")
    (code,) = re.findall(r"```py\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    code = code.replace("tcp://10.0.0.1:5555", f"ipc://{tmp_path}/a").replace("tcp://10.0.0.2:0", f"ipc://{tmp_path}/b")
    trainer, rollout = code.split("# rollout.py")
    rollout = f"#{rollout}\nassert np.concatenate([rollout_params['w'][r] for r in (0, 1)]).tolist() == whole.tolist()"
    programs = []
    for name, part in (("trainer", trainer), ("rollout", rollout)):
        script = tmp_path / f"{name}.py"
        script.write_text(OF_EVERY_PROCESS + part)
        programs.append(
            subprocess.Popen([sys.executable, str(script)], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
        )
    for program in programs:
        _, complaint = program.communicate(timeout=120)
        assert program.returncode == 0, complaint


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore")  # jupyter's own
def test_notebooks_run_from_top_to_bottom(path: Path) -> None:
    NotebookClient(nbformat.read(path, as_version=4), timeout=300).execute()


def test_readme_tables_are_those_of_the_committed_results() -> None:
    tables = module("tables")
    text = (ROOT / "README.md").read_text()
    found = dict(re.findall(r"<!-- table: (\w+) -->\n(.*?)\n<!-- end -->", text, re.DOTALL))
    assert set(found) == set(tables.MAKERS)
    for part, shown in found.items():
        assert shown == tables.shown(ROOT / "benchmarks" / "results", part)
