"""An engine that computes nothing: it emits tokens at a fixed rate behind the real seam, for load tests of the server.

Run it with `EngineClient.launch(config, runner="graphrt.perf.fake_engine:run_engine")`. `config.max_batch` sequences get
one token a step, `config.max_waiting` more wait their turn. `config.model_dir` holds its settings instead of a path:
`fake:step_ms=5,prefill_ms=20,reply=echo`, see `FakeSettings`.
"""

from __future__ import annotations

import os
import time
from collections import deque
from typing import Literal, TypeVar

import msgspec

from graphrt.engine_config import EngineConfig
from graphrt.errors import ConfigError
from graphrt.seam.endpoint import EngineEndpoint
from graphrt.seam.records import Cancel, Drain, EngineInfo, Output, Refused, Stats, Submit, TokenOut

_STATS_PERIOD_S = 0.1


class FakeSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`reply` "echo" repeats the prompt over and over, "count" counts up from the seed."""

    step_ms: float = 1.0  # time between steps; 0: as fast as possible
    prefill_ms: float = 0.0  # from admission to the first token
    vocab_size: int = 1000
    context: int = 1 << 20
    reply: Literal["echo", "count"] = "count"


S = TypeVar("S", bound=FakeSettings)


class Running:
    """A sequence that gets tokens."""

    __slots__ = ("due", "produced", "request")

    def __init__(self, request: Submit, due: float) -> None:
        self.request = request
        self.due = due
        self.produced = 0


class FakeEngine:
    """Keeps the seam's protocol in full: refusals, cancels, draining, statistics."""

    def __init__(self, config: EngineConfig, settings: FakeSettings, endpoint: EngineEndpoint) -> None:
        self._settings = settings
        self._endpoint = endpoint
        self._max_batch = config.max_batch
        self._max_waiting = config.max_waiting
        self._context = min(settings.context, config.context or settings.context)
        self._running: dict[int, Running] = {}
        self._waiting: deque[Submit] = deque()
        self._drain_until: float | None = None
        self._steps = 0
        self._prompt_tokens = 0
        self._tokens = 0
        self._finished: dict[str, int] = {}
        self._stats_due = 0.0
        self._stats_sent: tuple[int, int] | None = None

    def run(self) -> None:
        """Until drained, terminated or without a server."""
        endpoint = self._endpoint
        endpoint.send(self._info())
        step_s = self._settings.step_ms / 1000
        next_step = time.monotonic()
        while not endpoint.terminate_requested and endpoint.server_alive():
            self._take_in()
            now = time.monotonic()
            if self._drain_until is not None and (now >= self._drain_until or not self._running):
                break
            if not self._running:
                self._send_stats(now)
                endpoint.wait(None)
                next_step = time.monotonic()
            elif now >= next_step:
                self._step(now)
                self._send_stats(now)
                next_step = max(next_step + step_s, now)  # a step that came late moves the later ones
            elif next_step - now > 0.002:
                endpoint.wait(next_step - now - 0.001)
            else:
                time.sleep(next_step - now)  # `wait` is no finer than 1 ms
        self._give_up()

    def _info(self) -> EngineInfo:
        return EngineInfo(
            architecture="fake",
            device="cpu",
            vocab_size=self._settings.vocab_size,
            context=self._context,
            max_batch=self._max_batch,
            max_waiting=self._max_waiting,
            block_tokens=16,
            num_blocks=0,
            run_ahead=0,
            pid=os.getpid(),
        )

    def _take_in(self) -> None:
        for record in self._endpoint.poll():
            if isinstance(record, Submit):
                self._submit(record)
            elif isinstance(record, Cancel):
                self._cancel(record.id)
            elif isinstance(record, Drain):
                self._drain_until = time.monotonic() + record.timeout_s
        self._admit()

    def _submit(self, request: Submit) -> None:
        length = len(request.tokens)
        if self._drain_until is not None:
            self._endpoint.send(Refused(request.id, 503, "the engine is draining"))
        elif length >= self._context:
            message = f"the prompt has {length} tokens: at most {self._context - 1}"
            self._endpoint.send(Refused(request.id, 400, message, "messages"))
        elif len(self._running) >= self._max_batch and len(self._waiting) >= self._max_waiting:
            self._endpoint.send(Refused(request.id, 429, f"{len(self._waiting)} requests wait already"))
        else:
            self._waiting.append(request)
            self._admit()

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._max_batch:
            request = self._waiting.popleft()
            self._prompt_tokens += len(request.tokens)
            row = Running(request, time.monotonic() + self._settings.prefill_ms / 1000)
            self._running[request.id] = row
            self._begin(row)

    def _begin(self, row: Running) -> None:
        """For other rhythms than one step for all."""

    def _cancel(self, request_id: int) -> None:
        queued = next((request for request in self._waiting if request.id == request_id), None)
        if queued is not None:
            self._waiting.remove(queued)
        elif self._running.pop(request_id, None) is None:
            return
        self._endpoint.send(Output([self._ended(request_id, [], "cancelled")]))

    def _step(self, now: float) -> None:
        output = Output([], [], [])
        for row in list(self._running.values()):
            if row.due > now:
                continue
            request = row.request
            token = self._token(request, row.produced)
            row.produced += 1
            self._tokens += 1
            if token in request.stop_ids:
                output.items.append(self._ended(request.id, [token], "stop"))
            elif row.produced >= request.max_tokens or len(request.tokens) + row.produced >= self._context:
                output.items.append(self._ended(request.id, [token], "length"))
            else:
                output.ids.append(request.id)
                output.tokens.append(token)
                continue
            del self._running[request.id]
        self._steps += 1
        if output.items or output.ids:
            self._endpoint.send(output)

    def _token(self, request: Submit, index: int) -> int:
        if self._settings.reply == "echo":
            return request.tokens[index % len(request.tokens)]
        return (request.sampling.seed + index) % self._settings.vocab_size

    def _ended(self, request_id: int, tokens: list[int], finish: str) -> TokenOut:
        self._finished[finish] = self._finished.get(finish, 0) + 1
        return TokenOut(request_id, tokens, finish)

    def _give_up(self) -> None:
        ids = [*self._running, *(request.id for request in self._waiting)]
        if ids:
            self._endpoint.send(Output([self._ended(request_id, [], "cancelled") for request_id in ids]))

    def _send_stats(self, now: float) -> None:
        state = (self._steps, sum(self._finished.values()))
        idle = not self._running
        if state == self._stats_sent or (now < self._stats_due and not idle):
            return
        self._stats_due = now + _STATS_PERIOD_S
        self._stats_sent = state
        self._endpoint.send(
            Stats(
                running=len(self._running),
                waiting=len(self._waiting),
                slots_used=len(self._running),
                decode_steps=self._steps,
                prompt_tokens=self._prompt_tokens,
                generation_tokens=self._tokens,
                finished=dict(self._finished),
                step_ms_p50=self._settings.step_ms,
                step_ms_p99=self._settings.step_ms,
            )
        )


def parse_settings(text: str, kind: type[S] = FakeSettings) -> S:  # type: ignore[assignment]
    """`fake:` and comma-separated `name=value`. `ConfigError` for an unknown name or a value of the wrong kind."""
    name, _, rest = text.partition(":")
    pairs = [pair.partition("=") for pair in rest.split(",") if pair]
    if name != "fake":
        raise ConfigError(f"the fake engine's settings start with 'fake:', not {text!r}")
    try:
        return msgspec.convert({key: value for key, _, value in pairs}, kind, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"the fake engine's settings {text!r}: {error}") from None


def run_engine(config: EngineConfig, endpoint: EngineEndpoint) -> None:
    """The runner."""
    FakeEngine(config, parse_settings(config.model_dir), endpoint).run()
