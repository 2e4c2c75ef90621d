"""What an engine runs on: the operations, the sizes that suit them, the memory there is, and how steps become graphs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from graphrt.capture.graph import CpuStepGraph, GraphSet, StepFunction
from graphrt.capture.step_buffers import StepBuffers, StepSizes
from graphrt.engine_config import EngineConfig
from graphrt.gpu import open_gpu
from graphrt.kernels.cpu_ops import make_cpu_ops
from graphrt.kernels.cuda.driver import Driver
from graphrt.kernels.cuda.jit import KernelSpec
from graphrt.kernels.ops import Ops
from graphrt.memory import available_memory
from graphrt.paths import home

log = logging.getLogger(__name__)

CPU_KV_SHARE = 0.5  # of the memory left beside the weights, when neither --ctx nor --kv-memory says more
GPU_KV_SHARE = 0.9
GPU_RESERVE = 512 << 20  # bytes beside weights and caches: temporaries, graphs, the library's workspace
CPU_CHUNK, GPU_CHUNK = 256, 1024  # prompt tokens in one step, where the configuration leaves it open


@dataclass(frozen=True, slots=True)
class Backend:
    """One device. name: for people. run_ahead: replays queued before the last one's tokens are read.

    memory: bytes that are free on it now. kv_share: of what the weights leave, for caches; reserve: bytes that stay free.
    graphs: captures a step for all sizes. poll: raises when the device has failed.
    """

    name: str
    ops: Ops
    sizes: StepSizes
    run_ahead: int
    memory: Callable[[], int]
    kv_share: float
    reserve: int
    graphs: Callable[[StepBuffers, StepFunction], GraphSet]
    poll: Callable[[], None] | None


def make_backend(config: EngineConfig) -> Backend:
    """The backend that `config.device` names. DeviceError when it cannot be had."""
    return cuda_backend(config) if config.device == "cuda" else cpu_backend(config)


def cpu_backend(config: EngineConfig) -> Backend:
    """This machine's cores. A launch is the step itself: running ahead only wastes steps."""
    ops = make_cpu_ops(config.threads)

    def graphs(buffers: StepBuffers, step: StepFunction) -> GraphSet:
        return GraphSet(ops, buffers, lambda view: CpuStepGraph(ops, step, view))

    sizes = cpu_sizes(config.max_batch, config.prefill_chunk or CPU_CHUNK)
    return Backend(f"cpu ({ops.name})", ops, sizes, 0, available_memory, CPU_KV_SHARE, 0, graphs, None)


def cuda_backend(config: EngineConfig, driver: Driver | None = None) -> Backend:
    """A GPU, the first one when `driver` is None."""
    from graphrt.capture.cuda_graph import capture_graphs
    from graphrt.kernels.cuda.ops import CudaOps

    driver = driver or open_gpu(home() / "kernels")
    ops = CudaOps(driver)

    def graphs(buffers: StepBuffers, step: StepFunction) -> GraphSet:
        with CompileNotice() as notice:
            captured = capture_graphs(ops, buffers, step, notice)
        for kind, rows in buffers.sizes.by_kind().items():
            log.info("graphs for %s steps of %s rows", kind, ", ".join(map(str, rows)))
        return captured

    sizes = cuda_sizes(config.max_batch, config.prefill_chunk or GPU_CHUNK)
    return Backend(
        f"cuda ({driver.name}, {driver.arch})",
        ops,
        sizes,
        1,
        driver.free_memory,
        GPU_KV_SHARE,
        GPU_RESERVE,
        graphs,
        driver.poll,
    )


def cpu_sizes(max_batch: int, prefill_chunk: int) -> StepSizes:
    """Sizes for the CPU, where a graph costs nothing: fine steps keep padding small."""
    decode = [n for n in (1, 2, 4, 6, *range(8, max_batch, 4)) if n < max_batch]
    prefill = [n for n in (1, 2, 4, 8, *range(16, prefill_chunk, 16)) if n < prefill_chunk]
    score = [n for n in (8, 32) if n < prefill_chunk]  # few: their logits are large
    return StepSizes(
        (*decode, max_batch), (*prefill, prefill_chunk), tuple(score) or (prefill_chunk,), min(8, max_batch)
    )


def cuda_sizes(max_batch: int, prefill_chunk: int) -> StepSizes:
    """Sizes for a GPU, where rows up to 64 cost little and every size is a graph to capture and to keep."""
    decode = [n for n in (1, 2, 4, 8, 16, 24, 32, 48, 64, *range(80, 128, 16), *range(128, 256, 32)) if n < max_batch]
    prefill = [n for n in (16, 64, 256, 1024, 4096, 16384) if n < prefill_chunk]
    score = [n for n in (8, 64) if n < prefill_chunk]
    return StepSizes(
        (*decode, max_batch), (*prefill, prefill_chunk), tuple(score) or (prefill_chunk,), min(16, max_batch)
    )


class CompileNotice:
    """Says that kernels are being compiled, when that takes long enough to wonder."""

    def __init__(self, after_s: float = 1.0) -> None:
        self._done = self._total = 0
        self._timer = threading.Timer(after_s, self._say)
        self._timer.daemon = True

    def __enter__(self) -> CompileNotice:
        self._timer.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._timer.cancel()

    def __call__(self, done: int, total: int, spec: KernelSpec) -> None:
        self._done, self._total = done, total

    def _say(self) -> None:
        if self._done < self._total:
            log.warning(
                "compiling %d GPU kernels (%d done): only the first start of a model takes this long",
                self._total,
                self._done,
            )
