"""Where text becomes tokens, and numbers become text: on the spot when it is little, else in threads, so that no stream waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

INLINE = 2048  # characters: about a millisecond of work; more of it would hold up every stream of the loop
BULK = 200_000  # characters: a tenth of a second and more


class Encoders:
    """Very long texts have a thread of their own: they wait for one another, and no other request waits for them. One at a
    time is also what their memory asks for, some 170 bytes a character.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(2, "graphrt-encode")
        self._bulk = ThreadPoolExecutor(1, "graphrt-encode-bulk")

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """The result of `work`, which takes as long as to tokenize `size` characters, or so."""
        if size <= INLINE:
            return work()
        threads = self._bulk if size > BULK else self._threads
        return await asyncio.get_running_loop().run_in_executor(threads, work)

    def close(self) -> None:
        """Let go of the threads; what is still being encoded is not waited for."""
        for threads in (self._threads, self._bulk):
            threads.shutdown(wait=False, cancel_futures=True)
