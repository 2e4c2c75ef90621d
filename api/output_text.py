"""The text of one reply, from the tokens as they come: detokenized, cut at stop strings, end tokens left out."""

from __future__ import annotations

from collections.abc import Collection

from graphrt.api.ports import Detokenizer
from graphrt.api.stop_text import StopScanner


class OutputText:
    """`finish` is "" while the reply goes on, then "stop" or "length". `tokens` counts those used, end token included."""

    def __init__(self, detokenizer: Detokenizer, stops: tuple[str, ...], stop_ids: Collection[int]) -> None:
        self._detokenizer = detokenizer
        self._scanner = StopScanner(stops) if stops else None
        self._stop_ids = frozenset(stop_ids)
        self.finish = ""
        self.tokens = 0

    def push(self, tokens: list[int], finish: str) -> str:
        """The text that `tokens` make certain. `finish` is the engine's: "", "stop", "length", or another to ignore."""
        end_token = finish == "stop" and bool(tokens) and tokens[-1] in self._stop_ids
        words = tokens[:-1] if end_token else tokens
        if self._scanner is None:
            self.tokens += len(tokens)
            text = self._detokenizer.push(words) if words else ""
            if finish in ("stop", "length"):
                self.finish = finish
                text += self._detokenizer.finish()
            return text
        return self._scan(self._scanner, words, finish, end_token)

    def _scan(self, scanner: StopScanner, words: list[int], finish: str, end_token: bool) -> str:
        text = ""
        for token in words:
            # One by one, so that the count does not depend on how many tokens happened to come together.
            self.tokens += 1
            text += scanner.push(self._detokenizer.push([token]))
            if scanner.hit is not None:
                self.finish = "stop"
                return text
        self.tokens += end_token
        if finish in ("stop", "length"):
            text += scanner.push(self._detokenizer.finish())
            self.finish = "stop" if scanner.hit is not None else finish
            text += scanner.flush()
        return text
