"""The engine's loop behind a scripted endpoint: the same tokens whatever else is going on, and nothing left behind."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_script import GREEDY, Script, nothing_left, settle

from graphrt.engine import Engine
from graphrt.engine_config import EngineConfig
from graphrt.engine_setup import build_engine, kv_sizes
from graphrt.errors import ConfigError, DeviceError, ModelError
from graphrt.seam.records import AskSteps, Cancel, Drain, Sampling, Submit


@pytest.fixture(scope="module")
def make_engine(tiny_model: Callable[..., Path]) -> Callable[..., Engine]:
    def make(**config: Any) -> Engine:
        model = tiny_model("llama", head_dim=32, dtype="bf16")
        return build_engine(EngineConfig(str(model), **({"context": 128, "prefill_chunk": 32} | config)))

    return make


def requests(n: int, seed: int, *, longest: int = 60) -> list[Submit]:
    rng = np.random.default_rng(seed)
    made = []
    for i in range(n):
        sampling = GREEDY
        if i % 2:
            sampling = Sampling(
                temperature=float(rng.uniform(0.3, 1.5)),
                top_k=int(rng.integers(0, 50)),
                top_p=float(rng.uniform(0.5, 1)),
                min_p=float(rng.choice([0, 0.05])),
                seed=int(rng.integers(0, 1 << 63)) * 2 + 1,
            )
        prompt = rng.integers(0, 300, rng.integers(1, longest)).tolist()
        made.append(Submit(i + 1, prompt, sampling, int(rng.integers(1, 60)), rng.integers(0, 300, 2).tolist()))
    return made


@pytest.fixture(scope="module")
def alone(make_engine: Callable[..., Engine]) -> dict[int, list[int]]:
    """The tokens of `requests(24, seed=5)`, each run by itself."""
    engine, script = make_engine(max_batch=1), Script()
    for r in requests(24, 5):
        script.inbox.append(r)
        settle(engine, script)
    nothing_left(engine)
    assert set(script.finish.values()) == {"stop", "length"}, "the requests end in both ways"
    return dict(script.tokens)


@pytest.mark.parametrize("run_ahead", [0, 1, 2])
@pytest.mark.parametrize("chunk", [1, 7, 256])
def test_tokens_do_not_depend_on_the_batch(
    make_engine: Callable[..., Engine], alone: dict[int, list[int]], run_ahead: int, chunk: int
) -> None:
    engine, script = make_engine(max_batch=5, run_ahead=run_ahead, prefill_chunk=chunk), Script()
    rng = np.random.default_rng()
    for r in requests(24, 5):
        script.inbox.append(r)
        for _ in range(rng.integers(0, 12)):
            engine.step(script)
    settle(engine, script)
    assert dict(script.tokens) == alone
    nothing_left(engine)


@pytest.mark.parametrize("run_ahead", [0, 1, 2])
def test_preemption_loses_nobody_and_changes_nothing(
    make_engine: Callable[..., Engine], alone: dict[int, list[int]], run_ahead: int
) -> None:
    probe = make_engine()
    block = probe.graphs.buffers.caches["kv"].nbytes // probe.info.num_blocks
    engine, script = make_engine(max_batch=6, run_ahead=run_ahead, kv_bytes=9 * block), Script()
    assert engine.info.num_blocks == 9
    script.inbox += requests(24, 5)
    settle(engine, script)
    assert dict(script.tokens) == alone
    assert engine.scheduler.preemptions > 0
    nothing_left(engine)


def test_prefix_hits_are_counted_and_change_nothing(make_engine: Callable[..., Engine]) -> None:
    engine, script = make_engine(max_batch=4), Script()
    prompt = np.random.default_rng().integers(0, 300, 70).tolist()
    first = Submit(1, prompt, GREEDY, 30, [])
    script.inbox.append(first)
    settle(engine, script)
    assert script.cached[1] == 0
    script.inbox += [Submit(2, prompt, GREEDY, 30, []), Submit(3, prompt[:40], GREEDY, 30, [])]
    settle(engine, script)
    assert script.cached[2] == 64 and script.cached[3] == 32, "whole blocks short of the last token"
    assert script.tokens[2] == script.tokens[1]
    assert engine.scheduler.prefix_hits == 96
    assert engine.scheduler.pool.cached > 0
    # The next turn of the conversation finds prompt and answer.
    turn = prompt + script.tokens[1] + [5]
    script.inbox.append(Submit(4, turn, GREEDY, 4, []))
    settle(engine, script)
    assert script.cached[4] == 96
    nothing_left(engine)


def test_cached_blocks_make_room(make_engine: Callable[..., Engine]) -> None:
    engine, script = make_engine(max_batch=2), Script()
    for i in range(40):
        script.inbox.append(Submit(i + 1, np.random.default_rng(i).integers(0, 300, 50).tolist(), GREEDY, 3, []))
        settle(engine, script)
    pool = engine.scheduler.pool
    assert pool.cached + pool.used <= pool.num_blocks and len(script.finish) == 40
    nothing_left(engine)


@pytest.mark.parametrize("run_ahead", [0, 1, 2])
def test_a_cancelled_request_frees_its_slot_within_run_ahead_plus_one_steps(
    make_engine: Callable[..., Engine], run_ahead: int
) -> None:
    for turns in range(9):  # cancelled while waiting, in its prompt, between tokens
        engine, script = make_engine(max_batch=2, run_ahead=run_ahead, prefill_chunk=16), Script()
        script.inbox += [Submit(i, [i] * 50, GREEDY, 60, []) for i in (1, 2, 3)]
        for _ in range(turns):
            engine.step(script)
        script.inbox += [Cancel(1), Cancel(2), Cancel(3), Cancel(99)]
        for _ in range(run_ahead + 1):
            engine.step(script)
        assert script.finish == {1: "cancelled", 2: "cancelled", 3: "cancelled"}
        nothing_left(engine)


def test_random_joins_and_cancels_leave_nothing(make_engine: Callable[..., Engine]) -> None:
    engine, script = make_engine(max_batch=7, run_ahead=1, max_waiting=1000), Script()
    rng = np.random.default_rng()
    todo = requests(150, int(rng.integers(1 << 30)))
    for r in todo:
        script.inbox.append(r)
        if rng.random() < 0.4:
            script.inbox.append(Cancel(int(rng.integers(1, r.id + 1))))
        for _ in range(rng.integers(0, 6)):
            engine.step(script)
    settle(engine, script)
    assert set(script.finish) == {r.id for r in todo}
    assert {"cancelled", "length", "stop"} == set(script.finish.values())
    nothing_left(engine)
    stats = engine.stats()
    assert sum(stats.finished.values()) == 150 and stats.eager_steps == 0
    assert stats.generation_tokens >= sum(len(t) for t in script.tokens.values())


def test_memory_stays_where_it_is(make_engine: Callable[..., Engine]) -> None:
    engine, script = make_engine(max_batch=8), Script()
    script.inbox += requests(30, 7)
    settle(engine, script)
    buffers, arena = engine.graphs.buffers, engine.graphs.ops.arena
    addresses = {n: a.ptr for n, a in buffers.caches.items()}
    grown = arena.grown
    script.inbox += [Submit(r.id + 100, r.tokens, r.sampling, r.max_tokens, r.stop_ids) for r in requests(30, 7)]
    settle(engine, script)
    assert arena.grown == grown and addresses == {n: a.ptr for n, a in buffers.caches.items()}


def test_lengths_and_stops(make_engine: Callable[..., Engine]) -> None:
    engine, script = make_engine(), Script()
    script.inbox.append(Submit(1, [1, 2, 3], GREEDY, 1, []))
    script.inbox.append(Submit(2, [1] * 100, GREEDY, 28, []))
    settle(engine, script)
    assert len(script.tokens[1]) == 1 and len(script.tokens[2]) == 28
    assert script.finish == {1: "length", 2: "length"}
    stop = script.tokens[2][5]
    upto = script.tokens[2].index(stop) + 1
    script.inbox.append(Submit(3, [1] * 100, GREEDY, 28, [299, stop]))
    settle(engine, script)
    assert script.tokens[3] == script.tokens[2][:upto] and script.finish[3] == "stop"


@pytest.mark.parametrize(
    ("request_", "status", "words"),
    [
        (Submit(9, [], GREEDY, 5, []), 400, "prompt is empty"),
        (Submit(9, [1] * 100, GREEDY, 29, []), 400, "100 tokens and max_tokens 29 exceed the context of 128"),
        (Submit(9, [1], GREEDY, 0, []), 400, "max_tokens is 0"),
        (Submit(9, [1, 320], GREEDY, 5, []), 400, "prompt holds token id 320: the vocabulary is 0 to 319"),
        (Submit(9, [1, -1], GREEDY, 5, []), 400, "token id -1"),
        (Submit(9, [1], GREEDY, 5, list(range(9))), 400, "9 stop ids: at most 8"),
        (Submit(9, [1], GREEDY, 5, [400]), 400, "stop_token_ids holds token id 400"),
        (Submit(9, [1], GREEDY, 5, [], min_tokens=6), 400, "min_tokens is 6: must be from 0 to 5"),
        (Submit(9, [1], GREEDY, 5, [], logit_bias=[(1, 1.0)] * 301), 400, "logit_bias has 301 entries: at most 300"),
        (Submit(9, [1], GREEDY, 5, [], logit_bias=[(1, math.nan)]), 400, "logit_bias holds nan"),
        (Submit(9, [1], GREEDY, 5, [], logit_bias=[(-3, 1.0)]), 400, "logit_bias holds token id -3"),
        (Submit(9, [1], GREEDY, 5, [], logprobs=21), 400, "logprobs is 21: must be from -1 to 20"),
        (Submit(9, [1], Sampling(temperature=math.nan), 5, []), 400, "temperature is nan"),
        (Submit(9, [1], Sampling(top_p=1.5), 5, []), 400, "top_p is 1.5: must be from 0 to 1"),
        (Submit(9, [1], Sampling(seed=-1), 5, []), 400, "seed is -1"),
        (Submit(9, [1], Sampling(repetition_penalty=0), 5, []), 400, "repetition_penalty is 0"),
    ],
)
def test_bad_requests_are_refused(
    make_engine: Callable[..., Engine], request_: Submit, status: int, words: str
) -> None:
    engine, script = make_engine(), Script()
    script.inbox.append(request_)
    settle(engine, script)
    assert script.refused[9].status == status and words in script.refused[9].message
    nothing_left(engine)


def test_a_full_queue_is_refused(make_engine: Callable[..., Engine]) -> None:
    engine, script = make_engine(max_batch=2, max_waiting=3), Script()
    for i in range(10):
        script.inbox.append(Submit(i, [1, 2], GREEDY, 20, []))
        engine.step(script)
    settle(engine, script)
    assert {r.status for r in script.refused.values()} == {429}
    assert len(script.finish) == 5 and len(script.refused) == 5


def test_drain_finishes_what_is_there_and_refuses_the_rest(make_engine: Callable[..., Engine]) -> None:
    engine, script = make_engine(), Script()
    script.inbox += [Submit(1, [1, 2], GREEDY, 20, []), Drain(60.0), Submit(2, [1, 2], GREEDY, 20, [])]
    engine.run(script)
    assert script.finish == {1: "length"} and script.refused[2].status == 503
    nothing_left(engine)


@pytest.mark.parametrize("how", ["deadline", "terminate"])
def test_drain_is_bounded(make_engine: Callable[..., Engine], how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphrt.engine.TERMINATE_GRACE_S", 0.0)
    engine, script = make_engine(run_ahead=1), Script()
    script.inbox += [Submit(i, [1, 2], GREEDY, 100, []) for i in range(20)]
    if how == "deadline":
        script.inbox.append(Drain(0.0))
    else:
        script.terminate_requested = True
    engine.run(script)
    assert len(script.finish) == 20 and set(script.finish.values()) <= {"cancelled", "length"}
    nothing_left(engine)


def test_sizes_of_the_kv_memory(make_engine: Callable[..., Engine], tiny_model: Callable[..., Path]) -> None:
    from graphrt.config import load_config
    from graphrt.models.llama import kv_spec

    model = tiny_model("llama", head_dim=32, dtype="bf16")
    config, spec = load_config(model), kv_spec(load_config(model), "float32")
    block = spec.block_bytes(16)
    base = EngineConfig(str(model), max_batch=4)
    assert kv_sizes(base, config, spec, 1 << 40) == (512, 4 * 32)
    assert kv_sizes(base, config, spec, 100 * block) == (512, 50)
    assert kv_sizes(base, config, spec, 20 * block) == (160, 10), "the context shrinks when nobody asked for one"
    asked = EngineConfig(str(model), max_batch=4, context=512)
    with pytest.raises(
        ModelError,
        match=r"context of 512 tokens: its KV cache needs \d+\.\d\d MiB, \d+\.\d\d MiB are available; --ctx 160 would fit",
    ):
        kv_sizes(asked, config, spec, 20 * block)
    with pytest.raises(ConfigError, match=r"--ctx 513: the model's context is 512 tokens"):
        kv_sizes(EngineConfig(str(model), context=513), config, spec, 1 << 40)
    with pytest.raises(DeviceError, match=r"^device cuda: .*; use --device cpu or auto$"):
        build_engine(EngineConfig(str(model), device="cuda"))
    with pytest.raises(ConfigError, match="max_batch is 0: must be from 1 to 256"):
        build_engine(EngineConfig(str(model), max_batch=0))


def test_the_log_of_steps(make_engine: Callable[..., Engine]) -> None:
    engine, script = make_engine(max_batch=4, prefill_chunk=32), Script()
    script.inbox += [Submit(1, [1] * 40, GREEDY, 5, []), Submit(2, [1] * 3, GREEDY, 5, [])]
    settle(engine, script)
    script.inbox.append(AskSteps(100))
    engine.step(script)
    log = script.steps
    assert [(s.kind, s.batch, s.rows) for s in log[:2]] == [("prefill", 32, 32), ("prefill", 16, 11)]
    assert [(s.kind, s.batch, s.rows) for s in log[2:]] == [("decode", 2, 2)] * 4
    assert [s.step for s in log] == list(range(log[0].step, log[0].step + 6))
    assert all(s.ms > 0 and s.host_us > 0 for s in log)
    script.inbox.append(AskSteps(2))
    engine.step(script)
    assert script.steps == log[-2:]
