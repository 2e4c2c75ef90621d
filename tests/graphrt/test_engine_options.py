"""Penalties, bias, minimum length and log-probabilities: against plain computations, and the same in any company."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_script import GREEDY, Script, nothing_left, run_alone, settle
from numpy.typing import NDArray

from graphrt.engine import Engine
from graphrt.engine_config import EngineConfig
from graphrt.engine_setup import build_engine
from graphrt.seam.records import Logprob, Sampling, Submit

VOCAB = 320


@pytest.fixture(scope="module")
def make_engine(tiny_model: Callable[..., Path]) -> Callable[..., Engine]:
    def make(**config: Any) -> Engine:
        model = tiny_model("llama", head_dim=32, dtype="bf16")
        return build_engine(EngineConfig(str(model), **({"context": 128, "prefill_chunk": 32} | config)))

    return make


@pytest.fixture(scope="module")
def reference(tiny_model: Callable[..., Path]) -> Callable[[list[int]], NDArray[np.float64]]:
    """Log-probabilities [tokens, V] of `transformers`."""
    import torch
    from transformers import AutoModelForCausalLM

    path = tiny_model("llama", head_dim=32, dtype="bf16")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    def run(tokens: list[int]) -> NDArray[np.float64]:
        with torch.no_grad():
            logits: NDArray[np.float64] = model(torch.tensor([tokens])).logits[0].double().numpy()
        return logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)

    return run


def prompt(n: int) -> list[int]:
    return np.random.default_rng().integers(0, VOCAB, n).tolist()


def check_logprobs(got: list[Logprob], want: NDArray[np.float64], tokens: list[int], count: int) -> None:
    assert [g.token for g in got] == tokens
    for g, row in zip(got, want, strict=True):
        assert g.logprob == pytest.approx(row[g.token], abs=2e-5)
        assert len(g.top) == count
        if count:
            np.testing.assert_allclose([v for _, v in g.top], np.sort(row)[::-1][:count], atol=2e-5)
            np.testing.assert_allclose([row[t] for t, _ in g.top], [v for _, v in g.top], atol=2e-5)
        # Near ties aside, the rank is the reference's.
        assert (row > row[g.token] + 1e-4).sum() < g.rank <= (row > row[g.token] - 1e-4).sum() + 1


@pytest.mark.parametrize("count", [0, 5, 20])
def test_logprobs_are_the_models_own(
    make_engine: Callable[..., Engine], reference: Callable[[list[int]], NDArray[np.float64]], count: int
) -> None:
    tokens = prompt(75)
    hot = Sampling(temperature=1.3, top_k=50, seed=5, presence_penalty=0.5)  # which must not show in the numbers
    script = run_alone(make_engine(), Submit(1, tokens, hot, 20, [], logprobs=count, prompt_logprobs=count))
    want = reference(tokens + script.tokens[1][:-1])
    check_logprobs(script.prompt_logprobs[1], want[:74], tokens[1:], count)
    check_logprobs(script.logprobs[1], want[74:], script.tokens[1], count)


def test_nothing_is_reported_unasked(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    script = run_alone(engine, Submit(1, [3], GREEDY, 5, [], prompt_logprobs=2))
    assert script.logprobs[1] == [] and 1 not in script.prompt_logprobs, "a prompt of one token has nothing to score"
    script = run_alone(engine, Submit(2, [3, 4], GREEDY, 5, [], logprobs=0))
    assert len(script.logprobs[2]) == 5 and 2 not in script.prompt_logprobs


def mixed(n: int, seed: int) -> list[Submit]:
    rng = np.random.default_rng(seed)
    made = []
    for i in range(n):
        sampling = Sampling(
            temperature=float(rng.choice([0, 0.8, 1.2])),
            top_p=float(rng.uniform(0.7, 1)),
            seed=int(rng.integers(1 << 60)),
            repetition_penalty=float(rng.choice([1.0, 1.3])),
            presence_penalty=float(rng.choice([0.0, 0.9])),
            frequency_penalty=float(rng.choice([0.0, 0.7])),
        )
        made.append(
            Submit(
                i + 1,
                rng.integers(0, VOCAB, rng.integers(1, 60)).tolist(),
                sampling,
                int(rng.integers(10, 60)),
                rng.integers(0, VOCAB, 4).tolist(),
                min_tokens=int(rng.integers(0, 10)),
                logit_bias=[(int(t), float(rng.uniform(-3, 3))) for t in rng.integers(0, VOCAB, rng.integers(0, 9))],
                logprobs=int(rng.integers(-1, 4)),
                prompt_logprobs=int(rng.integers(-1, 3)) if i % 3 == 0 else -1,
            )
        )
    return made


@pytest.fixture(scope="module")
def alone(make_engine: Callable[..., Engine]) -> tuple[int, dict[int, Any]]:
    """A seed, and what the engine says to each of `mixed(50, seed)` by itself."""
    seed = int(np.random.default_rng().integers(1 << 30))
    answers, engine = {}, make_engine(max_batch=1)
    for r in mixed(50, seed):
        script = run_alone(engine, r)
        answers[r.id] = (script.tokens[r.id], script.logprobs[r.id], script.prompt_logprobs.get(r.id))
    return seed, answers


@pytest.mark.parametrize("run_ahead", [0, 1, 2])
def test_options_do_not_depend_on_the_batch_nor_on_preemption(
    make_engine: Callable[..., Engine], alone: tuple[int, dict[int, Any]], run_ahead: int
) -> None:
    seed, answers = alone
    probe = make_engine()
    block = probe.graphs.buffers.caches["kv"].nbytes // probe.info.num_blocks
    crowded, script = make_engine(max_batch=6, run_ahead=run_ahead, kv_bytes=10 * block), Script()
    rng = np.random.default_rng()
    for r in mixed(50, seed):
        script.inbox.append(r)
        for _ in range(rng.integers(0, 6)):
            crowded.step(script)
    settle(crowded, script)
    assert crowded.scheduler.preemptions > 0
    for i, want in answers.items():
        assert (script.tokens[i], script.logprobs[i], script.prompt_logprobs.get(i)) == want
    nothing_left(crowded)


def greedy_by_hand(
    reference: Callable[[list[int]], NDArray[np.float64]], tokens: list[int], n: int, s: Sampling
) -> tuple[list[int], float]:
    """The tokens that the penalties' formulas give, and the smallest margin by which one was chosen."""
    out: list[int] = []
    margin = math.inf
    for _ in range(n):
        z = reference(tokens + out)[-1].copy()  # logits up to a constant
        counts = np.bincount(out, minlength=VOCAB)
        z -= s.frequency_penalty * counts + s.presence_penalty * (counts > 0)
        best = np.sort(z)[::-1]
        margin = min(margin, best[0] - best[1])
        out.append(int(np.argmax(z)))
    return out, margin


@pytest.mark.parametrize("penalties", [(1.5, 0.0), (0.0, 0.8), (-1.0, 0.3)])
def test_presence_and_frequency_penalties(
    make_engine: Callable[..., Engine],
    reference: Callable[[list[int]], NDArray[np.float64]],
    penalties: tuple[float, float],
) -> None:
    s = Sampling(temperature=0, presence_penalty=penalties[0], frequency_penalty=penalties[1])
    for _ in range(20):  # until a prompt comes without near ties
        tokens = prompt(12)
        want, margin = greedy_by_hand(reference, tokens, 15, s)
        if margin > 1e-3:
            break
    else:
        pytest.fail("no prompt without near ties")
    assert run_alone(make_engine(), Submit(1, tokens, s, 15, [])).tokens[1] == want


def test_a_strong_repetition_penalty_never_repeats(make_engine: Callable[..., Engine]) -> None:
    tokens = prompt(40)
    s = Sampling(temperature=0, repetition_penalty=1000.0)
    engine = make_engine()
    out = run_alone(engine, Submit(1, tokens, s, 60, [])).tokens[1]
    assert len(set(out)) == 60 and not set(out) & set(tokens)
    # The slot's next user starts clean.
    assert (
        run_alone(engine, Submit(2, tokens, GREEDY, 20, [])).tokens[2]
        == (run_alone(make_engine(), Submit(3, tokens, GREEDY, 20, [])).tokens[3])
    )


def test_bias_forces_and_bans(make_engine: Callable[..., Engine]) -> None:
    engine, tokens = make_engine(), prompt(10)
    assert run_alone(engine, Submit(1, tokens, GREEDY, 5, [], logit_bias=[(7, 100.0)])).tokens[1] == [7] * 5
    usual = run_alone(engine, Submit(2, tokens, GREEDY, 5, [])).tokens[2]
    banned = run_alone(engine, Submit(3, tokens, GREEDY, 5, [], logit_bias=[(usual[0], -math.inf)])).tokens[3]
    assert usual[0] not in banned
    most = [(t, -math.inf) for t in range(VOCAB) if t not in (11, 12)][:300]
    hot = Sampling(temperature=5.0, seed=3)
    out = run_alone(engine, Submit(4, tokens, hot, 60, [], logit_bias=most)).tokens[4]
    assert not set(out) & {t for t, _ in most}


def test_no_stop_before_the_minimum(make_engine: Callable[..., Engine]) -> None:
    engine, tokens = make_engine(), prompt(10)
    stop = run_alone(engine, Submit(1, tokens, GREEDY, 1, [])).tokens[1]
    short = run_alone(engine, Submit(2, tokens, GREEDY, 30, stop))
    assert short.tokens[2] == stop and short.finish[2] == "stop"
    forced = run_alone(engine, Submit(3, tokens, GREEDY, 30, stop, min_tokens=12, logit_bias=[(stop[0], 100.0)]))
    assert len(forced.tokens[3]) == 13 and forced.finish[3] == "stop" and stop[0] not in forced.tokens[3][:12]
