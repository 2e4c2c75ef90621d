"""From the messages of a chat to the token ids of the prompt."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

import msgspec

from graphrt.api.encoders import Encoders
from graphrt.api.errors import ApiError
from graphrt.api.ports import PromptTemplate, TextCodec
from graphrt.api.prompt_room import PromptRoom
from graphrt.api.request_schema import ContentPart, Message

_MESSAGE_CHARS = 32  # what a message counts beside its text
_RESERVED = frozenset({"self", "messages", "add_generation_prompt"})


@dataclass(frozen=True)
class Conversation:
    """The fields of a request that make a chat's prompt."""

    messages: list[Message]
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


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


def _opens_turn(add_generation_prompt: bool | None, continue_final_message: bool | None) -> bool:
    """Whether the template is to open the assistant's turn."""
    if continue_final_message and add_generation_prompt:
        raise ApiError(
            "add_generation_prompt and continue_final_message contradict each other: a turn is either opened or continued",
            param="continue_final_message",
        )
    return not continue_final_message if add_generation_prompt is None else add_generation_prompt


def _continued(template: PromptTemplate, messages: list[dict[str, Any]], options: dict[str, Any]) -> str:
    """The conversation up to the end of its last message's text, without what the template writes behind it."""
    mark = f"\ue000{secrets.token_hex(8)}\ue001"  # a text that is in no message
    *before, last = messages
    marked = {**last, "content": last["content"] + mark + " "}
    text, found, rest = template.render([*before, marked], add_generation_prompt=False, **options).rpartition(mark)
    if not found:
        raise ApiError(
            "continue_final_message: the chat template does not write the last message's content",
            param="continue_final_message",
        )
    return text if rest.startswith(" ") else text.rstrip()  # a template that trims would have trimmed here


def render_chat(chat: Conversation, template: PromptTemplate) -> str:
    """The conversation as one text. `ApiError`, or the template's `RequestError`."""
    options = chat.chat_template_kwargs or {}
    for name in options:
        if name in _RESERVED:
            raise ApiError(f"chat_template_kwargs may not set {name}", param="chat_template_kwargs")
    opens = _opens_turn(chat.add_generation_prompt, chat.continue_final_message)
    messages = [template_message(message, f"messages[{i}]") for i, message in enumerate(chat.messages)]
    if chat.continue_final_message:
        return _continued(template, messages, options)
    return template.render(messages, add_generation_prompt=opens, **options)


def _size(messages: list[Message]) -> int:
    """About how many characters the text will have."""
    chars = _MESSAGE_CHARS * len(messages)
    for message in messages:
        content = message.content or ""
        chars += len(content) if isinstance(content, str) else sum(len(part.text or "") for part in content)
    return chars


async def encode_chat(
    chat: Conversation,
    template: PromptTemplate,
    tokenizer: TextCodec,
    encoders: Encoders,
    room: PromptRoom,
    add_special: bool = False,
) -> list[int]:
    """The prompt's token ids. `ApiError`, or the template's `RequestError`."""
    room.check_count(len(chat.messages), "entries", "messages")

    def encode() -> list[int]:
        text = render_chat(chat, template)
        room.check_text(text, "messages")
        return tokenizer.encode(text, add_special=True) if add_special else tokenizer.encode(text)

    tokens = await encoders.run(_size(chat.messages), encode)
    if not tokens:
        raise ApiError("messages give an empty prompt", param="messages")
    return tokens
