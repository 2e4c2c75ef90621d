"""An endpoint for tests that plays the server: it hands over what a test queues and keeps what the engine says."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from graphrt.engine import Engine
from graphrt.seam.records import (
    EngineInfo,
    FromEngine,
    Logprob,
    Output,
    Refused,
    Sampling,
    Stats,
    StepLog,
    StepTrace,
    Submit,
    ToEngine,
)

GREEDY = Sampling(temperature=0.0)


@dataclass
class Script:
    """Everything by request id."""

    inbox: list[ToEngine] = field(default_factory=list)
    tokens: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    finish: dict[int, str] = field(default_factory=dict)
    cached: dict[int, int] = field(default_factory=dict)
    logprobs: dict[int, list[Logprob]] = field(default_factory=lambda: defaultdict(list))
    prompt_logprobs: dict[int, list[Logprob]] = field(default_factory=dict)  # of those who got any
    refused: dict[int, Refused] = field(default_factory=dict)
    info: EngineInfo | None = None
    stats: Stats | None = None
    steps: list[StepTrace] = field(default_factory=list)
    terminate_requested: bool = False

    def poll(self) -> list[ToEngine]:
        records, self.inbox = self.inbox, []
        return records

    def wait(self, timeout_s: float | None) -> None:
        assert timeout_s is not None or not self.inbox

    def server_alive(self) -> bool:
        return True

    def send(self, rec: FromEngine) -> None:
        if isinstance(rec, Output):
            said = [item.id for item in rec.items] + rec.ids
            assert len(set(said)) == len(said), "a step says of a request once"
            for request_id, token in zip(rec.ids, rec.tokens, strict=True):
                assert request_id not in self.finish, "nothing comes after the end"
                self.tokens[request_id].append(token)
            for item in rec.items:
                assert item.id not in self.finish, "nothing comes after the end"
                self.tokens[item.id] += item.tokens
                self.cached[item.id] = item.cached_tokens
                self.logprobs[item.id] += item.logprobs
                if item.prompt_logprobs:
                    assert len(self.tokens[item.id]) == len(item.tokens), "scores come before tokens"
                    self.prompt_logprobs.setdefault(item.id, []).extend(item.prompt_logprobs)
                if item.finish:
                    self.finish[item.id] = item.finish
        elif isinstance(rec, Refused):
            self.refused[rec.id] = rec
        elif isinstance(rec, StepLog):
            self.steps = rec.steps
        elif isinstance(rec, Stats):
            self.stats = rec
        elif isinstance(rec, EngineInfo):
            self.info = rec


def settle(engine: Engine, script: Script, turns: int = 5000) -> None:
    """Run until there is nothing left to do."""
    for _ in range(turns):
        if not engine.step(script) and not script.inbox:
            return
    raise AssertionError("the engine does not come to rest")


def nothing_left(engine: Engine) -> None:
    s = engine.scheduler
    assert s.idle and s.slots_used == 0 and s.pool.used == 0 and not s.rows and not s.prefilling and not s.waiting


def run_alone(engine: Engine, request: Submit) -> Script:
    """What the engine says to one request by itself."""
    script = Script(inbox=[request])
    settle(engine, script)
    return script
