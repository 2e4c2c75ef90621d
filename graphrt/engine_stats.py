"""What the engine counts and times, cheaply enough for the hot path."""

from __future__ import annotations

from collections import deque

import numpy as np

from graphrt.kernels.step_state import StepKind
from graphrt.seam.records import Output, StepTrace, TokenOut
from graphrt.step_plan import StepPlan

WINDOW = 1024  # steps over which percentiles are taken


class StepClock:
    """Counters since start, and percentiles over recent decode steps."""

    def __init__(self) -> None:
        self.steps: dict[StepKind, int] = {"decode": 0, "prefill": 0, "score": 0}
        self.prompt_tokens = self.generation_tokens = 0
        self.finish_reasons: dict[str, int] = {}
        self._recent: deque[tuple[int, StepKind, int, int, int, int, float | None]] = deque(maxlen=WINDOW)

    def step(self, plan: StepPlan, output: Output, host_ns: int, device_ns: int, idle_us: float | None = None) -> None:
        """Count a retired step. host_ns: the loop's own time; device_ns: time in the launch and waiting for the step.

        idle_us: for which the device had nothing to do before it.
        """
        kind = plan.kind
        self.steps[kind] += 1
        # All that this costs is one tuple: the sums are made when somebody asks.
        self._recent.append((plan.step, kind, plan.size, plan.rows, device_ns, host_ns, idle_us))
        if kind != "decode":
            self.prompt_tokens += plan.rows
        self.generation_tokens += len(output.ids)
        if output.items:
            self.generation_tokens += sum(len(item.tokens) for item in output.items)
            self.finished(output.items)

    def finished(self, items: list[TokenOut]) -> None:
        """Count the reasons for which requests ended."""
        for item in items:
            if item.finish:
                self.finish_reasons[item.finish] = self.finish_reasons.get(item.finish, 0) + 1

    def recent(self, count: int) -> list[StepTrace]:
        """The last steps, newest last."""
        last = list(self._recent)[-count:] if count > 0 else []
        return [
            StepTrace(step, kind, size, rows, device_ns / 1e6, host_ns / 1e3)
            for step, kind, size, rows, device_ns, host_ns, _ in last
        ]

    def host_us(self) -> tuple[float, float]:
        """p50 and p99 of the host's own time per decode step, in µs."""
        return p50_p99([t[5] / 1e3 for t in self._recent if t[1] == "decode"])

    def step_ms(self) -> tuple[float, float]:
        """p50 and p99 of a decode step as the host sees it, in ms."""
        return p50_p99([t[4] / 1e6 for t in self._recent if t[1] == "decode"])

    def idle_us(self) -> tuple[float, float]:
        """p50 and p99 of the device's idle time before a decode step, in µs."""
        return p50_p99([t[6] for t in self._recent if t[1] == "decode" and t[6] is not None])


def p50_p99(values: list[float]) -> tuple[float, float]:
    """(median, 99th percentile), zeros for nothing."""
    n = len(values)
    if n == 0:
        return 0.0, 0.0
    middle, high = n // 2, min(n * 99 // 100, n - 1)
    ordered = np.partition(values, (middle, high))  # sorting all of them takes several times as long
    return float(ordered[middle]), float(ordered[high])
