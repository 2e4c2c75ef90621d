"""From messages to the prompt."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from graphrt.api.encoders import BULK, INLINE, Encoders
from graphrt.api.errors import ApiError
from graphrt.api.prompt import Conversation, encode_chat, template_message
from graphrt.api.prompt_room import PromptRoom
from graphrt.api.request_schema import ContentPart, Message


def encode(tokenizer: Any, template: Any, messages: list[Message], room: int = 1 << 20, **fields: Any) -> str:
    with contextlib.closing(Encoders()) as encoders:
        chat = Conversation(messages, **fields)
        return bytes(asyncio.run(encode_chat(chat, template, tokenizer, encoders, PromptRoom(room, 1)))).decode()


def test_roles_and_parts(byte_tokenizer: Any, line_template: Any) -> None:
    messages = [
        Message("developer", "be kind"),
        Message("user", [ContentPart("text", "a"), ContentPart("text", "b")]),
        Message("assistant", "c"),
        Message("tool", "d", tool_call_id="1"),
    ]
    text = encode(byte_tokenizer, line_template, messages, chat_template_kwargs={"enable_thinking": False})
    assert text == "system: be kind\nuser: a\nb\nassistant: c\ntool: d\nenable_thinking=False\nassistant:"


def test_tool_calls_reach_the_template_as_objects() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    message = template_message(Message("assistant", None, tool_calls=[call]), "messages[0]")
    assert message["content"] == ""
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}
    odd = {"function": {"arguments": "{not json"}}
    assert template_message(Message("assistant", "", tool_calls=[odd]), "m")["tool_calls"] == [odd]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (Message("user", None), "messages[0].content"),
        (Message("assistant", None), "messages[0].content"),
        (Message("user", [ContentPart("image_url")]), "messages[0].content[0].type"),
        (Message("user", [ContentPart("text", "a"), ContentPart("text")]), "messages[0].content[1].text"),
    ],
)
def test_what_cannot_be_served_is_named(byte_tokenizer: Any, line_template: Any, message: Message, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        encode(byte_tokenizer, line_template, [message])
    assert caught.value.param == param


@pytest.mark.parametrize("name", ["self", "messages", "add_generation_prompt"])
def test_template_options_cannot_replace_the_conversation(byte_tokenizer: Any, line_template: Any, name: str) -> None:
    with pytest.raises(ApiError, match=name):
        encode(byte_tokenizer, line_template, [Message("user", "hi")], chat_template_kwargs={name: 1})


def test_a_long_prompt_is_encoded_in_a_thread(byte_tokenizer: Any, line_template: Any) -> None:
    encode(byte_tokenizer, line_template, [Message("user", "x" * (INLINE - 32))])
    encode(byte_tokenizer, line_template, [Message("user", "x" * (INLINE - 31))])
    encode(byte_tokenizer, line_template, [Message("user", "x")] * 100)
    encode(byte_tokenizer, line_template, [Message("user", "x" * BULK)])
    lanes = [name.rpartition("_")[0] for name in byte_tokenizer.threads]
    assert lanes == ["", "graphrt-encode", "graphrt-encode", "graphrt-encode-bulk"]


def test_what_cannot_fit_is_never_tokenized(byte_tokenizer: Any, line_template: Any) -> None:
    text = "user: " + "x" * 83 + "\nassistant:"
    assert len(text) == 100 and encode(byte_tokenizer, line_template, [Message("user", "x" * 83)], room=100) == text
    for messages in ([Message("user", "x" * 84)], [Message("user", "")] * 101):
        calls = len(byte_tokenizer.threads)
        with pytest.raises(ApiError, match="context is 100 tokens") as caught:
            encode(byte_tokenizer, line_template, messages, room=100)
        assert (caught.value.param, caught.value.code) == ("messages", "context_length_exceeded")
        assert len(byte_tokenizer.threads) == calls


def test_a_turn_is_opened_left_or_continued(byte_tokenizer: Any, line_template: Any) -> None:
    messages = [Message("user", "a"), Message("assistant", "b and ")]
    assert encode(byte_tokenizer, line_template, messages, add_generation_prompt=False) == "user: a\nassistant: b and "
    for given in (None, False):
        fields = {"continue_final_message": True, "add_generation_prompt": given, "chat_template_kwargs": {"k": 1}}
        assert encode(byte_tokenizer, line_template, messages, **fields) == "user: a\nassistant: b and "
    with pytest.raises(ApiError, match="contradict") as caught:
        encode(byte_tokenizer, line_template, messages, continue_final_message=True, add_generation_prompt=True)
    assert caught.value.param == "continue_final_message"


class TrimmingTemplate:
    def render(self, messages: list[dict[str, Any]], add_generation_prompt: bool = True, **kwargs: Any) -> str:
        return "".join(f"<{message['role']}>{message['content'].strip()}<end>" for message in messages)


class MuteTemplate:
    def render(self, messages: list[dict[str, Any]], add_generation_prompt: bool = True, **kwargs: Any) -> str:
        return "nothing of it"


def test_a_continued_message_as_the_template_writes_it(byte_tokenizer: Any) -> None:
    messages = [Message("user", "a"), Message("assistant", " the end ")]
    given = encode(byte_tokenizer, TrimmingTemplate(), messages, continue_final_message=True)
    assert given == "<user>a<end><assistant>the end"
    with pytest.raises(ApiError, match="does not write") as caught:
        encode(byte_tokenizer, MuteTemplate(), messages, continue_final_message=True)
    assert caught.value.param == "continue_final_message"
