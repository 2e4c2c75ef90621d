"""The wheel: what is in it, and that it works in a clean environment outside the checkout."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("kernels", "capture", "api", "perf")
NETWORK = re.compile(r"No matching distribution|Temporary failure|Failed to establish|Connection|Read timed out", re.I)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, since setuptools writes beside the sources."""
    base = tmp_path_factory.mktemp("package")
    source = base / "source"
    ignored = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info", "tests", "docs", "results")
    shutil.copytree(ROOT, source, symlinks=True, ignore=ignored)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(base / "dist"), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    [made] = (base / "dist").iterdir()
    return made


def test_the_wheel_holds_every_source_file_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
        meta = {name.split("/", 1)[1] for name in archive.namelist() if ".dist-info/" in name}
    wanted = {str(path.relative_to(ROOT)) for path in (ROOT / "graphrt").rglob("*.py")}
    wanted = {name for name in wanted if name.split("/")[1] not in FOLDERS}
    for folder in FOLDERS:
        for pattern in ("*.py", "*.cu", "*.cuh", "*.html"):
            wanted |= {f"graphrt/{path.relative_to(ROOT)}" for path in (ROOT / folder).rglob(pattern)}
        wanted |= {f"graphrt/{path.relative_to(ROOT)}" for path in (ROOT / folder).rglob("tuned/*.json")}
    wanted.add("graphrt/py.typed")
    assert wanted <= held, sorted(wanted - held)
    assert {name.split("/")[0] for name in held} == {"graphrt"}
    assert not [name for name in held if name.endswith((".pyc", ".nbi", ".nbc"))]
    assert {"licenses/LICENSE", "licenses/NOTICE", "entry_points.txt"} <= meta


def test_the_wheel_works_in_a_clean_environment(wheel: Path, default_model: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "env")], check=True)
    programs = tmp_path / "env" / "bin"
    # The wheel keeps its own files; the environment sees neither this checkout nor this interpreter's packages.
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    env["GRAPHRT_HOME"] = str(tmp_path / "home")

    def run(*command: str) -> str:
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    install = [str(programs / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", str(wheel)]
    done = subprocess.run(install, cwd=tmp_path, env=env, capture_output=True, text=True)
    if done.returncode and NETWORK.search(done.stderr) and os.environ.get("CI") != "true":
        pytest.skip(f"no package index within reach: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr

    where = run(str(programs / "python"), "-c", "import graphrt.kernels.ops as m; print(m.__file__)").strip()
    assert Path(where).is_relative_to(tmp_path / "env")
    assert run(str(programs / "graphrt"), "--version").startswith("graphrt ")
    assert json.loads(run(str(programs / "graphrt"), "doctor", "--json"))["can_serve"] is True
    question = "Which gas do plants take in for photosynthesis?"
    reply = json.loads(
        run(str(programs / "graphrt"), "generate", str(default_model), question, "--max-tokens", "24", "--json")
    )
    assert reply["completion_tokens"] <= 24
    assert "carbon dioxide" in reply["text"].lower()
