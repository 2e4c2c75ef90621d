"""`graphrt pull`: what it prints, and verification."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from graphrt.cli import main as cli


@pytest.fixture
def source(tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model directory to pull from, with recorded hashes, and a GRAPHRT_HOME of its own."""
    monkeypatch.setenv("GRAPHRT_HOME", str(tmp_path / "home"))
    folder = tmp_path / "source"
    shutil.copytree(tiny_model("llama"), folder)
    (folder / "tokenizer.json").write_text("{}")
    weights = (folder / "model.safetensors").read_bytes()
    entry = {"size": len(weights), "sha256": hashlib.sha256(weights).hexdigest()}
    (folder / "graphrt.json").write_text(json.dumps({"format": 1, "files": {"model.safetensors": entry}}))
    return folder


def test_the_path_is_all_that_stdout_gets(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["pull", str(source)]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/home/models/source\n"
    assert cli.main(["pull", str(source), "--to", str(tmp_path / "there")]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/there\n"
    assert (tmp_path / "there" / "model.safetensors").is_file()


def test_json_and_verify(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["pull", str(source), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    folder = tmp_path / "home/models/source"
    assert said["path"] == str(folder) and said["name"] == "source" and said["verified"] is None
    assert said["bytes"] == sum(path.stat().st_size for path in folder.iterdir())
    # By its name alone, though no catalogue knows it.
    assert cli.main(["pull", "source", "--verify", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verified"] == ["model.safetensors"]


def test_a_changed_byte_is_found(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = source / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.unlink()
    weights.write_bytes(data)
    assert cli.main(["pull", str(source), "--verify"]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert "model.safetensors has SHA-256" in said.err and said.err.count("\n") == 1


def test_nothing_to_verify_against_is_said(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (source / "graphrt.json").unlink()
    assert cli.main(["pull", str(source), "--verify"]) == 1
    assert "records no hash" in capsys.readouterr().err
