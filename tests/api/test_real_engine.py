"""`graphrt serve` with a tiny model: what many clients leave behind that come, read a while and go."""

from __future__ import annotations

import asyncio
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

CLIENTS = 64
ROUNDS = 2
KV_BYTES = 400_000  # less than eight long replies want, so that some are preempted
WORDS = ["time", "year", "way", "day", "man", "thing", "woman", "life", "child", "world"]


@pytest.fixture
def url(tiny_model: Callable[..., Path]) -> Iterator[str]:
    sizes = [
        "--max-batch",
        "8",
        "--ctx",
        "512",
        "--kv-memory",
        str(KV_BYTES),
        "--threads",
        "1",
        "--log-level",
        "warning",
    ]
    command = [
        sys.executable,
        "-m",
        "graphrt",
        "serve",
        str(tiny_model("llama")),
        "--port",
        "0",
        "--served-model-name",
        "tiny",
        *sizes,
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"http://\S+", line)
        assert found, line
        yield found[0]
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()


def numbers(url: str) -> dict[str, float]:
    """Every line of /metrics by name and labels, without the model's name."""
    found = {}
    for line in httpx.get(url + "/metrics").text.splitlines():
        match = re.fullmatch(r"graphrt:(\w+)(?:\{(.*)\})? (\S+)", line)
        if match:
            labels = [label for label in match[2].split(",") if label and not label.startswith("model_name=")]
            found[match[1] + (f"{{{','.join(labels)}}}" if labels else "")] = float(match[3])
    return found


def request(rng: random.Random) -> dict[str, Any]:
    """Prompts share beginnings, so that blocks are shared; some replies are asked for several at a time."""
    start = WORDS * rng.choice((0, 2, 4))
    body: dict[str, Any] = {
        "model": "tiny",
        "prompt": " ".join([*start, *rng.choices(WORDS, k=rng.randrange(1, 30))]),
        "max_tokens": rng.randrange(1, 120),
        "seed": rng.getrandbits(32),
        "temperature": rng.choice((0.0, 1.0)),
        "ignore_eos": rng.random() < 0.7,
        "n": rng.choice((1, 1, 1, 2, 3)),
    }
    if rng.random() < 0.2:
        body["logprobs"] = 3
    if rng.random() < 0.2:
        body["stop"] = ["e", "in"]
    return body


async def one(client: httpx.AsyncClient, rng: random.Random) -> str:
    """A request to its end, or the client leaves; what became of it."""
    body = request(rng)
    kind = rng.choice(
        ("stream", "stream", "whole", "leave a stream", "leave a stream", "leave a whole", "leave at once")
    )
    if kind in ("whole", "leave a whole", "leave at once"):
        patience = {"whole": 60.0, "leave a whole": rng.uniform(0.005, 0.3), "leave at once": 0.001}[kind]
        try:
            reply = await client.post("/v1/completions", json=body, timeout=httpx.Timeout(60, read=patience))
        except httpx.ReadTimeout:
            return "left"
        assert reply.status_code == 200, reply.text
        assert len(reply.json()["choices"]) == body["n"]
        return "whole"
    leave_after = rng.randrange(0, 40) if kind == "leave a stream" else None
    async with client.stream("POST", "/v1/completions", json={**body, "stream": True}, timeout=60) as reply:
        assert reply.status_code == 200, await reply.aread()
        count = 0
        async for line in reply.aiter_lines():
            if count == leave_after:
                return "left"
            count += line.startswith("data: {")
            if line == "data: [DONE]":
                return "whole"
    raise AssertionError("a stream ended early")


async def crowd(url: str, rng: random.Random) -> Counter[str]:
    ends: Counter[str] = Counter()

    async def run(seed: int) -> None:
        own = random.Random(seed)
        for _ in range(ROUNDS):
            # A connection each: who leaves in the middle closes it.
            async with httpx.AsyncClient(base_url=url) as client:
                ends[await one(client, own)] += 1

    await asyncio.gather(*(run(rng.getrandbits(32)) for _ in range(CLIENTS)))
    return ends


def test_64_clients_with_random_cancels_leave_no_slot_and_no_block(url: str) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    probe = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    blocks = numbers(url)['kv_blocks{state="free"}']
    before = httpx.post(url + "/v1/completions", json=probe, timeout=60).json()["choices"][0]["text"]

    ends = asyncio.run(crowd(url, random.Random(seed)))
    assert sum(ends.values()) == CLIENTS * ROUNDS and ends["left"] > 20 and ends["whole"] > 20

    end = time.monotonic() + 20
    while (now := numbers(url))["num_requests_running"] or now["sequences_live"]:
        assert time.monotonic() < end, now
        time.sleep(0.05)
    assert now["slots_used"] == 0 and now["num_requests_waiting"] == 0
    assert now['kv_blocks{state="used"}'] == 0 and now["kv_cache_usage_perc"] == 0
    assert now['kv_blocks{state="cached"}'] > 0
    assert now['kv_blocks{state="cached"}'] + now['kv_blocks{state="free"}'] == blocks
    assert now["num_preemptions_total"] > 0 and now["prefix_cache_hits_total"] > 0
    assert now["eager_steps_total"] == 0

    # Whatever began has ended in exactly one way, on both sides of the seam.
    server = {name: value for name, value in now.items() if name.startswith("request_success_total")}
    engine = {name: value for name, value in now.items() if name.startswith("engine_finished_total")}
    assert sum(server.values()) == sum(engine.values()) == now["e2e_request_latency_seconds_count"]
    assert server.get('request_success_total{finished_reason="error"}', 0) == 0
    after = httpx.post(url + "/v1/completions", json=probe, timeout=60).json()["choices"][0]["text"]
    assert after == before  # from cached blocks that are still what they were
