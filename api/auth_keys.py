"""API keys from files: one key a line, with a name and limits of its own where wanted.

    # comment
    sk-0123456789abcdef
    alice:sk-0123456789abcdee
    bob sk-0123456789abcded concurrency=4 rpm=60

A key is kept only as its SHA-256, and no message ever shows one.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from graphrt.errors import ConfigError

log = logging.getLogger("graphrt.api")

MIN_KEY_CHARS = 8
MAX_KEY_CHARS = 512
MAX_FILE_BYTES = 4 << 20
MAX_LIMIT = 1_000_000
_NAME = re.compile(r"[A-Za-z0-9_.@-]{1,64}")
_KEY = re.compile(r"[\x21-\x7e]+")
_OPTIONS = ("concurrency", "rpm")


@dataclass(frozen=True)
class ApiKey:
    """`digest` is the key's SHA-256. Limits that are None are the server's defaults; 0 lifts them."""

    name: str
    digest: bytes
    concurrency: int | None = None  # requests at once
    rpm: int | None = None  # requests a minute


class KeyTable:
    """All keys of a server. `find` takes as long for a wrong key as for a right one."""

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        self.keys = tuple(keys)

    def find(self, presented: str) -> ApiKey | None:
        """The key that a client presents, if it is one."""
        digest = _digest(presented)
        found = None
        for key in self.keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found


def read_key_files(paths: Sequence[Path]) -> KeyTable:
    """The keys of all files together. ConfigError for a file that cannot be read or a line that is wrong; a file that
    others may read is warned of.
    """
    keys: list[ApiKey] = []
    places: dict[str, str] = {}
    digests: dict[bytes, str] = {}
    for path in paths:
        for where, key in _parse(_read(path), str(path)):
            if key.name in places:
                raise ConfigError(f"{where}: the name {key.name} is that of {places[key.name]} already")
            if key.digest in digests:
                raise ConfigError(f"{where}: the key is the same as that of {digests[key.digest]}")
            places[key.name] = digests[key.digest] = where
            keys.append(key)
    if not keys:
        raise ConfigError(f"{', '.join(map(str, paths))}: no keys, so nobody could use this server")
    return KeyTable(keys)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def _read(path: Path) -> str:
    try:
        state = path.stat()
        if state.st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{path} has {state.st_size} bytes: a file of API keys has at most {MAX_FILE_BYTES}")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the API keys {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"the API keys {path} are not UTF-8 text") from None
    if stat.S_ISREG(state.st_mode) and state.st_mode & stat.S_IRWXO:
        log.warning("the API keys %s are open to every user of this machine: chmod o= %s", path, path)
    return text


def _parse(text: str, path: str) -> Iterator[tuple[str, ApiKey]]:
    for number, line in enumerate(text.splitlines(), 1):
        where = f"{path}, line {number}"
        words = line.split()
        if words and not words[0].startswith("#"):
            yield where, _key(words, where)


def _key(words: list[str], where: str) -> ApiKey:
    options = [word for word in words if word.partition("=")[0] in _OPTIONS and "=" in word]
    rest = [word for word in words if word not in options]
    if len(rest) == 1:
        name, _, secret = rest[0].rpartition(":")
    elif len(rest) == 2:
        name, secret = rest
    else:
        form = "KEY, NAME:KEY or NAME KEY, then concurrency=N and rpm=N"
        raise ConfigError(f"{where}: {len(rest)} words beside the limits: a line is {form}")
    if not MIN_KEY_CHARS <= len(secret) <= MAX_KEY_CHARS:
        raise ConfigError(
            f"{where}: the key has {len(secret)} characters: must be from {MIN_KEY_CHARS} to {MAX_KEY_CHARS}"
        )
    if not _KEY.fullmatch(secret):
        raise ConfigError(f"{where}: the key holds a character that is not printable ASCII")
    if name and not _NAME.fullmatch(name):  # not shown: with the two swapped it would be the key
        raise ConfigError(f"{where}: the name must be at most 64 letters, digits and any of _ . @ -")
    digest = _digest(secret)
    limits = _limits(options, where)
    return ApiKey(name or f"key-{digest.hex()[:8]}", digest, limits.get("concurrency"), limits.get("rpm"))


def _limits(options: list[str], where: str) -> dict[str, int]:
    limits: dict[str, int] = {}
    for option in options:
        name, _, value = option.partition("=")
        if name in limits:
            raise ConfigError(f"{where}: {name} is given twice")
        if not value.isdecimal() or int(value) > MAX_LIMIT:
            raise ConfigError(f"{where}: {name} must be a number from 0 (no limit) to {MAX_LIMIT}")
        limits[name] = int(value)
    return limits
