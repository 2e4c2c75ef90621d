"""The server of its load test: the whole of `graphrt serve`, but with the engine and the text of load_api_engine.

    python -m graphrt.perf.load_api_server '{"step_ms": 20, "pattern": "burst", "cpu": 1}' [CPU]

Prints the server's own line once it listens. CPU pins this process.
"""

from __future__ import annotations

import codecs
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from graphrt.api.defaults import SamplingDefaults
from graphrt.api.server import run_server
from graphrt.api.settings import ServerSettings
from graphrt.engine_config import EngineConfig
from graphrt.seam.client import EngineClient

MODEL = "load"
BATCH = 256
WAITING = 64


class ClockText:
    """A prompt's tokens are its bytes; a reply's are numbers, written with 16 digits and a space."""

    eos_ids = (0,)
    longest_token = 17

    def encode(self, text: str, *, add_special: bool = False) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        return b"".join(map(self.token_bytes, ids)).decode()

    def token_bytes(self, token: int) -> bytes:
        return b"%016d " % token

    def is_special(self, token: int) -> bool:
        return token == 0

    def spelling(self, token: int) -> str:
        return f"{token:016d} "

    def detokenizer(self) -> ClockDetokenizer:
        return ClockDetokenizer(self)


class ClockDetokenizer:
    """As much work as the real one: bytes of each token, then UTF-8."""

    def __init__(self, text: ClockText) -> None:
        self._text = text
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        return self._utf8.decode(b"".join(map(self._text.token_bytes, ids)))

    def take(self, token: int) -> bytes:
        return self._text.token_bytes(token)

    def push_bytes(self, data: bytes) -> str:
        return self._utf8.decode(data)

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class PlainTemplate:
    """The messages' texts, line by line."""

    def render(self, messages: list[dict[str, Any]], add_generation_prompt: bool = True, **kwargs: Any) -> str:
        return "\n".join(message["content"] for message in messages)


async def launch(settings: ServerSettings) -> EngineClient:
    """The engine in a process of its own, behind the real rings."""
    return await EngineClient.launch(
        settings.engine, start_timeout_s=60.0, runner="graphrt.perf.load_api_engine:run_engine"
    )


def load(settings: ServerSettings) -> tuple[ClockText, PlainTemplate, SamplingDefaults]:
    """Text for it."""
    return ClockText(), PlainTemplate(), SamplingDefaults()


def main(argv: list[str]) -> int:
    engine: dict[str, Any] = msgspec.json.decode(argv[1])
    if len(argv) > 2:
        os.sched_setaffinity(0, {int(argv[2])})
    words = ",".join(f"{name}={value}" for name, value in engine.items())
    config = EngineConfig(f"fake:{words}", max_batch=BATCH, max_waiting=WAITING)
    settings = ServerSettings(
        model_dir=Path("/nowhere"), served_model_name=MODEL, engine=config, port=0, log_level="warning"
    )
    return run_server(settings, launch=launch, load=load)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
