"""Around every request: an id in and out, one line in the log, and a count in the metrics."""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Collection
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from graphrt.api.client_watch import ClientGone
from graphrt.api.log_format import FIELDS
from graphrt.api.metrics import Metrics
from graphrt.api.outlet import SCOPE_KEY
from graphrt.api.request_note import RequestNote, attach

log = logging.getLogger("graphrt.api.requests")

GONE = 499  # the client left before the reply was complete
_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_PROBES = ("/health", "/ready", "/metrics")  # asked several times a second by machines


class RequestLog:
    """ASGI middleware. A client's own X-Request-Id is kept when it is short printable ASCII.

    `paths` are those that are counted by name; all others are "other".
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: Collection[str]) -> None:
        self._app = app
        self._metrics = metrics
        self._paths = frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        request_id = _request_id(scope)
        note = RequestNote(request_id.decode())
        attach(scope, note)
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                outlet = scope.get(SCOPE_KEY)
                status = GONE if outlet is not None and outlet.gone else message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except ClientGone:
            status = GONE
        finally:
            note.close()
            self._note(scope, status, note, time.perf_counter() - started)

    def _note(self, scope: Scope, status: int, note: RequestNote, seconds: float) -> None:
        path: str = scope["path"]
        self._metrics.http[(path if path in self._paths else "other", str(status))] += 1
        level = logging.DEBUG if path in _PROBES and status < 400 else logging.INFO
        if not log.isEnabledFor(level):
            return
        fields: dict[str, Any] = {
            "method": scope["method"],
            "path": path,
            "status": status,
            "ms": round(seconds * 1e3, 1),
            "request_id": note.request_id,
        }
        if note.key_name:
            fields["key"] = note.key_name
        if note.finish:
            fields["prompt_tokens"] = note.prompt_tokens
            fields["completion_tokens"] = note.completion_tokens
            fields["cached_tokens"] = note.cached_tokens
            fields["finish"] = ",".join(note.finish)
        # A path may hold anything, line breaks too.
        shown = (f"{name}={value!r}" if name == "path" else f"{name}={value}" for name, value in fields.items())
        log.log(level, "request %s", " ".join(shown), extra={FIELDS: fields})


def _request_id(scope: Scope) -> bytes:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _ID.fullmatch(value):
            return bytes(value)
    return b"req-" + secrets.token_hex(12).encode()
