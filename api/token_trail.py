"""Keeps each token's log-probability beside the bytes it gave the reply, until that part of the text is certain."""

from __future__ import annotations

import codecs
from bisect import bisect_right
from dataclasses import dataclass, replace

from graphrt.seam.records import Logprob


@dataclass(frozen=True, slots=True)
class TokenText:
    """One token of a reply. The `data` of all tokens together, decoded, is the reply; `start` is in characters of it."""

    logprob: Logprob
    data: bytes
    start: int


class TokenTrail:
    """Tokens go in as they come and come out once their text has been given out.

    They come out in runs that end on whole characters, so that no later cut can fall into what is out.
    """

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._held: list[
            tuple[TokenText, int, bool]
        ] = []  # with the characters up to its end, and whether one is whole there
        self._chars = 0
        self._out = 0  # characters that have come out

    def add(self, logprob: Logprob, data: bytes) -> None:
        """The next token and its bytes."""
        token = TokenText(logprob, data, self._chars)
        self._chars += len(self._utf8.decode(data))
        self._held.append((token, self._chars, not self._utf8.getstate()[0]))

    def release(self, chars: int) -> list[TokenText]:
        """The tokens whose text lies within the first `chars` characters of the reply."""
        count = 0
        for i, (_, end, whole) in enumerate(self._held):
            if end > chars:
                break
            if whole:
                count, self._out = i + 1, end
        out = [token for token, _, _ in self._held[:count]]
        del self._held[:count]
        return out

    def finish(self, chars: int) -> list[TokenText]:
        """The reply ends after `chars` characters: what is left of it, the last token cut to what shows of it."""
        out = self.release(chars)
        left = prefix_bytes(b"".join(token.data for token, _, _ in self._held), chars - self._out)
        for token, _, _ in self._held:
            if left <= 0:
                break
            out.append(token if len(token.data) <= left else replace(token, data=token.data[:left]))
            left -= len(token.data)
        self._held.clear()
        return out


def prefix_bytes(data: bytes, chars: int) -> int:
    """How many bytes of `data` show as its first `chars` characters, bytes that are not UTF-8 as U+FFFD."""
    cuts = range(len(data) + 1)
    return bisect_right(cuts, chars, key=lambda cut: len(data[:cut].decode(errors="replace"))) - 1
