"""Aligned memory, and slabs for weights.

A model has hundreds of matrices of a megabyte or less, too small for huge pages of their own; on small pages the same weights
stream 10 % slower. Slabs are large enough that NumPy asks the kernel for huge pages. A slab lives as long as any array in it.
"""

import threading

import numpy as np

LINE = 64


def aligned_zeros(nbytes: int) -> np.ndarray:
    """Zeroed uint8 [nbytes] that begins on a cache line."""
    raw = np.zeros(nbytes + LINE, np.uint8)
    skip = -raw.ctypes.data % LINE
    return raw[skip : skip + nbytes]


class Slabs:
    """Hands out uninitialised arrays, each beginning on a cache line, many of them from one allocation."""

    SLAB = 64 << 20

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free = np.empty(0, np.uint8)

    def take(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """A C-contiguous array of this shape and dtype."""
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        whole = -(-nbytes // LINE) * LINE
        with self._lock:
            if whole > self._free.size:
                # A matrix of a slab's size gets memory of its own and leaves the open slab open.
                raw = np.empty((whole if whole >= self.SLAB // 2 else self.SLAB) + LINE, np.uint8)
                raw = raw[-raw.ctypes.data % LINE :]
                if whole >= self.SLAB // 2:
                    return raw[:nbytes].view(dtype).reshape(shape)
                self._free = raw
            piece, self._free = self._free[:whole], self._free[whole:]
        return piece[:nbytes].view(dtype).reshape(shape)
