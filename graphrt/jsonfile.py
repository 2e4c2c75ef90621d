"""Reading the JSON files of a model directory, with errors that name the file, the field and the value."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from graphrt.errors import ModelError

_REQUIRED: Any = object()


def read_json(path: Path) -> dict[str, Any]:
    """The object in `path`. ModelError when the file is missing, unreadable, not UTF-8 JSON, or not an object."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ModelError(f"{path} is missing") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
    try:
        value = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a JSON {type(value).__name__}, expected an object")
    return value


class Fields:
    """Typed access to one JSON object. A field that is absent or null takes the default, or is an error."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def _get(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise ModelError(f"{self.where} has no {name}")
        return default

    def integer(self, name: str, low: int, high: int, default: Any = _REQUIRED) -> Any:
        """An integer in [low, high]."""
        value = self._get(name, default)
        if value is default:
            return value
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ModelError(f"{self.where}: {name} is {value!r}, expected an integer")
        if not low <= value <= high:
            raise ModelError(f"{self.where}: {name} is {value}, expected {low} to {high}")
        return value

    def number(self, name: str, low: float, high: float, default: Any = _REQUIRED) -> Any:
        """A finite number in [low, high], as a float."""
        value = self._get(name, default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ModelError(f"{self.where}: {name} is {value!r}, expected a number")
        if not low <= value <= high:
            raise ModelError(f"{self.where}: {name} is {value}, expected {low:g} to {high:g}")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise ModelError(f"{self.where}: {name} is {value!r}, expected true or false")
        return value

    def string(self, name: str, default: Any = _REQUIRED) -> Any:
        """A string."""
        value = self._get(name, default)
        if value is not default and not isinstance(value, str):
            raise ModelError(f"{self.where}: {name} is {value!r}, expected a string")
        return value

    def section(self, name: str) -> Fields | None:
        """A nested object, None when absent."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise ModelError(f"{self.where}: {name} is {value!r}, expected an object")
        return Fields(value, f"{self.where}: {name}")
