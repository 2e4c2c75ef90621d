"""Keys, limits and deadlines at the door of a live server."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

PATH = "/v1/chat/completions"
HI: list[Any] = [{"role": "user", "content": "hi"}]
BODY = {"model": "tiny", "messages": HI}
ALICE = {"authorization": "Bearer sk-alice-12345"}


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text("alice:sk-alice-12345\nbob sk-bob-1234567 concurrency=1 rpm=3\n")
    path.chmod(0o600)
    return path


@pytest.fixture
def locked(make_server: Callable[..., Any], keys: Path) -> Any:
    return make_server(api_key_files=(keys,))


async def endless(stream: Any) -> None:
    while not stream.cancelled.is_set():
        stream.put("word ")
        await asyncio.sleep(0.005)


def post(server: Any, headers: dict[str, str], **fields: Any) -> httpx.Response:
    return httpx.post(server.url + PATH, json={**BODY, **fields}, headers=headers)


@pytest.mark.parametrize(
    ("headers", "code", "challenge"),
    [
        ({}, "no_api_key", 'Bearer realm="graphrt"'),
        ({"authorization": "Basic c2stYWxpY2U="}, "no_api_key", 'Bearer realm="graphrt"'),
        ({"authorization": "Bearer"}, "no_api_key", 'Bearer realm="graphrt"'),
        ({"authorization": "Bearer sk-mallory-1"}, "invalid_api_key", 'Bearer realm="graphrt", error="invalid_token"'),
    ],
)
def test_without_a_key_nothing_is_done(locked: Any, headers: dict[str, str], code: str, challenge: str) -> None:
    replies = [
        post(locked, headers),
        *(httpx.get(locked.url + path, headers=headers) for path in ("/v1/models", "/", "/x")),
    ]
    for reply in replies:
        assert reply.status_code == 401 and reply.headers["www-authenticate"] == challenge
        error = reply.json()["error"]
        assert (error["type"], error["code"], error["param"]) == ("authentication_error", code, None)
    assert locked.engine.requests == []
    assert locked.metric(f'graphrt:requests_refused_total{{model_name="tiny",reason="{code}"}}') == len(replies)


def test_a_key_opens(locked: Any) -> None:
    assert post(locked, ALICE).status_code == 200
    assert post(locked, {"authorization": "bearer   sk-alice-12345"}).status_code == 200
    client = openai.OpenAI(base_url=locked.url + "/v1", api_key="sk-alice-12345", max_retries=0)
    assert client.chat.completions.create(model="tiny", messages=HI).choices[0].message.content
    assert [model.id for model in client.models.list().data] == ["tiny"]
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=locked.url + "/v1", api_key="none", max_retries=0).models.list()
    assert locked.metric('graphrt:key_requests_total{key="alice",model_name="tiny"}') == 4


def test_what_stays_open(locked: Any, make_server: Callable[..., Any], keys: Path) -> None:
    assert httpx.get(locked.url + "/health").status_code == 200
    assert httpx.get(locked.url + "/metrics").status_code == 200
    guarded = make_server(api_key_files=(keys,), guard_metrics=True)
    assert httpx.get(guarded.url + "/health").status_code == 200
    assert httpx.get(guarded.url + "/metrics").status_code == 401
    assert httpx.get(guarded.url + "/metrics", headers=ALICE).status_code == 200


def test_keys_change_while_the_server_runs(locked: Any, keys: Path) -> None:
    keys.write_text("alice:sk-alice-new-1\n")
    assert locked.call(locked.state.keys.reload)
    assert post(locked, ALICE).status_code == 401
    assert post(locked, {"authorization": "Bearer sk-alice-new-1"}).status_code == 200


def test_the_log_has_the_name_and_never_the_key(locked: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        post(locked, ALICE)
        post(locked, {"authorization": "Bearer sk-mallory-1"})
    assert "key=alice" in caplog.text
    assert "sk-alice" not in caplog.text and "sk-mallory" not in caplog.text


def test_requests_at_once_with_one_key(locked: Any) -> None:
    locked.engine.script = endless
    client = openai.OpenAI(base_url=locked.url + "/v1", api_key="sk-bob-1234567", max_retries=0)
    with client.chat.completions.create(model="tiny", messages=HI, stream=True) as stream:
        next(iter(stream))
        with pytest.raises(openai.RateLimitError, match="bob has 1 requests under way") as caught:
            client.chat.completions.create(model="tiny", messages=HI)
        assert caught.value.code == "key_concurrency_limit_exceeded"
        assert caught.value.response.headers["retry-after"] == "1"
        client.models.list()  # reading costs nothing
    locked.until(lambda: locked.state.limiter.running == 0)
    with client.chat.completions.create(model="tiny", messages=HI, stream=True) as stream:
        next(iter(stream))
    assert locked.metric('graphrt:requests_refused_total{model_name="tiny",reason="key_concurrency_limit"}') == 1


def test_requests_a_minute_with_one_key(locked: Any) -> None:
    bob = {"authorization": "Bearer sk-bob-1234567"}
    assert [post(locked, bob).status_code for _ in range(4)] == [200, 200, 200, 429]
    reply = post(locked, bob)
    assert 1 <= int(reply.headers["retry-after"]) <= 20
    assert reply.json()["error"]["type"] == "rate_limit_error"
    assert post(locked, ALICE).status_code == 200
    assert len(locked.engine.requests) == 4


def test_requests_at_once_on_the_server(make_server: Callable[..., Any]) -> None:
    server = make_server(max_concurrency=1)
    server.engine.script = endless
    with server.client().chat.completions.create(model="tiny", messages=HI, stream=True) as stream:
        next(iter(stream))
        reply = post(server, {})
        assert reply.status_code == 429 and reply.json()["error"]["code"] == "concurrency_limit_exceeded"
        assert httpx.get(server.url + "/health").status_code == 200


@pytest.mark.parametrize("header", [{}, {"x-request-timeout": "60"}])
def test_a_request_has_a_deadline(make_server: Callable[..., Any], header: dict[str, str]) -> None:
    server = make_server(request_timeout_s=0.2)
    server.engine.script = endless
    reply = post(server, header)
    assert reply.status_code == 504 and reply.json()["error"]["code"] == "deadline_exceeded"
    assert "0.2 s" in reply.json()["error"]["message"]
    streamed = post(server, header, stream=True)
    assert streamed.status_code == 200 and '"deadline_exceeded"' in streamed.text and "[DONE]" not in streamed.text
    assert server.engine.cancelled == [0, 1]
    assert server.metric('graphrt:request_success_total{finished_reason="timeout",model_name="tiny"}') == 2


def test_a_client_may_set_its_own_deadline(server: Any) -> None:
    server.engine.script = endless
    assert post(server, {"x-request-timeout": "0.15"}).status_code == 504
    for wrong in ("soon", "-1", "0", "nan", "inf", "1e9"):
        reply = post(server, {"x-request-timeout": wrong})
        assert reply.status_code == 400 and reply.json()["error"]["param"] == "x-request-timeout"


def test_a_deadline_that_passes_before_the_engine_is_asked(make_server: Callable[..., Any]) -> None:
    server = make_server(request_timeout_s=0.1)
    held = threading.Event()
    encode = server.tokenizer.encode

    def slow(text: str) -> list[int]:
        held.wait(0.3)
        return list(encode(text))

    server.tokenizer.encode = slow
    server.engine.script = endless
    reply = post(server, {}, messages=[{"role": "user", "content": "x" * 3000}])
    assert reply.status_code == 504
    assert server.engine.cancelled == [0]
