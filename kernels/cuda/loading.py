"""Weights on their way to a device: bf16, padded, a piece at a time.

Files are memory-mapped and may be larger than the host's memory: no more than a piece is ever widened, narrowed or copied at once.
Random weights are made where they are wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from graphrt.kernels.array import Array
from graphrt.kernels.cuda.driver import Driver
from graphrt.kernels.cuda.fill import fill_bell
from graphrt.kernels.random_tensor import RandomTensor

BF16 = np.dtype(ml_dtypes.bfloat16)
PIECE = 64 << 20  # bytes
PAD_N, PAD_K = 8, 32  # rows and columns are padded to multiples of these


def padded(n: int, k: int) -> tuple[int, int]:
    """The shape in which a weight [n, k] lies on the device."""
    return -(-n // PAD_N) * PAD_N, -(-k // PAD_K) * PAD_K


def check_weight_dtype(dtype: np.dtype[Any]) -> None:
    """TypeError for an element type that is not loaded."""
    if dtype not in (np.dtype(np.float32), BF16, np.dtype(np.float16)):
        raise TypeError(f"weights of type {dtype}: must be float32, float16 or bfloat16")


def upload_matrix(driver: Driver, parts: Sequence[NDArray[Any]], shape: tuple[int, int]) -> Array:
    """Parts [n_i, k], stacked, as bf16 in a zeroed array of `shape`."""
    out = driver.alloc(shape, BF16)
    at = 0
    for part in parts:
        check_weight_dtype(part.dtype)
        k = part.shape[1]
        if isinstance(part, RandomTensor):
            if k == shape[1]:
                driver.launch(fill_bell(driver, out[at : at + len(part)], part.seed, part.std, part.mean))
                at += len(part)
                continue
            part = np.asarray(part)
        step = max(PIECE // (2 * shape[1]), 1)
        for begin in range(0, part.shape[0], step):
            piece = part[begin : begin + step]
            rows = len(piece)
            if k == shape[1]:
                packed = piece.astype(BF16, copy=False)
            else:
                packed = np.zeros((rows, shape[1]), BF16)
                packed[:, :k] = piece
            driver.upload(out[at : at + rows], packed)
            at += rows
    return out


def upload_vector(driver: Driver, vector: NDArray[Any]) -> Array:
    """A float32 copy of any shape."""
    check_weight_dtype(vector.dtype)
    out = driver.alloc(vector.shape, np.float32)
    driver.upload(out, vector.astype(np.float32, copy=False))
    return out
