"""What becomes of one HTTP request: filled in on its way, read by the log line at its end, and the end of its time."""

from __future__ import annotations

import asyncio
from typing import Protocol

from starlette.types import Scope

from graphrt.api.errors import ApiError
from graphrt.errors import RequestError

_SCOPE_KEY = "graphrt.note"


class Abortable(Protocol):
    """A generation under way."""

    def abort(self, error: RequestError) -> None: ...


class RequestNote:
    """Token counts are sums over the request's sequences; `finish` has one reason for each that ended."""

    def __init__(self, request_id: str = "") -> None:
        self.request_id = request_id
        self.key_name = ""
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.finish: list[str] = []
        self._running: set[Abortable] = set()
        self._expired: ApiError | None = None
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, generation: Abortable) -> None:
        """A sequence starts; it is aborted at once when the request's time is over already."""
        self._running.add(generation)
        if self._expired is not None:
            generation.abort(self._expired)

    def end(self, generation: Abortable, prompt: int, completion: int, cached: int, finish: str) -> None:
        """A sequence ended, with these tokens and for this reason."""
        self._running.discard(generation)
        self.prompt_tokens += prompt
        self.completion_tokens += completion
        self.cached_tokens += cached
        self.finish.append(finish)

    def limit_time(self, seconds: float) -> None:
        """Abort its sequences, those that are yet to start too, when `seconds` have passed from now."""
        self._timer = asyncio.get_running_loop().call_later(seconds, self._expire, seconds)

    def close(self) -> None:
        """The request is over."""
        if self._timer is not None:
            self._timer.cancel()

    def _expire(self, seconds: float) -> None:
        self._expired = ApiError(
            f"the request took longer than {seconds:g} s, the time it was given", status=504, code="deadline_exceeded"
        )
        for generation in list(self._running):
            generation.abort(self._expired)


def attach(scope: Scope, note: RequestNote) -> None:
    """Make `note` the one of this request."""
    scope[_SCOPE_KEY] = note


def note_of(scope: Scope) -> RequestNote:
    """The request's note; one that nobody reads where the middleware is missing."""
    note = scope.get(_SCOPE_KEY)
    return note if isinstance(note, RequestNote) else RequestNote()
