"""The command line. Nothing heavy is imported before a command runs, so that `--help` is instant.

Exit codes: 0 done, 1 an error with one line that says what, 2 wrong usage, 130 interrupted. GRAPHRT_DEBUG=1 shows tracebacks.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from graphrt import __version__
from graphrt.cli import bench, doctor, generate, graph, profile, pull, serve
from graphrt.cli.parser import Parser
from graphrt.errors import GraphrtError

INTERRUPTED = 130
READER_LEFT = 141


def build_parser() -> Parser:
    """The whole command line as one parser; each subcommand sets `run`."""
    parser = Parser(
        prog="graphrt",
        description="Serve and run language models with little overhead.",
        epilog="example:\n  graphrt serve                         # the default model on http://127.0.0.1:8000\n"
        "  graphrt serve --help                  # each command explains itself, with an example",
    )
    parser.add_argument("--version", action="version", version=f"graphrt {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    for module in (serve, generate, pull, bench, profile, graph, doctor):
        module.add(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code. Wrong usage and --help leave through SystemExit, as argparse does."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        code = int(args.run(args))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The interpreter flushes stdout once more at exit; that must not complain either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_LEFT
    except (GraphrtError, OSError) as error:
        if os.environ.get("GRAPHRT_DEBUG") == "1":
            raise
        print(f"graphrt {args.command}: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"graphrt {args.command}: interrupted", file=sys.stderr)
        return INTERRUPTED
