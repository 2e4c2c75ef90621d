"""`graphrt generate`: one reply on the terminal, through the same engine process that serves."""

from __future__ import annotations

import argparse
import json
import secrets
import sys
from typing import Any

from graphrt.cli import device
from graphrt.cli.parser import integer, number
from graphrt.errors import ConfigError, RequestError

DEFAULT_TOKENS = 256


def add(commands: Any) -> None:
    """Add the subcommand to `commands`, argparse's subparsers."""
    parser = commands.add_parser(
        "generate",
        help="answer one prompt on the terminal",
        description="Answer one prompt on the terminal as it is generated; speed goes to stderr.",
        epilog="example:\n  graphrt generate smollm2-135m-instruct 'Why is the sky blue?' --max-tokens 100\n"
        "  git diff | graphrt generate smollm2-135m-instruct - --temperature 0.7 --seed 1",
    )
    parser.add_argument("model", metavar="MODEL", help="name or directory; a known name is fetched if absent")
    parser.add_argument("prompt", metavar="PROMPT", help="the text, or - to read it from stdin")
    parser.add_argument(
        "--max-tokens", type=integer(1), metavar="N", help=f"longest reply (default {DEFAULT_TOKENS}, or what fits)"
    )
    parser.add_argument(
        "--temperature", type=number(0.0, 100.0), default=0.0, metavar="T", help="0 is greedy (default %(default)s)"
    )
    parser.add_argument(
        "--seed", type=integer(0, (1 << 64) - 1), metavar="N", help="makes a sampled reply repeatable (default: random)"
    )
    parser.add_argument("--device", choices=device.CHOICES, default="auto", help="where to run (default %(default)s)")
    parser.add_argument("--raw", action="store_true", help="continue the text itself, without the chat template")
    parser.add_argument("--json", action="store_true", help="one JSON object at the end instead of a stream")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Load, generate, report."""
    import asyncio

    from graphrt.chat_template import ChatTemplate
    from graphrt.cli.model import obtain
    from graphrt.cli.reply import Request, reply
    from graphrt.config import load_config
    from graphrt.seam.records import MAX_STOP_IDS, Sampling
    from graphrt.tokenizer import Tokenizer

    chosen, _ = device.choose(args.device)
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    model_dir = obtain(args.model)
    config = load_config(model_dir)
    tokenizer = Tokenizer.load(model_dir)
    if not args.raw:
        prompt = ChatTemplate.load(model_dir).render([{"role": "user", "content": prompt}])
    tokens = tokenizer.encode(prompt)
    request = Request(
        model_dir=model_dir,
        tokens=tokens,
        max_tokens=reply_length(args.max_tokens, len(tokens), config.max_position),
        stop_ids=sorted({*tokenizer.eos_ids, *config.eos_ids})[:MAX_STOP_IDS],
        sampling=Sampling(
            temperature=args.temperature, seed=secrets.randbits(64) if args.seed is None else args.seed
        ),
        device=chosen,
    )
    result = asyncio.run(reply(request, tokenizer, (lambda text: None) if args.json else _print_piece))
    if args.json:
        print(json.dumps({"model": model_dir.name, **result.as_dict(), "seed": request.sampling.seed}))
        return 0
    print()
    print(f"[{result.summary()}]", file=sys.stderr)
    return 0


def reply_length(asked: int | None, prompt_tokens: int, context: int) -> int:
    """How many tokens to generate at most. Errors for an empty prompt, one that fills the context, or too many asked."""
    room = context - prompt_tokens
    if prompt_tokens == 0:
        raise RequestError("the prompt is empty")
    if room < 1:
        raise RequestError(f"the prompt has {prompt_tokens} tokens, the model's context is {context}")
    if asked is not None and asked > room:
        raise ConfigError(
            f"--max-tokens is {asked}: at most {room} fit, since the prompt has {prompt_tokens} tokens and the model's "
            f"context is {context}"
        )
    return min(asked or DEFAULT_TOKENS, room)


def _print_piece(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
