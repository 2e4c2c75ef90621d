"""`graphrt profile`: how long a decode step takes, and what share of the memory's rate that is."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from graphrt.cli import device
from graphrt.cli.parser import integer
from graphrt.errors import ConfigError

SHAPES = ("llama-1b", "llama-8b", "smollm2-135m")
BLOCK_TOKENS = 16


def add(commands: Any) -> None:
    """Add the subcommand to `commands`, argparse's subparsers."""
    parser = commands.add_parser(
        "profile",
        help="time the decode step beside what memory allows",
        description="Run the engine's own loop without a server, greedily, and time its decode steps.\n"
        "The ceiling is a plain read of memory in the same process.",
        epilog="example:\n  graphrt profile --shape llama-1b --batch 1,8,32 --ctx 512\n"
        "  graphrt profile smollm2-135m-instruct --device cpu --steps 200 --json",
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="name or directory (default: the default model)")
    parser.add_argument("--shape", choices=SHAPES, help="random weights of a well-known shape instead of a model")
    parser.add_argument("--device", choices=device.CHOICES, default="auto", help="default: %(default)s")
    parser.add_argument("--batch", type=numbers(1, 256), default=[1], metavar="N[,N]", help="sequences; default: 1")
    parser.add_argument("--ctx", type=numbers(1, 1 << 20), default=[512], metavar="T[,T]", help="tokens of each; 512")
    parser.add_argument("--steps", type=integer(1, 10**6), default=2000, help="at least; default: %(default)s")
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of the table")
    parser.set_defaults(run=run)


def numbers(low: int, high: int) -> Any:
    """Comma-separated integers."""
    one = integer(low, high)
    return lambda text: [one(part) for part in text.split(",")]


def run(args: argparse.Namespace) -> int:
    """Measure every batch at every context, and print."""
    import tempfile
    from pathlib import Path

    import msgspec

    from graphrt.cli.model import obtain
    from graphrt.engine_config import EngineConfig
    from graphrt.perf.profile_step import ROUND, profile
    from graphrt.perf.shapes import write_shape

    if args.shape and args.model:
        raise ConfigError(f"--shape {args.shape} beside the model {args.model}: one of them")
    chosen, _why = device.choose(args.device)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        model_dir = write_shape(args.shape, Path(folder)) if args.shape else obtain(args.model)
        for ctx in args.ctx:
            context = -(-(ctx + ROUND) // BLOCK_TOKENS) * BLOCK_TOKENS
            for batch in args.batch:
                config = EngineConfig(
                    str(model_dir),
                    chosen,
                    max_batch=batch,
                    context=context,
                    block_tokens=BLOCK_TOKENS,
                    load_format="dummy" if args.shape else "auto",
                )
                result = profile(config, args.shape or model_dir.name, batch, ctx, args.steps)
                results.append(result)
                if args.json:
                    print(msgspec.json.encode(result).decode(), flush=True)
    if not args.json:
        show(results)
    return 0


def show(results: list[Any]) -> None:
    """A table for people."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 120)  # a pipe is no narrow terminal
    table = Table(
        "batch", "ctx", "ms p50", "p99", "p99.9", "tokens/s", "GB", "ceiling GB/s", "share", "idle µs", "host µs"
    )
    for r in results:
        idle = "-" if r.idle_us_p50 is None else f"{r.idle_us_p50:.1f}"
        table.add_row(
            str(r.batch), str(r.ctx), f"{r.ms_p50:.3f}", f"{r.ms_p99:.3f}", f"{r.ms_p999:.3f}",
            f"{r.batch / r.ms_p50 * 1e3:.0f}", f"{r.bytes / 1e9:.3f}", f"{r.ceiling_gbps:.0f}",
            f"{r.ceiling_share:.1%}", idle, f"{r.host_us_p50:.1f}",
        )  # fmt: skip
    first = results[0]
    console.print(f"{first.shape} on {first.card}, {first.steps} steps, greedy")
    console.print(table)
