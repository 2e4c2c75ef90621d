"""POST /tokenize and POST /detokenize: the model's tokenizer, with the shapes that vLLM gave these paths."""

from __future__ import annotations

from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from graphrt.api.body import decode_body, read_body
from graphrt.api.body_budget import BodyHold
from graphrt.api.errors import ApiError
from graphrt.api.prompt import Conversation, encode_chat
from graphrt.api.raw_prompt import check_ids, encode_texts
from graphrt.api.state import AppState
from graphrt.api.tokenize_schema import DetokenizeReply, DetokenizeRequest, TokenizeReply, TokenizeRequest

CHARS_A_TOKEN = 4  # about

T = TypeVar("T", bound=TokenizeRequest | DetokenizeRequest)


class TokenizeRoutes:
    """They need no engine, and answer while it is busy; `model` may be left out."""

    def __init__(self, state: AppState) -> None:
        self._state = state
        self._tokenize = msgspec.json.Decoder(TokenizeRequest)
        self._detokenize = msgspec.json.Decoder(DetokenizeRequest)

    def routes(self) -> list[Route]:
        """Their paths."""
        return [
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
        ]

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text or a conversation."""
        with self._state.bodies.hold() as hold:
            return await self._tokens(await self._read(request, self._tokenize, hold))

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids."""
        state = self._state
        with state.bodies.hold() as hold:
            tokens = (await self._read(request, self._detokenize, hold)).tokens
            check_ids(tokens, state.engine.info.vocab_size, "tokens", "tokens")
            size = CHARS_A_TOKEN * len(tokens)
            text = await state.encoders.run(size, lambda: state.tokenizer.decode(tokens, special=True))
        return _json(DetokenizeReply(text))

    async def _tokens(self, body: TokenizeRequest) -> Response:
        state = self._state
        if (body.prompt is None) == (body.messages is None):
            raise ApiError("give either prompt or messages", param="prompt")
        if body.prompt is not None:
            special = body.add_special_tokens is not False
            [tokens] = await encode_texts([body.prompt], state.tokenizer, state.encoders, special)
        else:
            chat = Conversation(
                body.messages or [],
                body.chat_template_kwargs,
                body.add_generation_prompt,
                body.continue_final_message,
            )
            special = body.add_special_tokens or False
            tokens = await encode_chat(chat, state.template, state.tokenizer, state.encoders, state.room, special)
        spelt = None
        if body.return_token_strs:
            size = CHARS_A_TOKEN * len(tokens)
            spelt = await state.encoders.run(size, lambda: [state.tokenizer.spelling(token) for token in tokens])
        return _json(TokenizeReply(len(tokens), state.engine.info.context, tokens, spelt))

    async def _read(self, request: Request, decoder: msgspec.json.Decoder[T], hold: BodyHold) -> T:
        settings = self._state.settings
        body = await read_body(request.scope, request.receive, settings.body_limit, settings.body_timeout_s, hold)
        decoded = decode_body(body, decoder)
        if decoded.model is not None:
            self._state.check_model(decoded.model)
        return decoded


def _json(value: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
