"""`graphrt serve`: the OpenAI-compatible server."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from graphrt.cli import device, serve_flags
from graphrt.cli.parser import integer, size

MAX_CONTEXT = 1 << 30
MAX_BATCH = 256


def add(commands: Any) -> None:
    """Add the subcommand to `commands`, argparse's subparsers."""
    parser = commands.add_parser(
        "serve",
        help="serve a model over an OpenAI-compatible HTTP API",
        description="Serve a model over an OpenAI-compatible HTTP API. Ctrl-C or SIGTERM lets running requests finish\n"
        "(bounded), then ends with exit code 0.",
        epilog="example:\n  graphrt serve --port 8080 --max-batch 4\n"
        "  graphrt serve ~/models/Llama-3.2-1B-Instruct --ctx 4096 --kv-memory 2GiB",
    )
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="name or directory; without it the default model, fetched if absent"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    parser.add_argument(
        "--port",
        type=integer(0, 65535),
        default=8000,
        metavar="N",
        help="0 lets the kernel choose (default %(default)s)",
    )
    parser.add_argument("--device", choices=device.CHOICES, default="auto", help="where to run (default %(default)s)")
    parser.add_argument(
        "--max-batch", type=integer(1, MAX_BATCH), metavar="N", help="sequences at once (default 8, on a GPU 64)"
    )
    parser.add_argument(
        "--ctx", type=integer(1, MAX_CONTEXT), metavar="N", help="tokens a sequence may have (default: the model's)"
    )
    parser.add_argument(
        "--max-waiting", type=integer(0, 1_000_000), default=256, metavar="N",
        help="requests queued before the answer is 429 (default %(default)s)",
    )  # fmt: skip
    parser.add_argument("--kv-memory", type=size, metavar="SIZE", help="memory for the KV cache, such as 2GiB")
    parser.add_argument(
        "--prefill-chunk", type=integer(1, 65536), metavar="N",
        help="most prompt tokens in one step (default 256, on a GPU 1024)",
    )  # fmt: skip
    parser.add_argument("--threads", type=integer(1, 1024), metavar="N", help="CPU threads (default: all cores)")
    parser.add_argument(
        "--load-format",
        choices=("auto", "dummy"),
        default="auto",
        help="dummy: random weights of config.json's shape, to measure without them (default %(default)s)",
    )
    parser.add_argument(
        "--served-model-name", metavar="NAME", help="what clients call the model (default: its directory)"
    )
    serve_flags.add(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until told to stop."""
    chosen, why = device.choose(args.device)
    from graphrt.api.server import run_server
    from graphrt.api.settings import ServerSettings
    from graphrt.cli.model import obtain
    from graphrt.engine_config import EngineConfig

    model_dir = obtain(args.model)
    print(f"graphrt serve: device {chosen} ({why})", file=sys.stderr)
    settings = ServerSettings(
        model_dir=model_dir,
        engine=EngineConfig(
            model_dir=str(model_dir),
            device=chosen,
            max_batch=args.max_batch or device.MAX_BATCH[chosen],
            context=args.ctx,
            max_waiting=args.max_waiting,
            kv_bytes=args.kv_memory,
            prefill_chunk=args.prefill_chunk,
            threads=args.threads,
            load_format=args.load_format,
        ),
        host=args.host,
        port=args.port,
        served_model_name=args.served_model_name,
        **serve_flags.settings_of(args),
    )
    settings.check()
    return run_server(settings)
