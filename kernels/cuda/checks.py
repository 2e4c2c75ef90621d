"""What the call builders demand of their arrays."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from graphrt.kernels.array import Array

BF16 = np.dtype(ml_dtypes.bfloat16)
F32 = np.dtype(np.float32)


def contiguous(*arrays: Array | None) -> None:
    """ValueError for an array with gaps: these kernels take an address and extents."""
    for a in arrays:
        if a is None:
            continue
        step = a.dtype.itemsize
        for extent, stride in zip(a.shape[::-1], a.strides[::-1], strict=True):
            if extent > 1 and stride != step:
                raise ValueError(f"array of shape {a.shape} with strides {a.strides} must be contiguous")
            step *= extent


def typed(a: Array, *types: np.dtype, what: str) -> None:
    """TypeError when the array has none of these element types."""
    if a.dtype not in types:
        raise TypeError(f"{what} of type {a.dtype}: must be {' or '.join(str(t) for t in types)}")


def shaped(a: Array, shape: tuple[int, ...], what: str) -> None:
    """ValueError when the array has another shape."""
    if a.shape != shape:
        raise ValueError(f"{what} of shape {a.shape}: must be {shape}")
