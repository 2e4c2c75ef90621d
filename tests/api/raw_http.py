"""HTTP by hand, for tests of what well-behaved clients never do."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

CHAT = "/v1/chat/completions"
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


def connect(server: Any, receive_buffer: int = 0) -> socket.socket:
    """A connection to the server; a small `receive_buffer` in bytes makes a slow reader felt soon."""
    sock = socket.socket()
    if receive_buffer:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.settimeout(5)
    sock.connect(("127.0.0.1", server.port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def chat_body(**fields: Any) -> bytes:
    """A request's JSON."""
    return json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **fields}).encode()


def chat(head: bytes = b"", **fields: Any) -> bytes:
    """A whole request; `head` holds more header lines."""
    body = chat_body(**fields)
    return HEAD + head + b"content-length: %d\r\n\r\n" % len(body) + body


class Reader:
    """Replies one after another from one connection."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._data = b""

    def until(self, mark: bytes) -> bytes:
        """Everything up to and with `mark`."""
        while mark not in self._data:
            part = self._sock.recv(65536)
            assert part, f"the connection closed after {self._data!r}"
            self._data += part
        found, _, self._data = self._data.partition(mark)
        return found + mark

    def reply(self) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body; chunks joined."""
        lines = self.until(b"\r\n\r\n").decode("latin-1").split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:] if line)}
        body = b""
        if headers.get("transfer-encoding") == "chunked":
            while size := int(self.until(b"\r\n"), 16):
                body += self._take(size)
                assert self._take(2) == b"\r\n"
            assert self._take(2) == b"\r\n"
        else:
            body = self._take(int(headers.get("content-length", "0")))
        return int(lines[0].split()[1]), headers, body

    def _take(self, size: int) -> bytes:
        while len(self._data) < size:
            part = self._sock.recv(65536)
            assert part, f"the connection closed after {self._data!r}"
            self._data += part
        taken, self._data = self._data[:size], self._data[size:]
        return taken


def closed(sock: socket.socket, within_s: float = 5.0) -> bool:
    """Whether the server ends the connection in time; what it sends before is thrown away."""
    end = time.monotonic() + within_s
    try:
        while True:
            sock.settimeout(max(0.001, end - time.monotonic()))
            if not sock.recv(65536):
                return True
    except TimeoutError:
        return False
    except ConnectionResetError:
        return True
