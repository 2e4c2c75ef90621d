"""The host's side of the token ring: what a step produced, read by polling its step number."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from graphrt.errors import DeviceError
from graphrt.kernels import abi
from graphrt.kernels.array import Array

SPINS = 200  # looks at the record between two questions to the device: some 10 µs
SPIN_S = 2e-3  # after which the wait sleeps in between
NAP_S = 50e-6


class TokenRow(NamedTuple):
    """One row of a step's record; `slot` is `abi.PAD` for a row that produced nothing."""

    slot: int
    serial: int
    token: int
    flag: int


class TokenReader:
    """Reads the records of steps 1, 2, 3, ... in order."""

    def __init__(self, ring: Array, logprobs: Array, stamps: Array, poll: Callable[[], None] | None = None) -> None:
        """ring: [depth, words] uint32, logprobs: [depth, samples, LOGPROB_WORDS] uint32, stamps: [depth, 2] uint64; the host can read them.

        poll: called now and then while a step is awaited; raises when the device has failed.
        """
        self._poll = poll
        self._entries = [memoryview(row).cast("B").cast("i") for row in ring.np]
        self._logprobs = logprobs.np
        self._stamps = stamps.np.reshape(-1).data.cast("B").cast("Q")

    def ready(self, step: int) -> bool:
        """Whether the record of this step is complete."""
        return (self._entries[step % len(self._entries)][0] & 0xFFFFFFFF) == step

    def read(self, step: int, timeout_s: float) -> list[TokenRow]:
        """The rows of a step, waiting for it. DeviceError when it does not come in time: a hung kernel raises nothing itself."""
        entry = self._entries[step % len(self._entries)]
        if not self.ready(step):
            self._wait(step, timeout_s)
        words = entry[abi.RECORD_HEADER : abi.RECORD_HEADER + entry[1] * abi.TOKEN_WORDS].tolist()
        return [
            TokenRow(words[i], words[i + 1] & 0xFFFFFFFF, words[i + 2], words[i + 3]) for i in range(0, len(words), 4)
        ]

    def _wait(self, step: int, timeout_s: float) -> None:
        """Watch the record closely for a while, then from time to time: most steps are shorter than the first stretch."""
        entry = self._entries[step % len(self._entries)]
        word = step if step < 1 << 31 else step - (1 << 32)
        start = time.monotonic()
        while True:
            for _ in range(SPINS):
                if entry[0] == word:
                    return
            if self._poll is not None:
                self._poll()
                if entry[0] == word:
                    return
            waited = time.monotonic() - start
            if waited > timeout_s:
                raise DeviceError(f"step {step} did not finish within {timeout_s:g} s: the device hangs")
            if waited > SPIN_S:
                time.sleep(NAP_S)

    def logprobs(self, step: int, sample: int) -> tuple[float, int, list[int], list[float]]:
        """(log-probability, rank, the likeliest tokens, theirs) of a sample of a step that was read and is still in the ring."""
        entry = self._logprobs[step % len(self._entries), sample]
        values = entry.view(np.float32)
        top = slice(2, 2 + abi.MAX_LOGPROBS)
        return float(values[0]), int(entry[1]), entry[top].tolist(), values[2 + abi.MAX_LOGPROBS :].tolist()

    def idle_us(self, step: int) -> float | None:
        """µs for which the device had nothing to do before this step, which was read last; None for the first."""
        depth = len(self._entries)
        end, start = self._stamps[(step - 1) % depth * 2 + 1], self._stamps[step % depth * 2]
        return (start - end) / 1e3 if 0 < end <= start else None

    def device_us(self, step: int) -> float:
        """µs between the beginning of a step's first kernel and the end of its last."""
        at = step % len(self._entries) * 2
        return (self._stamps[at + 1] - self._stamps[at]) / 1e3
