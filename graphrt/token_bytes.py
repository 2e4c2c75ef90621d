"""What one token stands for in bytes, read from the decoder section of a tokenizer.json."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from graphrt.errors import ModelError

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "▁"


@dataclass(frozen=True)
class Decoding:
    """`to_bytes` maps a token's spelling to its bytes; `strip` says what is dropped at the start of a text.

    "space" drops one leading space of the text, "word" all leading spaces of the first token, "" nothing.
    """

    to_bytes: Callable[[str], bytes]
    strip: str


def read_decoder(decoder: Any, where: str) -> Decoding:
    """Understands byte-level decoders and SentencePiece's (space marks, byte fallback). ModelError on others."""
    steps = _steps(decoder)
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return Decoding(_byte_level(), "")
    strip, spaces, fallback = "", False, False
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}:
                spaces = True
            case {"type": "Metaspace", "replacement": "▁"}:
                spaces = True
                first = step.get("prepend_scheme", "always" if step.get("add_prefix_space", True) else "never")
                strip = "" if first == "never" else "word"
            case {"type": "ByteFallback"}:
                fallback = True
            case {"type": "Fuse"}:
                pass
            case {"type": "Strip", "content": " ", "start": 1, "stop": 0}:
                strip = "space"
            case _:
                raise ModelError(f"{where}: decoder {'+'.join(map(str, kinds))} is not supported")
    if not spaces:
        raise ModelError(f"{where}: decoder {'+'.join(map(str, kinds)) or 'none'} is not supported")
    return Decoding(lambda token: _sentencepiece(token, fallback), strip)


def _steps(decoder: Any) -> list[dict[str, Any]]:
    if not isinstance(decoder, dict):
        return []
    if decoder.get("type") == "Sequence":
        return [step for inner in decoder.get("decoders", []) for step in _steps(inner)]
    return [decoder]


def _byte_level() -> Callable[[str], bytes]:
    """GPT-2's alphabet: printable Latin-1 characters stand for themselves, the others for code points from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(b): b for b in printable}
    table |= {chr(256 + i): b for i, b in enumerate(sorted(set(range(256)) - set(printable)))}

    def to_bytes(token: str) -> bytes:
        try:
            return bytes([table[c] for c in token])
        except KeyError:
            return token.encode()  # an added token, spelt as it is

    return to_bytes


def _sentencepiece(token: str, fallback: bool) -> bytes:
    if fallback and (match := _BYTE.fullmatch(token)):
        return bytes([int(match[1], 16)])
    return token.replace(_SPACE, " ").encode()
