"""Bytes that are not quite HTTP, or HTTP that hardly anybody speaks."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

GET = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.mark.parametrize(
    "data",
    [
        b"\r\n\r\n\x00",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\nhost: x\r\n\r\n",
        b"GET / HTTQ/1.1\r\nhost: x\r\n\r\n",
        b"FROB / HTTP/1.1\r\nhost: x\r\n\r\n",
        b"get / HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost x\r\n\r\n",
        b"GET / HTTP/1.1\r\n: empty\r\n\r\n",
        b"GET / HTTP/1.1\r\nna me: v\r\n\r\n",
        b"GET / HTTP/1.1\r\nname : v\r\n\r\n",
        b"GET / HTTP/1.1\r\nname: a\x00b\r\n\r\n",
        b"GET / HTTP/1.1\r\nname: a\r\n folded\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET / x HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET http:// HTTP/1.1\r\nhost: x\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100),
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5x\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999999999999999\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked, gzip\r\n\r\n0\r\n\r\n",
    ],
)
def test_malformed_requests_get_400_and_the_door(server: Any, raw: Any, data: bytes) -> None:
    with raw.connect(server) as sock:
        sock.sendall(data)
        status, headers, body = raw.Reader(sock).reply()
        assert status == 400 and headers["connection"] == "close"
        assert json.loads(body)["error"]["type"] == "invalid_request_error"
        assert raw.closed(sock)
    assert server.engine.requests == []
    assert server.state.metrics.http == {("none", "400"): 1}


@pytest.mark.parametrize(
    ("data", "statuses"),
    [
        (b"GET /health HTTP/1.0\r\n\r\n", [200]),
        (b"GET /health\r\n\r\n", [200]),
        (b"GET /health HTTP/1.1\n\n", None),  # bare line feeds: taken or refused, never a hang
        (b"\r\n\r\n" + GET, [200]),
        (b"HEAD /health HTTP/1.1\r\nhost: x\r\n\r\n", None),
        (b"OPTIONS * HTTP/1.1\r\nhost: x\r\n\r\n", None),
        (b"CONNECT example.org:443 HTTP/1.1\r\nhost: x\r\n\r\n", None),
        (b"GET http://example.org/health HTTP/1.1\r\nhost: x\r\n\r\n", None),
        (b"GET /%zz%00 HTTP/1.1\r\nhost: x\r\n\r\n", [404]),
        (b"GET //health HTTP/1.1\r\nhost: x\r\n\r\n", [404]),
        (b"GET /health?a=%ff&b HTTP/1.1\r\nhost: x\r\n\r\n", [200]),
        (b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n", [200]),
        (GET * 3, [200, 200, 200]),
    ],
)
def test_unusual_requests_get_an_answer(server: Any, raw: Any, data: bytes, statuses: list[int] | None) -> None:
    with raw.connect(server) as sock:
        sock.sendall(data)
        reader = raw.Reader(sock)
        if statuses is None:
            assert 200 <= int(reader.until(b"\r\n").split()[1]) < 500
        else:
            assert [reader.reply()[0] for _ in statuses] == statuses


def test_clients_that_offer_http_2_are_served_again_and_again(server: Any, raw: Any) -> None:
    """As Java's client and `curl --http2` do on plain connections."""
    offer = b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n"
    with raw.connect(server) as sock:
        reader = raw.Reader(sock)
        for _ in range(3):
            sock.sendall(raw.chat(offer))
            status, _, body = reader.reply()
            assert status == 200 and json.loads(body)["choices"][0]["message"]["content"] == "Hello, wörld!"


def chunked(*pieces: bytes, end: bytes = b"0\r\n\r\n") -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + end


def test_chunked_bodies(server: Any, raw: Any) -> None:
    body = raw.chat_body()
    bodies = [
        chunked(body),
        chunked(*(bytes([byte]) for byte in body)),
        chunked(body, end=b"0\r\ntrailer: x\r\n\r\n"),
        b"00%X;name=value\r\n%s\r\n0\r\n\r\n" % (len(body), body),
    ]
    with raw.connect(server) as sock:
        reader = raw.Reader(sock)
        for data in bodies:
            sock.sendall(raw.HEAD + b"transfer-encoding: chunked\r\n\r\n" + data)
            assert reader.reply()[0] == 200
        sock.sendall(raw.HEAD + b"transfer-encoding: chunked\r\n\r\n")
        for byte in chunked(body):
            sock.sendall(bytes([byte]))
        assert reader.reply()[0] == 200
    assert len(server.engine.requests) == 5


@pytest.mark.parametrize(
    "data",
    [
        b"xyz\r\n{}\r\n0\r\n\r\n",
        b"-2\r\n{}\r\n0\r\n\r\n",
        b"\r\n\r\n",
        b"2\r\n{}XX0\r\n\r\n",
        b"2\r\n{}\r\n2 2\r\n",
        b"fffffffffffffffff\r\n{}",
        b"2;" + b"\x00" * 10 + b"\r\n{}\r\n0\r\n\r\n",
    ],
)
def test_chunks_of_a_wrong_size(server: Any, raw: Any, data: bytes) -> None:
    with raw.connect(server) as sock:
        sock.sendall(raw.HEAD + b"transfer-encoding: chunked\r\n\r\n" + data)
        assert raw.Reader(sock).reply()[0] == 400
        assert raw.closed(sock)
    server.until(lambda: not server.state.live and server.state.limiter.running == 0)
    assert server.engine.requests == []


def test_a_chunk_said_to_be_huge_is_refused_before_it_is_there(server: Any, raw: Any) -> None:
    with raw.connect(server) as sock:
        sock.sendall(raw.HEAD + b"transfer-encoding: chunked\r\n\r\n7fffffffffffffff\r\n")
        for _ in range(9):
            sock.sendall(b" " * (1 << 20))
        assert raw.Reader(sock).reply()[0] == 413


def test_a_chunk_extension_without_end_is_refused(server: Any, raw: Any) -> None:
    """Bytes of framing count for nothing in the body's limit, but they do not go on for ever either."""
    with raw.connect(server) as sock:
        sock.sendall(raw.HEAD + b"transfer-encoding: chunked\r\n\r\n2;")
        begun = time.monotonic()
        try:
            while time.monotonic() - begun < 5:
                sock.sendall(b"a" * 65536)
        except OSError:
            pass
        assert time.monotonic() - begun < 5
    assert server.engine.requests == []


def test_body_bytes_one_at_a_time_time_out(make_server: Any, raw: Any) -> None:
    server = make_server(body_timeout_s=0.4)
    with raw.connect(server) as sock:
        sock.sendall(raw.HEAD + b"content-length: 1000\r\n\r\n")
        begun = time.monotonic()
        try:
            while time.monotonic() - begun < 5:
                sock.sendall(b" ")
                time.sleep(0.02)
        except OSError:
            pass
        assert time.monotonic() - begun < 2
    server.until(lambda: server.state.metrics.http == {(raw.CHAT, "408"): 1})


def test_header_bytes_one_at_a_time_time_out(make_server: Any, raw: Any) -> None:
    server = make_server(header_timeout_s=0.4)
    with raw.connect(server) as sock:
        begun = time.monotonic()
        try:
            for byte in b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 1000:
                sock.sendall(bytes([byte]))
                time.sleep(0.02)
        except OSError:
            pass
        assert time.monotonic() - begun < 2
    assert server.state.metrics.http == {("none", "408"): 1}


def test_a_body_that_nobody_wanted_does_not_hold_the_connection(make_server: Any, raw: Any) -> None:
    """After an early answer the rest of the upload is thrown away, but not for ever."""
    server = make_server(header_timeout_s=0.4)
    with raw.connect(server) as sock:
        sock.sendall(b"POST /nothing HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        assert raw.Reader(sock).reply()[0] == 404
        begun = time.monotonic()
        try:
            while time.monotonic() - begun < 5:
                sock.sendall(b"1\r\na\r\n")
                time.sleep(0.02)
        except OSError:
            pass
        assert time.monotonic() - begun < 2
