"""A model without weights: only its shape matters, and the same seed gives the same model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from graphrt.dummy_weights import STD, DummyCheckpoint
from graphrt.engine_config import EngineConfig
from graphrt.engine_setup import build_engine
from graphrt.errors import ConfigError

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}


def test_tensors_are_random_by_name_and_norms_are_ones() -> None:
    checkpoint = DummyCheckpoint(seed=3)
    a = np.asarray(checkpoint.tensor("model.layers.0.mlp.up_proj.weight", (256, 300))).astype(np.float32)
    b = np.asarray(checkpoint.tensor("model.layers.1.mlp.up_proj.weight", (256, 300))).astype(np.float32)
    again = np.asarray(DummyCheckpoint(seed=3).tensor("model.layers.0.mlp.up_proj.weight", (256, 300)))
    other = np.asarray(DummyCheckpoint(seed=4).tensor("model.layers.0.mlp.up_proj.weight", (256, 300)))
    assert abs(a.std() / STD - 1) < 0.05 and abs(a.mean()) < STD / 20
    assert (a == again.astype(np.float32)).all()
    assert (a != b).any() and (a != other.astype(np.float32)).any()
    assert (np.asarray(checkpoint.tensor("model.norm.weight", (64,))) == 1).all()
    assert DummyCheckpoint(3).fingerprint() != DummyCheckpoint(4).fingerprint()


def test_an_engine_needs_no_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    engine = build_engine(EngineConfig(str(tmp_path), load_format="dummy", context=256))
    assert engine.info.vocab_size == 512 and engine.info.context == 256


def test_an_unknown_load_format_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="load_format 'random' is unknown: auto or dummy"):
        EngineConfig(str(tmp_path), load_format="random").check()
