"""From tokens to text: halves of characters, end tokens, stop strings and counts."""

from __future__ import annotations

from typing import Any

import pytest

from graphrt.api.output_text import OutputText

EOS = 256


@pytest.fixture
def make(byte_tokenizer: Any) -> Any:
    return lambda stops=(), ids=(EOS,), **options: OutputText(byte_tokenizer.detokenizer(), stops, ids, **options)


def test_half_a_character_waits_for_its_other_half(make: Any) -> None:
    out = make()
    assert [out.push([byte], "") for byte in "ö😀".encode()] == ["", "ö", "", "", "", "😀"]
    assert (out.tokens, out.finish) == (6, "")


def test_half_a_character_at_the_end_shows_as_a_replacement(make: Any) -> None:
    out = make()
    assert out.push(list("aö".encode()[:2]), "length") == "a\ufffd"
    assert out.finish == "length"


@pytest.mark.parametrize("stops", [(), ("never",)])
def test_the_end_token_counts_but_is_no_text(make: Any, stops: tuple[str, ...]) -> None:
    out = make(stops, (EOS, ord("!")))
    assert out.push(list(b"hi!"), "stop") == "hi"
    assert (out.tokens, out.finish) == (3, "stop")


def test_the_same_token_is_text_when_the_reply_ends_by_length(make: Any) -> None:
    out = make((), (EOS, ord("!")))
    assert out.push(list(b"hi!"), "length") == "hi!"


@pytest.mark.parametrize("cut", range(1, 9))
def test_a_stop_string_gives_the_same_however_tokens_come(make: Any, cut: int) -> None:
    tokens = list(b"one END two")
    out = make(("END",))
    text = out.push(tokens[:cut], "")
    if not out.finish:
        text += out.push(tokens[cut:], "length")
    assert (text, out.finish, out.tokens) == ("one ", "stop", 7)


def test_text_held_back_comes_at_the_end(make: Any) -> None:
    out = make(("END",))
    assert out.push(list(b"the EN"), "") == "the "
    assert out.push([EOS], "stop") == "EN"
    assert (out.finish, out.tokens) == ("stop", 7)


def test_a_cancelled_reply_does_not_finish(make: Any) -> None:
    out = make(("END",))
    assert out.push([], "cancelled") == ""
    assert out.finish == ""


@pytest.mark.parametrize("cut", range(1, 11))
def test_the_stop_string_can_be_kept(make: Any, cut: int) -> None:
    tokens = list(b"one END two")
    out = make(("END",), include_stop=True)
    text = out.push(tokens[:cut], "")
    if not out.finish:
        text += out.push(tokens[cut:], "length")
    assert (text, out.finish, out.tokens) == ("one END", "stop", 7)


@pytest.mark.parametrize("stops", [(), ("never",)])
def test_the_end_token_can_be_kept(make: Any, stops: tuple[str, ...]) -> None:
    out = make(stops, (EOS, ord("!")), include_stop=True)
    assert out.push(list(b"hi!"), "stop") == "hi!"
    assert (out.tokens, out.finish) == (3, "stop")


@pytest.mark.parametrize("cut", range(1, 6))
def test_an_end_token_that_the_engine_does_not_know_ends_the_reply(make: Any, cut: int) -> None:
    tokens = list(b"hi! surplus")
    out = make((), (EOS,), late_ids=(ord("!"),))
    text = out.push(tokens[:cut], "")
    if not out.finish:
        text += out.push(tokens[cut:], "length")
    assert (text, out.finish, out.tokens) == ("hi", "stop", 3)


@pytest.mark.parametrize("cut", range(1, 8))
def test_nothing_ends_a_reply_before_its_least_length(make: Any, cut: int) -> None:
    tokens = list(b"abcabcab")
    out = make(("abc", "ca"), late_ids=(ord("b"),), min_tokens=3)
    text = out.push(tokens[:cut], "")
    if not out.finish:
        text += out.push(tokens[cut:], "length")
    # The first "abc" ends at token 3, "ca" at token 4.
    assert (text, out.finish, out.tokens) == ("ab", "stop", 4)


def test_what_was_passed_over_stays_passed_over(make: Any) -> None:
    out = make(("a", "aab"), min_tokens=1)
    assert out.push([ord("a")], "") == ""  # "aab" may begin here
    assert out.push([ord("x")], "") == "ax"
    assert out.push(list(b"ya"), "") == "y"
    assert (out.finish, out.tokens) == ("stop", 4)
