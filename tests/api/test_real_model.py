"""`graphrt serve` with the default model, as a user runs it, driven by the openai client."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

pytestmark = pytest.mark.model

FRANCE: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
STORY: list[Any] = [{"role": "user", "content": "Tell me a long story about a lighthouse."}]


class Serve:
    """`graphrt serve` on a free port."""

    def __init__(self, model: Path) -> None:
        command = [sys.executable, "-m", "graphrt", "serve", str(model), "--port", "0", "--ctx", "1024"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.fullmatch(r"graphrt serves (\S+) on (http://\S+) .*\n", line)
        if not found:
            self.kill()
        assert found, line
        self.model, self.url = found.groups()
        self.client = openai.OpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0)

    def metric(self, name: str) -> float:
        page = httpx.get(self.url + "/metrics").text
        [line] = [line for line in page.splitlines() if line.startswith(f"graphrt:{name}{{")]
        return float(line.rsplit(" ", 1)[1])

    def until(self, name: str, value: float) -> None:
        end = time.monotonic() + 10
        while self.metric(name) != value:
            assert time.monotonic() < end, f"{name} is {self.metric(name)}, not {value}"
            time.sleep(0.05)

    def kill(self) -> None:
        self.process.kill()  # nothing, if it has ended
        self.process.wait()


@pytest.fixture(scope="module")
def serve(default_model: Path) -> Iterator[Serve]:
    server = Serve(default_model)
    try:
        yield server
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) == 0
    finally:
        server.kill()


@pytest.fixture
def doomed(default_model: Path) -> Iterator[Serve]:
    server = Serve(default_model)
    yield server
    server.kill()


def test_it_knows_the_capital_of_france(serve: Serve) -> None:
    options: dict[str, Any] = {"model": serve.model, "messages": FRANCE, "temperature": 0, "max_tokens": 30}
    whole = serve.client.chat.completions.create(**options)
    text = whole.choices[0].message.content or ""
    assert "Paris" in text and text == text.strip() and "<|" not in text
    assert whole.choices[0].finish_reason == "stop"
    stream = serve.client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    *steps, last = list(stream)
    assert "".join(step.choices[0].delta.content or "" for step in steps) == text
    assert last.usage is not None and whole.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens <= len(steps)
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens


def test_a_stop_string_and_the_length_end_it(serve: Serve) -> None:
    create = serve.client.chat.completions.create
    cut = create(model=serve.model, messages=FRANCE, temperature=0, max_tokens=30, stop=["Paris"])
    assert (cut.choices[0].finish_reason, "Paris" in (cut.choices[0].message.content or "")) == ("stop", False)
    short = create(model=serve.model, messages=FRANCE, temperature=0, max_tokens=3)
    assert short.choices[0].finish_reason == "length"
    assert short.usage is not None and short.usage.completion_tokens == 3


def test_a_seed_gives_the_same_text_alone_and_in_company(serve: Serve) -> None:
    def ask(seed: int) -> str:
        reply = serve.client.chat.completions.create(
            model=serve.model, messages=STORY, temperature=1.0, seed=seed, max_tokens=24
        )
        return reply.choices[0].message.content or ""

    alone = {seed: ask(seed) for seed in (1, 2, 3)}
    assert len(set(alone.values())) == 3
    together: dict[int, str] = {}

    def put(seed: int) -> None:
        together[seed] = ask(seed)

    threads = [threading.Thread(target=put, args=(seed,)) for seed in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert together == alone


def test_several_replies_with_log_probabilities(serve: Serve) -> None:
    create = serve.client.completions.create
    reply = create(model=serve.model, prompt="Once upon a time", max_tokens=8, temperature=0.9, n=2, seed=3, logprobs=2)
    again = create(model=serve.model, prompt="Once upon a time", max_tokens=8, temperature=0.9, n=1, seed=3, logprobs=2)
    assert reply.choices[0] == again.choices[0] and reply.choices[0].text != reply.choices[1].text
    for choice in reply.choices:
        assert choice.logprobs is not None and "".join(choice.logprobs.tokens or ()) == choice.text
        assert all(value <= 0 for value in choice.logprobs.token_logprobs or ())
    assert (
        'graphrt:http_requests_total{route="/v1/completions",status="200"} 2.0'
        in httpx.get(serve.url + "/metrics").text
    )


def test_tokens_and_steps(serve: Serve) -> None:
    tokens = httpx.post(serve.url + "/tokenize", json={"model": serve.model, "prompt": "Hello, world"}).json()["tokens"]
    back = httpx.post(serve.url + "/detokenize", json={"model": serve.model, "tokens": tokens}).json()["prompt"]
    assert back == "Hello, world"
    steps = httpx.get(serve.url + "/debug/steps?n=5").json()["steps"]
    assert len(steps) == 5 and all(s["ms"] > 0 and s["host_us"] > 0 and s["rows"] <= s["batch"] for s in steps)


def test_a_client_that_leaves_frees_its_slot(serve: Serve) -> None:
    with serve.client.chat.completions.create(model=serve.model, messages=STORY, stream=True) as stream:
        next(stream)
        serve.until("num_requests_running", 1)
    serve.until("num_requests_running", 0)
    assert serve.metric("kv_cache_usage_perc") == 0
    assert serve.metric("eager_steps_total") == 0


def test_the_death_of_the_engine_is_told(doomed: Serve) -> None:
    server = doomed
    [engine] = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    stream = server.client.chat.completions.create(model=server.model, messages=STORY, stream=True)
    next(stream)
    os.kill(int(engine), signal.SIGKILL)
    with pytest.raises(openai.APIError, match="engine"):
        list(stream)
    assert httpx.get(server.url + "/health").status_code == 503
    assert server.process.wait(15) == 1
