"""SIGTERM and Ctrl-C as events: the first asks the server to drain, a further Ctrl-C to end at once."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")


class Stopped(Exception):
    """A stop was asked for before the work was done."""


class StopSignals:
    """`with StopSignals() as stop:` on the main thread, inside the running loop."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.insisted = asyncio.Event()

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_signal, number)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.remove_signal_handler(number)

    def _on_signal(self, number: int) -> None:
        if self.asked.is_set() and number == signal.SIGINT:
            self.insisted.set()
        self.asked.set()

    async def unless_asked(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`; cancels it and raises `Stopped` when a stop is asked for first."""
        task = asyncio.ensure_future(work)
        asked = asyncio.ensure_future(self.asked.wait())
        try:
            await asyncio.wait((task, asked), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise Stopped
        finally:
            asked.cancel()
            if not task.done():
                task.cancel()
                await asyncio.wait((task,))
