"""Parts for tests that need a whole server: text of one byte a token, an engine that follows the prompt's words, and a
main program: `python scripted.py PORT [setting=value ...]`.
"""

from __future__ import annotations

import codecs
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from graphrt.api.defaults import SamplingDefaults
from graphrt.api.server import run_server
from graphrt.api.settings import ServerSettings
from graphrt.engine_config import EngineConfig
from graphrt.errors import GraphrtError, ModelError, RequestError
from graphrt.seam.client import EngineClient
from graphrt.seam.endpoint import EngineEndpoint
from graphrt.seam.records import Cancel, Drain, EngineInfo, Output, Refused, Stats, Submit, TokenOut

EOS, BOS = 256, 257
VOCAB = 258
STEP_S = 0.002


class ByteDetokenizer:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        return self.push_bytes(b"".join(map(self.take, ids)))

    def take(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else b""

    def push_bytes(self, data: bytes) -> str:
        return self._decoder.decode(data)

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class ByteTokenizer:
    """One token a byte of UTF-8; 256 ends a sequence, 257 opens a raw prompt."""

    eos_ids = (EOS,)
    longest_token = 1

    def __init__(self) -> None:
        self.threads: list[str] = []  # in which each call ran

    def encode(self, text: str, *, add_special: bool = False) -> list[int]:
        self.threads.append(threading.current_thread().name)
        return [*([BOS] if add_special else []), *text.encode()]

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        parts = (self.spelling(i).encode() if special and self.is_special(i) else self.token_bytes(i) for i in ids)
        return b"".join(parts).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if 0 <= token < 256 else b""

    def is_special(self, token: int) -> bool:
        return token in (EOS, BOS)

    def spelling(self, token: int) -> str:
        return {EOS: "<eos>", BOS: "<bos>"}.get(token) or bytes([token]).decode("latin-1")

    def detokenizer(self) -> ByteDetokenizer:
        return ByteDetokenizer()


class LineTemplate:
    """One line a message, and the options behind."""

    def render(self, messages: list[dict[str, Any]], add_generation_prompt: bool = True, **kwargs: Any) -> str:
        if any("tools are not known" in message["content"] for message in messages):
            raise RequestError("the chat template refused: tools are not known")
        lines = [f"{message['role']}: {message['content']}" for message in messages]
        opening = ["assistant:"] if add_generation_prompt else []
        return "\n".join([*lines, *(f"{k}={v}" for k, v in kwargs.items()), *opening])


class ScriptedEngine:
    """One token a step for every request, which is "word seed " over and over; at most `max_batch` run at once.

    A prompt with "crash" ends the process, one with "stuck" stops all steps.
    """

    def __init__(self, config: EngineConfig, endpoint: EngineEndpoint) -> None:
        self.config = config
        self.endpoint = endpoint
        self.running: dict[int, tuple[Submit, bytes, int]] = {}
        self.waiting: list[Submit] = []
        self.generated = 0
        self.told = Stats()
        self.drain_until: float | None = None
        self.stuck = False

    def run(self) -> None:
        info = EngineInfo(
            "llama", "cpu", VOCAB, 4096, self.config.max_batch, self.config.max_waiting, 16, 128, 1, os.getpid()
        )
        self.endpoint.send(info)
        while self.endpoint.server_alive() and not self.endpoint.terminate_requested:
            for record in self.endpoint.poll():
                self.take(record)
            if self.drain_until is not None and (not self.running or time.monotonic() > self.drain_until):
                return
            if not self.stuck:
                self.step()
            self.endpoint.wait(STEP_S if self.running else 0.05)

    def take(self, record: Submit | Cancel | Drain) -> None:
        if isinstance(record, Submit):
            prompt = bytes(record.tokens)
            if b"crash" in prompt:
                os._exit(7)
            self.stuck |= b"stuck" in prompt
            if len(self.waiting) >= self.config.max_waiting:
                self.endpoint.send(Refused(record.id, 429, f"the queue is full: {len(self.waiting)} requests wait"))
            else:
                self.waiting.append(record)
        elif isinstance(record, Cancel):
            known = self.running.pop(record.id, None) is not None or any(w.id == record.id for w in self.waiting)
            self.waiting = [w for w in self.waiting if w.id != record.id]
            if known:
                self.endpoint.send(Output([TokenOut(record.id, [], "cancelled")]))
        else:
            self.drain_until = time.monotonic() + record.timeout_s

    def step(self) -> None:
        while self.waiting and len(self.running) < self.config.max_batch:
            request = self.waiting.pop(0)
            self.running[request.id] = (request, f"word {request.sampling.seed} ".encode(), 0)
        items = []
        for key, (request, text, done) in list(self.running.items()):
            finish = "length" if done + 1 == request.max_tokens else ""
            items.append(TokenOut(key, [text[done % len(text)]], finish))
            self.running[key] = (request, text, done + 1)
            if finish:
                del self.running[key]
        self.generated += len(items)
        if items:
            self.endpoint.send(Output(items))
        count = Stats(running=len(self.running), waiting=len(self.waiting), generation_tokens=self.generated)
        if count != self.told:
            self.endpoint.send(count)
            self.told = count


def run_scripted(config: EngineConfig, endpoint: EngineEndpoint) -> None:
    """What the engine process runs."""
    if config.model_dir == "/models/broken":
        raise ModelError("model.safetensors is truncated: 10 bytes of 100")
    if config.model_dir == "/models/slow":
        endpoint.wait(60)
    ScriptedEngine(config, endpoint).run()


async def launch(settings: ServerSettings) -> EngineClient:
    """The scripted engine in a process of its own."""
    print("launching", flush=True)
    return await EngineClient.launch(settings.engine, start_timeout_s=20, runner=f"{__file__}:run_scripted")


def load(settings: ServerSettings) -> tuple[ByteTokenizer, LineTemplate, SamplingDefaults]:
    """Text for it."""
    if settings.model_dir.name == "textless":
        raise ModelError("/models/textless has no tokenizer.json")
    return ByteTokenizer(), LineTemplate(), SamplingDefaults()


def main(argv: list[str]) -> int:
    """Serve; prints errors as the command line does."""
    model = "/models/tiny"
    options: dict[str, Any] = {}
    for word in argv[1:]:
        name, _, value = word.partition("=")
        if name == "model":
            model = value
        elif name in ("tls_cert", "tls_key"):
            options[name] = Path(value)
        elif name == "api_key_files":
            options[name] = (Path(value),)
        elif name == "log_json":
            options[name] = True
        else:
            options[name] = float(value)
    try:
        settings = ServerSettings(
            model_dir=Path(model), engine=EngineConfig(model, max_batch=4), port=int(argv[0]), **options
        )
        return run_server(settings, launch=launch, load=load)
    except GraphrtError as error:
        print(f"error: {error}", flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
