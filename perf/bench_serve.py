"""Load on an OpenAI-compatible server: requests at a rate or at a concurrency, and what their clients saw.

Arrivals at a rate are a Poisson process (open loop: a slow server does not slow them). At a concurrency each worker sends its next request
when the last one has ended (closed loop). Prompts are random token ids of the asked length when the server has /tokenize, so that no
prefix repeats; else words.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from graphrt.errors import ConfigError
from graphrt.perf.bench_client import Target
from graphrt.perf.bench_stats import RequestRecord, summarise

WORDS = [
    "time",
    "year",
    "way",
    "day",
    "man",
    "thing",
    "woman",
    "life",
    "child",
    "world",
    "school",
    "state",
    "family",
    "student",
    "group",
    "country",
    "problem",
    "hand",
    "part",
    "place",
]


@dataclass(frozen=True)
class Load:
    """What to send. Exactly one of `rate` (requests a second) and `concurrency` is set. Lengths in tokens."""

    requests: int
    rate: float | None
    concurrency: int | None
    input_len: int
    output_len: int
    seed: int
    model: str | None = None
    dataset: Path | None = None


async def run_load(
    target: Target, load: Load, slo: dict[str, float], progress: Callable[[int], None]
) -> dict[str, Any]:
    """Send all requests; `progress` hears the number of those that have ended. ConfigError when there is no server."""
    model = load.model or await served_model(target)
    bodies = await make_requests(target, load, model)
    records: list[RequestRecord] = []

    async def one(path: str, body: dict[str, Any]) -> None:
        records.append(await target.stream(path, body))
        progress(len(records))

    if load.concurrency is not None:
        queue = iter(bodies)

        async def worker() -> None:
            for path, body in queue:
                await one(path, body)

        await asyncio.gather(*(worker() for _ in range(min(load.concurrency, len(bodies)))))
    else:
        async with asyncio.TaskGroup() as group:
            async for path, body in poisson(bodies, load.rate or 1.0, random.Random(load.seed)):
                group.create_task(one(path, body))
    asked = {
        "rate": load.rate,
        "concurrency": load.concurrency,
        "input_len": load.input_len,
        "output_len": load.output_len,
    }
    return {"model": model, **asked, **summarise(records, slo)}


async def poisson(items: list[Any], rate: float, rng: random.Random) -> AsyncIterator[Any]:
    """The items, at the times of a Poisson process that does not care how long each takes."""
    loop = asyncio.get_running_loop()
    due = loop.time()
    for item in items:
        await asyncio.sleep(max(0.0, due - loop.time()))
        yield item
        due += rng.expovariate(rate)


async def served_model(target: Target) -> str:
    """The first model that the server lists."""
    try:
        status, body = await target.get("/v1/models")
    except OSError as error:
        raise ConfigError(f"no server at {target.host}:{target.port}: {error.strerror or error}") from None
    if status != 200:
        raise ConfigError(f"{target.host}:{target.port}/v1/models answered HTTP {status}")
    return str(msgspec.json.decode(body)["data"][0]["id"])


async def make_requests(target: Target, load: Load, model: str) -> list[tuple[str, dict[str, Any]]]:
    """Paths and bodies of all requests."""
    rng = random.Random(load.seed)
    common = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
    if load.dataset is not None:
        return dataset_requests(load, common, rng)
    pool = await token_pool(target, model)
    made = []
    for _ in range(load.requests):
        prompt: Any = rng.choices(pool, k=load.input_len) if pool else " ".join(rng.choices(WORDS, k=load.input_len))
        body = {
            **common,
            "prompt": prompt,
            "max_tokens": load.output_len,
            "ignore_eos": True,
            "seed": rng.getrandbits(32),
        }
        made.append(("/v1/completions", body))
    return made


async def token_pool(target: Target, model: str) -> list[int]:
    """Ids of ordinary words, empty when the server does not tokenize for others."""
    text = " ".join(WORDS) + " " + " ".join(w.capitalize() for w in WORDS)
    status, body = await target.post("/tokenize", {"model": model, "prompt": text})
    if status != 200:
        return []
    return [int(t) for t in msgspec.json.decode(body)["tokens"]]


def dataset_requests(load: Load, common: dict[str, Any], rng: random.Random) -> list[tuple[str, dict[str, Any]]]:
    """From JSON lines with `messages` or `prompt`, and maybe `max_tokens`; repeated or cut to the number asked for."""
    assert load.dataset is not None
    try:
        lines = [line for line in load.dataset.read_text().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--dataset {load.dataset}: {error}") from None
    if not lines:
        raise ConfigError(f"--dataset {load.dataset} is empty")
    made = []
    for i in range(load.requests):
        number = i % len(lines) + 1
        try:
            entry = msgspec.json.decode(lines[number - 1])
        except msgspec.DecodeError as error:
            raise ConfigError(f"--dataset {load.dataset}, line {number}: {error}") from None
        key = next((k for k in ("messages", "prompt") if isinstance(entry, dict) and k in entry), None)
        if key is None:
            raise ConfigError(f"--dataset {load.dataset}, line {number}: needs an object with messages or prompt")
        path = "/v1/chat/completions" if key == "messages" else "/v1/completions"
        body = {**common, key: entry[key], "max_tokens": entry.get("max_tokens", load.output_len)}
        made.append((path, {**body, "seed": rng.getrandbits(32)}))
    return made
