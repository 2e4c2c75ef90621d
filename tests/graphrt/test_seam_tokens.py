"""Tokens that cross the seam as two lists, without an item for each request."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from graphrt.errors import EngineDead
from graphrt.seam.client import EngineClient
from graphrt.seam.endpoint import EngineEndpoint
from graphrt.seam.records import Drain, EngineInfo, Logprob, Output, Sampling, Submit, TokenOut
from graphrt.seam.stream import RequestStream

GREEDY = Sampling(temperature=0.0)


def run(job: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(job, 60))


def stream(woken: list[RequestStream]) -> RequestStream:
    return RequestStream(7, asyncio.new_event_loop(), lambda i: None, lambda i: None, woken.append)


def test_they_merge_with_items_in_order_and_keep_what_was_said_of_the_cache() -> None:
    one = stream([])
    one.feed_token(1)
    assert one.take() == TokenOut(7, [1])
    one.feed(TokenOut(7, [2], "", 48, [Logprob(2, -1.0, 1, [])]))
    one.feed_token(3)
    assert one.take() == TokenOut(7, [2, 3], "", 48, [Logprob(2, -1.0, 1, [])])
    first, second = [], []
    one.feed_token(4)
    one.feed_token(5)
    first.append(one.take())
    one.feed_token(6)
    one.feed(TokenOut(7, [7], "length", 48))
    one.feed_token(8)
    second.append(one.take())
    assert first == [TokenOut(7, [4, 5], "", 48)], "what was taken is not touched again"
    assert second == [TokenOut(7, [6, 7], "length", 48)], "nothing comes after the end"
    assert one.take() is None


def test_they_wake_a_listener_and_precede_an_error() -> None:
    woken: list[RequestStream] = []
    one = stream(woken)
    one.listen(lambda: None)
    one.tell()
    one.feed_token(1)
    one.feed_token(2)
    assert woken == [one]
    one.fail(EngineDead("gone"))
    out = one.take()
    assert out is not None and out.tokens == [1, 2]


def mixed(endpoint: EngineEndpoint) -> None:
    """Waits for three requests; then steps in which some have an item, and one has left already."""
    endpoint.send(EngineInfo("mixed", "cpu", 100, 100, 8, 8, 16, 64, 0))
    live: list[int] = []
    while len(live) < 3 and endpoint.server_alive():
        live += [r.id for r in endpoint.poll() if isinstance(r, Submit)]
        endpoint.wait(0.01)
    a, b, c = live
    endpoint.send(Output([TokenOut(a, [10], "", 16), TokenOut(b, [20]), TokenOut(c, [30])]))
    endpoint.send(Output([], [a, b, c, 99], [11, 21, 31, 0]))
    endpoint.send(Output([TokenOut(b, [22], "stop")], [a, c], [12, 32]))
    endpoint.send(Output([], [a, b, c], [13, 0, 33]))
    endpoint.send(Output([TokenOut(a, [14], "length", 16), TokenOut(c, [34], "length")]))
    while endpoint.server_alive() and not any(isinstance(r, Drain) for r in endpoint.poll()):
        endpoint.wait(0.01)


def test_records_of_both_kinds_reach_their_streams() -> None:
    async def job() -> None:
        client = await EngineClient.local(mixed)
        streams = [client.submit([1], GREEDY, 9, []) for _ in range(3)]
        outs = await asyncio.gather(*(collect(s) for s in streams))
        assert [tokens for tokens, _, _ in outs] == [[10, 11, 12, 13, 14], [20, 21, 22], [30, 31, 32, 33, 34]]
        assert [finish for _, finish, _ in outs] == ["length", "stop", "length"]
        assert outs[0][2] == 16 and client.live_requests == 0
        await client.close()

    run(job())


async def collect(s: RequestStream) -> tuple[list[int], str, int]:
    tokens, finish, cached = [], "", 0
    async for out in s:
        tokens += out.tokens
        finish, cached = out.finish, out.cached_tokens
    return tokens, finish, cached
