"""Times on the device, by events around replays of a graph, and the ceiling that they are compared with."""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np

from graphrt.kernels.cuda.probe import BLOCKS_PER_SM, read_all

PROBE_BYTES = 6 << 30


def events_us(driver: Any, queue: Any, count: int, rounds: int) -> list[float]:
    """Microseconds of one `queue()`, per round of `count` of them queued back to back between two events."""
    from cuda.bindings import driver as cu

    def call(result: Any) -> Any:
        if result[0] != cu.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"event timing: {result[0].name}")
        return result[1] if len(result) > 1 else None

    stream = cu.CUstream(int(driver.stream.handle))
    start, end = call(cu.cuEventCreate(0)), call(cu.cuEventCreate(0))
    times = []
    for _ in range(rounds + 1):
        call(cu.cuEventRecord(start, stream))
        for _ in range(count):
            queue()
        call(cu.cuEventRecord(end, stream))
        call(cu.cuEventSynchronize(end))
        times.append(call(cu.cuEventElapsedTime(start, end)) * 1e3 / count)
    call(cu.cuEventDestroy(start))
    call(cu.cuEventDestroy(end))
    return times[1:]  # the first warms up


def graph_us(driver: Any, graph: Any, replays: int, rounds: int) -> list[float]:
    """Microseconds of one replay, per round."""
    return events_us(driver, graph.launch, replays, rounds)


def read_ceiling(driver: Any, nbytes: int = PROBE_BYTES) -> float:
    """GB/s at which this card reads `nbytes` of its memory: the best grid's median of 15."""
    data, out = driver.alloc((nbytes,), np.uint8), driver.alloc((1,), np.uint32)
    calls = [read_all(driver, data, out, blocks) for blocks in BLOCKS_PER_SM]
    driver.prepare({calls[0].spec})
    medians = [statistics.median(events_us(driver, lambda c=c: driver.launch(c), 1, 15)) for c in calls]
    return nbytes / min(medians) / 1e3
