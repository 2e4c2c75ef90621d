"""Text to token ids and back, from the tokenizer.json of a model directory."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenizers

from graphrt.config import load_config
from graphrt.errors import ModelError, RequestError
from graphrt.jsonfile import read_json
from graphrt.token_bytes import Decoding, read_decoder


class Tokenizer:
    """`eos_ids` end a reply; `vocab_size` counts the ids that have a spelling; no token spells more than `longest_token`
    characters. Methods may be called from any thread.
    """

    def __init__(self, inner: tokenizers.Tokenizer, decoding: Decoding, eos_ids: tuple[int, ...], model_vocab: int):
        self._inner = inner
        self._decoding = decoding
        self.eos_ids = eos_ids
        self.vocab_size = inner.get_vocab_size(with_added_tokens=True)
        self.longest_token = max(map(len, inner.get_vocab(with_added_tokens=True)), default=1)
        self._model_vocab = model_vocab
        added = inner.get_added_tokens_decoder()
        self._special = frozenset(i for i, token in added.items() if token.special)
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def load(cls, model_dir: Path) -> Tokenizer:
        """ModelError when tokenizer.json is missing, malformed, or decodes in a way that is not supported."""
        model_dir = Path(model_dir)
        path = model_dir / "tokenizer.json"
        if not path.is_file():
            old = (model_dir / "tokenizer.model").is_file()
            hint = " (it has only a tokenizer.model: save it in the fast format)" if old else ""
            raise ModelError(f"{model_dir} has no tokenizer.json{hint}")
        text = read_json(path)
        try:
            inner = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the Rust side raises plain Exception
            raise ModelError(f"{path} is not a tokenizer: {error}") from None
        inner.no_truncation()
        inner.no_padding()
        config = load_config(model_dir)
        ends = dict.fromkeys(config.eos_ids)
        own = inner.token_to_id(special_tokens(model_dir).get("eos_token", ""))
        if own is not None and own < config.vocab_size:
            ends[own] = None
        return cls(inner, read_decoder(text.get("decoder"), str(path)), tuple(ends), config.vocab_size)

    def encode(self, text: str, *, add_special: bool = False) -> list[int]:
        """Token ids. Special tokens spelt in `text` are recognised; `add_special` adds what the tokenizer puts around a
        raw prompt (a BOS for most Llama models), which chat templates write themselves.

        RequestError when the text is not valid Unicode, or spells a token that the model has no embedding for.
        """
        try:
            ids: list[int] = self._inner.encode(text, add_special_tokens=add_special).ids
        except (UnicodeEncodeError, TypeError):
            # The Rust side takes a string with a lone surrogate for no string at all.
            raise RequestError("the text is not valid Unicode: it holds half of a surrogate pair") from None
        if self.vocab_size > self._model_vocab and ids and max(ids) >= self._model_vocab:
            raise RequestError(
                f"the text holds token {max(ids)}, the model's vocabulary ends at {self._model_vocab - 1}"
            )
        return ids

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """The text of `ids`, bytes that are not UTF-8 as U+FFFD, unknown ids as nothing.

        Special tokens are left out unless `special`, which spells them.
        """
        detokenizer = self.detokenizer()
        if not special:
            return detokenizer.push(ids) + detokenizer.finish()
        data = b"".join(self.spelling(i).encode() if i in self._special else detokenizer.take(i) for i in ids)
        return data.decode(errors="replace")

    def detokenizer(self) -> IncrementalDetokenizer:
        """A new one, for one reply."""
        return IncrementalDetokenizer(self)

    def spelling(self, token: int) -> str:
        """How the vocabulary spells a token, special ones too; "" for ids without a spelling."""
        return (self._inner.id_to_token(token) or "") if token >= 0 else ""

    def is_special(self, token: int) -> bool:
        """Whether the token is a mark that is no text."""
        return token in self._special

    @property
    def strip(self) -> str:
        """What is dropped at the start of a text, see `Decoding`."""
        return self._decoding.strip

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token; empty for special tokens and ids without a spelling."""
        known = self._bytes.get(token)
        if known is None:
            spelling = None if token in self._special or token < 0 else self._inner.id_to_token(token)
            known = self._bytes[token] = b"" if spelling is None else self._decoding.to_bytes(spelling)
        return known


class IncrementalDetokenizer:
    """Ids in, text out as soon as it is certain: what was returned never changes, and no character comes in halves.

    The pieces of `push` and `finish` together are `Tokenizer.decode` of all ids. Constant work a token.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = tokenizer.strip

    def push(self, ids: Iterable[int]) -> str:
        """The text that `ids` complete, possibly empty."""
        data = b"".join(map(self._tokenizer.token_bytes, ids)) if not self._strip else b"".join(map(self.take, ids))
        return self._utf8.decode(data)

    def push_bytes(self, data: bytes) -> str:
        """The same for what `take` gave."""
        return self._utf8.decode(data)

    def finish(self) -> str:
        """What is left: a character cut short becomes U+FFFD. The detokenizer starts afresh afterwards."""
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        self._strip = self._tokenizer.strip
        return text

    def take(self, token: int) -> bytes:
        """The bytes that `token` adds to the text, to be pushed by `push_bytes`."""
        piece = self._tokenizer.token_bytes(token)
        if piece and self._strip:
            piece = piece.lstrip(b" ") if self._strip == "word" else piece.removeprefix(b" ")
            self._strip = ""
        return piece


def special_tokens(model_dir: Path) -> dict[str, str]:
    """bos_token, eos_token and the like as text, from special_tokens_map.json and tokenizer_config.json."""
    found: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        path = model_dir / name
        values: dict[str, Any] = read_json(path) if path.is_file() else {}
        for key, value in values.items():
            text = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(text, str):
                found[key] = text
    return found
