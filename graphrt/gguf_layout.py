"""What a GGUF file of Llama or Qwen3 kind must hold: its configuration, and its tensors under Hugging Face names."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from graphrt.errors import ModelError
from graphrt.gguf_file import GgufFile, GgufTensor
from graphrt.jsonfile import Fields

_CLASSES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_LLAMA3 = (1.0, 4.0, 8192)  # low and high frequency factor, original context: the same for every published Llama 3


@dataclass(frozen=True)
class Planned:
    """One tensor to write: its new name, where it comes from, and its row order (None: as stored)."""

    name: str
    source: GgufTensor
    rows: np.ndarray[Any, Any] | None


def read_config(gguf: GgufFile) -> dict[str, Any]:
    """The contents of `config.json`. ModelError on another architecture and on variants not supported."""
    meta = gguf.metadata
    arch = meta.get("general.architecture")
    if arch not in _CLASSES:
        raise ModelError(f"{gguf.path}: architecture {arch!r} is not supported, only {', '.join(_CLASSES)}")
    if meta.get("split.count", 1) > 1:
        raise ModelError(f"{gguf.path} is one of {meta['split.count']} parts, which is not supported: merge them first")
    fields = Fields(
        {k.removeprefix(f"{arch}."): v for k, v in meta.items() if k.startswith(f"{arch}.")}, str(gguf.path)
    )
    for key in ("expert_count", "attention.sliding_window"):
        if fields.integer(key, 0, 1 << 30, 0):
            raise ModelError(f"{gguf.path}: {arch}.{key} {fields.values[key]} is not supported")
    hidden = fields.integer("embedding_length", 1, 1 << 20)
    heads = fields.integer("attention.head_count", 1, 4096)
    head_dim = fields.integer("attention.key_length", 2, 4096, hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if fields.integer(key, 1, 4096, head_dim) != head_dim:
            raise ModelError(f"{gguf.path}: {arch}.{key} {fields.values[key]} differs from the head size {head_dim}")
    return {
        "architectures": [_CLASSES[arch]],
        "model_type": arch,
        "vocab_size": _shape(gguf, "token_embd.weight")[0],
        "hidden_size": hidden,
        "intermediate_size": fields.integer("feed_forward_length", 1, 1 << 22),
        "num_hidden_layers": fields.integer("block_count", 1, 4096),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.integer("attention.head_count_kv", 1, 4096, heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": fields.integer("context_length", 1, 1 << 30),
        # Stored as float32: its shortest spelling is the number that was meant (1e-05, not 9.999999747378752e-06).
        "rms_norm_eps": float(str(np.float32(fields.number("attention.layer_norm_rms_epsilon", 1e-12, 0.1)))),
        "rope_theta": fields.number("rope.freq_base", 1.0001, 1e12, 10000.0),
        "rope_scaling": _rope_scaling(gguf, fields, head_dim),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "attention_bias": "blk.0.attn_q.bias" in gguf.tensors,
        "torch_dtype": "bfloat16",
    }


def plan_tensors(gguf: GgufFile, config: dict[str, Any]) -> list[Planned]:
    """Every tensor that the configuration calls for, checked. ModelError on missing, misshapen and unknown tensors."""
    hidden, ffn, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    plan: list[Planned] = []

    def put(name: str, source: str, *shape: int, permuted: bool = False) -> None:
        have = _shape(gguf, source)
        if have != shape:
            raise ModelError(f"{gguf.path}: tensor {source} has shape {have}, the configuration wants {shape}")
        # GGUF pairs neighbouring elements for llama's rope, Hugging Face pairs the two halves of a head.
        rows = _half_rotation_rows(shape[0], head_dim) if permuted and config["model_type"] == "llama" else None
        plan.append(Planned(name, gguf.tensors[source], rows))

    put("model.embed_tokens.weight", "token_embd.weight", config["vocab_size"], hidden)
    for i in range(config["num_hidden_layers"]):
        to, of = f"model.layers.{i}.", f"blk.{i}."
        put(to + "input_layernorm.weight", of + "attn_norm.weight", hidden)
        put(to + "post_attention_layernorm.weight", of + "ffn_norm.weight", hidden)
        for name, rows, columns in (("q", q, hidden), ("k", kv, hidden), ("v", kv, hidden), ("o", hidden, q)):
            source = of + ("attn_output" if name == "o" else f"attn_{name}")
            put(f"{to}self_attn.{name}_proj.weight", source + ".weight", rows, columns, permuted=name in "qk")
            if config["attention_bias"]:
                put(f"{to}self_attn.{name}_proj.bias", source + ".bias", rows, permuted=name in "qk")
        if config["model_type"] == "qwen3":
            put(to + "self_attn.q_norm.weight", of + "attn_q_norm.weight", head_dim)
            put(to + "self_attn.k_norm.weight", of + "attn_k_norm.weight", head_dim)
        for name, rows, columns in (("gate", ffn, hidden), ("up", ffn, hidden), ("down", hidden, ffn)):
            put(f"{to}mlp.{name}_proj.weight", f"{of}ffn_{name}.weight", rows, columns)
    put("model.norm.weight", "output_norm.weight", hidden)
    if not config["tie_word_embeddings"]:
        put("lm_head.weight", "output.weight", config["vocab_size"], hidden)
    unknown = sorted(gguf.tensors.keys() - {p.source.name for p in plan} - {"rope_freqs.weight"})
    if unknown:
        raise ModelError(f"{gguf.path}: tensor {unknown[0]} has no place in a {config['model_type']} model")
    return plan


def _shape(gguf: GgufFile, name: str) -> tuple[int, ...]:
    if name not in gguf.tensors:
        raise ModelError(f"{gguf.path}: tensor {name} is missing")
    return gguf.tensors[name].shape


def _half_rotation_rows(count: int, head_dim: int) -> np.ndarray[Any, Any]:
    """Where each row of the half-rotation order lies in the interleaved order."""
    return np.arange(count).reshape(-1, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)


def _rope_scaling(gguf: GgufFile, fields: Fields, head_dim: int) -> dict[str, Any] | None:
    kind = fields.string("rope.scaling.type", "none")
    factor = fields.number("rope.scaling.factor", 0, 1e4, 0.0)
    if "rope_freqs.weight" in gguf.tensors:
        return _llama3_scaling(gguf, fields, head_dim)
    if kind == "none" or not factor:
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        original = fields.integer("rope.scaling.original_context_length", 1, 1 << 30)
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise ModelError(f"{gguf.path}: rope scaling {kind!r} is not supported, only none, linear and yarn")


def _llama3_scaling(gguf: GgufFile, fields: Fields, head_dim: int) -> dict[str, Any]:
    """The file holds only the resulting divisor of each frequency: find the factor and check that it explains them."""
    tensor = gguf.tensors["rope_freqs.weight"]
    if tensor.type_name != "F32" or tensor.shape != (head_dim // 2,):
        raise ModelError(f"{gguf.path}: rope_freqs.weight is {tensor.type_name} {tensor.shape}, expected F32")
    have = tensor.data.view(np.float32).reshape(-1)
    low, high, original = _LLAMA3
    factor = round(float(have.max()), 3)
    theta = fields.number("rope.freq_base", 1.0001, 1e12, 10000.0)
    for divisor, i in zip(have.tolist(), range(head_dim // 2), strict=True):
        turns = original * theta ** (-2 * i / head_dim) / (2 * math.pi)
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        if not math.isclose(divisor, 1 / (smooth + (1 - smooth) / factor), rel_tol=1e-3):
            raise ModelError(f"{gguf.path}: rope_freqs.weight does not follow Llama 3's rope scaling")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
