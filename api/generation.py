"""One sequence under way: takes its tokens, turns them into text, keeps its times, and ends in exactly one way."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from graphrt.api.metrics import Metrics
from graphrt.api.output_text import OutputText
from graphrt.api.ports import TokenStream
from graphrt.api.request_note import RequestNote
from graphrt.api.token_trail import TokenText
from graphrt.errors import EngineDead, RequestError
from graphrt.seam.records import Logprob


class Generation:
    """Use as `with Generation(...) as generation:`, so that leaving early cancels it in the engine.

    `live` is the set of all that are under way; each adds and removes itself. `started` is `time.perf_counter()` at
    the request's arrival. `note` is the request's, and hears of its beginning and end.
    """

    def __init__(
        self,
        stream: TokenStream,
        text: OutputText,
        prompt_tokens: int,
        metrics: Metrics,
        live: set[Generation],
        started: float,
        note: RequestNote,
    ) -> None:
        self._stream = stream
        self._text = text
        self._metrics = metrics
        self._live = live
        self._started = started
        self._note = note
        self._first = 0.0
        self._last = 0.0  # when the last tokens came; 0 before the first
        self._aborted: RequestError | None = None
        self._closed = False
        self._listener: Callable[[], None] | None = None
        self.prompt_tokens = prompt_tokens
        self.cached_tokens = 0
        self.prompt_logprobs: list[Logprob] = []
        live.add(self)
        note.begin(self)

    @property
    def finish(self) -> str:
        """ "" while it goes on, then "stop" or "length"."""
        return self._text.finish

    @property
    def completion_tokens(self) -> int:
        """Tokens generated so far, the end token included."""
        return self._text.tokens

    def take_logprobs(self) -> list[TokenText]:
        """The tokens whose text came out since the last call, where log-probabilities were asked for."""
        return self._text.take_logprobs()

    def listen(self, listener: Callable[[], None]) -> None:
        """Have `listener` called, from now on, when a `step` has something to give or to raise."""
        self._listener = listener
        self._stream.listen(listener)

    def step(self) -> str | None:
        """The next piece of text, maybe empty; None when nothing has come. To be called until it is None or `finish` is set.

        Raises `RequestError` or `EngineDead` when the engine gives up on it.
        """
        if self._aborted is not None:
            self._end(self._reason_of(None))
            raise self._aborted.with_traceback(None)  # shared by all that were aborted together
        try:
            out = self._stream.take()
        except (RequestError, EngineDead) as error:
            self._end(self._reason_of(error))
            raise
        if out is None:
            return None
        self.cached_tokens = out.cached_tokens
        if out.tokens:
            self._clock(len(out.tokens))
        if out.prompt_logprobs:
            self.prompt_logprobs += out.prompt_logprobs
        piece = self._text.push(out.tokens, out.finish, out.logprobs)
        if self._text.finish:
            self._end(self._text.finish)
            if not out.finish:
                self._stream.cancel()  # a stop string, of which the engine knows nothing
        elif out.finish:
            self._end(self._reason_of(None))
            raise RequestError(f"the engine ended this request: {out.finish}", status=500)
        return piece

    def abort(self, error: RequestError) -> None:
        """End it from outside, whatever the engine does; `step` will raise `error`."""
        if self._closed or self._aborted is not None:
            return
        self._aborted = error
        self._stream.cancel()
        if self._listener is not None:
            self._listener()

    def _clock(self, tokens: int) -> None:
        now = time.perf_counter()
        if self._last:
            self._metrics.inter_token.observe((now - self._last) / tokens, tokens)
        else:
            self._metrics.first_token.observe(now - self._started)
            self._first = now
        self._last = now

    def _reason_of(self, error: Exception | None) -> str:
        if self._aborted is not None:
            return "timeout" if self._aborted.status == 504 else "error"
        refused = isinstance(error, RequestError) and error.status < 500
        return "refused" if refused else "error"

    def _end(self, reason: str) -> None:
        if self._closed:
            return
        self._closed = True
        self._listener = None
        self._stream.listen(None)
        self._live.discard(self)
        self._note.end(self, self.prompt_tokens, self.completion_tokens, self.cached_tokens, reason)
        decode_s = self._last - self._first if self._last else 0.0
        whole_s = time.perf_counter() - self._started
        self._metrics.sequence_ended(reason, self.prompt_tokens, self.completion_tokens, whole_s, decode_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._closed:
            self._end("abort")
            self._stream.cancel()
