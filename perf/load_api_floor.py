"""What the machine costs anyone who passes a token on: a relay of three system calls in the place of the server.

One process writes the time into a pipe at the moments at which the engine would emit; a second one reads it and writes it
to one of the sockets; the client is that of the load test. Same cores, same clock, no rings, no HTTP, no JSON.
"""

from __future__ import annotations

import os
import random
import socket
import sys
import time

from graphrt.perf.load_api_client import Trace, read_streams


def floor_us(
    streams: int, tokens: int, per_second: float, relay_cpu: int | None, source_cpu: int | None
) -> list[float]:
    """Latencies of `tokens` tokens that come `per_second` at random moments."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=streams)
    port = listener.getsockname()[1]
    read, write = os.pipe()
    sys.stdout.flush()
    children = []
    for body in (
        lambda: _source(write, tokens, per_second, source_cpu),
        lambda: _relay(listener, read, streams, relay_cpu),
    ):
        pid = os.fork()
        if pid == 0:
            try:
                body()
            finally:
                os._exit(0)
        children.append(pid)
    os.close(write)
    socks = [socket.create_connection(("127.0.0.1", port)) for _ in range(streams)]
    traces: list[Trace] = read_streams(socks, 60.0 + tokens / per_second)
    for sock in socks:
        sock.close()
    for pid in children:
        os.waitpid(pid, 0)
    os.close(read)
    listener.close()
    return [latency for trace in traces for _sent, latency in trace.tokens()]


def _source(write: int, tokens: int, per_second: float, cpu: int | None) -> None:
    if cpu is not None:
        os.sched_setaffinity(0, {cpu})
    time.sleep(0.5)  # until the client reads
    due = time.monotonic()
    rng = random.Random(0)
    for _ in range(tokens):
        due += rng.expovariate(per_second)
        rest = due - time.monotonic()
        if rest > 0:
            time.sleep(rest)
        os.write(write, b"%016d " % (time.monotonic_ns() // 1000))
    os.write(write, b"\0" * 17)


def _relay(listener: socket.socket, read: int, streams: int, cpu: int | None) -> None:
    if cpu is not None:
        os.sched_setaffinity(0, {cpu})
    socks = [listener.accept()[0] for _ in range(streams)]
    for sock in socks:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    turn = 0
    while (data := os.read(read, 17)) != b"\0" * 17:
        socks[turn % streams].sendall(data)
        turn += 1
    for sock in socks:
        sock.close()
