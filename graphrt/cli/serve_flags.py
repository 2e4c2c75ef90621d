"""The flags of `graphrt serve` that concern the HTTP server: who may come in, for how long, and what is logged."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from graphrt.cli.parser import Parser, integer, number

LEVELS = ("debug", "info", "warning", "error")


def add(parser: Parser) -> None:
    """Add them, in groups."""
    access = parser.add_argument_group("who may use it")
    access.add_argument(
        "--api-key-file", type=Path, action="append", default=[], metavar="FILE", dest="api_key_files",
        help="let in only requests with a key from FILE: a line each, KEY, NAME:KEY or NAME KEY [concurrency=N] [rpm=N];"
        " repeatable; read again on SIGHUP",
    )  # fmt: skip
    access.add_argument(
        "--max-concurrency", type=integer(0, 1_000_000), default=0, metavar="N",
        help="requests at once before the answer is 429 (default: no limit but the queue's)",
    )  # fmt: skip
    access.add_argument(
        "--max-concurrency-per-key", type=integer(0, 1_000_000), default=0, metavar="N", dest="key_concurrency",
        help="the same for each key whose line says nothing else",
    )  # fmt: skip
    access.add_argument(
        "--requests-per-minute-per-key", type=integer(0, 1_000_000), default=0, metavar="N", dest="key_rpm",
        help="requests that each key may begin in a minute",
    )  # fmt: skip
    access.add_argument("--guard-metrics", action="store_true", help="ask for a key at /metrics too")
    access.add_argument(
        "--cors-origin", action="append", default=[], metavar="ORIGIN", dest="cors_origins",
        help="let pages from ORIGIN, such as https://example.org, call from browsers; repeatable; * for any",
    )  # fmt: skip
    access.add_argument(
        "--tls-cert", type=Path, metavar="FILE", help="serve HTTPS with this certificate (PEM, chain last)"
    )
    access.add_argument("--tls-key", type=Path, metavar="FILE", help="the certificate's key (PEM, without a password)")
    times = parser.add_argument_group("how long things may take, in seconds")
    times.add_argument(
        "--request-timeout", type=number(0, 86400), default=0.0, metavar="S", dest="request_timeout_s",
        help="a request, until its end (default: no limit); X-Request-Timeout of a request can only shorten it",
    )  # fmt: skip
    times.add_argument(
        "--send-timeout", type=number(0.01, 3600), default=30.0, metavar="S", dest="send_timeout_s",
        help="a client that has stopped reading (default %(default)g)",
    )  # fmt: skip
    times.add_argument(
        "--drain-timeout", type=number(0, 86400), default=30.0, metavar="S", dest="drain_timeout_s",
        help="requests under way after SIGTERM or Ctrl-C (default %(default)g)",
    )  # fmt: skip
    logs = parser.add_argument_group("its log, on stderr")
    logs.add_argument(
        "--log-level", choices=LEVELS, default="info", help="the least that is logged (default %(default)s)"
    )
    logs.add_argument("--log-json", action="store_true", help="one JSON object a line")


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """What `ServerSettings` takes of them."""
    same = (
        "max_concurrency",
        "key_concurrency",
        "key_rpm",
        "guard_metrics",
        "tls_cert",
        "tls_key",
        "request_timeout_s",
        "send_timeout_s",
        "drain_timeout_s",
        "log_level",
        "log_json",
    )
    return {
        **{name: getattr(args, name) for name in same},
        "api_key_files": tuple(args.api_key_files),
        "cors_origins": tuple(args.cors_origins),
    }
