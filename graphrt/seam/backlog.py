"""Records for the engine that wait for room in the ring: the event loop never blocks on a full one."""

from __future__ import annotations

import asyncio
from collections import deque

from graphrt.errors import RequestError
from graphrt.seam.wires import Channel

MAX_BYTES = 64 << 20
_RETRY_S = 0.002


class Backlog:
    """Sends in order through `channel`, keeping what does not fit until it does. Nothing is lost or overtakes."""

    def __init__(self, channel: Channel, loop: asyncio.AbstractEventLoop) -> None:
        self._channel = channel
        self._loop = loop
        self._waiting: deque[bytes] = deque()
        self._bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    def send(self, payload: bytes, *, bounded: bool = True) -> None:
        """Send now or later. `RequestError` 429 when 64 MiB wait already (unless not `bounded`), 413 when too large."""
        largest = self._channel.ring.max_message
        if len(payload) > largest:
            raise RequestError(
                f"the request takes {len(payload)} bytes on its way to the engine: at most {largest}", status=413
            )
        if not self._waiting and self._channel.send(payload):
            return
        if bounded and self._bytes + len(payload) > MAX_BYTES:
            raise RequestError(
                f"{len(self._waiting)} requests ({self._bytes >> 20} MiB) wait for the engine already", status=429
            )
        self._waiting.append(payload)
        self._bytes += len(payload)
        self._retry_later()

    def flush(self) -> None:
        """Send what fits."""
        while self._waiting and self._channel.send(self._waiting[0]):
            self._bytes -= len(self._waiting.popleft())

    def close(self) -> None:
        """Drop what waits."""
        self._waiting.clear()
        self._bytes = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _retry_later(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(_RETRY_S, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.flush()
        if self._waiting:
            self._retry_later()
