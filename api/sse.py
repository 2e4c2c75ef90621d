"""Server-sent events: the framing of streamed replies."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.types import Message

DONE = b"data: [DONE]\n\n"
_encoder = msgspec.json.Encoder()


def event(value: Any) -> bytes:
    """`value` as the JSON of one event."""
    return b"data: " + _encoder.encode(value) + b"\n\n"


def raw_event(json: bytes) -> bytes:
    """JSON that is bytes already as one event."""
    return b"data: " + json + b"\n\n"


def stream_start() -> Message:
    """The ASGI message that opens a stream; buffering proxies are asked not to."""
    headers = [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
    ]
    return {"type": "http.response.start", "status": 200, "headers": headers}


def stream_part(body: bytes, more: bool = True) -> Message:
    """The ASGI message that carries `body`; `more` False ends the stream."""
    return {"type": "http.response.body", "body": body, "more_body": more}
