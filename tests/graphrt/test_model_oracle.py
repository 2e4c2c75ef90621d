"""The whole step against `transformers` in float32, and against itself cut in other ways."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-mha-f32": ("llama", {"heads": 4, "kv_heads": 4, "head_dim": 64, "dtype": "f32"}),
    "llama-gqa3-f16": ("llama", {"hidden": 96, "heads": 6, "kv_heads": 2, "head_dim": 64, "dtype": "f16", "tie": True}),
    "llama-gqa8-bias": (
        "llama",
        {"heads": 8, "kv_heads": 1, "head_dim": 80, "attention_bias": True, "mlp_bias": True, "dtype": "f32"},
    ),
    "llama-linear": ("llama", {"head_dim": 64, "rope": {"rope_type": "linear", "factor": 4.0}}),
    "llama-llama3": (
        "llama",
        {
            "head_dim": 128,
            "max_position": 512,
            "rope": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "qwen3-gqa3-sharded": ("qwen3", {"hidden": 96, "heads": 6, "kv_heads": 2, "head_dim": 80, "shards": 3, "tie": True}),
    "qwen3-yarn": (
        "qwen3",
        {
            "heads": 8,
            "kv_heads": 1,
            "head_dim": 128,
            "dtype": "f32",
            "rope": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        },
    ),
}


def transformers_logits(model_dir: Path, prompts: list[list[int]]) -> list[NDArray[np.float32]]:
    """Logits [tokens, V] of each prompt alone, in float32, eager attention."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        return [model(torch.tensor([p])).logits[0].numpy() for p in prompts]


@pytest.fixture(params=sorted(TINY))
def tiny_dir(request: pytest.FixtureRequest, tiny_model: Callable[..., Path]) -> Path:
    architecture, shape = TINY[request.param]
    return tiny_model(architecture, **shape)


def prompts_for(vocab: int, lengths: tuple[int, ...]) -> list[list[int]]:
    rng = np.random.default_rng()
    return [rng.integers(0, vocab, n).tolist() for n in lengths]


@pytest.mark.parametrize("numpy", [False, True], ids=["compiled", "numpy"])
def test_tiny_models_match_transformers(tiny_dir: Path, step_runner: Callable[..., Any], numpy: bool) -> None:
    runner = step_runner(tiny_dir, numpy, rows=200)
    prompts = prompts_for(300, (1, 37, 200))
    for slot, (prompt, want) in enumerate(zip(prompts, transformers_logits(tiny_dir, prompts), strict=True)):
        (got,) = runner.prefill((slot, 0, prompt))
        scale = max(float(np.abs(want).max()), 1.0)
        assert np.abs(got - want).max() <= 1e-4 * scale


@pytest.mark.parametrize("numpy", [False, True], ids=["compiled", "numpy"])
def test_chunks_batches_padding_and_prefix_hits_give_equal_bits(
    tiny_dir: Path, step_runner: Callable[..., Any], numpy: bool
) -> None:
    lengths = (97, 64, 33, 100, 17, 5, 80, 50)
    prompts = prompts_for(300, lengths)
    runner = step_runner(tiny_dir, numpy, rows=100)
    alone = [runner.prefill((0, 0, p))[0] for p in prompts]

    # A prompt cut in chunks.
    for chunk in (1, 7, 64):
        pieces = [
            runner.prefill((1, i, prompts[0][i : i + chunk]), padding=chunk % 3)[0] for i in range(0, lengths[0], chunk)
        ]
        np.testing.assert_array_equal(np.concatenate(pieces), alone[0])

    # Several prompts in one step, cut so that they fit.
    for batch in (1, 3, 8):
        got: list[list[NDArray[np.float32]]] = [[] for _ in range(batch)]
        for start in range(0, max(lengths), 12):
            parts = [(s, start, prompts[s][start : start + 12]) for s in range(batch) if start < lengths[s]]
            for (s, _, _), logits in zip(parts, runner.prefill(*parts, padding=batch % 2), strict=True):
                got[s].append(logits)
        for s in range(batch):
            np.testing.assert_array_equal(np.concatenate(got[s]), alone[s])

    # A prefix that another slot computed: slot 5 borrows the first blocks of slot 0.
    runner.prefill((0, 0, prompts[3]))
    shared = 48
    from graphrt.kernels.abi import Field

    runner.delta.patch(Field.BLOCK_TABLE, 5 * runner.buffers.max_blocks, runner.table[0][: shared // 16].tolist())
    (rest,) = runner.prefill((5, shared, prompts[3][shared:]))
    np.testing.assert_array_equal(rest, alone[3][shared:])


@pytest.mark.parametrize("numpy", [False, True], ids=["compiled", "numpy"])
def test_decode_equals_prefill_in_every_batch(tiny_dir: Path, step_runner: Callable[..., Any], numpy: bool) -> None:
    prompts = prompts_for(300, (40,) * 8)
    runner = step_runner(tiny_dir, numpy, rows=40)
    whole = [runner.prefill((0, 0, p))[0] for p in prompts]
    for slot, p in enumerate(prompts):
        runner.prefill((slot, 0, p[:30]))
    rng = np.random.default_rng()
    position = dict.fromkeys(range(8), 30)
    while any(p < 40 for p in position.values()):
        ready = [s for s, p in position.items() if p < 40]
        picked = rng.permutation(ready)[: rng.integers(1, len(ready) + 1)].tolist()
        feed = {s: (position[s], prompts[s][position[s]]) for s in picked}
        for s, logits in runner.decode(feed, size=min(len(picked) + int(rng.integers(0, 3)), 8)).items():
            np.testing.assert_array_equal(logits, whole[s][position[s]])
            position[s] += 1


@pytest.mark.model
def test_default_model_matches_transformers(default_model: Path, step_runner: Callable[..., Any]) -> None:
    from graphrt.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(default_model)
    prompts = [tokenizer.encode(text)[:160] for text in TEXTS]
    assert all(len(p) >= 100 for p in prompts)
    runner = step_runner(default_model, rows=160, slots=3)
    for slot, (prompt, want) in enumerate(zip(prompts, transformers_logits(default_model, prompts), strict=True)):
        (got,) = runner.prefill((slot, 0, prompt))
        assert np.abs(got - want).max() <= 2e-3


TEXTS = (
    "Photosynthesis is the process by which green plants and some other organisms use sunlight to synthesize nutrients "
    "from carbon dioxide and water. It generally involves the green pigment chlorophyll and generates oxygen as a "
    "by-product. In the first stage, light strikes the leaf and excites electrons, which travel along a chain of "
    "proteins; in the second, the energy stored that way builds sugars. Nearly all life on land depends on it, "
    "because animals eat plants or eat animals that did. Gardeners notice it when a shaded plant grows thin and pale.",
    "def merge_sort(items):\n    if len(items) <= 1:\n        return items\n    middle = len(items) // 2\n"
    "    left = merge_sort(items[:middle])\n    right = merge_sort(items[middle:])\n    merged = []\n    i = j = 0\n"
    "    while i < len(left) and j < len(right):\n        if left[i] <= right[j]:\n            merged.append(left[i])\n"
    "            i += 1\n        else:\n            merged.append(right[j])\n            j += 1\n"
    "    return merged + left[i:] + right[j:]\n\nprint(merge_sort([5, 2, 9, 1, 5, 6]))\n",
    "Order 4471 of 12 March 2024: 3 boxes of screws (M4 x 20, 500 pieces each) at 7.95, 12 hinges at 2.40, and one saw at "
    "31.00. Delivery to 18 Elm Street, second floor, before noon. Please ring twice; the bell on the left does not work. "
    "If nobody answers, leave the parcel with the neighbour at number 20 and write her name on the slip. Returns within "
    "30 days are free. Questions are answered on weekdays from 9 to 17 by telephone or at any time by letter. Thank you "
    "for your order, and kind regards from all of us in the shop and the workshop behind it.",
)
