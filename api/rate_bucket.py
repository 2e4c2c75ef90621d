"""A token bucket: at most `per_minute` requests at once, refilled evenly over a minute."""

from __future__ import annotations


class TokenBucket:
    """Full at first. `now` is any clock in seconds that never goes back; no timers run."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._rate = per_minute / 60.0
        self._level = float(per_minute)
        self._at = now

    def wait_s(self, now: float) -> float:
        """Seconds until a request may pass; 0 when one may now."""
        level = min(float(self.per_minute), self._level + (now - self._at) * self._rate)
        # Rounding must not leave one who waited as long as told a hair short.
        return 0.0 if level >= 1.0 - 1e-9 else (1.0 - level) / self._rate

    def take(self, now: float) -> None:
        """Let one pass; only when `wait_s` says so."""
        self._level = min(float(self.per_minute), self._level + (now - self._at) * self._rate) - 1.0
        self._at = now
