"""What the API's pages tell of each path: its body, its replies, the statuses that it can end with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from graphrt.api.auth_gate import MAX_TIMEOUT_S, METRICS, PROBES, TIMEOUT_HEADER
from graphrt.api.debug_routes import DEFAULT_STEPS, MAX_STEPS
from graphrt.api.reply_schema import (
    ChatChunk,
    ChatCompletion,
    Completion,
    Health,
    ModelCard,
    ModelList,
    StepList,
    Version,
)
from graphrt.api.request_schema import ChatRequest, CompletionRequest
from graphrt.api.settings import ServerSettings
from graphrt.api.tokenize_schema import DetokenizeReply, DetokenizeRequest, TokenizeReply, TokenizeRequest

STATUSES = {
    200: "The reply.",
    400: "The request is malformed, or a field of it is out of its range: `param` names it.",
    401: "No API key, or a wrong one.",
    404: "There is no such model.",
    408: "The request did not arrive in time.",
    413: "The body is larger than the server reads.",
    415: "The body is not plain `application/json`.",
    429: "The queue is full, or a limit of requests or of their size is reached. `Retry-After` says when to try again.",
    431: "The request line and headers are larger than the server reads.",
    500: "A fault of the server.",
    503: "The server is shutting down, or its engine has died.",
    504: "The request took longer than the time it was given.",
}
ANY = (200, 400, 408, 431, 500)  # what a connection can always end with
BODY = (413, 415, 429)


@dataclass(frozen=True)
class Operation:
    """One path and method. `reply` None is plain text of type `media`; `event` is one of a streamed reply."""

    path: str
    summary: str
    reply: type | None
    statuses: tuple[int, ...] = ()
    method: str = "get"
    body: type | None = None
    event: type | None = None
    parameters: tuple[dict[str, Any], ...] = ()
    media: str = "text/plain"


def _header(name: str, text: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "header", "required": False, "description": text, "schema": schema}


_TIMEOUT = _header(
    TIMEOUT_HEADER,
    "seconds after which the request is to end",
    {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_TIMEOUT_S},
)
_NAME = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
_STEPS = {
    "name": "n",
    "in": "query",
    "required": False,
    "description": "how many steps",
    "schema": {"type": "integer", "minimum": 1, "maximum": MAX_STEPS, "default": DEFAULT_STEPS},
}

OPERATIONS = (
    Operation(
        "/v1/chat/completions",
        "Reply to a conversation",
        ChatCompletion,
        (*BODY, 404, 503, 504),
        "post",
        ChatRequest,
        ChatChunk,
        (_TIMEOUT,),
    ),
    Operation(
        "/v1/completions",
        "Go on from raw text or tokens",
        Completion,
        (*BODY, 404, 503, 504),
        "post",
        CompletionRequest,
        Completion,
        (_TIMEOUT,),
    ),
    Operation("/v1/models", "The served model, as a list", ModelList),
    Operation("/v1/models/{name}", "The served model", ModelCard, (404,), parameters=(_NAME,)),
    Operation(
        "/tokenize", "Token ids of a text or a conversation", TokenizeReply, (*BODY, 404), "post", TokenizeRequest
    ),
    Operation("/detokenize", "The text of token ids", DetokenizeReply, (*BODY, 404), "post", DetokenizeRequest),
    Operation("/health", "Whether the server works", Health, (503,)),
    Operation("/ready", "Whether to send requests here", Health, (503,)),
    Operation("/version", "The server's version", Version),
    Operation("/metrics", "Numbers in Prometheus' text format", None),
    Operation("/debug/steps", "The engine's last steps", StepList, (503,), parameters=(_STEPS,)),
    Operation("/", "A short introduction", None),
    Operation("/docs", "This API as a readable page", None, media="text/html"),
    Operation("/openapi.json", "This API as an OpenAPI document", None, media="application/json"),
)


def statuses(operation: Operation, settings: ServerSettings) -> list[int]:
    """All that the operation can end with under these settings."""
    out = {*ANY, *operation.statuses}
    unguarded = PROBES if settings.guard_metrics else (*PROBES, METRICS)
    if settings.api_key_files and operation.path not in unguarded:
        out.add(401)
    return sorted(out)
