"""The engine's loop: take records, plan, publish the delta, launch, read the token ring, emit.

This is the hot path, top to bottom. It knows token ids only: no text, no JSON. On a GPU a launch returns at once and the loop runs
`run_ahead` replays ahead of the tokens it has read; on the CPU a launch is the step itself.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from typing import Protocol

from graphrt.admission import check_submit
from graphrt.capture.delta import DeltaWriter
from graphrt.capture.graph import GraphSet
from graphrt.capture.token_ring import TokenReader
from graphrt.engine_stats import StepClock
from graphrt.errors import RequestError
from graphrt.scheduler import Scheduler
from graphrt.seam.records import (
    AskSteps,
    Cancel,
    Drain,
    EngineInfo,
    FromEngine,
    Output,
    Refused,
    Stats,
    StepLog,
    Submit,
    ToEngine,
    TokenOut,
)
from graphrt.sequence import Sequence
from graphrt.step_plan import StepPlan

_now = time.perf_counter_ns

STEP_TIMEOUT_S = 60.0  # a step that takes longer hangs
STATS_EVERY_S = 0.1
LOOK_EVERY_S = 0.1  # at the server and the clock, while there is work
TERMINATE_GRACE_S = 30.0


class Endpoint(Protocol):
    """The engine's side of the seam."""

    @property
    def terminate_requested(self) -> bool:
        """Whether the process was told to end."""

    def poll(self) -> list[ToEngine]:
        """The records that have arrived; never blocks."""

    def wait(self, timeout_s: float | None) -> None:
        """Block until a record arrives or the server is gone."""

    def send(self, rec: FromEngine) -> None:
        """Hand a record to the server."""

    def server_alive(self) -> bool:
        """Whether anybody is listening."""


class Engine:
    """One model on one device, driven through an endpoint."""

    def __init__(
        self,
        graphs: GraphSet,
        scheduler: Scheduler,
        delta: DeltaWriter,
        reader: TokenReader,
        info: EngineInfo,
        root: bytes,
    ) -> None:
        self.graphs, self.scheduler, self.delta, self.reader = graphs, scheduler, delta, reader
        self.info, self.root = info, root
        self.clock = StepClock()
        self.in_flight: deque[StepPlan] = deque()
        self.drain_deadline: float | None = None
        self._stats_at = 0.0

    def run(self, endpoint: Endpoint) -> None:
        """Serve until drained or until the server is gone."""
        gc.collect()
        gc.freeze()  # nothing made during start-up is ever garbage: collections look at requests only
        endpoint.send(self.info)
        look_at = 0.0
        while True:
            busy = self.step(endpoint)
            now = time.monotonic()
            if busy and now < look_at and self.drain_deadline is None and not endpoint.terminate_requested:
                continue
            look_at = now + LOOK_EVERY_S
            if endpoint.terminate_requested and self.drain_deadline is None:
                # Often it went to the whole process group: the server still says how long requests in hand may take.
                self.drain_deadline = now + TERMINATE_GRACE_S
            if self.drain_deadline is not None and (
                self.scheduler.idle or (now > self.drain_deadline and self._cancel_all(endpoint))
            ):
                endpoint.send(self.stats())
                return
            if busy:
                self._send_stats(endpoint, 2 * STATS_EVERY_S)  # late: there was no wait in which to send them
            else:
                self._send_stats(endpoint, 0.0)
                endpoint.wait(None if self.drain_deadline is None else 0.01)
            if not endpoint.server_alive():
                return

    def step(self, endpoint: Endpoint) -> bool:
        """One turn of the loop; False when there was nothing to do."""
        start = _now()
        for record in endpoint.poll():
            self._take(record, endpoint)
        plan = self.scheduler.plan()
        launching = launched = 0
        if plan is not None:
            plan.step = self.delta.publish()
            graph = self.graphs[plan.kind, plan.size]
            launching = _now()
            graph.launch()
            launched = _now()
            self.in_flight.append(plan)
        if not self.in_flight or (plan is not None and len(self.in_flight) <= self.info.run_ahead):
            return plan is not None
        oldest = self.in_flight.popleft()
        waiting = launched or _now()
        late = not self.reader.ready(oldest.step)
        if late:  # there is time for what nobody should wait for afterwards
            self.scheduler.prepare()
            self._send_stats(endpoint, STATS_EVERY_S)
            self.reader.wait(oldest.step, STEP_TIMEOUT_S)
        arrived = _now()
        output = self.scheduler.retire(oldest, self.reader)
        if output.ids or output.items:
            endpoint.send(output)
        if not late:
            self.scheduler.publish()
        idle = self.reader.idle_us(oldest.step) if plan is not None else None
        device = (launched - launching) + (arrived - waiting)
        self.clock.step(oldest, output, _now() - start - device, device, idle)
        return True

    # -- records ------------------------------------------------------------------------------------------------------

    def _take(self, record: ToEngine, endpoint: Endpoint) -> None:
        if isinstance(record, Submit):
            try:
                self.scheduler.add(self._sequence(record))
            except RequestError as e:
                endpoint.send(Refused(record.id, e.status, str(e), e.param or ""))
        elif isinstance(record, Cancel):
            self._emit(self.scheduler.cancel(record.id), endpoint)
        elif isinstance(record, AskSteps):
            endpoint.send(StepLog(self.clock.recent(record.count)))
        elif isinstance(record, Drain):
            self.drain_deadline = time.monotonic() + record.timeout_s

    def _sequence(self, r: Submit) -> Sequence:
        if self.drain_deadline is not None:
            raise RequestError("the server is shutting down", status=503)
        # Slots may be free while there are no blocks: only as many wait beyond the queue as could start.
        startable = self.info.max_batch - self.scheduler.slots_used
        if len(self.scheduler.waiting) >= self.info.max_waiting + startable:
            raise RequestError(f"the queue is full: {self.info.max_waiting} requests are waiting", status=429)
        check_submit(r, self.info)
        return Sequence(r, list(r.tokens), len(r.tokens) + r.max_tokens, self.root)

    def _emit(self, items: list[TokenOut], endpoint: Endpoint) -> None:
        if items:
            self.clock.finished(items)
            endpoint.send(Output(items))

    def _cancel_all(self, endpoint: Endpoint) -> bool:
        """Cancel what is left; True when nothing is in flight any more."""
        for request_id in self.scheduler.live:
            self._emit(self.scheduler.cancel(request_id), endpoint)
        return self.scheduler.idle

    # -- numbers ------------------------------------------------------------------------------------------------------

    def _send_stats(self, endpoint: Endpoint, every_s: float) -> None:
        now = time.monotonic()
        if now - self._stats_at >= every_s:
            self._stats_at = now
            endpoint.send(self.stats())

    def stats(self) -> Stats:
        """Counters and gauges of now."""
        s, c, pool = self.scheduler, self.clock, self.scheduler.pool
        host, step, idle = c.host_us(), c.step_ms(), c.idle_us()
        return Stats(
            running=len(s.rows) + len(s.prefilling),
            waiting=len(s.waiting),
            slots_used=s.slots_used,
            blocks_total=pool.num_blocks,
            blocks_used=pool.used,
            blocks_cached=pool.cached,
            decode_steps=c.steps["decode"],
            prefill_steps=c.steps["prefill"] + c.steps["score"],
            eager_steps=self.graphs.eager_launches,
            prompt_tokens=c.prompt_tokens,
            generation_tokens=c.generation_tokens,
            prefix_queries=s.prefix_queries,
            prefix_hits=s.prefix_hits,
            preemptions=s.preemptions,
            finished=dict(c.finish_reasons),
            step_ms_p50=step[0],
            step_ms_p99=step[1],
            host_us_p50=host[0],
            host_us_p99=host[1],
            idle_us_p50=idle[0],
            idle_us_p99=idle[1],
            queue_counts=list(s.queue_times.counts),
            queue_sum_s=s.queue_times.sum_s,
        )
