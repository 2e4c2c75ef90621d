"""uvicorn's HTTP protocol with what it lacks: bounds on the size of headers and on the time they may take."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from graphrt.api.errors import error_reply


def http_protocol(header_limit: int, header_timeout_s: float) -> type[HttpToolsProtocol]:
    """A protocol class that answers 431 above `header_limit` bytes of request line and headers, and 408 when they are
    not complete `header_timeout_s` after the connection, or after their first byte on a connection kept alive.
    """

    class BoundedHttpProtocol(HttpToolsProtocol):
        _in_headers = False
        _seen = 0  # bytes of the present request line and headers
        _refusal = (400, "the bytes received are not an HTTP request")
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._arm()

        def connection_lost(self, exc: Exception | None) -> None:
            self._disarm()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            was_in_headers = self._in_headers
            before = self._seen
            super().data_received(data)
            if was_in_headers and self._in_headers and not self.transport.is_closing():
                # The parser reports a header only once it is whole; a chunk all within headers counts as it comes.
                self._seen = max(self._seen, before + len(data))
                if self._seen > header_limit:
                    self._refuse_size()
                    self.send_400_response("")
            elif not self._in_headers and self._idle():
                self._arm()  # stray bytes between requests have stopped uvicorn's own idle timer

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._in_headers = True
            self._seen = 0
            self._arm()

        def on_url(self, url: bytes) -> None:
            self._count(len(url))
            super().on_url(url)

        def on_header(self, name: bytes, value: bytes) -> None:
            self._count(len(name) + len(value) + 4)
            super().on_header(name, value)

        def on_headers_complete(self) -> None:
            self._in_headers = False
            self._disarm()
            super().on_headers_complete()

        def send_400_response(self, msg: str) -> None:
            status, message = self._refusal
            body = error_reply(message, status)
            head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[status] + head + body)
            self.transport.close()

        def _count(self, size: int) -> None:
            self._seen += size
            if self._seen > header_limit:
                self._refuse_size()
                raise ValueError("headers too large")  # out of the parser, which then calls send_400_response

        def _refuse_size(self) -> None:
            self._refusal = (431, f"request line and headers are larger than {header_limit} bytes")

        def _idle(self) -> bool:
            closed = self.transport.is_closing()
            return not closed and self._timer is None and (self.cycle is None or self.cycle.response_complete)

        def _arm(self) -> None:
            if self._timer is None:
                self._timer = self.loop.call_later(header_timeout_s, self._too_slow)

        def _disarm(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _too_slow(self) -> None:
            self._timer = None
            if self.transport.is_closing():
                return
            if self._in_headers and self._quiet():
                self._refusal = (408, f"the request's headers did not arrive within {header_timeout_s:g} s")
                self.send_400_response("")
            elif self._quiet():
                self.transport.close()

        def _quiet(self) -> bool:
            """No reply is being written on this connection."""
            return self.cycle is None or self.cycle.response_complete

    return BoundedHttpProtocol
