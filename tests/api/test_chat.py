"""POST /v1/chat/completions through the openai client and, for the bytes on the wire, through httpx."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from typing import Any

import httpx
import openai
import pytest

from graphrt.api.prompt_room import PromptRoom
from graphrt.errors import RequestError

EOS = 256
HI: list[Any] = [{"role": "user", "content": "hi"}]


def events(server: Any, **fields: Any) -> list[str]:
    """The data of every event of a streamed reply."""
    body = {"model": "tiny", "messages": HI, "stream": True, **fields}
    reply = httpx.post(server.url + "/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    blocks = reply.text.split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") for block in blocks)
    return [block.removeprefix("data: ") for block in blocks]


def test_a_whole_reply(server: Any) -> None:
    reply = server.client().chat.completions.create(
        model="tiny",
        messages=HI,
        temperature=0.5,
        top_p=0.9,
        seed=7,
        max_tokens=20,
        extra_body={"top_k": 5, "min_p": 0.1},
    )
    assert reply.id.startswith("chatcmpl-") and reply.object == "chat.completion" and reply.model == "tiny"
    assert abs(reply.created - time.time()) < 10 and reply.system_fingerprint
    [choice] = reply.choices
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "stop", None)
    assert (choice.message.role, choice.message.content) == ("assistant", "Hello, wörld!")
    assert reply.usage is not None and reply.usage.prompt_tokens_details is not None
    prompt = len("user: hi\nassistant:")
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (prompt, 15)
    assert (reply.usage.total_tokens, reply.usage.prompt_tokens_details.cached_tokens) == (prompt + 15, 3)
    [request] = server.engine.requests
    assert bytes(request.tokens) == b"user: hi\nassistant:"
    assert (request.max_tokens, request.stop_ids) == (20, [EOS])
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, sampling.seed) == (
        0.5,
        0.9,
        5,
        0.1,
        7,
    )


def test_the_room_left_is_the_default_length(server: Any) -> None:
    server.client().chat.completions.create(model="tiny", messages=HI)
    assert server.engine.requests[0].max_tokens == 4096 - len("user: hi\nassistant:")


def test_a_stream_field_by_field(server: Any) -> None:
    *chunks, done = events(server, stream_options={"include_usage": True})
    assert done == "[DONE]"
    parsed = [json.loads(chunk) for chunk in chunks]
    assert len({(c["id"], c["created"], c["model"], c["object"], c["system_fingerprint"]) for c in parsed}) == 1
    *steps, usage = parsed
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 15
    assert all(step["usage"] is None and len(step["choices"]) == 1 for step in steps)
    deltas = [step["choices"][0]["delta"] for step in steps]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert all(set(delta) == {"content"} and delta["content"] for delta in deltas[1:-1])
    assert deltas[-1] == {}
    assert [step["choices"][0]["finish_reason"] for step in steps] == [None] * (len(steps) - 1) + ["stop"]
    assert "".join(delta.get("content", "") for delta in deltas) == "Hello, wörld!"


def test_without_being_asked_a_stream_says_nothing_of_usage(server: Any) -> None:
    *chunks, _ = events(server, stream_options={"include_usage": False})
    assert all("usage" not in json.loads(chunk) and json.loads(chunk)["choices"] for chunk in chunks)


def test_the_client_streams(server: Any) -> None:
    stream = server.client().chat.completions.create(
        model="tiny", messages=HI, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hello, wörld!"
    assert chunks[-1].usage.completion_tokens == 15


def test_tokens_that_wait_together_are_one_event(server: Any) -> None:
    async def burst(stream: Any) -> None:
        stream.put("one ")
        stream.put("two three ")  # while the head of the reply is sent
        stream.put("four", "length")

    server.engine.script = burst
    *chunks, _ = events(server)
    contents = [json.loads(chunk)["choices"][0]["delta"].get("content") for chunk in chunks]
    assert contents == ["", "one ", "two three four", None]
    assert json.loads(chunks[-1])["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [True, False])
def test_a_stop_string_ends_the_reply_and_the_work(server: Any, stream: bool) -> None:
    async def endless(fake: Any) -> None:
        for char in "one EN two END three":
            fake.put(char)
            await asyncio.sleep(0)
        await fake.cancelled.wait()

    server.engine.script = endless
    if stream:
        *chunks, _ = events(server, stop=["END"], stream_options={"include_usage": True})
        parsed = [json.loads(chunk) for chunk in chunks]
        text = "".join(c["choices"][0]["delta"].get("content", "") for c in parsed[:-1])
        finish, count = parsed[-2]["choices"][0]["finish_reason"], parsed[-1]["usage"]["completion_tokens"]
    else:
        reply = server.client().chat.completions.create(model="tiny", messages=HI, stop="END")
        text, finish = reply.choices[0].message.content, reply.choices[0].finish_reason
        count = reply.usage.completion_tokens
    assert (text, finish, count) == ("one EN two ", "stop", len("one EN two END"))
    assert server.engine.cancelled == [0]
    assert server.metric('graphrt:request_success_total{finished_reason="stop",model_name="tiny"}') == 1
    assert server.metric('graphrt:request_success_total{finished_reason="abort",model_name="tiny"}') == 0


def test_an_error_before_the_first_token_has_a_status(server: Any) -> None:
    async def full(stream: Any) -> None:
        stream.fail(RequestError("the queue is full: 16 requests wait", status=429))

    server.engine.script = full
    for stream in (True, False):
        with pytest.raises(openai.RateLimitError, match="queue is full") as caught:
            server.client().chat.completions.create(model="tiny", messages=HI, stream=stream)
        assert caught.value.response.headers["retry-after"] == "1"
        assert caught.value.body["type"] == "rate_limit_error"
    assert server.call(lambda: len(server.state.live)) == 0


def test_an_error_in_mid_stream_is_an_event(server: Any) -> None:
    async def breaks(stream: Any) -> None:
        stream.put("so far")
        await asyncio.sleep(0.02)
        stream.fail(RequestError("row 3 gave NaN", status=500))

    server.engine.script = breaks
    last = json.loads(events(server)[-1])
    assert last["error"]["message"] == "row 3 gave NaN" and last["error"]["type"] == "server_error"
    with pytest.raises(openai.APIError, match="row 3 gave NaN"):
        list(server.client().chat.completions.create(model="tiny", messages=HI, stream=True))
    with pytest.raises(openai.InternalServerError, match="row 3 gave NaN"):
        server.client().chat.completions.create(model="tiny", messages=HI)
    assert server.metric('graphrt:request_success_total{finished_reason="error",model_name="tiny"}') == 3


async def slow_forever(stream: Any) -> None:
    while not stream.cancelled.is_set():
        stream.put("x")
        await asyncio.sleep(0.002)


async def silent(stream: Any) -> None:
    await stream.cancelled.wait()


@pytest.mark.parametrize("script", [slow_forever, silent])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_cancels_at_once(server: Any, script: Any, stream: bool) -> None:
    server.engine.script = script
    body = {"model": "tiny", "messages": HI, "stream": stream}
    timeout = httpx.Timeout(5, read=0.2 if script is silent or not stream else 5)
    with httpx.Client(timeout=timeout) as client:
        try:
            with client.stream("POST", server.url + "/v1/chat/completions", json=body) as reply:
                next(reply.iter_bytes())
        except httpx.ReadTimeout:
            pass
    server.until(lambda: server.engine.cancelled == [0], 1.0)
    server.until(lambda: not server.state.live, 1.0)
    assert server.metric('graphrt:request_success_total{finished_reason="abort",model_name="tiny"}') == 1
    server.until(lambda: sum(n for (_, s), n in server.state.metrics.http.items() if s == "499") == 1)


def test_many_streams_with_random_cancels(server: Any) -> None:
    async def paced(stream: Any) -> None:
        text = f"reply {stream.request.sampling.seed} "
        for _ in range(30):
            if stream.cancelled.is_set():
                return
            stream.put(text)
            await asyncio.sleep(0.003)
        stream.put([EOS], "stop")

    server.engine.script = paced
    draw = random.Random(3)
    leave_after = [draw.choice([None, draw.randrange(1, 20)]) for _ in range(20)]
    results: dict[int, str] = {}

    def run(seed: int, leave: int | None) -> None:
        stream = server.client().chat.completions.create(model="tiny", messages=HI, stream=True, seed=seed)
        text = ""
        with stream:
            for count, chunk in enumerate(stream):
                text += chunk.choices[0].delta.content or ""
                if count == leave:
                    break
        results[seed] = text

    threads = [threading.Thread(target=run, args=case) for case in enumerate(leave_after)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(results) == 20
    for seed, leave in enumerate(leave_after):
        whole = f"reply {seed} " * 30
        assert results[seed] == whole if leave is None else whole.startswith(results[seed])
    server.until(lambda: not server.state.live)
    left = sum(leave is not None for leave in leave_after)
    assert 0 < left < 20
    assert server.call(lambda: len(server.engine.cancelled)) == left
    assert server.metric('graphrt:request_success_total{finished_reason="stop",model_name="tiny"}') == 20 - left
    assert server.metric('graphrt:request_success_total{finished_reason="abort",model_name="tiny"}') == left


def test_a_dead_engine_fails_everybody_clearly(server: Any) -> None:
    server.engine.script = slow_forever
    errors: list[Exception] = []
    begun = threading.Semaphore(0)

    def run(stream: bool) -> None:
        try:
            if stream:
                for _ in server.client().chat.completions.create(model="tiny", messages=HI, stream=True):
                    begun.release()
            else:
                begun.release()
                server.client().chat.completions.create(model="tiny", messages=HI)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(stream,)) for stream in (True, False)]
    for thread in threads:
        thread.start()
    server.until(lambda: len(server.engine.streams) == 2)
    assert begun.acquire(timeout=5) and begun.acquire(timeout=5)
    server.call(lambda: server.engine.die("killed by signal 9"))
    for thread in threads:
        thread.join(5)
    assert len(errors) == 2 and all("killed by signal 9" in str(error) for error in errors)
    assert {type(error) for error in errors} == {openai.APIError, openai.InternalServerError}
    with pytest.raises(openai.InternalServerError, match="killed by signal 9") as caught:
        server.client().chat.completions.create(model="tiny", messages=HI)
    assert caught.value.status_code == 503 and caught.value.code == "engine_dead"
    health = httpx.get(server.url + "/health")
    assert health.status_code == 503 and health.json() == {"status": "dead", "reason": "killed by signal 9"}
    assert server.metric('graphrt:engine_up{model_name="tiny"}') == 0


def test_a_long_prompt_does_not_hold_up_others(server: Any) -> None:
    """Not those with a short prompt, nor those whose prompt takes a thread as well."""
    slow = threading.Event()
    encode = server.tokenizer.encode

    def blocked(text: str) -> list[int]:
        if len(text) > 100_000:
            assert slow.wait(10)
        tokens: list[int] = encode(text)[:100]
        return tokens

    server.tokenizer.encode = blocked
    server.state.room = PromptRoom(1 << 21, 1)
    results: list[Any] = []

    def ask(chars: int) -> Any:
        messages: list[Any] = [{"role": "user", "content": "x" * chars}]
        return server.client(timeout=5).chat.completions.create(model="tiny", messages=messages)

    threads = [threading.Thread(target=lambda: results.append(ask(1_000_000))) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for chars in (2, 5000, 2, 5000):
            assert ask(chars).choices
        assert not results
    finally:
        slow.set()
        for thread in threads:
            thread.join(10)
    assert [result.choices[0].message.content for result in results] == ["Hello, wörld!"] * 3
