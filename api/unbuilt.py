"""Fields that would change the reply but are not built: refused by name, so that no reply is silently wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from graphrt.api.errors import ApiError

# Field, what may be asked of it all the same, and in words.
_NEUTRAL: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("n", lambda v: v == 1, "1"),
    ("logprobs", lambda v: v is False, "false"),
    ("top_logprobs", lambda v: v == 0, "0"),
    ("prompt_logprobs", lambda v: False, "null"),
    ("tools", lambda v: not v, "an empty list"),
    ("tool_choice", lambda v: v in ("none", "auto"), "'none' or 'auto'"),
    ("functions", lambda v: not v, "an empty list"),
    ("function_call", lambda v: v in ("none", "auto"), "'none' or 'auto'"),
    ("response_format", lambda v: v.get("type") == "text", "{'type': 'text'}"),
    ("modalities", lambda v: v == ["text"], "['text']"),
    ("logit_bias", lambda v: not v, "an empty object"),
    ("presence_penalty", lambda v: v == 0, "0"),
    ("frequency_penalty", lambda v: v == 0, "0"),
    ("repetition_penalty", lambda v: v == 1, "1"),
    ("min_tokens", lambda v: v == 0, "0"),
    ("include_stop_str_in_output", lambda v: v is False, "false"),
    ("add_generation_prompt", lambda v: v is True, "true"),
    ("continue_final_message", lambda v: v is False, "false"),
)


def refuse_unbuilt(request: msgspec.Struct) -> None:
    """Raise `ApiError` 400 for the first field of `request` that asks for something not built."""
    for name, neutral, words in _NEUTRAL:
        value = getattr(request, name, None)
        if value is not None and not neutral(value):
            shown = repr(value)
            shown = shown if len(shown) <= 60 else shown[:57] + "..."
            raise ApiError(
                f"{name} is {shown}: this server does not support it; leave it out or give {words}",
                param=name,
                code="unsupported_parameter",
            )
