"""Latency measurements on a machine that others use too: what they take is measured, and noisy repeats are put aside."""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path
from typing import Any

QUIET_CORES = 0.1


def percentile(values: list[float], share: float) -> float:
    """The value that `share` (0..1) of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def spread(values: list[float], digits: int = 1) -> dict[str, Any]:
    """Median and range over repeats, and the repeats."""
    return {
        "median": round(statistics.median(values), digits),
        "min": round(min(values), digits),
        "max": round(max(values), digits),
        "all": [round(value, digits) for value in values],
    }


class OtherLoad:
    """How many cores programs other than this process and its child `pid` use, since it was made."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._ticks = os.sysconf("SC_CLK_TCK")
        self._start = self._foreign_s(), time.perf_counter()

    def _foreign_s(self) -> float:
        user, nice, system, _idle, _wait, irq, softirq, steal, *_ = map(
            int, Path("/proc/stat").read_text().partition("\n")[0].split()[1:]
        )
        own = time.process_time()
        if self._pid != os.getpid():
            fields = Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()
            own += (int(fields[11]) + int(fields[12])) / self._ticks
        return (user + nice + system + irq + softirq + steal) / self._ticks - own

    def cores(self) -> float:
        foreign_s, start = self._start
        return (self._foreign_s() - foreign_s) / (time.perf_counter() - start)


class Shares:
    """p50, p99 and maximum of `repeats` quiet repeats; of noisy ones too when `retries` more did not bring enough."""

    def __init__(self, repeats: int, retries: int) -> None:
        self._wanted = repeats
        self._tries = repeats + retries
        self._quiet: list[list[float]] = []
        self._noisy: list[list[float]] = []

    def complete(self) -> bool:
        return len(self._quiet) == self._wanted or len(self._quiet) + len(self._noisy) >= self._tries

    def add(self, values: list[float], others: float) -> bool:
        """One repeat, in us, during which others used so many cores. False if that makes it a noisy one."""
        shares = [percentile(values, 0.5), percentile(values, 0.99), max(values)]
        quiet = others <= QUIET_CORES
        (self._quiet if quiet else self._noisy).append(shares)
        return quiet

    def result(self) -> dict[str, Any]:
        used = (self._quiet + self._noisy)[: self._wanted]
        names = ("p50_us", "p99_us", "max_us")
        spreads = {name: spread([shares[index] for shares in used]) for index, name in enumerate(names)}
        return {**spreads, "noisy_repeats": len(self._noisy), "noisy_used": max(0, self._wanted - len(self._quiet))}


def stalls(seconds: float = 3.0, longest_us: float = 100.0) -> dict[str, float]:
    """How often a loop that only reads the clock stands still for `longest_us` or more: the machine's own doing.

    A core that loses one per cent of its time so makes every p99 on it at least as long.
    """
    last = time.perf_counter_ns()
    end = last + int(seconds * 1e9)
    gaps: list[float] = []
    while last < end:
        now = time.perf_counter_ns()
        if now - last >= longest_us * 1000:
            gaps.append((now - last) / 1000)
        last = now
    return {
        "per_second": round(len(gaps) / seconds, 1),
        "median_us": round(statistics.median(gaps), 1) if gaps else 0.0,
        "share_of_time": round(sum(gaps) / 1e6 / seconds, 5),
    }
