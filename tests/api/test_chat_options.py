"""Every option of a chat: what reaches the engine, and what the client gets back."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from typing import Any

import httpx
import openai
import pytest

from graphrt.api.params import choice_seed
from graphrt.errors import RequestError
from graphrt.seam.records import Logprob, TokenOut

EOS = 256
HI: list[Any] = [{"role": "user", "content": "hi"}]
PROMPT = b"user: hi\nassistant:"
PATH = "/v1/chat/completions"


def chunks_of(server: Any, **fields: Any) -> list[Any]:
    """The events of a streamed reply but the mark of its end."""
    reply = httpx.post(server.url + PATH, json={"model": "tiny", "messages": HI, "stream": True, **fields})
    assert reply.status_code == 200, reply.text
    *blocks, done, _ = reply.text.split("\n\n")
    assert done == "data: [DONE]"
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


def test_options_reach_the_engine(server: Any) -> None:
    server.client().chat.completions.create(
        model="tiny",
        messages=HI,
        presence_penalty=0.5,
        frequency_penalty=-0.25,
        logit_bias={"97": -100, "98": 2.5},
        max_completion_tokens=9,
        seed=3,
        user="somebody",
        metadata={"a": "b"},
        store=True,
        service_tier="auto",
        extra_body={
            "repetition_penalty": 1.25,
            "min_tokens": 4,
            "stop_token_ids": [33],
            "ignore_eos": True,
            "chat_template_kwargs": {"style": "short"},
            "a_field_of_tomorrow": {"x": 1},
        },
    )
    [request] = server.engine.requests
    sampling = request.sampling
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.5, -0.25, 1.25)
    assert request.logit_bias == [(97, -math.inf), (98, 2.5)]
    assert (request.max_tokens, request.min_tokens, request.stop_ids) == (9, 4, [33])
    assert (request.logprobs, request.prompt_logprobs) == (-1, -1)
    assert b"style=short" in bytes(request.tokens)


def test_a_model_with_more_end_tokens_than_the_engine_takes(server: Any) -> None:
    type(server.tokenizer).eos_ids, before = tuple(range(240, 257)), type(server.tokenizer).eos_ids
    try:

        async def say(stream: Any) -> None:
            stream.put(b"hi\xfathere")  # 250 is none of the eight that the engine knows
            await stream.cancelled.wait()

        server.engine.script = say
        reply = server.client().chat.completions.create(model="tiny", messages=HI, extra_body={"stop_token_ids": [7]})
    finally:
        type(server.tokenizer).eos_ids = before
    assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == ("hi", "stop")
    assert reply.usage.completion_tokens == 3
    assert server.engine.requests[0].stop_ids == [7, *range(240, 247)] and server.engine.cancelled == [0]


@pytest.mark.parametrize("stream", [False, True])
def test_the_stop_string_can_be_kept(server: Any, stream: bool) -> None:
    async def say(fake: Any) -> None:
        for char in "one END two":
            fake.put(char)
            await asyncio.sleep(0)
        await fake.cancelled.wait()

    server.engine.script = say
    fields: dict[str, Any] = {"stop": ["END"], "include_stop_str_in_output": True}
    if stream:
        text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks_of(server, **fields))
    else:
        body = {"model": "tiny", "messages": HI, **fields}
        text = httpx.post(server.url + PATH, json=body).json()["choices"][0]["message"]["content"]
    assert text == "one END"


def test_a_turn_is_continued(server: Any) -> None:
    messages = [*HI, {"role": "assistant", "content": "I am"}]
    body = {"model": "tiny", "messages": messages, "continue_final_message": True}
    assert httpx.post(server.url + PATH, json=body).status_code == 200
    assert bytes(server.engine.requests[0].tokens) == b"user: hi\nassistant: I am"
    reply = httpx.post(server.url + PATH, json={**body, "add_generation_prompt": True})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "continue_final_message"
    reply = httpx.post(
        server.url + PATH, json={**body, "continue_final_message": False, "add_generation_prompt": False}
    )
    assert reply.status_code == 200 and bytes(server.engine.requests[1].tokens) == b"user: hi\nassistant: I am"


# -- several replies ---------------------------------------------------------------------------------------------------


async def by_seed(stream: Any) -> None:
    for char in f"reply {stream.request.sampling.seed}":
        stream.put(char)
        await asyncio.sleep(0.001)
    stream.put([EOS], "stop", 16 if stream.request.id else 0)


def test_several_replies_have_seeds_of_their_own(server: Any) -> None:
    server.engine.script = by_seed
    reply = server.client().chat.completions.create(model="tiny", messages=HI, n=5, seed=11)
    expected = [f"reply {choice_seed(11, i)}" for i in range(5)]
    assert expected[0] == "reply 11"
    assert [(c.index, c.message.content, c.finish_reason) for c in reply.choices] == [
        (i, text, "stop") for i, text in enumerate(expected)
    ]
    assert reply.usage.prompt_tokens == len(PROMPT)
    assert reply.usage.completion_tokens == sum(len(text) + 1 for text in expected)
    assert reply.usage.prompt_tokens_details.cached_tokens == 0  # of the one that computed the prompt
    assert server.metric('graphrt:request_success_total{finished_reason="stop",model_name="tiny"}') == 5


def test_several_replies_stream_side_by_side(server: Any) -> None:
    server.engine.script = by_seed
    *chunks, usage = chunks_of(server, n=3, seed=11, stream_options={"include_usage": True})
    assert usage["choices"] == [] and usage["usage"]["prompt_tokens"] == len(PROMPT)
    per: dict[int, list[Any]] = {0: [], 1: [], 2: []}
    for chunk in chunks:
        [choice] = chunk["choices"]
        per[choice["index"]].append(choice)
    for i, choices in per.items():
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in choice["delta"] for choice in choices[1:])
        assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + ["stop"]
        assert choices[-1]["delta"] == {}
        assert "".join(c["delta"].get("content", "") for c in choices) == f"reply {choice_seed(11, i)}"
    order = [chunk["choices"][0]["index"] for chunk in chunks]
    assert order != sorted(order)


def test_the_first_reply_puts_the_prompt_in_the_cache(server: Any) -> None:
    go = asyncio.Event()

    async def wait_first(stream: Any) -> None:
        if stream.request.id == 0:
            await go.wait()
        await by_seed(stream)

    server.engine.script = wait_first
    replies: list[Any] = []
    thread = threading.Thread(
        target=lambda: replies.append(server.client().chat.completions.create(model="tiny", messages=HI, n=4))
    )
    thread.start()
    server.until(lambda: len(server.engine.requests) == 1)
    assert server.call(lambda: len(server.engine.requests)) == 1  # the others wait for its first token
    server.call(go.set)
    thread.join(10)
    assert len(replies[0].choices) == 4 and len({tuple(r.tokens) for r in server.engine.requests}) == 1


def test_one_refusal_ends_all_replies(server: Any) -> None:
    async def second_is_refused(stream: Any) -> None:
        if stream.request.id % 3 == 1:
            stream.fail(RequestError("the queue is full: 16 requests wait", status=429))
        else:
            while not stream.cancelled.is_set():
                stream.put("x")
                await asyncio.sleep(0.002)

    server.engine.script = second_is_refused
    with pytest.raises(openai.RateLimitError, match="queue is full"):
        server.client().chat.completions.create(model="tiny", messages=HI, n=3)
    server.until(lambda: not server.state.live)
    assert sorted(server.call(lambda: list(server.engine.cancelled))) == [0, 2]
    with pytest.raises(openai.APIError, match="queue is full"):
        list(server.client().chat.completions.create(model="tiny", messages=HI, n=3, stream=True))
    server.until(lambda: not server.state.live)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_cancels_all_replies(server: Any, stream: bool) -> None:
    async def forever(fake: Any) -> None:
        while not fake.cancelled.is_set():
            fake.put("x")
            await asyncio.sleep(0.002)

    server.engine.script = forever
    body = {"model": "tiny", "messages": HI, "stream": stream, "n": 4}
    with httpx.Client(timeout=httpx.Timeout(5, read=5 if stream else 0.2)) as client:
        try:
            with client.stream("POST", server.url + PATH, json=body) as reply:
                parts = reply.iter_bytes()
                while len(server.engine.requests) < 4:
                    next(parts)
        except httpx.ReadTimeout:
            pass
    server.until(lambda: sorted(server.engine.cancelled) == [0, 1, 2, 3], 1.0)
    server.until(lambda: not server.state.live, 1.0)
    assert server.metric('graphrt:request_success_total{finished_reason="abort",model_name="tiny"}') == 4


def test_replies_of_different_lengths(server: Any) -> None:
    async def by_id(stream: Any) -> None:
        for _ in range(stream.request.id * 3):
            stream.put("x")
            await asyncio.sleep(0)
        stream.put("x", "length")

    server.engine.script = by_id
    reply = server.client().chat.completions.create(model="tiny", messages=HI, n=20)
    assert [len(choice.message.content) for choice in reply.choices] == [1 + 3 * i for i in range(20)]


# -- log-probabilities -------------------------------------------------------------------------------------------------


async def tricky(stream: Any) -> None:
    """Characters of several tokens, one of them broken, and what looks like the stop string."""
    for part in ("ö", b"\xf0", b"\x9f\x98", b"\x80 E", "X ", b"\xff", "EN", "", "D of it"):
        stream.put(part)
        await asyncio.sleep(0)
    stream.put([EOS], "stop")


@pytest.mark.parametrize("stop", [None, "END", "X", "NOTHING"])
@pytest.mark.parametrize("keep", [False, True])
def test_logprobs_are_the_content(server: Any, stop: str | None, keep: bool) -> None:
    server.engine.script = tricky
    fields: dict[str, Any] = {"logprobs": True, "top_logprobs": 2, "stop": stop, "include_stop_str_in_output": keep}
    whole = httpx.post(server.url + PATH, json={"model": "tiny", "messages": HI, **fields}).json()["choices"][0]
    text, entries = whole["message"]["content"], whole["logprobs"]["content"]
    end = {"END": "END" if keep else "", "X": "X" if keep else ""}.get(stop or "", "END of it")
    assert text == ("ö😀 EX \ufffd" if stop != "X" else "ö😀 E") + end
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode(errors="replace") == text
    assert whole["logprobs"]["refusal"] is None
    for entry in entries:
        [byte] = entry["bytes"] or [EOS]
        assert entry["token"] == (chr(byte) if byte < 128 else rf"\x{byte:02x}" if byte < 256 else "<eos>")
        assert entry["logprob"] == -1.5 - byte / 1024
        first, second = entry["top_logprobs"]
        assert first == {"token": "a", "logprob": -0.25, "bytes": [97]}
        assert second["token"] == entry["token"] and second["logprob"] == entry["logprob"]
    chunks = [chunk["choices"][0] for chunk in chunks_of(server, **fields)]
    assert "".join(chunk["delta"].get("content", "") for chunk in chunks) == text
    assert [entry for chunk in chunks if chunk["logprobs"] for entry in chunk["logprobs"]["content"]] == entries
    assert chunks[0]["logprobs"] is None and chunks[-1]["logprobs"] is None
    seen = data = b""
    for chunk in chunks:  # no entry comes before its text
        seen += chunk["delta"].get("content", "").encode()
        data += bytes(b for entry in (chunk["logprobs"] or {"content": []})["content"] for b in entry["bytes"])
        assert seen.decode().startswith(data.decode(errors="replace"))


def test_the_client_reads_logprobs(server: Any) -> None:
    create = server.client().chat.completions.create
    reply = create(model="tiny", messages=HI, logprobs=True)
    content = reply.choices[0].logprobs.content
    assert bytes(b for entry in content for b in entry.bytes).decode() == reply.choices[0].message.content
    assert all(entry.top_logprobs == [] for entry in content)
    assert server.engine.requests[0].logprobs == 0
    assert create(model="tiny", messages=HI).choices[0].logprobs is None
    reply = create(model="tiny", messages=HI, logprobs=True, top_logprobs=20, n=2)
    assert [len(choice.logprobs.content) for choice in reply.choices] == [14, 14]


def test_infinities_are_numbers_in_json(server: Any) -> None:
    async def impossible(stream: Any) -> None:
        own = Logprob(97, -math.inf, 1, [(97, -math.inf), (98, math.nan)])
        stream.give(TokenOut(stream.request.id, [97], "length", 0, [own]))

    server.engine.script = impossible
    body = {"model": "tiny", "messages": HI, "logprobs": True, "top_logprobs": 2}
    [entry] = httpx.post(server.url + PATH, json=body).json()["choices"][0]["logprobs"]["content"]
    assert entry["logprob"] == -9999.0 and [best["logprob"] for best in entry["top_logprobs"]] == [-9999.0] * 2


def test_prompt_logprobs_stand_beside_the_choices(server: Any) -> None:
    reply = httpx.post(server.url + PATH, json={"model": "tiny", "messages": HI, "prompt_logprobs": 0, "n": 2}).json()
    shown = reply["prompt_logprobs"]
    assert len(shown) == len(PROMPT) and shown[0] is None
    assert [list(place) for place in shown[1:]] == [[str(byte)] for byte in PROMPT[1:]]
    assert shown[1]["115"] == {"logprob": -1.5 - 115 / 1024, "rank": 2, "decoded_token": "s"}
    assert "prompt_logprobs" not in httpx.post(server.url + PATH, json={"model": "tiny", "messages": HI}).json()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": 2}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"logit_bias": {str(i): 1.0 for i in range(301)}}, "logit_bias"),
        ({"logit_bias": {"258": 1.0}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 1e9}, "repetition_penalty"),
        ({"min_tokens": 10, "max_tokens": 9}, "min_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"stop_token_ids": list(range(65))}, "stop_token_ids"),
    ],
)
def test_wrong_values(server: Any, fields: dict[str, Any], param: str) -> None:
    reply = httpx.post(server.url + PATH, json={"model": "tiny", "messages": HI, **fields})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == param, reply.text
    assert server.engine.requests == []


@pytest.mark.parametrize("path", [PATH, "/v1/completions"])
def test_many_logprobs_are_written_in_a_thread(server: Any, path: str) -> None:
    """So that no stream waits: ten thousand tokens with twenty others each take a second."""

    async def long(stream: Any) -> None:
        for _ in range(8):
            stream.put("abcdefgh" * 16)
            await asyncio.sleep(0)
        stream.put([EOS], "stop")

    async def brief(stream: Any) -> None:
        stream.put("abc", "length")

    server.engine.script = long
    threads: list[str] = []
    spelling = server.tokenizer.is_special

    def noted(token: int) -> bool:
        threads.append(threading.current_thread().name)
        special: bool = spelling(token)
        return special

    server.tokenizer.is_special = noted
    chat = path == PATH
    asked = {"logprobs": True, "top_logprobs": 10} if chat else {"logprobs": 10}
    body = {"model": "tiny", "messages": HI, "prompt": "hi", "max_tokens": 2000, **asked}
    shown = httpx.post(server.url + path, json=body).json()["choices"][0]["logprobs"]
    names = [entry["token"] for entry in shown["content"]] if chat else shown["tokens"]
    assert "".join(names) == "abcdefgh" * 128
    assert {name.partition("_")[0] for name in threads} == {"graphrt-encode"}

    server.engine.script = brief
    threads.clear()
    assert httpx.post(server.url + path, json=body).status_code == 200
    assert threads and not any(name.startswith("graphrt-encode") for name in threads)
