"""What a completion's client reads: `text_completion` objects, whole or in chunks."""

from __future__ import annotations

import secrets
import time

import msgspec

from graphrt.api import sse
from graphrt.api.ask import Ask
from graphrt.api.choices import Choices, Piece
from graphrt.api.reply_schema import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    PromptTokensDetails,
    Usage,
    usage_of,
)
from graphrt.api.request_schema import CompletionRequest
from graphrt.api.state import AppState
from graphrt.api.token_logprobs import CompletionTokens, prompt_logprobs


class CompletionReply:
    """A `Writer`: the reply's id and time are the same in all chunks."""

    def __init__(self, state: AppState, request: CompletionRequest, choices: Choices, with_usage: bool) -> None:
        self._id = "cmpl-" + secrets.token_hex(16)
        self._created = int(time.time())
        self._model = state.settings.model_name
        self._fingerprint = state.fingerprint
        self._tokenizer = state.tokenizer
        self._choices = choices
        self._with_usage = with_usage
        # The prompts' texts, with `echo`.
        self._texts = [self._text(ask) for ask in choices.asks] if request.echo else []
        self._logprobs = request.logprobs
        self._prompt_logprobs = request.prompt_logprobs
        self._silent = request.max_tokens == 0  # the engine gave one token all the same

    def opening(self, index: int) -> bytes:
        """The prompt, with `echo`."""
        if not self._texts:
            return b""
        tokens = self._tokens()
        self._add_prompt(tokens, index)
        return self._event([self._choice(index, self._texts[self._prompt(index)], None, tokens)])

    def events(self, piece: Piece) -> bytes:
        """Text, if there is any, and the end."""
        text = "" if self._silent else piece.text
        finish = self._finish(piece)
        tokens = self._tokens() if piece.logprobs and not self._silent else None
        if tokens is not None:
            tokens.add(piece.logprobs, self._offset(piece.index))
        if not (text or finish or tokens):
            return b""
        return self._event([self._choice(piece.index, text, finish, tokens)])

    def closing(self) -> bytes:
        """The usage, where it was asked for."""
        return (self._event([], self._usage()) if self._with_usage else b"") + sse.DONE

    def whole(self, replies: list[Piece]) -> bytes:
        """The body of a reply that is not streamed."""
        choices = [self._whole_choice(reply) for reply in replies]
        return msgspec.json.encode(self._completion(choices, self._usage()))

    def _whole_choice(self, reply: Piece) -> CompletionChoice:
        tokens = self._tokens()
        text = "" if self._silent else reply.text
        if self._texts:
            self._add_prompt(tokens, reply.index)
            text = self._texts[self._prompt(reply.index)] + text
        if tokens is not None and not self._silent:
            tokens.add(reply.logprobs, self._offset(reply.index))
        choice = self._choice(reply.index, text, self._finish(reply), tokens)
        if self._prompt_logprobs is not None:
            scored = self._choices.first(self._prompt(reply.index)).prompt_logprobs
            choice.prompt_logprobs = prompt_logprobs(self._tokenizer, scored, self._prompt_logprobs)
        return choice

    def _finish(self, piece: Piece) -> str | None:
        return ("length" if self._silent else piece.finish) if piece.finish else None

    def _prompt(self, index: int) -> int:
        return index // self._choices.n

    def _text(self, ask: Ask) -> str:
        return self._tokenizer.decode(ask.tokens) if ask.text is None else ask.text

    def _offset(self, index: int) -> int:
        return len(self._texts[self._prompt(index)]) if self._texts else 0

    def _tokens(self) -> CompletionTokens | None:
        return None if self._logprobs is None else CompletionTokens(self._tokenizer, self._logprobs)

    def _add_prompt(self, tokens: CompletionTokens | None, index: int) -> None:
        if tokens is not None:
            prompt = self._prompt(index)
            scored = self._choices.first(prompt).prompt_logprobs
            tokens.add_prompt(self._texts[prompt], self._choices.asks[prompt].tokens, scored)

    @staticmethod
    def _choice(index: int, text: str, finish: str | None, tokens: CompletionTokens | None) -> CompletionChoice:
        logprobs: CompletionLogprobs | None = None if tokens is None else tokens.lists
        return CompletionChoice(index, text, finish, logprobs)

    def _usage(self) -> Usage:
        if not self._silent:
            return usage_of(self._choices)
        prompt = self._choices.prompt_tokens
        return Usage(prompt, 0, prompt, PromptTokensDetails(self._choices.cached_tokens))

    def _completion(self, choices: list[CompletionChoice], usage: Usage | None) -> Completion:
        made = Completion(self._id, "text_completion", self._created, self._model, choices, self._fingerprint)
        if usage is not None or self._with_usage:
            made.usage = usage
        return made

    def _event(self, choices: list[CompletionChoice], usage: Usage | None = None) -> bytes:
        return sse.event(self._completion(choices, usage))
