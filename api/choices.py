"""All replies to one request, side by side: n to each of its prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
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


class Choices:
    """`async with Choices(...) as choices:`; leaving early drops all of it in the engine.

    Reply `index` is the `index % n`-th to prompt `index // n`. The first reply to a prompt goes ahead until its first
    token, so that the others find the prompt in the prefix cache; to prompts below `block_tokens`, of which the cache keeps
    nothing, all begin at once.
    """

    def __init__(self, asks: list[Ask], n: int, begin: Begin, block_tokens: int) -> None:
        self.asks = asks
        self.n = n
        self.generations: list[Generation | None] = [None] * (len(asks) * n)
        self._begin = begin
        self._block_tokens = block_tokens
        self._exits = ExitStack()
        self._tasks: list[asyncio.Task[None]] = []
        self._queue: asyncio.Queue[Piece | Exception] = asyncio.Queue()
        self._open = len(self.generations)
        self._error: Exception | None = None

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

    async def next(self) -> list[Piece]:
        """What is new, in order for each reply; empty when all have finished. Raises what the engine raised for any."""
        if self._error is not None:
            raise self._error
        if not self._open:
            return []
        if not self._tasks:
            return [await self._only()]
        out: list[Piece] = []
        item = await self._queue.get()
        while True:
            if isinstance(item, Exception):
                if not out:
                    raise item
                self._error = item
                return out
            out.append(item)
            self._open -= bool(item.finish)
            if self._queue.empty():
                return out
            item = self._queue.get_nowait()

    async def _only(self) -> Piece:
        generation = self.generations[0]
        assert generation is not None
        text = await generation.step()
        self._open -= bool(generation.finish)
        return Piece(0, text, generation.take_logprobs(), generation.finish)

    def _start(self, index: int) -> Generation:
        generation = self._begin(self.asks[index // self.n], index % self.n)
        self.generations[index] = self._exits.enter_context(generation)
        return generation

    def _run(self, index: int) -> None:
        self._tasks.append(asyncio.create_task(self._pump(self._start(index), index)))

    async def _pump(self, generation: Generation, index: int) -> None:
        try:
            leads = index % self.n == 0 and self._waits_for_first(index // self.n)
            while not generation.finish:
                text = await generation.step()
                self._queue.put_nowait(Piece(index, text, generation.take_logprobs(), generation.finish))
                if leads:
                    leads = False
                    for follower in range(index + 1, index + self.n):
                        self._run(follower)
        except Exception as error:
            self._queue.put_nowait(error)

    def _waits_for_first(self, prompt: int) -> bool:
        ask = self.asks[prompt]
        return self.n > 1 and (len(ask.tokens) > self._block_tokens or ask.prompt_logprobs != NO_LOGPROBS)

    async def __aenter__(self) -> Self:
        try:
            if self._open == 1:
                self._start(0)
            else:
                for index in range(self._open):
                    if index % self.n == 0 or not self._waits_for_first(index // self.n):
                        self._run(index)
        except BaseException:
            await self._leave()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._leave()

    async def _leave(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._exits.close()
        if self._tasks:
            await asyncio.wait(self._tasks)
