"""Bytes beside log-probabilities: together they are exactly the text that was given out."""

from __future__ import annotations

import random
from typing import Any

import pytest

from graphrt.api.output_text import OutputText
from graphrt.api.token_trail import TokenTrail, prefix_bytes
from graphrt.seam.records import Logprob

EOS = 256


def entry(token: int) -> Logprob:
    return Logprob(token, -1.0, 1, [])


def test_tokens_come_out_with_whole_characters() -> None:
    trail = TokenTrail()
    for token, byte in enumerate("aö!".encode()):
        trail.add(entry(token), bytes([byte]))
    assert [[item.logprob.token for item in trail.release(chars)] for chars in (0, 1, 2)] == [[], [0], [1, 2]]
    assert [(item.data, item.start) for item in trail.finish(3)] == [(b"!", 2)]


def test_a_cut_inside_a_token_cuts_its_bytes() -> None:
    trail = TokenTrail()
    for token, data in enumerate((b"x\xf0\x9f", b"\x98\x80 EN", b"D tail")):
        trail.add(entry(token), data)
    assert trail.release(1) == []  # its second character is not whole
    assert [item.data for item in trail.finish(3)] == [b"x\xf0\x9f", b"\x98\x80 "]


@pytest.mark.parametrize("data", ["aö😀z".encode(), b"\xf0a\xf0\xf0b", b"\xed\xa0\xe0\x80c", b"\xff\xfe", b"\xf0\x9f"])
def test_a_prefix_in_bytes_shows_as_that_many_characters(data: bytes) -> None:
    text = data.decode(errors="replace")
    for chars in range(len(text) + 1):
        assert data[: prefix_bytes(data, chars)].decode(errors="replace") == text[:chars]


def random_reply(draw: random.Random, out: OutputText) -> str:
    text, data, finish = "", b"", ""
    while not out.finish:
        tokens = [draw.choice(b"ab\nE\xc3\xb6\xf0\x9f\x98\x80\xff") for _ in range(draw.randrange(1, 4))]
        if draw.random() < 0.1:
            finish = draw.choice(["stop", "length"])
            tokens += [EOS] * (finish == "stop")
        text += out.push(tokens, finish, [entry(token) for token in tokens])
        data += b"".join(item.data for item in out.take_logprobs())
        # Never ahead of the text: what is out is the text of whole tokens.
        assert text.startswith(data.decode(errors="replace"))
    assert data.decode(errors="replace") == text
    return text


def test_random_replies_with_stops_and_broken_characters(byte_tokenizer: Any) -> None:
    draw = random.Random(7)
    ends = set()
    for _ in range(3000):
        stops = tuple({"".join(draw.choices("ab\nEö😀", k=draw.randrange(1, 4))) for _ in range(draw.randrange(3))})
        least = draw.choice([0, 0, 6])
        out = OutputText(
            byte_tokenizer.detokenizer(),
            stops,
            (EOS,),
            late_ids=draw.choice([(), (0xFF,)]),
            include_stop=False,
            min_tokens=least,
            with_logprobs=True,
        )
        text = random_reply(draw, out)
        assert least or not any(stop in text for stop in stops)
        ends.add(out.finish)
    assert ends == {"stop", "length"}
