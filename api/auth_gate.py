"""Who may come in: the API key, then the limits, then the time a request is given."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from contextlib import AbstractContextManager

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from graphrt.api.auth_keys import ApiKey
from graphrt.api.auth_ring import KeyRing
from graphrt.api.errors import ApiError, error_response
from graphrt.api.rate_limits import RateLimiter, TooMany
from graphrt.api.request_note import note_of

PROBES = ("/health", "/ready")
METRICS = "/metrics"
TIMEOUT_HEADER = "x-request-timeout"
MAX_TIMEOUT_S = 86400.0


class Gate:
    """ASGI middleware. Health probes stay open, and /metrics unless `guard_metrics`. Limits count POST requests: those
    that make work. `refused` counts what was turned away, by reason; `by_key` what was let in.
    """

    def __init__(
        self,
        app: ASGIApp,
        ring: KeyRing,
        limiter: RateLimiter,
        guard_metrics: bool,
        timeout_s: float,
        refused: Counter[str],
        by_key: Counter[str],
    ) -> None:
        self._app = app
        self._ring = ring
        self._limiter = limiter
        self._open = PROBES if guard_metrics else (*PROBES, METRICS)
        self._timeout_s = timeout_s
        self._refused = refused
        self._by_key = by_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._open:
            await self._app(scope, receive, send)
            return
        try:
            key = self._authenticate(scope)
            works = scope["method"] == "POST"
            timeout = self._timeout(scope) if works else 0.0
            slot: AbstractContextManager[None] = self._limiter.admit(key) if works else contextlib.nullcontext()
        except ApiError as error:
            if isinstance(error, TooMany):
                self._refused[error.reason] += 1
            await error_response(error)(scope, receive, send)
            return
        with slot:
            if key is not None:
                self._by_key[key.name] += 1
            if timeout:
                note_of(scope).limit_time(timeout)
            await self._app(scope, receive, send)

    def _authenticate(self, scope: Scope) -> ApiKey | None:
        if not self._ring.required:
            return None
        scheme, _, presented = Headers(scope=scope).get("authorization", "").partition(" ")
        presented = presented.strip()
        if scheme.lower() != "bearer" or not presented:
            self._refused["no_api_key"] += 1
            text = "no API key: send the header 'Authorization: Bearer KEY'"
            raise ApiError(text, status=401, code="no_api_key", headers={"www-authenticate": 'Bearer realm="graphrt"'})
        key = self._ring.find(presented)
        if key is None:
            self._refused["invalid_api_key"] += 1
            challenge = 'Bearer realm="graphrt", error="invalid_token"'
            raise ApiError(
                "the API key is not one of this server's",
                status=401,
                code="invalid_api_key",
                headers={"www-authenticate": challenge},
            )
        note_of(scope).key_name = key.name
        return key

    def _timeout(self, scope: Scope) -> float:
        """Seconds for this request, 0 for no end: the client's wish, and never more than the server's own."""
        text = Headers(scope=scope).get(TIMEOUT_HEADER)
        if text is None:
            return self._timeout_s
        try:
            wish = float(text)
        except ValueError:
            wish = math.nan
        if not 0.0 < wish <= MAX_TIMEOUT_S:
            shown = text[:40].encode("ascii", "replace").decode()
            message = f"{TIMEOUT_HEADER} is {shown!r}: must be seconds, above 0 and at most {MAX_TIMEOUT_S:g}"
            raise ApiError(message, param=TIMEOUT_HEADER)
        return min(wish, self._timeout_s) if self._timeout_s else wish
