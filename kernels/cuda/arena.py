"""The step's temporaries on a device: a bump allocator over one block, aliased by the graphs of all sizes.

A dry pass over every step measures how much the largest takes before anything is allocated; after that the same calls give the same
addresses, which captures bake in.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import numpy as np
from numpy.typing import DTypeLike

from graphrt.kernels.array import Array

ALIGN = 256  # bytes, as an allocation of its own would have


class Allocator(Protocol):
    """Where the block comes from."""

    def alloc(self, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        """Device memory."""


class DeviceArena:
    """Device memory handed out from the bottom up; `reset` takes all back. grown: how often the block was too small."""

    def __init__(self, allocator: Allocator) -> None:
        self._allocator = allocator
        self._block: Array | None = None
        self._offset = self._high = 0
        self._dry = False
        self.grown = 0

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return 0 if self._block is None else self._block.nbytes

    @property
    def block(self) -> Array | None:
        """All of it, as bytes: for tests that poison it."""
        return self._block

    def reset(self) -> None:
        """Forget all temporaries."""
        self._offset = 0

    @contextmanager
    def frame(self) -> Iterator[None]:
        """Temporaries taken inside are given back at the end."""
        mark = self._offset
        try:
            yield
        finally:
            self._offset = mark

    @contextmanager
    def dry(self) -> Iterator[None]:
        """Inside, temporaries are places without memory; afterwards the block is as large as the most that was taken at once."""
        self._dry, self._offset, self._high = True, 0, self.nbytes
        try:
            yield
        finally:
            self._dry, self._offset = False, 0
        if self._high > self.nbytes:
            self._block = self._allocator.alloc((self._high,), np.uint8)

    def take(self, shape: tuple[int, ...], dtype: DTypeLike = np.float32) -> Array:
        """An uninitialised array of this shape, valid until the frame or the step ends.

        Outside of a dry pass a block that is too small is replaced by a larger one; DeviceError inside a capture.
        """
        dt = np.dtype(dtype)
        size = int(np.prod(shape, dtype=np.int64)) * dt.itemsize
        start, self._offset = self._offset, self._offset + -(-size // ALIGN) * ALIGN
        if self._dry:
            self._high = max(self._high, self._offset)
            return Array(ALIGN + start, shape, dt, _contiguous(shape, dt.itemsize), None)
        if self._block is None or self._offset > self._block.nbytes:
            # Views of the old block keep it alive for as long as they are used.
            self._block = self._allocator.alloc((max(2 * self._offset, 1 << 20),), np.uint8)
            self.grown += 1
        return Array(self._block.ptr + start, shape, dt, _contiguous(shape, dt.itemsize), self._block.owner)


def _contiguous(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    strides = []
    for extent in reversed(shape):
        strides.append(itemsize)
        itemsize *= extent
    return tuple(reversed(strides))
