"""Facts of the machine that a result was measured on, and its memory read bandwidth."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


def machine_facts(packages: tuple[str, ...]) -> dict[str, Any]:
    """CPU, cores, kernel, Python, versions of packages, and the commit of the checkout."""
    cpu = next(
        (ln.partition(":")[2].strip() for ln in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in ln),
        platform.processor(),
    )
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": {p: importlib.metadata.version(p) for p in packages},
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
    }


def commit() -> str:
    """The checkout's commit, "+" behind it when files differ; empty outside a checkout."""
    here = Path(__file__).resolve().parent
    try:
        head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True)
        dirty = subprocess.run(["git", "status", "--porcelain", "-uno"], cwd=here, capture_output=True, text=True)
    except OSError:
        return ""
    return head.stdout.strip() + ("+" if dirty.stdout.strip() else "")


def read_bandwidth(threads: int, nbytes: int, repeats: int = 15) -> float:
    """GB/s of `threads` threads that each read their part of `nbytes` and do next to nothing else: the best of the repeats.

    Take the bytes of what is compared: below the size of the last cache, memory is not what limits.
    """
    from numba import njit

    @njit("int64(int64[::1])", nogil=True)
    def total(words: NDArray[np.int64]) -> int:
        a = b = c = d = 0
        for i in range(0, words.size - 31, 32):  # four chains, so that additions do not wait for one another
            for j in range(8):
                a += words[i + j]
                b += words[i + 8 + j]
                c += words[i + 16 + j]
                d += words[i + 24 + j]
        return a + b + c + d

    parts = np.array_split(np.ones(nbytes // 8, np.int64), threads)
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(repeats):
            start = time.perf_counter()
            sums = list(pool.map(total, parts))
            best = max(best, nbytes / (time.perf_counter() - start) / 1e9)
            assert sum(sums) > 0
    return best


def spread(values: list[float]) -> dict[str, float]:
    """Median, extremes and 99th percentile."""
    ordered = sorted(values)
    return {
        "median": statistics.median(ordered),
        "min": ordered[0],
        "max": ordered[-1],
        "p99": ordered[min(len(ordered) * 99 // 100, len(ordered) - 1)],
    }
