"""httptools' parser for a server that never upgrades a connection.

The parser of httptools stops at a request that offers an upgrade and takes its body, and all that follows, for another
protocol. Java's client and `curl --http2` offer HTTP/2 with every first request on a plain connection, body and all.
"""

from __future__ import annotations

import contextlib
from typing import Any

import httptools

_FRAMING = (b"content-length", b"transfer-encoding")


class NoUpgradeParser:
    """The part of `httptools.HttpRequestParser` that uvicorn uses. `protocol` has its callbacks, `headers` too, and must
    ignore the end of a message while `refusing`: then its body is still to come.
    """

    def __init__(self, protocol: Any) -> None:
        self._protocol = protocol
        self._use(_make(protocol))

    @property
    def refusing(self) -> bool:
        """Whether the message that just ended did so only because it offers an upgrade."""
        return self._parser.should_upgrade() and self._parser.get_method() != b"CONNECT"

    def should_upgrade(self) -> bool:
        """Never."""
        return False

    def feed_data(self, data: bytes) -> None:
        """Parse. Raises `httptools.HttpParserError`, and `HttpParserUpgrade` for CONNECT, which has no body."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if not self.refusing:
                raise
            self._start_again()
            self.feed_data(data[upgrade.args[0] :])

    def _start_again(self) -> None:
        """A new parser that stands where the old one stopped: behind the same request's headers, upgrade left out."""
        lines = [b"%s / HTTP/1.1" % self._parser.get_method()]
        lines += [b"%s: %s" % (name, value) for name, value in self._protocol.headers if name in _FRAMING]
        silent = _Silent(self._protocol)
        self._use(_make(silent))
        self._parser.feed_data(b"\r\n".join(lines) + b"\r\n\r\n")
        silent.in_head = False

    def _use(self, parser: httptools.HttpRequestParser) -> None:
        self._parser = parser
        self.get_http_version = parser.get_http_version
        self.get_method = parser.get_method
        self.should_keep_alive = parser.should_keep_alive


class _Silent:
    """Passes callbacks on, but for those of the head that is fed a second time."""

    def __init__(self, protocol: Any) -> None:
        self._protocol = protocol
        self.in_head = True

    def on_message_begin(self) -> None:
        if not self.in_head:
            self._protocol.on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self.in_head:
            self._protocol.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.in_head:
            self._protocol.on_header(name, value)

    def on_headers_complete(self) -> None:
        if not self.in_head:
            self._protocol.on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._protocol.on_body(body)

    def on_message_complete(self) -> None:
        self._protocol.on_message_complete()


def _make(protocol: Any) -> httptools.HttpRequestParser:
    parser = httptools.HttpRequestParser(protocol)
    with contextlib.suppress(AttributeError):  # httptools before 0.6.3
        # Else the answer to a request with "connection: close" could be lost for bytes behind it.
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser
