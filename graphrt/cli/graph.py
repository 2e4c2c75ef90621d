"""`graphrt graph`: what would be replayed: every captured graph, its edges, the bytes it moves."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphrt.cli import device
from graphrt.cli.parser import integer
from graphrt.errors import ConfigError

if TYPE_CHECKING:
    from graphrt.graph_report import GraphReport


def add(commands: Any) -> None:
    """Add the subcommand to `commands`, argparse's subparsers."""
    parser = commands.add_parser(
        "graph",
        help="show the captured graphs of a model",
        description="Capture a model's steps as the server does, and show nodes, edges, bytes and memory.\n"
        "Without a GPU the graphs of the fake device are shown, which runs nothing here.",
        epilog="example:\n  graphrt graph smollm2-135m-instruct --max-batch 4\n"
        "  graphrt graph smollm2-135m-instruct --dot step.dot --of decode:2 && dot -Tsvg step.dot -o step.svg",
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="name or directory (default: the default model)")
    parser.add_argument("--device", choices=("auto", "cuda"), default="auto", help="default: %(default)s")
    parser.add_argument("--max-batch", type=integer(1, 256), default=8, metavar="N", help="default: %(default)s")
    parser.add_argument("--prefill-chunk", type=integer(1, 65536), metavar="N", help="default: 1024")
    parser.add_argument("--ctx", type=integer(1), default=512, metavar="N", help="tokens each row sees; %(default)s")
    parser.add_argument("--dot", type=Path, metavar="FILE", help="write one graph in Graphviz's language")
    parser.add_argument("--of", default="decode:1", metavar="KIND:ROWS", help="which one (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Capture, show, and write the one that was asked for."""
    import sys

    import msgspec

    from graphrt.cli.model import obtain
    from graphrt.engine_config import EngineConfig
    from graphrt.graph_report import report

    chosen, why = device.choose(args.device)
    config = EngineConfig(
        str(obtain(args.model)), "cuda", args.max_batch, context=args.ctx, prefill_chunk=args.prefill_chunk
    )
    if chosen == "cpu":
        print(f"graphrt graph: {why}: these are the fake device's graphs", file=sys.stderr)
    found, graphs = report(config, args.ctx, fake=chosen == "cpu")
    if args.dot:
        picked = {f"{kind}:{rows}": g for (kind, rows), g in graphs.captured.items()}
        if args.of not in picked:
            raise ConfigError(f"--of {args.of}: there are {', '.join(picked)}")
        args.dot.write_text(picked[args.of].dot())
    if args.json:
        print(msgspec.json.encode(found).decode())
    else:
        show(found)
    return 0


def show(found: GraphReport) -> None:
    """A table for people."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table("step", "rows", "nodes", "PDL edges", "plain edges", "weights MB", f"KV MB at {found.context}")
    for g in found.graphs:
        numbers = (g.rows, g.nodes, g.programmatic_edges, g.plain_edges)
        table.add_row(g.kind, *map(str, numbers), f"{g.bytes_weights / 1e6:.1f}", f"{g.bytes_kv / 1e6:.2f}")
    console.print(f"{found.model} on {found.device}")
    console.print(table)
    memory = {n: getattr(found, n) for n in ("weights", "kv_cache", "step_buffers", "temporaries", "workspaces")}
    console.print("memory, MB: " + ", ".join(f"{n.replace('_', ' ')} {v / 1e6:.1f}" for n, v in memory.items()))
