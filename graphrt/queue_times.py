"""How long requests wait for a slot and blocks, counted in the buckets that a histogram shows."""

from __future__ import annotations

from bisect import bisect_left

from graphrt.seam.records import QUEUE_BOUNDS_S


class QueueTimes:
    """`counts` has one number a bound, of waits up to it and above the bound before, and one for all that are longer."""

    def __init__(self) -> None:
        self.counts = [0] * (len(QUEUE_BOUNDS_S) + 1)
        self.sum_s = 0.0

    def add(self, seconds: float) -> None:
        """Count a wait, from a request's arrival to its first admission."""
        self.counts[bisect_left(QUEUE_BOUNDS_S, seconds)] += 1
        self.sum_s += seconds
