"""Device memory that kernels keep between launches: counters that each launch leaves as it found them, and partial results.

Zeroed once, shared by all launches of a kernel whatever their sizes, and as large as the largest of them asked for.
"""

from __future__ import annotations

import numpy as np

from graphrt.kernels.array import Array
from graphrt.kernels.cuda.arena import Allocator


class Workspaces:
    """One block of words by kernel. grown: how often one was too small outside of a dry pass."""

    def __init__(self, allocator: Allocator) -> None:
        self._allocator = allocator
        self._blocks: dict[str, Array] = {}
        self._wanted: dict[str, int] = {}
        self._dry = False
        self.grown = 0

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(block.nbytes for block in self._blocks.values())

    def begin_dry(self) -> None:
        """From now on only note what is asked for."""
        self._dry = True

    def end_dry(self) -> None:
        """Allocate what was asked for."""
        self._dry = False
        for name, words in self._wanted.items():
            if name not in self._blocks or self._blocks[name].shape[0] < words:
                self._blocks[name] = self._allocator.alloc((words,), np.uint32)

    def take(self, name: str, words: int) -> Array:
        """[at least `words`] uint32. DeviceError inside a capture when there is no such block yet."""
        self._wanted[name] = max(self._wanted.get(name, 0), words)
        block = self._blocks.get(name)
        if block is not None and block.shape[0] >= words:
            return block
        if self._dry:
            return Array(256, (words,), np.dtype(np.uint32), (4,), None)
        block = self._blocks[name] = self._allocator.alloc((self._wanted[name],), np.uint32)
        self.grown += 1
        return block
