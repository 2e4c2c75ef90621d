"""Which web pages may call this server from a browser; none unless told."""

from __future__ import annotations

import re
from collections.abc import Sequence

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from graphrt.errors import ConfigError

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s?#@]+", re.IGNORECASE)
PREFLIGHT_AGE_S = 600


def check_origins(origins: Sequence[str]) -> None:
    """ConfigError for what browsers never send as an origin."""
    for origin in origins:
        if origin not in ("*", "null") and not _ORIGIN.fullmatch(origin):
            raise ConfigError(f"CORS origin {origin!r}: must be like https://example.org:8443 without a path, or *")


def cors_middleware(origins: Sequence[str]) -> list[Middleware]:
    """Empty without origins. Cookies are never asked for: keys travel in a header that the page sets itself."""
    if not origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=[origin if origin == "*" else origin.rstrip("/") for origin in origins],
            allow_methods=["GET", "POST"],
            allow_headers=["*"],  # clients send telling headers of their own
            expose_headers=["x-request-id", "retry-after"],
            max_age=PREFLIGHT_AGE_S,
        )
    ]
