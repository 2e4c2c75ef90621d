"""One streamed request over HTTP/1.1, timed as its events arrive. h11 parses, asyncio moves the bytes; nothing else is in the way."""

from __future__ import annotations

import asyncio
import ssl
import time
from typing import Any
from urllib.parse import urlsplit

import h11
import msgspec

from graphrt.errors import ConfigError
from graphrt.perf.bench_stats import RequestRecord

READ_BYTES = 65536


class Target:
    """A server's address and what every request to it carries."""

    def __init__(self, url: str, api_key: str | None, timeout_s: float) -> None:
        """ConfigError when `url` is not http(s)://host[:port]."""
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--url {url!r}: must be http://host:port or https://host:port")
        self.host, self.timeout_s = parts.hostname, timeout_s
        self.tls = ssl.create_default_context() if parts.scheme == "https" else None
        self.port = parts.port or (443 if self.tls else 80)
        self.prefix = parts.path.rstrip("/").removesuffix("/v1")
        self.headers = [("host", parts.netloc), ("content-type", "application/json"), ("user-agent", "graphrt-bench")]
        if api_key:
            self.headers.append(("authorization", f"Bearer {api_key}"))

    async def post(self, path: str, body: Any) -> tuple[int, bytes]:
        """Status and whole body of a request that is not streamed. OSError when there is no server."""
        pieces: list[bytes] = []
        status = await self._exchange("POST", path, msgspec.json.encode(body), pieces.append)
        return status, b"".join(pieces)

    async def get(self, path: str) -> tuple[int, bytes]:
        """The same for GET."""
        pieces: list[bytes] = []
        status = await self._exchange("GET", path, b"", pieces.append)
        return status, b"".join(pieces)

    async def stream(self, path: str, body: Any) -> RequestRecord:
        """Send a streamed completion and time it. Never raises for what the server or the network does: see `error`."""
        data = msgspec.json.encode(body)
        record = RequestRecord(time.perf_counter())
        events = EventReader(record)
        try:
            async with asyncio.timeout(self.timeout_s):
                record.status = await self._exchange("POST", path, data, events.feed)
            if record.status != 200:
                record.error = f"HTTP {record.status}"
            elif not record.error and not events.done:
                record.error = "the stream ended early"
            elif not record.error and not record.events:
                record.error = "no text came"
        except TimeoutError:
            record.error = f"no end within {self.timeout_s:g} s"
        except (OSError, h11.RemoteProtocolError) as error:
            record.error = type(error).__name__
        record.end = time.perf_counter()
        return record

    async def _exchange(self, method: str, path: str, body: bytes, on_data: Any) -> int:
        reader, writer = await asyncio.open_connection(self.host, self.port, ssl=self.tls)
        try:
            connection = h11.Connection(h11.CLIENT)
            headers = [*self.headers, ("content-length", str(len(body))), ("connection", "close")]
            request = h11.Request(method=method, target=self.prefix + path, headers=headers)
            head = connection.send(request) or b""
            writer.write(head + (connection.send(h11.Data(data=body)) or b""))
            connection.send(h11.EndOfMessage())
            status = 0
            while True:
                event = connection.next_event()
                if event is h11.NEED_DATA:
                    connection.receive_data(await reader.read(READ_BYTES))
                elif isinstance(event, h11.Response):
                    status = event.status_code
                elif isinstance(event, h11.Data):
                    on_data(bytes(event.data))
                elif isinstance(event, h11.EndOfMessage):
                    return status
        finally:
            writer.close()


class EventReader:
    """Splits server-sent events and notes what they say in a record."""

    def __init__(self, record: RequestRecord) -> None:
        self._record, self._rest, self.done = record, b"", False

    def feed(self, data: bytes) -> None:
        """Bytes as they came."""
        now = time.perf_counter()
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now)

    def _event(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self.done = True
            return
        try:
            event = msgspec.json.decode(data)
        except msgspec.DecodeError:
            self._record.error = "an event is not JSON"
            return
        if "error" in event:
            self._record.error = "error in the stream"
        for choice in event.get("choices") or ():
            if choice.get("text") or (choice.get("delta") or {}).get("content"):
                self._record.events.append(now)
        usage = event.get("usage")
        if usage:
            self._record.prompt_tokens = usage.get("prompt_tokens", 0)
            self._record.output_tokens = usage.get("completion_tokens", 0)
