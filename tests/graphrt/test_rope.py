"""Every setting of rotary embeddings against the reference implementation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from graphrt.jsonfile import Fields
from graphrt.models.rope import inverse_frequencies
from graphrt.rope_config import parse_rope

LLAMA3 = {
    "rope_type": "llama3",
    "original_max_position_embeddings": 64,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
YARN = {"rope_type": "yarn", "original_max_position_embeddings": 64}


@pytest.mark.parametrize("head_dim", [64, 80])
@pytest.mark.parametrize(
    "settings",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 3.0},
        LLAMA3 | {"factor": 8.0},
        LLAMA3 | {"factor": 32.0, "low_freq_factor": 0.5, "high_freq_factor": 2.0},
        YARN | {"factor": 4.0},
        YARN | {"factor": 8.0, "beta_fast": 16.0, "beta_slow": 2.0},
        YARN | {"factor": 8.0, "truncate": False},
        YARN | {"factor": 8.0, "attention_factor": 1.7},
        YARN | {"factor": 8.0, "mscale": 0.8, "mscale_all_dim": 0.5},
        YARN | {"factor": 8.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    ],
    ids=lambda s: "-".join(f"{k[:9]}={v}" for k, v in s.items() if k[:8] != "original"),
)
def test_frequencies_are_the_references(settings: dict[str, Any], head_dim: int) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = settings | {"rope_theta": 500_000.0}
    reference = LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=2 * head_dim,
            num_attention_heads=2,
            head_dim=head_dim,
            max_position_embeddings=512,
            rope_parameters=parameters,
        )
    )
    rope = parse_rope(Fields({"rope_parameters": parameters}, "config.json"), 512)
    frequencies, factor = inverse_frequencies(rope, head_dim)
    np.testing.assert_allclose(frequencies, reference.inv_freq.numpy(), rtol=2e-6)
    assert factor == pytest.approx(reference.attention_scaling, rel=1e-6)
