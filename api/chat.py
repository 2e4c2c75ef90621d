"""POST /v1/chat/completions."""

from __future__ import annotations

import logging
import secrets
import time

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from graphrt.api import params, sse
from graphrt.api.body import decode_body, read_body
from graphrt.api.client_watch import ClientWatch
from graphrt.api.errors import ApiError, describe
from graphrt.api.generation import Generation
from graphrt.api.output_text import OutputText
from graphrt.api.prompt import encode_chat
from graphrt.api.reply_schema import (
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChunkChoice,
    Delta,
    ReplyMessage,
    Usage,
    usage,
)
from graphrt.api.request_note import RequestNote, note_of
from graphrt.api.request_schema import ChatRequest
from graphrt.api.state import AppState
from graphrt.api.unbuilt import refuse_unbuilt
from graphrt.errors import EngineDead, RequestError

log = logging.getLogger("graphrt.api")


def usage_of(generation: Generation) -> Usage:
    """The tokens of `generation` so far."""
    return usage(generation.prompt_tokens, generation.completion_tokens, generation.cached_tokens)


class ChatReply:
    """Writes the JSON of one reply: its id and time are the same in all chunks."""

    def __init__(self, state: AppState, with_usage: bool) -> None:
        self._id = "chatcmpl-" + secrets.token_hex(16)
        self._created = int(time.time())
        self._model = state.settings.model_name
        self._fingerprint = state.fingerprint
        self._with_usage = with_usage

    def chunk(self, delta: Delta, finish: str | None = None) -> bytes:
        """One event with a choice."""
        return self._event([ChunkChoice(0, delta, finish)], None)

    def last(self, generation: Generation) -> bytes:
        """The events that end a stream."""
        end = self.chunk(Delta(), generation.finish)
        return end + (self._event([], usage_of(generation)) if self._with_usage else b"") + sse.DONE

    def _event(self, choices: list[ChunkChoice], usage: Usage | None) -> bytes:
        shown = usage if self._with_usage else msgspec.UNSET
        return sse.event(
            ChatChunk(self._id, "chat.completion.chunk", self._created, self._model, choices, self._fingerprint, shown)
        )

    def whole(self, text: str, generation: Generation) -> bytes:
        """The body of a reply that is not streamed."""
        choice = ChatChoice(0, ReplyMessage(text), generation.finish)
        return msgspec.json.encode(
            ChatCompletion(
                self._id,
                "chat.completion",
                self._created,
                self._model,
                [choice],
                usage_of(generation),
                self._fingerprint,
            )
        )


class ChatEndpoint:
    """The ASGI application behind the path. Errors before the reply starts are raised, later ones are streamed."""

    def __init__(self, state: AppState) -> None:
        self._state = state
        self._decoder = msgspec.json.Decoder(ChatRequest)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = time.perf_counter()
        state = self._state
        state.check_serving()
        body = await read_body(scope, receive, state.settings.body_limit, state.settings.body_timeout_s)
        request = decode_body(body, self._decoder)
        del body
        state.check_model(request.model)
        refuse_unbuilt(request)
        options = request.stream_options
        if options is not None and not request.stream:
            raise ApiError("stream_options is allowed only with stream true", param="stream_options")
        reply = ChatReply(state, bool(options and options.include_usage))
        async with ClientWatch(receive):
            with await self._start(request, started, note_of(scope)) as generation:
                if request.stream:
                    await _stream(generation, reply, send)
                else:
                    pieces: list[str] = []
                    while not generation.finish:
                        pieces.append(await generation.step())
                    response = Response(reply.whole("".join(pieces), generation), media_type="application/json")
                    await response(scope, receive, send)

    async def _start(self, request: ChatRequest, started: float, note: RequestNote) -> Generation:
        """Check the rest of the request and hand it to the engine."""
        state = self._state
        sampling = params.sampling_of(request, state.defaults)
        stops = params.stop_strings(request)
        stop_ids = params.stop_ids(request, state.tokenizer.eos_ids, state.engine.info.vocab_size)
        asked, field = _asked_tokens(request)
        tokens = await encode_chat(request, state.template, state.tokenizer, state.encoders)
        budget = params.output_budget(asked, field, "messages", len(tokens), state.engine.info.context)
        state.check_serving()  # encoding may have taken a while
        try:
            stream = state.engine.submit(tokens, sampling, budget, stop_ids)
        except EngineDead:
            state.check_serving()
            raise
        text = OutputText(state.tokenizer.detokenizer(), stops, stop_ids)
        return Generation(stream, text, len(tokens), state.metrics, state.live, started, note)


def _asked_tokens(request: ChatRequest) -> tuple[int | None, str]:
    """The reply's length as asked, and the field that asked."""
    old, new = request.max_tokens, request.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise ApiError(
            f"max_tokens is {old} and max_completion_tokens is {new}: give one of them", param="max_completion_tokens"
        )
    return (old, "max_tokens") if new is None else (new, "max_completion_tokens")


async def _stream(generation: Generation, reply: ChatReply, send: Send) -> None:
    text = await generation.step()  # until here an error still has an HTTP status of its own
    await send(sse.stream_start())
    body = reply.chunk(Delta(role="assistant", content=""))
    try:
        while True:
            if text:
                body += reply.chunk(Delta(content=text))
            if generation.finish:
                break
            if body:
                await send(sse.stream_part(body))
                body = b""
            text = await generation.step()
        body += reply.last(generation)
    except (RequestError, EngineDead) as error:
        body += sse.raw_event(describe(error)[1])
    except Exception as error:
        log.exception("a stream broke")
        body += sse.raw_event(describe(error)[1])
    await send(sse.stream_part(body, more=False))
