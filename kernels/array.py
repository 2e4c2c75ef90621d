"""A frozen view of memory: the only thing that model code passes to operations.

The one clever thing: a view knows nothing but where it lies and how it is laid out, so that the same model code addresses NumPy
memory and device memory. There is no arithmetic on it; whatever computes is an operation of `Ops`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

Index = int | slice


@dataclass(frozen=True, slots=True)
class Array:
    """A strided view.

    ptr: address of the first element. shape: extents. dtype: element type. strides: bytes between neighbours, one per axis.
    owner: whatever keeps the memory alive. host: the same view as a NumPy array, on backends whose memory the host can read.
    """

    ptr: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    strides: tuple[int, ...]
    owner: object = field(repr=False, compare=False)
    host: NDArray[Any] | None = field(default=None, repr=False, compare=False)

    def __getitem__(self, key: Index | tuple[Index, ...]) -> Array:
        """A view of part of this one: integers and slices of step 1 on the leading axes. IndexError when out of range."""
        keys = key if isinstance(key, tuple) else (key,)
        if len(keys) > len(self.shape):
            raise IndexError(f"{len(keys)} indices for an array of shape {self.shape}")
        offset, shape, strides = 0, [], []
        for axis, (k, extent, stride) in enumerate(zip(keys, self.shape, self.strides, strict=False)):
            if isinstance(k, slice):
                start, stop, step = k.indices(extent)
                if step != 1:
                    raise IndexError(f"axis {axis}: only slices of step 1, not {k}")
                offset += start * stride
                shape.append(max(stop - start, 0))
                strides.append(stride)
            else:
                if not -extent <= k < extent:
                    raise IndexError(f"axis {axis}: index {k} outside 0..{extent - 1}")
                offset += (k % extent) * stride
        n = len(keys)
        return Array(
            self.ptr + offset,
            (*shape, *self.shape[n:]),
            self.dtype,
            (*strides, *self.strides[n:]),
            self.owner,
            None if self.host is None else self.host[key],
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, gaps not counted."""
        n = self.dtype.itemsize
        for extent in self.shape:
            n *= extent
        return n

    @property
    def np(self) -> NDArray[Any]:
        """The NumPy view; TypeError for memory that the host cannot read."""
        if self.host is None:
            raise TypeError(f"array of shape {self.shape} lies in device memory")
        return self.host


def host_array(a: NDArray[Any]) -> Array:
    """An `Array` over NumPy memory, without a copy."""
    return Array(a.ctypes.data, a.shape, a.dtype, a.strides, a, a)


def host_empty(shape: tuple[int, ...], dtype: DTypeLike = np.float32) -> Array:
    """Fresh NumPy memory, uninitialised."""
    return host_array(np.empty(shape, dtype))
