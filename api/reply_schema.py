"""The replies, field by field, as types that msgspec writes straight to bytes."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType


class PromptTokensDetails(msgspec.Struct):
    """How the prompt's tokens were come by."""

    cached_tokens: int


class Usage(msgspec.Struct):
    """Tokens of one request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class ReplyMessage(msgspec.Struct):
    """The whole reply of the model."""

    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct):
    """One finished reply."""

    index: int
    message: ReplyMessage
    finish_reason: str
    logprobs: None = None


class ChatCompletion(msgspec.Struct):
    """The body of a reply that is not streamed."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str


class Delta(msgspec.Struct):
    """What is new: the role in the first, text in the others, nothing in the last."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChunkChoice(msgspec.Struct):
    """One step of one streamed reply."""

    index: int
    delta: Delta
    finish_reason: str | None = None
    logprobs: None = None


class ChatChunk(msgspec.Struct):
    """One event of a streamed reply. `usage` is null in all but the last where it was asked for, else absent."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    system_fingerprint: str
    usage: Usage | UnsetType | None = UNSET


class ModelCard(msgspec.Struct):
    """One served model. `max_model_len` is in tokens, prompt and reply together."""

    id: str
    created: int
    max_model_len: int
    object: Literal["model"] = "model"
    owned_by: str = "graphrt"


class ModelList(msgspec.Struct):
    """All served models."""

    data: list[ModelCard]
    object: Literal["list"] = "list"


class Health(msgspec.Struct):
    """`status` is "ok", "draining" or "dead"."""

    status: Literal["ok", "draining", "dead"]
    reason: str = ""


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Usage:
    """The sums of one request."""
    return Usage(
        prompt_tokens, completion_tokens, prompt_tokens + completion_tokens, PromptTokensDetails(cached_tokens)
    )
