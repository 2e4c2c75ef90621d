"""The server over the real rings, with an engine that follows a script in a thread."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import openai
import pytest

from graphrt.engine_config import EngineConfig
from graphrt.seam.client import EngineClient

HI: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.fixture
def live(make_server: Callable[..., Any], scripted: Any) -> Callable[..., Any]:
    def make(**config: int) -> Any:
        engine = EngineConfig("/models/tiny", **config)
        return make_server(lambda: EngineClient.local(lambda endpoint: scripted.run_scripted(engine, endpoint)))

    return make


def test_streams_and_wholes_over_the_rings(live: Any) -> None:
    server = live()
    whole = server.client().chat.completions.create(model="tiny", messages=HI, max_tokens=14, seed=5)
    assert whole.choices[0].message.content == "word 5 word 5 "
    assert (whole.choices[0].finish_reason, whole.usage.completion_tokens) == ("length", 14)
    stream = server.client().chat.completions.create(model="tiny", messages=HI, max_tokens=14, seed=6, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "word 6 word 6 "
    server.until(lambda: server.engine.stats.generation_tokens == 28)
    assert server.metric('graphrt:generation_tokens_total{model_name="tiny"}') == 28


def test_a_stop_string_frees_the_slot(live: Any) -> None:
    server = live()
    reply = server.client().chat.completions.create(model="tiny", messages=HI, seed=5, stop="5 w")
    assert reply.choices[0].message.content == "word "
    assert reply.usage.completion_tokens == 8
    server.until(lambda: server.engine.live_requests == 0)
    server.until(lambda: server.engine.stats.running == 0)


def test_a_full_queue_is_429(live: Any) -> None:
    server = live(max_batch=1, max_waiting=1)
    client = server.client()
    streams = [client.chat.completions.create(model="tiny", messages=HI, stream=True)]
    waiting = threading.Thread(
        target=lambda: client.chat.completions.create(model="tiny", messages=HI, max_tokens=1), daemon=True
    )
    waiting.start()
    server.until(lambda: server.engine.stats.waiting == 1)
    with pytest.raises(openai.RateLimitError, match="queue is full") as caught:
        client.chat.completions.create(model="tiny", messages=HI)
    assert int(caught.value.response.headers["retry-after"]) >= 1
    streams[0].close()
    waiting.join(5)
    assert not waiting.is_alive()


def test_concurrent_streams_with_random_cancels_leave_nothing(live: Any) -> None:
    server = live()
    draw = random.Random(4)
    leave_after = [draw.choice([None, draw.randrange(1, 60)]) for _ in range(20)]
    failed: list[str] = []

    def run(seed: int, leave: int | None) -> None:
        text = ""
        with server.client().chat.completions.create(
            model="tiny", messages=HI, stream=True, seed=seed, max_tokens=90
        ) as stream:
            for count, chunk in enumerate(stream):
                text += chunk.choices[0].delta.content or ""
                if count == leave:
                    break
        expected = (f"word {seed} " * 90)[:90]
        if text != expected if leave is None else not expected.startswith(text):
            failed.append(f"{seed}: {text}")

    threads = [threading.Thread(target=run, args=case) for case in enumerate(leave_after)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not failed
    server.until(lambda: server.engine.live_requests == 0 and not server.state.live)
    server.until(lambda: server.engine.stats.running == 0)
    ended = {
        reason: server.metric(f'graphrt:request_success_total{{finished_reason="{reason}",model_name="tiny"}}')
        for reason in ("length", "abort", "stop", "error")
    }
    left = sum(leave is not None for leave in leave_after)
    assert ended == {"length": 20 - left, "abort": left, "stop": 0, "error": 0}
