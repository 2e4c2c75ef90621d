"""What a chat's client reads: `chat.completion` objects, whole or in chunks."""

from __future__ import annotations

import secrets
import time

import msgspec

from graphrt.api import sse
from graphrt.api.choices import Choices, Piece
from graphrt.api.reply_schema import (
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatLogprobs,
    ChunkChoice,
    Delta,
    ReplyMessage,
    Usage,
    usage_of,
)
from graphrt.api.state import AppState
from graphrt.api.token_logprobs import chat_logprobs, prompt_logprobs
from graphrt.api.token_trail import TokenText
from graphrt.seam.records import NO_LOGPROBS


class ChatReply:
    """A `Writer`: the reply's id and time are the same in all chunks."""

    def __init__(self, state: AppState, choices: Choices, with_usage: bool) -> None:
        self._id = "chatcmpl-" + secrets.token_hex(16)
        self._created = int(time.time())
        self._model = state.settings.model_name
        self._fingerprint = state.fingerprint
        self._tokenizer = state.tokenizer
        self._choices = choices
        self._with_usage = with_usage
        self._top = choices.asks[0].logprobs

    def opening(self, index: int) -> bytes:
        """The role."""
        return self._event([ChunkChoice(index, Delta(role="assistant", content=""))], None)

    def events(self, piece: Piece) -> bytes:
        """Text, if there is any, and the end."""
        out = b""
        if piece.text or piece.logprobs:
            logprobs = self._logprobs(piece.logprobs) if piece.logprobs else None
            out = self._event([ChunkChoice(piece.index, Delta(content=piece.text), None, logprobs)], None)
        if piece.finish:
            out += self._event([ChunkChoice(piece.index, Delta(), piece.finish)], None)
        return out

    def closing(self) -> bytes:
        """The usage, where it was asked for."""
        return (self._event([], usage_of(self._choices)) if self._with_usage else b"") + sse.DONE

    def whole(self, replies: list[Piece]) -> bytes:
        """The body of a reply that is not streamed."""
        ask = self._choices.asks[0]
        reply = ChatCompletion(
            self._id,
            "chat.completion",
            self._created,
            self._model,
            [ChatChoice(r.index, ReplyMessage(r.text), r.finish, self._logprobs(r.logprobs)) for r in replies],
            usage_of(self._choices),
            self._fingerprint,
        )
        if ask.prompt_logprobs != NO_LOGPROBS:
            scored = self._choices.first(0).prompt_logprobs
            reply.prompt_logprobs = prompt_logprobs(self._tokenizer, scored, ask.prompt_logprobs)
        return msgspec.json.encode(reply)

    def _logprobs(self, tokens: list[TokenText]) -> ChatLogprobs | None:
        if self._top == NO_LOGPROBS:
            return None
        return ChatLogprobs(chat_logprobs(self._tokenizer, tokens, self._top))

    def _event(self, choices: list[ChunkChoice], usage: Usage | None) -> bytes:
        shown = usage if self._with_usage else msgspec.UNSET
        return sse.event(
            ChatChunk(self._id, "chat.completion.chunk", self._created, self._model, choices, self._fingerprint, shown)
        )
