"""Requests of all kinds one after another on many connections, for memory and accounting: each one's end is known beforehand.

Some clients read their stream to the end, some want one body, some leave in the middle, some are wrong. There are more
connections than the engine takes, so that some meet a full queue.
"""

from __future__ import annotations

import random
import select
import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from graphrt.perf.load_api_client import request

LEFT = "499"  # how the server counts a client that left
_NEVER = 100_000  # tokens, more than anybody waits for
_END = b"0\r\n\r\n"


@dataclass(frozen=True)
class Kind:
    """What to send, when to leave, and the status that the server must count."""

    name: str
    weight: float
    data: bytes
    status: str
    leave_after_s: float | None = None


def kinds() -> list[Kind]:
    """All of them; lengths differ so that they do not march in step."""
    made = [Kind(f"stream {n}", 10, request(n), "200") for n in (2, 8, 20, 40)]
    made += [Kind(f"whole {n}", 8, request(n, stream=False), "200") for n in (2, 20)]
    made.append(Kind("log-probabilities refused", 1, request(5, top_logprobs=3), "400"))
    made.append(Kind("bad temperature", 1, request(5, temperature=-1), "400"))
    made.append(Kind("no such model", 1, request(5, model="other"), "404"))
    made.append(Kind("no such path", 1, b"GET /nowhere HTTP/1.1\r\nhost: load\r\n\r\n", "404"))
    made += [Kind("left a stream", 2, request(_NEVER), LEFT, after) for after in (0.05, 0.2)]
    made.append(Kind("left a whole", 1, request(_NEVER, stream=False), LEFT, 0.1))
    return made


@dataclass
class Totals:
    """`sent` counts requests, `ended` those by status; a full queue's 429 takes the place of what was to come."""

    sent: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)


class _Connection:
    def __init__(self, port: int) -> None:
        self.port = port
        self.sock: socket.socket | None = None
        self.kind: Kind | None = None
        self.data = bytearray()
        self.leave_at = float("inf")
        self.half_closed = False

    def begin(self, kind: Kind, now: float) -> None:
        if self.sock is None:
            self.sock = socket.create_connection(("127.0.0.1", self.port), timeout=10)
            self.sock.setblocking(False)
            self.half_closed = False
        self.kind = kind
        self.data.clear()
        self.leave_at = float("inf") if kind.leave_after_s is None else now + kind.leave_after_s
        self.sock.sendall(kind.data)

    def leave(self) -> bool:
        """Go, rudely if the reply has begun; else listen to the end, since a refusal may be on its way. True when gone."""
        if self.data.startswith(b"HTTP/1.1 200"):
            return True
        assert self.sock is not None
        self.leave_at = float("inf")
        self.half_closed = True
        self.sock.shutdown(socket.SHUT_WR)
        return False

    def complete(self) -> bool:
        head, found, _body = bytes(self.data[:2000]).partition(b"\r\n\r\n")
        if not found:
            return False
        if b"chunked" in head:
            return self.data.endswith(_END)
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        return len(self.data) >= len(head) + 4 + length

    def status_at_close(self) -> str:
        if self.complete():
            return self.status()
        return LEFT if self.half_closed else "closed"

    def status(self) -> str:
        return bytes(self.data[9:12]).decode()


def soak(port: int, connections: int, requests: int, seed: int, progress: Callable[[int], None]) -> Totals:
    """Send so many requests and wait for their ends. `progress` hears the number of those that ended."""
    rng = random.Random(seed)
    choices = kinds()
    weights = [kind.weight for kind in choices]
    totals = Totals()
    poll = select.epoll()
    by_fd: dict[int, _Connection] = {}
    leaving: set[_Connection] = set()

    def start(connection: _Connection) -> None:
        if totals.sent == requests:
            return
        totals.sent += 1
        fresh = connection.sock is None
        connection.begin(rng.choices(choices, weights)[0], time.monotonic())
        assert connection.sock is not None
        if fresh:
            by_fd[connection.sock.fileno()] = connection
            poll.register(connection.sock.fileno(), select.EPOLLIN)
        if connection.leave_at < float("inf"):
            leaving.add(connection)

    def drop(connection: _Connection) -> None:
        assert connection.sock is not None
        poll.unregister(connection.sock.fileno())
        del by_fd[connection.sock.fileno()]
        connection.sock.close()
        connection.sock = None

    def end(connection: _Connection, status: str) -> None:
        assert connection.kind is not None
        totals.ended[status] += 1
        if status not in (connection.kind.status, "429"):
            totals.wrong[f"{connection.kind.name}: {status}"] += 1
        leaving.discard(connection)
        progress(sum(totals.ended.values()))
        start(connection)

    for _ in range(connections):
        start(_Connection(port))
    while by_fd and sum(totals.ended.values()) < totals.sent:
        for fd, _event in poll.poll(0.01):
            connection = by_fd[fd]
            assert connection.sock is not None
            data = connection.sock.recv(262144)
            connection.data += data
            if not data:
                drop(connection)
                end(connection, connection.status_at_close())
            elif connection.complete() and not connection.half_closed:
                end(connection, connection.status())
        now = time.monotonic()
        for connection in [c for c in leaving if c.leave_at <= now and c.leave()]:
            drop(connection)
            end(connection, LEFT)
    for connection in list(by_fd.values()):
        drop(connection)
    poll.close()
    return totals
