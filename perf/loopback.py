"""Drives an engine in this process, without rings: what is measured is the engine's loop and the step."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from graphrt.engine import Engine
from graphrt.seam.records import FromEngine, Output, Sampling, Submit, ToEngine

GREEDY = Sampling(temperature=0.0)


@dataclass
class Loopback:
    """An endpoint that keeps the number of tokens and when the last batch of them came."""

    inbox: list[ToEngine] = field(default_factory=list)
    tokens: int = 0
    finished: int = 0
    terminate_requested: bool = False

    def poll(self) -> list[ToEngine]:
        """What was queued."""
        records, self.inbox = self.inbox, []
        return records

    def wait(self, timeout_s: float | None) -> None:
        """Nothing ever comes from outside."""

    def server_alive(self) -> bool:
        """Always."""
        return True

    def send(self, rec: FromEngine) -> None:
        """Count."""
        if isinstance(rec, Output):
            self.tokens += len(rec.ids)
            for item in rec.items:
                self.tokens += len(item.tokens)
                self.finished += bool(item.finish)


def time_requests(engine: Engine, prompts: list[list[int]], max_tokens: int) -> tuple[float, list[float]]:
    """(seconds until every prompt has its first token, seconds of each later step) for prompts that run together."""
    end = Loopback()
    end.inbox += [Submit(i + 1, p, GREEDY, max_tokens, []) for i, p in enumerate(prompts)]
    start = time.perf_counter()
    while end.tokens < len(prompts):
        engine.step(end)
    first, steps = time.perf_counter() - start, []
    while end.finished < len(prompts):
        before = time.perf_counter()
        engine.step(end)
        steps.append(time.perf_counter() - before)
    return first, steps
