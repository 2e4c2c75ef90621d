"""Every request, however it ends, is counted exactly once."""

from __future__ import annotations

import asyncio
import random
import re
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from graphrt.engine_config import EngineConfig
from graphrt.errors import RequestError
from graphrt.seam.client import EngineClient
from graphrt.seam.records import QUEUE_BOUNDS_S, Stats

PATH = "/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
LINE = re.compile(r"^graphrt:(\w+)(?:\{(.*)\})? (\S+)$")


def numbers(server: Any, name: str, label: str) -> dict[str, float]:
    """The values of one metric by one label."""
    found: dict[str, float] = {}
    for line in server.call(server.state.metrics.page).decode().splitlines():
        match = LINE.match(line)
        if match and match[1] == name:
            labels = dict(re.findall(r'(\w+)="([^"]*)"', match[2] or ""))
            found[labels[label]] = found.get(labels[label], 0) + float(match[3])
    return found


def once(url: str, kind: str) -> None:
    """One request that ends as `kind` says."""
    stream = kind.startswith("stream")
    body: dict[str, Any] = {**BODY, "stream": stream, "messages": [{"role": "user", "content": kind}]}
    headers = {"authorization": "Bearer sk-alice-12345"}
    if kind == "bad field":
        body["temperature"] = 9
    elif kind == "no key":
        headers = {}
    elif kind == "no path":
        url += "/nowhere"
    elif kind == "late":
        headers["x-request-timeout"] = "0.05"
    elif kind == "malformed":
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=5) as sock:
            sock.sendall(b"\x00\x01\r\n\r\n")
            while sock.recv(1000):
                pass
        return
    if kind in ("stream left", "left"):
        try:
            timeout = 0.2 if kind == "left" else 5.0
            with httpx.stream("POST", url + PATH, json=body, headers=headers, timeout=timeout) as reply:
                next(reply.iter_raw())
        except httpx.ReadTimeout:
            assert kind == "left"
        return
    httpx.post(url + PATH, json=body, headers=headers)


KINDS = {
    "whole": ("200", "stop"),
    "stream": ("200", "stop"),
    "long": ("200", "length"),
    "stream left": ("499", "abort"),
    "left": ("499", "abort"),
    "late": ("504", "timeout"),
    "full": ("429", "refused"),
    "stream breaks": ("200", "error"),
    "breaks": ("500", "error"),
    "bad field": ("400", None),
    "no key": ("401", None),
    "no path": ("404", None),
    "malformed": ("400", None),
}


async def by_prompt(stream: Any) -> None:
    """What the engine does follows from the message."""
    kind = bytes(stream.request.tokens).decode().split(": ")[1].split("\n")[0]
    if kind in ("stream left", "left", "late"):
        if kind == "stream left":
            stream.put("word ")
        await stream.cancelled.wait()
    elif kind == "full":
        stream.fail(RequestError("the queue is full", status=429))
    elif "breaks" in kind:
        stream.put("wo")
        await asyncio.sleep(0.01)
        stream.put([], "error")
    else:
        stream.put("word ", "length" if kind == "long" else "stop")


def test_all_kinds_of_ends(make_server: Callable[..., Any], tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice:sk-alice-12345\n")
    server = make_server(api_key_files=(keys,))
    server.engine.script = by_prompt
    kinds = [kind for kind in KINDS for _ in range(6)]
    random.Random(1).shuffle(kinds)
    waiting = iter(kinds)

    def work() -> None:
        for kind in waiting:
            once(server.url, kind)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    server.until(lambda: not server.state.live and sum(server.state.metrics.http.values()) == len(kinds))

    expected: dict[str, int] = {}
    reasons: dict[str, int] = {}
    for status, reason in (KINDS[kind] for kind in kinds):
        expected[status] = expected.get(status, 0) + 1
        if reason is not None:
            reasons[reason] = reasons.get(reason, 0) + 1
    assert numbers(server, "http_requests_total", "status") == expected
    assert numbers(server, "request_success_total", "finished_reason") == reasons
    assert numbers(server, "requests_refused_total", "reason") == {"no_api_key": 6}
    begun = sum(reasons.values())
    assert len(server.engine.requests) == begun
    for histogram in ("e2e_request_latency_seconds", "request_prompt_tokens", "request_generation_tokens"):
        assert server.metric(f'graphrt:{histogram}_count{{model_name="tiny"}}') == begun
    assert server.metric('graphrt:sequences_live{model_name="tiny"}') == 0
    assert server.state.limiter.running == 0
    routes = numbers(server, "http_requests_total", "route")
    assert routes == {PATH: len(kinds) - 12, "other": 6, "none": 6}


def test_the_engine_counts_the_same(make_server: Callable[..., Any], scripted: Any) -> None:
    engine = EngineConfig("/models/tiny", max_batch=4)
    server = make_server(lambda: EngineClient.local(lambda endpoint: scripted.run_scripted(engine, endpoint)))
    for tokens in (1, 5, 9):
        httpx.post(server.url + PATH, json={**BODY, "max_tokens": tokens})
    server.until(lambda: server.engine.stats.generation_tokens == 15 and server.engine.stats.running == 0)
    text = server.call(server.state.metrics.page).decode()
    assert 'graphrt:generation_tokens_total{model_name="tiny"} 15.0' in text
    assert 'graphrt:request_generation_tokens_sum{model_name="tiny"} 15.0' in text
    assert 'graphrt:request_generation_tokens_count{model_name="tiny"} 3.0' in text
    assert 'graphrt:batch_occupancy{model_name="tiny"} 0.0' in text
    # A request's tokens but one over its decode time: only those of two tokens or more have one.
    assert 'graphrt:request_time_per_output_token_seconds_count{model_name="tiny"} 2.0' in text


def test_the_page_is_what_prometheus_reads(server: Any) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    httpx.post(server.url + PATH, json=BODY)
    families = {
        family.name: family for family in text_string_to_metric_families(httpx.get(server.url + "/metrics").text)
    }
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "kv_blocks",
        "batch_occupancy",
        "prefix_cache_queries",
        "prefix_cache_hits",
        "prompt_tokens",
        "generation_tokens",
        "num_preemptions",
        "step_time_seconds",
        "host_time_per_step_seconds",
        "device_idle_per_step_seconds",
        "request_queue_time_seconds",
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "e2e_request_latency_seconds",
        "request_decode_time_seconds",
        "request_time_per_output_token_seconds",
        "request_prompt_tokens",
        "request_generation_tokens",
        "request_success",
        "engine_finished",
        "http_requests",
    ):
        assert families[f"graphrt:{name}"].samples, name


def test_the_queue_time_is_a_histogram(server: Any) -> None:
    counts = [0] * (len(QUEUE_BOUNDS_S) + 1)
    counts[1], counts[4], counts[-1] = 3, 2, 1  # up to 5 ms, up to 100 ms, and one of 400 s
    server.engine.stats = Stats(queue_counts=counts, queue_sum_s=400.25)
    found = numbers(server, "request_queue_time_seconds_bucket", "le")
    assert found["0.001"] == 0 and found["0.005"] == 3 and found["0.05"] == 3 and found["0.1"] == 5
    assert found["300.0"] == 5 and found["+Inf"] == 6
    assert server.metric('graphrt:request_queue_time_seconds_count{model_name="tiny"}') == 6
    assert server.metric('graphrt:request_queue_time_seconds_sum{model_name="tiny"}') == 400.25
