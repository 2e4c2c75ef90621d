"""The host's side of the token ring: what a step produced, read by polling its step number."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

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


class Columns(NamedTuple):
    """All rows of a step at once: unsigned 64 bits `slot | serial << 32`, unsigned 32 bits `token` and `flag`.

    Memoryviews compare at a nanosecond a row; a Python integer a word would cost twenty.
    """

    keys: memoryview
    tokens: memoryview
    flags: memoryview


class TokenReader:
    """Reads the records of steps 1, 2, 3, ... in order."""

    def __init__(self, ring: Array, logprobs: Array, stamps: Array, poll: Callable[[], None] | None = None) -> None:
        """ring: [depth, words] uint32, logprobs: [depth, samples, LOGPROB_WORDS] uint32, stamps: [depth, 2] uint64; the host can read them.

        poll: called now and then while a step is awaited; raises when the device has failed.
        """
        self._poll = poll
        self._depth = ring.shape[0]
        raw = [memoryview(row).cast("B") for row in ring.np]
        self._entries = [entry.cast("I") for entry in raw]
        self._pairs = [entry.cast("Q") for entry in raw]  # the header, then two a row
        self._columns: dict[int, list[Columns]] = {}  # by number of rows
        flat = logprobs.np.reshape(-1).data.cast("B")
        self._samples, self._words = logprobs.shape[1], flat.cast("I")
        self._values = flat.cast("f")
        self._stamps = stamps.np.reshape(-1).data.cast("B").cast("Q")

    def ready(self, step: int) -> bool:
        """Whether the record of this step is complete."""
        return self._entries[step % self._depth][0] == step

    def read(self, step: int, timeout_s: float) -> list[TokenRow]:
        """`wait`, then `rows`."""
        self.wait(step, timeout_s)
        return self.rows(step)

    def wait(self, step: int, timeout_s: float) -> None:
        """Until the record of a step is complete. DeviceError when it does not come in time: a hung kernel raises nothing itself."""
        entry = self._entries[step % self._depth]
        if entry[0] != step:
            self._wait(entry, step, timeout_s)

    def rows(self, step: int) -> list[TokenRow]:
        """The rows of a step whose record is complete."""
        entry = self._entries[step % self._depth]
        words = entry[abi.RECORD_HEADER : abi.RECORD_HEADER + entry[1] * abi.TOKEN_WORDS].tolist()
        return [
            TokenRow(words[i] - (words[i] >> 31 << 32), words[i + 1], words[i + 2], words[i + 3])
            for i in range(0, len(words), abi.TOKEN_WORDS)
        ]

    def columns(self, step: int, rows: int) -> Columns:
        """The first `rows` rows of a step whose record is complete, as views of it: overwritten `depth` steps later."""
        if rows not in self._columns:
            first, end = abi.RECORD_HEADER, abi.RECORD_HEADER + rows * abi.TOKEN_WORDS
            self._columns[rows] = [
                Columns(
                    pairs[first // 2 : end // 2 : abi.TOKEN_WORDS // 2],
                    words[first + 2 : end : abi.TOKEN_WORDS],
                    words[first + 3 : end : abi.TOKEN_WORDS],
                )
                for words, pairs in zip(self._entries, self._pairs, strict=True)
            ]
        return self._columns[rows][step % self._depth]

    def _wait(self, entry: memoryview, step: int, timeout_s: float) -> None:
        """Watch the record closely for a while, then from time to time: most steps are shorter than the first stretch."""
        start = time.monotonic()
        while True:
            for _ in range(SPINS):
                if entry[0] == step:
                    return
            if self._poll is not None:
                self._poll()
                if entry[0] == step:
                    return
            waited = time.monotonic() - start
            if waited > timeout_s:
                raise DeviceError(f"step {step} did not finish within {timeout_s:g} s: the device hangs")
            if waited > SPIN_S:
                time.sleep(NAP_S)

    def logprobs(self, step: int, sample: int, count: int) -> tuple[float, int, Sequence[int], Sequence[float]]:
        """(log-probability, rank, the `count` likeliest tokens, theirs) of a sample of a step that was read and is still in the ring."""
        at = (step % self._depth * self._samples + sample) * abi.LOGPROB_WORDS
        tokens, values = at + 2, at + 2 + abi.MAX_LOGPROBS
        return (
            self._values[at],
            self._words[at + 1],
            self._words[tokens : tokens + count].tolist(),
            self._values[values : values + count].tolist(),
        )

    def idle_us(self, step: int) -> float | None:
        """µs for which the device had nothing to do before this step, which was read last; None for the first."""
        end, start = self._stamps[(step - 1) % self._depth * 2 + 1], self._stamps[step % self._depth * 2]
        return (start - end) / 1e3 if 0 < end <= start else None

    def device_us(self, step: int) -> float:
        """µs between the beginning of a step's first kernel and the end of its last."""
        at = step % self._depth * 2
        return (self._stamps[at + 1] - self._stamps[at]) / 1e3
