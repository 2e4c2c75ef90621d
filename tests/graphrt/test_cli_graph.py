"""`graphrt graph`: counts, bytes and the drawing of captured graphs, here of the fake device's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from graphrt.cli import main as cli
from graphrt.doctor.driver import Driver


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphrt.cli.device.probe", lambda: Driver(None, "", (), "no NVIDIA GPU"))


def test_the_report_counts_what_a_step_moves(
    tiny_model: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """A tied tiny model: the head counts once, keys and values by rows and context."""
    folder = tiny_model("llama", head_dim=32, dtype="bf16")
    assert cli.main(["graph", str(folder), "--max-batch", "4", "--ctx", "100", "--prefill-chunk", "80", "--json"]) == 0
    out = capsys.readouterr()
    found = json.loads(out.out)
    assert "these are the fake device's graphs" in out.err
    config = json.loads((folder / "config.json").read_text())
    layers, d, f, v = (config[k] for k in ("num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size"))
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    elements = layers * ((heads + 2 * kv) * 32 * d + heads * 32 * d + 3 * f * d) + v * d
    assert {(g["kind"], g["rows"]) for g in found["graphs"]} == {
        *(("decode", n) for n in (1, 2, 4)),
        *(("prefill", n) for n in (16, 64, 80)),
        *(("score", n) for n in (8, 64)),
    }
    token = layers * 2 * kv * 32 * 2
    for g in found["graphs"]:
        assert g["bytes_weights"] == 2 * elements
        assert g["bytes_kv"] == token * 100 * (g["rows"] if g["kind"] == "decode" else 1)
        assert g["programmatic_edges"] + g["plain_edges"] == g["nodes"] - 1
    assert found["kv_cache"] == token * 4 * 112, "whole blocks of 16 tokens for every slot"
    assert found["context"] == 100 and found["temporaries"] > 0 < found["step_buffers"]


def test_one_graph_is_drawn(
    tiny_model: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, dot = str(tiny_model("qwen3", head_dim=32, dtype="bf16")), tmp_path / "step.dot"
    assert cli.main(["graph", folder, "--max-batch", "2", "--dot", str(dot), "--of", "decode:2"]) == 0
    text = dot.read_text()
    assert text.startswith("digraph") and text.index("begin_step") < text.index("qkv_finish") < text.index("sample")
    assert "decode" in capsys.readouterr().out
    assert cli.main(["graph", folder, "--max-batch", "2", "--dot", str(dot), "--of", "decode:3"]) == 1
    assert "--of decode:3: there are decode:1, decode:2" in capsys.readouterr().err


def test_a_gpu_that_was_asked_for_is_not_replaced(
    tiny_model: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["graph", str(tiny_model("llama")), "--device", "cuda"]) == 1
    assert "device cuda: no NVIDIA GPU" in capsys.readouterr().err
