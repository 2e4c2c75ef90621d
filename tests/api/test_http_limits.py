"""Bounds on what a client may send, on raw sockets."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

import pytest

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


def connect(server: Any) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", server.port), timeout=5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def read_reply(sock: socket.socket) -> tuple[int, dict[str, Any]]:
    """Status and JSON of a reply that bears its length."""
    data = b""
    while b"\r\n\r\n" not in data:
        part = sock.recv(65536)
        assert part, f"the connection closed after {data!r}"
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    headers = dict(line.split(b": ", 1) for line in head.lower().split(b"\r\n")[1:])
    while len(body) < int(headers[b"content-length"]):
        body += sock.recv(65536)
    return int(head.split()[1]), json.loads(body)


def closed(sock: socket.socket, within_s: float = 5) -> bool:
    sock.settimeout(within_s)
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_body_said_to_be_too_large_is_refused_unread(make_server: Any) -> None:
    server = make_server(body_limit=10_000)
    with connect(server) as sock:
        sock.sendall(HEAD + b"expect: 100-continue\r\ncontent-length: 1000000000\r\n\r\n")
        status, body = read_reply(sock)
        assert status == 413 and "10000 bytes" in body["error"]["message"]
        assert closed(sock)


def test_a_body_that_grows_too_large_is_refused_while_it_comes(make_server: Any) -> None:
    server = make_server(body_limit=10_000)
    with connect(server) as sock:
        sock.sendall(HEAD + b"transfer-encoding: chunked\r\n\r\n")
        for _ in range(11):
            sock.sendall(b"3e8\r\n" + b" " * 1000 + b"\r\n")
        status, _ = read_reply(sock)
        assert status == 413
        # It keeps reading for a moment, so that a client busy sending gets to see the reply.
        sock.sendall(b"3e8\r\n" + b" " * 1000 + b"\r\n")
        assert closed(sock)


def test_a_body_of_just_the_limit_is_taken(make_server: Any) -> None:
    server = make_server(body_limit=10_000)
    body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}).encode()
    with connect(server) as sock:
        sock.sendall(HEAD + b"content-length: 10000\r\n\r\n" + body + b" " * (10_000 - len(body)))
        assert read_reply(sock)[0] == 200


def test_a_body_that_does_not_come_times_out(make_server: Any) -> None:
    server = make_server(body_timeout_s=0.2)
    with connect(server) as sock:
        sock.sendall(HEAD + b"content-length: 100\r\n\r\n{")
        status, body = read_reply(sock)
        assert status == 408 and "0.2 s" in body["error"]["message"]
        assert closed(sock)


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nhost: x\r\nbig: " + b"a" * 5000 + b"\r\n\r\n",
        b"GET /" + b"a" * 5000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"".join(b"h%d: v\r\n" % i for i in range(600)) + b"\r\n",
    ],
)
def test_large_headers_are_refused(make_server: Any, data: bytes) -> None:
    server = make_server(header_limit=4096)
    with connect(server) as sock:
        sock.sendall(data)
        status, body = read_reply(sock)
        assert status == 431 and "4096 bytes" in body["error"]["message"]
        assert closed(sock)


def test_a_header_without_an_end_is_refused(make_server: Any) -> None:
    server = make_server(header_limit=4096)
    with connect(server) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nbig: ")
        for _ in range(5):
            time.sleep(0.02)
            sock.sendall(b"a" * 1000)
        assert read_reply(sock)[0] == 431


def test_many_requests_on_one_connection_are_no_large_header(make_server: Any) -> None:
    server = make_server(header_limit=4096)
    with connect(server) as sock:
        for _ in range(100):
            sock.sendall(b"GET /health HTTP/1.1\r\n")
            sock.sendall(b"host: x\r\n\r\n")
            assert read_reply(sock)[0] == 200


@pytest.mark.parametrize("sent", [b"", b"\r\n", b"GET / HT", b"GET / HTTP/1.1\r\nhost: x\r\n"])
def test_headers_that_do_not_come_time_out(make_server: Any, sent: bytes) -> None:
    server = make_server(header_timeout_s=0.2)
    with connect(server) as sock:
        sock.sendall(sent)
        if sent.startswith(b"GET"):
            assert read_reply(sock)[0] == 408
        assert closed(sock, 2)


def test_the_second_request_of_a_connection_is_timed_too(make_server: Any) -> None:
    server = make_server(header_timeout_s=0.2)
    with connect(server) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert read_reply(sock)[0] == 200
        time.sleep(0.4)  # idle is not slow
        sock.sendall(b"GET /health HTTP/1.1\r\n")
        assert read_reply(sock)[0] == 408
        assert closed(sock, 2)


def test_what_is_no_http_is_refused(server: Any) -> None:
    with connect(server) as sock:
        sock.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        status, body = read_reply(sock)
        assert status == 400 and body["error"]["type"] == "invalid_request_error"


def test_an_upload_left_halfway_is_forgotten(server: Any) -> None:
    with connect(server) as sock:
        sock.sendall(HEAD + b"content-length: 100\r\n\r\n{")
    server.until(lambda: server.state.metrics.http[("/v1/chat/completions", "499")] == 1)
    assert server.engine.requests == []
