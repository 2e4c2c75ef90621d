"""The life of a server: claim the port, start the engine, serve, drain, end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import signal
import socket
import ssl
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

import uvicorn
import uvloop

from graphrt.api.app import create_app
from graphrt.api.auth_ring import KeyRing
from graphrt.api.defaults import SamplingDefaults, load_sampling_defaults
from graphrt.api.errors import ApiError
from graphrt.api.example import base_url, curl_example
from graphrt.api.http_protocol import http_protocol
from graphrt.api.listen import bind, in_use, raise_open_files
from graphrt.api.log_format import LineLog, setup_logging
from graphrt.api.ports import Engine, PromptTemplate, TextCodec
from graphrt.api.settings import ServerSettings
from graphrt.api.state import AppState, make_state
from graphrt.api.stop_signals import Stopped, StopSignals
from graphrt.api.tls import make_context
from graphrt.api.tls import reload as reload_context

log = logging.getLogger("graphrt.api")

SWITCH_S = 0.0005  # so long a thread that holds the interpreter, for JSON say, may keep the event loop waiting
ABORT_GRACE_S = 2.0  # for replies cut off to reach their clients

Launch = Callable[[ServerSettings], Awaitable[Engine]]
LoadText = Callable[[ServerSettings], tuple[TextCodec, PromptTemplate, SamplingDefaults]]


async def launch_engine(settings: ServerSettings) -> Engine:
    """The engine in a process of its own."""
    from graphrt.seam.client import EngineClient

    output = LineLog("graphrt.engine") if settings.log_json else None
    return await EngineClient.launch(
        settings.engine, start_timeout_s=settings.start_timeout_s, on_output=output.write if output else None
    )


def load_text(settings: ServerSettings) -> tuple[TextCodec, PromptTemplate, SamplingDefaults]:
    """Tokenizer, chat template and sampling defaults of the model. Raises `ModelError`."""
    from graphrt.chat_template import ChatTemplate
    from graphrt.tokenizer import Tokenizer

    where = settings.model_dir
    return Tokenizer.load(where), ChatTemplate.load(where), load_sampling_defaults(where)


def run_server(settings: ServerSettings, *, launch: Launch = launch_engine, load: LoadText = load_text) -> int:
    """Serve until told to stop; the exit code: 0 after SIGTERM or Ctrl-C, 1 when the engine died.

    Blocks, and must be called on the main thread. Raises `GraphrtError` when the server cannot start. Tests put their
    own engine and text in through `launch` and `load`.
    """
    settings.check()
    setup_logging(settings.log_level, settings.log_json)
    keys = KeyRing(settings.api_key_files)
    tls = make_context(settings.tls_cert, settings.tls_key) if settings.tls_cert and settings.tls_key else None
    raise_open_files()
    sys.setswitchinterval(SWITCH_S)
    sock = bind(settings.host, settings.port)
    with contextlib.closing(sock), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(settings, Door(sock, keys, tls), launch, load))


@dataclass(frozen=True)
class Door:
    """What is checked before the engine starts: the port, the keys, the certificate."""

    sock: socket.socket
    keys: KeyRing
    tls: ssl.SSLContext | None

    def reload(self, settings: ServerSettings) -> None:
        """After SIGHUP: read keys and certificate again; what is broken stays as it was."""
        if self.keys.required:
            self.keys.reload()
        if self.tls is not None and settings.tls_cert and settings.tls_key:
            reload_context(self.tls, settings.tls_cert, settings.tls_key)


async def _run(settings: ServerSettings, door: Door, launch: Launch, load: LoadText) -> int:
    loop = asyncio.get_running_loop()
    if door.keys.required or door.tls is not None:  # else a hang-up means what it always means
        loop.add_signal_handler(signal.SIGHUP, door.reload, settings)
    with StopSignals() as stop:
        try:
            state = await stop.unless_asked(_start(settings, door.keys, launch, load))
        except Stopped:
            return 0
        try:
            return await _serve(state, door, stop)
        finally:
            # By now nothing is left to finish: the engine has only to be seen off.
            await state.engine.close(0.0)
            state.close()


async def _start(settings: ServerSettings, keys: KeyRing, launch: Launch, load: LoadText) -> AppState:
    """Engine and tokenizer load side by side."""
    starting = asyncio.ensure_future(launch(settings))
    try:
        tokenizer, template, defaults = await asyncio.to_thread(load, settings)
        engine = await starting
    except BaseException:
        starting.cancel()
        with contextlib.suppress(Exception, asyncio.CancelledError):
            await (await starting).close(0.0)
        raise
    return make_state(settings, engine, tokenizer, template, defaults, keys)


class _Server(uvicorn.Server):
    """Leaves signals alone and tells when it is listening."""

    def __init__(self, config: uvicorn.Config, on_started: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_started = on_started

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_started()


def _make_server(state: AppState, door: Door) -> _Server:
    settings = state.settings
    config = uvicorn.Config(
        create_app(state),
        http=http_protocol(
            settings.header_limit, settings.header_timeout_s, settings.send_timeout_s, state.metrics.count_malformed
        ),
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=settings.keep_alive_s,
    )

    def announce() -> None:
        gc.collect()
        gc.freeze()  # what is loaded stays: no collection need look at it again
        info = state.engine.info
        url = base_url(settings.host, door.sock.getsockname()[1], "http" if door.tls is None else "https")
        print(
            f"graphrt serves {settings.model_name} on {url} "
            f"({info.device}, context {info.context}, {info.max_batch} sequences at once)\n"
            f"try:\n{curl_example(url, settings.model_name, door.keys.required)}",
            flush=True,
        )

    config.load()
    config.ssl = door.tls
    return _Server(config, announce)


async def _serve(state: AppState, door: Door, stop: StopSignals) -> int:
    server = _make_server(state, door)
    serving = asyncio.ensure_future(server.serve([door.sock]))
    dead = asyncio.ensure_future(state.engine.wait_dead())
    asked = asyncio.ensure_future(stop.asked.wait())
    try:
        await asyncio.wait((serving, dead, asked), return_when=asyncio.FIRST_COMPLETED)
        if asked.done():
            await _drain(state, server, serving, stop)
            return 0
        if dead.done():
            log.critical("the engine died: %s", state.engine.death_reason)
            # A while to answer requests in flight, and for a balancer to read /health.
            await asyncio.wait((asked,), timeout=state.settings.death_grace_s)
            await _end(server, serving)
            return 1
        try:
            serving.result()
        except OSError as error:
            if error.errno == errno.EADDRINUSE:  # another server was bound as well, and was first to listen
                raise in_use(state.settings.host, state.settings.port) from None
            raise
        return 1
    finally:
        dead.cancel()
        asked.cancel()
        serving.cancel()
        await asyncio.wait((serving,))


async def _drain(state: AppState, server: _Server, serving: asyncio.Future[None], stop: StopSignals) -> None:
    """Stop accepting, let requests in flight finish for a while, then tell the rest."""
    timeout = state.settings.drain_timeout_s
    state.draining = True
    server.should_exit = True
    if state.live:
        log.info("finishing %d requests, for at most %g s; Ctrl-C ends at once", len(state.live), timeout)
    insisted = asyncio.ensure_future(stop.insisted.wait())
    await asyncio.wait((serving, insisted), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    insisted.cancel()
    if serving.done():
        return
    if not stop.insisted.is_set():
        count = state.abort_live(ApiError("the server is shutting down", status=503, code="shutting_down"))
        log.warning("%d requests were cut off after %g s", count, timeout)
        await asyncio.wait((serving,), timeout=ABORT_GRACE_S)
    await _end(server, serving)


async def _end(server: _Server, serving: asyncio.Future[None]) -> None:
    """Close without waiting for anybody."""
    server.should_exit = True
    server.force_exit = True
    await asyncio.wait((serving,), timeout=1.0)
