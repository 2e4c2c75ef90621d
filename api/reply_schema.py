"""The replies, field by field, as types that msgspec writes straight to bytes."""

from __future__ import annotations

from typing import Literal, Protocol

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


class TopLogprob(msgspec.Struct):
    """A likely token. `bytes` are those of its text, of which `token` may show only escapes."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct):
    """A token of the reply; the `bytes` of all together are its text."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """The tokens of a reply, or of what is new of it."""

    content: list[TokenLogprob]
    refusal: None = None


class PromptLogprob(msgspec.Struct):
    """A token at a place of the prompt; the likeliest has rank 1."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


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
    logprobs: ChatLogprobs | None = None


class ChatCompletion(msgspec.Struct):
    """The body of a reply that is not streamed."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Delta(msgspec.Struct):
    """What is new: the role in the first, text in the others, nothing in the last."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChunkChoice(msgspec.Struct):
    """One step of one streamed reply."""

    index: int
    delta: Delta
    finish_reason: str | None = None
    logprobs: ChatLogprobs | None = None


class ChatChunk(msgspec.Struct):
    """One event of a streamed reply. `usage` is null in all but the last where it was asked for, else absent."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    system_fingerprint: str
    usage: Usage | UnsetType | None = UNSET


class CompletionLogprobs(msgspec.Struct):
    """One entry a token in each list. `text_offset` counts characters of the choice's text."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(msgspec.Struct):
    """One reply, or what is new of it; `finish_reason` is null in all chunks of a stream but its last."""

    index: int
    text: str
    finish_reason: str | None = None
    logprobs: CompletionLogprobs | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(msgspec.Struct):
    """The body of a completion, and each event of a streamed one."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
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
    """`status` is "ok" or "ready", else "draining" or "dead" with the reason."""

    status: Literal["ok", "ready", "draining", "dead"]
    reason: str = ""


class Version(msgspec.Struct):
    """Of the server."""

    version: str


class StepEntry(msgspec.Struct):
    """One step of the engine. `batch` is the size that its graph was captured for, `rows` how many of it were in use;
    `ms` is the step's wall time, `host_us` the engine's CPU time outside waits and the step itself.
    """

    step: int
    kind: str
    batch: int
    rows: int
    ms: float
    host_us: float


class StepList(msgspec.Struct):
    """The last steps, newest last."""

    steps: list[StepEntry]


class Counts(Protocol):
    """Something that counts tokens."""

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def completion_tokens(self) -> int: ...

    @property
    def cached_tokens(self) -> int: ...


def usage_of(counts: Counts) -> Usage:
    """The sums of one request."""
    prompt, completion = counts.prompt_tokens, counts.completion_tokens
    return Usage(prompt, completion, prompt + completion, PromptTokensDetails(counts.cached_tokens))
