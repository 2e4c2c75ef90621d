"""Stop strings: found across pieces, never leaked, whatever the cuts."""

from __future__ import annotations

import random

import pytest

from graphrt.api.stop_text import StopScanner


def scan(pieces: list[str], stops: tuple[str, ...]) -> tuple[str, str | None]:
    scanner = StopScanner(stops)
    out = "".join(scanner.push(piece) for piece in pieces)
    return (out if scanner.hit is not None else out + scanner.flush()), scanner.hit


def reference(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    """Character by character: the first end at which a stop string stands ends the text."""
    for end in range(1, len(text) + 1):
        here = [stop for stop in stops if text[:end].endswith(stop)]
        if here:
            longest = max(here, key=len)
            return text[: end - len(longest)], longest
    return text, None


@pytest.mark.parametrize(
    ("pieces", "stops", "text", "hit"),
    [
        (["one ST", "OP two"], ("STOP",), "one ", "STOP"),
        (["S", "T", "O", "P"], ("STOP",), "", "STOP"),
        (["SSTOP"], ("STOP",), "S", "STOP"),
        (["aab", "aaab"], ("aaab",), "aab", "aaab"),
        (["STO", "RE"], ("STOP",), "STORE", None),
        (["ends with ST"], ("STOP",), "ends with ST", None),
        (["abcd"], ("abcd", "bc"), "a", "bc"),
        (["xbcd"], ("cd", "bcd"), "x", "bcd"),
        (["\n", "\n", "User"], ("\n\nUser", "\n\n\n"), "", "\n\nUser"),
        (["naïve 😀", "!"], ("😀!",), "naïve ", "😀!"),
    ],
)
def test_known_cases(pieces: list[str], stops: tuple[str, ...], text: str, hit: str | None) -> None:
    assert scan(pieces, stops) == (text, hit)


def test_random_texts_and_cuts_agree_with_the_reference() -> None:
    draw = random.Random(1)
    hits = 0
    for _ in range(5000):
        text = "".join(draw.choices("ab\n", k=draw.randrange(0, 24)))
        stops = tuple({"".join(draw.choices("ab\n", k=draw.randrange(1, 6))) for _ in range(draw.randrange(1, 4))})
        cuts = sorted(draw.choices(range(len(text) + 1), k=draw.randrange(0, 8)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        expected = reference(text, stops)
        assert scan(pieces, stops) == expected, (pieces, stops)
        hits += expected[1] is not None
    assert hits > 1000


def test_what_came_out_is_a_beginning_of_the_result_at_every_moment() -> None:
    scanner = StopScanner(("END", "EX"))
    assert [scanner.push(piece) for piece in ("a E", "N", "C E", "", "N", "D b")] == ["a ", "", "ENC ", "", "", ""]
    assert scanner.hit == "END"
    assert scanner.push("more") == ""


def test_a_hostile_stop_string_costs_little() -> None:
    scanner = StopScanner(tuple("a" * 1023 + chr(98 + i) for i in range(16)))
    out = "".join(scanner.push("a") for _ in range(3000)) + scanner.flush()
    assert out == "a" * 3000
