"""Finds stop strings in text that arrives in pieces, and holds back what may become one."""

from __future__ import annotations


class StopScanner:
    """Feed text piece by piece; what comes out never holds a stop string nor the beginning of one that came true.

    The stop string that is complete first ends the text, as if characters came one by one; of several complete at the
    same character, the longest. The result does not depend on how the text was cut into pieces. With `include` the text
    ends behind the stop string.
    """

    def __init__(self, stops: tuple[str, ...], include: bool = False) -> None:
        self._stops = stops
        self._include = include
        self._held = ""
        self.hit: str | None = None  # the stop string that ended the text

    def push(self, text: str, armed: bool = True) -> str:
        """The text that is certain by now. After a hit, always "". Not `armed`, a stop string complete here ends nothing."""
        if self.hit is not None or not text:
            return ""
        held = len(self._held)
        text = self._held + text
        if armed:
            ends = [
                (at + len(stop), at, stop)
                for stop in self._stops
                # An end within what was held was passed over when it came.
                if (at := text.find(stop, max(0, held - len(stop) + 1))) >= 0
            ]
            if ends:
                end, at, self.hit = min(ends)
                self._held = ""
                return text[: end if self._include else at]
        keep = max(_overlap(text, stop) for stop in self._stops)
        cut = len(text) - keep
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """What was held back, once no more text comes."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning, but not all, of `stop`."""
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while at >= 0:
        if stop.startswith(text[at:]):
            return len(text) - at
        at = text.find(stop[0], at + 1)
    return 0
