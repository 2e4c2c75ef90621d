"""Tokenizing, versions, readiness, the log of steps."""

from __future__ import annotations

import threading
from typing import Any

import httpx
import pytest

from graphrt import __version__

EOS, BOS = 256, 257
CHAT = [{"role": "user", "content": "hö"}]


def post(server: Any, path: str, status: int = 200, **fields: Any) -> Any:
    reply = httpx.post(server.url + path, json=fields)
    assert reply.status_code == status, reply.text
    return reply.json() if status == 200 else reply.json()["error"]


def test_a_raw_prompt_is_tokenized(server: Any) -> None:
    plain = {"count": 4, "max_model_len": 4096, "tokens": [BOS, 104, 195, 182], "token_strs": None}
    assert post(server, "/tokenize", prompt="hö") == plain
    assert post(server, "/tokenize", prompt="hö", model="tiny", add_special_tokens=True) == plain
    spelt = post(server, "/tokenize", prompt="hi", add_special_tokens=False, return_token_strs=True)
    assert (spelt["tokens"], spelt["token_strs"]) == ([104, 105], ["h", "i"])
    assert post(server, "/tokenize", prompt="", add_special_tokens=False)["tokens"] == []


def test_a_conversation_is_tokenized_as_a_chat_would_see_it(server: Any) -> None:
    expected = {"add_generation_prompt": b"user: h\xc3\xb6\nassistant:", "not": b"user: h\xc3\xb6"}
    assert bytes(post(server, "/tokenize", messages=CHAT)["tokens"]) == expected["add_generation_prompt"]
    assert bytes(post(server, "/tokenize", messages=CHAT, add_generation_prompt=False)["tokens"]) == expected["not"]
    assert bytes(post(server, "/tokenize", messages=CHAT, continue_final_message=True)["tokens"]) == expected["not"]
    special = post(server, "/tokenize", messages=CHAT, add_special_tokens=True, chat_template_kwargs={"k": 1})
    assert special["tokens"] == [BOS, *b"user: h\xc3\xb6\nk=1\nassistant:"]


@pytest.mark.parametrize("count", [3, 5000])
def test_tokens_become_text_again(server: Any, count: int) -> None:
    assert post(server, "/detokenize", tokens=[BOS, *"hö".encode() * count, EOS]) == {
        "prompt": "<bos>" + "hö" * count + "<eos>"
    }
    assert post(server, "/detokenize", tokens=[0xF0], model="tiny") == {"prompt": "\ufffd"}
    assert post(server, "/detokenize", tokens=[]) == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": CHAT}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": CHAT, "chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
        (
            "/tokenize",
            {"messages": CHAT, "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [258]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [2**70]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
    ],
)
def test_what_cannot_be_done_is_named(server: Any, path: str, fields: dict[str, Any], param: str) -> None:
    assert post(server, path, 400, **fields)["param"] == param


def test_another_model_is_not_found(server: Any) -> None:
    for path, fields in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [97]})):
        assert post(server, path, 404, model="other", **fields)["param"] == "model"


def test_a_long_text_is_tokenized_in_a_thread(server: Any) -> None:
    post(server, "/tokenize", prompt="x" * 100)
    post(server, "/tokenize", prompt="x" * 10_000)
    assert [name.startswith("graphrt-encode") for name in server.tokenizer.threads] == [False, True]


def test_tokenizing_goes_on_without_an_engine(server: Any) -> None:
    server.call(lambda: server.engine.die("gone"))
    assert post(server, "/tokenize", prompt="a")["tokens"] == [BOS, 97]


def test_version(server: Any) -> None:
    assert httpx.get(server.url + "/version").json() == {"version": __version__}


def test_ready_only_while_serving(server: Any) -> None:
    reply = httpx.get(server.url + "/ready")
    assert (reply.status_code, reply.json()) == (200, {"status": "ready", "reason": ""})
    server.call(lambda: setattr(server.state, "draining", True))
    assert httpx.get(server.url + "/ready").status_code == 503
    assert httpx.get(server.url + "/ready").json()["status"] == "draining"
    server.call(lambda: server.engine.die("killed by signal 9"))
    reply = httpx.get(server.url + "/ready")
    assert (reply.status_code, reply.json()) == (503, {"status": "dead", "reason": "killed by signal 9"})


def test_the_last_steps(server: Any) -> None:
    steps = httpx.get(server.url + "/debug/steps").json()["steps"]
    assert [step["step"] for step in steps] == [0, 1, 2, 3, 4]
    assert steps[4] == {"step": 4, "kind": "decode", "batch": 8, "rows": 5, "ms": 1.5, "host_us": 24.0}
    assert len(httpx.get(server.url + "/debug/steps?n=2").json()["steps"]) == 2
    for bad in ("0", "-1", "1001", "x", "", "1.5", "9" * 100, "٣"):
        reply = httpx.get(server.url + "/debug/steps", params={"n": bad})
        assert reply.status_code == 400 and reply.json()["error"]["param"] == "n"
    server.call(lambda: server.engine.die("gone"))
    assert httpx.get(server.url + "/debug/steps").status_code == 503


def test_other_requests_go_on_while_a_text_is_tokenized(server: Any) -> None:
    go = threading.Event()
    encode = server.tokenizer.encode

    def blocked(text: str, **options: Any) -> list[int]:
        if len(text) > 5000:
            assert go.wait(10)
        tokens: list[int] = encode(text, **options)
        return tokens

    server.tokenizer.encode = blocked
    thread = threading.Thread(target=lambda: post(server, "/tokenize", prompt="x" * 10_000))
    thread.start()
    try:
        assert post(server, "/tokenize", prompt="a")["count"] == 2
        assert thread.is_alive()
    finally:
        go.set()
        thread.join(10)
