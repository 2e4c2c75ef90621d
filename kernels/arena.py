"""A bump allocator for a step's temporaries: the same calls in the same order give the same addresses.

A captured graph bakes addresses in, so temporaries come from one block sized by the largest step and aliased by all. `grown` counts the
times it was too small; after the first run of every step size it must not change.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from graphrt.kernels.array import Array, host_array

ALIGN = 64  # bytes: a cache line, and a full AVX-512 register


class Arena:
    """Host memory handed out from the bottom up; `reset` takes all back."""

    def __init__(self) -> None:
        self._chunks: list[NDArray[np.uint8]] = []
        self._chunk = 0
        self._offset = 0
        self._views: dict[tuple[int, int, tuple[int, ...], str], Array] = {}
        self.grown = 0

    def reset(self) -> None:
        """Forget all temporaries."""
        self._chunk = self._offset = 0

    @contextmanager
    def frame(self) -> Iterator[None]:
        """Temporaries taken inside are given back at the end."""
        mark = self._chunk, self._offset
        try:
            yield
        finally:
            self._chunk, self._offset = mark

    def take(self, shape: tuple[int, ...], dtype: DTypeLike = np.float32) -> Array:
        """An uninitialised array of this shape, valid until the frame or the step ends."""
        dt: np.dtype[Any] = np.dtype(dtype)
        size = dt.itemsize
        for extent in shape:
            size *= extent
        size = (size + ALIGN - 1) // ALIGN * ALIGN
        while self._chunk < len(self._chunks) and self._offset + size > len(self._chunks[self._chunk]):
            self._chunk, self._offset = self._chunk + 1, 0
        if self._chunk == len(self._chunks):
            raw = np.empty(max(size, 1 << 20) + ALIGN, np.uint8)
            skip = -raw.ctypes.data % ALIGN
            self._chunks.append(raw[skip : len(raw) - ALIGN + skip])
            self.grown += 1
        key = (self._chunk, self._offset, shape, dt.char)
        view = self._views.get(key)
        if view is None:
            count = int(np.prod(shape, dtype=np.int64))
            raw = self._chunks[self._chunk][self._offset :][: count * dt.itemsize]
            view = self._views[key] = host_array(raw.view(dt).reshape(shape))
        self._offset += size
        return view

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(len(c) for c in self._chunks)

    def poison(self) -> None:
        """Fill everything with NaN: a test's way to see that no step reads what it did not write."""
        for chunk in self._chunks:
            chunk[: len(chunk) // 4 * 4].view(np.float32)[:] = np.nan
