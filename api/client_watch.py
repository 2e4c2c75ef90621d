"""Notices a client that leaves while its request is being worked on, and stops the work at once."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from starlette.types import Receive


class ClientGone(Exception):
    """The client closed its connection before the reply was complete; nobody is left to answer."""


class ClientWatch:
    """`async with ClientWatch(receive):` raises `ClientGone` inside the block when the client leaves.

    The request body must have been read before: the watch takes over `receive`.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._gone = False

    async def __aenter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._work = task
        self._watch = asyncio.create_task(self._wait())
        return self

    async def _wait(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        self._work.cancel()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watch.cancel()
        if not self._gone:
            return
        # As in asyncio.timeout: a cancellation that somebody else asked for as well stays a cancellation.
        if self._work.uncancel() == 0 and kind is asyncio.CancelledError:
            raise ClientGone from error
