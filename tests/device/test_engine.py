"""The whole engine on a device: tokens beside the CPU engine's, repeats, run-ahead, and what was captured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_script import GREEDY, Script, nothing_left, run_alone, settle

from graphrt.backend import cuda_backend
from graphrt.capture.cuda_graph import CudaGraphSet
from graphrt.engine import Engine
from graphrt.engine_config import EngineConfig
from graphrt.engine_setup import build_engine
from graphrt.kernels.cuda.driver import Driver
from graphrt.seam.records import Sampling, Submit

CONTEXT, VOCAB = 448, 320
MARGIN = 0.06  # of a log-probability: what bf16 in place of float32 may change in these models
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"hidden": 256, "head_dim": 64},
    "llama, small heads": {"hidden": 72, "head_dim": 16, "heads": 6},
    "qwen3": {"hidden": 128, "head_dim": 128},
}


@pytest.fixture
def make_engine(tiny_model: Callable[..., Path], driver: Driver) -> Callable[..., Engine]:
    def make(shape: str = "llama", device: str = "cuda", **config: Any) -> Engine:
        model = tiny_model(shape.split(",")[0], dtype="bf16", **SHAPES[shape])
        context = CONTEXT + (device == "cpu")  # the reference takes one token more, to score the last
        settings = EngineConfig(str(model), device, **({"context": context, "prefill_chunk": 200} | config))
        return build_engine(settings, cuda_backend(settings, driver) if device == "cuda" else None)

    return make


def worst_gap(reference: Engine, prompt: list[int], tokens: list[int]) -> float:
    """How much less likely than the reference's best token a token is, at most, after the same beginning."""
    scores = run_alone(reference, Submit(1, prompt + tokens, GREEDY, 1, [], prompt_logprobs=1)).prompt_logprobs[1]
    return max(s.top[0][1] - s.logprob for s in scores[len(prompt) - 1 :])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("block_tokens", [16, 32, 64])
def test_tokens_are_the_cpu_engines_up_to_rounding(
    make_engine: Callable[..., Engine], shape: str, block_tokens: int
) -> None:
    rng = np.random.default_rng(seed := int(np.random.default_rng().integers(1 << 30)))
    print(f"seed {seed}")
    reference = make_engine(shape, "cpu", max_batch=2, block_tokens=block_tokens)
    engine, script = make_engine(shape, max_batch=12, block_tokens=block_tokens), Script()
    lengths = [1, 63, 64, 65, 201, CONTEXT - 1, *rng.integers(1, CONTEXT - 1, 10).tolist()]
    prompts = {i + 1: rng.integers(0, VOCAB, n).tolist() for i, n in enumerate(lengths)}
    for i, p in prompts.items():
        script.inbox.append(Submit(i, p, GREEDY, min(32, CONTEXT - len(p)), []))
        for _ in range(rng.integers(0, 6)):
            engine.step(script)
    settle(engine, script)
    nothing_left(engine)
    assert engine.graphs.eager_launches == engine.graphs.late_allocations == 0
    gaps = {len(p): worst_gap(reference, p, script.tokens[i]) for i, p in prompts.items()}
    assert max(gaps.values()) < MARGIN, gaps


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_the_same_tokens_two_hundred_times(make_engine: Callable[..., Engine], driver: Driver, rows: int) -> None:
    """A race shows as a difference."""
    engine = make_engine(max_batch=rows)
    rng = np.random.default_rng()
    prompts = [rng.integers(0, VOCAB, 40 + 3 * i).tolist() for i in range(rows)]
    samplings = [GREEDY if i % 2 else Sampling(temperature=0.8, top_p=0.95, seed=i) for i in range(rows)]
    repeats = 5 if driver.name == "fake" else 200 if rows < 5 else 40
    first: Any = None
    for n in range(repeats + 1):
        script = Script(
            inbox=[
                Submit(i + 1, p, s, 24, [], logprobs=2) for i, (p, s) in enumerate(zip(prompts, samplings, strict=True))
            ]
        )
        settle(engine, script)
        said = dict(script.tokens), dict(script.logprobs)
        if n == 1:
            first = said  # the first ran without the prefix cache
        elif n > 1:
            assert said == first, f"repeat {n}"
    assert engine.graphs.eager_launches == engine.graphs.late_allocations == 0


def test_early_starts_and_late_stores_change_no_bit(
    tiny_model: Callable[..., Path], cuda_driver: Driver, tmp_path: Path
) -> None:
    """Every kernel is built to start its successor at once and to store late: a wait that is missing would show."""
    from graphrt.kernels.cuda.cuda_driver import CudaDriver

    rng = np.random.default_rng()
    prompts = [rng.integers(0, VOCAB, n).tolist() for n in (3, 70, 150)]
    for shape in SHAPES:
        settings = EngineConfig(
            str(tiny_model(shape.split(",")[0], dtype="bf16", **SHAPES[shape])), "cuda", 3, context=CONTEXT
        )
        said = []
        for driver in (cuda_driver, CudaDriver(cache_dir=tmp_path / "stressed", stress=True)):
            engine = build_engine(settings, cuda_backend(settings, driver))
            script = Script(inbox=[Submit(i + 1, p, GREEDY, 40, [], logprobs=3) for i, p in enumerate(prompts)])
            settle(engine, script)
            said.append((dict(script.tokens), dict(script.logprobs)))
        assert said[0] == said[1], shape


def test_edges_are_programmatic_between_our_kernels(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(max_batch=20)
    assert isinstance(engine.graphs, CudaGraphSet)
    for (kind, rows), graph in engine.graphs.captured.items():
        print(kind, rows, graph.nodes, graph.programmatic_edges, graph.plain_edges)
        assert graph.plain_edges + graph.programmatic_edges == graph.nodes - 1, "a line"
        if kind == "decode":
            assert graph.plain_edges == 0, "our own kernels only"


def test_scores_of_a_prompt(make_engine: Callable[..., Engine]) -> None:
    prompt = np.random.default_rng().integers(0, VOCAB, 150).tolist()
    ask = Submit(1, prompt, GREEDY, 1, [], prompt_logprobs=3)
    got, want = (run_alone(make_engine(device=d), ask).prompt_logprobs[1] for d in ("cuda", "cpu"))
    assert [g.token for g in got] == prompt[1:] and len(got) == len(want)
    assert max(abs(g.logprob - w.logprob) for g, w in zip(got, want, strict=True)) < MARGIN
