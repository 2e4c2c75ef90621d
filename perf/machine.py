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


def read_bandwidth(threads: int, *, nbytes: int = 1 << 30, repeats: int = 5) -> float:
    """GB/s of `threads` threads each reading its part of `nbytes` once, median of the repeats.

    The reader is NumPy's maximum over int32, which is vectorised and does nothing but read.
    """
    data = np.ones(nbytes // 4, np.int32)
    parts = np.array_split(data, threads)
    rates = []
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(np.max, parts))
        for _ in range(repeats):
            start = time.perf_counter()
            list(pool.map(np.max, parts))
            rates.append(data.nbytes / (time.perf_counter() - start) / 1e9)
    return statistics.median(rates)


def spread(values: list[float]) -> dict[str, float]:
    """Median, extremes and 99th percentile."""
    ordered = sorted(values)
    return {
        "median": statistics.median(ordered),
        "min": ordered[0],
        "max": ordered[-1],
        "p99": ordered[min(len(ordered) * 99 // 100, len(ordered) - 1)],
    }
