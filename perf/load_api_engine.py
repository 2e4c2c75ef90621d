"""The engine of the server's load test: it emits tokens at a fixed rate, and each token is the time at which it was sent.

    EngineClient.launch(EngineConfig("fake:step_ms=20,pattern=burst"), runner="graphrt.perf.load_api_engine:run_engine")

A token id is CLOCK_MONOTONIC in microseconds, which all processes of a machine share. The pattern "burst" gives every sequence
its token in one record, as a batch step does; "staggered" gives each sequence a phase of its own and one record a token.
"""

from __future__ import annotations

import heapq
import os
import random
import time
from typing import Literal

from graphrt.engine_config import EngineConfig
from graphrt.perf.fake_engine import FakeEngine, FakeSettings, Running, parse_settings
from graphrt.seam.endpoint import EngineEndpoint
from graphrt.seam.records import Output


class ClockSettings(FakeSettings, frozen=True, forbid_unknown_fields=True):
    """`step_ms` is the time between two tokens of a sequence. `cpu` pins the process there; -1 leaves it free."""

    pattern: Literal["burst", "staggered"] = "burst"
    cpu: int = -1


class ClockEngine(FakeEngine):
    """Due times are absolute: a step that comes late does not slow the rate down, but for those missed whole."""

    def __init__(self, config: EngineConfig, settings: ClockSettings, endpoint: EngineEndpoint) -> None:
        super().__init__(config, settings, endpoint)
        self._period = settings.step_ms / 1000
        self._burst = settings.pattern == "burst"
        self._random = random.Random(0)
        self._due: list[tuple[float, int]] = []  # a heap of (time, request)

    def run(self) -> None:
        """Until drained, terminated or without a server."""
        endpoint = self._endpoint
        endpoint.send(self._info())
        while not endpoint.terminate_requested and endpoint.server_alive():
            self._take_in()
            now = time.monotonic()
            if self._drain_until is not None and (now >= self._drain_until or not self._running):
                break
            if not self._running:
                self._due.clear()
                self._send_stats(now)
                endpoint.wait(None)
                continue
            rest = self._due[0][0] - now
            if rest <= 0:
                self._step(now)
                self._send_stats(now)
            elif rest > 0.002:
                endpoint.wait(rest - 0.001)
            else:
                time.sleep(rest)  # `wait` is no finer than 1 ms
        self._give_up()

    def _begin(self, row: Running) -> None:
        now = time.monotonic()
        if self._burst:
            due = (now // self._period + 1) * self._period
        else:
            due = now + self._random.random() * self._period
        heapq.heappush(self._due, (due, row.request.id))

    def _step(self, now: float) -> None:
        going: list[int] = []  # requests that get a token and go on
        ended: list[int] = []
        while self._due and self._due[0][0] <= now:
            due, request_id = heapq.heappop(self._due)
            row = self._running.get(request_id)
            if row is None:
                continue  # cancelled
            self._tokens += 1
            row.produced += 1
            if row.produced < row.request.max_tokens:
                going.append(request_id)
                missed = max(0.0, (now - due) // self._period)  # by an engine that came late: not made up for
                heapq.heappush(self._due, (due + (missed + 1) * self._period, request_id))
            else:
                ended.append(request_id)
                del self._running[request_id]
        self._steps += 1
        if self._burst and (going or ended):
            self._send(going, ended)
        elif not self._burst:
            for request_id in going:
                self._send([request_id], [])
            for request_id in ended:
                self._send([], [request_id])

    def _send(self, going: list[int], ended: list[int]) -> None:
        """All else is done: what is between the stamp and the ring is the seam's."""
        stamp = time.monotonic_ns() // 1000
        items = [self._ended(request_id, [stamp], "length") for request_id in ended]
        self._endpoint.send(Output(items, going, [stamp] * len(going)))


def run_engine(config: EngineConfig, endpoint: EngineEndpoint) -> None:
    """The runner."""
    settings = parse_settings(config.model_dir, ClockSettings)
    if settings.cpu >= 0:
        os.sched_setaffinity(0, {settings.cpu})
    ClockEngine(config, settings, endpoint).run()
