"""Writes tiny models as GGUF files, the way llama.cpp's converter lays them out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

from graphrt.weights import open_checkpoint

NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
K_QUANTS = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")


def gguf_name(name: str) -> str:
    """The GGUF name of a Hugging Face tensor."""
    stem, _, suffix = name.rpartition(".")
    if stem in TOP:
        return f"{TOP[stem]}.{suffix}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}.{suffix}"


def interleave(values: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows as llama.cpp pairs them: element i of the first half next to element i of the second."""
    heads = values.shape[0] // head_dim
    split = values.reshape(heads, 2, head_dim // 2, *values.shape[1:])
    return split.swapaxes(1, 2).reshape(values.shape)


def quantise(values: np.ndarray, kind: str, rng: np.random.Generator) -> np.ndarray:
    """Raw bytes [rows, bytes]. The K-quants have no quantiser in Python: random bits with small scales stand in."""
    if kind == "F32":
        return values
    if kind not in K_QUANTS:
        return gguf.quants.quantize(values, Kind[kind])
    block, width = gguf.GGML_QUANT_SIZES[Kind[kind]]
    rows, blocks = values.shape[0], values.shape[1] // block
    raw = rng.integers(0, 256, (rows, blocks, width), dtype=np.uint8)
    scales = {"Q2_K": (80, 84), "Q3_K": (108, 110), "Q4_K": (0, 4), "Q5_K": (0, 4), "Q6_K": (208, 210)}[kind]
    small = rng.uniform(0.001, 0.01, (rows, blocks, (scales[1] - scales[0]) // 2)).astype(np.float16)
    raw[:, :, scales[0] : scales[1]] = small.view(np.uint8)
    return raw.reshape(rows, blocks * width)


def write_gguf(
    path: Path, model: Path, kind: str = "F32", *, drop: tuple[str, ...] = (), extra: dict[str, np.ndarray] | None = None,
    keys: dict[str, Any] | None = None, tokenizer: dict[str, Any] | None = None, arch: str | None = None,
) -> dict[str, np.ndarray]:  # fmt: skip
    """The model directory `model` as a GGUF file, matrices in `kind`, vectors in F32.

    Returns what each tensor dequantises to (float32, in the Hugging Face order). `keys` override metadata (None removes);
    `tokenizer` replaces the tokenizer's part.
    """
    config = json.loads((model / "config.json").read_text())
    name = arch or config["model_type"]
    checkpoint, rng, head_dim = open_checkpoint(model), np.random.default_rng(7), config["head_dim"]
    meta: dict[str, Any] = {
        f"{name}.context_length": config["max_position_embeddings"],
        f"{name}.embedding_length": config["hidden_size"],
        f"{name}.feed_forward_length": config["intermediate_size"],
        f"{name}.block_count": config["num_hidden_layers"],
        f"{name}.attention.head_count": config["num_attention_heads"],
        f"{name}.attention.head_count_kv": config["num_key_value_heads"],
        f"{name}.attention.key_length": head_dim,
        f"{name}.attention.value_length": head_dim,
        f"{name}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{name}.rope.freq_base": config["rope_parameters"]["rope_theta"],
        "general.license": "apache-2.0",
        **(_tokenizer(model) if tokenizer is None else tokenizer),
        **(keys or {}),
    }
    writer = gguf.GGUFWriter(path, name)
    for key, value in meta.items():
        _add(writer, key, value)
    expected = {}
    for tensor in checkpoint.names:
        values = np.asarray(checkpoint.tensor(tensor, checkpoint.shape(tensor))).astype(np.float32)
        if name == "llama" and (".q_proj." in tensor or ".k_proj." in tensor):
            values = interleave(values, head_dim)
        stored = kind if values.ndim == 2 else "F32"
        raw = quantise(values, stored, rng)
        back = gguf.quants.dequantize(raw, Kind[stored]).reshape(values.shape)
        if name == "llama" and (".q_proj." in tensor or ".k_proj." in tensor):
            # The inverse of `interleave`, spelt differently from the code under test.
            back = back.reshape(-1, head_dim // 2, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        expected[tensor] = back
        if gguf_name(tensor) not in drop:
            writer.add_tensor(gguf_name(tensor), raw, raw_dtype=None if stored in ("F32", "F16") else Kind[stored])
    for tensor, values in (extra or {}).items():
        writer.add_tensor(tensor, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def _tokenizer(model: Path) -> dict[str, Any]:
    data = json.loads((model / "tokenizer.json").read_text())
    vocab = sorted(data["model"]["vocab"], key=data["model"]["vocab"].__getitem__)
    merges = [m if isinstance(m, str) else " ".join(m) for m in data["model"]["merges"]]
    special = {t["content"] for t in data["added_tokens"]}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": vocab,
        "tokenizer.ggml.token_type": [3 if t in special else 1 for t in vocab],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.chat_template": (model / "chat_template.jinja").read_text(),
    }


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case None:
            return
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)
