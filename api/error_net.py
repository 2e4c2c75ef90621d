"""The last net: what no handler knew becomes a plain 500 in the log and in the reply."""

from __future__ import annotations

import logging

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from graphrt.api.client_watch import ClientGone
from graphrt.api.errors import error_response
from graphrt.api.request_note import note_of

log = logging.getLogger("graphrt.api")


class ErrorNet:
    """ASGI middleware, inside those that add headers to every reply."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def send_seen(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, send_seen)
        except ClientGone:
            raise
        except Exception as error:
            log.exception("request %s failed", note_of(scope).request_id)
            if begun:
                raise  # half a reply is out: only closing the connection tells the client
            await error_response(error)(scope, receive, send)
