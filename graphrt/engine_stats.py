"""What the engine counts and times, cheaply enough for the hot path."""

from __future__ import annotations

from array import array
from collections import deque

from graphrt.kernels.step_state import StepKind
from graphrt.scheduler import StepPlan
from graphrt.seam.records import StepTrace, TokenOut

WINDOW = 1024  # steps over which percentiles are taken


class Window:
    """The last `WINDOW` values."""

    def __init__(self) -> None:
        self._values = array("d", bytes(8 * WINDOW))
        self._count = 0

    def add(self, value: float) -> None:
        """Overwrites the oldest."""
        self._values[self._count % WINDOW] = value
        self._count += 1

    def p50_p99(self) -> tuple[float, float]:
        """(median, 99th percentile), zeros before the first value."""
        n = min(self._count, WINDOW)
        if n == 0:
            return 0.0, 0.0
        ordered = sorted(self._values[:n])
        return ordered[n // 2], ordered[min(n * 99 // 100, n - 1)]


class StepClock:
    """Counters since start, and percentiles over recent decode steps."""

    def __init__(self) -> None:
        self.steps: dict[StepKind, int] = {"decode": 0, "prefill": 0, "score": 0}
        self.prompt_tokens = self.generation_tokens = 0
        self.finish_reasons: dict[str, int] = {}
        self._host, self._step, self._idle = Window(), Window(), Window()
        self._recent: deque[tuple[StepPlan, int, int]] = deque(maxlen=WINDOW)

    def step(
        self, plan: StepPlan, items: list[TokenOut], host_ns: int, device_ns: int, idle_us: float | None = None
    ) -> None:
        """Count a retired step. host_ns: the loop's own time; device_ns: time in the launch and waiting for the step.

        idle_us: for which the device had nothing to do before it.
        """
        self.steps[plan.kind] += 1
        self._recent.append((plan, device_ns, host_ns))
        if plan.kind == "decode":
            self._host.add(host_ns / 1e3)
            self._step.add(device_ns / 1e6)
            if idle_us is not None:
                self._idle.add(idle_us)
        else:
            self.prompt_tokens += sum(p.count for p in plan.parts)
        self.generation_tokens += sum(len(item.tokens) for item in items)
        self.finished(items)

    def finished(self, items: list[TokenOut]) -> None:
        """Count the reasons for which requests ended."""
        for item in items:
            if item.finish:
                self.finish_reasons[item.finish] = self.finish_reasons.get(item.finish, 0) + 1

    def recent(self, count: int) -> list[StepTrace]:
        """The last steps, newest last."""
        last = list(self._recent)[-count:] if count > 0 else []
        return [
            StepTrace(p.step, p.kind, p.size, sum(part.count for part in p.parts), device_ns / 1e6, host_ns / 1e3)
            for p, device_ns, host_ns in last
        ]

    def host_us(self) -> tuple[float, float]:
        """p50 and p99 of the host's own time per decode step, in µs."""
        return self._host.p50_p99()

    def step_ms(self) -> tuple[float, float]:
        """p50 and p99 of a decode step as the host sees it, in ms."""
        return self._step.p50_p99()

    def idle_us(self) -> tuple[float, float]:
        """p50 and p99 of the device's idle time before a decode step, in µs."""
        return self._idle.p50_p99()
