"""config.json: both spellings of rope, defaults, and one clear error for each thing that cannot be served."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from graphrt.config import ModelConfig, load_config
from graphrt.errors import ModelError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 32}


def load(tmp_path: Path, base: dict[str, Any], generation: dict[str, Any] | None = None, **changes: Any) -> ModelConfig:
    values = {k: v for k, v in (base | changes).items() if v is not ...}
    (tmp_path / "config.json").write_text(json.dumps(values))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    return load_config(tmp_path)


def test_llama_fields_and_defaults(tmp_path: Path) -> None:
    config = load(tmp_path, LLAMA)
    assert config.architecture == "llama"
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (6, 2, 16)
    assert (config.rope.kind, config.rope.theta) == ("default", 500000.0)
    assert (config.tie_embeddings, config.attention_bias, config.mlp_bias) == (False, False, False)
    assert (config.bos_id, config.eos_ids) == (1, (2,))
    assert load(tmp_path, LLAMA, num_key_value_heads=...).num_kv_heads == 6
    assert load(tmp_path, LLAMA, architectures=...).architecture == "llama"
    assert load(tmp_path, LLAMA, model_type=...).architecture == "llama"
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.head_dim = 3  # type: ignore[misc]


def test_qwen3_head_dim_is_independent_of_hidden_size(tmp_path: Path) -> None:
    assert load(tmp_path, QWEN3).head_dim == 32
    assert load(tmp_path, QWEN3, head_dim=...).head_dim == 128
    # A window size without use_sliding_window is what the published files carry.
    assert load(tmp_path, QWEN3, sliding_window=4096, use_sliding_window=False).architecture == "qwen3"


def test_end_ids_unite_both_files(tmp_path: Path) -> None:
    config = load(tmp_path, LLAMA, generation={"eos_token_id": [9, 2, 11]}, eos_token_id=[2, 7])
    assert config.eos_ids == (9, 2, 11, 7)


def test_end_ids_outside_the_vocabulary_are_dropped(tmp_path: Path) -> None:
    assert load(tmp_path, LLAMA, eos_token_id=[-1, 5, 1000]).eos_ids == (5,)
    assert load(tmp_path, LLAMA, eos_token_id=None, bos_token_id=None).eos_ids == ()


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 2048}


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"rope_type": "default"}, {"kind": "default"}),
        ({"rope_type": "linear", "factor": 4}, {"kind": "linear", "factor": 4.0}),
        ({"rope_type": "llama3", **LLAMA3}, {"kind": "llama3", "factor": 8.0, "original_max_position": 2048}),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048, "beta_fast": 16},
            {"kind": "yarn", "factor": 4.0, "beta_fast": 16.0, "beta_slow": 1.0, "attention_factor": None},
        ),
        (
            {"rope_type": "yarn", "original_max_position_embeddings": 1024, "mscale": 0.7, "truncate": False},
            {"kind": "yarn", "factor": 8.0, "mscale": 0.7, "mscale_all_dim": None, "truncate": False},
        ),
        ({"rope_type": "yarn", "factor": 2.0}, {"kind": "yarn", "original_max_position": 8192}),
    ],
)
def test_rope_in_both_spellings(tmp_path: Path, parameters: dict[str, Any], expected: dict[str, Any]) -> None:
    new = load(tmp_path, LLAMA, rope_theta=..., rope_parameters={**parameters, "rope_theta": 1e6}).rope
    old = load(tmp_path, LLAMA, rope_theta=1e6, rope_scaling=parameters).rope
    legacy = {("type" if k == "rope_type" else k): v for k, v in parameters.items()}
    assert new == old == load(tmp_path, LLAMA, rope_theta=1e6, rope_scaling=legacy).rope
    assert new.theta == 1e6
    assert {k: getattr(new, k) for k in expected} == expected


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        (LLAMA, {"architectures": ["GPT2LMHeadModel"]}, "architecture 'GPT2LMHeadModel' is not supported"),
        (LLAMA, {"architectures": ..., "model_type": "mamba"}, "'mamba' is not supported, only llama, qwen3"),
        (LLAMA, {"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        (LLAMA, {"model_type": "qwen3"}, "does not fit architecture 'LlamaForCausalLM'"),
        (LLAMA, {"hidden_size": ...}, "has no hidden_size"),
        (LLAMA, {"hidden_size": "96"}, "hidden_size is '96', expected an integer"),
        (LLAMA, {"hidden_size": True}, "hidden_size is True"),
        (LLAMA, {"hidden_size": 97}, "hidden_size 97 is not a multiple of num_attention_heads 6"),
        (LLAMA, {"num_hidden_layers": 0}, "num_hidden_layers is 0, expected 1 to"),
        (LLAMA, {"num_key_value_heads": 4}, "num_attention_heads 6 is not a multiple of num_key_value_heads 4"),
        (LLAMA, {"head_dim": 15}, "head_dim 15 is not supported: a multiple of 8, at most 512"),
        (LLAMA, {"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        (LLAMA, {"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        (LLAMA, {"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'"),
        (LLAMA, {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        (LLAMA, {"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
        (LLAMA, {"quantization_config": {"quant_method": "awq"}}, r"quantised weights \(awq\)"),
        (LLAMA, {"rope_scaling": {"type": "dynamic", "factor": 2}}, "rope type 'dynamic' is not supported"),
        (LLAMA, {"rope_scaling": {"rope_type": "longrope"}}, "rope type 'longrope' is not supported"),
        (LLAMA, {"rope_scaling": {"rope_type": "linear"}}, "has no factor"),
        (LLAMA, {"rope_scaling": [1]}, r"rope_scaling is \[1\], expected an object"),
        (LLAMA, {"rope_scaling": {"rope_type": "llama3", **LLAMA3, "low_freq_factor": 4}}, "low_freq_factor 4"),
        (LLAMA, {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differ between kinds of layer"),
        (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (QWEN3, {"use_sliding_window": True, "sliding_window": 128}, "sliding-window attention .128."),
        (QWEN3, {"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
    ],
)
def test_refusals_name_the_field_and_the_value(
    tmp_path: Path, base: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        load(tmp_path, base, **changes)
    assert "config.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere is not a directory"):
        load_config(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"has no config\.json"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": ')
    with pytest.raises(ModelError, match="not valid JSON"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="expected an object"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelError, match="cannot be read"):
        load_config(tmp_path)
