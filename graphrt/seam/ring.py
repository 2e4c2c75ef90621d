"""A byte ring in shared memory for one producer and one consumer, in different processes or threads.

Layout: one header page, then `capacity` bytes. Head and tail are 64-bit counts of bytes since the start (never wrapped),
each alone in its cache line. A message is one 64-bit word (length, crc32) and its payload, padded to 8 bytes, so that
the word never wraps and is stored in one piece; a payload that meets the end goes on at the beginning.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from zlib import crc32

from graphrt.errors import GraphrtError

HEADER_BYTES = 4096
DEFAULT_CAPACITY = 4 << 20  # a prompt of 128k tokens is about 640 kB
SLEEPS_WORD = 16  # set by the consumer, see doorbell.py

_HEAD_WORD = 0
_TAIL_WORD = 8
_SALT = 0xFFFFFFFF  # of position >> 3, where the checksum starts: an intact message of the previous lap must not pass
_READ_TRIES = 400
_READ_NAP_S = 50e-6


class RingCorrupt(GraphrtError):
    """A message whose checksum stays wrong: something else wrote into the ring."""


class MessageTooLarge(GraphrtError):
    """A message that the ring could not hold even when empty."""


def create_ring_memory(capacity: int) -> int:
    """Anonymous shared memory for `Ring(fd, capacity)`, as a file descriptor that the caller owns. No name, no leak."""
    _check_capacity(capacity)
    fd = os.memfd_create("graphrt-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, HEADER_BYTES + capacity)
        # A peer that shrank the file would turn our next access into a SIGBUS.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except BaseException:
        os.close(fd)
        raise
    return fd


class Ring:
    """One side of the ring behind the memory `fd` (kept open by the caller only until this returns).

    An instance is used either as producer (`push`) or as consumer (`pop`, `empty`), never both.
    """

    __slots__ = ("_capacity", "_head", "_map", "_mask", "_tail", "_words", "max_message")

    def __init__(self, fd: int, capacity: int) -> None:
        _check_capacity(capacity)
        self._capacity = capacity
        self._mask = capacity - 1
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE  # page faults now, not while serving
        self._map = mmap.mmap(fd, HEADER_BYTES + capacity, flags=flags)
        self._words = memoryview(self._map).cast("Q")
        self._head: int = self._words[_HEAD_WORD]
        self._tail: int = self._words[_TAIL_WORD]
        self.max_message = capacity - 8  # bytes

    @property
    def words(self) -> memoryview:
        """The whole mapping as unsigned 64-bit words (the doorbell's flag lives in the header page)."""
        return self._words

    def push(self, payload: bytes) -> bool:
        """Append a message. False when there is no room now; `MessageTooLarge` when there never will be."""
        size = len(payload)
        need = 8 + ((size + 7) & ~7)
        capacity, words, tail = self._capacity, self._words, self._tail
        if tail + need - self._head > capacity:
            self._head = words[_HEAD_WORD]
            if tail + need - self._head > capacity:
                if need > capacity:
                    raise MessageTooLarge(f"a message of {size} bytes does not fit a ring of {self.max_message} bytes")
                return False
        at = tail & self._mask
        words[(HEADER_BYTES + at) >> 3] = size | crc32(payload, tail >> 3 & _SALT) << 32
        start = HEADER_BYTES + ((at + 8) & self._mask)
        over = start + size - HEADER_BYTES - capacity  # bytes that go on at the beginning
        if over <= 0:
            self._map[start : start + size] = payload
        else:
            view = memoryview(payload)
            self._map[start : start + size - over] = view[: size - over]
            self._map[HEADER_BYTES : HEADER_BYTES + over] = view[size - over :]
        # Published last. Where stores may become visible out of order, the consumer's checksum makes it read again.
        self._tail = words[_TAIL_WORD] = tail + need
        return True

    def empty(self) -> bool:
        """True when there is nothing to pop: one memory read."""
        return self._words[_TAIL_WORD] == self._head

    def pop(self) -> bytes | None:
        """The oldest message, or None when there is none. `RingCorrupt` when its checksum stays wrong for some 20 ms."""
        head = self._head
        available = self._words[_TAIL_WORD] - head
        if not available:
            return None
        at = head & self._mask
        for attempt in range(_READ_TRIES):
            if attempt:
                time.sleep(_READ_NAP_S)
            word = self._words[(HEADER_BYTES + at) >> 3]
            size = word & 0xFFFFFFFF
            need = 8 + ((size + 7) & ~7)
            if need > available:
                continue
            start = HEADER_BYTES + ((at + 8) & self._mask)
            over = start + size - HEADER_BYTES - self._capacity
            payload: bytes = self._map[start : start + size]
            if over > 0:
                payload += self._map[HEADER_BYTES : HEADER_BYTES + over]
            if crc32(payload, head >> 3 & _SALT) == word >> 32:
                self._head = self._words[_HEAD_WORD] = head + need
                return payload
        raise RingCorrupt(f"the message at byte {head} of the ring has a wrong checksum")

    def close(self) -> None:
        """Unmap. Idempotent; the ring must not be used afterwards."""
        self._words.release()
        self._map.close()


def _check_capacity(capacity: int) -> None:
    if capacity < mmap.PAGESIZE or capacity & (capacity - 1) or capacity > 1 << 31:
        raise ValueError(f"ring capacity {capacity}: must be a power of two from {mmap.PAGESIZE} to {1 << 31}")
