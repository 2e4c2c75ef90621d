"""Streams without tasks: who listens is told once for all that waits together, and takes until there is nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop

from graphrt.engine_config import EngineConfig
from graphrt.engine_process import load_runner
from graphrt.errors import EngineDead, RequestError
from graphrt.perf.fake_engine import run_engine
from graphrt.seam.client import EngineClient
from graphrt.seam.endpoint import EngineEndpoint
from graphrt.seam.records import Sampling, TokenOut
from graphrt.seam.stream import RequestStream

PEERS = str(Path(__file__).with_name("seam_peers.py"))
GREEDY = Sampling(temperature=0.0)


def run(job: Coroutine[Any, Any, Any]) -> Any:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(asyncio.wait_for(job, 30))


def fake(settings: str) -> Callable[[EngineEndpoint], None]:
    return lambda endpoint: run_engine(EngineConfig(f"fake:{settings}"), endpoint)


class Listener:
    """Takes as it should; keeps what came in each call."""

    def __init__(self, stream: RequestStream) -> None:
        self.stream = stream
        self.calls: list[list[TokenOut]] = []
        self.error: Exception | None = None
        stream.listen(self.on_news)

    def on_news(self) -> None:
        got: list[TokenOut] = []
        try:
            while (out := self.stream.take()) is not None:
                got.append(out)
        except (RequestError, EngineDead) as error:
            self.error = error
        self.calls.append(got)

    @property
    def over(self) -> bool:
        return self.error is not None or any(out.finish for call in self.calls for out in call)


async def until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.002)


def test_what_waits_together_is_told_once() -> None:
    async def job() -> None:
        client = await EngineClient.local(fake("step_ms=0"))
        listeners = [Listener(client.submit([1], GREEDY, 200, [])) for _ in range(3)]
        time.sleep(0.3)  # the loop is busy while they come
        await until(lambda: all(listener.over for listener in listeners))
        for listener in listeners:
            assert listener.calls == [[TokenOut(listener.stream.id, list(range(200)), "length")]]
        await client.close()

    run(job())


def test_each_step_is_told_at_once_and_nothing_is_lost() -> None:
    async def job() -> None:
        client = await EngineClient.local(fake("step_ms=2"))
        listener = Listener(client.submit([1], GREEDY, 40, []))
        await until(lambda: listener.over)
        assert all(len(call) == 1 for call in listener.calls) and len(listener.calls) > 10
        assert [t for [out] in listener.calls for t in out.tokens] == list(range(40))
        await client.close()

    run(job())


def test_a_refusal_and_the_engines_death_are_told() -> None:
    async def job() -> None:
        function = load_runner(f"{PEERS}:refuse")
        client = await EngineClient.local(lambda endpoint: function(EngineConfig("nowhere"), endpoint))
        refused = Listener(client.submit([1], GREEDY, 1, []))
        await until(lambda: refused.over)
        assert isinstance(refused.error, RequestError) and refused.error.status == 429
        await client.close()

        client = await EngineClient.launch(
            EngineConfig("fake:step_ms=5"), runner="graphrt.perf.fake_engine:run_engine", start_timeout_s=20
        )
        listener = Listener(client.submit([1], GREEDY, 10**6, []))
        await until(lambda: listener.calls)
        assert client._host is not None
        client._host.kill()
        await until(lambda: listener.over)
        assert isinstance(listener.error, EngineDead) and "SIGKILL" in str(listener.error)
        tokens = [t for call in listener.calls for out in call for t in out.tokens]
        assert tokens == [i % 1000 for i in range(len(tokens))]
        await client.close()

    run(job())


def test_tokens_before_an_error_are_taken_before_it_is_raised() -> None:
    woken: list[RequestStream] = []
    loop = asyncio.new_event_loop()
    stream = RequestStream(7, loop, lambda i: None, lambda i: None, woken.append)
    listener = Listener(stream)
    stream.feed(TokenOut(7, [1]))
    stream.feed(TokenOut(7, [2]))
    stream.fail(EngineDead("gone"))
    assert woken == [stream] and not listener.calls
    stream.tell()
    assert listener.calls == [[TokenOut(7, [1, 2])]] and str(listener.error) == "gone"
    loop.close()


def test_a_listener_that_fails_harms_no_other(caplog: pytest.LogCaptureFixture) -> None:
    async def job() -> None:
        echo = load_runner(f"{PEERS}:echo")
        client = await EngineClient.local(lambda endpoint: echo(EngineConfig("nowhere"), endpoint))
        broken = client.submit([5], GREEDY, 1, [])
        broken.listen(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
        listener = Listener(client.submit([6, 7], GREEDY, 1, []))
        await until(lambda: listener.over)
        assert listener.calls[-1][-1].tokens == [6, 7] and client.alive
        await client.close()

    run(job())
    assert "ZeroDivisionError" in caplog.text


def test_who_stops_listening_hears_no_more() -> None:
    async def job() -> None:
        client = await EngineClient.local(fake("step_ms=1"))
        listener = Listener(client.submit([1], GREEDY, 10**6, []))
        await until(lambda: len(listener.calls) > 3)
        listener.stream.listen(None)
        heard = len(listener.calls)
        await asyncio.sleep(0.05)
        assert len(listener.calls) == heard
        listener.stream.listen(listener.on_news)  # what came meanwhile is there
        await until(lambda: len(listener.calls) > heard)
        assert len(listener.calls[heard][0].tokens) > 5
        listener.stream.cancel()
        await until(lambda: listener.over)
        tokens = [t for call in listener.calls for out in call for t in out.tokens]
        assert tokens == [i % 1000 for i in range(len(tokens))]
        assert client.live_requests == 0
        await client.close()

    run(job())


def test_a_listener_may_submit_and_cancel() -> None:
    """As a reply does whose first token lets the others begin."""

    async def job() -> None:
        client = await EngineClient.local(fake("step_ms=1"))
        followers: list[Listener] = []
        leader = client.submit([1], GREEDY, 50, [])

        def on_news() -> None:
            while leader.take() is not None:
                if not followers:
                    followers.extend(Listener(client.submit([1], GREEDY, 5, [])) for _ in range(3))
                    leader.cancel()

        leader.listen(on_news)
        await until(lambda: followers and all(f.over for f in followers))
        await until(lambda: client.live_requests == 0)
        await client.close()

    run(job())
