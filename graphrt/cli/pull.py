"""`graphrt pull`: fetch or convert a model."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from pathlib import Path
from typing import Any


def add(commands: Any) -> None:
    """Add the subcommand to `commands`, argparse's subparsers."""
    parser = commands.add_parser(
        "pull",
        help="fetch or convert a model to a directory that `serve` takes",
        description="Fetch or convert a model to a directory that `serve` takes, and print its path. What is there already\n"
        "is left as it is; an interrupted run leaves nothing half-done.",
        epilog="example:\n  graphrt pull                                       # the default model\n"
        "  graphrt pull ~/Downloads/model-Q8_0.gguf           # convert a GGUF file\n"
        "  graphrt pull Qwen/Qwen3-0.6B --to /srv/models/qwen # from Hugging Face, with huggingface_hub",
    )
    parser.add_argument(
        "name", nargs="?", metavar="NAME",
        help="a known name, owner/name on Hugging Face, a .gguf file or a directory; without it the default model",
    )  # fmt: skip
    parser.add_argument("--to", type=Path, metavar="DIR", help="where to put it (default: under GRAPHRT_HOME)")
    parser.add_argument("--verify", action="store_true", help="check the weights against their recorded sha256")
    parser.add_argument("--json", action="store_true", help="one JSON object: name, path, bytes, verified")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Make the directory, or find it, and print its path."""
    from graphrt.errors import ModelError
    from graphrt.paths import find_model
    from graphrt.pull import pull

    folder = None
    if args.verify and args.name and args.to is None:
        with contextlib.suppress(ModelError):
            folder = find_model(args.name)  # converted from a file: known by its own name only
    folder = folder or pull(args.name, args.to)
    verified = _verify(folder) if args.verify else None
    if args.json:
        size = sum(path.stat().st_size for path in folder.iterdir())
        print(json.dumps({"name": folder.name, "path": str(folder), "bytes": size, "verified": verified}))
    else:
        print(folder)
    return 0


def _verify(folder: Path) -> list[str]:
    """The files whose hash matches. ModelError on one that does not, or where nothing is recorded."""
    from graphrt.errors import ModelError
    from graphrt.weights import verify_checkpoint

    verified = verify_checkpoint(folder)
    if not verified:
        raise ModelError(f"{folder} records no hash to verify against")
    print(f"sha256 matches: {', '.join(verified)}", file=sys.stderr)
    return verified
