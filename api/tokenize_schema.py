"""The requests and replies of /tokenize and /detokenize."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from graphrt.api.request_schema import Message


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """The body of POST /tokenize: a raw `prompt`, or the `messages` of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    add_special_tokens: Annotated[
        bool | None,
        Meta(description="add what the tokenizer puts around a raw prompt; true for a prompt, false for messages"),
    ] = None
    return_token_strs: Annotated[bool | None, Meta(description="spell the tokens as well")] = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class TokenizeReply(msgspec.Struct):
    """Token ids; `max_model_len` is the context of the model."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """The body of POST /detokenize."""

    tokens: list[int]
    model: str | None = None


class DetokenizeReply(msgspec.Struct):
    """The text, special tokens spelt out."""

    prompt: str
