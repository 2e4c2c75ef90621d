"""HTTPS from a certificate and its key, checked before anything slow starts."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

from graphrt.errors import ConfigError

log = logging.getLogger("graphrt.api")


class _Encrypted(Exception):
    """The key asks for a password."""


def make_context(cert: Path, key: Path) -> ssl.SSLContext:
    """For TLS 1.2 and later. `cert` may hold a chain, the server's own certificate first. ConfigError says what is wrong."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    _load(context, cert, key)
    return context


def reload(context: ssl.SSLContext, cert: Path, key: Path) -> bool:
    """Let new connections use what the files hold now; when that is broken, what was before. False then."""
    try:
        make_context(cert, key)  # the one in use must not be left with a certificate and another one's key
        _load(context, cert, key)
    except ConfigError as error:
        log.error("the TLS certificate was not reloaded, the old one stays in force: %s", error)
        return False
    log.info("TLS certificate reloaded from %s", cert)
    return True


def _load(context: ssl.SSLContext, cert: Path, key: Path) -> None:
    _check_pem(cert, "certificate", "CERTIFICATE-----")
    _check_pem(key, "key", "PRIVATE KEY-----")

    def ask() -> str:
        raise _Encrypted

    try:
        context.load_cert_chain(cert, key, ask)
    except _Encrypted:
        text = f"the TLS key {key} is encrypted: give one without a password (openssl pkey -in {key} -out plain.pem)"
        raise ConfigError(text) from None
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            text = (
                f"the TLS key {key} is not that of the certificate {cert}: the first in the file must be the server's"
            )
            raise ConfigError(text) from None
        text = f"the TLS certificate {cert} with the key {key} cannot be used: {error.reason or error}"
        raise ConfigError(text) from None


def _check_pem(path: Path, what: str, mark: str) -> None:
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"the TLS {what} {path} cannot be read: {error.strerror}") from None
    if mark.encode() not in text:
        raise ConfigError(f"the TLS {what} {path} holds no -----BEGIN ... {mark}: it must be in PEM form")
