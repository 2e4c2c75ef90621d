"""Where models live on this machine, and how a name becomes a directory."""

from __future__ import annotations

import os
from pathlib import Path

from graphrt.catalog import CATALOG
from graphrt.errors import ModelError


def home() -> Path:
    """`$GRAPHRT_HOME`, or `~/.cache/graphrt` (`$XDG_CACHE_HOME/graphrt` where that is set). Not created here."""
    if value := os.environ.get("GRAPHRT_HOME"):
        return Path(value).expanduser().absolute()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser().absolute() / "graphrt"


def models_dir() -> Path:
    """The folder that `graphrt pull` fills, one directory a model."""
    return home() / "models"


def directory_name(name: str) -> str:
    """The folder name that stands for a model name: "owner/name" becomes "owner--name"."""
    return name.replace("/", "--")


def list_models() -> list[str]:
    """Names of the models on disk, sorted."""
    root = models_dir()
    if not root.is_dir():
        return []
    found = (p.name for p in root.iterdir() if not p.name.startswith(".") and (p / "config.json").is_file())
    return sorted(name.replace("--", "/", 1) for name in found)


def find_model(name_or_path: str | Path) -> Path:
    """The directory of a model given by path or by the name it was pulled under.

    ModelError, listing what is on disk and what can be fetched, when there is none.
    """
    text = str(name_or_path)
    path = Path(text).expanduser()
    if text and (path / "config.json").is_file():
        return path.absolute()
    explicit = isinstance(name_or_path, Path) or text.startswith((".", "/", "~"))
    pulled = models_dir() / directory_name(text)
    if text and not explicit and (pulled / "config.json").is_file():
        return pulled
    if path.is_file():
        raise ModelError(f"{text} is a file, not a model directory: convert it with 'graphrt pull {text}'")
    if text and (explicit or path.is_dir()):
        what = "has no config.json" if path.is_dir() else "does not exist"
        raise ModelError(f"model directory {text} {what}")
    if text in CATALOG:
        raise ModelError(f"model {text} is not on this machine: run 'graphrt pull {text}'")
    on_disk = ", ".join(list_models()) or "none"
    known = ", ".join(CATALOG)
    raise ModelError(f"no model {text!r}; on disk: {on_disk}; to fetch with 'graphrt pull NAME': {known}")
