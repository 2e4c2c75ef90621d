"""What the endpoints that generate text have in common: from the body to the response."""

from __future__ import annotations

import time
from functools import partial
from typing import Generic, TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from graphrt.api import params
from graphrt.api.ask import Ask, begin
from graphrt.api.body import decode_body, read_body
from graphrt.api.body_budget import BodyHold
from graphrt.api.choices import Choices
from graphrt.api.client_watch import ClientWatch
from graphrt.api.deliver import Writer, deliver_stream, deliver_whole
from graphrt.api.errors import ApiError
from graphrt.api.outlet import outlet_of
from graphrt.api.request_note import note_of
from graphrt.api.request_schema import GenerationFields
from graphrt.api.state import AppState
from graphrt.api.unbuilt import refuse_unbuilt

R = TypeVar("R", bound=GenerationFields)


class GenerateEndpoint(Generic[R]):
    """The ASGI application behind a path. Errors before the reply starts are raised, later ones are streamed."""

    def __init__(self, state: AppState, decoder: msgspec.json.Decoder[R]) -> None:
        self.state = state
        self._decoder = decoder

    async def asks(self, request: R) -> list[Ask]:
        """What to ask for each prompt; checks the rest of the request."""
        raise NotImplementedError

    def writer(self, request: R, choices: Choices, with_usage: bool) -> Writer:
        """How the replies are written."""
        raise NotImplementedError

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = time.perf_counter()
        state = self.state
        state.check_serving()
        with state.bodies.hold() as hold:
            request = await self._read(scope, receive, hold)
            async with ClientWatch(receive):
                asks = await self.asks(request)
                hold.release()
                info = state.engine.info
                n = params.choices(request, len(asks), info.max_batch + info.max_waiting)
                state.check_serving()  # encoding may have taken a while
                start = partial(begin, state=state, note=note_of(scope), started=started)
                with Choices(asks, n, start, info.block_tokens) as choices:
                    writer = self.writer(
                        request, choices, bool(request.stream_options and request.stream_options.include_usage)
                    )
                    if request.stream:
                        await deliver_stream(choices, writer, outlet_of(scope), send)
                    else:
                        await deliver_whole(choices, writer, state.encoders, scope, receive, send)

    async def _read(self, scope: Scope, receive: Receive, hold: BodyHold) -> R:
        """The request, with all checked that needs no tokenizer."""
        settings = self.state.settings
        body = await read_body(scope, receive, settings.body_limit, settings.body_timeout_s, hold)
        request = decode_body(body, self._decoder)
        self.state.check_model(request.model)
        refuse_unbuilt(request)
        if request.stream_options is not None and not request.stream:
            raise ApiError("stream_options is allowed only with stream true", param="stream_options")
        return request
