"""The text of one reply, from the tokens as they come: detokenized, cut at stop strings, end tokens left out."""

from __future__ import annotations

from collections.abc import Collection

from graphrt.api.ports import Detokenizer
from graphrt.api.stop_text import StopScanner
from graphrt.api.token_trail import TokenText, TokenTrail
from graphrt.seam.records import Logprob


class OutputText:
    """`finish` is "" while the reply goes on, then "stop" or "length". `tokens` counts those used, end token included.

    `late_ids` are end tokens that the engine was not told of: they end the reply here. `include_stop` keeps what ended
    it. Stop strings and late end tokens are passed over up to token `min_tokens`. With `with_logprobs`, `logprobs` grows by the
    tokens whose text has come out.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: tuple[str, ...],
        stop_ids: Collection[int],
        *,
        late_ids: Collection[int] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        with_logprobs: bool = False,
    ) -> None:
        self._detokenizer = detokenizer
        self._scanner = StopScanner(stops, include_stop) if stops else None
        self._stop_ids = frozenset(stop_ids)
        self._late_ids = frozenset(late_ids)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._trail = TokenTrail() if with_logprobs else None
        self._plain = not (stops or late_ids or with_logprobs)
        self._chars = 0  # given out
        self.logprobs: list[TokenText] = []
        self.finish = ""
        self.tokens = 0

    def push(self, tokens: list[int], finish: str, logprobs: list[Logprob] | None = None) -> str:
        """The text that `tokens` make certain. `finish` is the engine's: "", "stop", "length", or another to ignore.

        `logprobs` has one item a token where there are any.
        """
        end_token = finish == "stop" and bool(tokens) and tokens[-1] in self._stop_ids
        if self._plain:
            self.tokens += len(tokens)
            words = tokens[:-1] if end_token and not self._include_stop else tokens
            text = self._detokenizer.push(words) if words else ""
            if finish in ("stop", "length"):
                self.finish = finish
                text += self._detokenizer.finish()
            return text
        text = self._one_by_one(tokens, finish, end_token, logprobs or [])
        self._chars += len(text)
        if self._trail is not None:
            move_on = self._trail.finish if self.finish else self._trail.release
            self.logprobs += move_on(self._chars)
        return text

    def take_logprobs(self) -> list[TokenText]:
        """The tokens whose text came out since the last call."""
        out, self.logprobs = self.logprobs, []
        return out

    def _one_by_one(self, tokens: list[int], finish: str, end_token: bool, logprobs: list[Logprob]) -> str:
        """So that counts do not depend on how many tokens happened to come together."""
        text = ""
        for i, token in enumerate(tokens):
            self.tokens += 1
            armed = self.tokens > self._min_tokens
            late = armed and token in self._late_ids
            ends = late or (end_token and i == len(tokens) - 1)
            if not ends or self._include_stop:
                text += self._word(token, logprobs[i] if self._trail is not None else None, armed)
            if self._scanner is not None and self._scanner.hit is not None:
                self.finish = "stop"
                return text
            if late:
                finish = "stop"
                break
        if finish in ("stop", "length"):
            self.finish = finish
            rest = self._detokenizer.finish()
            if self._scanner is not None:
                rest = self._scanner.push(rest, self.tokens > self._min_tokens) + self._scanner.flush()
                if self._scanner.hit is not None:
                    self.finish = "stop"
            text += rest
        return text

    def _word(self, token: int, logprob: Logprob | None, armed: bool) -> str:
        if self._trail is not None and logprob is not None:
            data = self._detokenizer.take(token)
            self._trail.add(logprob, data)
            text = self._detokenizer.push_bytes(data)
        else:
            text = self._detokenizer.push((token,))
        return text if self._scanner is None else self._scanner.push(text, armed)
