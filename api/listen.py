"""Claims the port before anything slow starts, with an error that says what is in the way; what sockets are set to."""

from __future__ import annotations

import errno
import resource
import select
import socket

from graphrt.errors import ConfigError, GraphrtError

# Connections inherit these: a client whose machine is gone is noticed though it never says so.
_KEEP_ALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),  # seconds
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)


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
        for level, option, value in _KEEP_ALIVE:
            sock.setsockopt(level, option, value)
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


def peer_left(sock: socket.socket) -> bool:
    """Whether the other end of a connection has ended its side, however much of what it sent is still unread."""
    poll = select.poll()
    poll.register(sock.fileno(), select.POLLRDHUP)
    return bool(poll.poll(0))


def raise_open_files() -> int:
    """Allow this process as many open files, so connections, as it may ask for; how many that are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
