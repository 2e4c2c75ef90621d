"""How many requests a key, and the whole server, may have under way and begin in a minute."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from graphrt.api.auth_keys import ApiKey
from graphrt.api.errors import ApiError
from graphrt.api.rate_bucket import TokenBucket


@dataclass(frozen=True)
class Limits:
    """0 is no limit. Those of keys are defaults that a key's own line may change."""

    concurrency: int = 0  # of the whole server
    key_concurrency: int = 0
    key_rpm: int = 0


class TooMany(ApiError):
    """429; `reason` is for the metrics."""

    def __init__(self, message: str, reason: str, retry_after_s: float) -> None:
        seconds = max(1, math.ceil(retry_after_s))
        super().__init__(message, status=429, code=f"{reason}_exceeded", headers={"retry-after": str(seconds)})
        self.reason = reason


@dataclass
class Use:
    """What one key does."""

    running: int = 0
    bucket: TokenBucket | None = None


class Slot:
    """`with` it around the request."""

    def __init__(self, limiter: RateLimiter, use: Use) -> None:
        self._limiter = limiter
        self._use = use

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._limiter.release(self._use)


class RateLimiter:
    """Counts by the key's name, so that a reload of the keys forgets nothing. `retry_after_s` is told where only the
    end of another request makes room, which nobody can foresee.
    """

    def __init__(self, limits: Limits, retry_after_s: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._retry_after_s = retry_after_s
        self._clock = clock
        self._uses: dict[str, Use] = {}
        self.running = 0

    def admit(self, key: ApiKey | None) -> Slot:
        """Count a request until the slot is left. Raises `TooMany`, which costs the key nothing."""
        use = self._admit(key)
        self.running += 1
        use.running += 1
        return Slot(self, use)

    def release(self, use: Use) -> None:
        """The slot's: its request is over."""
        self.running -= 1
        use.running -= 1

    def running_of(self, name: str) -> int:
        """Requests under way with the key of this name."""
        use = self._uses.get(name)
        return use.running if use is not None else 0

    def _admit(self, key: ApiKey | None) -> Use:
        limits = self._limits
        if limits.concurrency and self.running >= limits.concurrency:
            text = f"{self.running} requests are under way, the most this server takes"
            raise TooMany(text, "concurrency_limit", self._retry_after_s)
        if key is None:
            return Use()
        use = self._uses.setdefault(key.name, Use())
        concurrency = limits.key_concurrency if key.concurrency is None else key.concurrency
        if concurrency and use.running >= concurrency:
            text = f"the key {key.name} has {use.running} requests under way, the most it may have"
            raise TooMany(text, "key_concurrency_limit", self._retry_after_s)
        rpm = limits.key_rpm if key.rpm is None else key.rpm
        if rpm:
            now = self._clock()
            if use.bucket is None or use.bucket.per_minute != rpm:
                use.bucket = TokenBucket(rpm, now)
            wait = use.bucket.wait_s(now)
            if wait > 0:
                text = f"the key {key.name} may begin {rpm} requests a minute: the next one in {wait:.1f} s"
                raise TooMany(text, "key_rate_limit", wait)
            use.bucket.take(now)
        return use
