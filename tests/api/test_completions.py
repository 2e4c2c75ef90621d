"""POST /v1/completions through the openai client and, for the bytes on the wire, through httpx."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import httpx
import openai
import pytest

EOS, BOS = 256, 257
PATH = "/v1/completions"


async def parrot(stream: Any) -> None:
    """The seed, which tells replies apart, and the prompt's length."""
    for char in f"<{stream.request.sampling.seed % 1000}:{len(stream.request.tokens)}>":
        stream.put(char)
        await asyncio.sleep(0)
    stream.put([EOS], "stop", 2)


def events(server: Any, **fields: Any) -> list[Any]:
    """Every event of a streamed reply but its mark of the end."""
    reply = httpx.post(server.url + PATH, json={"model": "tiny", "stream": True, **fields})
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    *blocks, done, rest = reply.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


def refused(server: Any, **fields: Any) -> Any:
    reply = httpx.post(server.url + PATH, json={"model": "tiny", **fields})
    assert reply.status_code == 400, reply.text
    assert server.engine.requests == []
    return reply.json()["error"]


def test_a_whole_reply(server: Any) -> None:
    reply = server.client().completions.create(model="tiny", prompt="Say", temperature=0.5, seed=7)
    assert reply.id.startswith("cmpl-") and reply.object == "text_completion" and reply.model == "tiny"
    assert abs(reply.created - time.time()) < 10 and reply.system_fingerprint
    [choice] = reply.choices
    assert (choice.index, choice.text, choice.finish_reason, choice.logprobs) == (0, "Hello, wörld!", "stop", None)
    usage = reply.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (4, 15, 19)
    assert usage.prompt_tokens_details.cached_tokens == 3
    [request] = server.engine.requests
    assert request.tokens == [BOS, *b"Say"] and request.max_tokens == 16 and request.stop_ids == [EOS]
    assert (request.sampling.temperature, request.sampling.seed) == (0.5, 7)


@pytest.mark.parametrize(
    ("prompt", "tokens", "texts"),
    [
        ("ab", [[BOS, 97, 98]], ["ab"]),
        (["ab", "c"], [[BOS, 97, 98], [BOS, 99]], ["ab", "c"]),
        ([97, 98], [[97, 98]], ["ab"]),
        ([[97, 98], [BOS, 99], [195, 182]], [[97, 98], [BOS, 99], [195, 182]], ["ab", "c", "ö"]),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_every_kind_of_prompt_with_its_echo(server: Any, prompt: Any, tokens: Any, texts: Any, stream: bool) -> None:
    server.engine.script = parrot
    expected = [f"{text}<{5}:{len(ids)}>" for text, ids in zip(texts, tokens, strict=True)]
    made = server.client().completions.create(model="tiny", prompt=prompt, echo=True, seed=5, stream=stream)
    if stream:
        got = [""] * len(texts)
        for chunk in made:
            got[chunk.choices[0].index] += chunk.choices[0].text
    else:
        assert [choice.index for choice in made.choices] == list(range(len(texts)))
        got = [choice.text for choice in made.choices]
        assert made.usage.prompt_tokens == sum(map(len, tokens))
        assert made.usage.completion_tokens == sum(
            len(text) - len(t) + 1 for text, t in zip(expected, texts, strict=True)
        )
        assert made.usage.prompt_tokens_details.cached_tokens == 2 * len(texts)
    assert got == expected
    assert sorted(request.tokens for request in server.engine.requests) == sorted(tokens)


def test_prompts_without_a_seed_do_not_share_their_noise(server: Any) -> None:
    server.client().completions.create(model="tiny", prompt=["same", "same"], n=2)
    assert len({request.sampling.seed for request in server.engine.requests}) == 4


def test_a_stream_field_by_field(server: Any) -> None:
    server.engine.script = parrot
    *steps, usage = events(server, prompt=["a", "bc"], n=2, seed=5, stream_options={"include_usage": True})
    assert usage["choices"] == [] and usage["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": sum(
            len(f"<{r.sampling.seed % 1000}:{len(r.tokens)}>") + 1 for r in server.engine.requests
        ),
        "total_tokens": usage["usage"]["completion_tokens"] + 5,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    assert (
        len({(c["id"], c["created"], c["model"], c["object"], c["system_fingerprint"]) for c in [*steps, usage]}) == 1
    )
    assert all(step["usage"] is None and len(step["choices"]) == 1 for step in steps)
    texts, ends = [""] * 4, [0] * 4
    for choice in (step["choices"][0] for step in steps):
        assert set(choice) == {"index", "text", "finish_reason", "logprobs"}
        assert not ends[choice["index"]], "nothing comes after the end"
        texts[choice["index"]] += choice["text"]
        ends[choice["index"]] += choice["finish_reason"] == "stop"
    assert ends == [1] * 4
    assert texts[0] == "<5:2>" and texts[2] == "<5:3>"
    assert len(set(texts)) == 4
    order = [step["choices"][0]["index"] for step in steps]
    assert order != sorted(order), "the replies are interleaved"


def test_without_being_asked_a_stream_says_nothing_of_usage(server: Any) -> None:
    assert all("usage" not in chunk and chunk["choices"] for chunk in events(server, prompt="a"))


def test_the_default_length_is_16_or_what_room_there_is(server: Any) -> None:
    server.client().completions.create(model="tiny", prompt=[97] * 4090)
    assert server.engine.requests[0].max_tokens == 6


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_in_lists(server: Any, stream: bool) -> None:
    async def say(fake: Any) -> None:
        fake.put("aö")
        await asyncio.sleep(0)
        fake.put("! EN")
        fake.put("Dx")

    server.engine.script = say
    fields: dict[str, Any] = {"model": "tiny", "prompt": "hé", "echo": True, "logprobs": 1, "stop": "END"}
    if stream:
        chunks = events(server, **fields)
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        parts = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
        logprobs = {name: [item for part in parts for item in part[name]] for name in parts[0]}
    else:
        [choice] = httpx.post(server.url + PATH, json=fields).json()["choices"]
        text, logprobs = choice["text"], choice["logprobs"]
    assert text == "héaö! "
    assert logprobs["tokens"] == [
        "<bos>",
        "h",
        r"bytes:\xc3",
        r"bytes:\xa9",
        "a",
        r"bytes:\xc3",
        r"bytes:\xb6",
        "!",
        " ",
    ]
    assert logprobs["text_offset"] == [0, 0, 1, 1, 2, 3, 3, 4, 5]
    values = logprobs["token_logprobs"]
    assert values[0] is None and values[1:] == [-1.5 - byte / 1024 for byte in "héaö! ".encode()]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][1] == {"a": -0.25, "h": values[1]}  # the best and its own
    assert logprobs["top_logprobs"][4] == {"b": -0.25, "a": values[4]}
    assert all(len(best) == 2 for best in logprobs["top_logprobs"][1:])


def test_logprobs_of_the_prompt_alone(server: Any) -> None:
    reply = server.client().completions.create(model="tiny", prompt=[97, 98, 99], echo=True, logprobs=0, max_tokens=0)
    [choice] = reply.choices
    assert (choice.text, choice.finish_reason) == ("abc", "length")
    assert choice.logprobs.tokens == ["a", "b", "c"] and choice.logprobs.token_logprobs[0] is None
    assert choice.logprobs.top_logprobs[2] == {"c": choice.logprobs.token_logprobs[2]}
    assert (reply.usage.completion_tokens, reply.usage.total_tokens) == (0, 3)
    assert server.engine.requests[0].max_tokens == 1
    assert "".join(c["choices"][0]["text"] for c in events(server, prompt="ab", echo=True, max_tokens=0)) == "ab"


def test_prompt_logprobs_by_token_id(server: Any) -> None:
    reply = httpx.post(server.url + PATH, json={"model": "tiny", "prompt": [97, 98], "prompt_logprobs": 1, "n": 2})
    for choice in reply.json()["choices"]:
        assert choice["prompt_logprobs"] == [
            None,
            {
                "97": {"logprob": -0.25, "rank": 1, "decoded_token": "a"},
                "98": {"logprob": -1.5 - 98 / 1024, "rank": 2, "decoded_token": "b"},
            },
        ]
        assert choice["logprobs"] is None
    assert [request.prompt_logprobs for request in server.engine.requests] == [1, -1]


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({"prompt": []}, "prompt", "empty list"),
        ({"prompt": [[97], []]}, "prompt", r"prompt[1] is empty"),
        ({"prompt": ["a", 98]}, "prompt", "mixes"),
        ({"prompt": [97, [98]]}, "prompt", "mixes"),
        ({"prompt": [97, 258]}, "prompt", "token id 258: the vocabulary is 0 to 257"),
        ({"prompt": [[97], [-1]]}, "prompt", "prompt[1] holds token id -1"),
        ({"prompt": [1.5]}, "prompt[0]", "expected"),
        ({}, "prompt", "required"),
        ({"prompt": "a", "suffix": "b"}, "suffix", "does not support"),
        ({"prompt": "a", "best_of": 3}, "best_of", "best_of is 3"),
        ({"prompt": "a", "best_of": 1, "n": 2}, "best_of", "give n, 2"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens", "echo"),
        ({"prompt": "a", "logprobs": 21}, "logprobs", "20"),
        ({"prompt": "a", "logprobs": True}, "logprobs", "int"),
        ({"prompt": "a", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "stream"),
        ({"prompt": ["a"] * 13, "n": 2}, "n", "13 prompts: this server takes at most 24"),
        ({"prompt": [97] * 4096}, "prompt", "no room"),
        ({"prompt": [97] * 4090, "max_tokens": 7}, "max_tokens", "at most 6"),
        ({"prompt": "a", "min_tokens": 17}, "min_tokens", "at most 16"),
        ({"prompt": "a", "response_format": {"type": "json_object"}}, "response_format", "does not support"),
    ],
)
def test_wrong_fields(server: Any, fields: dict[str, Any], param: str, text: str) -> None:
    error = refused(server, **fields)
    assert error["param"] == param and text in error["message"]


def test_harmless_values_are_taken(server: Any) -> None:
    reply = server.client().completions.create(
        model="tiny", prompt="a", suffix="", best_of=2, n=2, user="u", logit_bias={}, extra_body={"new": [1]}
    )
    assert [choice.text for choice in reply.choices] == ["Hello, wörld!"] * 2
    with pytest.raises(openai.NotFoundError):
        server.client().completions.create(model="other", prompt="a")
