"""Around every request: an id in and out, one line in the log, a count in the metrics, and the last net for errors."""

from __future__ import annotations

import logging
import re
import secrets
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from graphrt.api.client_watch import ClientGone
from graphrt.api.errors import error_response
from graphrt.api.metrics import Metrics

log = logging.getLogger("graphrt.api")

GONE = 499  # the client left before the reply was complete
_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_ROUTES = ("/", "/health", "/metrics", "/v1/models", "/v1/chat/completions")
_PROBES = ("/health", "/metrics")  # asked several times a second by machines


class RequestLog:
    """ASGI middleware. A client's own X-Request-Id is kept when it is short printable ASCII."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        request_id = _request_id(scope)
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
            await send(message)

        gone = False
        try:
            await self._app(scope, receive, send_with_id)
        except ClientGone:
            gone = True
        except Exception as error:
            log.exception("request %s failed", request_id.decode())
            if status:
                raise  # half a reply is out: only closing the connection tells the client
            await error_response(error)(scope, receive, send_with_id)
        finally:
            self._note(scope, GONE if gone else status, request_id, time.perf_counter() - started)

    def _note(self, scope: Scope, status: int, request_id: bytes, seconds: float) -> None:
        path: str = scope["path"]
        self._metrics.http[(path if path in _ROUTES else "other", str(status))] += 1
        level = logging.DEBUG if path in _PROBES else logging.INFO
        if log.isEnabledFor(level):
            # A path may hold anything, line breaks too.
            log.log(level, "%s %r %d %.1f ms %s", scope["method"], path, status, seconds * 1e3, request_id.decode())


def _request_id(scope: Scope) -> bytes:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _ID.fullmatch(value):
            return bytes(value)
    return b"req-" + secrets.token_hex(12).encode()
