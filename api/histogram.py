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
        """The state as Prometheus wants it."""
        return histogram_family(self._name, self._help, self._bounds, self._counts, self._sum, labels)


def histogram_family(
    name: str, help_text: str, bounds: Sequence[float], counts: Sequence[int], total: float, labels: dict[str, str]
) -> HistogramMetricFamily:
    """Cumulative counts from those of each bucket: one a bound, and one of values above the last."""
    seen = 0
    buckets: list[tuple[str, float]] = []
    for bound, count in zip((*map(str, bounds), "+Inf"), counts, strict=True):
        seen += count
        buckets.append((bound, float(seen)))
    family = HistogramMetricFamily(name, help_text, labels=list(labels))
    family.add_metric(list(labels.values()), buckets, total)
    return family
