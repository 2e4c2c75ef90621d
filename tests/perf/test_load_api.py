"""The server's load test in small: its parts measure what they say and count what they send."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from graphrt.perf.load_api_awake import Awake
from graphrt.perf.load_api_cases import merged, steady
from graphrt.perf.load_api_client import Trace, run_streams
from graphrt.perf.load_api_floor import floor_us
from graphrt.perf.load_api_process import ServerProcess
from graphrt.perf.load_api_soak import kinds, soak


def event(text: str) -> bytes:
    return b'data: {"choices":[{"delta":{"content":"%s"}}]}\n\n' % text.encode()


def test_a_trace_knows_when_each_token_was_complete() -> None:
    first, second, third = (f"{sent:016d} " for sent in (1_000, 2_000, 2_500))
    trace = Trace()
    stream = event("") + event(first) + event(second + third) + event("") + b"data: [DONE]\n\n"
    cut = stream.index(second.encode()) + 5  # in the middle of the second token
    trace.parts, trace.times = [stream[:cut], stream[cut:]], [1_400_000, 3_000_000]
    assert list(trace.tokens()) == [(1_000, 400.0), (2_000, 1_000.0), (2_500, 500.0)]
    assert trace.events == 5 and merged([trace]) == 1.5
    assert steady([trace], 1 / 3) == [1_000.0, 500.0]


@pytest.fixture(scope="module", params=["burst", "staggered"])
def server(request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    with ServerProcess({"step_ms": 5, "pattern": request.param}) as running:
        yield running


def test_every_token_of_every_stream_is_timed(server: ServerProcess) -> None:
    traces = run_streams(server.port, 6, 30, 20.0)
    for trace in traces:
        tokens = list(trace.tokens())
        sent = [at for at, _ in tokens]
        assert trace.status == 200 and len(tokens) == 30 and sent == sorted(sent)
        assert all(0 < latency < 5e6 for _, latency in tokens)
        assert len(set(sent)) == 30 and sent[-1] - sent[0] > 27 * 5_000
    assert 1.0 <= merged(traces) < 30


def counts(server: ServerProcess) -> tuple[Counter[str], Counter[str]]:
    """By status, without the pages that are asked for here, and by reason of the end."""
    by_status = Counter(server.counts("http_requests_total", "status"))
    by_status["200"] -= server.counts("http_requests_total", "route").get("/metrics", 0) - 1
    return by_status, Counter(server.counts("request_success_total", "finished_reason"))


def test_every_request_is_accounted_for(server: ServerProcess) -> None:
    before = counts(server)
    heard: list[int] = []
    seed = random.randrange(1 << 30)
    print("seed", seed)
    totals = soak(server.port, 24, 200, seed, heard.append)
    assert totals.sent == 200 and heard == list(range(1, 201)) and not totals.wrong
    assert set(totals.ended) >= {"200", "400", "404", "499"}
    end = time.monotonic() + 5
    while sum((statuses := counts(server)[0] - before[0]).values()) < 200 and time.monotonic() < end:
        time.sleep(0.05)  # those that left are noticed a moment later
    assert statuses == totals.ended
    assert counts(server)[1] - before[1] == {"length": totals.ended["200"], "abort": totals.ended["499"]}


def test_the_kinds_are_told_apart_by_their_end() -> None:
    assert {kind.status for kind in kinds()} == {"200", "400", "404", "499"}
    assert all((kind.leave_after_s is not None) == (kind.status == "499") for kind in kinds())


def test_the_floor_passes_every_token_on() -> None:
    found = floor_us(4, 100, 2000.0, None, None)
    assert len(found) == 100 and all(0 < latency < 5e6 for latency in found)


def test_idle_loops_end_with_the_test() -> None:
    with Awake(sorted(os.sched_getaffinity(0))[:2]) as awake:
        pids = awake.pids
        assert all(Path(f"/proc/{pid}").exists() for pid in pids)
    assert pids and not any(Path(f"/proc/{pid}").exists() for pid in pids)
