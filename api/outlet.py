"""Writes parts of a reply without a coroutine in between, which would cost more than the write."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl

SCOPE_KEY = "graphrt.outlet"


class Outlet:
    """For the body of a chunked reply, after its start was sent and before its end is, in the ordinary way."""

    __slots__ = ("_flow", "_transport")

    def __init__(self, transport: asyncio.Transport, flow: FlowControl) -> None:
        self._transport = transport
        self._flow = flow

    def write(self, body: bytes) -> bool:
        """Send `body`, if it is not empty and the client is still there. False when no more should come before `drain`."""
        if body and not self._transport.is_closing():
            self._transport.write(b"%x\r\n%b\r\n" % (len(body), body))
        return not self._flow.write_paused

    @property
    def gone(self) -> bool:
        """Whether nobody is there any more to read."""
        return self._transport.is_closing()

    async def drain(self) -> None:
        """Wait until the client has read enough, or has left."""
        if self._flow.write_paused and not self._transport.is_closing():
            await self._flow.drain()


def outlet_of(scope: Mapping[str, Any]) -> Outlet:
    """The outlet of a request: `http_protocol` gives it one."""
    outlet = scope[SCOPE_KEY]
    assert isinstance(outlet, Outlet)
    return outlet
