"""All replies to one request, side by side: n to each of its prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Self

from graphrt.api.ask import Ask
from graphrt.api.generation import Generation
from graphrt.api.token_trail import TokenText
from graphrt.seam.records import NO_LOGPROBS

Begin = Callable[[Ask, int], Generation]


@dataclass(slots=True)
class Piece:
    """What is new of reply `index`; `finish` is "" until its last piece."""

    index: int
    text: str
    logprobs: list[TokenText]
    finish: str


Sink = Callable[[Piece], bool]


class Choices:
    """`with Choices(...) as choices:`; leaving early drops all of it in the engine.

    Reply `index` is the `index % n`-th to prompt `index // n`. The first reply to a prompt goes ahead until its first
    token, so that the others find the prompt in the prefix cache; to prompts below `block_tokens`, of which the cache keeps
    nothing, all begin at once.

    Tokens go from the engine's record to the sink in one call chain on the event loop: a task for each reply would cost more
    than all the work on a token.
    """

    def __init__(self, asks: list[Ask], n: int, begin: Begin, block_tokens: int) -> None:
        self.asks = asks
        self.n = n
        self.generations: list[Generation | None] = [None] * (len(asks) * n)
        self.open = len(self.generations)  # that have not finished
        self._begin = begin
        self._block_tokens = block_tokens
        self._exits = ExitStack()
        self._news: dict[int, None] = {}  # replies that have something, oldest first
        self._sink: Sink | None = None
        self._done: asyncio.Future[Exception | None] | None = None

    def first(self, prompt: int) -> Generation:
        """The generation of the first reply to a prompt."""
        generation = self.generations[prompt * self.n]
        assert generation is not None
        return generation

    @property
    def prompt_tokens(self) -> int:
        """Of all prompts; each counts once, whatever `n`."""
        return sum(len(ask.tokens) for ask in self.asks)

    @property
    def cached_tokens(self) -> int:
        """Of these, taken from the prefix cache."""
        return sum(self.first(i).cached_tokens for i in range(len(self.asks)))

    @property
    def completion_tokens(self) -> int:
        """Of all replies."""
        return sum(generation.completion_tokens for generation in self.generations if generation is not None)

    async def run(self, sink: Sink) -> None:
        """Hand each piece to `sink` as it comes, in order for each reply, until all have finished or `sink` returns False.

        What comes while nothing runs waits, and is merged. Raises what the engine raised for any reply, or the sink.
        """
        self._sink = sink
        self._done = asyncio.get_running_loop().create_future()
        try:
            self._pump()
            error = await self._done
        finally:
            self._sink = self._done = None
        if error is not None:
            raise error

    def _on_news(self, index: int) -> None:
        self._news[index] = None
        self._pump()

    def _pump(self) -> None:
        done = self._done
        if done is None or done.done():
            return
        try:
            while self._news:
                if not self._advance(next(iter(self._news))):
                    break
            else:
                if self.open:
                    return
        except Exception as error:
            done.set_result(error)
        else:
            done.set_result(None)

    def _advance(self, index: int) -> bool:
        """Hand over what is new of a reply. Whether the sink takes more."""
        generation = self.generations[index]
        assert generation is not None and self._sink is not None
        more = True
        while more and (text := generation.step()) is not None:
            finish = generation.finish
            more = self._sink(Piece(index, text, generation.take_logprobs(), finish))
            self._start_followers(index)
            if finish:
                self.open -= 1
                del self._news[index]
                return more
        if more:
            del self._news[index]
        return more

    def _start_followers(self, index: int) -> None:
        """After a piece of the reply that leads: its prompt is in the prefix cache."""
        if self.n > 1 and index % self.n == 0 and self.generations[index + 1] is None:
            for follower in range(index + 1, index + self.n):
                self._start(follower)

    def _start(self, index: int) -> None:
        generation = self._begin(self.asks[index // self.n], index % self.n)
        self.generations[index] = self._exits.enter_context(generation)
        generation.listen(partial(self._on_news, index))
        self._news[index] = None  # its time may be over already

    def _waits_for_first(self, prompt: int) -> bool:
        ask = self.asks[prompt]
        return self.n > 1 and (len(ask.tokens) > self._block_tokens or ask.prompt_logprobs != NO_LOGPROBS)

    def __enter__(self) -> Self:
        try:
            for index in range(self.open):
                if index % self.n == 0 or not self._waits_for_first(index // self.n):
                    self._start(index)
        except BaseException:
            self._exits.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exits.close()
