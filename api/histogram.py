"""A histogram for one thread: no locks, and many equal observations cost as much as one."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from prometheus_client.core import HistogramMetricFamily


class Histogram:
    """Counts of values in buckets with the upper bounds `bounds` (rising, in the unit of the values)."""

    def __init__(self, name: str, help_text: str, bounds: Sequence[float]) -> None:
        self._name = name
        self._help = help_text
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value`, `times` times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def family(self, labels: dict[str, str]) -> HistogramMetricFamily:
        """The state as Prometheus wants it: cumulative counts."""
        total = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, float(total)))
        family = HistogramMetricFamily(self._name, self._help, labels=list(labels))
        family.add_metric(list(labels.values()), buckets, self._sum)
        return family
