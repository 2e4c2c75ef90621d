"""Run-ahead on a device that is as late as it may be: a launched step runs only when its tokens are read, or at some moment before.

On the CPU a launch is the step itself, so that nothing which is freed or published too early would show. Here it does, and every block that
nobody references holds NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_script import GREEDY, Script, nothing_left, run_alone, settle
from late_device import LateDevice, check_books

from graphrt.capture.delta import SLOT_STRUCT
from graphrt.engine import Engine
from graphrt.engine_config import EngineConfig
from graphrt.engine_setup import build_engine
from graphrt.kernels.abi import Field
from graphrt.seam.records import Cancel, Sampling, Submit

CONTEXT = 96
VOCAB = 320


@pytest.fixture(scope="module")
def make_engine(tiny_model: Callable[..., Path]) -> Callable[..., Engine]:
    def make(**config: Any) -> Engine:
        model = tiny_model("llama", head_dim=16, layers=2, dtype="bf16")
        return build_engine(EngineConfig(str(model), **({"context": CONTEXT, "prefill_chunk": 16} | config)))

    return make


def requests(n: int, rng: np.random.Generator) -> list[Submit]:
    """Half of them share a beginning; every option is used by some."""
    shared, made = rng.integers(0, VOCAB, CONTEXT).tolist(), []
    for i in range(n):
        length = int(rng.integers(1, CONTEXT - 4))
        sampling = Sampling(
            temperature=float(rng.choice([0, 0.8, 1.2])),
            top_k=int(rng.choice([0, 40])),
            top_p=float(rng.choice([0.7, 1])),
            seed=int(rng.integers(1 << 60)),
            repetition_penalty=float(rng.choice([1, 1, 1.3])),
            frequency_penalty=float(rng.choice([0, 0, 0.7])),
        )
        made.append(
            Submit(
                i + 1,
                shared[:length] if rng.random() < 0.5 else rng.integers(0, VOCAB, length).tolist(),
                sampling,
                CONTEXT - length if rng.random() < 0.3 else int(rng.integers(1, CONTEXT - length + 1)),
                rng.integers(0, VOCAB, rng.integers(0, 9)).tolist(),
                min_tokens=int(rng.integers(0, 2)),
                logit_bias=[(int(t), float(rng.uniform(-3, 3))) for t in rng.integers(0, VOCAB, rng.integers(0, 9))],
                logprobs=int(rng.integers(-1, 3)),
                prompt_logprobs=int(rng.integers(0, 3)) if rng.random() < 0.2 else -1,
            )
        )
    return made


def said(script: Script, request_id: int) -> tuple[Any, ...]:
    return (
        script.tokens[request_id],
        script.logprobs[request_id],
        script.prompt_logprobs.get(request_id),
        script.finish[request_id],
    )


@pytest.mark.parametrize("promptness", [0.0, 0.3])
@pytest.mark.parametrize("run_ahead", [0, 1, 2])
def test_nobody_touches_what_a_late_step_may_still_write(
    make_engine: Callable[..., Engine], run_ahead: int, promptness: float
) -> None:
    rng = np.random.default_rng(seed := int(np.random.default_rng().integers(1 << 30)))
    todo = requests(40, rng)
    one = make_engine(max_batch=1)
    alone = {r.id: said(run_alone(one, r), r.id) for r in todo}

    block_tokens, preemptions, hits = int(rng.choice([1, 2, 8])), 0, 0
    block_bytes = one.graphs.buffers.caches["kv"].nbytes // one.info.num_blocks * block_tokens // 16
    for chunk in (5, 33):
        blocks = CONTEXT // block_tokens + int(rng.integers(0, CONTEXT // block_tokens))
        engine = make_engine(
            max_batch=6,
            run_ahead=run_ahead,
            kv_bytes=blocks * block_bytes,
            block_tokens=block_tokens,
            prefill_chunk=chunk,
        )
        assert engine.info.num_blocks == blocks
        cache = engine.graphs.buffers.caches["kv"].np
        LateDevice(engine, rng, promptness)
        script, cancelled = Script(), set()

        def turn(engine: Engine = engine, script: Script = script, cache: Any = cache) -> bool:
            busy = engine.step(script)
            check_books(engine)
            cache[engine.scheduler.pool._free] = np.nan
            return busy

        for r in todo:
            script.inbox.append(r)
            if rng.random() < 0.2:
                cancelled.add(victim := int(rng.integers(1, r.id + 1)))
                script.inbox.append(Cancel(victim))
            for _ in range(rng.integers(0, 8)):
                turn()
        while turn() or script.inbox:
            pass
        nothing_left(engine)
        preemptions, hits = preemptions + engine.scheduler.preemptions, hits + engine.scheduler.prefix_hits
        for r in todo:
            got, want = said(script, r.id), alone[r.id]
            if got[3] == "cancelled":
                assert r.id in cancelled and got[0] == want[0][: len(got[0])], f"request {r.id}, seed {seed}"
            else:
                assert got == want, f"request {r.id}, seed {seed}"
    assert preemptions and hits


def test_the_whole_prompt_in_cache_still_gives_its_last_token(make_engine: Callable[..., Engine]) -> None:
    engine, prompt = make_engine(), list(range(32))  # two whole blocks
    first, again = (run_alone(engine, Submit(i, prompt, GREEDY, 9, [], logprobs=3)) for i in (1, 2))
    assert again.cached[2] == 16 and said(first, 1) == said(again, 2)


def test_a_slots_next_user_is_told_from_the_last_one(make_engine: Callable[..., Engine]) -> None:
    engine, script = make_engine(max_batch=1), Script()
    script.inbox = [Submit(1, [1, 2, 3], GREEDY, 20, [])]
    for _ in range(3):
        engine.step(script)
    # As if the tokens to come were another's.
    serial = SLOT_STRUCT.unpack(bytes(engine.graphs.buffers.slots.np[0]))[4]
    engine.delta.patch(Field.SLOTS, 4, [serial + 1])
    with pytest.raises(RuntimeError, match=r"request 1: expected a token of slot 0, got TokenRow\(slot=0"):
        settle(engine, script)
