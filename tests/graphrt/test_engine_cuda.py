"""The engine over captured graphs on the fake device: the CPU engine's tokens up to rounding, run-ahead, poison, failures.

Replays run as late as they may: only when the engine waits for their tokens. Device memory cannot be read by the host, and before every
replay all temporaries and all unreferenced blocks are filled with NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_script import GREEDY, Script, nothing_left, run_alone, settle

from graphrt import engine as engine_module
from graphrt.backend import GPU_RESERVE, cuda_backend
from graphrt.capture.cuda_graph import CudaGraphSet
from graphrt.config import load_config
from graphrt.engine import Engine
from graphrt.engine_config import EngineConfig
from graphrt.engine_setup import build_engine
from graphrt.errors import DeviceError, ModelError
from graphrt.kernels.array import Array
from graphrt.kernels.cuda.fake_driver import FakeDriver
from graphrt.kernels.cuda.ops import CudaOps
from graphrt.models import llama
from graphrt.seam.records import Cancel, Sampling, Submit
from graphrt.weights import open_checkpoint

CONTEXT = 160
VOCAB = 320
MARGIN = 0.06  # of a log-probability: what bf16 in place of float32 may change in these models

SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 32},
    "llama, odd sizes": {"head_dim": 16, "hidden": 72, "heads": 6},
    "qwen3": {"head_dim": 32},
}


class PoisonedDriver(FakeDriver):
    """Before a replay, what it must not read is NaN."""

    engine: Engine | None = None

    def poll(self) -> None:
        if self.queued and self.engine is not None:
            graphs, pool = self.engine.graphs, self.engine.scheduler.pool
            assert isinstance(graphs.ops, CudaOps)
            block = graphs.ops.arena.block
            assert block is not None
            self.memory.view(block, "the arena").view(np.uint8)[:] = 0xFF
            cache = graphs.buffers.caches["kv"]
            self.memory.view(cache, "the cache")[pool._free] = np.nan
        super().poll()


@pytest.fixture(scope="module")
def make_engine(tiny_model: Callable[..., Path]) -> Callable[..., Engine]:
    def make(shape: str = "llama", device: str = "cuda", driver: FakeDriver | None = None, **config: Any) -> Engine:
        model = tiny_model(shape.split(",")[0], dtype="bf16", **SHAPES[shape])
        context = CONTEXT + (device == "cpu")  # the reference takes one token more, to score the last
        settings = EngineConfig(str(model), device, **({"context": context, "prefill_chunk": 100} | config))
        if device == "cpu":
            return build_engine(settings)
        driver = driver or PoisonedDriver()
        engine = build_engine(settings, cuda_backend(settings, driver))
        if isinstance(driver, PoisonedDriver):
            driver.engine = engine
        return engine

    return make


def check_tokens(reference: Engine, prompt: list[int], tokens: list[int]) -> float:
    """Each greedy token is the reference's likeliest after the same beginning, up to the margin. Returns the largest gap."""
    scores = run_alone(reference, Submit(1, prompt + tokens, GREEDY, 1, [], prompt_logprobs=1)).prompt_logprobs[1]
    gaps = [s.top[0][1] - s.logprob for s in scores[len(prompt) - 1 :]]
    assert len(gaps) == len(tokens)
    assert max(gaps) < MARGIN, (
        f"token {int(np.argmax(gaps))} of {len(gaps)} is {max(gaps):.3f} less likely than the best"
    )
    return max(gaps)


def nothing_beside_graphs(engine: Engine) -> None:
    assert engine.graphs.eager_launches == 0 and engine.graphs.late_allocations == 0
    assert engine.stats().eager_steps == 0
    assert isinstance(engine.graphs.ops, CudaOps) and engine.graphs.ops.arena.grown == 0


@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_are_the_cpu_engines_up_to_rounding(make_engine: Callable[..., Engine], shape: str) -> None:
    """Prompts of one token, of a bucket, of more than one chunk, up to the whole context; alone and together."""
    rng = np.random.default_rng(seed := int(np.random.default_rng().integers(1 << 30)))
    print(f"seed {seed}")
    reference = make_engine(shape, "cpu", max_batch=2)
    engine, script = make_engine(shape, max_batch=7), Script()
    lengths = [1, 16, 63, 64, 65, 101, CONTEXT - 1, *rng.integers(1, CONTEXT - 1, 5).tolist()]
    prompts = {i + 1: rng.integers(0, VOCAB, n).tolist() for i, n in enumerate(lengths)}
    for i, p in prompts.items():
        script.inbox.append(Submit(i, p, GREEDY, min(24, CONTEXT - len(p)), []))
        for _ in range(rng.integers(0, 6)):
            engine.step(script)
    settle(engine, script)
    nothing_left(engine)
    nothing_beside_graphs(engine)
    for i, p in prompts.items():
        assert len(script.tokens[i]) == min(24, CONTEXT - len(p))
        check_tokens(reference, p, script.tokens[i])


def test_longest_then_short_then_longest(make_engine: Callable[..., Engine]) -> None:
    """Nothing of a long sequence is left for the short one that takes its slot and blocks, nor the reverse."""
    engine, reference = make_engine(max_batch=1), make_engine(device="cpu", max_batch=1)
    rng = np.random.default_rng()
    for length, new in ((CONTEXT - 1, 1), (1, 3), (2, CONTEXT - 2), (1, CONTEXT - 1), (CONTEXT - 20, 20)):
        prompt = rng.integers(0, VOCAB, length).tolist()
        tokens = run_alone(engine, Submit(1, prompt, GREEDY, new, [])).tokens[1]
        assert len(tokens) == new
        check_tokens(reference, prompt, tokens)
    nothing_beside_graphs(engine)


@pytest.mark.parametrize("run_ahead", [0, 1, 2])
def test_a_batch_that_changes_at_every_step(make_engine: Callable[..., Engine], run_ahead: int) -> None:
    """Requests join, end, are cancelled and preempted while replays are queued; every token is still the reference's."""
    rng = np.random.default_rng(seed := int(np.random.default_rng().integers(1 << 30)))
    print(f"seed {seed}")
    probe = make_engine()
    block = probe.graphs.buffers.caches["kv"].nbytes // probe.info.num_blocks
    engine, script = make_engine(max_batch=6, run_ahead=run_ahead, kv_bytes=12 * block, prefill_chunk=48), Script()
    reference = make_engine(device="cpu", max_batch=1)
    shared = rng.integers(0, VOCAB, CONTEXT).tolist()
    prompts, cancelled = {}, set()
    for i in range(1, 41):
        n = int(rng.integers(1, CONTEXT - 60))
        prompts[i] = shared[:n] if rng.random() < 0.5 else rng.integers(0, VOCAB, n).tolist()
        script.inbox.append(Submit(i, prompts[i], GREEDY, int(rng.integers(1, 50)), []))
        if rng.random() < 0.2:
            cancelled.add(victim := int(rng.integers(1, i + 1)))
            script.inbox.append(Cancel(victim))
        for _ in range(rng.integers(0, 8)):
            engine.step(script)
    settle(engine, script)
    nothing_left(engine)
    nothing_beside_graphs(engine)
    assert set(script.finish) == set(prompts)
    for i, p in prompts.items():
        assert script.finish[i] == "length" or i in cancelled
        if script.tokens[i]:
            check_tokens(reference, p, script.tokens[i])
    assert engine.scheduler.prefix_hits and engine.scheduler.preemptions


def test_one_size_repeats_exactly(make_engine: Callable[..., Engine]) -> None:
    """Sampled and greedy, the same request gives the same tokens and log-probabilities every time."""
    engine, rng = make_engine(max_batch=1), np.random.default_rng()
    prompt = rng.integers(0, VOCAB, 40).tolist()
    for sampling in (GREEDY, Sampling(temperature=0.9, top_p=0.95, seed=int(rng.integers(1 << 62)))):
        said = [run_alone(engine, Submit(i, prompt, sampling, 30, [], logprobs=3)) for i in range(1, 6)]
        assert all(s.tokens[i] == said[1].tokens[2] for i, s in enumerate(said[1:], 2)), "from the prefix cache"
        assert all(s.logprobs[i] == said[1].logprobs[2] for i, s in enumerate(said[1:], 2))


def test_launches_run_ahead_of_what_was_read(make_engine: Callable[..., Engine]) -> None:
    driver = PoisonedDriver()
    engine, script = make_engine(driver=driver, max_batch=2), Script(inbox=[Submit(1, [5, 6], GREEDY, 30, [])])
    assert engine.info.run_ahead == 1 and "fake" in engine.info.device
    queued = []
    for _ in range(20):
        engine.step(script)
        queued.append(driver.queued)
    assert queued[2:] == [1] * 18, "one replay waits while the host works"
    settle(engine, script)
    assert driver.queued == 0


def test_every_size_has_a_graph_whose_edges_are_declared(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(max_batch=20, prefill_chunk=300)
    graphs = engine.graphs
    assert isinstance(graphs, CudaGraphSet)
    sizes = graphs.buffers.sizes
    assert sizes.decode == (1, 2, 4, 8, 16, 20) and sizes.prefill == (16, 64, 256, 300)
    assert set(graphs.captured) == {(kind, n) for kind, ns in sizes.by_kind().items() for n in ns}
    for (kind, _rows), graph in graphs.captured.items():
        assert graph.nodes > 10 and graph.plain_edges + graph.programmatic_edges == graph.nodes - 1
        if kind == "decode":
            assert graph.plain_edges == 0, "our own kernels only"


class BrokenDriver(FakeDriver):
    """Fails, or goes silent, once it is told to."""

    state = "works"

    def poll(self) -> None:
        if self.state == "failed":
            raise DeviceError("cuStreamQuery: CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered")
        if self.state == "works":
            super().poll()


@pytest.mark.parametrize(
    ("state", "message"), [("failed", "CUDA_ERROR_ILLEGAL_ADDRESS"), ("hangs", r"step \d+ did not finish within 0.3 s")]
)
def test_a_device_that_fails_ends_the_engine(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, state: str, message: str
) -> None:
    monkeypatch.setattr(engine_module, "STEP_TIMEOUT_S", 0.3)
    driver = BrokenDriver()
    engine, script = make_engine(driver=driver, max_batch=2), Script(inbox=[Submit(1, [5, 6], GREEDY, 90, [])])
    for _ in range(6):
        engine.step(script)
    driver.state = state
    with pytest.raises(DeviceError, match=message):
        engine.run(script)
    assert 1 not in script.finish


def test_too_little_device_memory_says_what_would_fit(
    make_engine: Callable[..., Engine], tiny_model: Callable[..., Path]
) -> None:
    path = tiny_model("llama", dtype="bf16", **SHAPES["llama"])
    weights = llama.weight_bytes(CudaOps(FakeDriver()), load_config(path), open_checkpoint(path))
    probe = make_engine()
    block = probe.graphs.buffers.caches["kv"].nbytes // probe.info.num_blocks
    with pytest.raises(ModelError, match=r"context of 160 tokens: its KV cache needs .* --ctx 80 would fit"):
        make_engine(driver=FakeDriver(memory=GPU_RESERVE + weights + 6 * block))
    with pytest.raises(ModelError, match=r"weights \d+\.\d+ MiB, KV \d+\.\d+ MiB"):
        make_engine(driver=FakeDriver(memory=GPU_RESERVE + weights - 1), kv_bytes=10 * block)


def test_a_shape_that_no_kernel_takes_is_named(make_engine: Callable[..., Engine]) -> None:
    with pytest.raises(ModelError, match=r"does not run on the GPU: .*blocks of 4 tokens"):
        make_engine(block_tokens=4)


def test_device_memory_is_out_of_reach(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    buffers = engine.graphs.buffers
    shared = {"delta", "token_ring", "logprob_ring", "stamps"}
    for name, value in vars(buffers).items():
        if isinstance(value, Array):
            assert (value.host is not None) == (name in shared), name
    assert all(c.host is None for c in buffers.caches.values())
