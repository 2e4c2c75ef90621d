"""Fields that would change the reply but are not built: refused by name, so that no reply is silently wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from graphrt.api.errors import ApiError

# Field, what may be asked of it all the same, and in words.
_NEUTRAL: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("tools", lambda v: not v, "an empty list"),
    ("tool_choice", lambda v: v in ("none", "auto"), "'none' or 'auto'"),
    ("functions", lambda v: not v, "an empty list"),
    ("function_call", lambda v: v in ("none", "auto"), "'none' or 'auto'"),
    ("response_format", lambda v: v.get("type") == "text", "{'type': 'text'}"),
    ("modalities", lambda v: v == ["text"], "['text']"),
    ("suffix", lambda v: v == "", "an empty string"),
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
