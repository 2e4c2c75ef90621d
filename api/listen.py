"""Claims the port before anything slow starts, with an error that says what is in the way."""

from __future__ import annotations

import errno
import socket

from graphrt.errors import ConfigError, GraphrtError


def in_use(host: str, port: int) -> GraphrtError:
    """The error for a port that somebody else listens on."""
    return GraphrtError(f"port {port} on {host} is in use: stop what listens there, or choose another with --port")


def bind(host: str, port: int) -> socket.socket:
    """A TCP socket bound to the address, not listening yet: clients are refused until the server is ready.

    Raises `GraphrtError` when the port is taken or not allowed, `ConfigError` when `host` is no address of this machine.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"host {host!r} cannot be resolved: {error}") from None
    family, kind, protocol, _, address = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise in_use(host, port) from None
        if error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(f"host {host} is not an address of this machine") from None
        if error.errno in (errno.EACCES, errno.EPERM):
            raise GraphrtError(f"port {port} on {host} is not allowed to this user: choose one above 1023") from None
        raise GraphrtError(f"cannot bind port {port} on {host}: {error.strerror}") from None
    sock.setblocking(False)
    return sock
