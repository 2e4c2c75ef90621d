"""The engine at its own limits: fullest records, longest answers, bounded queue, extreme numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from engine_script import GREEDY, Script, nothing_left, run_alone, settle

from graphrt.engine import Engine
from graphrt.engine_config import EngineConfig
from graphrt.engine_setup import build_engine
from graphrt.errors import ModelError
from graphrt.kernels.sampling import gumbel_noise
from graphrt.seam.records import FromEngine, Output, Sampling, Submit

VOCAB = 320


@pytest.fixture(scope="module")
def make_engine(tiny_model: Callable[..., Path]) -> Callable[..., Engine]:
    def make(**config: Any) -> Engine:
        model = tiny_model("llama", head_dim=16, layers=2, dtype="bf16")
        return build_engine(EngineConfig(str(model), **({"context": 128, "prefill_chunk": 32} | config)))

    return make


def test_a_record_holds_256_joins_with_everything(make_engine: Callable[..., Engine]) -> None:
    engine, script = make_engine(max_batch=256, prefill_chunk=16, block_tokens=1, context=64), Script()
    everything = Sampling(temperature=0.0, repetition_penalty=1.2)
    bias = [(t, 0.5) for t in range(300)]
    rng = np.random.default_rng()
    script.inbox += [
        Submit(i, rng.integers(0, VOCAB, 63).tolist(), everything, 1, list(range(8)), logit_bias=bias)
        for i in range(256)
    ]
    for record in script.inbox:
        engine._take(record, script)
    script.inbox.clear()
    assert engine.scheduler.plan() is not None and engine.scheduler.slots_used == 256
    used, room = engine.delta._at, engine.graphs.buffers.delta.shape[1]
    assert used > 0.85 * room, "the bound is not far from what can happen"
    engine.delta.publish()
    assert engine.graphs.buffers.delta.np[1, 1] == used - 2


@pytest.mark.parametrize("chunk", [5, 16, 256])
def test_scores_of_a_prompt_come_in_small_records(make_engine: Callable[..., Engine], chunk: int) -> None:
    engine = make_engine(prefill_chunk=chunk)
    sizes: list[int] = []

    class Measured(Script):
        def send(self, rec: FromEngine) -> None:
            super().send(rec)
            if isinstance(rec, Output):
                sizes.append(len(msgspec.msgpack.encode(rec)))

    script = Measured(inbox=[Submit(1, list(range(120)), GREEDY, 2, [], prompt_logprobs=20)])
    settle(engine, script)
    assert [p.token for p in script.prompt_logprobs[1]] == list(range(1, 120))
    assert max(sizes) < 40 * 400, "a long prompt's scores together would not fit through the seam"
    assert engine.stats().generation_tokens == 2


def test_the_queue_is_bounded_when_blocks_are_what_is_short(make_engine: Callable[..., Engine]) -> None:
    probe = make_engine()
    block = probe.graphs.buffers.caches["kv"].nbytes // probe.info.num_blocks
    engine, script = make_engine(max_batch=4, max_waiting=3, kv_bytes=8 * block), Script()
    for i in range(30):  # one fills the pool; three slots stay free
        script.inbox.append(Submit(i, [i] * 100, GREEDY, 28, []))
    engine.step(script)
    assert engine.scheduler.slots_used == 1
    assert len(engine.scheduler.waiting) <= 3 + 4
    assert {r.status for r in script.refused.values()} == {429}
    settle(engine, script)
    assert len(script.finish) + len(script.refused) == 30
    nothing_left(engine)


def test_noise_is_that_of_the_new_tokens_own_position(make_engine: Callable[..., Engine]) -> None:
    ids = np.arange(40, 60)
    # So hot that the model's opinion does not matter, and so biased that only these tokens do.
    hot = Sampling(temperature=1e4, seed=77)
    request = Submit(1, [1, 2, 3, 4, 5], hot, 30, [], logit_bias=[(int(t), 1e6) for t in ids])
    script = run_alone(make_engine(), request)
    assert script.tokens[1] == [int(ids[np.argmax(gumbel_noise(77, p, ids))]) for p in range(5, 35)]


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.5}, {"min_p": 0.2, "top_k": 3}])
@pytest.mark.parametrize("temperature", [1e-5, 1e-30, 1e-39, 1e-46])
def test_a_temperature_near_zero_is_greedy(
    make_engine: Callable[..., Engine], temperature: float, filters: dict[str, Any]
) -> None:
    engine, prompt = make_engine(), [5, 6, 7]
    greedy = run_alone(engine, Submit(1, prompt, GREEDY, 9, [])).tokens[1]
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        cold = run_alone(engine, Submit(2, prompt, Sampling(temperature=temperature, seed=1, **filters), 9, []))
    assert cold.tokens[2] == greedy


@pytest.mark.parametrize("value", [1.1e6, -1.1e6, -1e300, math.inf])
def test_a_bias_out_of_range_is_refused(make_engine: Callable[..., Engine], value: float) -> None:
    script = run_alone(make_engine(), Submit(1, [1], GREEDY, 1, [], logit_bias=[(1, value)]))
    assert f"logit_bias holds {value}: must be from -1e6 to 1e6, or -inf" in script.refused[1].message


def test_a_head_size_that_the_kernels_do_not_take_is_refused_at_the_start(tiny_model: Callable[..., Path]) -> None:
    for head_dim in (2, 12, 1024):
        model = tiny_model("llama", head_dim=head_dim, layers=1)
        with pytest.raises(ModelError, match=f"head_dim {head_dim} is not supported: a multiple of 8, at most 512"):
            build_engine(EngineConfig(str(model)))


@pytest.mark.parametrize("head_dim", [8, 512])
def test_the_extreme_head_sizes_run(tiny_model: Callable[..., Path], head_dim: int) -> None:
    model = tiny_model("llama", head_dim=head_dim, heads=8, kv_heads=1, layers=1, vocab=321)
    engine = build_engine(EngineConfig(str(model), context=64))
    assert len(run_alone(engine, Submit(1, [3] * 40, GREEDY, 24, [])).tokens[1]) == 24
