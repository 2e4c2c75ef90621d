"""From the pieces of all replies to the response: one body, or events as they come."""

from __future__ import annotations

import logging
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from graphrt.api import sse
from graphrt.api.choices import Choices, Piece
from graphrt.api.encoders import Encoders
from graphrt.api.errors import describe
from graphrt.api.outlet import Outlet
from graphrt.errors import EngineDead, RequestError
from graphrt.seam.records import NO_LOGPROBS

log = logging.getLogger("graphrt.api")

ENTRY_CHARS = 8  # a log-probability in JSON is as much work as so many characters to tokenize


class Writer(Protocol):
    """Writes the JSON of an endpoint's replies."""

    def opening(self, index: int) -> bytes:
        """The event that begins reply `index`; called when its first piece is there."""

    def events(self, piece: Piece) -> bytes:
        """The events of a piece."""

    def closing(self) -> bytes:
        """The events behind the last piece of all."""

    def whole(self, replies: list[Piece]) -> bytes:
        """The body of a response that is not streamed; each reply is one piece."""


async def deliver_whole(
    choices: Choices, writer: Writer, encoders: Encoders, scope: Scope, receive: Receive, send: Send
) -> None:
    """Wait for everything, then answer. Errors are raised."""
    texts: list[list[str]] = [[] for _ in choices.generations]
    whole = [Piece(index, "", [], "") for index in range(len(texts))]

    def keep(piece: Piece) -> bool:
        texts[piece.index].append(piece.text)
        whole[piece.index].logprobs += piece.logprobs
        whole[piece.index].finish = piece.finish
        return True

    await choices.run(keep)
    for piece, parts in zip(whole, texts, strict=True):
        piece.text = "".join(parts)
    body = await encoders.run(_size(choices), lambda: writer.whole(whole))
    await Response(body, media_type="application/json")(scope, receive, send)


def _size(choices: Choices) -> int:
    """How much work the body is, in characters to tokenize: its log-probabilities take nearly all of it."""
    ask = choices.asks[0]
    entries = 0
    if ask.logprobs != NO_LOGPROBS:
        entries += choices.completion_tokens * (1 + ask.logprobs)
    if ask.prompt_logprobs != NO_LOGPROBS:
        entries += choices.prompt_tokens * (1 + ask.prompt_logprobs)
    return ENTRY_CHARS * entries


async def deliver_stream(choices: Choices, writer: Writer, outlet: Outlet, send: Send) -> None:
    """Answer piece by piece. Errors before the first piece are raised, later ones are the stream's last event.

    While the client does not read, nothing is written: its tokens wait in the stream as numbers, and become one event.
    """
    first: list[Piece] = []

    def hold(piece: Piece) -> bool:
        first.append(piece)
        return False

    await choices.run(hold)  # until here an error still has an HTTP status of its own
    await send(sse.stream_start())
    begun: set[int] = set()

    def write(piece: Piece) -> bool:
        body = writer.events(piece)
        if piece.index not in begun:
            begun.add(piece.index)
            body = writer.opening(piece.index) + body
        return outlet.write(body)

    try:
        write(first[0])
        while choices.open:
            await outlet.drain()
            await choices.run(write)
        body = writer.closing()
    except (RequestError, EngineDead) as error:
        body = sse.raw_event(describe(error)[1])
    except Exception as error:
        log.exception("a stream broke")
        body = sse.raw_event(describe(error)[1])
    await send(sse.stream_part(body, more=False))
