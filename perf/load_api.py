"""Load on the whole server with an engine that emits at a fixed rate behind the real rings; writes perf/results/api-load.json.

Three processes: engine, server, client. A token is the time at which the engine sent it, so that the client, on the same
clock, knows how long the token took: ring, server, socket and the client's own read together. The server has a core to itself,
engine and client share another.

  latency   streams at 50 tokens/s each, arriving evenly ("staggered") or all in one record, as a batch step gives them ("burst").
            In a burst of 64 the last token waits for 63 others, so its time is that of all of them. Tokens that arrive evenly are
            also measured with cores kept from sleeping, see load_api_awake: most of their time is a core's waking up.
  floor     the same client, with a relay of three system calls in the place of engine, rings and server: the machine's part.
  capacity  256 streams in bursts, faster and faster, until the server falls behind: tokens are merged into one event
            because they waited together.
  soak      requests of all kinds on more connections than the engine takes: memory before and after, and every request's end
            compared with /metrics.

Each repeat waits for a quiet moment. One during which other programs used more than a tenth of a core all the same is put aside and
done again, up to a limit. The result is written case by case; cases that the file has already, of the same commit, are kept.

    python -m graphrt.perf.load_api [--out perf/results/api-load.json] [--repeats 7] [--soak 400000]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from graphrt.perf.load_api_cases import OTHER_CPU, Bench, soaked
from graphrt.perf.machine import machine_facts
from graphrt.perf.quiet import stalls

TARGET_US = 300.0
SECONDS = 6.0  # of a repeat
WHAT = (
    "a streamed token from the engine's stamp to the client's read: ring, server, socket, client; "
    "server alone on a core, engine and client on another"
)


def cases(arguments: argparse.Namespace) -> dict[str, Callable[[], dict[str, Any]]]:
    """All of them by name."""

    def with_cores(awake: bool) -> Bench:
        return Bench(awake, arguments.repeats, arguments.retries, arguments.patience)

    asleep, awake = with_cores(False), with_cores(True)
    return {
        "floor_64": lambda: asleep.floor(64, SECONDS),
        "staggered_64": lambda: asleep.latency("staggered", 64, SECONDS),
        "burst_64": lambda: asleep.latency("burst", 64, SECONDS),
        "burst_256": lambda: asleep.latency("burst", 256, SECONDS),
        "capacity_of_one_core": lambda: asleep.capacity(256, 3.0),
        "floor_64_awake": lambda: awake.floor(64, SECONDS),
        "staggered_64_awake": lambda: awake.latency("staggered", 64, SECONDS),
        "staggered_256_awake": lambda: awake.latency("staggered", 256, SECONDS),
        "soak": lambda: soaked(arguments.soak),
    }


def head(arguments: argparse.Namespace) -> dict[str, Any]:
    """What all cases have in common."""
    facts = machine_facts(("uvicorn", "uvloop", "httptools", "starlette", "msgspec"))
    return {
        "what": WHAT,
        "command": f"python -m graphrt.perf.load_api --repeats {arguments.repeats} --retries {arguments.retries} "
        f"--patience {arguments.patience:g} --soak {arguments.soak}",
        "machine": {**facts, "stalls_of_a_bare_loop": stalls()},
        "repeats": arguments.repeats,
    }


def target(found: dict[str, Any]) -> dict[str, Any]:
    """The case that has one: tokens that arrive evenly."""
    p99 = {name: found[name]["p99_us"]["median"] for name in ("staggered_64", "staggered_64_awake") if name in found}
    return {"p99_us_at_most": TARGET_US, "p99_us": p99, "met": {name: us <= TARGET_US for name, us in p99.items()}}


def bench(arguments: argparse.Namespace) -> dict[str, Any]:
    os.sched_setaffinity(0, {OTHER_CPU})
    out: Path | None = arguments.out
    result = {**head(arguments), "cases": {}}
    if out is not None and out.exists():
        old = json.loads(out.read_text())
        if old["machine"]["commit"] == result["machine"]["commit"]:
            result["cases"] = old["cases"]
    for name, run in cases(arguments).items():
        if name not in result["cases"]:
            print(f"{name} ...", file=sys.stderr, flush=True)
            result["cases"][name] = run()
            result["target"] = target(result["cases"])
            if out is not None:
                out.write_text(json.dumps(result, indent=1) + "\n")
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the result here too")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--retries", type=int, default=14, help="more repeats in place of noisy ones")
    parser.add_argument("--patience", type=float, default=30.0, help="seconds that a repeat waits for quiet")
    parser.add_argument("--soak", type=int, default=400_000, help="requests of the soak")
    print(json.dumps(bench(parser.parse_args()), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
