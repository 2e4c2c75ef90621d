"""argparse with one-line errors and readable examples, and the types of the values that flags take."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

N = TypeVar("N", int, float)
_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}


class Parser(argparse.ArgumentParser):
    """Keeps the line breaks of description and example; flags must be spelled out, so that scripts survive new ones."""

    def __init__(self, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        """Exit 2 with one line."""
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def integer(low: int, high: int | None = None) -> Callable[[str], int]:
    """An integer from `low` to `high`, both included."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None
        return _within(value, low, high)

    return parse


def number(low: float, high: float) -> Callable[[str], float]:
    """A number from `low` to `high`, both included."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        return _within(value, low, high)

    return parse


def size(text: str) -> int:
    """A number of bytes: 500000000, 512MiB, 2GiB, 1.5G."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]i?|)b?", text.strip().lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: write 512MiB or 2GiB, or a number of bytes")
    return _within(int(float(match[1]) * _UNITS[match[2]]), 1, None)


def _within(value: N, low: N, high: N | None) -> N:
    # Written so that a NaN is refused as well.
    if value >= low and (high is None or value <= high):
        return value
    limit = f"at least {low}" if high is None else f"from {low} to {high}"
    raise argparse.ArgumentTypeError(f"{value} is out of range: must be {limit}")
