"""The shape of a model, read from a Hugging Face `config.json` and checked before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from graphrt.errors import ModelError
from graphrt.jsonfile import Fields, read_json
from graphrt.rope_config import RopeConfig, parse_rope

__all__ = ["Architecture", "ModelConfig", "RopeConfig", "load_config", "parse_config"]

Architecture = Literal["llama", "qwen3"]
_CLASSES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}


@dataclass(frozen=True)
class ModelConfig:
    """A decoder of Llama or Qwen3 kind. `attention_bias` covers q, k, v and o; qwen3 has q and k norms of `head_dim`.

    `eos_ids` end a sequence; they unite those of `config.json` and `generation_config.json`. `max_position` is the
    longest context in tokens.
    """

    architecture: Architecture
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    rope: RopeConfig
    max_position: int
    tie_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    bos_id: int | None
    eos_ids: tuple[int, ...]


def load_config(model_dir: Path) -> ModelConfig:
    """The configuration of a model directory. ModelError on anything missing, not supported or out of range."""
    model_dir = Path(model_dir)
    if not model_dir.is_dir():
        raise ModelError(f"{model_dir} is not a directory")
    path = model_dir / "config.json"
    if not path.is_file():
        raise ModelError(f"{model_dir} is not a model directory: it has no config.json")
    config = Fields(read_json(path), str(path))
    generation_path = model_dir / "generation_config.json"
    generation = Fields({}, str(generation_path))
    if generation_path.is_file():
        generation = Fields(read_json(generation_path), str(generation_path))
    return parse_config(config, generation)


def parse_config(config: Fields, generation: Fields) -> ModelConfig:
    """Checks and translates `config.json` and `generation_config.json` (possibly empty)."""
    architecture = _architecture(config)
    _refuse_variants(config)
    vocab = config.integer("vocab_size", 1, 1 << 24)
    hidden = config.integer("hidden_size", 1, 1 << 20)
    heads = config.integer("num_attention_heads", 1, 4096)
    # Qwen3's own default differs from Llama's hidden_size / heads.
    head_dim = config.integer("head_dim", 1, 4096, 128 if architecture == "qwen3" else None)
    if head_dim is None:
        if hidden % heads:
            raise ModelError(f"{config.where}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
        head_dim = hidden // heads
    if head_dim % 8 or head_dim > 512:
        raise ModelError(f"{config.where}: head_dim {head_dim} is not supported: a multiple of 8, at most 512")
    kv_heads = config.integer("num_key_value_heads", 1, 4096, heads)
    if heads % kv_heads:
        raise ModelError(
            f"{config.where}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    max_position = config.integer("max_position_embeddings", 1, 1 << 30, 2048 if architecture == "llama" else 32768)
    eos = _token_ids(generation, "eos_token_id", vocab) + _token_ids(config, "eos_token_id", vocab)
    bos = _token_ids(config, "bos_token_id", vocab)
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=config.integer("intermediate_size", 1, 1 << 22),
        num_layers=config.integer("num_hidden_layers", 1, 4096),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_eps=config.number("rms_norm_eps", 1e-12, 0.1, 1e-6),
        rope=parse_rope(config, max_position),
        max_position=max_position,
        tie_embeddings=config.boolean("tie_word_embeddings", False),
        attention_bias=config.boolean("attention_bias", False),
        mlp_bias=architecture == "llama" and config.boolean("mlp_bias", False),
        bos_id=bos[0] if bos else None,
        eos_ids=tuple(dict.fromkeys(eos)),
    )


def _architecture(config: Fields) -> Architecture:
    model_type = config.string("model_type", "")
    classes = config.values.get("architectures") or []
    if not isinstance(classes, list):
        raise ModelError(f"{config.where}: architectures is {classes!r}, expected a list")
    supported = ", ".join(_CLASSES.values())
    if classes and classes[0] not in _CLASSES.values():
        raise ModelError(f"{config.where}: architecture {classes[0]!r} is not supported, only {supported}")
    if not model_type and classes:
        model_type = next(k for k, v in _CLASSES.items() if v == classes[0])
    if model_type not in _CLASSES:
        raise ModelError(f"{config.where}: model type {model_type!r} is not supported, only {', '.join(_CLASSES)}")
    if classes and classes[0] != _CLASSES[model_type]:
        raise ModelError(f"{config.where}: model_type {model_type!r} does not fit architecture {classes[0]!r}")
    return cast(Architecture, model_type)


def _refuse_variants(config: Fields) -> None:
    """What these architectures could carry, but this runtime would compute wrongly."""
    if config.values.get("quantization_config"):
        method = config.section("quantization_config")
        name = method.string("quant_method", "unknown") if method else "unknown"
        raise ModelError(f"{config.where}: quantised weights ({name}) are not supported, use bf16, f16 or f32 weights")
    act = config.string("hidden_act", "silu")
    if act not in ("silu", "swish"):
        raise ModelError(f"{config.where}: hidden_act {act!r} is not supported, only 'silu'")
    layer_types = config.values.get("layer_types") or []
    odd = sorted({str(t) for t in layer_types if t != "full_attention"})
    window = config.integer("sliding_window", 1, 1 << 30, None)
    if odd or (window is not None and config.boolean("use_sliding_window", False)):
        raise ModelError(f"{config.where}: sliding-window attention ({odd or window}) is not supported")


def _token_ids(fields: Fields, name: str, vocab: int) -> tuple[int, ...]:
    value = fields.values.get(name)
    values = value if isinstance(value, list) else [] if value is None else [value]
    for i in values:
        if isinstance(i, bool) or not isinstance(i, int):
            raise ModelError(f"{fields.where}: {name} is {value!r}, expected token ids")
    # A negative id is an old spelling of "none"; an id past the vocabulary can never be sampled.
    return tuple(i for i in values if 0 <= i < vocab)
