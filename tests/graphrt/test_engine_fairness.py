"""Who goes first: nobody starves, the oldest is never sent back, and a newcomer is not let in only to be thrown out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_script import GREEDY, Script, nothing_left, settle

from graphrt.engine import Engine
from graphrt.engine_config import EngineConfig
from graphrt.engine_setup import build_engine
from graphrt.seam.records import AskSteps, Submit


@pytest.fixture(scope="module")
def make_engine(tiny_model: Callable[..., Path]) -> Callable[..., Engine]:
    def make(*, blocks: int | None = None, **config: Any) -> Engine:
        model = tiny_model("llama", head_dim=16, layers=2, dtype="bf16")
        if blocks is not None:
            config["kv_bytes"] = blocks * 16 * 2 * 2 * 16 * 4 * _kv_heads(model)
        engine = build_engine(EngineConfig(str(model), **({"context": 64, "prefill_chunk": 16} | config)))
        assert blocks is None or engine.info.num_blocks == blocks
        return engine

    return make


def _kv_heads(model: Path) -> int:
    from graphrt.config import load_config

    return load_config(model).num_kv_heads


def prompts(count: int, length: int) -> list[list[int]]:
    """No two share a block."""
    return np.random.default_rng().permuted(np.arange(320)[None].repeat(count, 0), axis=1)[:, :length].tolist()


def test_a_long_prompt_does_not_silence_those_who_run(make_engine: Callable[..., Engine]) -> None:
    engine, script = make_engine(context=512, max_batch=2), Script()
    script.inbox.append(Submit(1, [1, 2], GREEDY, 60, []))
    for _ in range(3):
        engine.step(script)
    script.inbox.append(Submit(2, [3] * 400, GREEDY, 4, []))
    before = len(script.tokens[1])
    for _ in range(20):
        engine.step(script)
    assert len(script.tokens[1]) == before + 10, "every second step is theirs"
    settle(engine, script)
    script.inbox.append(AskSteps(1000))
    engine.step(script)
    assert sum(s.kind == "prefill" for s in script.steps) == 1 + 25


@pytest.mark.parametrize("run_ahead", [0, 2])
def test_first_come_first_served_under_preemption(make_engine: Callable[..., Engine], run_ahead: int) -> None:
    engine, script = make_engine(blocks=7, max_batch=4, run_ahead=run_ahead), Script()
    # Each starts with one block and ends with four.
    script.inbox += [Submit(i, p, GREEDY, 54, []) for i, p in enumerate(prompts(6, 10))]
    settle(engine, script)
    assert list(script.finish) == list(range(6)) and engine.scheduler.preemptions > 0
    nothing_left(engine)


def test_a_newcomer_leaves_room_for_those_who_run(make_engine: Callable[..., Engine]) -> None:
    engine, script = make_engine(blocks=4, max_batch=2), Script()
    first, second = prompts(2, 32)
    script.inbox += [Submit(1, first[:30], GREEDY, 30, []), Submit(2, second, GREEDY, 10, [])]
    settle(engine, script)
    assert engine.scheduler.preemptions == 0 and list(script.finish) == [1, 2]


def test_a_preempted_request_is_counted_once(make_engine: Callable[..., Engine]) -> None:
    engine, script = make_engine(blocks=7, max_batch=4), Script()
    todo = [Submit(i, p, GREEDY, 54, []) for i, p in enumerate(prompts(6, 10))]
    script.inbox += todo
    settle(engine, script)
    assert engine.scheduler.preemptions > 0
    # What a request finds of its own after a preemption is no hit of its prompt.
    assert engine.scheduler.prefix_hits == 0 and set(script.cached.values()) == {0}
    assert engine.scheduler.prefix_queries == sum(len(r.tokens) for r in todo)


def test_scores_survive_a_preemption_and_come_once(make_engine: Callable[..., Engine]) -> None:
    todo = [Submit(i, p, GREEDY, 20, [], prompt_logprobs=1) for i, p in enumerate(prompts(4, 40))]
    engine, script = make_engine(blocks=10, max_batch=4, prefill_chunk=9), Script()
    script.inbox += todo
    preempted = 0
    for _ in range(2000):
        for seq in list(engine.scheduler.prefilling):
            if (
                0 < seq.scored < 39
                and preempted < 3
                and len(engine.scheduler.rows) + len(engine.scheduler.prefilling) > 1
            ):
                engine.scheduler._preempt(seq)  # in the middle of its prompt
                preempted += 1
        if not engine.step(script) and not script.inbox:
            break
    assert preempted > 0
    for r in todo:
        assert [p.token for p in script.prompt_logprobs[r.id]] == r.tokens[1:]
    nothing_left(engine)
