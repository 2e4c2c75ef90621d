"""Bodies that are no request: each gives one clear 400 that names the field."""

from __future__ import annotations

import msgspec
import pytest

from graphrt.api.body import decode_body
from graphrt.api.errors import ApiError
from graphrt.api.request_schema import ChatRequest

DECODER = msgspec.json.Decoder(ChatRequest)
GOOD = b'{"model":"m","messages":[{"role":"user","content":"hi"}]'


def refused(body: bytes) -> ApiError:
    with pytest.raises(ApiError) as caught:
        decode_body(body, DECODER)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (GOOD, "not valid JSON"),
        (GOOD + b"} x", "trailing characters"),
        (GOOD + b',"temperature":NaN}', "not valid JSON"),
        (GOOD + b',"temperature":Infinity}', "not valid JSON"),
        (b"\xff\xfe{}", "not UTF-8"),
        (GOOD + b',"unknown":"\xff"}', "not UTF-8"),
        (b'{"model":"m","messages":[{"role":"user","content":"\xed\xa0\x80"}]}', "not UTF-8"),
        (b'{"model":"m","messages":[{"role":"user","content":"\\ud800"}]}', "surrogate"),
        (b'{"model":"m","messages":[{"role":"user","content":"\\udc00\\ud800"}]}', "surrogate"),
        (GOOD + b',"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (GOOD + b',"chat_template_kwargs":{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}}", "nested too deeply"),
        (b"[]", "expected object, got array"),
        (b'"text"', "expected object, got str"),
    ],
)
def test_what_is_no_json_object(body: bytes, text: str) -> None:
    error = refused(body)
    assert text in str(error)
    assert error.param is None


@pytest.mark.parametrize(
    ("field", "param"),
    [
        (b'"temperature":-0.1', "temperature"),
        (b'"temperature":2.1', "temperature"),
        (b'"temperature":1e999', "temperature"),
        (b'"temperature":"hot"', "temperature"),
        (b'"top_p":1.5', "top_p"),
        (b'"top_p":-1', "top_p"),
        (b'"min_p":2', "min_p"),
        (b'"top_k":-2', "top_k"),
        (b'"top_k":1.5', "top_k"),
        (b'"max_tokens":0', "max_tokens"),
        (b'"max_tokens":-5', "max_tokens"),
        (b'"max_tokens":true', "max_tokens"),
        (b'"max_completion_tokens":0', "max_completion_tokens"),
        (b'"n":0', "n"),
        (b'"stop":[' + b",".join([b'"x"'] * 17) + b"]", "stop"),
        (b'"stop":[1]', "stop[0]"),
        (b'"stop":7', "stop"),
        (b'"seed":1.5', "seed"),
        (b'"stream":"yes"', "stream"),
        (b'"stream_options":{"include_usage":1}', "stream_options.include_usage"),
        (b'"presence_penalty":3', "presence_penalty"),
        (b'"logit_bias":{"5":"x"}', "logit_bias[...]"),
        (b'"messages":[]', "messages"),
        (b'"messages":"hi"', "messages"),
        (b'"messages":[{"content":"hi"}]', "messages[0].role"),
        (b'"messages":[{"role":"user","content":"a"},{"role":"robot","content":"b"}]', "messages[1].role"),
        (b'"messages":[{"role":"user","content":5}]', "messages[0].content"),
        (b'"model":5', "model"),
    ],
)
def test_a_wrong_value_names_its_field(field: bytes, param: str) -> None:
    error = refused(GOOD + b"," + field + b"}")
    assert error.param == param
    assert str(error).startswith(param)


def test_a_missing_field_is_named() -> None:
    assert refused(b'{"messages":[{"role":"user","content":"hi"}]}').param == "model"
    assert refused(b'{"model":"m"}').param == "messages"


def test_unknown_and_null_fields_are_taken() -> None:
    nulls = b",".join(
        b'"%s":null' % name.encode() for name in ChatRequest.__struct_fields__ if name not in ("model", "messages")
    )
    request = decode_body(
        GOOD + b',"user":"u","metadata":{"a":"b"},"store":true,"new_field":[1],' + nulls + b"}", DECODER
    )
    assert request.temperature is None and request.messages[0].content == "hi"
    smiley = decode_body(b'{"model":"m","messages":[{"role":"user","content":"\\ud83d\\ude00 \\u0000"}]}', DECODER)
    assert smiley.messages[0].content == "😀 \0"
