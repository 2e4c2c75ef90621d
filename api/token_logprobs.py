"""Log-probabilities as the endpoints show them: a chat's list, the older lists of completions, and the prompt's."""

from __future__ import annotations

from collections.abc import Iterable

from graphrt.api.ports import TextCodec
from graphrt.api.reply_schema import CompletionLogprobs, PromptLogprob, TokenLogprob, TopLogprob
from graphrt.api.token_trail import TokenText
from graphrt.seam.records import Logprob

LEAST = -9999.0  # JSON knows no infinity; clients know this number


def shown(logprob: float) -> float:
    """A log-probability as JSON can hold it."""
    return logprob if logprob > LEAST else LEAST


def token_name(tokenizer: TextCodec, token: int, prefix: str = "") -> str:
    """A token's text; `prefix` and escapes where it is only a part of a character, its spelling where it is no text."""
    if tokenizer.is_special(token):
        return tokenizer.spelling(token)
    return _text_of(tokenizer.token_bytes(token), prefix)


def _text_of(data: bytes, prefix: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(tokenizer: TextCodec, tokens: Iterable[TokenText], top: int) -> list[TokenLogprob]:
    """The `content` of a chat's logprobs."""
    out = []
    for item in tokens:
        own = item.logprob
        name = _text_of(item.data, "") if item.data else token_name(tokenizer, own.token)
        best = [
            TopLogprob(token_name(tokenizer, token), shown(value), list(_bytes_of(tokenizer, token)))
            for token, value in own.top[:top]
        ]
        out.append(TokenLogprob(name, shown(own.logprob), list(item.data), best))
    return out


def _bytes_of(tokenizer: TextCodec, token: int) -> bytes:
    return tokenizer.spelling(token).encode() if tokenizer.is_special(token) else tokenizer.token_bytes(token)


class CompletionTokens:
    """Collects the four lists of a completion; `top` 0 shows each token's own alone."""

    def __init__(self, tokenizer: TextCodec, top: int) -> None:
        self._tokenizer = tokenizer
        self._top = top
        self.lists = CompletionLogprobs([], [], [], [])

    def add_prompt(self, text: str, tokens: list[int], logprobs: list[Logprob]) -> None:
        """The prompt's tokens with their places in `text`; the first has no log-probability."""
        at = 0
        for i, token in enumerate(tokens):
            self._add(token_name(self._tokenizer, token, "bytes:"), logprobs[i - 1] if i else None, at)
            piece = self._tokenizer.token_bytes(token).decode(errors="ignore") or self._tokenizer.spelling(token)
            # What the tokenizer put in before the text, or spelt in another way, takes no place.
            at += len(piece) if text.startswith(piece, at) else 0

    def add(self, tokens: Iterable[TokenText], offset: int) -> None:
        """Tokens of the reply, which begins at `offset` of the text."""
        for item in tokens:
            token = item.logprob.token
            name = _text_of(item.data, "bytes:") if item.data else token_name(self._tokenizer, token, "bytes:")
            self._add(name, item.logprob, offset + item.start)

    def _add(self, name: str, logprob: Logprob | None, at: int) -> None:
        lists = self.lists
        lists.text_offset.append(at)
        lists.tokens.append(name)
        lists.token_logprobs.append(None if logprob is None else shown(logprob.logprob))
        if logprob is None:
            lists.top_logprobs.append(None)
            return
        best = {name: shown(logprob.logprob)}
        for token, value in logprob.top[: self._top]:
            other = token_name(self._tokenizer, token, "bytes:")
            best[other] = max(shown(value), best.get(other, LEAST))
        lists.top_logprobs.append(best)


def prompt_logprobs(tokenizer: TextCodec, logprobs: list[Logprob], top: int) -> list[dict[str, PromptLogprob] | None]:
    """One object a prompt token, by token id: the likeliest and its own. The first has none."""
    out: list[dict[str, PromptLogprob] | None] = [None]
    for own in logprobs:
        here = {
            str(token): PromptLogprob(shown(value), rank, token_name(tokenizer, token))
            for rank, (token, value) in enumerate(own.top[:top], 1)
        }
        here.setdefault(str(own.token), PromptLogprob(shown(own.logprob), own.rank, token_name(tokenizer, own.token)))
        out.append(here)
    return out
