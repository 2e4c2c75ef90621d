"""`graphrt bench serve`: load on a running server, and what its clients saw."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from graphrt.cli.parser import integer, number


def add(commands: Any) -> None:
    """Add the subcommand to `commands`, argparse's subparsers."""
    bench = commands.add_parser("bench", help="measure a running server", description="Measure a running server.")
    kinds = bench.add_subparsers(title="what to measure", metavar="KIND", required=True)
    parser = kinds.add_parser(
        "serve",
        help="requests at a rate or a concurrency: latencies, throughput, goodput",
        description="Send streamed requests to an OpenAI-compatible server.\n"
        "ttft: time to the first text. tpot: time per later token. itl: gap between events. e2e: the whole.",
        epilog="example:\n  graphrt bench serve --concurrency 4 --requests 32 --input-len 128 --output-len 64\n"
        "  graphrt bench serve --rate 2 --requests 100 --slo ttft:500,tpot:50 --json",
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="default: %(default)s")
    parser.add_argument("--model", help="default: the first that the server lists")
    load = parser.add_mutually_exclusive_group()
    load.add_argument(
        "--rate", type=number(1e-3, 1e6), metavar="R", help="requests a second, at random (Poisson) times"
    )
    load.add_argument("--concurrency", type=integer(1, 100_000), metavar="N", help="requests under way; default: 1")
    parser.add_argument("--requests", type=integer(1, 10_000_000), default=32, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--input-len", type=integer(1, 10_000_000), default=128, metavar="T", help="default: %(default)s"
    )
    parser.add_argument(
        "--output-len", type=integer(1, 10_000_000), default=64, metavar="T", help="default: %(default)s"
    )
    parser.add_argument(
        "--dataset", type=Path, metavar="FILE", help="JSON lines with prompt or messages, and max_tokens"
    )
    parser.add_argument(
        "--slo", type=slo, default={}, metavar="BOUNDS", help="for goodput, in ms: ttft:200,tpot:50,e2e:9000"
    )
    parser.add_argument("--api-key", metavar="KEY")
    parser.add_argument(
        "--timeout", type=number(0.1, 86400), default=600.0, metavar="S", help="of a request; %(default)s"
    )
    parser.add_argument("--seed", type=integer(0), default=0, help="of prompts and arrivals; default: %(default)s")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    parser.set_defaults(run=run)


def slo(text: str) -> dict[str, float]:
    """Bounds in ms by name."""
    out = {}
    for part in text.split(","):
        name, _, bound = part.partition(":")
        if name not in ("ttft", "tpot", "e2e"):
            raise argparse.ArgumentTypeError(f"{name!r} is not one of ttft, tpot, e2e: write ttft:200,tpot:50")
        out[name] = number(0, 1e9)(bound)
    return out


def run(args: argparse.Namespace) -> int:
    """Send, wait, report. Exit code 1 when no request ended well."""
    import msgspec
    import uvloop
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

    from graphrt.perf.bench_client import Target
    from graphrt.perf.bench_serve import Load, run_load

    concurrency = args.concurrency if args.rate or args.concurrency else 1
    load = Load(
        args.requests, args.rate, concurrency, args.input_len, args.output_len, args.seed, args.model, args.dataset
    )
    target = Target(args.url, args.api_key, args.timeout)
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("requests", total=load.requests)
        result = uvloop.run(run_load(target, load, args.slo, lambda done: bar.update(task, completed=done)))
    if args.json:
        print(msgspec.json.encode(result).decode())
    else:
        show(result)
    return 0 if result["completed"] else 1


def show(result: dict[str, Any]) -> None:
    """A table for people."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table("ms", "mean", "p50", "p90", "p99", "max")
    for name in ("ttft", "tpot", "itl", "e2e"):
        values = result[f"{name}_ms"]
        table.add_row(name, *(f"{values[k]:.2f}" if values else "-" for k in ("mean", "p50", "p90", "p99", "max")))
    console.print(table)
    line = f"{result['completed']} of {result['requests']} requests in {result['duration_s']:.1f} s"
    if "output_tokens_per_s" in result:
        line += f", {result['requests_per_s']:.2f} requests/s, {result['output_tokens_per_s']:.1f} output tokens/s"
    if "goodput_per_s" in result:
        line += f", goodput {result['goodput_per_s']:.2f} requests/s"
    console.print(line)
    for error, count in result["errors"].items():
        console.print(f"{count} failed: {error}")
