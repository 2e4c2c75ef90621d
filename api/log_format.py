"""The server's log on stderr: readable lines, or one JSON object a line."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any, TextIO

import msgspec

FIELDS = "graphrt_fields"  # attribute of a record whose facts are also there one by one
LEVELS = ("debug", "info", "warning", "error")


class JsonFormatter(logging.Formatter):
    """One object a line: time (UTC), level, logger, then the record's fields, or its message where it has none."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        fields = getattr(record, FIELDS, None)
        line |= fields if fields is not None else {"message": record.getMessage()}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        # A lone surrogate, from a path say, has no UTF-8: it must not cost the line.
        return msgspec.json.encode(_encodable(line)).decode()


class LineLog:
    """Turns what another program prints into records, one a line."""

    def __init__(self, logger: str) -> None:
        self._log = logging.getLogger(logger)
        self._rest = ""

    def write(self, text: str) -> None:
        """A piece of its output; "" says that no more will come."""
        *lines, self._rest = (self._rest + text).split("\n")
        if not text:
            lines, self._rest = [self._rest], ""
        for line in lines:
            if line.strip():
                self._log.info("%s", line.rstrip())


def _encodable(line: dict[str, Any]) -> dict[str, Any]:
    return {k: v.encode(errors="replace").decode() if isinstance(v, str) else v for k, v in line.items()}


def setup_logging(level: str, as_json: bool, stream: TextIO | None = None) -> None:
    """Make the root logger write to `stream` (stderr), from `level` upwards. What was set up before is replaced."""
    handler = logging.StreamHandler(stream or sys.stderr)
    plain = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonFormatter() if as_json else plain)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
