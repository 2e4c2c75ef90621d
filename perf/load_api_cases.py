"""The cases of the server's load test: latency, the machine's floor under it, what one core carries, and the soak."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import Any, TypeVar

from graphrt.perf.load_api_awake import Awake
from graphrt.perf.load_api_client import Trace, run_streams
from graphrt.perf.load_api_floor import floor_us
from graphrt.perf.load_api_process import Foreign, ServerProcess
from graphrt.perf.load_api_soak import soak
from graphrt.perf.quiet import QUIET_CORES, Shares, percentile

T = TypeVar("T")

SERVER_CPU, OTHER_CPU = 0, 1
RATE = 50.0  # tokens a second and stream
BEHIND = 1.05  # tokens an event
STEPS_MS = (20.0, 10.0, 7.0, 5.0, 4.0, 3.5, 3.2, 3.0, 2.8, 2.6, 2.4, 2.2, 2.0)
MEMORY_BOUND = 0.05
CONNECTIONS = 352  # the engine takes 256 and lets 64 wait
WINDOWS = 20  # of the soak, at whose ends the memory is looked at; the first five warm up


def steady(traces: list[Trace], share: float = 0.1) -> list[float]:
    """Latencies in us, without the first tokens of each stream, when others were still beginning."""
    out: list[float] = []
    for trace in traces:
        found = [latency for _, latency in trace.tokens()]
        out += found[int(len(found) * share) :]
    return out


def merged(traces: list[Trace]) -> float:
    """Tokens an event that holds any."""
    tokens = sum(sum(1 for _ in trace.tokens()) for trace in traces)
    return tokens / sum(trace.events - 3 for trace in traces)  # the role, the finish and [DONE] hold none


def server_for(step_ms: float, pattern: str) -> ServerProcess:
    return ServerProcess({"step_ms": step_ms, "pattern": pattern, "cpu": OTHER_CPU}, SERVER_CPU)


def used(server: ServerProcess, streams: int, tokens: int) -> tuple[list[Trace], dict[str, float]]:
    """Run the streams; the traces, and the server's use of its core meanwhile."""
    before, start = server.cpu_s(), time.perf_counter()
    traces = run_streams(server.port, streams, tokens, 120.0)
    span, spent = time.perf_counter() - start, server.cpu_s() - before
    return traces, {"core_share": spent / span, "cpu_us_per_token": spent / (streams * tokens) * 1e6}


class Bench:
    """`awake` keeps the cores so while it measures. A repeat waits `patience_s` for a quiet moment; noisy ones are done again,
    `retries` times in all.
    """

    def __init__(self, awake: bool, repeats: int, retries: int, patience_s: float) -> None:
        self._awake = awake
        self._repeats = repeats
        self._retries = retries
        self._patience_s = patience_s

    def latency(self, pattern: str, streams: int, seconds: float) -> dict[str, Any]:
        """Of streamed tokens."""
        costs: list[dict[str, float]] = []
        with server_for(1000 / RATE, pattern) as server:
            run_streams(server.port, streams, 10, 60.0)

            def once() -> list[float]:
                traces, cost = used(server, streams, int(seconds * RATE))
                costs.append(cost)
                return steady(traces)

            result = self._repeat(once, server.pid, server.engine_pid)
        shares = {name: round(statistics.median(cost[name] for cost in costs), 3) for name in costs[0]}
        return {"streams": streams, "tokens_per_s": streams * RATE, **result, **shares}

    def floor(self, streams: int, seconds: float) -> dict[str, Any]:
        """The machine's part of it."""
        rate = streams * RATE

        def once() -> list[float]:
            found = floor_us(streams, int(seconds * rate), rate, SERVER_CPU, OTHER_CPU)
            return found[len(found) // 10 :]

        return {"streams": streams, "tokens_per_s": rate, **self._repeat(once)}

    def capacity(self, streams: int, seconds: float) -> dict[str, Any]:
        """Faster and faster; at each rate the run with the lowest p99 of three, since others can only add to it."""
        points: list[dict[str, float]] = []
        for step_ms in STEPS_MS:
            with server_for(step_ms, "burst") as server:
                run_streams(server.port, streams, 10, 60.0)
                runs = [self._point(server, streams, int(seconds * 1000 / step_ms)) for _ in range(3)]
            best = min(runs, key=lambda run: run["p99_us"])
            points.append({"offered_tokens_per_s": round(streams * 1000 / step_ms), "step_ms": step_ms, **best})
            if best["tokens_per_event"] > BEHIND:
                break
        kept = [point["offered_tokens_per_s"] for point in points if point["tokens_per_event"] <= BEHIND]
        return {"streams": streams, "highest_tokens_per_s": max(kept, default=0), "points": points}

    def _point(self, server: ServerProcess, streams: int, tokens: int) -> dict[str, float]:
        pids = server.pid, server.engine_pid
        (traces, cost), foreign = self._quietly(lambda: used(server, streams, tokens), *pids)
        late = steady(traces)
        found = {"p50_us": percentile(late, 0.5), "p99_us": percentile(late, 0.99), "tokens_per_event": merged(traces)}
        return {name: round(value, 3) for name, value in {**found, "others_cores": foreign, **cost}.items()}

    def _repeat(self, once: Callable[[], list[float]], *pids: int) -> dict[str, Any]:
        shares = Shares(self._repeats, self._retries)
        while not shares.complete():
            shares.add(*self._quietly(once, *pids))
        return shares.result()

    def _quietly(self, run: Callable[[], T], *pids: int) -> tuple[T, float]:
        """What `run` gives, and how many cores others used meanwhile."""
        self._await_quiet(*pids)
        with Awake((SERVER_CPU, OTHER_CPU) if self._awake else ()) as awake:
            time.sleep(0.3)  # until they are
            others = Foreign(*pids, *awake.pids)
            return run(), others.cores()

    def _await_quiet(self, *pids: int) -> None:
        end = time.monotonic() + self._patience_s
        while time.monotonic() < end:
            others = Foreign(*pids)
            time.sleep(1.0)
            if others.cores() <= QUIET_CORES / 2:
                return


def soaked(requests: int) -> dict[str, Any]:
    """Memory and accounting."""
    sizes: list[int] = []
    with server_for(10.0, "burst") as server:

        def progress(ended: int) -> None:
            if ended % (requests // WINDOWS) == 0:
                sizes.append(server.rss_bytes())

        start = time.perf_counter()
        totals = soak(server.port, CONNECTIONS, requests, random.randrange(1 << 30), progress)
        span = time.perf_counter() - start
        time.sleep(1.0)  # until those that left are noticed
        status = server.counts("http_requests_total", "status")
        ends = server.counts("request_success_total", "finished_reason")
    flat = sizes[WINDOWS // 4 - 1 :]
    growth = flat[-1] / flat[0] - 1
    ends = {reason: count for reason, count in ends.items() if count}
    # Who leaves a full queue does so before the refusal reaches it, or after.
    turned_away = ends.get("refused", 0) + ends.get("abort", 0) == totals.ended["429"] + totals.ended["499"]
    return {
        "requests": totals.sent,
        "connections": CONNECTIONS,
        "seconds": round(span, 1),
        "requests_per_s": round(totals.sent / span, 1),
        "rss_mb": [round(size / 1e6, 2) for size in sizes],
        "growth_after_warm_up": round(growth, 4),
        "flat": abs(growth) <= MEMORY_BOUND and max(flat) <= flat[0] * (1 + MEMORY_BOUND),
        "seen_by_clients": dict(sorted(totals.ended.items())),
        "counted_by_the_server": dict(sorted(status.items())),
        "finish_reasons": ends,
        "wrong": dict(totals.wrong),
        "accounted": dict(totals.ended) == status
        and ends.get("length") == totals.ended["200"]
        and turned_away
        and not totals.wrong,
    }
