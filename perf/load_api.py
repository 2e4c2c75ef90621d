"""Load on the whole server with an engine that emits at a fixed rate behind the real rings; writes perf/results/api-load.json.

Three processes: engine, server, client. A token is the time at which the engine sent it, so that the client, on the same
clock, knows how long the token took: ring, server, socket and the client's own read together. The server has a core to itself,
engine and client share another.

  latency   streams at 50 tokens/s each, arriving evenly ("staggered") or all in one record, as a batch step gives them ("burst").
            In a burst of 64 the last token waits for 63 others, so its time is that of all of them.
  floor     the same client, with a relay of three system calls in the place of engine, rings and server: the machine's part.
  capacity  256 streams in bursts, faster and faster, until the server falls behind: tokens come late by more than a step, or are
            merged into one event because they waited together.
  soak      requests of all kinds on more connections than the engine takes: memory before and after, and every request's end
            compared with /metrics.

A repeat during which other programs used more than a tenth of a core is put aside and done again, up to a limit.

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
from pathlib import Path
from typing import Any

from graphrt.perf.load_api_client import Trace, run_streams
from graphrt.perf.load_api_floor import floor_us
from graphrt.perf.load_api_process import Foreign, ServerProcess
from graphrt.perf.load_api_soak import soak
from graphrt.perf.machine import machine_facts
from graphrt.perf.quiet import Shares, percentile, stalls

SERVER_CPU, OTHER_CPU = 0, 1
RATE = 50.0  # tokens a second and stream
TARGET_US = 300.0
NOISE_NAP_S = 2.0
BEHIND = 1.05  # tokens an event
STEPS_MS = (20.0, 10.0, 7.0, 5.0, 4.5, 4.0, 3.5, 3.0, 2.5, 2.0)
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


def measured(server: ServerProcess, streams: int, tokens: int) -> tuple[list[Trace], float, dict[str, float]]:
    """(traces, cores that others used meanwhile, the server's use of its core)."""
    others, before, start = Foreign(server.pid, server.engine_pid), server.cpu_s(), time.perf_counter()
    traces = run_streams(server.port, streams, tokens, 120.0)
    span, used, foreign = time.perf_counter() - start, server.cpu_s() - before, others.cores()
    return traces, foreign, {"core_share": used / span, "cpu_us_per_token": used / (streams * tokens) * 1e6}


def server_for(step_ms: float, pattern: str) -> ServerProcess:
    return ServerProcess({"step_ms": step_ms, "pattern": pattern, "cpu": OTHER_CPU}, SERVER_CPU)


def latency(pattern: str, streams: int, seconds: float, arguments: argparse.Namespace) -> dict[str, Any]:
    """The case of the target, over repeats."""
    shares = Shares(arguments.repeats, arguments.retries)
    costs: list[dict[str, float]] = []
    with server_for(1000 / RATE, pattern) as server:
        run_streams(server.port, streams, 10, 60.0)
        while not shares.complete():
            traces, foreign, cost = measured(server, streams, int(seconds * RATE))
            costs.append(cost)
            if not shares.add(steady(traces), foreign):
                time.sleep(NOISE_NAP_S)
    used = {name: round(statistics.median(cost[name] for cost in costs), 3) for name in costs[0]}
    return {"streams": streams, "tokens_per_s": streams * RATE, **shares.result(), **used}


def floor(streams: int, seconds: float, arguments: argparse.Namespace) -> dict[str, Any]:
    """The machine's part of it."""
    shares = Shares(arguments.repeats, arguments.retries)
    rate = streams * RATE
    while not shares.complete():
        others = Foreign()
        found = floor_us(streams, int(seconds * rate), rate, SERVER_CPU, OTHER_CPU)
        if not shares.add(found[len(found) // 10 :], others.cores()):
            time.sleep(NOISE_NAP_S)
    return {"streams": streams, "tokens_per_s": rate, **shares.result()}


def capacity(streams: int, seconds: float) -> dict[str, Any]:
    """Faster and faster; of three runs at each rate the median."""
    points = []
    for step_ms in STEPS_MS:
        runs = []
        with server_for(step_ms, "burst") as server:
            run_streams(server.port, streams, 10, 60.0)
            for _ in range(3):
                traces, foreign, cost = measured(server, streams, int(seconds * 1000 / step_ms))
                late = steady(traces)
                runs.append(
                    {
                        "p50_us": percentile(late, 0.5),
                        "p99_us": percentile(late, 0.99),
                        "tokens_per_event": merged(traces),
                        "others_cores": foreign,
                        **cost,
                    }
                )
        point = {name: round(statistics.median(run[name] for run in runs), 3) for name in runs[0]}
        points.append({"offered_tokens_per_s": round(streams * 1000 / step_ms), "step_ms": step_ms, **point})
        if point["tokens_per_event"] > BEHIND or point["p99_us"] > 10 * step_ms * 1000:
            break
    kept = [p for p in points if p["tokens_per_event"] <= BEHIND]
    return {"streams": streams, "highest_tokens_per_s": max(p["offered_tokens_per_s"] for p in kept), "points": points}


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
    cases: dict[str, Any] = {"floor_64": floor(64, 6.0, arguments)}
    for pattern in ("staggered", "burst"):
        for streams in (64, 256):
            cases[f"{pattern}_{streams}"] = latency(pattern, streams, 6.0, arguments)
    p99 = cases["staggered_64"]["p99_us"]["median"]
    return {
        "what": "a streamed token from the engine's stamp to the client's read: ring, server, socket, client; "
        "server alone on a core, engine and client on another",
        "command": f"python -m graphrt.perf.load_api --repeats {arguments.repeats} --retries {arguments.retries} "
        f"--soak {arguments.soak}",
        "machine": facts,
        "repeats": arguments.repeats,
        "target": {"p99_us_at_most": TARGET_US, "p99_us_staggered_64": p99, "met": p99 <= TARGET_US},
        "latency": cases,
        "capacity_of_one_core": capacity(256, 3.0),
        "soak": soaked(arguments.soak),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the result here too")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--retries", type=int, default=14, help="more repeats in place of noisy ones")
    parser.add_argument("--soak", type=int, default=150_000, help="requests of the soak")
    arguments = parser.parse_args()
    text = json.dumps(bench(arguments), indent=1)
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
