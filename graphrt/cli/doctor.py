"""`graphrt doctor`: what this machine has, what it lacks, and the command that gets it."""

from __future__ import annotations

import argparse
import sys
from typing import Any


def add(commands: Any) -> None:
    """Add the subcommand to `commands`, argparse's subparsers."""
    parser = commands.add_parser(
        "doctor",
        help="what this machine has and lacks, with the command that gets it",
        description="Examine CPU, memory, Python, GPU, driver, CUDA packages, RDMA, Redis and the models on disk.\n"
        "Exit code 0 if a model can be served on the CPU, else 1.",
        epilog="example:\n  graphrt doctor\n  graphrt doctor --json | jq '.checks[] | select(.state != \"ok\")'",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object: version, can_serve, checks")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Examine, show, and say by the exit code whether the main job can run."""
    import msgspec

    from graphrt import __version__
    from graphrt.doctor import report

    checks = report.examine()
    fine = report.can_serve(checks)
    if args.json:
        print(msgspec.json.encode({"version": __version__, "can_serve": fine, "checks": checks}).decode())
    elif sys.stdout.isatty():
        report.show_table(checks)
    else:
        print(report.plain(checks))
    return 0 if fine else 1
