"""The tokens of one request on the server's event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self

from graphrt.seam.records import TokenOut


class RequestStream:
    """Async iterator of `TokenOut`; ends after the one with `finish != ""`. Made by `EngineClient.submit`.

    Tokens that came in while nobody waited are merged in one `TokenOut`, and the prompt's log-probabilities, which come in
    pieces, with the first token. Raises `RequestError` when the engine refused
    the request and `EngineDead` when the engine died, after all that had arrived before. Leaving early needs `aclose`,
    or `async with`: the engine goes on otherwise.
    """

    __slots__ = ("_cancel", "_error", "_forget", "_loop", "_over", "_ready", "_waiter", "id")

    def __init__(
        self,
        request_id: int,
        loop: asyncio.AbstractEventLoop,
        cancel: Callable[[int], None],
        forget: Callable[[int], None],
    ) -> None:
        self.id = request_id
        self._loop = loop
        self._cancel: Callable[[int], None] | None = cancel
        self._forget = forget
        self._ready: TokenOut | None = None
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._over = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TokenOut:
        while True:
            out = self._ready
            if out is not None and (out.tokens or out.finish):
                self._ready = None
                return out
            if self._error is not None:
                raise self._error.with_traceback(None)
            if self._over:
                raise StopAsyncIteration
            if self._waiter is not None:
                raise RuntimeError(f"request {self.id}: two tasks wait on one stream")
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def cancel(self) -> None:
        """Ask the engine to drop the request; the stream then ends with finish "cancelled", or as it ended before."""
        cancel, self._cancel = self._cancel, None
        if cancel is not None and not self._over:
            cancel(self.id)

    async def aclose(self) -> None:
        """Cancel, discard what waits and end the iteration at once. Idempotent."""
        self.cancel()
        self._ready = None
        self._error = None
        self._end()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def feed(self, out: TokenOut) -> None:
        """The client's: tokens arrived."""
        if self._over:
            return
        ready = self._ready
        if ready is None:
            self._ready = out
        else:
            # The lists came from the decoder and nobody else holds them; a copy per token would be quadratic.
            ready.tokens.extend(out.tokens)
            ready.logprobs.extend(out.logprobs)
            ready.prompt_logprobs.extend(out.prompt_logprobs)
            self._ready = TokenOut(
                self.id, ready.tokens, out.finish, out.cached_tokens, ready.logprobs, ready.prompt_logprobs
            )
        if out.finish:
            self._end()
        elif self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def fail(self, error: Exception) -> None:
        """The client's: no more tokens will come, for this reason."""
        if not self._over:
            self._error = error
            self._end()

    def _end(self) -> None:
        self._over = True
        self._forget(self.id)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
