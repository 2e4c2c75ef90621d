"""Calls of the CUDA driver, checked: the error names the call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from graphrt.errors import DeviceError


def check(call: Callable[..., Any], *args: Any, what: str = "") -> Any:
    """Call a function of `cuda.bindings.driver`; its result without the status: None, one value or a tuple.

    DeviceError with the call's name, what CUDA says, and `what` it was for.
    """
    status, *values = call(*args)
    if status:
        raise DeviceError(failure(call.__name__, status, what))
    return values[0] if len(values) == 1 else tuple(values) or None


def failure(name: str, status: Any, what: str = "") -> str:
    """The text for a status that is not success."""
    from cuda.bindings import driver as cu

    error, text = cu.cuGetErrorString(status)
    said = text.decode() if not error and text else "unknown error"
    return f"{name}{f' ({what})' if what else ''}: {status.name}: {said}"
