"""Random values made on the device: weights for a model that exists only to be timed or compared."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from graphrt.kernels.array import Array
from graphrt.kernels.cuda.driver import Driver, KernelCall
from graphrt.kernels.cuda.jit import KernelSpec

THREADS = 256
BLOCKS_PER_SM = 8


def fill_bell(driver: Driver, out: Array, seed: int, std: float, mean: float = 0.0) -> KernelCall:
    """out[i] = mean + std · b, b nearly normal and a function of (seed, i). out: float32 or bfloat16, contiguous."""
    bits = 8 * out.dtype.itemsize
    if out.dtype not in (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)):
        raise TypeError(f"fill: {out.dtype} must be float32 or bfloat16")
    count = np.uint64(out.nbytes // out.dtype.itemsize)
    return KernelCall(
        KernelSpec.of("fill.cu", "fill_bell", bits=bits),
        (driver.sm_count * BLOCKS_PER_SM, 1, 1),
        (THREADS, 1, 1),
        (out, count, np.uint64(seed), np.float32(mean), np.float32(std)),
    )


def bell(n: int, seed: int) -> NDArray[np.float32]:
    """The first n values for mean 0 and standard deviation 1."""
    with np.errstate(over="ignore"):
        h = np.arange(n, dtype=np.uint64) + np.uint64(seed) * np.uint64(0x9E3779B97F4A7C15)
        h ^= h >> np.uint64(33)
        h *= np.uint64(0xFF51AFD7ED558CCD)
        h ^= h >> np.uint64(33)
        h *= np.uint64(0xC4CEB9FE1A85EC53)
        h ^= h >> np.uint64(33)
    words = h.view(np.uint16).reshape(-1, 4).astype(np.int64)
    return (words.sum(axis=1) - 131070).astype(np.float32) * np.float32(1 / np.float32(37837.2))


def fill_bell_twin(call: KernelCall, args: list[Any]) -> None:
    """Writes `out`."""
    out, n, seed, mean, std = args
    out.reshape(-1)[:] = (mean + std * bell(int(n), int(seed))).astype(out.dtype)


TWINS = {"fill_bell": fill_bell_twin}


def representative_specs() -> list[KernelSpec]:
    """Both element types."""
    return [KernelSpec.of("fill.cu", "fill_bell", bits=bits) for bits in (16, 32)]
