"""Requests that are made to hurt, one test a kind: each gets its answer soon, and nobody else waits for it."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import httpx
import pytest

CHAT = "/v1/chat/completions"
PATHS = {CHAT: b'"messages":[{"role":"user","content":"hi"}]', "/v1/completions": b'"prompt":"hi"'}
JSON = {"content-type": "application/json"}
GOOD = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


def post(server: Any, path: str, more: bytes, prompt: bytes | None = None) -> httpx.Response:
    body = b'{"model":"tiny",' + (PATHS[path] if prompt is None else prompt) + more + b"}"
    return httpx.post(server.url + path, content=body, headers=JSON, timeout=20)


def refused(server: Any, reply: httpx.Response, param: str | None, status: int = 400) -> str:
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert error["type"] == "invalid_request_error" and error["param"] == param
    assert server.engine.requests == []
    text: str = error["message"]
    return text


@pytest.mark.parametrize("path", PATHS)
def test_nan_temperature(server: Any, path: str) -> None:
    assert "not valid JSON" in refused(server, post(server, path, b',"temperature":NaN'), None)
    refused(server, post(server, path, b',"temperature":Infinity'), None)
    refused(server, post(server, path, b',"temperature":1e999'), "temperature")
    refused(server, post(server, path, b',"temperature":"NaN"'), "temperature")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "field", ["max_tokens", "n", "min_tokens", "logprobs", "prompt_logprobs", "top_k", "stop_token_ids"]
)
def test_negative_counts(server: Any, path: str, field: str) -> None:
    value = b"[-1]" if field == "stop_token_ids" else b"-2"
    refused(server, post(server, path, b',"%s":%s' % (field.encode(), value)), field)


@pytest.mark.parametrize("path", PATHS)
def test_a_billion_stop_strings(make_server: Any, path: str) -> None:
    """As many as a body holds, and then as many as a client can send."""
    server = make_server(body_limit=8 << 20)
    stops = b",".join([b'"a"'] * 2_000_000)
    begun = time.monotonic()
    assert "16" in refused(server, post(server, path, b',"stop":[%s]' % stops), "stop")
    refused(server, post(server, path, b',"stop":"%s"' % (b"a" * 7_000_000)), "stop")
    assert time.monotonic() - begun < 10

    def billion() -> Any:
        yield b'{"model":"tiny",' + PATHS[path] + b',"stop":["a"'
        for _ in range(1000):
            yield b',"a"' * 1_000_000

    with httpx.Client(timeout=20) as client:
        try:
            reply = client.post(server.url + path, content=billion(), headers=JSON)
            refused(server, reply, None, 413)
        except httpx.WriteError:
            pass  # the connection ended while it was still sending
    server.until(lambda: server.state.bodies.held == 0)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("data", [b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf4\x90\x80\x80"])
def test_invalid_utf_8(server: Any, path: str, data: bytes) -> None:
    prompt = PATHS[path].replace(b"hi", data)
    assert "UTF-8" in refused(server, post(server, path, b"", prompt), None)
    refused(server, post(server, path, b',"user":"' + data + b'"'), None)
    refused(server, post(server, path, b',"unknown":"' + data + b'"'), None)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("body", [b"", b"{", b"null", b"[]", b"3", b'{"a":}', b"{'a':1}", b"\x00", b'"'])
def test_invalid_json(server: Any, path: str, body: bytes) -> None:
    refused(server, httpx.post(server.url + path, content=body, headers=JSON), None)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("data", [rb"\ud800", rb"\udfff", rb"\ud83d x", rb"\ude00\ud83d"])
def test_lone_surrogates(server: Any, path: str, data: bytes) -> None:
    prompt = PATHS[path].replace(b"hi", data)
    assert "surrogate" in refused(server, post(server, path, b"", prompt), None)
    refused(server, post(server, path, b',"stop":"' + data + b'"'), None)


@pytest.mark.parametrize("path", PATHS)
def test_unknown_fields_are_ignored(server: Any, path: str) -> None:
    more = b',"no_such_field":{"a":[1,2,{"b":null}]},"user":"u","metadata":{"k":"v"},"store":true,"service_tier":"auto"'
    assert post(server, path, more).status_code == 200
    assert server.engine.requests[0].max_tokens > 0


def test_a_field_given_twice_counts_once(server: Any) -> None:
    assert post(server, CHAT, b',"max_tokens":3,"max_tokens":4').status_code == 200
    assert server.engine.requests[0].max_tokens == 4


def test_prompts_that_cannot_fit_are_not_tokenized(server: Any) -> None:
    tokenized = len(server.tokenizer.threads)
    long = b"x" * 7_000_000
    for path, prompt in PATHS.items():
        param = "messages" if path == CHAT else "prompt"
        assert "4096" in refused(server, post(server, path, b"", prompt.replace(b"hi", long)), param)
    many = b'"messages":[' + b",".join([b'{"role":"user","content":""}'] * 200_000) + b"]"
    refused(server, post(server, CHAT, b"", many), "messages")
    refused(
        server, post(server, "/v1/completions", b"", b'"prompt":[' + b",".join([b"5"] * 3_000_000) + b"]"), "prompt"
    )
    texts = b'"prompt":[' + b",".join([b'"hi"'] * 1_000_000) + b"]"
    assert "1000000" in refused(server, post(server, "/v1/completions", b"", texts), "n")
    assert len(server.tokenizer.threads) == tokenized


def test_large_bodies_hold_up_nobody(server: Any) -> None:
    """Others are answered within a moment while eight clients send what the server may read at most."""
    stop = threading.Event()
    body = json.dumps({**GOOD, "messages": [{"role": "user", "content": "x" * 8_000_000}]}).encode()

    def hurt() -> None:
        while not stop.is_set():
            assert httpx.post(server.url + CHAT, content=body, headers=JSON, timeout=20).status_code == 400

    threads = [threading.Thread(target=hurt) for _ in range(4)]
    for thread in threads:
        thread.start()
    slowest = 0.0
    with httpx.Client() as client:
        for _ in range(20):
            begun = time.monotonic()
            assert client.post(server.url + CHAT, json=GOOD, timeout=20).status_code == 200
            slowest = max(slowest, time.monotonic() - begun)
    stop.set()
    for thread in threads:
        thread.join(20)
    assert slowest < 2.0  # this process's own threads take most of it
    assert server.state.bodies.held == 0


def test_bodies_together_have_a_bound(make_server: Any, raw: Any) -> None:
    server = make_server(body_limit=20_000, bodies_limit=45_000)
    waiting = []
    for _ in range(2):
        sock = raw.connect(server)
        sock.sendall(raw.HEAD + b"content-length: 20000\r\n\r\n" + b" " * 19_999)
        waiting.append(sock)
    server.until(lambda: server.state.bodies.held == 2 * 19_999)
    with raw.connect(server) as sock:
        sock.sendall(raw.HEAD + b"content-length: 20000\r\n\r\n" + b" " * 19_999)
        status, headers, body = raw.Reader(sock).reply()
        assert status == 429 and int(headers["retry-after"]) >= 1 and headers["connection"] == "close"
        assert json.loads(body)["error"]["code"] == "bodies_too_large"
    assert httpx.post(server.url + CHAT, json=GOOD).status_code == 200  # small ones still come in
    waiting[0].close()
    server.until(lambda: server.state.bodies.held == 19_999)
    with raw.connect(server) as sock:
        body = raw.chat_body()
        sock.sendall(raw.HEAD + b"content-length: 20000\r\n\r\n" + body + b" " * (20_000 - len(body)))
        assert raw.Reader(sock).reply()[0] == 200
    waiting[1].close()
    server.until(lambda: server.state.bodies.held == 0)
