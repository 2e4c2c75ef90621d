"""Load on the whole server with an engine that emits at a fixed rate behind the real rings; writes perf/results/api-load.json.

Three processes: engine, server, client. A token is the time at which the engine sent it, so that the client, on the same
clock, knows how long the token took: ring, server, socket and the client's own read together. The server has a core to itself,
engine and client share another.

  latency   streams at 50 tokens/s each, arriving evenly ("staggered") or all in one record, as a batch step gives them ("burst").
            In a burst of 64 the last token waits for 63 others, so its time is that of all of them. Measured with cores that
            sleep when they are idle, and with cores kept awake, see load_api_awake.
  floor     the same client, with a relay of three system calls in the place of engine, rings and server: the machine's part.
  capacity  256 streams in bursts, faster and faster, until the server falls behind: tokens are merged into one event
            because they waited together.
  soak      requests of all kinds on more connections than the engine takes: memory before and after, and every request's end
            compared with /metrics.

Each repeat waits for a quiet moment. One during which other programs used more than a tenth of a core all the same is put aside and
done again, up to a limit.

    python -m graphrt.perf.load_api [--out perf/results/api-load.json] [--repeats 7] [--soak 150000]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from graphrt.perf.load_api_awake import Awake
from graphrt.perf.load_api_client import Trace, run_streams
from graphrt.perf.load_api_floor import floor_us
from graphrt.perf.load_api_process import Foreign, ServerProcess
from graphrt.perf.load_api_soak import soak
from graphrt.perf.machine import machine_facts
from graphrt.perf.quiet import QUIET_CORES, Shares, percentile, stalls

SERVER_CPU, OTHER_CPU = 0, 1
RATE = 50.0  # tokens a second and stream
TARGET_US = 300.0
BEHIND = 1.05  # tokens an event
STEPS_MS = (20.0, 10.0, 7.0, 5.0, 4.0, 3.5, 3.2, 3.0, 2.8, 2.6, 2.4, 2.2, 2.0)
MEMORY_BOUND = 0.05
CONNECTIONS = 352  # the engine takes 256 and lets 64 wait


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


def await_quiet(foreign: Callable[[], Foreign], limit_s: float) -> None:
    """Until others leave the machine alone for a second, at most `limit_s`."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        others = foreign()
        time.sleep(1.0)
        if others.cores() <= QUIET_CORES / 2:
            return


def server_for(step_ms: float, pattern: str) -> ServerProcess:
    return ServerProcess({"step_ms": step_ms, "pattern": pattern, "cpu": OTHER_CPU}, SERVER_CPU)


class Bench:
    """One set of cores: asleep when idle, or `awake`."""

    def __init__(self, arguments: argparse.Namespace, awake: Awake | None) -> None:
        self._arguments = arguments
        self._pids = awake.pids if awake is not None else []

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

    def _repeat(self, once: Callable[[], list[float]], *pids: int) -> dict[str, Any]:
        shares = Shares(self._arguments.repeats, self._arguments.retries)
        while not shares.complete():
            await_quiet(lambda: Foreign(*pids, *self._pids), self._arguments.patience)
            others = Foreign(*pids, *self._pids)
            values = once()
            shares.add(values, others.cores())
        return shares.result()

    def capacity(self, streams: int, seconds: float) -> dict[str, Any]:
        """Faster and faster; at each rate the run with the lowest p99 of three, since others can only add to it."""
        points = []
        for step_ms in STEPS_MS:
            with server_for(step_ms, "burst") as server:
                run_streams(server.port, streams, 10, 60.0)
                pids = server.pid, server.engine_pid
                runs = [self._point(server, streams, int(seconds * 1000 / step_ms), *pids) for _ in range(3)]
            best = min(runs, key=lambda run: run["p99_us"])
            points.append({"offered_tokens_per_s": round(streams * 1000 / step_ms), "step_ms": step_ms, **best})
            if best["tokens_per_event"] > BEHIND:
                break
        kept = [point["offered_tokens_per_s"] for point in points if point["tokens_per_event"] <= BEHIND]
        return {"streams": streams, "highest_tokens_per_s": max(kept, default=0), "points": points}

    def _point(self, server: ServerProcess, streams: int, tokens: int, *pids: int) -> dict[str, float]:
        await_quiet(lambda: Foreign(*pids, *self._pids), self._arguments.patience)
        others = Foreign(*pids, *self._pids)
        traces, cost = used(server, streams, tokens)
        late = steady(traces)
        found = {"p50_us": percentile(late, 0.5), "p99_us": percentile(late, 0.99), "tokens_per_event": merged(traces)}
        return {name: round(value, 3) for name, value in {**found, "others_cores": others.cores(), **cost}.items()}


def used(server: ServerProcess, streams: int, tokens: int) -> tuple[list[Trace], dict[str, float]]:
    """Run the streams; the traces, and the server's use of its core meanwhile."""
    before, start = server.cpu_s(), time.perf_counter()
    traces = run_streams(server.port, streams, tokens, 120.0)
    span, spent = time.perf_counter() - start, server.cpu_s() - before
    return traces, {"core_share": spent / span, "cpu_us_per_token": spent / (streams * tokens) * 1e6}


def soaked(requests: int) -> dict[str, Any]:
    """Memory and accounting; the first fifth of the requests warms up."""
    warm = requests // 5
    sizes: list[int] = []
    with server_for(10.0, "burst") as server:

        def progress(ended: int) -> None:
            if ended % (requests // 20) == 0:
                sizes.append(server.rss_bytes())

        start = time.perf_counter()
        totals = soak(server.port, CONNECTIONS, requests, random.randrange(1 << 30), progress)
        span = time.perf_counter() - start
        time.sleep(1.0)  # until those that left are noticed
        status = server.counts("http_requests_total", "status")
        ends = server.counts("request_success_total", "finished_reason")
    flat = sizes[warm * 20 // requests :]
    growth = flat[-1] / flat[0] - 1
    refused = totals.ended["429"]
    expected = {"length": totals.ended["200"], "abort": totals.ended["499"], "refused": refused}
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
        "finish_reasons": {name: count for name, count in ends.items() if count},
        "wrong": dict(totals.wrong),
        "accounted": dict(totals.ended) == status
        and {k: v for k, v in ends.items() if v} == expected
        and not totals.wrong,
    }


def bench(arguments: argparse.Namespace) -> dict[str, Any]:
    os.sched_setaffinity(0, {OTHER_CPU})
    facts = machine_facts(("uvicorn", "uvloop", "httptools", "starlette", "msgspec"))
    facts["load_average_before"] = round(os.getloadavg()[0], 2)
    facts["stalls_of_a_bare_loop"] = stalls()
    asleep = Bench(arguments, None)
    sleepy = {"floor_64": asleep.floor(64, 6.0)}
    for pattern in ("staggered", "burst"):
        sleepy[f"{pattern}_64"] = asleep.latency(pattern, 64, 6.0)
    with Awake((SERVER_CPU, OTHER_CPU)) as awake:
        wakeful = Bench(arguments, awake)
        cases = {"floor_64": wakeful.floor(64, 6.0)}
        for pattern in ("staggered", "burst"):
            for streams in (64, 256):
                cases[f"{pattern}_{streams}"] = wakeful.latency(pattern, streams, 6.0)
        most = wakeful.capacity(256, 3.0)
    p99 = {"cores_asleep": sleepy["staggered_64"], "cores_awake": cases["staggered_64"]}
    reached = {name: case["p99_us"]["median"] for name, case in p99.items()}
    return {
        "what": "a streamed token from the engine's stamp to the client's read: ring, server, socket, client; "
        "server alone on a core, engine and client on another",
        "command": f"python -m graphrt.perf.load_api --repeats {arguments.repeats} --retries {arguments.retries} "
        f"--soak {arguments.soak}",
        "machine": facts,
        "repeats": arguments.repeats,
        "target": {
            "p99_us_at_most": TARGET_US,
            "p99_us_staggered_64": reached,
            "met": {name: value <= TARGET_US for name, value in reached.items()},
        },
        "latency_cores_asleep": sleepy,
        "latency_cores_awake": cases,
        "capacity_of_one_core": most,
        "soak": soaked(arguments.soak),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the result here too")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--retries", type=int, default=14, help="more repeats in place of noisy ones")
    parser.add_argument("--patience", type=float, default=30.0, help="seconds that a repeat waits for quiet")
    parser.add_argument("--soak", type=int, default=150_000, help="requests of the soak")
    arguments = parser.parse_args()
    text = json.dumps(bench(arguments), indent=1)
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
