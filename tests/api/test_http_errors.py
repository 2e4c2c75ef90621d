"""Every wrong request has its status, in the OpenAI shape; the small pages answer."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

PATH = "/v1/chat/completions"
GOOD = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


def check(reply: httpx.Response, status: int, param: str | None, code: str | None) -> str:
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/json"
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["param"], error["code"]) == (param, code)
    assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error")
    text: str = error["message"]
    return text


@pytest.mark.parametrize(
    ("fields", "status", "param", "code"),
    [
        ({"model": "gpt-9"}, 404, "model", "model_not_found"),
        ({"temperature": -1}, 400, "temperature", None),
        ({"stop": ["a", ""]}, 400, "stop", None),
        ({"seed": 2**70}, 400, "seed", None),
        ({"max_tokens": 10**30}, 400, "max_tokens", "context_length_exceeded"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, 400, "max_completion_tokens", None),
        ({"max_completion_tokens": 4096}, 400, "max_completion_tokens", "context_length_exceeded"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, 400, "messages", "context_length_exceeded"),
        ({"messages": [{"role": "user", "content": "tools are not known"}]}, 400, None, None),
        ({"stream": False, "stream_options": {"include_usage": True}}, 400, "stream_options", None),
        ({"n": 25}, 400, "n", None),
        ({"n": 129}, 400, "n", None),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "tools", "unsupported_parameter"),
        ({"response_format": {"type": "json_object"}}, 400, "response_format", "unsupported_parameter"),
        ({"stop_token_ids": [10**12]}, 400, "stop_token_ids", None),
        ({"chat_template_kwargs": {"messages": []}}, 400, "chat_template_kwargs", None),
    ],
)
def test_wrong_fields(server: Any, fields: dict[str, Any], status: int, param: str | None, code: str | None) -> None:
    for stream in (False, True):
        check(httpx.post(server.url + PATH, json={**GOOD, "stream": stream, **fields}), status, param, code)
    assert server.engine.requests == []
    assert httpx.post(server.url + PATH, json=GOOD).status_code == 200


def test_numbers_are_in_the_message(server: Any) -> None:
    long = {**GOOD, "messages": [{"role": "user", "content": "x" * 5000}]}
    text = check(httpx.post(server.url + PATH, json=long), 400, "messages", "context_length_exceeded")
    assert "4096" in text and "5017" in text


@pytest.mark.parametrize(
    ("body", "kind", "status", "code"),
    [
        (b"{", "application/json", 400, None),
        (b"\xff", "application/json; charset=utf-8", 400, None),
        (b'{"model":"tiny","messages":[{"role":"user","content":"\\ud800"}]}', "application/json", 400, None),
        (b"{}", "text/plain", 415, "unsupported_media_type"),
        (b"model=tiny", "application/x-www-form-urlencoded", 415, "unsupported_media_type"),
    ],
)
def test_wrong_bodies(server: Any, body: bytes, kind: str, status: int, code: str | None) -> None:
    check(httpx.post(server.url + PATH, content=body, headers={"content-type": kind}), status, None, code)


def test_compressed_bodies_are_refused(server: Any) -> None:
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    check(httpx.post(server.url + PATH, content=b"{}", headers=headers), 415, None, "unsupported_media_type")


def test_wrong_paths_and_methods(server: Any) -> None:
    assert "/v1/nothing" in check(httpx.post(server.url + "/v1/nothing", json={}), 404, None, "not_found")
    reply = httpx.get(server.url + PATH)
    assert "GET" in check(reply, 405, None, "method_not_allowed")
    assert reply.headers["allow"] == "POST"
    check(httpx.post(server.url + "/health"), 405, None, "method_not_allowed")


def test_the_clients_exceptions(server: Any) -> None:
    create = server.client().chat.completions.create
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        create(model="gpt-9", messages=GOOD["messages"])
    with pytest.raises(openai.BadRequestError, match="temperature") as caught:
        create(model="tiny", messages=GOOD["messages"], temperature=3)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        server.client().models.retrieve("gpt-9")


def test_draining_takes_nothing_new(server: Any) -> None:
    server.call(lambda: setattr(server.state, "draining", True))
    check(httpx.post(server.url + PATH, json=GOOD), 503, None, "shutting_down")
    assert httpx.get(server.url + "/health").json()["status"] == "draining"
    assert httpx.get(server.url + "/health").status_code == 503


def test_a_fault_of_ours_gives_nothing_away(server: Any) -> None:
    def broken(text: str) -> list[int]:
        raise ZeroDivisionError("secret detail")

    server.tokenizer.encode = broken
    text = check(httpx.post(server.url + PATH, json=GOOD), 500, None, "internal_error")
    assert text == "internal server error"


def test_models_and_front_page(make_server: Any) -> None:
    server = make_server(served_model_name="owner/tiny")
    [model] = server.client().models.list().data
    assert (model.id, model.object, model.owned_by, model.max_model_len) == ("owner/tiny", "model", "graphrt", 4096)
    assert server.client().models.retrieve("owner/tiny").id == "owner/tiny"
    assert httpx.get(server.url + "/v1/models/owner/tiny").json()["id"] == "owner/tiny"
    assert httpx.get(server.url + "/health").json() == {"status": "ok", "reason": ""}
    page = httpx.get(server.url + "/").text
    assert f"curl -N {server.url}/v1/chat/completions" in page and "owner/tiny" in page


def test_request_ids(server: Any) -> None:
    mine = httpx.post(server.url + PATH, json=GOOD, headers={"x-request-id": "my-id-1"})
    assert mine.headers["x-request-id"] == "my-id-1"
    drawn = [httpx.get(server.url + "/health").headers["x-request-id"] for _ in range(2)]
    assert drawn[0] != drawn[1]
    for bad in ("", "with space", "x" * 129):
        assert httpx.get(server.url + "/nothing", headers={"x-request-id": bad}).headers["x-request-id"] != bad


def test_metrics(server: Any) -> None:
    for _ in range(3):
        httpx.post(server.url + PATH, json=GOOD)
    httpx.post(server.url + PATH, json={**GOOD, "n": 0})
    reply = httpx.get(server.url + "/metrics")
    assert reply.headers["content-type"].startswith("text/plain")
    for line in (
        'graphrt:num_requests_running{model_name="tiny"} 2.0',
        'graphrt:num_requests_waiting{model_name="tiny"} 0.0',
        'graphrt:kv_cache_usage_perc{model_name="tiny"} 0.25',
        'graphrt:prompt_tokens_total{model_name="tiny"} 70.0',
        'graphrt:generation_tokens_total{model_name="tiny"} 0.0',
        'graphrt:prefix_cache_queries_total{model_name="tiny"} 0.0',
        'graphrt:prefix_cache_hits_total{model_name="tiny"} 0.0',
        'graphrt:num_preemptions_total{model_name="tiny"} 0.0',
        'graphrt:eager_steps_total{model_name="tiny"} 0.0',
        'graphrt:host_time_per_step_seconds{model_name="tiny",quantile="0.99"} 0.0',
        'graphrt:kv_blocks{model_name="tiny",state="free"} 96.0',
        'graphrt:request_success_total{finished_reason="stop",model_name="tiny"} 3.0',
        'graphrt:time_to_first_token_seconds_count{model_name="tiny"} 3.0',
        'graphrt:inter_token_latency_seconds_count{model_name="tiny"} 42.0',
        'graphrt:e2e_request_latency_seconds_count{model_name="tiny"} 3.0',
        'graphrt:http_requests_total{route="/v1/chat/completions",status="200"} 3.0',
        'graphrt:http_requests_total{route="/v1/chat/completions",status="400"} 1.0',
    ):
        assert line in reply.text.splitlines(), line
    assert 'graphrt:e2e_request_latency_seconds_bucket{le="+Inf",model_name="tiny"} 3.0' in reply.text
    assert "process_resident_memory_bytes" in reply.text
