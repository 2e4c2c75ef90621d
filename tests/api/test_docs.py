"""The API's own pages: complete, self-contained, true to this server's settings."""

from __future__ import annotations

import re
from typing import Any

import httpx
import msgspec


def test_every_route_is_documented_and_nothing_else(server: Any) -> None:
    document = httpx.get(server.url + "/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    name = server.state.settings.model_name
    assert document["components"]["schemas"]["ChatRequest"]["properties"]["model"]["enum"] == [name]
    for path, operations in document["paths"].items():
        url = server.url + path.replace("{name}", name)
        for method in operations:
            reply = httpx.request(method, url, content=b"{}", headers={"content-type": "application/json"})
            assert reply.status_code in (200, 400), (method, path, reply.status_code)
            assert str(reply.status_code) in operations[method]["responses"]
            wrong = httpx.request("DELETE", url)
            assert wrong.status_code == 405


def test_references_resolve(server: Any) -> None:
    text = httpx.get(server.url + "/openapi.json").text
    schemas = msgspec.json.decode(text)["components"]["schemas"]
    names = set(re.findall(r'"#/components/schemas/([^"]+)"', text))
    assert names and names <= set(schemas)


def test_the_page_needs_nothing_from_elsewhere(server: Any) -> None:
    reply = httpx.get(server.url + "/docs")
    assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in reply.headers["content-security-policy"]
    loads = re.findall(r'(?:src|href)="(?!#)([^"]*)"', reply.text)
    assert all(link.startswith(("/", server.url)) for link in loads), loads
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/debug/steps"):
        assert path in reply.text
    assert "max_completion_tokens" in reply.text
