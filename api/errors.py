"""Errors as OpenAI clients expect them: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from graphrt.errors import EngineDead, RequestError

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_CODES = {
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "request_too_large",
    415: "unsupported_media_type",
    429: "rate_limit_exceeded",
    431: "headers_too_large",
    500: "internal_error",
    503: "unavailable",
}


class ApiError(RequestError):
    """A `RequestError` with the OpenAI `code` and extra response headers."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        status: int = 400,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message, param=param, status=status)
        self.code = code
        self.headers = headers or {}


class ErrorBody(msgspec.Struct):
    """The inner object of an error reply."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(msgspec.Struct):
    """The whole body of an error reply."""

    error: ErrorBody


def error_reply(message: str, status: int, param: str | None = None, code: str | None = None) -> bytes:
    """The JSON of an error; `type` follows from the status."""
    kind = _TYPES.get(status) or ("server_error" if status >= 500 else "invalid_request_error")
    return msgspec.json.encode(ErrorReply(ErrorBody(message, kind, param, code or _CODES.get(status))))


def describe(error: Exception) -> tuple[int, bytes]:
    """HTTP status and JSON of any error; what is unknown is a plain 500 that gives nothing away."""
    if isinstance(error, RequestError):
        code = error.code if isinstance(error, ApiError) else None
        return error.status, error_reply(str(error), error.status, error.param or None, code)
    if isinstance(error, EngineDead):
        return 500, error_reply(f"the engine ended: {error}", 500, code="engine_dead")
    return 500, error_reply("internal server error", 500)


def error_response(error: Exception, headers: dict[str, str] | None = None) -> Response:
    """The response for `error`."""
    status, body = describe(error)
    extra = dict(error.headers) if isinstance(error, ApiError) else {}
    return Response(body, status, {**extra, **(headers or {})}, media_type="application/json")


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own errors (no such path, wrong method) in the same shape."""
    assert isinstance(error, HTTPException)
    message = error.detail
    if error.status_code == 404:
        message = f"no such path: {request.url.path}"
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        message = f"{request.url.path} does not take {request.method}: use {allowed}"
    return Response(
        error_reply(message, error.status_code), error.status_code, error.headers, media_type="application/json"
    )
