"""Where models live, and what is said when one is not there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from graphrt.errors import ModelError
from graphrt.paths import directory_name, find_model, home, list_models, models_dir


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A GRAPHRT_HOME with two models, one half-made directory and one empty one; the working directory is elsewhere."""
    monkeypatch.setenv("GRAPHRT_HOME", str(tmp_path / "home"))
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    root = tmp_path / "home" / "models"
    for name in ("mine", "Qwen--Qwen3-0.6B", ".mine.partial-x"):
        (root / name).mkdir(parents=True)
        (root / name / "config.json").write_text("{}")
    (root / "empty").mkdir()
    return root


def test_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("GRAPHRT_HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert home() == tmp_path / ".cache" / "graphrt"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "c"))
    assert home() == tmp_path / "c" / "graphrt"
    monkeypatch.setenv("GRAPHRT_HOME", "~/models of mine")
    assert home() == tmp_path / "models of mine"
    assert models_dir() == tmp_path / "models of mine" / "models"
    assert list_models() == []
    assert not home().exists()


def test_by_name(models: Path) -> None:
    assert list_models() == ["Qwen/Qwen3-0.6B", "mine"]
    assert find_model("mine") == models / "mine"
    assert find_model("Qwen/Qwen3-0.6B") == models / directory_name("Qwen/Qwen3-0.6B")


def test_by_path(models: Path, tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_model("llama")
    assert find_model(folder) == find_model(str(folder)) == folder
    monkeypatch.chdir(folder.parent)
    assert find_model(folder.name) == find_model(f"./{folder.name}") == folder
    monkeypatch.setenv("HOME", str(folder.parent))
    assert find_model(f"~/{folder.name}") == folder


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "nope",
            r"no model 'nope'; on disk: Qwen/Qwen3-0\.6B, mine; to fetch with 'graphrt pull NAME': smollm2-135m-inst",
        ),
        ("empty", "no model 'empty'; on disk: "),
        ("", "no model ''; on disk: "),
        (
            "smollm2-135m-instruct",
            "smollm2-135m-instruct is not on this machine: run 'graphrt pull smollm2-135m-instruct'",
        ),
        ("./mine", r"model directory \./mine does not exist"),
        ("/no/where", "model directory /no/where does not exist"),
        ("file.gguf", r"file\.gguf is a file, not a model directory: convert it with 'graphrt pull file\.gguf'"),
        ("folder", r"model directory folder has no config\.json"),
        ("../cwd/folder", r"model directory \.\./cwd/folder has no config\.json"),
    ],
)
def test_what_is_not_there(models: Path, name: str, message: str) -> None:
    Path("file.gguf").write_text("x")
    Path("folder").mkdir()
    with pytest.raises(ModelError, match=message):
        find_model(name)


def test_nothing_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHRT_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match="on disk: none; to fetch"):
        find_model("nope")
