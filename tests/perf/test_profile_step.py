"""`graphrt profile`: the engine's own loop is timed, on whatever device there is; a context that does not fit is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from graphrt.cli.main import main
from graphrt.engine_config import EngineConfig
from graphrt.errors import ConfigError
from graphrt.perf.profile_step import ROUND, profile
from graphrt.perf.shapes import SHAPES, write_shape

TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}


@pytest.fixture
def model_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    return write_shape("tiny", tmp_path)


@pytest.mark.parametrize("batch", [1, 3])
def test_a_profile_counts_steps_and_bytes(model_dir: Path, batch: int) -> None:
    ctx, layers, kv = 32, 2, 2 * 2 * 16 * 4  # float32 keys and values of two heads of 16
    config = EngineConfig(str(model_dir), max_batch=batch, context=320, load_format="dummy")
    found = profile(config, "tiny", batch, ctx, steps=100)
    assert found.steps >= 100 and found.batch == batch and found.nodes is None and found.eager_launches == 0
    assert 0 < found.ms_p50 <= found.ms_p99 <= found.ms_p999
    assert 0 < found.host_us_p50 <= found.host_us_p99
    weights = found.bytes - batch * (ctx + ROUND // 2) * layers * kv
    # Matrices of 64 columns: q, k, v (64 + 32 + 32), o, gate and up; down; the head. In bfloat16, some rows padded.
    exact = 2 * (layers * (64 * (128 + 64 + 256) + 64 * 128) + 320 * 64)
    assert exact <= weights <= 1.3 * exact
    assert found.ceiling_share == pytest.approx(found.bytes / found.ms_p50 / 1e6 / found.ceiling_gbps, rel=0.05)


def test_a_context_without_room_to_measure(model_dir: Path) -> None:
    config = EngineConfig(str(model_dir), max_batch=1, context=256, load_format="dummy")
    with pytest.raises(ConfigError, match=f"--ctx 32: with {ROUND} tokens to measure"):
        profile(config, "tiny", 1, 32, steps=10)


def test_shape_and_model_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "some-model", "--shape", "llama-1b"]) == 1
    assert "--shape llama-1b beside the model some-model" in capsys.readouterr().err


def test_every_shape_is_a_model(tmp_path: Path) -> None:
    from graphrt.config import load_config

    for name in SHAPES:
        config = load_config(write_shape(name, tmp_path))
        assert config.vocab_size == json.loads((tmp_path / name / "config.json").read_text())["vocab_size"]
