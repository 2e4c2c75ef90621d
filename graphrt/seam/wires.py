"""What joins a server and its engine: two rings with doorbells, and a pipe that breaks when the server is gone."""

from __future__ import annotations

import os

import msgspec

from graphrt.seam.doorbell import Doorbell, create_doorbell_fd
from graphrt.seam.ring import Ring, create_ring_memory


class WireFds(msgspec.Struct, frozen=True):
    """File descriptors of one end of the seam, as they are inherited. `alive_fd` reads end-of-file without a server."""

    capacity: int  # bytes of each ring
    to_engine_memory: int
    to_engine_bell: int
    from_engine_memory: int
    from_engine_bell: int
    alive_fd: int

    def all(self) -> tuple[int, ...]:
        return (
            self.to_engine_memory,
            self.to_engine_bell,
            self.from_engine_memory,
            self.from_engine_bell,
            self.alive_fd,
        )

    def duplicate(self) -> WireFds:
        """The same ends under new descriptors, for an engine in this process."""
        return WireFds(self.capacity, *(os.dup(fd) for fd in self.all()))


class Channel:
    """One direction, one side: a ring and its doorbell."""

    __slots__ = ("bell", "empty", "recv", "ring")

    def __init__(self, capacity: int, memory_fd: int, bell_fd: int) -> None:
        self.ring = Ring(memory_fd, capacity)
        self.bell = Doorbell(self.ring, bell_fd)
        self.empty = self.ring.empty
        self.recv = self.ring.pop

    def send(self, payload: bytes) -> bool:
        """Push and wake the consumer. False when the ring is full; `MessageTooLarge` when it never fits."""
        if not self.ring.push(payload):
            return False
        self.bell.notify()
        return True

    def try_sleep(self) -> bool:
        """Arm the doorbell. False, and disarmed again, when a message came in meanwhile."""
        self.bell.arm()
        if self.ring.empty():
            return True
        self.bell.disarm()
        return False

    def close(self) -> None:
        self.ring.close()
        self.bell.close()


class ServerWires:
    """The server's end: makes everything, owns all descriptors until `close_engine_side` and `close`."""

    def __init__(self, capacity: int) -> None:
        self._open: list[int] = []
        try:
            to_memory = self._keep(create_ring_memory(capacity))
            from_memory = self._keep(create_ring_memory(capacity))
            alive_read, alive_write = os.pipe()
            self._keep(alive_read)
            self._alive_write = alive_write
            try:
                self.tx = Channel(capacity, to_memory, create_doorbell_fd())
                self.rx = Channel(capacity, from_memory, create_doorbell_fd())
            except BaseException:
                os.close(alive_write)
                raise
        except BaseException:
            self.close_engine_side()
            raise
        self.engine_fds = WireFds(capacity, to_memory, self.tx.bell.fd, from_memory, self.rx.bell.fd, alive_read)

    def _keep(self, fd: int) -> int:
        self._open.append(fd)
        return fd

    def close_engine_side(self) -> None:
        """Close what only the engine needs; after it has inherited or duplicated `engine_fds`. Idempotent."""
        while self._open:
            os.close(self._open.pop())

    def hang_up(self) -> None:
        """Break the pipe: the engine sees the server as gone. Idempotent."""
        if self._alive_write >= 0:
            os.close(self._alive_write)
            self._alive_write = -1

    def close(self) -> None:
        """Close and unmap everything. Idempotent."""
        self.close_engine_side()
        self.hang_up()
        self.tx.close()
        self.rx.close()
