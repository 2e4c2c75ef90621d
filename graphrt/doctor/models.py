"""The models on disk and whether they are whole."""

from __future__ import annotations

import shlex
from pathlib import Path

from graphrt.catalog import CATALOG, DEFAULT_MODEL
from graphrt.config import load_config
from graphrt.doctor.check import Check, gib
from graphrt.errors import GraphrtError
from graphrt.paths import find_model, list_models
from graphrt.weights import open_checkpoint, verify_checkpoint

_HASH_UP_TO = 2 << 30  # bytes; hashing more would make the doctor slow


def checks() -> list[Check]:
    """One line a model. Without any, one that says how to get the default model."""
    names = list_models()
    if not names:
        return [Check("models", "optional", f"none on disk; serve fetches {DEFAULT_MODEL}", "graphrt pull")]
    return [model(name, find_model(name)) for name in names]


def model(name: str, folder: Path) -> Check:
    """Whether the files of one model can be read, and match their recorded hashes where there are any."""
    label = f"model {name}"
    try:
        architecture = load_config(folder).architecture
        size = open_checkpoint(folder).nbytes
        about = f"{architecture}, {gib(size)}"
        if size > _HASH_UP_TO:
            return Check(label, "ok", f"{about}, hashes not compared", f"graphrt pull --verify {shlex.quote(name)}")
        verified = verify_checkpoint(folder)
    except (GraphrtError, OSError) as error:
        return Check(label, "optional", f"broken: {error}", _again(name, folder))
    return Check(label, "ok", f"{about}, {'sha256 verified' if verified else 'no recorded hash'}")


def _again(name: str, folder: Path) -> str:
    remove = f"rm -r {shlex.quote(str(folder))}"
    return f"{remove} && graphrt pull {shlex.quote(name)}" if name in CATALOG or "/" in name else remove
