"""The engine's side of the seam: what the engine loop polls, waits on and sends to."""

from __future__ import annotations

import os
import select

import msgspec

from graphrt.seam.records import FromEngine, ToEngine
from graphrt.seam.wires import Channel, WireFds

_FULL_NAP_MS = 1


class EngineEndpoint:
    """Used by one thread, the engine loop; only `request_terminate` may be called from elsewhere.

    `terminate_requested` turns True on SIGTERM: the engine should finish promptly, without waiting for its requests.
    """

    def __init__(self, fds: WireFds) -> None:
        """Take over the descriptors in `fds`."""
        self.terminate_requested = False
        self._rx = Channel(fds.capacity, fds.to_engine_memory, fds.to_engine_bell)
        self._tx = Channel(fds.capacity, fds.from_engine_memory, fds.from_engine_bell)
        os.close(fds.to_engine_memory)
        os.close(fds.from_engine_memory)
        self._alive_fd = fds.alive_fd
        self._decode = msgspec.msgpack.Decoder(ToEngine).decode
        self._encode = msgspec.msgpack.Encoder().encode
        self._push, self._notify = self._tx.ring.push, self._tx.bell.notify
        self._empty = self._rx.empty
        self._gone = select.poll()
        self._gone.register(fds.alive_fd, select.POLLIN)
        self._wakeable = select.poll()
        self._wakeable.register(fds.alive_fd, select.POLLIN)
        self._wakeable.register(fds.to_engine_bell, select.POLLIN)

    def poll(self) -> list[ToEngine]:
        """All records that wait, oldest first. Never blocks; one memory read when there are none."""
        if self._empty():
            return []
        records: list[ToEngine] = []
        while (payload := self._rx.recv()) is not None:
            records.append(self._decode(payload))
        return records

    def wait(self, timeout_s: float | None) -> None:
        """Sleep, with the GIL released, until a record waits, the server is gone, `request_terminate` or the timeout.

        May return early for none of these. Resolution 1 ms, rounded up; None waits without limit.
        """
        if not self._empty() or not self._rx.try_sleep():
            return
        try:
            self._wakeable.poll(None if timeout_s is None else max(0.0, timeout_s) * 1000)
        finally:
            self._rx.bell.disarm()

    def send(self, record: FromEngine) -> None:
        """Hand a record to the server; waits while the ring is full. `SystemExit` when the server is gone.

        Raises `graphrt.seam.ring.MessageTooLarge` for a record larger than the ring.
        """
        payload = self._encode(record)
        while not self._push(payload):
            if self._gone.poll(_FULL_NAP_MS):
                raise SystemExit("the server is gone")
        self._notify()

    def server_alive(self) -> bool:
        """False once the server has ended or has hung up."""
        return not self._gone.poll(0)

    def request_terminate(self) -> None:
        """Set `terminate_requested` and cut a `wait` short. Safe in a signal handler and from other threads."""
        self.terminate_requested = True
        self._rx.bell.wake()

    def close(self) -> None:
        """Unmap the rings and close the descriptors."""
        self._rx.close()
        self._tx.close()
        if self._alive_fd >= 0:
            os.close(self._alive_fd)
            self._alive_fd = -1
