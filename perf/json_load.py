"""What a server does beside passing tokens on, as a load to measure against: JSON work on the loop or in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import threading
import time
from collections.abc import Iterator

import msgspec


class _Message(msgspec.Struct):
    role: str
    content: str


class _Request(msgspec.Struct):
    model: str
    messages: list[_Message]
    stream: bool = True
    max_tokens: int = 16


class LoopWork:
    """Back-to-back pieces of JSON work on the event loop: decode a request, encode `chunks` SSE chunks, next turn."""

    def __init__(self, request_bytes: int, chunks: int) -> None:
        content = 'What is the capital of \u00c5land? \\ "quote" ' * (request_bytes // 40 + 1)
        self._body = msgspec.json.encode(_Request("m", [_Message("user", content[:request_bytes])]))
        self._chunks = chunks
        self._decode = msgspec.json.Decoder(_Request).decode
        self._encode = msgspec.json.Encoder().encode
        self._next: asyncio.Handle | None = None

    def piece(self) -> None:
        self._decode(self._body)
        for index in range(self._chunks):
            chunk = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": index, "model": "m"}
            choice = {"index": 0, "delta": {"content": " token"}, "finish_reason": None}
            self._encode({**chunk, "choices": [choice]})

    def piece_us(self) -> float:
        """Median time of one piece."""
        times = []
        for _ in range(300):
            start = time.perf_counter_ns()
            self.piece()
            times.append(time.perf_counter_ns() - start)
        return statistics.median(times) / 1000

    def __enter__(self) -> LoopWork:
        self._loop = asyncio.get_running_loop()
        self._next = self._loop.call_soon(self._turn)
        return self

    def __exit__(self, *_: object) -> None:
        if self._next is not None:
            self._next.cancel()  # a turn left over would go on beside those of the next `with`

    def _turn(self) -> None:
        self.piece()
        self._next = self._loop.call_soon(self._turn)


@contextlib.contextmanager
def json_thread() -> Iterator[None]:
    """A thread of the server process that does nothing but `json`, as a careless handler in a pool would."""
    stop = threading.Event()
    value = [{"role": "user", "content": "x" * 200, "n": i} for i in range(200)]

    def work() -> None:
        while not stop.is_set():
            json.loads(json.dumps(value))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
