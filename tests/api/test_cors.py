"""Calls from web pages: refused by browsers unless the page's origin was named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from graphrt.api.cors import check_origins
from graphrt.errors import ConfigError

PATH = "/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "authorization, x-stainless-os"}
ALLOW = "access-control-allow-origin"


def test_off_by_default(server: Any) -> None:
    reply = httpx.post(server.url + PATH, json=BODY, headers={"origin": "https://a.example"})
    assert reply.status_code == 200 and not any(name.startswith("access-control") for name in reply.headers)
    assert httpx.options(server.url + PATH, headers={"origin": "https://a.example", **PREFLIGHT}).status_code == 405


def test_named_origins_and_no_others(make_server: Callable[..., Any], tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-0123456789abcdef\n")
    server = make_server(cors_origins=("https://a.example", "http://localhost:5173"), api_key_files=(keys,))
    for origin in ("https://a.example", "http://localhost:5173"):
        asked = httpx.options(server.url + PATH, headers={"origin": origin, **PREFLIGHT})  # browsers send no key here
        assert asked.status_code == 200 and asked.headers[ALLOW] == origin
        assert "POST" in asked.headers["access-control-allow-methods"]
        assert "x-stainless-os" in asked.headers["access-control-allow-headers"]
        assert "access-control-allow-credentials" not in asked.headers
        refused = httpx.post(server.url + PATH, json=BODY, headers={"origin": origin})
        assert refused.status_code == 401 and refused.headers[ALLOW] == origin  # the page may read why
    stranger = httpx.options(server.url + PATH, headers={"origin": "https://b.example", **PREFLIGHT})
    assert stranger.status_code == 400 and ALLOW not in stranger.headers


@pytest.mark.parametrize("stream", [False, True])
def test_replies_of_all_kinds(make_server: Callable[..., Any], stream: bool) -> None:
    server = make_server(cors_origins=("*",))
    headers = {"origin": "https://a.example"}
    reply = httpx.post(server.url + PATH, json={**BODY, "stream": stream}, headers=headers)
    assert reply.status_code == 200 and reply.headers[ALLOW] == "*"
    assert "x-request-id" in reply.headers["access-control-expose-headers"]
    assert httpx.get(server.url + "/nothing", headers=headers).headers[ALLOW] == "*"

    def broken(text: str) -> list[int]:
        raise ZeroDivisionError

    server.tokenizer.encode = broken
    fault = httpx.post(server.url + PATH, json=BODY, headers=headers)
    assert fault.status_code == 500 and fault.headers[ALLOW] == "*"


@pytest.mark.parametrize(
    "origin", ["example.org", "https://", "https://a.example/path", "https://a b", "", "https://u@a"]
)
def test_what_is_no_origin(origin: str) -> None:
    with pytest.raises(ConfigError, match="CORS origin"):
        check_origins([origin])


def test_what_is_an_origin() -> None:
    check_origins(["*", "null", "https://a.example", "http://[::1]:8080", "chrome-extension://abcdef"])
