"""The keys in force, and their replacement while the server runs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from graphrt.api.auth_keys import ApiKey, KeyTable, read_key_files
from graphrt.errors import ConfigError

log = logging.getLogger("graphrt.api")


class KeyRing:
    """Reads `paths` at once (ConfigError); without paths everybody is let in."""

    def __init__(self, paths: Sequence[Path] = ()) -> None:
        self._paths = tuple(paths)
        self._table = read_key_files(self._paths) if self._paths else KeyTable(())

    @property
    def required(self) -> bool:
        """Whether a request needs a key."""
        return bool(self._paths)

    @property
    def names(self) -> list[str]:
        """Of all keys."""
        return [key.name for key in self._table.keys]

    def find(self, presented: str) -> ApiKey | None:
        """The key that a client presents, if it is one."""
        return self._table.find(presented)

    def reload(self) -> bool:
        """Read the files again. When they are broken the keys stay as they are, and the log says why; False then."""
        try:
            table = read_key_files(self._paths)
        except ConfigError as error:
            log.error("the API keys were not reloaded, the old ones stay in force: %s", error)
            return False
        self._table = table
        log.info("API keys reloaded: %d", len(table.keys))
        return True
