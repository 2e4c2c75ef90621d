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

    A task that iterates costs a switch for each token. Who has hundreds of streams uses `listen` and `take` instead.
    """

    __slots__ = (
        "_cached",
        "_cancel",
        "_error",
        "_forget",
        "_listener",
        "_loop",
        "_over",
        "_ready",
        "_told",
        "_waiter",
        "_wake",
        "id",
    )

    def __init__(
        self,
        request_id: int,
        loop: asyncio.AbstractEventLoop,
        cancel: Callable[[int], None],
        forget: Callable[[int], None],
        wake: Callable[[RequestStream], None],
    ) -> None:
        """`wake` asks for a `tell` once all that has arrived is fed."""
        self.id = request_id
        self._loop = loop
        self._cancel: Callable[[int], None] | None = cancel
        self._forget = forget
        self._wake = wake
        self._listener: Callable[[], None] | None = None
        self._told = True  # whether the listener knows, or will, of what is there
        self._ready: TokenOut | None = None
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._over = False
        self._cached = 0  # prompt tokens from the prefix cache, as last told

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TokenOut:
        while True:
            out = self.take()
            if out is not None:
                return out
            if self._over:
                raise StopAsyncIteration
            if self._waiter is not None:
                raise RuntimeError(f"request {self.id}: two tasks wait on one stream")
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def listen(self, listener: Callable[[], None] | None) -> None:
        """Have `listener` called on the loop when something came; it must then `take` until there is nothing. What is there
        already is not told. None stops it.
        """
        self._listener = listener
        self._told = listener is None

    def take(self) -> TokenOut | None:
        """All that came since the last time, None for nothing. Raises as iterating does."""
        out = self._ready
        if out is not None and (out.tokens or out.finish):
            self._ready = None
            return out
        if self._error is not None:
            raise self._error.with_traceback(None)
        return None

    def cancel(self) -> None:
        """Ask the engine to drop the request; the stream then ends with finish "cancelled", or as it ended before."""
        cancel, self._cancel = self._cancel, None
        if cancel is not None and not self._over:
            cancel(self.id)

    async def aclose(self) -> None:
        """Cancel, discard what waits and end the iteration at once. Idempotent."""
        self.cancel()
        self.listen(None)
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
        self._cached = out.cached_tokens
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
        else:
            self._news()

    def feed_token(self, token: int) -> None:
        """The client's: one more token, and nothing else to say."""
        if self._over:
            return
        if self._ready is None:
            self._ready = TokenOut(self.id, [token], "", self._cached)
        else:
            self._ready.tokens.append(token)  # nobody else holds it yet
        self._news()

    def tell(self) -> None:
        """The client's: all is fed that was there."""
        if self._listener is not None:
            self._told = False
            self._listener()

    def fail(self, error: Exception) -> None:
        """The client's: no more tokens will come, for this reason."""
        if not self._over:
            self._error = error
            self._end()

    def _end(self) -> None:
        self._over = True
        self._forget(self.id)
        self._news()

    def _news(self) -> None:
        if self._waiter is not None:
            if not self._waiter.done():
                self._waiter.set_result(None)
        elif not self._told:
            self._told = True
            self._wake(self)
