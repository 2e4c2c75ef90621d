"""One line of the doctor's report."""

from __future__ import annotations

import shlex
import sys
from typing import Literal

import msgspec

State = Literal["ok", "missing", "optional"]


class Check(msgspec.Struct, frozen=True):
    """`missing` keeps a model from being served on the CPU; `optional` is absent but only some features want it.

    `fix` is the command or step that gets it, "" where there is nothing to do.
    """

    name: str
    state: State
    detail: str
    fix: str = ""


def gib(size: int) -> str:
    """Bytes as text."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def pip_install(*packages: str) -> str:
    """The command that puts packages where this interpreter finds them."""
    return shlex.join([sys.executable, "-m", "pip", "install", *packages])
