"""Device memory for a machine without a device: addresses that only the driver turns into arrays.

The one clever thing: allocations are known by address, so an argument that points outside of all of them, or into one that was freed, is
an error here where a GPU would read garbage.
"""

from __future__ import annotations

import bisect
import weakref
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from graphrt.errors import DeviceError
from graphrt.kernels.array import Array

ALIGN = 256  # bytes, as cuMemAlloc gives


class Memory:
    """What keeps an allocation; it is freed with the last array that refers to it."""

    def __init__(self, nbytes: int) -> None:
        raw = np.zeros(nbytes + ALIGN, np.uint8)
        skip = -raw.ctypes.data % ALIGN
        self.bytes = raw[skip : skip + nbytes]
        self.ptr = int(self.bytes.ctypes.data)


class FakeMemory:
    """All live allocations of a fake device of `total` bytes."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.used = 0
        self._starts: list[int] = []
        self._live: dict[int, weakref.ref[Memory]] = {}

    def alloc(self, shape: tuple[int, ...], dtype: DTypeLike, *, mapped: bool = False) -> Array:
        """Zeroed memory; only that which is `mapped` can be read by the host. DeviceError when there is not enough."""
        dt: np.dtype[Any] = np.dtype(dtype)
        count = int(np.prod(shape, dtype=np.int64))
        nbytes = count * dt.itemsize
        if not mapped and nbytes > self.total - self.used:
            raise DeviceError(f"not enough GPU memory: {nbytes} bytes needed, {self.total - self.used} are free")
        memory = Memory(max(nbytes, 1))
        taken = 0 if mapped else nbytes
        self.used += taken
        bisect.insort(self._starts, memory.ptr)
        self._live[memory.ptr] = weakref.ref(memory)
        weakref.finalize(memory, self._freed, memory.ptr, taken)
        host = np.ndarray(shape, dt, memory.bytes.data)
        return Array(memory.ptr, shape, dt, host.strides, memory, host if mapped else None)

    def view(self, array: Array, what: str) -> NDArray[Any]:
        """The array's memory. DeviceError when it does not lie inside one live allocation; `what` says whose it is."""
        below, above = _reach(array)
        at = bisect.bisect_right(self._starts, array.ptr + below) - 1
        memory = self._live[self._starts[at]]() if at >= 0 else None
        if memory is None or array.ptr + above > memory.ptr + memory.bytes.nbytes:
            raise DeviceError(
                f"{what} at {array.ptr:#x}, shape {array.shape} of {array.dtype}, lies outside of every allocation"
            )
        return np.ndarray(array.shape, array.dtype, memory.bytes.data, array.ptr - memory.ptr, array.strides)

    def _freed(self, ptr: int, nbytes: int) -> None:
        self.used -= nbytes
        del self._live[ptr]
        self._starts.remove(ptr)


def _reach(array: Array) -> tuple[int, int]:
    """Offsets in bytes of the array's first byte and of the one behind its last."""
    if 0 in array.shape:
        return 0, 0
    steps = [(n - 1) * s for n, s in zip(array.shape, array.strides, strict=True)]
    return sum(s for s in steps if s < 0), sum(s for s in steps if s > 0) + array.dtype.itemsize
