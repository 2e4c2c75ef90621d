"""uvicorn's HTTP protocol with what it lacks: bounds on the size of headers, on the time they may take and on the time a
client may take to read; a client that leaves is noticed even with a second request in line.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from graphrt.api.errors import error_reply
from graphrt.api.http_parser import NoUpgradeParser
from graphrt.api.listen import peer_left
from graphrt.api.outlet import SCOPE_KEY, Outlet

log = logging.getLogger("graphrt.api")

PEER_CHECK_S = 0.25


def http_protocol(
    header_limit: int,
    header_timeout_s: float,
    send_timeout_s: float = 30.0,
    count: Callable[[int], None] = lambda status: None,
) -> type[HttpToolsProtocol]:
    """A protocol class that answers 431 above `header_limit` bytes of request line and headers, and 408 when they are
    not complete `header_timeout_s` after the connection, or after their first byte on a connection kept alive.

    A client that leaves its replies unread for `send_timeout_s` is cut off. `count` hears the status of each answer that
    never reached the application.

    A client that ends its side of the connection has left, unless all it waits for is the answer to a GET: whoever wants
    a long reply stays on the line.
    """

    class BoundedHttpProtocol(HttpToolsProtocol):
        parser: Any  # a NoUpgradeParser in place of the one that uvicorn made
        _in_headers = False
        _seen = 0  # bytes of the present request line and headers
        _framing = 0  # bytes since the last ones that were part of a body
        _refusal = (400, "the bytes received are not an HTTP request")
        _timer: asyncio.TimerHandle | None = None  # for headers
        _send_timer: asyncio.TimerHandle | None = None
        _peer_timer: asyncio.TimerHandle | None = None
        _current: RequestResponseCycle | None = None  # being answered; `cycle` is the one being read

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.parser = NoUpgradeParser(self)
            self._arm()

        def connection_lost(self, exc: Exception | None) -> None:
            self._disarm()
            for timer in (self._send_timer, self._peer_timer):
                if timer is not None:
                    timer.cancel()
            current = self._current
            if current is not None and not current.response_complete:
                current.disconnected = True
                current.message_event.set()
            self.pipeline.clear()  # never begun, and never will be
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            was_in_headers = self._in_headers
            before = self._seen
            self._framing += len(data)
            super().data_received(data)
            if was_in_headers and self._in_headers and not self.transport.is_closing():
                # The parser reports a header only once it is whole; a chunk all within headers counts as it comes.
                self._seen = max(self._seen, before + len(data))
                if self._seen > header_limit:
                    self._refuse_size()
                    self.send_400_response("")
            elif self._framing > header_limit and self._in_body() and not self.transport.is_closing():
                self._refusal = (400, f"the body's chunks have more than {header_limit} bytes between them")
                self.send_400_response("")
            elif not self._in_headers and self._idle():
                self._arm()  # stray bytes between requests have stopped uvicorn's own idle timer

        def eof_received(self) -> bool:  # type: ignore[override]
            """True keeps the other direction open."""
            cycle = self._current
            if self.transport.get_extra_info("sslcontext") is not None or cycle is None or self._quiet():
                return False
            if self.pipeline or cycle.more_body or cycle.scope["method"] != "GET":
                return False
            cycle.keep_alive = False
            return True

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
            cast(dict[str, Any], self.scope)[SCOPE_KEY] = Outlet(self.transport, self.flow)
            if not self.pipeline:
                self._current = self.cycle
            elif self._peer_timer is None:
                # Reading is paused now, and with it the news that the client has left.
                self._peer_timer = self.loop.call_later(PEER_CHECK_S, self._check_peer)

        def on_body(self, body: bytes) -> None:
            self._framing = 0
            super().on_body(body)

        def on_message_complete(self) -> None:
            if not self.parser.refusing:
                self._framing = 0
                super().on_message_complete()

        def on_response_complete(self) -> None:
            if self.pipeline:
                self._current = self.pipeline[-1][0]
            super().on_response_complete()
            if self.transport.get_write_buffer_size() > 0:
                self._arm_send()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._arm_send()

        def send_400_response(self, msg: str) -> None:
            current = self._current
            if current is not None and not current.response_complete and not current.more_body:
                self.transport.abort()  # nonsense behind a request whose reply is under way: it must not get into that
                return
            status, message = self._refusal
            count(status)
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

        def _in_body(self) -> bool:
            return self.cycle is not None and self.cycle.more_body and not self._in_headers

        def _idle(self) -> bool:
            return not self.transport.is_closing() and self._timer is None and self._quiet()

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

        def _arm_send(self) -> None:
            if self._send_timer is None:
                self._send_timer = self.loop.call_later(send_timeout_s, self._check_sent)

        def _check_sent(self) -> None:
            self._send_timer = None
            left = self.transport.get_write_buffer_size()
            if left == 0 or not (self.flow.write_paused or self._quiet() or self.transport.is_closing()):
                return
            log.warning("a client left %d bytes of its reply unread for %g s: cut off", left, send_timeout_s)
            self.transport.abort()

        def _check_peer(self) -> None:
            self._peer_timer = None
            if self.transport.is_closing() or not self.pipeline:
                return
            if peer_left(self.transport.get_extra_info("socket")):
                self.transport.abort()
            else:
                self._peer_timer = self.loop.call_later(PEER_CHECK_S, self._check_peer)

    return BoundedHttpProtocol
