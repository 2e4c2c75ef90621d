"""The host's side of the delta ring: the only way in which the host changes what steps see.

Edits gather in one record a step; `publish` writes the step number last, so that a step never sees half of them. Words are written through a
memoryview: this is on the path of every step, and a NumPy scalar assignment costs several times as much.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from graphrt.kernels import abi
from graphrt.kernels.abi import Field
from graphrt.kernels.array import Array

SLOT_STRUCT = struct.Struct("<iiiiI f i f f II fff i 8i iiiii 4I".replace(" ", ""))
assert SLOT_STRUCT.size == abi.SLOT.itemsize


class DeltaWriter:
    """Writes the records of steps 1, 2, 3, ... into their ring entries."""

    def __init__(self, ring: Array) -> None:
        """ring: [depth, words] uint32 memory that the host can write."""
        self._entries = [memoryview(row).cast("B").cast("I") for row in ring.np]
        self.step = 0  # the last published
        self._at = abi.RECORD_HEADER

    def patch(self, field: Field, offset: int, words: Sequence[int]) -> None:
        """Write `words` (int32 values) at a word offset of a field. ValueError when the record is full."""
        entry, at, n = self._entries[(self.step + 1) % len(self._entries)], self._at, len(words)
        if at + abi.PATCH_HEADER + n > len(entry):
            raise ValueError(f"delta record of {len(entry)} words is full: {field.name} wants {n} more")
        entry[at], entry[at + 1], entry[at + 2] = field, offset, n
        at += abi.PATCH_HEADER
        if n == 1:
            entry[at] = words[0] & 0xFFFFFFFF
        else:
            entry[at : at + n] = memoryview(struct.pack(f"<{n}i", *words)).cast("I")
        self._at = at + n

    def patch_slot(self, slot: int, packed: bytes) -> None:
        """Replace a slot's whole state by `SLOT_STRUCT`-packed bytes."""
        entry, at = self._entries[(self.step + 1) % len(self._entries)], self._at
        entry[at], entry[at + 1], entry[at + 2] = Field.SLOTS, slot * abi.SLOT_WORDS, abi.SLOT_WORDS
        at += abi.PATCH_HEADER
        entry[at : at + abi.SLOT_WORDS] = memoryview(packed).cast("I")
        self._at = at + abi.SLOT_WORDS

    def publish(self) -> int:
        """Close the record and return its step number. The step may be launched now."""
        step = (self.step + 1) & 0xFFFFFFFF
        entry = self._entries[step % len(self._entries)]
        entry[1] = self._at - abi.RECORD_HEADER
        entry[0] = step
        self.step = step
        self._at = abi.RECORD_HEADER
        return step
