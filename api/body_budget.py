"""A bound on the memory of all request bodies together, from their first byte until they are tokens."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from graphrt.api.errors import ApiError


class BodyRefused(ApiError):
    """Said while the body is still coming; the connection ends after the reply."""


class BodyHold:
    """One body's share: `with` it around all that is done with the body."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._size = 0

    def grow(self, size: int) -> None:
        """The body has `size` bytes by now. Raises `BodyRefused` 429 when all of them together are too many."""
        more = size - self._size
        self._budget.take(more)
        self._size = size

    def release(self) -> None:
        """Nothing of the body is left."""
        self._budget.take(-self._size)
        self._size = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class BodyBudget:
    """`held` bytes are in use, at most `limit`."""

    def __init__(self, limit: int, retry_after_s: int) -> None:
        self._limit = limit
        self._retry_after_s = retry_after_s
        self.held = 0

    def hold(self) -> BodyHold:
        """For one request."""
        return BodyHold(self)

    def take(self, size: int) -> None:
        """The holds'."""
        if size > 0 and self.held + size > self._limit:
            raise BodyRefused(
                f"the requests under way hold {self.held} bytes: this server takes at most {self._limit} at a time",
                status=429,
                code="bodies_too_large",
                headers={"connection": "close", "retry-after": str(self._retry_after_s)},
            )
        self.held += size
