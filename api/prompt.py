"""From the messages of a chat to the token ids of the prompt."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor
from typing import Any

import msgspec

from graphrt.api.errors import ApiError
from graphrt.api.ports import PromptTemplate, TextCodec
from graphrt.api.request_schema import ChatRequest, ContentPart, Message

INLINE_CHARS = 2048  # about a millisecond of tokenizing; more of it would hold up every stream of the loop
_RESERVED = frozenset({"self", "messages", "add_generation_prompt"})


def _text(parts: list[ContentPart], where: str) -> str:
    texts = []
    for i, part in enumerate(parts):
        if part.type != "text":
            raise ApiError(f"{where}[{i}].type is {part.type!r}: only 'text' is served", param=f"{where}[{i}].type")
        if part.text is None:
            raise ApiError(f"{where}[{i}].text is required", param=f"{where}[{i}].text")
        texts.append(part.text)
    return "\n".join(texts)


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    """Arguments travel as JSON text, but templates print them as objects."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = msgspec.json.decode(function["arguments"])
    except (msgspec.DecodeError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def template_message(message: Message, where: str) -> dict[str, Any]:
    """One message as templates know it: content is one text, and "developer" is the newer name of "system"."""
    content = message.content
    if isinstance(content, list):
        content = _text(content, f"{where}.content")
    elif content is None:
        if message.role != "assistant" or not (message.tool_calls or message.reasoning_content):
            raise ApiError(f"{where}.content is required", param=f"{where}.content")
        content = ""
    out: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role, "content": content}
    if message.tool_calls:
        out["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
    for name in ("name", "tool_call_id", "reasoning_content"):
        value = getattr(message, name)
        if value is not None:
            out[name] = value
    return out


async def encode_chat(
    request: ChatRequest, template: PromptTemplate, tokenizer: TextCodec, executor: Executor
) -> list[int]:
    """The prompt's token ids, computed in `executor` when it is long. `ApiError` or the template's `RequestError`."""
    messages = [template_message(message, f"messages[{i}]") for i, message in enumerate(request.messages)]
    options = request.chat_template_kwargs or {}
    for name in options:
        if name in _RESERVED:
            raise ApiError(f"chat_template_kwargs may not set {name}", param="chat_template_kwargs")

    def encode() -> list[int]:
        return tokenizer.encode(template.render(messages, add_generation_prompt=True, **options))

    if sum(len(message["content"]) for message in messages) <= INLINE_CHARS and len(messages) <= 64:
        tokens = encode()
    else:
        tokens = await asyncio.get_running_loop().run_in_executor(executor, encode)
    if not tokens:
        raise ApiError("messages give an empty prompt", param="messages")
    return tokens
