"""Latency of one token through the rings while the server process is busy with JSON; writes perf/results/seam.json.

A second process stamps each token with the clock and sends it; the latency ends where a coroutine of the server has the
token in hand. Meanwhile the server's event loop does what a server does, decoding requests and encoding chunks, without
a pause: each turn of the loop is one piece of JSON work, and a token waits for the piece that runs. For contrast: the
same stamps through a plain pipe to a process that only sleeps in `read` (what kernel and machine cost anyone), the engine
as a thread of the server, and a server with a thread that holds the interpreter with `json`.

A repeat during which other programs used more than a tenth of a core says more of them than of the seam: it is put aside
(its share of the result is `noisy_repeats`) and done again, up to a limit; then the noisy ones count.

    python -m graphrt.perf.bench_seam [--out perf/results/seam.json] [--tokens 3000] [--repeats 5]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import uvloop

from graphrt.engine_config import EngineConfig
from graphrt.perf.json_load import LoopWork, json_thread
from graphrt.perf.machine import machine_facts
from graphrt.perf.quiet import OtherLoad, Shares, spread, stalls
from graphrt.seam.client import EngineClient
from graphrt.seam.endpoint import EngineEndpoint
from graphrt.seam.records import Cancel, Drain, EngineInfo, Output, Sampling, Submit, TokenOut
from graphrt.seam.wires import ServerWires

PERIOD_S = 0.001  # between two tokens
TARGET_US = 200.0
NOISE_NAP_S = 1.0


def stamp(config: EngineConfig, endpoint: EngineEndpoint) -> None:
    """Runner: the live requests get a token each millisecond, all in one record; a token is the time in ns."""
    endpoint.send(EngineInfo("stamp", "cpu", 0, 0, 0, 0, 0, 0, 0, os.getpid()))
    live: set[int] = set()
    due = time.perf_counter()
    while endpoint.server_alive() and not endpoint.terminate_requested:
        for record in endpoint.poll():
            if isinstance(record, Submit):
                live.add(record.id)
            elif isinstance(record, Cancel):
                live.discard(record.id)
            elif isinstance(record, Drain):
                return
        if not live:
            endpoint.wait(None)
            due = time.perf_counter()
            continue
        due += PERIOD_S
        rest = due - time.perf_counter()
        if rest > 0:
            time.sleep(rest)
        endpoint.send(Output([TokenOut(request, [time.perf_counter_ns()]) for request in live]))


async def latencies_us(client: EngineClient, tokens: int, streams: int) -> list[float]:
    """Of `tokens` records, as seen by the first of `streams` streams (all are read)."""
    found: list[float] = []

    async def read(stream: Any, keep: bool) -> None:
        async for out in stream:
            now = time.perf_counter_ns()
            if keep:
                found.extend((now - sent) / 1000 for sent in out.tokens)
                if len(found) >= tokens:
                    return

    opened = [client.submit([1], Sampling(), 1 << 30, []) for _ in range(streams)]
    others = [asyncio.create_task(read(stream, False)) for stream in opened[1:]]
    await read(opened[0], True)
    for stream in opened:
        await stream.aclose()
    await asyncio.gather(*others)
    return found[tokens // 20 :]  # the first twentieth warms up


def pipe_floor(arguments: argparse.Namespace) -> dict[str, Any]:
    """The same shares for stamps through a pipe, read by this process with nothing else to do."""
    program = (
        "import os, time\n"
        "while True:\n"
        f"    time.sleep({PERIOD_S})\n"
        "    os.write(1, time.perf_counter_ns().to_bytes(8, 'little'))\n"
    )
    shares = Shares(arguments.repeats, arguments.retries)
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, bufsize=0) as child:
        assert child.stdout is not None
        while not shares.complete():
            others = OtherLoad(child.pid)
            values = []
            for _ in range(arguments.tokens):
                sent = os.read(child.stdout.fileno(), 8)
                values.append((time.perf_counter_ns() - int.from_bytes(sent, "little")) / 1000)
            shares.add(values, others.cores())
        child.kill()
    return shares.result()


async def measure(
    start: Callable[[], Awaitable[EngineClient]],
    busy: Callable[[], contextlib.AbstractContextManager[object]],
    arguments: argparse.Namespace,
    streams: int = 1,
) -> dict[str, Any]:
    """p50, p99 and the largest latency, each as median and range over the repeats."""
    shares = Shares(arguments.repeats, arguments.retries)
    client = await start()
    while not shares.complete():
        others = OtherLoad(client.info.pid)
        with busy():
            values = await latencies_us(client, arguments.tokens, streams)
        if not shares.add(values, others.cores()):
            await asyncio.sleep(NOISE_NAP_S)
    await client.close()
    return shares.result()


def host_costs_ns(repeats: int) -> dict[str, Any]:
    """What the seam costs the engine: an empty `poll`, a `send` of one token, awake and asleep server."""
    wires = ServerWires(1 << 22)
    endpoint = EngineEndpoint(wires.engine_fds.duplicate())
    record = Output([TokenOut(12345, [31337])])
    rounds = 20_000

    def timed(body: Callable[[], object], after: Callable[[], object] | None = None) -> float:
        total = 0
        for _ in range(rounds):
            start = time.perf_counter_ns()
            body()
            total += time.perf_counter_ns() - start
            if after is not None:
                after()
        return total / rounds

    clock = statistics.median(timed(lambda: None) for _ in range(repeats))
    found: dict[str, list[float]] = {"empty_poll": [], "send_server_awake": [], "send_server_asleep": []}
    for _ in range(repeats):
        found["empty_poll"].append(timed(endpoint.poll) - clock)
        found["send_server_awake"].append(timed(lambda: endpoint.send(record), wires.rx.recv) - clock)

        def sleep_again() -> None:
            wires.rx.recv()
            wires.rx.bell.disarm()
            wires.rx.bell.arm()

        sleep_again()
        found["send_server_asleep"].append(timed(lambda: endpoint.send(record), sleep_again) - clock)
        wires.rx.bell.disarm()
    endpoint.close()
    wires.close()
    return {name: spread(values, 0) for name, values in found.items()}


async def bench(arguments: argparse.Namespace) -> dict[str, Any]:
    facts = machine_facts(("uvloop", "msgspec"))
    facts["load_average_before"] = round(os.getloadavg()[0], 2)
    facts["stalls_of_a_bare_loop"] = stalls()

    async def process() -> EngineClient:
        return await EngineClient.launch(EngineConfig("none"), runner="graphrt.perf.bench_seam:stamp")

    async def thread() -> EngineClient:
        return await EngineClient.local(lambda endpoint: stamp(EngineConfig("none"), endpoint))

    small, medium, large = LoopWork(1_000, 4), LoopWork(16_000, 16), LoopWork(64_000, 64)
    cases: dict[str, Any] = {"plain_pipe": pipe_floor(arguments)}
    cases["idle"] = await measure(process, contextlib.nullcontext, arguments)
    for name, work in (("small", small), ("medium", medium), ("large", large)):
        piece_us = work.piece_us()
        result = await measure(process, lambda work=work: work, arguments)  # type: ignore[misc]
        cases[f"loop_busy_{name}"] = {"json_piece_us": round(piece_us, 1), **result}
    cases["loop_busy_small_64_streams"] = await measure(process, lambda: small, arguments, streams=64)
    cases["beside_json_thread"] = await measure(process, json_thread, arguments)
    cases["engine_as_thread_loop_busy_small"] = await measure(thread, lambda: small, arguments)
    p99 = {name: cases[name]["p99_us"]["median"] for name in ("loop_busy_small", "loop_busy_medium")}
    return {
        "what": "one token, engine process to coroutine of the server, uvloop, one token a millisecond",
        "command": f"python -m graphrt.perf.bench_seam --tokens {arguments.tokens} --repeats {arguments.repeats} "
        f"--retries {arguments.retries}",
        "machine": facts,
        "repeats": arguments.repeats,
        "tokens_per_repeat": arguments.tokens,
        "target": {"p99_us_at_most": TARGET_US, "p99_us": p99, "met": max(p99.values()) <= TARGET_US},
        "latency": cases,
        "engine_cost_ns": host_costs_ns(arguments.repeats),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the result here too")
    parser.add_argument("--tokens", type=int, default=3000, help="a repeat, one a millisecond")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--retries", type=int, default=20, help="more repeats in place of noisy ones")
    arguments = parser.parse_args()
    result = uvloop.run(bench(arguments))
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
