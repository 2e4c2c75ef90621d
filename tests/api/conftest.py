"""A live HTTP server over an engine that follows a script, with a tokenizer of one byte a token."""

from __future__ import annotations

import asyncio
import importlib.util
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import openai
import pytest
import uvicorn
import uvloop

from graphrt.admission import check_submit
from graphrt.api.app import create_app
from graphrt.api.http_protocol import http_protocol
from graphrt.api.settings import ServerSettings
from graphrt.api.state import AppState, make_state
from graphrt.api.tls import make_context
from graphrt.engine_config import EngineConfig
from graphrt.errors import EngineDead
from graphrt.seam.records import EngineInfo, Logprob, Sampling, Stats, Submit, TokenOut

T = TypeVar("T")
EOS = 256
VOCAB = 258


def _load_sibling(name: str) -> ModuleType:
    # The tests are no package (importlib mode), so a shared helper is loaded by its path.
    spec = importlib.util.spec_from_file_location(f"graphrt_tests_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SCRIPTED = _load_sibling("scripted")


class FakeStream:
    """Each `put` is told at once; what is put while nobody listens is taken together."""

    def __init__(self, engine: FakeEngine, request: Submit) -> None:
        self.engine = engine
        self.request = request
        self.cancelled = asyncio.Event()
        self._items: list[TokenOut] = []
        self._error: Exception | None = None
        self._over = False
        self._first = True
        self._listener: Callable[[], None] | None = None

    def put(self, text: str | bytes | list[int], finish: str = "", cached: int = 0) -> None:
        tokens = text if isinstance(text, list) else list(text.encode() if isinstance(text, str) else text)
        logprobs = [fake_logprob(t, self.request.logprobs) for t in tokens] if self.request.logprobs >= 0 else []
        prompt: list[Logprob] = []
        if self._first and tokens and self.request.prompt_logprobs >= 0:
            prompt = [fake_logprob(t, self.request.prompt_logprobs) for t in self.request.tokens[1:]]
        self._first &= not tokens
        self.give(TokenOut(self.request.id, tokens, finish, cached, logprobs, prompt))

    def give(self, item: TokenOut) -> None:
        if not self._over:
            self._over = bool(item.finish)
            self._items.append(item)
            self._tell()

    def fail(self, error: Exception) -> None:
        if not self._over:
            self._over = True
            self._error = error
            self._tell()

    def _tell(self) -> None:
        if self._listener is not None:
            self._listener()

    def listen(self, listener: Callable[[], None] | None) -> None:
        self._listener = listener

    def take(self) -> TokenOut | None:
        items, self._items = self._items, []
        if items:
            last = items[-1]
            return TokenOut(
                last.id,
                [t for item in items for t in item.tokens],
                last.finish,
                last.cached_tokens,
                [p for item in items for p in item.logprobs],
                [p for item in items for p in item.prompt_logprobs],
            )
        if self._error is not None:
            raise self._error
        return None

    def cancel(self) -> None:
        if not self.cancelled.is_set():
            self.cancelled.set()
            self.engine.cancelled.append(self.request.id)
            self.put([], "cancelled")


def fake_logprob(token: int, top: int) -> Logprob:
    """The token itself is the second best, behind "a" or, for that, "b"."""
    other = ord("b") if token == ord("a") else ord("a")
    best = [(other, -0.25), (token, -1.5 - token / 1024), *((i, -10.0 - i) for i in range(48, 58))]
    return Logprob(token, best[1][1], 2, best[:top])


Script = Callable[[FakeStream], Awaitable[None]]


async def say_hello(stream: FakeStream) -> None:
    for char in "Hello, wörld!":
        stream.put(char)
        await asyncio.sleep(0)
    stream.put([EOS], "stop", 3)


@dataclass
class Step:
    step: int
    kind: str
    batch: int
    rows: int
    ms: float
    host_us: float


class FakeEngine:
    """Follows `script` for each request; remembers what it was asked."""

    def __init__(self, context: int = 4096) -> None:
        self.info = EngineInfo("llama", "cpu", VOCAB, context, 8, 16, 16, 128, 1)
        self.stats = Stats(running=2, blocks_total=128, blocks_used=32, prompt_tokens=70, finished={"stop": 1})
        self.alive = True
        self.death_reason = ""
        self.script: Script = say_hello
        self.requests: list[Submit] = []
        self.streams: list[FakeStream] = []
        self.cancelled: list[int] = []
        self._tasks: set[asyncio.Future[None]] = set()
        self._dead = asyncio.Event()

    def submit(
        self, tokens: list[int], sampling: Sampling, max_tokens: int, stop_ids: list[int], **options: Any
    ) -> FakeStream:
        if not self.alive:
            raise EngineDead(self.death_reason)
        request = Submit(len(self.requests), tokens, sampling, max_tokens, stop_ids, **options)
        check_submit(request, self.info)  # a request that the real engine refuses is a fault of the server's checks
        self.requests.append(request)
        stream = FakeStream(self, request)
        self.streams.append(stream)
        task = asyncio.ensure_future(self.script(stream))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return stream

    async def step_log(self, n: int) -> list[Step]:
        steps = [Step(i, "prefill" if i < 2 else "decode", 8, i % 8 + 1, 1.5, 20.0 + i) for i in range(5)]
        return steps[-n:]

    def die(self, reason: str) -> None:
        self.alive = False
        self.death_reason = reason
        for stream in self.streams:
            stream.fail(EngineDead(reason))
        self._dead.set()

    async def wait_dead(self) -> None:
        await self._dead.wait()

    async def close(self, drain_timeout_s: float) -> None:
        self._dead.set()


class LiveServer:
    """uvicorn on uvloop in a thread, over `engine`. `call` runs a function on its loop."""

    def __init__(self, make_engine: Callable[[], Awaitable[Any]], **options: Any) -> None:
        self.engine: Any = None
        self.state: AppState
        self.tokenizer = SCRIPTED.ByteTokenizer()
        self._make_engine = make_engine
        self._settings = ServerSettings(
            model_dir=Path("/models/tiny"), engine=EngineConfig("/models/tiny"), port=0, **options
        )
        self._sock = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._sock.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._up = threading.Event()
        self._thread = threading.Thread(target=lambda: uvloop.run(self._main()))
        self._thread.start()
        assert self._up.wait(10)

    async def _main(self) -> None:
        try:
            self.engine = await self._make_engine()
            self.state = make_state(self._settings, self.engine, self.tokenizer, SCRIPTED.LineTemplate())
            settings = self._settings
            config = uvicorn.Config(
                create_app(self.state),
                http=http_protocol(
                    settings.header_limit,
                    settings.header_timeout_s,
                    settings.send_timeout_s,
                    self.state.metrics.count_malformed,
                ),
                lifespan="off",
                log_config=None,
                log_level="warning",
            )
            if settings.tls_cert is not None and settings.tls_key is not None:
                config.load()
                config.ssl = make_context(settings.tls_cert, settings.tls_key)
            self._server = uvicorn.Server(config)
            self._loop = asyncio.get_running_loop()
            self._over = asyncio.Event()
            serving = asyncio.ensure_future(self._server.serve([self._sock]))
            while not self._server.started:
                await asyncio.sleep(0.005)
        finally:
            self._up.set()
        await self._over.wait()
        serving.cancel()  # uvicorn's own end takes two of its ticks
        for listener in self._server.servers:
            listener.close()
        await self.engine.close(0.0)

    def call(self, work: Callable[[], T]) -> T:
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(work())
            except BaseException as error:
                done.set_exception(error)

        self._loop.call_soon_threadsafe(run)
        return done.result(10)

    def until(self, condition: Callable[[], Any], timeout_s: float = 5.0) -> None:
        """Wait for `condition`, evaluated on the loop."""
        end = time.monotonic() + timeout_s
        while not self.call(condition):
            assert time.monotonic() < end, "the condition did not come true in time"
            time.sleep(0.005)

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0, **options)

    def metric(self, line: str) -> float:
        page = self.call(self.state.metrics.page).decode()
        [found] = [entry for entry in page.splitlines() if entry.startswith(line + " ")]
        return float(found.rsplit(" ", 1)[1])

    def stop(self) -> None:
        self.call(self._over.set)
        self._thread.join(10)
        assert not self._thread.is_alive()
        self.state.close()


@pytest.fixture
def make_server() -> Iterator[Callable[..., LiveServer]]:
    """`make_server(make_engine=..., **settings) -> LiveServer`, over a `FakeEngine` unless told otherwise."""
    made: list[LiveServer] = []

    async def fake() -> FakeEngine:
        return FakeEngine()

    def make(make_engine: Callable[[], Awaitable[Any]] = fake, **options: Any) -> LiveServer:
        made.append(LiveServer(make_engine, **options))
        return made[-1]

    yield make
    for server in made:
        server.stop()


@pytest.fixture
def server(make_server: Callable[..., LiveServer]) -> LiveServer:
    """A server with default settings over a `FakeEngine`."""
    return make_server()


@pytest.fixture
def byte_tokenizer() -> Any:
    """One token a byte."""
    return SCRIPTED.ByteTokenizer()


@pytest.fixture
def line_template() -> Any:
    """One line a message."""
    return SCRIPTED.LineTemplate()


@pytest.fixture
def scripted() -> ModuleType:
    """The module scripted.py."""
    return SCRIPTED


@pytest.fixture(scope="session")
def pem() -> ModuleType:
    """The module tls_files.py."""
    return _load_sibling("tls_files")


@pytest.fixture(scope="session")
def raw() -> ModuleType:
    """The module raw_http.py."""
    return _load_sibling("raw_http")
