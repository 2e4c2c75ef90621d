"""The decode step as the engine runs it: time, share of the memory's rate, the GPU's idle time, the host's work.

Times are between the moments at which the host sees the tokens of consecutive steps, with as many replays in flight as in service, so
they hold everything that a client would wait for but the server. The ceiling is a plain read of memory in the same process.
"""

from __future__ import annotations

import gc
import importlib.metadata
import platform
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from graphrt.backend import make_backend
from graphrt.capture.cuda_graph import CudaGraphSet
from graphrt.config import load_config
from graphrt.doctor.driver import probe
from graphrt.dummy_weights import DummyCheckpoint
from graphrt.engine import Engine
from graphrt.engine_config import EngineConfig
from graphrt.engine_setup import build_engine
from graphrt.errors import ConfigError
from graphrt.models.registry import model_module
from graphrt.perf.loopback import GREEDY, Loopback
from graphrt.perf.machine import commit
from graphrt.seam.records import Submit
from graphrt.weights import open_checkpoint

WARM_UP = 16  # steps of each round that are not counted
ROUND = 272  # tokens a round: the context of what is measured grows by no more


class StepProfile(msgspec.Struct, kw_only=True):
    """One measured size. Bytes and shares are of one step at the context in the middle of what was measured."""

    shape: str
    batch: int
    ctx: int
    steps: int
    ms_p50: float
    ms_p99: float
    ms_p999: float
    bytes: int
    ceiling_gbps: float
    ceiling_share: float
    idle_us_p50: float | None
    idle_us_p99: float | None
    host_us_p50: float
    host_us_p99: float
    nodes: int | None
    eager_launches: int
    start_s: float  # until ready, with the weights in place
    card: str
    driver: str
    versions: dict[str, str]
    commit: str


def profile(config: EngineConfig, shape: str, batch: int, ctx: int, steps: int) -> StepProfile:
    """Measure at least `steps` decode steps of `batch` greedy sequences of `ctx` tokens. Raises what an engine's start raises."""
    begin = time.perf_counter()
    backend = make_backend(config)
    engine = build_engine(config, backend)
    start_s = time.perf_counter() - begin
    if ctx + ROUND > engine.info.context:
        raise ConfigError(f"--ctx {ctx}: with {ROUND} tokens to measure, at most {engine.info.context - ROUND} fit")
    gc.collect()
    gc.freeze()
    times, idle = measure(engine, batch, ctx, steps)
    p50, p99, p999 = (float(p) / 1e6 for p in np.percentile(times, [50, 99, 99.9]))
    nbytes = step_bytes(engine, config, batch, ctx + ROUND // 2)
    graphs = engine.graphs
    eager = graphs.eager_launches if isinstance(graphs, CudaGraphSet) else 0  # before the probe, which is no step
    ceiling = read_rate(backend, config, nbytes)
    size = engine.scheduler.sizes.padded("decode", batch)
    captured = graphs.captured["decode", size] if isinstance(graphs, CudaGraphSet) else None
    host = engine.clock.host_us()
    return StepProfile(
        shape=shape, batch=batch, ctx=ctx, steps=len(times),
        ms_p50=round(p50, 4), ms_p99=round(p99, 4), ms_p999=round(p999, 4),
        bytes=nbytes, ceiling_gbps=round(ceiling, 1), ceiling_share=round(nbytes / p50 / 1e6 / ceiling, 4),
        idle_us_p50=percentile(idle, 50), idle_us_p99=percentile(idle, 99),
        host_us_p50=round(host[0], 2), host_us_p99=round(host[1], 2),
        nodes=captured.nodes if captured else None,
        eager_launches=eager,
        start_s=round(start_s, 2),
        card=backend.name, driver=driver_version(), versions=versions(), commit=commit(),
    )  # fmt: skip


def measure(engine: Engine, batch: int, ctx: int, steps: int) -> tuple[list[int], list[float]]:
    """(ns between the tokens of consecutive decode steps, µs between a replay's end and the next one's start)."""
    rng = np.random.default_rng(0)
    times: list[int] = []
    idle: list[float] = []
    request = 0
    while len(times) < steps:
        end = Loopback()
        for _ in range(batch):
            request += 1
            prompt = rng.integers(3, engine.info.vocab_size, ctx).tolist()
            end.inbox.append(Submit(request, prompt, GREEDY, ROUND, []))
        while len(engine.scheduler.rows) < batch:  # until all are in the decode batch
            engine.step(end)
        for _ in range(WARM_UP):
            engine.step(end)
        last, before = time.perf_counter_ns(), engine.delta.step
        while end.finished == 0:
            engine.step(end)
            now = time.perf_counter_ns()
            if end.finished == 0 and engine.delta.step == before + 1:
                times.append(now - last)
                if (gap := engine.reader.idle_us(engine.delta.step - engine.info.run_ahead)) is not None:
                    idle.append(gap)
            last, before = now, engine.delta.step
        while end.finished < batch:
            engine.step(end)
    return times, idle


def percentile(values: list[float], share: float) -> float | None:
    """Rounded; None where there is nothing."""
    return round(float(np.percentile(values, share)), 2) if values else None


def step_bytes(engine: Engine, config: EngineConfig, batch: int, ctx: int) -> int:
    """Bytes that a decode step reads at least: every matrix once, and each sequence's keys and values."""
    model_dir = Path(config.model_dir)
    model, ops = load_config(model_dir), engine.graphs.ops
    module = model_module(model.architecture)
    checkpoint = DummyCheckpoint() if config.load_format == "dummy" else open_checkpoint(model_dir)
    weights = module.weight_bytes(ops, model, checkpoint) - ops.table_bytes(
        model.vocab_size, model.hidden_size, model.tie_embeddings
    )
    per_block = module.kv_spec(model, ops.kv_dtype).block_bytes(config.block_tokens)
    return int(weights + batch * ctx * per_block / config.block_tokens)


def read_rate(backend: Any, config: EngineConfig, nbytes: int) -> float:
    """GB/s of a plain read, now, on the same device."""
    if config.device == "cuda":
        from graphrt.perf.device_time import read_ceiling

        return read_ceiling(backend.ops.driver)
    from graphrt.kernels.cpu_ops import usable_cores
    from graphrt.perf.machine import read_bandwidth

    return read_bandwidth(config.threads or usable_cores(), nbytes)


def driver_version() -> str:
    """The GPU driver's, or ""."""
    return probe().release


def versions() -> dict[str, str]:
    """Of what the numbers depend on, as far as it is installed."""
    found = {"python": platform.python_version()}
    for name in ("graphrt", "numpy", "cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc", "cupy-cuda13x"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
