"""The server's side of the seam: starts the engine, submits requests, hands its tokens to the streams."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from graphrt.engine_config import EngineConfig
from graphrt.errors import EngineDead, GraphrtError, RequestError
from graphrt.seam.backlog import Backlog
from graphrt.seam.endpoint import EngineEndpoint
from graphrt.seam.local import EngineThread
from graphrt.seam.records import (
    NO_LOGPROBS,
    AskSteps,
    Cancel,
    Drain,
    EngineInfo,
    Fatal,
    FromEngine,
    Output,
    Refused,
    Sampling,
    Stats,
    StepLog,
    StepTrace,
    Submit,
)
from graphrt.seam.ring import DEFAULT_CAPACITY
from graphrt.seam.spawn import EngineProcess
from graphrt.seam.stream import RequestStream
from graphrt.seam.wires import ServerWires

DEFAULT_RUNNER = "graphrt.engine_setup:run_engine"

_RECORDS_PER_TURN = 256  # then other callbacks of the loop have their turn
_FATAL_GRACE_S = 5.0
_DRAIN_MARGIN_S = 1.0
_TERMINATE_GRACE_S = 2.0
_KILL_GRACE_S = 5.0

logger = logging.getLogger("graphrt.seam")


class EngineClient:
    """Lives on one event loop; made by `launch` or `local`, ended by `close`. Not thread-safe.

    `info` is what the engine said of itself, `stats` its latest numbers. `alive` turns False when the engine died or
    declared itself broken, with `death_reason` in one line.
    """

    info: EngineInfo

    def __init__(self, ring_bytes: int = DEFAULT_CAPACITY) -> None:
        """For `launch` and `local`; must run on the loop. `ring_bytes` a direction, a power of two."""
        self._loop = asyncio.get_running_loop()
        self._wires = ServerWires(ring_bytes)
        self._backlog = Backlog(self._wires.tx, self._loop)
        self._host: EngineProcess | EngineThread | None = None
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(FromEngine).decode
        self._ids = itertools.count(1)
        self._streams: dict[int, RequestStream] = {}
        self._woken: list[RequestStream] = []  # their listeners are to be told
        self._step_waiters: deque[asyncio.Future[list[StepTrace]]] = deque()  # answered in order
        self._ready: asyncio.Future[EngineInfo] = self._loop.create_future()
        self._dead = asyncio.Event()
        self._exited = asyncio.Event()
        self._turn_scheduled = False
        self._closing: asyncio.Task[None] | None = None
        self._released = False
        self.stats = Stats()
        self.alive = False
        self.death_reason = ""

    @classmethod
    async def launch(
        cls,
        config: EngineConfig,
        *,
        start_timeout_s: float = 300.0,
        runner: str = DEFAULT_RUNNER,
        ring_bytes: int = DEFAULT_CAPACITY,
        on_output: Callable[[str], None] | None = None,
    ) -> EngineClient:
        """Start an engine process and wait until it is ready.

        Raises `GraphrtError` with the engine's own message, or the end of its stderr, when it fails, dies or is not
        ready in time. The kernel ends the engine with the calling thread: call it on the loop's own thread.
        `runner` names the function to run there: `module:function` or `file.py:function`. What the engine prints goes to
        `on_output`, in pieces that need not be lines, or to this process's stderr.
        """
        client = cls(ring_bytes)
        try:
            client._host = EngineProcess(
                config, runner, client._wires.engine_fds, client._loop, client._on_exit, on_output
            )
            return await client._start(start_timeout_s)
        except BaseException:
            await client._abort()
            raise

    @classmethod
    async def local(
        cls,
        run: Callable[[EngineEndpoint], None],
        *,
        start_timeout_s: float = 300.0,
        ring_bytes: int = DEFAULT_CAPACITY,
    ) -> EngineClient:
        """The same with `run` in a thread of this process, for tests. It must obey `server_alive`."""
        client = cls(ring_bytes)
        try:
            client._host = EngineThread(run, client._wires, client._loop, client._on_exit)
            return await client._start(start_timeout_s)
        except BaseException:
            await client._abort()
            raise

    @property
    def live_requests(self) -> int:
        """Streams that have not ended yet."""
        return len(self._streams)

    def submit(
        self,
        tokens: list[int],
        sampling: Sampling,
        max_tokens: int,
        stop_ids: list[int],
        *,
        min_tokens: int = 0,
        logit_bias: Sequence[tuple[int, float]] = (),
        logprobs: int = NO_LOGPROBS,
        prompt_logprobs: int = NO_LOGPROBS,
    ) -> RequestStream:
        """Send a request, with the fields of `Submit`; never blocks.

        Raises `EngineDead`; `RequestError` 503 while closing, 413 for a prompt larger than the ring, 429 when the engine
        takes nothing and too much waits already.
        """
        if not self.alive:
            raise EngineDead(self.death_reason or "the engine is not running")
        if self._closing is not None:
            raise RequestError("the server is shutting down", status=503)
        request_id = next(self._ids)
        record = Submit(
            request_id,
            tokens,
            sampling,
            max_tokens,
            stop_ids,
            min_tokens,
            list(logit_bias),
            logprobs,
            prompt_logprobs,
        )
        self._backlog.send(self._encode(record))
        stream = self._streams[request_id] = RequestStream(
            request_id, self._loop, self._send_cancel, self._drop_stream, self._woken.append
        )
        return stream

    async def step_log(self, count: int) -> list[StepTrace]:
        """The last steps of the engine, newest last, at most `count`. Raises `EngineDead`."""
        if not self.alive:
            raise EngineDead(self.death_reason or "the engine is not running")
        waiter: asyncio.Future[list[StepTrace]] = self._loop.create_future()
        self._step_waiters.append(waiter)
        self._backlog.send(self._encode(AskSteps(count)), bounded=False)
        return await waiter

    async def wait_dead(self) -> None:
        """Return once `alive` is False for good."""
        await self._dead.wait()

    async def close(self, drain_timeout_s: float = 0.0) -> None:
        """End the engine: requests in hand may finish for `drain_timeout_s`, then SIGTERM, then SIGKILL.

        Takes at most 8 s more than the timeout. Idempotent; streams that are still open raise `EngineDead`.
        """
        if self._closing is None:
            self._closing = self._loop.create_task(self._shut_down(drain_timeout_s))
        await asyncio.shield(self._closing)

    async def _start(self, timeout_s: float) -> EngineClient:
        self._wires.close_engine_side()
        self._loop.add_reader(self._wires.rx.bell.fd, self._on_doorbell)
        self._turn()
        try:
            self.info = await asyncio.wait_for(asyncio.shield(self._ready), timeout_s)
        except TimeoutError:
            raise GraphrtError(self._with_tail(f"the engine was not ready within {timeout_s:g} s")) from None
        return self

    async def _abort(self) -> None:
        """Undo a start that failed."""
        self._ready.cancel()
        self._dead.set()  # its end is our doing and no news
        if self._host is not None and not self._exited.is_set():
            self._host.kill()
            await self._has_exited(_KILL_GRACE_S)
        self._release()

    async def _shut_down(self, drain_timeout_s: float) -> None:
        host = self._host
        assert host is not None
        if self.alive:
            self._backlog.send(self._encode(Drain(drain_timeout_s)), bounded=False)
        elif not self._exited.is_set():
            drain_timeout_s = 0.0  # broken but not gone yet
        if not await self._has_exited(drain_timeout_s + _DRAIN_MARGIN_S):
            host.terminate()
            if not await self._has_exited(_TERMINATE_GRACE_S):
                host.kill()
                if not await self._has_exited(_KILL_GRACE_S):
                    logger.warning("engine process %d does not end, even after SIGKILL", host.pid)
        self._die("the engine was closed")
        self._release()

    async def _has_exited(self, timeout_s: float) -> bool:
        try:
            await asyncio.wait_for(self._exited.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def _on_doorbell(self) -> None:
        self._wires.rx.bell.disarm()
        self._turn()

    def _turn(self) -> None:
        """Dispatch what waits, tell the listeners, then sleep again; long bursts in several turns of the loop."""
        self._turn_scheduled = False
        if self._released:
            return
        try:
            empty = self._dispatch_waiting()
        except (GraphrtError, msgspec.MsgspecError) as error:
            logger.exception("the engine's records cannot be read")
            self._on_fatal(f"the engine's records cannot be read: {error}")
            return
        self._tell()  # after all of it: what waited together is told once
        if (empty and self._wires.rx.try_sleep()) or self._turn_scheduled:
            return
        self._turn_scheduled = True
        self._loop.call_soon(self._turn)

    def _dispatch_waiting(self) -> bool:
        """Whether that was all."""
        recv = self._wires.rx.recv
        for _ in range(_RECORDS_PER_TURN):
            payload = recv()
            if payload is None:
                return True
            self._dispatch(self._decode(payload))
        return False

    def _tell(self) -> None:
        woken = self._woken.copy()
        self._woken.clear()
        for stream in woken:
            try:
                stream.tell()
            except Exception:
                logger.exception("a listener of request %d failed", stream.id)

    def _dispatch(self, record: FromEngine) -> None:
        if type(record) is Output:
            streams = self._streams
            for item in record.items:
                stream = streams.get(item.id)
                if stream is not None:  # else the client has left
                    stream.feed(item)
            for request_id, token in zip(record.ids, record.tokens, strict=True):
                stream = streams.get(request_id)
                if stream is not None:
                    stream.feed_token(token)
        elif isinstance(record, Stats):
            self.stats = record
        elif isinstance(record, StepLog):
            waiter = self._step_waiters.popleft()
            if not waiter.done():
                waiter.set_result(record.steps)
        elif isinstance(record, Refused):
            stream = self._streams.get(record.id)
            if stream is not None:
                stream.fail(RequestError(record.message, param=record.param or None, status=record.status))
        elif isinstance(record, Fatal):
            self._on_fatal(record.message)
        elif isinstance(record, EngineInfo) and not self._ready.done():
            self.alive = True
            self._ready.set_result(record)

    def _on_fatal(self, message: str) -> None:
        self._die(message)
        if self._host is not None:
            self._loop.call_later(_FATAL_GRACE_S, self._kill_if_running)

    def _kill_if_running(self) -> None:
        if self._host is not None and not self._exited.is_set():
            self._host.kill()

    def _on_exit(self, reason: str) -> None:
        self._exited.set()
        if not self._released:
            # What it sent before it ended counts, down to the last token.
            while not self._wires.rx.empty() and not self._dead.is_set():
                self._turn()
        self._die(reason if self._ready.done() else self._with_tail(f"the engine did not start: {reason}"))
        self._release()

    def _die(self, reason: str) -> None:
        """Fail everything that waits. Only the first reason counts."""
        if self._dead.is_set():
            return
        self.alive = False
        self.death_reason = reason
        self._dead.set()
        self._backlog.close()
        if not self._ready.done():
            self._ready.set_exception(GraphrtError(reason))
        elif self._closing is None:
            logger.error("the engine is gone: %s", reason)
        for stream in list(self._streams.values()):
            stream.fail(EngineDead(reason))
        self._tell()
        for waiter in self._step_waiters:
            if not waiter.done():
                waiter.set_exception(EngineDead(reason))

    def _with_tail(self, message: str) -> str:
        tail = self._host.stderr_tail() if self._host is not None else ""
        return f"{message}; its last output:\n{tail}" if tail else message

    def _send_cancel(self, request_id: int) -> None:
        if self.alive:
            self._backlog.send(self._encode(Cancel(request_id)), bounded=False)

    def _drop_stream(self, request_id: int) -> None:
        self._streams.pop(request_id, None)

    def _release(self) -> None:
        if self._released:
            return
        self._released = True
        self._backlog.close()
        self._loop.remove_reader(self._wires.rx.bell.fd)
        if self._host is not None:
            self._host.release()
        self._wires.close()
