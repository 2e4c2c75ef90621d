"""The server's side on its event loop: streams, refusals, cancels, full rings. Mostly with the engine as a thread."""

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
from graphrt.errors import ConfigError, EngineDead, GraphrtError, RequestError
from graphrt.perf.fake_engine import parse_settings, run_engine
from graphrt.seam import backlog
from graphrt.seam.client import EngineClient
from graphrt.seam.endpoint import EngineEndpoint
from graphrt.seam.records import Sampling, TokenOut
from graphrt.seam.stream import RequestStream

PEERS = str(Path(__file__).with_name("seam_peers.py"))
GREEDY = Sampling(temperature=0.0)


def run(job: Coroutine[Any, Any, Any], loop: str = "uvloop") -> Any:
    factory = uvloop.new_event_loop if loop == "uvloop" else asyncio.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(asyncio.wait_for(job, 60))


def peer(name: str) -> Callable[[EngineEndpoint], None]:
    function = load_runner(f"{PEERS}:{name}")
    return lambda endpoint: function(EngineConfig("nowhere"), endpoint)


def fake(settings: str, **sizes: int) -> Callable[[EngineEndpoint], None]:
    return lambda endpoint: run_engine(EngineConfig(f"fake:{settings}", **sizes), endpoint)


async def collect(stream: RequestStream) -> tuple[list[int], str]:
    tokens: list[int] = []
    finish = ""
    async for out in stream:
        assert finish == ""
        tokens += out.tokens
        finish = out.finish
    return tokens, finish


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_streams_of_many_requests_end_each_with_its_own_tokens(loop: str) -> None:
    async def job() -> None:
        client = await EngineClient.local(fake("step_ms=0.2", max_batch=4))
        assert client.alive and client.info.max_batch == 4
        streams = [client.submit([1, 2], Sampling(seed=100 * i), 5 + i, [103]) for i in range(10)]
        answers = await asyncio.gather(*map(collect, streams))
        for i, (tokens, finish) in enumerate(answers):
            if i == 1:
                assert (tokens, finish) == ([100, 101, 102, 103], "stop")
            else:
                assert (tokens, finish) == ([(100 * i + k) % 1000 for k in range(5 + i)], "length")
        assert client.live_requests == 0
        await asyncio.sleep(0.3)
        assert client.stats.finished == {"stop": 1, "length": 9} and client.stats.running == 0
        await client.close()
        assert not client.alive

    run(job(), loop)


def test_tokens_that_wait_together_are_merged() -> None:
    async def job() -> None:
        client = await EngineClient.local(fake("step_ms=0"))
        stream = client.submit([1], GREEDY, 300, [])
        await asyncio.sleep(0.3)
        outs = [out async for out in stream]
        assert outs == [TokenOut(stream.id, list(range(300)), "length")]
        await client.close()

    run(job())


def test_a_refusal_is_raised_with_its_status() -> None:
    async def job() -> None:
        client = await EngineClient.local(peer("refuse"))
        with pytest.raises(RequestError, match="4 requests wait already") as caught:
            await collect(client.submit([1], GREEDY, 1, []))
        assert (caught.value.status, caught.value.param) == (429, "messages")
        assert client.live_requests == 0
        await client.close()

    run(job())


def test_the_fake_engine_refuses_beyond_its_queue_and_its_context() -> None:
    async def job() -> None:
        client = await EngineClient.local(fake("step_ms=1,context=10", max_batch=2, max_waiting=1))
        open_streams = [client.submit([1], GREEDY, 10**6, []) for _ in range(3)]
        with pytest.raises(RequestError, match="1 requests wait already") as caught:
            await collect(client.submit([1], GREEDY, 1, []))
        assert caught.value.status == 429
        for tokens, finish in await asyncio.gather(*map(collect, open_streams)):
            assert (len(tokens), finish) == (9, "length")
        with pytest.raises(RequestError, match="the prompt has 10 tokens: at most 9") as caught:
            await collect(client.submit([1] * 10, GREEDY, 1, []))
        assert caught.value.status == 400
        await client.close()

    run(job())


def test_cancel_ends_the_stream_and_frees_the_engine() -> None:
    async def job() -> None:
        client = await EngineClient.local(fake("step_ms=1", max_batch=1))
        running = client.submit([1], GREEDY, 10**6, [])
        queued = client.submit([1], GREEDY, 10**6, [])
        await anext(running)
        for stream in (queued, running):
            stream.cancel()
            stream.cancel()
            assert (await collect(stream))[1] == "cancelled"
            stream.cancel()
        assert await collect(client.submit([1], GREEDY, 2, [])) == ([0, 1], "length")
        await asyncio.sleep(0.2)
        assert client.stats.finished == {"cancelled": 2, "length": 1}
        await client.close()

    run(job())


def test_leaving_a_stream_cancels_it_at_the_engine() -> None:
    async def job() -> None:
        client = await EngineClient.local(fake("step_ms=1"))
        async with client.submit([1], GREEDY, 10**6, []) as stream:
            await anext(stream)
        assert client.live_requests == 0
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        await stream.aclose()

        # The task that reads is cancelled, as a server's handler is when its client has gone.
        async def handler() -> None:
            async with client.submit([1], GREEDY, 10**6, []) as stream:
                await collect(stream)

        task = asyncio.create_task(handler())
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.2)
        assert client.live_requests == 0
        assert client.stats.finished == {"cancelled": 2} and client.stats.running == 0
        await client.close()

    run(job())


def test_closing_a_stream_wakes_its_waiting_reader() -> None:
    async def job() -> None:
        client = await EngineClient.local(peer("no_reaction"))
        stream = client.submit([1], GREEDY, 1, [])
        reader = asyncio.create_task(collect(stream))
        await asyncio.sleep(0.01)
        with pytest.raises(RuntimeError, match="two tasks"):
            await anext(stream)
        await stream.aclose()
        assert await reader == ([], "")
        await client.close()

    run(job())


def test_a_prompt_of_128k_tokens_crosses() -> None:
    async def job() -> None:
        client = await EngineClient.launch(EngineConfig("nowhere"), runner=f"{PEERS}:echo")
        prompt = [(i * 7919) % 250_000 for i in range(131_072)]
        for _ in range(12):  # more than the ring holds: it wraps
            assert await collect(client.submit(prompt, GREEDY, 1, [])) == (prompt, "stop")
        await client.close(1)

    run(job())


def test_a_prompt_larger_than_the_ring_is_refused_and_harms_nobody() -> None:
    async def job() -> None:
        client = await EngineClient.local(peer("echo"), ring_bytes=4096)
        with pytest.raises(RequestError, match=r"the request takes 50.. bytes .* at most 4088") as caught:
            client.submit([70000] * 1000, GREEDY, 1, [])
        assert caught.value.status == 413 and client.live_requests == 0
        assert await collect(client.submit([5], GREEDY, 1, [])) == ([5], "stop")
        await client.close()

    run(job())


def test_a_full_ring_towards_the_engine_blocks_nobody_and_keeps_the_order() -> None:
    async def job() -> None:
        client = await EngineClient.launch(EngineConfig("nowhere"), runner=f"{PEERS}:sleepy_echo", ring_bytes=4096)
        streams, slowest = [], 0.0
        for i in range(3000):
            start = time.perf_counter()
            streams.append(client.submit([i] * (i % 50), GREEDY, 1, []))
            if i % 10 == 0:
                streams[-1].cancel()
            slowest = max(slowest, time.perf_counter() - start)
        assert slowest < 0.1
        position = 0
        for i, stream in enumerate(streams):
            position += 1
            assert (await anext(stream)).cached_tokens == position
            position += i % 10 == 0  # its cancel came right behind it
        await client.close(1)

    run(job())


def test_what_waits_for_the_engine_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backlog, "MAX_BYTES", 10_000)

    async def job() -> None:
        client = await EngineClient.launch(EngineConfig("nowhere"), runner=f"{PEERS}:busy", ring_bytes=4096)
        streams = []
        with pytest.raises(RequestError, match="wait for the engine already") as caught:
            for _ in range(10_000):
                streams.append(client.submit([1] * 100, GREEDY, 1, []))
        assert caught.value.status == 429
        assert 70 < len(streams) < 100  # 14 kB of about 170 bytes
        streams[0].cancel()  # a cancel always finds a place
        closing = asyncio.create_task(client.close())
        for stream in streams:
            with pytest.raises(EngineDead):
                await anext(stream)
        await closing

    run(job())


def test_a_full_ring_towards_the_server_loses_nothing() -> None:
    async def job() -> None:
        client = await EngineClient.launch(EngineConfig("nowhere"), runner=f"{PEERS}:flood", ring_bytes=1 << 16)
        stream = client.submit([1], GREEDY, 1, [])
        time.sleep(0.3)  # the whole event loop stalls; the engine waits
        tokens: list[int] = []
        async for out in stream:
            tokens += out.tokens
        assert tokens == list(range(200_000))
        await client.close()

    run(job())


def test_20k_requests_of_random_size_through_two_processes() -> None:
    async def job() -> None:
        client = await EngineClient.launch(EngineConfig("nowhere"), runner=f"{PEERS}:echo", ring_bytes=1 << 15)
        window = asyncio.Semaphore(64)

        async def one(i: int) -> None:
            async with window:
                prompt = [i, *range(i % 97)] if i % 211 else [i] * 5000
                stream = client.submit(prompt, GREEDY, 1, [])
                out = await anext(stream)
                assert out.tokens == prompt and out.finish == "stop"
                assert out.cached_tokens == stream.id  # seen by the engine in the order of the submits
                if i % 1000 == 0:
                    time.sleep(0.01)

        await asyncio.gather(*(one(i) for i in range(20_000)))
        await client.close(1)

    run(job())


def test_draining_lets_requests_finish_and_takes_no_new_ones() -> None:
    async def job() -> None:
        client = await EngineClient.local(fake("step_ms=1"))
        short, endless = client.submit([1], GREEDY, 50, []), client.submit([1], GREEDY, 10**6, [])
        await anext(short)
        start = time.perf_counter()
        closing = asyncio.create_task(client.close(0.4))
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="shutting down") as caught:
            client.submit([1], GREEDY, 1, [])
        assert caught.value.status == 503
        assert (await collect(short))[1] == "length"
        assert (await collect(endless))[1] == "cancelled"
        await closing
        await client.close()
        assert 0.3 < time.perf_counter() - start < 1.0
        with pytest.raises(EngineDead):
            client.submit([1], GREEDY, 1, [])
        await client.wait_dead()

    run(job())


def test_a_failure_in_a_thread_engine_is_reported_alike() -> None:
    async def job() -> None:
        with pytest.raises(GraphrtError, match=r"^nowhere: no config\.json$"):
            await EngineClient.local(peer("bad_model"))
        client = await EngineClient.local(peer("bug_later"))
        stream = client.submit([1], GREEDY, 9, [])
        received: list[int] = []
        with pytest.raises(EngineDead, match=r"^RuntimeError: CUDA_ERROR_ILLEGAL_ADDRESS in decode_step$"):
            async for out in stream:
                received += out.tokens
        assert received == [1, 2]  # what it sent before it failed arrived
        assert not client.alive
        await client.close()

    run(job())


def test_waiting_releases_the_gil() -> None:
    async def job() -> None:
        client = await EngineClient.local(peer("no_reaction"))
        start = time.perf_counter()
        await asyncio.sleep(0.05)
        assert time.perf_counter() - start < 0.5  # a waiting engine thread that held the GIL would never let this run
        await client.close()

    run(job())


@pytest.mark.parametrize("text", ["real:step_ms=1", "fake:steps=1", "fake:step_ms=fast", "fake:reply=lie"])
def test_settings_of_the_fake_engine_are_checked(text: str) -> None:
    with pytest.raises(ConfigError, match="fake engine's settings"):
        parse_settings(text)


def test_the_scores_of_a_prompt_come_with_the_first_token() -> None:
    async def job() -> None:
        client = await EngineClient.local(peer("score"))
        stream = client.submit([1], GREEDY, 5, [], prompt_logprobs=0)
        outs = [out async for out in stream]
        assert [p.token for p in outs[0].prompt_logprobs] == [0, 1, 2] and outs[0].tokens[0] == 7
        assert [t for out in outs for t in out.tokens] == [7, 8] and outs[-1].finish == "length"
        await client.close()

    run(job())
