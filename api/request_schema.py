"""The requests, field by field, as types: msgspec checks shape and range while it decodes.

Unknown fields are ignored. `None` and absence mean the same everywhere.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

MAX_STOPS = 16
MAX_STOP_CHARS = 1024
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]


class StreamOptions(msgspec.Struct):
    """How a streamed reply is to look."""

    include_usage: bool | None = None


class ContentPart(msgspec.Struct):
    """One part of a message; only `type` "text" is served."""

    type: str
    text: str | None = None


class Message(msgspec.Struct):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class GenerationFields(msgspec.Struct, kw_only=True):
    """What every endpoint that generates text takes."""

    model: str
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None  # -1 and 0: all tokens
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    seed: int | None = None
    stop: str | Annotated[list[str], Meta(max_length=MAX_STOPS)] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1)] | None = None
    # Known to clients, but not built: see unbuilt.py.
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0.0)] | None = None
    logit_bias: dict[str, float] | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: int | None = None
    # Taken and without effect here: user, metadata, store, service_tier, like any unknown field.


class ChatRequest(GenerationFields, kw_only=True):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    functions: list[Any] | None = None
    function_call: Any = None
    response_format: dict[str, Any] | None = None
    modalities: list[str] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
