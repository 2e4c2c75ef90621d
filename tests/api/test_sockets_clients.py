"""Clients that leave, half close, hurry, or do not read: on plain sockets, where all of it can be done exactly."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import ssl
import struct
import time
from pathlib import Path
from typing import Any

import pytest

WORD = "0123456789abcde "


async def endless(stream: Any) -> None:
    while not stream.cancelled.is_set():
        stream.put(WORD)
        await asyncio.sleep(0.001)


async def silent(stream: Any) -> None:
    await stream.cancelled.wait()


def statuses(server: Any) -> dict[str, int]:
    found: dict[str, int] = {}
    for (_, status), count in server.state.metrics.http.items():
        found[status] = found.get(status, 0) + count
    return found


def nothing_left(server: Any, cancelled: int, status: str = "499") -> None:
    server.until(lambda: not server.state.live and server.state.limiter.running == 0)
    server.until(lambda: statuses(server).get(status, 0) == cancelled)
    assert server.call(lambda: len(server.engine.cancelled)) == cancelled


def events(body: bytes) -> list[Any]:
    return [json.loads(line[6:]) for line in body.split(b"\n") if line.startswith(b"data: {")]


def text_of(events: list[Any]) -> str:
    return "".join(event["choices"][0]["delta"].get("content", "") for event in events)


def reset(sock: socket.socket) -> None:
    """Close so that the other side gets a reset."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("leave", ["close", "reset", "shut down"])
def test_clients_that_leave_free_their_slot(server: Any, raw: Any, stream: bool, leave: str) -> None:
    server.engine.script = endless
    for _ in range(3):
        sock = raw.connect(server)
        sock.sendall(raw.chat(stream=stream))
        if stream:
            raw.Reader(sock).until(WORD[:4].encode())
        else:
            server.until(lambda: bool(server.state.live))
        if leave == "shut down":
            sock.shutdown(socket.SHUT_WR)
            assert raw.closed(sock)
        elif leave == "reset":
            reset(sock)
        else:
            sock.close()
        server.until(lambda: not server.state.live)
    nothing_left(server, 3)


@pytest.mark.parametrize("script", [endless, silent])
def test_a_client_that_leaves_with_a_second_request_in_line(server: Any, raw: Any, script: Any) -> None:
    server.engine.script = script
    sock = raw.connect(server)
    sock.sendall(raw.chat(stream=True) + raw.chat())
    server.until(lambda: bool(server.state.live))
    sock.close()
    nothing_left(server, 1)
    assert len(server.engine.requests) == 1  # the second one was never begun


def test_a_half_closed_client_gets_the_answer_to_a_get(server: Any, raw: Any) -> None:
    with raw.connect(server) as sock:
        sock.sendall(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
        sock.shutdown(socket.SHUT_WR)
        status, _, body = raw.Reader(sock).reply()
        assert status == 200 and json.loads(body)["data"][0]["id"] == "tiny"
        assert raw.closed(sock)


def test_pipelined_requests_are_answered_in_order(server: Any, raw: Any) -> None:
    with raw.connect(server) as sock:
        bodies = [raw.chat(stream=number % 2 == 0, seed=number) for number in range(6)]
        sock.sendall(b"".join(bodies))
        reader = raw.Reader(sock)
        for number in range(6):
            status, headers, body = reader.reply()
            streamed = headers["content-type"].startswith("text/event-stream")
            assert status == 200 and streamed == (number % 2 == 0)
            assert (b"data: [DONE]" in body) == streamed
    assert [request.sampling.seed for request in server.engine.requests] == list(range(6))
    assert len(server.engine.cancelled) == 0


def test_a_mistake_behind_a_stream_ends_the_stream_only(server: Any, raw: Any) -> None:
    server.engine.script = endless
    sock = raw.connect(server)
    sock.sendall(raw.chat(stream=True))
    raw.Reader(sock).until(WORD[:4].encode())
    sock.sendall(b"\x00\x00 nonsense\r\n\r\n")
    assert raw.closed(sock)
    nothing_left(server, 1)


def test_the_older_protocol_gets_its_stream(server: Any, raw: Any) -> None:
    with raw.connect(server) as sock:
        sock.sendall(raw.chat(stream=True).replace(b"HTTP/1.1", b"HTTP/1.0", 1))
        _, headers, body = raw.Reader(sock).reply()
        assert headers["connection"] == "close" and text_of(events(body)) == "Hello, wörld!"
        assert raw.closed(sock)


def test_a_client_that_asks_before_it_sends(server: Any, raw: Any) -> None:
    head, _, body = raw.chat(b"expect: 100-continue\r\n").partition(b"\r\n\r\n")
    with raw.connect(server) as sock:
        sock.sendall(head + b"\r\n\r\n")
        reader = raw.Reader(sock)
        assert reader.until(b"\r\n\r\n").startswith(b"HTTP/1.1 100 ")
        sock.sendall(body)
        assert reader.reply()[0] == 200


def buffered(server: Any) -> int:
    """Bytes that the server's process holds for clients to read."""
    connections = server._server.server_state.connections
    return server.call(lambda: sum(c.transport.get_write_buffer_size() for c in connections))


COUNT = 40_000


async def as_fast_as_it_goes(stream: Any) -> None:
    for number in range(COUNT):
        if stream.cancelled.is_set():
            return
        stream.put(f"{number} ")
        if number % 100 == 0:
            await asyncio.sleep(0)
    stream.put([256], "stop")


@pytest.mark.parametrize("tls", [False, True])
def test_what_a_client_does_not_read_waits_as_tokens_and_all_of_it_comes(
    make_server: Any, raw: Any, pem: Any, tmp_path: Path, tls: bool
) -> None:
    """Events for one that does not read would be 8 MB and more here."""
    options = {}
    if tls:
        options = {"tls_cert": tmp_path / "cert", "tls_key": tmp_path / "key"}
        options["tls_cert"].write_text(pem.CERT)
        options["tls_key"].write_text(pem.KEY)
    server = make_server(**options)
    server.engine.script = as_fast_as_it_goes
    trust = ssl.create_default_context(cadata=pem.CERT)
    trust.check_hostname = False
    with contextlib.ExitStack() as stack:
        sock = stack.enter_context(raw.connect(server, receive_buffer=4096))
        if tls:
            sock = stack.enter_context(trust.wrap_socket(sock))
        sock.sendall(raw.chat(stream=True, max_tokens=3000))  # the fake engine does not count
        server.until(lambda: server.engine.streams and server.engine.streams[0]._over, 20)
        assert buffered(server) < 1_000_000
        time.sleep(0.2)
        held = server.call(lambda: sum(len(item.tokens) for item in server.engine.streams[0]._items))
        assert held > 10_000
        found = events(raw.Reader(sock).reply()[2])
    assert text_of(found) == "".join(f"{number} " for number in range(COUNT))
    assert 100 < len(found) < COUNT  # what waited came together
    assert found[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_never_reads_is_cut_off(make_server: Any, raw: Any, stream: bool) -> None:
    server = make_server(send_timeout_s=0.4)

    async def much(fake: Any) -> None:
        for _ in range(90):
            if fake.cancelled.is_set():
                return
            fake.put("x" * 100_000)
            await asyncio.sleep(0.001)
        fake.put([256], "stop")

    server.engine.script = much
    with raw.connect(server, receive_buffer=4096) as sock:
        sock.sendall(raw.chat(stream=stream))
        begun = time.monotonic()
        server.until(lambda: "499" in statuses(server) or "200" in statuses(server), 10)
        server.until(lambda: not server._server.server_state.connections, 10)
        assert time.monotonic() - begun < 8
    server.until(lambda: not server.state.live and server.state.limiter.running == 0)
    assert buffered(server) == 0


def test_slow_clients_of_many_replies_stay_in_order(server: Any, raw: Any) -> None:
    """A client reads a little now and then; four replies share its connection."""

    async def numbered(stream: Any) -> None:
        for number in range(3000):
            stream.put(f"<{stream.request.id}:{number}>")
            if number % 50 == 0:
                await asyncio.sleep(0)
        stream.put([256], "stop")

    server.engine.script = numbered
    with raw.connect(server, receive_buffer=4096) as sock:
        sock.sendall(raw.chat(stream=True, n=4, max_tokens=3000))
        text = b""
        while not text.endswith(b"0\r\n\r\n"):
            text += sock.recv(50_000)
            time.sleep(0.0002)
    contents = ["", "", "", ""]
    for event in events(text):
        [choice] = event["choices"]
        contents[choice["index"]] += choice["delta"].get("content", "")
    for content in contents:
        found = re.findall(r"<(\d+):(\d+)>", content)
        assert len({request for request, _ in found}) == 1
        assert [int(number) for _, number in found] == list(range(3000))


def test_a_deadline_holds_even_when_the_engine_does_not_answer(make_server: Any, raw: Any) -> None:
    server = make_server(request_timeout_s=0.3)

    async def deaf(stream: Any) -> None:
        stream.cancel = lambda: None
        stream.put("one ")
        await asyncio.sleep(30)

    server.engine.script = deaf
    for stream in (True, False):
        with raw.connect(server) as sock:
            begun = time.monotonic()
            sock.sendall(raw.chat(stream=stream))
            status, _, body = raw.Reader(sock).reply()
            assert time.monotonic() - begun < 3
            assert status == (200 if stream else 504) and b"deadline_exceeded" in body
    server.until(lambda: not server.state.live)
