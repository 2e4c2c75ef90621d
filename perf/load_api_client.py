"""The client of the server's load test: many streams on plain sockets in one loop, each read stamped with the clock.

Nothing is parsed while it runs: what came, and when, is kept and looked at afterwards.
"""

from __future__ import annotations

import contextlib
import gc
import json
import re
import select
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

CHAT = "/v1/chat/completions"
_TOKEN = re.compile(rb"(\d{16}) ")
_EVENT = b"data: "
_END = b"0\r\n\r\n"  # of a chunked body
READ_BYTES = 8192  # more than waits; a large buffer takes longer to make than an event to read


@dataclass(slots=True)
class Trace:
    """What one stream received: parts and the time of each, in ns."""

    parts: list[bytes] = field(default_factory=list)
    times: list[int] = field(default_factory=list)

    def tokens(self) -> Iterator[tuple[int, float]]:
        """(when it was sent, how long it took), in us, of each token in order."""
        data = b"".join(self.parts)
        ends, total = [], 0
        for part in self.parts:
            total += len(part)
            ends.append(total)
        at = 0
        for match in _TOKEN.finditer(data):
            while ends[at] < match.end():
                at += 1
            sent = int(match[1])
            yield sent, self.times[at] / 1000 - sent

    @property
    def events(self) -> int:
        """Events of the stream, the first with the role and the last two without text included."""
        return b"".join(self.parts).count(_EVENT)

    @property
    def status(self) -> int:
        """Of the HTTP reply."""
        return int(self.parts[0].split(b" ", 2)[1])


def request(max_tokens: int, **fields: Any) -> bytes:
    """A chat request that streams, as bytes."""
    body = {
        "model": "load",
        "messages": [{"role": "user", "content": "What is the time, please?"}],
        "max_tokens": max_tokens,
        "stream": True,
        **fields,
    }
    data = json.dumps(body).encode()
    head = (
        f"POST {CHAT} HTTP/1.1\r\nhost: load\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Without garbage collection, whose pauses would count as the server's."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def run_streams(port: int, streams: int, tokens: int, timeout_s: float) -> list[Trace]:
    """Open all streams and read them to their ends. TimeoutError."""
    with contextlib.ExitStack() as stack:
        socks = []
        for _ in range(streams):
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=timeout_s))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.sendall(request(tokens))
            socks.append(sock)
        return read_streams(socks, timeout_s)


def read_streams(socks: list[socket.socket], timeout_s: float) -> list[Trace]:
    """Read each until its reply is complete or it is closed. TimeoutError."""
    by_fd = {sock.fileno(): (sock, Trace()) for sock in socks}
    traces = [trace for _, trace in by_fd.values()]
    deadline = time.monotonic() + timeout_s
    now_ns = time.monotonic_ns
    with no_collections(), contextlib.closing(select.epoll()) as poll:
        for sock in socks:
            sock.setblocking(False)
            poll.register(sock.fileno(), select.EPOLLIN)
        while by_fd:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(by_fd)} of {len(socks)} streams have not ended after {timeout_s:g} s")
            for fd, _event in poll.poll(1.0):
                sock, trace = by_fd[fd]
                data = sock.recv(READ_BYTES)
                now = now_ns()
                trace.parts.append(data)
                trace.times.append(now)
                if not data or data.endswith(_END):
                    poll.unregister(fd)
                    del by_fd[fd]
    return traces
