"""Dependencies point one way: cli -> api -> graphrt -> capture -> kernels, and graphrt -> rdma. Nothing imports perf."""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("kernels", "capture", "rdma", "api", "perf")

# What each layer may import besides itself. "core" is everything directly in graphrt/ but the command line.
ALLOWED = {
    "errors": set(),
    "kernels": {"errors"},
    "capture": {"errors", "kernels"},
    "rdma": {"errors"},
    "core": {"errors", "kernels", "capture", "rdma"},
    "api": {"errors", "core"},
    "cli": {"errors", "core", "api"},
    "perf": {"errors", "core", "api", "cli", "kernels", "capture", "rdma"},
}
# Packages that only some layers may touch.
OUTSIDE = {
    "starlette": {"api"},
    "uvicorn": {"api"},
    "httptools": {"api"},
    "tokenizers": {"core"},
    "jinja2": {"core"},
    "numba": {"kernels", "perf"},
    "llvmlite": {"kernels", "perf"},
}


@dataclass(frozen=True)
class Import:
    """`module` imports `target`; `lazy` inside a function."""

    module: str
    target: str
    line: int
    lazy: bool


def layer(module: str) -> str:
    """The layer of a module of graphrt."""
    parts = module.split(".")
    second = parts[1] if len(parts) > 1 else ""
    if second in FOLDERS or second == "errors":
        return second
    return "cli" if second in ("cli", "__main__") else "core"


def modules() -> dict[str, Path]:
    """Every module of the package by its import name, at its real place."""
    found = {}
    for base, prefix in [(ROOT / "graphrt", "graphrt"), *((ROOT / name, f"graphrt.{name}") for name in FOLDERS)]:
        for path in base.rglob("*.py"):
            relative = path.relative_to(base).with_suffix("").parts
            if base == ROOT / "graphrt" and relative[0] in FOLDERS:
                continue  # through the symlink: counted at its real place
            names = relative[:-1] if relative[-1] == "__init__" else relative
            found[".".join([prefix, *names])] = path
    return found


def imports(module: str, source: str, known: set[str]) -> Iterator[Import]:
    """All imports, those inside functions and under TYPE_CHECKING too, as absolute module names."""
    tree = ast.parse(source)
    lazy = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield Import(module, name.name, node.lineno, id(node) in lazy)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: relative import"
            for name in node.names:
                full = f"{node.module}.{name.name}"
                yield Import(module, full if full in known else node.module or "", node.lineno, id(node) in lazy)


def fault(found: Import) -> str:
    """Why this import is against the direction, or ""."""
    here = layer(found.module)
    where = f"{found.module}:{found.line} imports {found.target}"
    top = found.target.split(".")[0]
    if top == "graphrt" and found.target != "graphrt":
        there = layer(found.target)
        if there == "perf" and here == "cli":
            return "" if found.lazy else f"{where} at import; perf is only for the command that needs it"
        if there != here and there not in ALLOWED[here]:
            return f"{where}: {here} may import {sorted(ALLOWED[here]) or 'nothing'}"
    if top in FOLDERS:
        return f"{where}: the folders import as graphrt.{top}"
    if top in OUTSIDE and here not in OUTSIDE[top] | {"perf"}:
        return f"{where}: only {sorted(OUTSIDE[top])} may"
    return ""


def test_every_import_follows_the_direction() -> None:
    found = modules()
    assert len(found) > 30
    faults = [
        text
        for module, path in found.items()
        for entry in imports(module, path.read_text(encoding="utf-8"), set(found))
        if (text := fault(entry))
    ]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("graphrt.kernels.ops", "from graphrt.models import llama"),
        ("graphrt.kernels.ops", "import graphrt.capture.graph"),
        ("graphrt.capture.graph", "from graphrt.engine import run_engine"),
        ("graphrt.capture.graph", "def f():\n    import starlette"),
        ("graphrt.engine", "from graphrt.api import app"),
        ("graphrt.engine", "from graphrt.cli.main import main"),
        ("graphrt.engine", "def f():\n    from graphrt.perf import bench"),
        ("graphrt.api.app", "from graphrt.kernels import ops"),
        ("graphrt.api.app", "from graphrt.perf import bench"),
        ("graphrt.cli.bench", "from graphrt.perf import bench"),
        ("graphrt.rdma.verbs", "from graphrt.kv_spec import KVSpec"),
        ("graphrt.errors", "from graphrt.config import ModelConfig"),
        ("graphrt.engine", "import kernels.ops"),
        ("graphrt.scheduler", "import uvicorn"),
    ],
)
def test_a_wrong_import_is_found(module: str, source: str) -> None:
    known = {"graphrt.models.llama", "graphrt.api.app", "graphrt.kernels.ops", "graphrt.perf.bench"}
    assert [text for entry in imports(module, source, known) if (text := fault(entry))]


def test_a_command_may_import_perf_when_it_runs() -> None:
    [entry] = imports("graphrt.cli.bench", "def run():\n    from graphrt.perf import bench", {"graphrt.perf.bench"})
    assert fault(entry) == ""


def test_the_engine_knows_no_text_and_no_http() -> None:
    """What the hot path can reach must not load a tokenizer, a template or a server."""
    found = modules()
    edges = {m: {e.target for e in imports(m, p.read_text(encoding="utf-8"), set(found))} for m, p in found.items()}
    reached: set[str] = set()
    waiting = ["graphrt.engine_process", "graphrt.engine_setup"]
    assert set(waiting) <= set(found)
    while waiting:
        module = waiting.pop()
        if module in reached:
            continue
        reached.add(module)
        waiting.extend(target for target in edges[module] if target in found)
    outside = {target.split(".")[0] for module in reached for target in edges[module]}
    assert "msgspec" in outside
    assert not outside & {"tokenizers", "jinja2", "starlette", "uvicorn", "httptools", "rich", "asyncio"}


def test_the_command_line_starts_without_the_runtime() -> None:
    heavy = ("numpy", "numba", "msgspec", "rich", "asyncio", "starlette", "cuda", "tokenizers", "gguf")
    code = (
        "import sys, threading, graphrt.cli.main as m; m.build_parser();"
        f"loaded = [name for name in {heavy!r} if name in sys.modules];"
        "assert not loaded, loaded; assert threading.active_count() == 1"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_help_is_instant() -> None:
    def once() -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "graphrt", "--help"], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        return time.perf_counter() - start

    bare = min(_interpreter_start() for _ in range(3))
    assert min(once() for _ in range(3)) - bare < 0.3


def _interpreter_start() -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", "pass"], check=True, cwd=ROOT)
    return time.perf_counter() - start


def test_importing_a_module_starts_nothing(tmp_path: Path) -> None:
    """Every module imports with no thread started, no file written and no CUDA driver touched."""
    names = sorted(name for name in modules() if not name.endswith("__main__"))
    code = f"""
import importlib, os, sys, threading
for name in {names!r}:
    importlib.import_module(name)
    assert threading.active_count() == 1, f"{{name}} starts a thread"
assert not any(name.split(".")[0] in ("cuda", "cupy", "torch") for name in sys.modules), "CUDA at import"
maps = open("/proc/self/maps").read()
assert "libcuda.so" not in maps
"""
    home = tmp_path / "home"
    home.mkdir()
    env = {"PATH": "/usr/bin:/bin", "HOME": str(home), "GRAPHRT_HOME": str(home / "g"), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**env, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert list(home.iterdir()) == []
