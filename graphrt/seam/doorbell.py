"""The wake-up of a sleeping consumer: an eventfd, written only when the consumer has said that it sleeps.

The producer stores the message, then reads the flag; the consumer stores the flag, then looks at the ring again. At
least one of the two sees the other's store if each keeps its store before its load, which needs a full fence. Taking
a lock is one on x86 (a locked instruction). Elsewhere it is not, and there the producer rings every time.
"""

from __future__ import annotations

import contextlib
import os
import platform
import threading

from graphrt.seam.ring import SLEEPS_WORD, Ring


class Doorbell:
    """One side's handle on the doorbell of `ring`: `notify` is the producer's, `arm` and `disarm` are the consumer's.

    `fd` is the eventfd (readable when rung), owned by this object. `always` rings whether the consumer sleeps or not;
    by default it does so only on machines where a lock is no full fence.
    """

    __slots__ = ("_always", "_fence", "_unfence", "_words", "fd")

    def __init__(self, ring: Ring, fd: int, *, always: bool | None = None) -> None:
        self._words = ring.words
        lock = threading.Lock()
        self._fence, self._unfence = lock.acquire, lock.release  # a `with` costs a tenth of a microsecond more
        self._always = platform.machine() not in ("x86_64", "AMD64") if always is None else always
        self.fd = fd

    def notify(self) -> None:
        """Wake the consumer if it sleeps; to be called after each push."""
        self._fence()  # between the ring's tail and the flag
        self._unfence()
        if self._words[SLEEPS_WORD]:
            # Cleared before ringing: a consumer that armed again in between is woken for nothing, never forgotten.
            self._words[SLEEPS_WORD] = 0
        elif not self._always:
            return
        os.eventfd_write(self.fd, 1)

    def arm(self) -> None:
        """Say that the consumer is about to sleep. It must look at the ring once more before it does."""
        self._words[SLEEPS_WORD] = 1
        self._fence()  # between the flag and the look at the ring
        self._unfence()

    def disarm(self) -> None:
        """Say that the consumer is awake, and take in the ringing there may have been."""
        self._words[SLEEPS_WORD] = 0
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)

    def wake(self) -> None:
        """Ring without condition: the consumer's own way to cut its sleep short, from a signal handler or a thread."""
        os.eventfd_write(self.fd, 1)

    def close(self) -> None:
        """Close the eventfd. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def create_doorbell_fd() -> int:
    """A non-blocking eventfd that the caller owns."""
    return os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
