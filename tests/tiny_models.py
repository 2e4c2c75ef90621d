"""Writes tiny random Llama and Qwen3 models as Hugging Face directories, tokenizer and chat template included."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

DTYPES = {"bf16": np.dtype(ml_dtypes.bfloat16), "f16": np.dtype(np.float16), "f32": np.dtype(np.float32)}
TORCH_NAMES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEXT = """The quick brown fox jumps over the lazy dog. What is the capital of France? The capital of France is Paris.
def add(a, b):
    return a + b
Once upon a time there was a small machine that answered every question, one token after another, until it was told to
stop. It read 1234567890 and {"json": [true, false, null]}; it wrote naïve café, Привет, 你好, 😀 and more."""


def write_tiny_model(
    folder: Path,
    architecture: str = "llama",
    *,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    ffn: int = 128,
    vocab: int = 320,
    rope: dict[str, Any] | None = None,
    tie: bool = False,
    attention_bias: bool = False,
    mlp_bias: bool = False,
    dtype: str = "bf16",
    max_position: int = 512,
    rms_eps: float = 1e-5,
    shards: int = 1,
    seed: int = 0,
) -> Path:
    """`dtype` is bf16, f16 or f32; `rope` is transformers' rope_parameters; `vocab` at least 260. Returns `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    rope = {"rope_type": "default", "rope_theta": 10000.0} | (rope or {})
    config = {
        "architectures": [{"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[architecture]],
        "model_type": architecture,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": rms_eps,
        "rope_parameters": rope,
        "max_position_embeddings": max_position,
        "tie_word_embeddings": tie,
        "attention_bias": attention_bias,
        "dtype": TORCH_NAMES[dtype],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    if architecture == "llama":
        config["mlp_bias"] = mlp_bias
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2})
    tensors = _tensors(config, np.random.default_rng(seed), DTYPES[dtype])
    _save(folder, tensors, shards)
    build_tokenizer(vocab).save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": SPECIALS[1],
            "eos_token": SPECIALS[2],
            "pad_token": SPECIALS[2],
            "unk_token": SPECIALS[0],
            "clean_up_tokenization_spaces": False,
            "model_max_length": max_position,
        },
    )
    (folder / "chat_template.jinja").write_text(CHATML)
    return folder


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2))


def build_tokenizer(vocab: int) -> Tokenizer:
    """A byte-level BPE with exactly `vocab` entries, the three special tokens first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[AddedToken(t, special=True, normalized=False) for t in SPECIALS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    rng = random.Random(0)
    syllables = [a + b for a in "bcdfghjklmnprstvw" for b in ("a", "e", "i", "o", "u", "er", "in", "on", "al")]
    words = ["".join(rng.choices(syllables, k=rng.randint(1, 3))) for _ in range(4 * vocab)]
    tokenizer.train_from_iterator([TEXT] * 3 + [" ".join(words)], trainer)
    assert tokenizer.get_vocab_size() == vocab
    return tokenizer


def _tensors(config: dict[str, Any], rng: np.random.Generator, dtype: np.dtype) -> dict[str, np.ndarray]:
    """Scaled so that activations stay near 1 and logits differ by a few units."""
    hidden, ffn, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    out: dict[str, np.ndarray] = {}

    def put(name: str, *shape: int, scale: float | None = None, mean: float = 0.0) -> None:
        scale = shape[-1] ** -0.5 if scale is None else scale
        out[name] = (rng.standard_normal(shape, dtype=np.float32) * scale + mean).astype(dtype)

    put("model.embed_tokens.weight", config["vocab_size"], hidden, scale=2 * hidden**-0.5)
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        put(at + "input_layernorm.weight", hidden, scale=0.1, mean=1)
        put(at + "post_attention_layernorm.weight", hidden, scale=0.1, mean=1)
        for name, rows, columns in (("q", q, hidden), ("k", kv, hidden), ("v", kv, hidden), ("o", hidden, q)):
            put(f"{at}self_attn.{name}_proj.weight", rows, columns)
            if config["attention_bias"]:
                put(f"{at}self_attn.{name}_proj.bias", rows, scale=0.1)
        if config["model_type"] == "qwen3":
            put(at + "self_attn.q_norm.weight", head_dim, scale=0.1, mean=1)
            put(at + "self_attn.k_norm.weight", head_dim, scale=0.1, mean=1)
        for name, rows, columns in (("gate", ffn, hidden), ("up", ffn, hidden), ("down", hidden, ffn)):
            put(f"{at}mlp.{name}_proj.weight", rows, columns)
            if config.get("mlp_bias"):
                put(f"{at}mlp.{name}_proj.bias", rows, scale=0.1)
    put("model.norm.weight", hidden, scale=0.1, mean=1)
    if not config["tie_word_embeddings"]:
        put("lm_head.weight", config["vocab_size"], hidden, scale=2 * hidden**-0.5)
    return out


def _save(folder: Path, tensors: dict[str, np.ndarray], shards: int) -> None:
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = list(tensors)
    weight_map = {}
    for i in range(shards):
        part = names[i::shards]
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        save_file({n: tensors[n] for n in part}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(t.nbytes for t in tensors.values())
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})
