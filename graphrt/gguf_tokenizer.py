"""A GGUF file's tokenizer, rebuilt as the files that Hugging Face tokenizers read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from graphrt.errors import ModelError
from graphrt.gguf_file import GgufFile

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"|[^\r\n\p{L}\p{N}]?\p{L}+"
_LLAMA3 = _CONTRACTIONS + _WORD + r"|\p{N}{1,3}" + _REST
_QWEN2 = _CONTRACTIONS + _WORD + r"|\p{N}" + _REST


def build_tokenizer(gguf: GgufFile) -> Tokenizer:
    """The tokenizer; ids are the file's. ModelError on missing fields and on kinds not supported."""
    meta, where = gguf.metadata, gguf.path
    tokens, types = meta.get("tokenizer.ggml.tokens"), meta.get("tokenizer.ggml.token_type")
    if not isinstance(tokens, list) or not isinstance(types, list) or len(tokens) != len(types):
        raise ModelError(f"{where} has no usable tokenizer (tokenizer.ggml.tokens and token_type)")
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise ModelError(f"{where}: the tokenizer's {len(tokens)} tokens are not distinct")
    kind = meta.get("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer = _byte_level(gguf, vocab)
    elif kind == "llama":
        tokenizer = _sentencepiece(gguf, tokens, types, vocab)
    else:
        raise ModelError(f"{where}: tokenizer model {kind!r} is not supported, only 'gpt2' and 'llama'")
    added = [(t, k) for t, k in zip(tokens, types, strict=True) if k in (_CONTROL, _USER_DEFINED)]
    tokenizer.add_tokens([AddedToken(t, special=k == _CONTROL, normalized=False) for t, k in added])
    bos = _token(gguf, "bos")
    if bos is not None and meta.get("tokenizer.ggml.add_bos_token", kind == "llama"):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, vocab[bos])]
        )
    return tokenizer


def write_tokenizer(gguf: GgufFile, folder: Path, context: int) -> None:
    """Writes tokenizer.json, tokenizer_config.json and, where the file has one, chat_template.jinja."""
    build_tokenizer(gguf).save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        token = _token(gguf, key)
        if token is not None:
            config[f"{name}_token"] = token
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    template = gguf.metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def token_id(gguf: GgufFile, key: str) -> int | None:
    """The id in `tokenizer.ggml.<key>_token_id`, None when absent. ModelError when out of range."""
    value = gguf.metadata.get(f"tokenizer.ggml.{key}_token_id")
    count = len(gguf.metadata.get("tokenizer.ggml.tokens", []))
    if value is not None and not 0 <= value < count:
        raise ModelError(f"{gguf.path}: tokenizer.ggml.{key}_token_id is {value}, the vocabulary has {count} tokens")
    return value


def _token(gguf: GgufFile, key: str) -> str | None:
    value = token_id(gguf, key)
    return None if value is None else gguf.metadata["tokenizer.ggml.tokens"][value]


def _byte_level(gguf: GgufFile, vocab: dict[str, int]) -> Tokenizer:
    pre = gguf.metadata.get("tokenizer.ggml.pre", "default")
    lines = gguf.metadata.get("tokenizer.ggml.merges")
    if not isinstance(lines, list):
        raise ModelError(f"{gguf.path} has no tokenizer.ggml.merges")
    merges = [tuple(line.split(" ", 1)) for line in lines]
    try:
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre in ("llama-bpe", "llama3")))
    except Exception as error:  # the Rust side raises plain Exception
        raise ModelError(f"{gguf.path}: the tokenizer's merges do not fit its tokens: {error}") from None
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    with_regex = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in ("default", "gpt-2"):
        tokenizer.pre_tokenizer = with_regex
    elif pre == "smollm":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), with_regex])
    elif pre in ("llama-bpe", "llama3", "qwen2"):
        if pre == "qwen2":
            tokenizer.normalizer = normalizers.NFC()
        pattern = Regex(_QWEN2 if pre == "qwen2" else _LLAMA3)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(pattern, "isolated"), plain])
    else:
        raise ModelError(
            f"{gguf.path}: pre-tokenizer {pre!r} is not supported, only default, gpt-2, smollm, llama-bpe and qwen2"
        )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(gguf: GgufFile, tokens: list[str], types: list[int], vocab: dict[str, int]) -> Tokenizer:
    scores = gguf.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise ModelError(f"{gguf.path} has no tokenizer.ggml.scores")
    unknown = _token(gguf, "unknown") or tokens[0]
    prefix = gguf.metadata.get("tokenizer.ggml.add_space_prefix", True)
    model = models.BPE(
        vocab=vocab, merges=_merges(tokens, types, scores), unk_token=unknown, fuse_unk=True, byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    spaces = [normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), *spaces] if prefix else spaces)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def _merges(tokens: list[str], types: list[int], scores: list[float]) -> list[tuple[str, str]]:
    """SentencePiece joins the neighbours whose union has the best score: that order, as pairs."""
    normal = {token for token, kind in zip(tokens, types, strict=True) if kind == _NORMAL}
    ranked = sorted((-scores[i], i) for i, token in enumerate(tokens) if token in normal and len(token) > 1)
    splits = ((tokens[i][:k], tokens[i][k:]) for _, i in ranked for k in range(1, len(tokens[i])))
    return [(left, right) for left, right in splits if left in normal and right in normal]
