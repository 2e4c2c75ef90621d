"""Reading a JSON body: bounded in size and time, checked, and decoded straight into its schema."""

from __future__ import annotations

import asyncio
import re
from typing import TypeVar

import msgspec
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from graphrt.api.body_budget import BodyHold, BodyRefused
from graphrt.api.client_watch import ClientGone
from graphrt.api.errors import ApiError, error_response

T = TypeVar("T")

LINGER_S = 1.0
_AT = re.compile(r"^(?P<what>.*) - at `(?:key in )?\$\.?(?P<path>.*)`$", re.DOTALL)
_MISSING = re.compile(r"missing required field `(?P<name>\w+)`")


class BodyTooLarge(BodyRefused):
    """More bytes than the server reads."""

    def __init__(self, limit: int) -> None:
        message = f"the request body is larger than {limit} bytes, the most this server reads"
        super().__init__(message, status=413, headers={"connection": "close"})


class RefusedResponse(Response):
    """Answers at once, then reads on a while: closing with unread input would reset the reply away."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        try:
            async with asyncio.timeout(LINGER_S):
                more = True
                while more:
                    message = await receive()
                    more = message["type"] == "http.request" and message.get("more_body", False)
        except TimeoutError:
            pass
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def on_body_refused(request: object, error: Exception) -> Response:
    """Exception handler for `BodyRefused`."""
    plain = error_response(error)
    return RefusedResponse(plain.body, plain.status_code, dict(plain.headers))


async def read_body(scope: Scope, receive: Receive, limit: int, timeout_s: float, hold: BodyHold) -> bytes:
    """The whole request body. Raises `ApiError` 408, 413, 415 or 429, and `ClientGone`."""
    headers = Headers(scope=scope)
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(f"content-type is {kind or 'missing'}: must be application/json", status=415)
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError("content-encoding is not supported: send the body uncompressed", status=415)
    length = headers.get("content-length", "")
    if length.isdecimal() and int(length) > limit:
        raise BodyTooLarge(limit)
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            more = True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                body += message.get("body", b"")
                if len(body) > limit:
                    raise BodyTooLarge(limit)
                hold.grow(len(body))
                more = message.get("more_body", False)
    except TimeoutError:
        text = f"the request body did not arrive within {timeout_s:g} s"
        raise ApiError(text, status=408, headers={"connection": "close"}) from None
    return bytes(body)


def decode_body(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """`body` as the decoder's type. `ApiError` 400 names the field that does not fit."""
    try:
        if not body.isascii():
            body.decode()  # the decoder looks only at the fields it knows
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        message, param = _explain(str(error))
        raise ApiError(message, param=param) from None
    except UnicodeDecodeError as error:
        raise ApiError(f"the request body is not UTF-8: byte {error.start} is invalid") from None
    except msgspec.DecodeError as error:
        # The decoder calls an unpaired surrogate escape "truncated", as it does a body that really ends too early.
        text = str(error).removeprefix("JSON is malformed: ")
        if "truncated" in text:
            text = "it ends too early or holds an unpaired surrogate escape"
        raise ApiError(f"the request body is not valid JSON: {text}") from None
    except RecursionError:
        raise ApiError("the request body is nested too deeply") from None


def _explain(text: str) -> tuple[str, str | None]:
    """Message and field name of a validation error."""
    at = _AT.match(text)
    what, path = (at["what"], at["path"]) if at else (text, "")
    missing = _MISSING.search(what)
    if missing:
        name = missing["name"]
        path = f"{path}.{name}" if path else name
        return f"{path} is required", path
    what = what[:1].lower() + what[1:].replace("`", "")
    return (f"{path}: {what}", path) if path else (f"the request body: {what}", None)
