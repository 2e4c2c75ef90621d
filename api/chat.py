"""POST /v1/chat/completions."""

from __future__ import annotations

import msgspec

from graphrt.api import params
from graphrt.api.ask import Ask, make_ask
from graphrt.api.chat_reply import ChatReply
from graphrt.api.choices import Choices
from graphrt.api.deliver import Writer
from graphrt.api.errors import ApiError
from graphrt.api.generate import GenerateEndpoint
from graphrt.api.prompt import Conversation, encode_chat
from graphrt.api.request_schema import ChatRequest
from graphrt.api.state import AppState


class ChatEndpoint(GenerateEndpoint[ChatRequest]):
    """One conversation, `n` replies."""

    def __init__(self, state: AppState) -> None:
        super().__init__(state, msgspec.json.Decoder(ChatRequest))

    async def asks(self, request: ChatRequest) -> list[Ask]:
        """The conversation as one prompt."""
        state = self.state
        logprobs = params.chat_logprobs(request.logprobs, request.top_logprobs)
        scored = params.prompt_logprobs(request)
        asked, field = _asked_tokens(request)
        chat = Conversation(
            request.messages,
            request.chat_template_kwargs,
            request.add_generation_prompt,
            request.continue_final_message,
        )
        tokens = await encode_chat(chat, state.template, state.tokenizer, state.encoders, state.room)
        budget = params.output_budget(asked, field, "messages", len(tokens), state.engine.info.context)
        return [make_ask(request, state, tokens, budget, logprobs, scored)]

    def writer(self, request: ChatRequest, choices: Choices, with_usage: bool) -> Writer:
        """Chunks with deltas, or one message."""
        return ChatReply(self.state, choices, with_usage)


def _asked_tokens(request: ChatRequest) -> tuple[int | None, str]:
    """The reply's length as asked, and the field that asked."""
    old, new = request.max_tokens, request.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise ApiError(
            f"max_tokens is {old} and max_completion_tokens is {new}: give one of them", param="max_completion_tokens"
        )
    return (old, "max_tokens") if new is None else (new, "max_completion_tokens")
