"""The line that shows a newcomer what to do next."""

from __future__ import annotations

import json

_ANY = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}


def base_url(host: str, port: int, scheme: str = "http") -> str:
    """Where a client on this machine reaches the server."""
    return f"{scheme}://{_ANY.get(host) or (f'[{host}]' if ':' in host else host)}:{port}"


def curl_example(url: str, model_name: str, with_key: bool = False) -> str:
    """A command that streams a reply."""
    body = json.dumps(
        {"model": model_name, "stream": True, "messages": [{"role": "user", "content": "Say hello in one sentence."}]},
        ensure_ascii=False,
    ).replace("'", "'\\''")
    key = ' -H "authorization: Bearer $GRAPHRT_API_KEY"' if with_key else ""
    return f"curl -N {url}/v1/chat/completions -H 'content-type: application/json'{key} -d '{body}'"
